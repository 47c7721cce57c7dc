"""The extension module, as a type checker sees it. The only module here that imports it."""

from __future__ import annotations

from typing import Any, Protocol, cast

import tierfs_native


class Reader(Protocol):
    """See ``batch_reader.c``."""

    def read(self, paths: list[Any], results: list[Any], buffer: memoryview | None = None, start: int = 0,
             inodes: list[int] | None = None,
             reserved: list[Any] | None = None) -> tuple[int, int]: ...

    def look_up(self, paths: list[Any], results: list[Any]) -> None: ...

    def has_ring(self) -> bool: ...


class Extension(Protocol):
    """The module ``tierfs_native._batch``."""

    OUTCOMES: tuple[str, ...]

    def Names(self, path: str) -> object: ...  # noqa: N802 - a class there

    def Index(self, path: str, boot_id: bytes) -> object: ...  # noqa: N802

    def Reader(self, mountpoint: bytes, names: object, tiers: tuple[tuple[bytes, object], ...],  # noqa: N802
               owner: int, believe_capabilities: bool) -> Reader: ...

    def identify(self, path: str) -> tuple[int, int, int]: ...

    def checksum(self, data: object) -> int: ...


def extension() -> Extension | None:
    """The module, if it was built and can be loaded here."""
    return cast(Extension | None, tierfs_native.batch())


def why_missing() -> str:
    """Half a sentence for people."""
    return tierfs_native.why_missing("batch") or ""
