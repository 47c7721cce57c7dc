"""Live files: what applications have open of a RAM tier when somebody comes to write.

The kernel lets all opens of an inode use one file (see ``lending``). So whoever writes to a clean file that
others read from a RAM tier writes into a file that no power cut survives. It leaves the tier then, and is a
*live* file beside the staging file in the write tier: the staging file gets its bytes at every fsync and
close, and before anything is read or published from there (*pull*); what the engine itself changes in the
staging file, it changes in the live file as well (*push*). With the last of these opens it goes.

Its name is ``RAM TIER/dirty/<inode>.live``, so that another engine finds it. One that nobody has open any
more, because the mount died, holds nothing that fsync or close has promised to keep: it is removed.

Trio thread only; copies run in worker threads.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tierfs.cache import device, holes
from tierfs.cache.staging import Staging
from tierfs.cache.tier import Tier
from tierfs.log import get_logger
from tierfs.types import ContentId

_log = get_logger(__name__)

_SUFFIX = ".live"


class LiveFile:
    """See the module docstring."""

    def __init__(self, tier: Tier, path: str) -> None:
        """Raises ``OSError``."""
        self._tier = tier
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        info = os.fstat(self._fd)
        self.identity = info.st_dev, info.st_ino
        self._seen = info.st_size, info.st_mtime_ns
        self._counted_bytes = 0
        self._in_use = 0
        self._is_removed = False
        self.is_behind = True
        """The staging file may not have all that is here."""
        self._count(info.st_blocks * 512)

    def _count(self, nbytes: int) -> None:
        self._tier.ledger.dirty_bytes += nbytes - self._counted_bytes
        self._counted_bytes = nbytes
        self._tier.note_change()

    def notice(self) -> tuple[int, int] | None:
        """(size, mtime in ns) if it has been changed since the last look. Blocks as long as fstat(2) does."""
        info = os.fstat(self._fd)
        seen = info.st_size, info.st_mtime_ns
        if seen == self._seen:
            return None
        self._seen = seen
        self.is_behind = True
        self._count(info.st_blocks * 512)
        return seen

    async def pull(self, staging: Staging) -> None:
        """All that was here before the call is in the staging file. Raises what ``Staging.write`` raises."""
        self.is_behind = False
        done = False
        with self._used():
            try:
                size = os.fstat(self._fd).st_size
                await staging.replace(size, lambda fd: _copy(self._fd, fd, 0, size))
                done = True
            finally:
                self.is_behind = self.is_behind or not done

    async def push(self, staging: Staging, offset_bytes: int, end_bytes: int) -> None:
        """That range of the staging file, and its size, are here as well."""
        size = staging.size_bytes

        def work(fd: int) -> None:
            os.ftruncate(self._fd, size)
            _copy(fd, self._fd, offset_bytes, min(end_bytes, size))

        with self._used():
            await staging.with_file(work)
            info = os.fstat(self._fd)
            self._seen = info.st_size, info.st_mtime_ns
            self._count(info.st_blocks * 512)

    def set_mtime(self, mtime_ns: int) -> None:
        """Raises ``OSError``."""
        if self._seen[1] != mtime_ns:
            os.utime(self._fd, ns=(mtime_ns, mtime_ns))
            self._seen = self._seen[0], mtime_ns
            self.is_behind = True

    def remove(self) -> None:
        """Nobody has it open any more."""
        self._is_removed = True
        device.unlink_if_there(self._path)
        if not self._in_use:
            self._close()

    def _close(self) -> None:
        self._count(0)
        os.close(self._fd)

    @contextmanager
    def _used(self) -> Iterator[None]:
        """Its descriptor is closed after the last worker is through."""
        self._in_use += 1
        try:
            yield
        finally:
            self._in_use -= 1
            if self._is_removed and not self._in_use:
                self._close()


def _copy(source: int, target: int, offset_bytes: int, end_bytes: int) -> None:
    """Worker thread. Raises ``OSError``."""
    if end_bytes <= offset_bytes:
        return
    length = end_bytes - offset_bytes
    copied = holes.copy(source, offset_bytes, target, offset_bytes, length)
    while copied < length:
        # The source has become shorter, or there was an error: the next call says which.
        data = os.pread(source, 1 << 20, offset_bytes + copied)
        if not data:
            return
        device.pwrite_all(target, data[: length - copied], offset_bytes + copied)
        copied += len(data)


def can_be_live(tier: Tier) -> bool:
    """Its file system is memory: a file can be moved and removed on the trio thread."""
    return tier.setting.volatile


async def take(
    tiers: Sequence[Tier], content_id: ContentId, identity: tuple[int, int], ino: int
) -> LiveFile | None:
    """The file that applications have open of that content leaves its tier. None: no tier has it."""
    for tier in tiers:
        path = device.object_path(tier.root, content_id)
        try:
            if not can_be_live(tier) or device.identity(path) != identity:
                continue
        except OSError:
            continue
        words = await tier.surrender(content_id)
        try:
            stale = tier.files.detach(content_id)
            if stale is not None:
                os.close(stale)
            if not words:
                return None
            target = _path(tier, ino)
            os.rename(path, target)
            return LiveFile(tier, target)
        except OSError as error:
            _log.error("a file in memory cannot be taken over", path=path, reason=str(error))
            return None
        finally:
            tier.end_removal(content_id)
    return None


def _path(tier: Tier, ino: int) -> str:
    return f"{tier.root}/dirty/{ino:x}{_SUFFIX}"


def find(tiers: Sequence[Tier], ino: int) -> LiveFile | None:
    """The live file that an earlier engine has left for an inode that is still open."""
    for tier in tiers:
        if can_be_live(tier) and os.path.exists(_path(tier, ino)):
            return LiveFile(tier, _path(tier, ino))
    return None


def remove_all_but(tiers: Sequence[Tier], inos: Container[int]) -> None:
    """Those of inodes that nobody has open go."""
    for tier in tiers:
        if not can_be_live(tier):
            continue
        for path in Path(tier.root, "dirty").glob(f"*{_SUFFIX}"):
            if int(path.stem, 16) not in inos:
                _log.warning("bytes in memory that were not closed are lost", inode=path.stem)
                path.unlink()
