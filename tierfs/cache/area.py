"""All dirty contents of a mount: making, opening, converting, and finding them again after a restart.

Trio thread only; file system calls run in the write tier's workers. See ``dirty`` for what lies where, and
``staging`` for the order of the steps.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import trio

from tierfs.cache import device, direct_writes
from tierfs.cache.dirty import BaseReader, DirtyFiles, Drain, Entry, create_file
from tierfs.cache.sidecar import BadSidecar, Sidecar
from tierfs.cache.spares import Spare, Spares
from tierfs.cache.staging import Staging
from tierfs.cache.tier import Tier
from tierfs.errors import AlreadyExists, TierFailed
from tierfs.log import get_logger
from tierfs.types import ContentId, ObjectRef

_log = get_logger(__name__)

__all__ = ["DirtyContent", "Drain", "Staged", "StagingArea"]


@dataclass(frozen=True, slots=True)
class DirtyContent:
    """A content in the write tier that is not known to be in the store."""

    content_id: ContentId
    size_bytes: int
    allocated_bytes: int
    base: ObjectRef | None
    mtime_ns: int
    """When its file was last written; 0 if that cannot be said."""


@dataclass(frozen=True, slots=True)
class Staged:
    """How far dirty contents have come on this node. Bytes on the device, not of files."""

    memory_files: int = 0
    memory_bytes: int = 0
    """Of files that were written since they were synced last: a power cut may cost some of that."""
    disk_files: int = 0
    disk_bytes: int = 0
    """Of files that have been synced since."""


class StagingArea:
    """See the module docstring. One ``Staging`` object per open content."""

    def __init__(self, tier: Tier, reader: BaseReader, *, dirty_limit_bytes: int = 0) -> None:
        self.tier = tier
        self.dirty = DirtyFiles(tier, reader, dirty_limit_bytes=dirty_limit_bytes)
        self.spares = Spares(self.dirty)
        self._open: dict[ContentId, Staging] = {}
        self._opening: dict[ContentId, trio.Lock] = {}

    async def recover(self) -> None:
        """Find what an earlier run left. Raises ``TierFailed``: dirty bytes must not be overlooked."""
        try:
            found = await trio.to_thread.run_sync(_scan, self.dirty.directory, limiter=self.tier.io)
        except OSError as error:
            raise TierFailed(f"{self.dirty.directory}: {error.strerror}") from error
        for entry in found.values():
            entry.is_found = True
        self.dirty.entries.update(found)
        if self.tier.index_lost or not self.tier.index.was_clean:
            for content_id, entry in found.items():
                if entry.allocated_bytes:
                    # Whether anybody has synced it is not known any more.
                    self.dirty.note_written(content_id)
        self.tier.ledger.dirty_bytes = sum(entry.allocated_bytes for entry in found.values())

    async def close(self) -> None:
        """Last call: converted contents become durable, so that a reboot does not cost what was written.

        Others are synced with the file system that the tier is on.
        """
        for content_id, entry in list(self.dirty.entries.items()):
            if not entry.unsynced or entry.base is None:
                continue
            try:
                staging = await self.open(content_id)
                if staging is not None:
                    await staging.sync()
            except TierFailed as error:
                _log.error("dirty content not synced", content=content_id.hex(), reason=str(error))
        for staging in list(self._open.values()):
            await staging.close()
        self.spares.close()
        self.dirty.files.close()

    def staged(self) -> Staged:
        """See ``Cache.staged``."""
        dirty = self.dirty
        return Staged(
            memory_files=dirty.unsynced_files,
            memory_bytes=dirty.unsynced_bytes,
            disk_files=len(dirty.entries) - dirty.unsynced_files,
            disk_bytes=self.tier.ledger.dirty_bytes - dirty.unsynced_bytes,
        )

    def contents(self) -> list[DirtyContent]:
        found = []
        for content_id, entry in self.dirty.entries.items():
            staging = self._opened(content_id)
            size = entry.size_bytes if staging is None else staging.size_bytes
            mtime_ns = self._mtime_ns(content_id)
            found.append(DirtyContent(content_id, size, entry.allocated_bytes, entry.base, mtime_ns))
        return found

    def note_mtime(self, content_id: ContentId, mtime_ns: int) -> None:
        """See ``Cache.note_mtime``."""
        staging = self._opened(content_id)
        try:
            if staging is not None:
                direct_writes.set_mtime(staging, mtime_ns)
            else:
                os.utime(self.dirty.file_or_path(content_id), ns=(mtime_ns, mtime_ns))
        except OSError:
            return  # not written yet, or the file system refuses: then times are as old as the record

    def _mtime_ns(self, content_id: ContentId) -> int:
        try:
            return os.stat(self.dirty.path_of(content_id)).st_mtime_ns
        except OSError:
            return 0

    def _opened(self, content_id: ContentId) -> Staging | None:
        staging = self._open.get(content_id)
        if staging is not None and staging.is_closed:
            del self._open[content_id]
            return None
        return staging

    async def create(self, content_id: ContentId) -> Staging:
        """See ``Cache.create_staging``."""
        self._refuse_known(content_id)
        self.dirty.entries[content_id] = Entry(0, 0, None, named=False)
        fd = self.dirty.create_now(content_id)
        try:
            if fd is None:
                fd = await self.dirty.call(create_file, self.dirty.path_of(content_id))
        except BaseException:
            del self.dirty.entries[content_id]
            raise
        self.dirty.files.add(content_id, fd)
        staging = self._open[content_id] = Staging(self.dirty, content_id, 0)
        return staging

    def adopt(self, spare: Spare, mtime_ns: int) -> Staging:
        """See ``Cache.adopt_spare``."""
        content_id = spare.content_id
        self._refuse_known(content_id)
        self.dirty.entries[content_id] = Entry(0, 0, None, named=self.spares.is_named(spare))
        staging = self._open[content_id] = Staging(self.dirty, content_id, 0)
        direct_writes.note_begun(staging, mtime_ns)
        self.spares.look()
        return staging

    async def open(self, content_id: ContentId) -> Staging | None:
        """See ``Cache.open_staging``."""
        staging = self._opened(content_id)
        entry = self.dirty.entries.get(content_id)
        if staging is not None or entry is None:
            await trio.lowlevel.checkpoint()
            return staging
        lock = self._opening.setdefault(content_id, trio.Lock())
        try:
            async with lock:
                staging = self._opened(content_id)
                if staging is None and self.dirty.entries.get(content_id) is entry:
                    sidecar = None
                    if entry.base is not None:
                        sidecar = await self._reopen_sidecar(content_id)
                    staging = self._open[content_id] = Staging(
                        self.dirty, content_id, entry.size_bytes, sidecar)
                return staging
        finally:
            if not lock.statistics().tasks_waiting:
                self._opening.pop(content_id, None)

    async def _reopen_sidecar(self, content_id: ContentId) -> Sidecar:
        try:
            return await self.dirty.call(
                _reopen, self.dirty.directory, content_id, self.dirty.path_of(content_id))
        except BadSidecar as error:
            raise TierFailed(str(error)) from error

    async def convert(self, ref: ObjectRef, content_id: ContentId) -> Staging:
        """See ``Cache.convert``."""
        self._refuse_known(content_id)
        words = await self.tier.surrender(ref.content_id)
        try:
            self._refuse_known(content_id)
            entry = self.dirty.entries[content_id] = Entry(ref.size_bytes, 0, ref, named=True)
            self.dirty.note_written(content_id)
            source = device.object_path(self.tier.root, ref.content_id) if words else None
            stale = self.tier.files.detach(ref.content_id)
            try:
                with trio.CancelScope(shield=True):
                    sidecar, allocated, entry.sidecar_bytes = await self.dirty.call(
                        _convert, self.dirty.directory, content_id, ref, source, words, stale)
            except BaseException:
                self.dirty.drop(content_id)
                raise
        finally:
            self.tier.end_removal(ref.content_id)
        self.dirty.set_allocated(content_id, allocated)
        staging = self._open[content_id] = Staging(self.dirty, content_id, ref.size_bytes, sidecar)
        return staging

    def _refuse_known(self, content_id: ContentId) -> None:
        if content_id in self.dirty.entries:
            raise AlreadyExists(f"dirty content {content_id.hex()} exists already")


def _scan(directory: str) -> dict[ContentId, Entry]:
    """Worker thread."""
    names = set(os.listdir(directory))
    found: dict[ContentId, Entry] = {}
    for name in sorted(names):
        stem, dot, suffix = name.partition(".")
        path = f"{directory}/{name}"
        try:
            content_id = ContentId(bytes.fromhex(stem))
        except ValueError:
            continue
        if len(content_id) != 16:
            continue
        if suffix.endswith("tmp"):
            os.unlink(path)
        elif not dot:
            info = os.stat(path)
            found[content_id] = Entry(info.st_size, info.st_blocks * 512, None, named=True)
        elif suffix == "base":
            try:
                sidecar, _ = Sidecar.open(path)
            except BadSidecar as error:
                _log.error("dirty content with a damaged sidecar; kept aside", path=path, reason=str(error))
                continue
            extra = sidecar.allocated_bytes
            sidecar.close()
            size, allocated = sidecar.base.size_bytes, 0
            if f"{stem}.part" in names:
                info = os.stat(f"{directory}/{stem}.part")
                size, allocated = info.st_size, info.st_blocks * 512
            found[content_id] = Entry(size, allocated, sidecar.base, named=True, sidecar_bytes=extra)
        elif suffix == "part" and f"{stem}.base" not in names:
            _log.error("dirty bytes without their sidecar; kept aside", path=path)
    return found


def _convert(directory: str, content_id: ContentId, base: ObjectRef, source: str | None,
             words: dict[int, int], stale_fd: int | None) -> tuple[Sidecar, int, int]:
    """Worker thread: (sidecar, bytes of the data file and of the sidecar on the device).

    See ``staging`` for the order of the steps.
    """
    if stale_fd is not None:
        os.close(stale_fd)
    name = f"{directory}/{content_id.hex()}"
    part = f"{name}.part"
    # A sidecar without a .part says that everything comes from the base: right, should we stop here.
    sidecar = Sidecar.create(f"{name}.base", base, device.boot_id(), limit_bytes=base.size_bytes,
                             present=words, changed={}, durable={})
    try:
        if source is not None:
            try:
                os.rename(source, part)
            except FileNotFoundError:
                sidecar.close()
                sidecar = Sidecar.create(f"{name}.base", base, device.boot_id(), limit_bytes=base.size_bytes,
                                         present={}, changed={}, durable={})
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(fd, base.size_bytes)
            allocated = os.fstat(fd).st_blocks * 512
        finally:
            os.close(fd)
        device.sync_directory(directory)
    except BaseException:
        sidecar.close()
        raise
    return sidecar, allocated, sidecar.allocated_bytes


def _reopen(directory: str, content_id: ContentId, part: str) -> Sidecar:
    """Worker thread: the sidecar, its words true for this boot."""
    path = f"{directory}/{content_id.hex()}.base"
    sidecar, boot = Sidecar.open(path)
    now = device.boot_id()
    try:
        size_bytes = os.stat(part).st_size
        part_is_there = True
    except FileNotFoundError:
        part_is_there = False
    if part_is_there and size_bytes < sidecar.limit_bytes:
        sidecar.set_limit(size_bytes)  # a truncate was cut short
    if boot == now and part_is_there:
        return sidecar
    durable = sidecar.words()[2]
    limit, base = sidecar.limit_bytes, sidecar.base
    sidecar.close()
    if not part_is_there:
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.ftruncate(fd, limit)
        os.close(fd)
        durable = {}
    # What was present but not durable may be anything now: it is the base again, as if never written.
    # Which of the rest was changed is not certain either.
    fresh = Sidecar.create(path, base, now, limit_bytes=limit, present=durable, changed=durable,
                           durable=durable)
    device.sync_directory(directory)
    return fresh
