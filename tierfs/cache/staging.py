"""Staging: the bytes of one file that the store does not have yet. Signatures; see below for the protocol."""

from __future__ import annotations

from collections.abc import Iterator

from tierfs.types import ContentId, ObjectRef


class Staging:
    """Mutable content of one inode in the write tier. Made by ``Cache``; trio thread only.

    One object per content id: ``Cache.open_staging`` returns the same one while it is open.
    """

    content_id: ContentId
    base: ObjectRef | None
    """What absent blocks are filled from; None for a file made here (nothing is absent)."""

    @property
    def size_bytes(self) -> int:
        raise NotImplementedError

    @property
    def generation(self) -> int:
        """Grows with every write and truncate. Starts anew when the process does."""
        raise NotImplementedError

    @property
    def allocated_bytes(self) -> int:
        """What the file takes on the device; holes take nothing."""
        raise NotImplementedError

    def read_nowait(self, offset_bytes: int, length_bytes: int) -> bytes | None:
        """The bytes (clipped at the size), or None if they cannot be had without waiting."""
        raise NotImplementedError

    async def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Exactly the bytes, clipped at the size; absent blocks come from ``base``.

        Raises ``StaleContent`` or ``StoreError`` if ``base`` is needed and cannot be had, ``TierFailed`` if
        the local file cannot be read.
        """
        raise NotImplementedError

    def write_nowait(self, offset_bytes: int, data: bytes) -> bool:
        """Write all of ``data`` if that can be done without waiting; else change nothing and return False."""
        raise NotImplementedError

    async def write(self, offset_bytes: int, data: bytes) -> None:
        """Write all of ``data``; returns once it is in the page cache of the write tier.

        Raises ``TierFull`` if there is no room, nothing can be evicted and nothing drains; ``TierFailed``
        on an I/O error; ``StaleContent`` or ``StoreError`` if a block must first be filled from ``base``.
        """
        raise NotImplementedError

    async def truncate(self, size_bytes: int) -> None:
        """Set the size; what is cut off is gone, what is added reads as zeros and costs nothing."""
        raise NotImplementedError

    async def sync(self) -> None:
        """Everything written before the call is durable on the device when it returns: bytes, size, name,
        and which blocks are ours. Raises ``TierFailed``."""
        raise NotImplementedError

    async def fill(self) -> None:
        """Make every absent block local, from ``base``. Raises what ``read`` and ``write`` raise."""
        raise NotImplementedError

    def unchanged_ranges(self) -> Iterator[tuple[int, int]]:
        """(offset, length) of what is known to equal ``base`` at the same offset; for server-side copies."""
        raise NotImplementedError

    async def seal(self, ref: ObjectRef) -> bool:
        """The object ``ref`` (same content id) now holds these bytes: become an ordinary clean content.

        False, and nothing has changed, if the content was written while checksums were computed. After
        True this object is closed: read through ``Cache.read(ref)``, write through ``Cache.convert(ref)``.
        """
        raise NotImplementedError

    async def discard(self) -> None:
        """The bytes are not wanted any more: drop them, durable or not. Closes."""
        raise NotImplementedError

    async def close(self) -> None:
        """Forget the descriptor; the bytes stay, dirty, until ``seal`` or ``discard``. Idempotent."""
        raise NotImplementedError
