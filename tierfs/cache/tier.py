"""One tier: a directory of content files, an index of what they hold, and a capacity.

Trio thread only, except ``open_directory``, ``Fill.write`` and ``close_files`` (worker threads).

State shared between tasks, all of it changed without an await in between:

``presence``   what is here (see there)
``_fills``     fetches under way by content (see ``fill``); while there is one its file is not removed
``_removing``  contents whose file is being unlinked, punched or taken away; fills wait for that

Rules that keep wrong bytes out:

* A block is marked present after its bytes were written, and marked absent before they are removed.
* An extent with ``busy`` readers or fills is not evicted; so no reader sees a hole that was punched
  under it. ``read_nowait`` needs no such mark: it runs on the thread that marks.
* A hole is punched after the index without these blocks is committed; a file is made only when the
  committed index knows nothing of the content (see ``index``).
* Blocks read from the device (``read_blocks``) are compared with their checksums. ``read_nowait`` returns
  what the page cache has, unless the block is still unverified since an unclean reboot.

Trouble with the file system is never an error of a reader: the tier says None, and the caller goes
to the next tier or to the store.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from tierfs.cache import blocks, device, record
from tierfs.cache.blocks import EXTENT_BLOCKS, EXTENT_SIZE_BYTES
from tierfs.cache.eviction import Evictor, Taken
from tierfs.cache.fill import Fill, Fills
from tierfs.cache.health import TierHealth
from tierfs.cache.index import IndexWriteFailed, TierIndex
from tierfs.cache.index_batch import Batch
from tierfs.cache.index_opening import IndexDamaged
from tierfs.cache.ledger import Ledger
from tierfs.cache.policy import Unit
from tierfs.cache.presence import Presence
from tierfs.cache.record import SUM_BYTES, Extent
from tierfs.cache.segments import OWN_FILE, Segments, segment_path
from tierfs.config import TierSetting
from tierfs.log import get_logger
from tierfs.types import BLOCK_SIZE_BYTES, ContentId, ObjectRef

_log = get_logger(__name__)

_IO_THREADS = 16


class Tier:
    """See the module docstring. Sizes in bytes."""

    def __init__(self, setting: TierSetting, root: Path, lock_fd: int, index: TierIndex, *,
                 now_ns: Callable[[], int], keeps_clean: bool = True, index_lost: bool = False,
                 can_punch: bool = True) -> None:
        self.setting = setting
        self.name = setting.name
        self.root = str(root)
        self.index = index
        self.keeps_clean = keeps_clean
        """False: only for staging; nothing stays in it that is in the store."""
        self.index_lost = index_lost
        self.can_punch = can_punch
        """The file system can free a part of a file; else contents are only evicted whole."""
        self.health = TierHealth(setting.name, self.root, now_ns)
        self.ledger = Ledger(setting.capacity_bytes)
        self.segments = Segments(self.root, never_blocks=setting.volatile)
        self.presence = Presence(index, self.ledger, self.segments)
        self.files: device.OpenFiles[ContentId] = device.OpenFiles(
            lambda content_id: device.object_path(self.root, content_id), never_blocks=setting.volatile)
        self.nowait = device.NowaitReader(never_blocks=setting.volatile)
        self.io = trio.CapacityLimiter(_IO_THREADS)
        self.hits = 0
        self.misses = 0
        self.hit_bytes = 0
        self.damaged_blocks = 0
        self.needs_sweep = False
        """There are bytes on the device that nobody accounts for."""
        self.commit_wanted = trio.Event()
        self.walked = trio.Event()
        self.lock_fd = lock_fd
        self._removing: dict[ContentId, int] = {}
        self._changed = trio.lowlevel.ParkingLot()
        self._commit_lock = trio.Lock()
        self._commit_limiter = trio.CapacityLimiter(1)
        self.on_evict: Callable[[Taken], Awaitable[None]] | None = None
        """Called with each evicted unit before its bytes go: the next tier may want them."""
        self.evictor = Evictor(self)
        self._fills = Fills(self)

    # life

    @classmethod
    def open_directory(cls, setting: TierSetting, root: Path, *, now_ns: Callable[[], int],
                       keeps_clean: bool = True, boot_id: bytes | None = None) -> Tier:
        """Worker thread. Costs the same whatever the tier holds. Raises ``OSError``, ``FormatError``."""
        lock_fd = device.prepare(root)
        try:
            boot = boot_id if boot_id is not None else device.boot_id()
            path, lost = root / "index.lmdb", False
            try:
                index = TierIndex.open(path, boot, sync=not setting.volatile)
            except IndexDamaged as error:
                aside = _move_aside(path)
                _log.error("tier index is damaged; moved aside, the tier starts empty but for dirty files",
                           tier=setting.name, path=str(path), moved_to=str(aside), reason=str(error))
                index, lost = TierIndex.open(path, boot, sync=not setting.volatile), True
            return cls(setting, root, lock_fd, index, now_ns=now_ns, keeps_clean=keeps_clean,
                       index_lost=lost, can_punch=device.can_punch(root))
        except BaseException:
            os.close(lock_fd)
            raise

    def close_files(self, *, clean: bool) -> None:
        """Worker thread, last call. ``clean``: nothing is being written any more."""
        self.files.close()
        self.segments.files.close()
        if clean and not self.setting.volatile:
            try:
                device.sync_file_system(self.root)
            except OSError as error:
                _log.warning("tier not synced", tier=self.name, path=self.root, reason=str(error))
                clean = False
        self.index.close(clean=clean and not self.needs_sweep)
        os.close(self.lock_fd)

    @property
    def takes_clean(self) -> bool:
        return self.keeps_clean and self.health.usable and not self.index.damaged

    # reading

    def read_nowait(self, content_id: ContentId, offset_bytes: int, end_bytes: int) -> bytes | None:
        """The bytes, if all are here, verified, and in the page cache. Never blocks."""
        extent = None
        for number, start, stop in blocks.extent_spans(offset_bytes, end_bytes):
            extent = self.presence.extent(content_id, number)
            if extent is None:
                return None
            mask = blocks.range_mask(start, stop)
            if mask & ~extent.present or mask & extent.unverified:
                return None
        if extent is None or not self.health.readable:
            return None
        if extent.segment:
            fd = self.segments.files.get(extent.segment)
        else:
            fd = self.files.get(content_id)
        if fd is None:
            return None
        data = self.nowait.read(fd, end_bytes - offset_bytes, extent.place_bytes + offset_bytes)
        if data is not None:
            self.count_hit(content_id, offset_bytes, end_bytes)
        return data

    def sums_of(self, content_id: ContentId, offset_bytes: int, end_bytes: int) -> bytes | None:
        """Checksums of the blocks of a range, if it is whole blocks that are here, verified, in one extent
        and in a file of their own."""
        number = offset_bytes // EXTENT_SIZE_BYTES
        extent = self.presence.extent(content_id, number)
        if (extent is None or extent.segment or offset_bytes % BLOCK_SIZE_BYTES or not self.health.readable
                or (end_bytes % BLOCK_SIZE_BYTES and end_bytes != extent.size_bytes)
                or end_bytes > (number + 1) * EXTENT_SIZE_BYTES):
            return None
        mask = blocks.range_mask(offset_bytes, end_bytes)
        if mask & ~extent.present or mask & extent.unverified:
            return None
        first = offset_bytes // BLOCK_SIZE_BYTES % EXTENT_BLOCKS
        return bytes(extent.sums[first * SUM_BYTES : (first + mask.bit_count()) * SUM_BYTES])

    def count_hit(self, content_id: ContentId, offset_bytes: int, end_bytes: int) -> None:
        """A range was read from here."""
        self.hits += 1
        self.hit_bytes += end_bytes - offset_bytes
        for number in range(offset_bytes // EXTENT_SIZE_BYTES, (end_bytes - 1) // EXTENT_SIZE_BYTES + 1):
            self.ledger.policy.touch((content_id, number))

    async def read_blocks(self, content_id: ContentId, offset_bytes: int, end_bytes: int) -> bytes | None:
        """The bytes of a range inside one extent, from the device, verified; None if they cannot be had.

        A block that does not match its checksum, or cannot be read, is absent afterwards.
        """
        number = offset_bytes // EXTENT_SIZE_BYTES
        unit = (content_id, number)
        mask = blocks.range_mask(offset_bytes, end_bytes)
        extent = self.presence.extent(content_id, number)
        if extent is None or mask & ~extent.present or not self.health.readable:
            return None
        first, count = offset_bytes // BLOCK_SIZE_BYTES, mask.bit_count()
        bit = first % EXTENT_BLOCKS
        sums = bytes(extent.sums[bit * SUM_BYTES : (bit + count) * SUM_BYTES])
        start = first * BLOCK_SIZE_BYTES
        length = min(start + count * BLOCK_SIZE_BYTES, extent.size_bytes) - start
        path, place = self.locate(content_id, extent)
        segment = extent.segment
        fd = self.segments.files.get(segment) if segment else self.files.get(content_id)
        extent.busy += 1
        if fd is not None:
            (self.segments.files if segment else self.files).hold(fd)
        try:
            opened, data, bad, error = await trio.to_thread.run_sync(
                _read_verified, path, fd, place + start, length, sums, segment != OWN_FILE, limiter=self.io)
        finally:
            extent.busy -= 1
            if fd is not None:
                (self.segments.files if segment else self.files).release(fd)
            self.note_change()
        current = self.presence.is_current(unit, extent)
        if opened is not None:
            if current and segment:
                self.segments.files.add(segment, opened)
            elif current:
                self.files.add(content_id, opened)
            else:
                os.close(opened)
        if error is not None or bad:
            if current:
                self._note_unreadable(unit, extent, error, bad << bit)
            return None
        if extent.unverified & mask and current:
            extent.unverified &= ~mask
            self.presence.put(unit, extent)
            self.commit_wanted.set()
        self.count_hit(content_id, offset_bytes, end_bytes)
        if len(data) == end_bytes - offset_bytes:
            return data
        return data[offset_bytes - start : end_bytes - start]

    def locate(self, content_id: ContentId, extent: Extent) -> tuple[str, int]:
        """(path, offset of the content's first byte in it)."""
        if extent.segment:
            return segment_path(self.root, extent.segment), extent.place_bytes
        return device.object_path(self.root, content_id), 0

    def _note_unreadable(self, unit: Unit, extent: Extent, error: OSError | None, bad: int) -> None:
        if isinstance(error, FileNotFoundError):
            self.file_vanished(unit[0])
        elif error is not None:
            self.health.failed(error)
        else:
            self.damaged_blocks += bad.bit_count()
            _log.warning("damaged blocks dropped", tier=self.name, content=unit[0].hex(), extent=unit[1],
                         blocks=bad.bit_count())
            self.drop_blocks(unit, extent, bad)

    def drop_blocks(self, unit: Unit, extent: Extent, mask: int) -> None:
        """These blocks are not what they should be: they count as absent from now on."""
        if not self.presence.is_current(unit, extent):
            return
        if extent.segment:
            # Its place is never written again: all of it goes, and gets another.
            self.evictor.evict([unit], keep_copy=False)
        else:
            self.presence.drop_blocks(unit, mask)
            self.commit_wanted.set()

    def file_vanished(self, content_id: ContentId) -> None:
        """Somebody removed the file: nothing of the content is here."""
        _log.warning("a cached file vanished", tier=self.name, content=content_id.hex())
        self.forget_records(content_id)
        stale = self.files.detach(content_id)
        if stale is not None:
            os.close(stale)

    # filling, see ``fill``

    async def reserve(self, ref: ObjectRef, extent_no: int, first: int, count: int) -> Fill | None:
        """Room for ``count`` absent blocks from bit ``first``; None if the tier cannot take them."""
        return await self._fills.reserve(ref, extent_no, first, count)

    def reserve_nowait(self, ref: ObjectRef, count: int) -> Fill | None:
        """Room for all ``count`` blocks of a small content, if it can be had without waiting."""
        return self._fills.reserve_nowait(ref, count)

    def complete(self, fill: Fill, sums: bytes) -> bool:
        """The bytes are in the file; ``sums`` are the checksums of the blocks. False: nobody wants them."""
        return self._fills.complete(fill, sums)

    def abandon(self, fill: Fill) -> None:
        """The fetch failed, or the bytes could not be written (``wrote``: some may have been)."""
        self._fills.abandon(fill)

    def has_fills(self, content_id: ContentId) -> bool:
        return content_id in self._fills

    # changing what is there

    def take_units(self, units: list[Unit], *, remember: bool) -> list[Taken]:
        """Mark units absent, so that nobody finds them any more; the bytes are still in the file."""
        self.commit_wanted.set()
        return self.presence.take(units, remember=remember, with_refs=remember and self.on_evict is not None)

    def take_tail(self, unit: Unit, keep_bytes: int) -> Taken | None:
        """The same for all but the first ``keep_bytes`` of a unit's blocks. None if that would be nothing."""
        self.commit_wanted.set()
        return self.presence.take_tail(unit, keep_bytes, with_ref=self.on_evict is not None)

    def forget_records(self, content_id: ContentId) -> int:
        """Nothing of that content counts as here any more; returns the accounted bytes. The file stays."""
        freed = self.presence.forget(content_id, self._fills.extents_of(content_id))
        self._fills.give_up(content_id)
        self.commit_wanted.set()
        return freed

    def set_pinned(self, content_id: ContentId, pinned: bool) -> None:
        """From now on (not) to be evicted; what is not here yet is pinned as it comes."""
        self.presence.set_pinned(content_id, pinned, self._fills.extents_of(content_id))
        self.commit_wanted.set()

    async def surrender(self, content_id: ContentId) -> dict[int, int]:
        """Give up the content's file: nothing of it counts as here, nobody uses it or will make it anew.

        Returns the words of the blocks that are right. The caller takes the file away, and then calls
        ``end_removal``. Without words the content stays, and there is no file to be taken: it shares one with
        others, or is being fetched (nobody waits for the store here, and a fetch would write into it).
        """
        while content_id not in self._fills and (
            content_id in self._removing
            or any(self.presence.is_busy(content_id, n) for n in self.index.extents_of(content_id))
        ):
            await self.wait_change()
        if content_id in self._fills or self.place_of(content_id) is not None:
            self.begin_removal(content_id)
            return {}
        words = self.presence.sound_words(content_id)
        self.forget_records(content_id)
        self.begin_removal(content_id)
        return words

    def adopt(self, ref: ObjectRef, extents: dict[int, Extent]) -> None:
        """A file with these blocks of that content has just been moved into ``objects``."""
        self.presence.adopt(ref.content_id, extents, record.identity_of(ref))
        self.commit_wanted.set()

    def units_of(self, content_id: ContentId) -> list[Unit]:
        """Every extent of that content that is here."""
        return [(content_id, number) for number in self.index.extents_of(content_id)]

    def place_of(self, content_id: ContentId) -> tuple[int, int, int] | None:
        """(segment, offset, size) of a content that is packed with others."""
        extent = self.presence.extent(content_id, 0)
        if extent is None or not extent.segment:
            return None
        return extent.segment, extent.place_bytes, extent.size_bytes

    def is_busy(self, content_id: ContentId, extent_no: int) -> bool:
        return self.presence.is_busy(content_id, extent_no)

    def has_file(self, content_id: ContentId) -> bool:
        return self.presence.has_file(content_id)

    @property
    def is_active(self) -> bool:
        """Something is being filled or removed."""
        return bool(self._fills or self._removing or self.evictor.is_active)

    def begin_removal(self, content_id: ContentId) -> None:
        self._removing[content_id] = self._removing.get(content_id, 0) + 1

    def end_removal(self, content_id: ContentId) -> None:
        left = self._removing[content_id] - 1
        if left:
            self._removing[content_id] = left
        else:
            del self._removing[content_id]
            self._fills.collect(content_id)
        self.note_change()

    def is_being_removed(self, content_id: ContentId) -> bool:
        return content_id in self._removing

    # waiting and committing

    def note_change(self) -> None:
        """Something that ``wait_change`` may wait for happened."""
        self._changed.unpark_all()

    async def wait_change(self) -> None:
        await self._changed.park()

    async def commit(self) -> None:
        """What was put into the index before the call is durable when it returns. ``IndexWriteFailed``."""
        async with self._commit_lock:
            if not self.index.has_pending:
                return
            batch = self.index.take_batch()
            try:
                await trio.to_thread.run_sync(self._commit_blocking, batch, limiter=self._commit_limiter)
            except IndexWriteFailed as error:
                self.health.failed(OSError(error.errno, str(error)))
                raise
            self.index.batch_done()

    def _commit_blocking(self, batch: Batch) -> None:
        """Worker thread. Room for the commit that lets us free space is found even on a full disk."""
        try:
            self.index.commit_batch(batch)
        except IndexWriteFailed as error:
            if error.errno != errno.ENOSPC or not device.drop_ballast(self.root):
                raise
            self.index.commit_batch(batch)


def _read_verified(
    path: str, fd: int | None, offset_bytes: int, length_bytes: int, sums: bytes, is_shared: bool
) -> tuple[int | None, bytes, int, OSError | None]:
    """Worker thread: (descriptor if one was opened, bytes, bad blocks as bits, error)."""
    opened: int | None = None
    try:
        if fd is None:
            fd = opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if is_shared:
                device.read_alone(fd)
        data = device.pread_all(fd, length_bytes, offset_bytes)
    except OSError as error:
        return opened, b"", 0, error
    found = record.checksums(data)
    bad = 0
    if found != sums or len(data) != length_bytes:
        for bit in range(len(sums) // SUM_BYTES):
            place = slice(bit * SUM_BYTES, (bit + 1) * SUM_BYTES)
            if found[place] != sums[place]:
                bad |= 1 << bit
    return opened, data, bad, None


def _move_aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.rename(aside)
    return aside
