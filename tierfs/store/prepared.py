"""Requests that are ready to be sent by somebody else: for who reads from a store without its threads.

``prepare_get`` of a store never blocks: it may be called on the trio thread. It answers None where it cannot
help: another protocol, credentials to be asked for anew. Then ``get_range`` and ``stream`` are the way, as
they are after a prepared request that did not end as it should: they know what that means, and try again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tierfs.store.base import ObjectStore
from tierfs.store.counting import RequestMeter


@dataclass(frozen=True, slots=True)
class PreparedGet:
    """A ranged GET over plain HTTP. The message is signed: its repr is not shown."""

    host: str
    port: int
    message: bytes
    """The request with its head, to be sent within a minute."""
    connect_timeout_s: float
    read_timeout_s: float
    meter: RequestMeter
    """Counts it, once it is sent and once its body has come."""

    def __repr__(self) -> str:
        return f"PreparedGet({self.host!r}, {self.port})"


class PrepareGet(Protocol):
    """Of a store that has it."""

    def __call__(
        self, key: str, offset_bytes: int, length_bytes: int, *, etag: str | None, version_id: str | None
    ) -> PreparedGet | None: ...


def way_of(store: ObjectStore) -> PrepareGet | None:
    """Its ``prepare_get``, if it has one. What wraps a store has none unless it says so."""
    found: PrepareGet | None = getattr(store, "prepare_get", None)
    return found
