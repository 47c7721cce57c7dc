"""Which bytes are local: the facade of the cache. Trio thread only."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tierfs.cache.staging import Staging
from tierfs.config import Settings
from tierfs.metrics import Metrics
from tierfs.store.base import ObjectStore
from tierfs.types import ContentId, ObjectRef

Drain = Callable[[], Awaitable[bool]]
"""Waits until some dirty content became clean; False if nothing drains (store down, nothing to do)."""


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One tier as ``status`` shows it. Bytes on the device, not of files."""

    name: str
    path: str
    volatile: bool
    capacity_bytes: int
    used_bytes: int
    """Everything the tier has on its device: clean, dirty, reserved for fetches under way, its own index."""
    clean_bytes: int
    dirty_bytes: int
    pinned_bytes: int
    hits: int
    misses: int
    hit_bytes: int
    state: str
    """``ok``, ``full`` (bypassed for lack of space) or ``failing`` (bypassed after an I/O error)."""
    reason: str
    """Why it is not ``ok``; empty if it is."""


@dataclass(frozen=True, slots=True)
class DirtyContent:
    """A content in the write tier that is not known to be in the store."""

    content_id: ContentId
    size_bytes: int
    allocated_bytes: int
    base: ObjectRef | None


class Cache:
    """See the package docstring."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: Settings,
        store: ObjectStore,
        metrics: Metrics,
        mount_id: str,
        *,
        now_ns: Callable[[], int] = time.time_ns,
        keep_volatile: bool = False,
    ) -> AsyncIterator[Cache]:
        """Open every tier, run the cache's background tasks, and close it all again on the way out.

        Raises ``FormatError`` for a tier of a newer version, ``TierFailed`` if the write tier cannot be
        used or belongs to a running mount. Any other tier that cannot be used is bypassed.
        ``keep_volatile``: leave RAM tiers behind on a clean exit (they are dropped otherwise).
        """
        raise NotImplementedError
        yield

    # reading

    def read_nowait(self, ref: ObjectRef, offset_bytes: int, length_bytes: int) -> bytes | None:
        """The bytes (clipped at the size), or None if they cannot be had without waiting."""
        raise NotImplementedError

    async def read(self, ref: ObjectRef, offset_bytes: int, length_bytes: int) -> bytes:
        """Exactly the bytes, clipped at ``ref.size_bytes``; what is not local is fetched.

        Raises ``StaleContent`` if that version of the object is gone, or another ``StoreError``. Trouble
        with a tier is never an error here.
        """
        raise NotImplementedError

    async def prefetch(self, ref: ObjectRef, offset_bytes: int, length_bytes: int) -> int:
        """Make a range local; returns the bytes fetched for it by this call. Behind every ``read``.

        What is local or being fetched already is not fetched again; what is being fetched is waited for.
        Raises what ``read`` raises.
        """
        raise NotImplementedError

    # what is local

    def resident_bytes(self, content: ObjectRef | ContentId) -> dict[str, int]:
        """Bytes of that content by tier name; tiers with none are left out."""
        raise NotImplementedError

    def is_complete(self, content_id: ContentId) -> bool:
        """Some tier has all bytes of that content."""
        raise NotImplementedError

    async def pin(self, ref: ObjectRef, tier: str | None = None) -> None:
        """Fetch all of it into that tier (None: the fastest that can hold it) and keep it there.

        Raises ``TierFull`` if it cannot fit, ``InvalidArgument`` if there is no such tier, and what
        ``read`` raises. A pin survives restarts.
        """
        raise NotImplementedError

    async def unpin(self, content_id: ContentId) -> None:
        """Undo ``pin`` in every tier; the bytes stay until they are evicted."""
        raise NotImplementedError

    async def evict(self, content_id: ContentId) -> int:
        """Drop clean, unpinned bytes of that content everywhere; returns how many. Dirty: 0."""
        raise NotImplementedError

    async def forget(self, content_id: ContentId) -> None:
        """The content will not be asked for again: drop its clean bytes, pinned or not. Dirty ones stay."""
        raise NotImplementedError

    def status(self) -> list[TierStatus]:
        """Every tier, fast to slow. With no tier configured, the staging area alone."""
        raise NotImplementedError

    # what is written here

    def set_drain(self, drain: Drain) -> None:
        """How a writer waits for room when the write tier is full of dirty data. Given by write-back."""
        raise NotImplementedError

    async def create_staging(self, content_id: ContentId) -> Staging:
        """A new, empty dirty content. Raises ``TierFull``, ``TierFailed``, ``AlreadyExists``."""
        raise NotImplementedError

    async def convert(self, ref: ObjectRef, content_id: ContentId) -> Staging:
        """A new dirty content that starts with the bytes of ``ref`` (its ``base``), without copying them.

        The local file of ``ref`` in the write tier becomes the staging file: its clean copy there is gone.
        """
        raise NotImplementedError

    async def open_staging(self, content_id: ContentId) -> Staging | None:
        """The dirty content of that id, or None if there is none."""
        raise NotImplementedError

    def dirty_contents(self) -> list[DirtyContent]:
        """Every dirty content: after a restart, what is still to be published (or discarded)."""
        raise NotImplementedError
