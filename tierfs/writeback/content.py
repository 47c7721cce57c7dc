"""The bytes of one inode: clean in the cache, or local in a staging file. See the package docstring.

A ``FileContent`` exists while somebody uses the inode: an open handle or the publisher (``content_table``
counts them). It moves between two states only under its ``lock``:

* *clean*: ``ref`` names an object version; reads go to the cache.
* *local*: ``staging`` holds bytes that the store does not have; reads and writes go there.

``local_copy`` makes it local, ``objects`` clean again. ``writers`` counts handles open for writing and
truncations under way. The publisher turns a local content clean only while there are none; it announces
that by ``sealing``, so that a writer who comes in between waits for the lock instead of writing into a file
that is about to become immutable.

Trio thread only. Reads take no lock: they look again at where the bytes are after they waited.

Raises: ``TierFailed`` from a read of bytes that are nowhere, and what ``Cache.read`` and ``Staging.read``
raise.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

from tierfs.cache.live import LiveFile
from tierfs.cache.reading import Place
from tierfs.cache.residency import Cache
from tierfs.cache.staging import Staging
from tierfs.errors import ObjectTooLarge, TierFailed
from tierfs.store.base import MAX_OBJECT_BYTES
from tierfs.types import ContentId, ObjectRef
from tierfs.writeback.under_way import WritesUnderWay


@dataclass(slots=True, eq=False)
class FileContent:
    """See the module docstring. Sizes in bytes, times in nanoseconds."""

    ino: int
    content_id: ContentId
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    local: bool
    ref: ObjectRef | None = None
    staging: Staging | None = None
    users: int = 0
    writers: int = 0
    passed_through: int = 0
    """Opens whose reads and writes go to the file in the tier: while there are any it stays the same file."""
    lent: ContentId | None = None
    """The content whose file in the tier may not go, because it is passed through."""
    written_directly: bool = False
    """Bytes have been changed through such an open since the last ``chmod``."""
    live: LiveFile | None = None
    """Where such opens write, if that is not the staging file."""
    passed_file: tuple[int, int] | None = None
    """(device, inode) of the file that was lent last."""
    unlinked: bool = False
    linkable: bool = False
    """``unlinked`` because it has not got a name yet: its bytes are kept until the inode is forgotten."""
    kept_for_readers: int | None = None
    """The generation of the dirty row that is in the store; its staging file stays for who has it open."""
    unsaved: bool = False
    """Size or times here are newer than in the namespace."""
    sealing: bool = False
    lock: trio.Lock = field(default_factory=trio.Lock)
    under_way: WritesUnderWay = field(default_factory=WritesUnderWay)

    def read_nowait(self, cache: Cache, offset: int, length: int) -> bytes | None:
        """The bytes if they can be had without waiting, else None. Never blocks."""
        length = min(length, self.size_bytes - offset)
        if length <= 0:
            return b""
        if self.staging is not None:
            return self.staging.read_nowait(offset, length)
        if self.ref is not None:
            return cache.read_nowait(self.ref, offset, length)
        return None

    def place(self, cache: Cache, offset: int, length: int) -> Place | None:
        """Where clean bytes can be read; see ``Cache.place``."""
        if self.staging is not None or self.ref is None:
            return None
        return cache.place(self.ref, offset, min(length, self.size_bytes - offset))

    async def bring(self, cache: Cache, offset: int, length: int) -> None:
        """Wait until clean bytes have been fetched."""
        length = min(length, self.size_bytes - offset)
        if self.staging is None and self.ref is not None and length > 0:
            await cache.bring(self.ref, offset, length)

    async def read(self, cache: Cache, offset: int, length: int) -> bytes:
        """Up to ``length`` bytes; fewer only at the end of the file."""
        while (clipped := min(length, self.size_bytes - offset)) > 0:
            staging = self.staging
            if staging is None:
                break
            try:
                return await staging.read(offset, clipped)
            except TierFailed:
                if self.staging is staging:
                    raise
                # It became a clean copy, or was replaced, while this read was on its way.
        if clipped <= 0:
            return b""
        if self.ref is not None:
            return await cache.read(self.ref, offset, clipped)
        raise TierFailed(f"inode {self.ino}: its {self.size_bytes} bytes are neither here nor in the store")


def check_size(size_bytes: int) -> None:
    """Raises ``ObjectTooLarge``."""
    if size_bytes > MAX_OBJECT_BYTES:
        raise ObjectTooLarge(f"{size_bytes} bytes are more than an object can hold ({MAX_OBJECT_BYTES})")
