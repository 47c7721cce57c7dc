"""One tier: a directory of content files, an index of what they hold, and a capacity.

Trio thread only, except ``open_directory``, ``Fill.write`` and ``close_files`` (worker threads).

State shared between tasks, all of it changed without an await in between:

``_extents``   extents that are in use or were lately; a cache of the index, except where ``busy``
``_fills``     fetches under way by content; while there is one the content's file is not removed
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

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from tierfs.cache import blocks, device, record
from tierfs.cache.blocks import EXTENT_BLOCKS, EXTENT_SIZE_BYTES
from tierfs.cache.eviction import Evictor, Taken
from tierfs.cache.health import TierHealth
from tierfs.cache.index import IndexDamaged, IndexWriteFailed, TierIndex
from tierfs.cache.ledger import Ledger
from tierfs.cache.record import Extent
from tierfs.config import TierSetting
from tierfs.log import get_logger
from tierfs.types import BLOCK_SIZE_BYTES, ContentId, ObjectRef

_log = get_logger(__name__)

_KEPT_EXTENTS = 16384
_IO_THREADS = 16


class Fill:
    """Room in a tier for some absent blocks of one extent, while they are fetched.

    Made by ``Tier.reserve``; ends in exactly one of ``Tier.complete`` and ``Tier.abandon``.
    """

    __slots__ = ("content_id", "count", "create", "dead", "extent", "extent_no", "first", "identity",
                 "nbytes", "root")

    def __init__(self, root: str, ref: ObjectRef, extent: Extent, extent_no: int, first: int, count: int,
                 *, create: bool) -> None:
        self.root = root
        self.content_id = ref.content_id
        self.identity = record.identity_of(ref)
        self.extent = extent
        self.extent_no = extent_no
        self.first = first
        self.count = count
        self.nbytes = blocks.allocated_bytes(blocks.span_mask(first, count), ref.size_bytes, extent_no)
        self.create = create
        self.dead = False
        """The content was forgotten meanwhile: what is written is garbage."""

    def write(self, data: bytes | memoryview) -> None:
        """Worker thread: the bytes of all blocks. Raises ``OSError``."""
        offset = (self.extent_no * EXTENT_BLOCKS + self.first) * BLOCK_SIZE_BYTES
        if self.create:
            fd = device.open_for_fill(self.root, self.content_id)
        else:
            # The index says that the file is there. One made now would be full of holes that it calls data.
            fd = os.open(device.object_path(self.root, self.content_id), os.O_RDWR | os.O_CLOEXEC)
        try:
            device.pwrite_all(fd, data, offset)
        finally:
            os.close(fd)


class Tier:
    """See the module docstring. Sizes in bytes."""

    def __init__(self, setting: TierSetting, root: Path, lock_fd: int, index: TierIndex, *,
                 now_ns: Callable[[], int], keeps_clean: bool = True, index_lost: bool = False) -> None:
        self.setting = setting
        self.name = setting.name
        self.root = str(root)
        self.index = index
        self.now_ns = now_ns
        self.keeps_clean = keeps_clean
        """False: only for staging; nothing stays in it that is in the store."""
        self.index_lost = index_lost
        self.health = TierHealth(setting.name, self.root, now_ns)
        self.ledger = Ledger(setting.capacity_bytes)
        self.ledger.unwalked_bytes = index.used_bytes
        self.files = device.OpenFiles(lambda content_id: device.object_path(self.root, content_id),
                                      never_blocks=setting.volatile)
        self.nowait = device.NowaitReader(never_blocks=setting.volatile)
        self.io = trio.CapacityLimiter(_IO_THREADS)
        self.pins = index.pins()
        self.hits = 0
        self.misses = 0
        self.hit_bytes = 0
        self.damaged_blocks = 0
        self.commit_wanted = trio.Event()
        self.walked = trio.Event()
        self._lock_fd = lock_fd
        self._extents: dict[tuple[ContentId, int], Extent] = {}
        self._fills: dict[ContentId, list[Fill]] = {}
        self._removing: dict[ContentId, int] = {}
        self._changed = trio.lowlevel.ParkingLot()
        self._commit_lock = trio.Lock()
        self._commit_limiter = trio.CapacityLimiter(1)
        self.on_evict: Callable[[Taken], Awaitable[None]] | None = None
        """Called with each evicted unit before its bytes go: the next tier may want them."""
        self.evictor = Evictor(self)

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
            return cls(setting, root, lock_fd, index, now_ns=now_ns, keeps_clean=keeps_clean, index_lost=lost)
        except BaseException:
            os.close(lock_fd)
            raise

    def close_files(self, *, clean: bool) -> None:
        """Worker thread, last call. ``clean``: nothing is being written any more."""
        self.files.close()
        if clean and not self.setting.volatile:
            try:
                device.sync_file_system(self.root)
            except OSError as error:
                _log.warning("tier not synced", tier=self.name, path=self.root, reason=str(error))
                clean = False
        self.index.close(clean=clean)
        os.close(self._lock_fd)

    @property
    def takes_clean(self) -> bool:
        return self.keeps_clean and self.health.usable

    # what is there

    def extent(self, content_id: ContentId, extent_no: int) -> Extent | None:
        """Presence of that extent, or None if nothing of it is here."""
        unit = (content_id, extent_no)
        found = self._extents.get(unit)
        if found is not None:
            return found
        found = self.index.get(content_id, extent_no)
        if found is not None:
            if len(self._extents) >= _KEPT_EXTENTS:
                self._trim()
            self._extents[unit] = found
            self._make_known(unit, found.allocated(extent_no))
        return found

    def _make_known(self, unit: tuple[ContentId, int], nbytes: int) -> None:
        """Tell the policy of a unit that the index had."""
        policy = self.ledger.policy
        if unit not in policy:
            self.ledger.unwalked_bytes = max(0, self.ledger.unwalked_bytes - nbytes)
            self.ledger.fit_policy()
            policy.load(unit, nbytes)
            if unit[0] in self.pins:
                policy.pin(unit)

    def learn(self, content_id: ContentId, extent_no: int, nbytes: int) -> None:
        """The walk found this committed record. It may be out of date."""
        unit = (content_id, extent_no)
        if unit not in self.ledger.policy and self.index.get(content_id, extent_no) is not None:
            self._make_known(unit, nbytes)

    def _trim(self) -> None:
        idle = [unit for unit, extent in self._extents.items() if not extent.busy]
        for unit in idle[: len(self._extents) // 4]:
            del self._extents[unit]

    def missing(self, content_id: ContentId, extent_no: int, mask: int) -> int:
        """Which blocks of ``mask`` are not here."""
        extent = self.extent(content_id, extent_no)
        return mask if extent is None else mask & ~extent.present

    def has_file(self, content_id: ContentId) -> bool:
        """There is a file of that content that the index knows."""
        return self.index.has_any(content_id)

    def words(self, content_id: ContentId) -> dict[int, int]:
        """Present blocks by extent."""
        found = {}
        for number in self.index.extents_of(content_id):
            extent = self.extent(content_id, number)
            if extent is not None:
                found[number] = extent.present
        return found

    def resident_bytes(self, content_id: ContentId) -> int:
        """Bytes of the content that are here."""
        total = 0
        for number in self.index.extents_of(content_id):
            extent = self.extent(content_id, number)
            if extent is not None:
                total += blocks.content_bytes(extent.present, extent.size_bytes, number)
        return total

    def is_complete(self, content_id: ContentId) -> bool:
        numbers = self.index.extents_of(content_id)
        first = self.extent(content_id, numbers[0]) if numbers else None
        if first is None or len(numbers) != blocks.extent_count(first.size_bytes):
            return False
        for number in numbers:
            extent = self.extent(content_id, number)
            if extent is None or extent.present != blocks.full_mask(first.size_bytes, number):
                return False
        return True

    # reading

    def read_nowait(self, content_id: ContentId, offset_bytes: int, end_bytes: int) -> bytes | None:
        """The bytes, if all are here and in the page cache. Never blocks."""
        first, last = offset_bytes // EXTENT_SIZE_BYTES, (end_bytes - 1) // EXTENT_SIZE_BYTES
        if first == last:
            extent = self._extents.get((content_id, first)) or self.extent(content_id, first)
            if extent is None:
                return None
            mask = blocks.range_mask(offset_bytes, end_bytes)
            if mask & ~extent.present or mask & extent.unverified:
                return None
        else:
            for number, start, stop in blocks.extent_spans(offset_bytes, end_bytes):
                extent = self.extent(content_id, number)
                mask = blocks.range_mask(start, stop)
                if extent is None or mask & ~extent.present or mask & extent.unverified:
                    return None
        if not self.health.readable:
            return None
        fd = self.files.get(content_id)
        if fd is None:
            return None
        data = self.nowait.read(fd, end_bytes - offset_bytes, offset_bytes)
        if data is not None:
            self._count_hit(content_id, first, last, len(data))
        return data

    def _count_hit(self, content_id: ContentId, first: int, last: int, nbytes: int) -> None:
        self.hits += 1
        self.hit_bytes += nbytes
        for number in range(first, last + 1):
            self.ledger.policy.touch((content_id, number))

    async def read_blocks(self, content_id: ContentId, offset_bytes: int, end_bytes: int) -> bytes | None:
        """The bytes of a range inside one extent, from the device, verified; None if they cannot be had.

        A block that does not match its checksum, or cannot be read, is absent afterwards.
        """
        number = offset_bytes // EXTENT_SIZE_BYTES
        mask = blocks.range_mask(offset_bytes, end_bytes)
        extent = self.extent(content_id, number)
        if extent is None or mask & ~extent.present or not self.health.readable:
            return None
        first = offset_bytes // BLOCK_SIZE_BYTES
        count = mask.bit_count()
        bit = first % EXTENT_BLOCKS
        sums = bytes(extent.sums[bit * 8 : (bit + count) * 8])
        fd = self.files.get(content_id)
        extent.busy += 1
        if fd is not None:
            self.files.hold(fd)
        try:
            start = first * BLOCK_SIZE_BYTES
            length = min((first + count) * BLOCK_SIZE_BYTES, extent.size_bytes) - start
            opened, data, bad, error = await trio.to_thread.run_sync(
                _read_verified, self.root, content_id, fd, start, length, sums, limiter=self.io)
        finally:
            extent.busy -= 1
            if fd is not None:
                self.files.release(fd)
            self.note_change()
        if opened is not None:
            if self._extents.get((content_id, number)) is extent:
                self.files.add(content_id, opened)
            else:
                os.close(opened)
        if error is not None or bad:
            self._note_unreadable(content_id, number, extent, error, bad << bit)
            return None
        if extent.unverified & mask and self._extents.get((content_id, number)) is extent:
            extent.unverified &= ~mask
            self._put(content_id, number, extent)
        self._count_hit(content_id, number, number, end_bytes - offset_bytes)
        if len(data) == end_bytes - offset_bytes:
            return data
        return data[offset_bytes - start : end_bytes - start]

    def _note_unreadable(self, content_id: ContentId, number: int, extent: Extent, error: OSError | None,
                         bad: int) -> None:
        if self._extents.get((content_id, number)) is not extent:
            return
        if isinstance(error, FileNotFoundError):
            self.file_vanished(content_id)
            return
        if error is not None:
            self.health.failed(error)
            return
        self.damaged_blocks += bad.bit_count()
        _log.warning("damaged blocks dropped", tier=self.name, content=content_id.hex(), extent=number,
                     blocks=bad.bit_count())
        self.drop_blocks(content_id, number, bad)

    def drop_blocks(self, content_id: ContentId, extent_no: int, mask: int) -> None:
        """These blocks are not what they should be: they count as absent from now on."""
        extent = self.extent(content_id, extent_no)
        if extent is None:
            return
        before = extent.allocated(extent_no)
        extent.clear(mask)
        self._put(content_id, extent_no, extent)
        unit = (content_id, extent_no)
        self.ledger.policy.grow(unit, extent.allocated(extent_no) - before)
        if not extent.present and not extent.busy:
            self.ledger.policy.remove(unit, remember=False)
            self._extents.pop(unit, None)

    def file_vanished(self, content_id: ContentId) -> None:
        """Somebody removed the file: nothing of the content is here."""
        _log.warning("a cached file vanished", tier=self.name, content=content_id.hex())
        self.forget_records(content_id)
        stale = self.files.detach(content_id)
        if stale is not None:
            os.close(stale)

    # filling

    def accepts(self, content_id: ContentId, extent_no: int, nbytes: int) -> bool:
        """``reserve`` would probably find room, evicting if need be."""
        return self.takes_clean and self.ledger.can_make_room(nbytes)

    async def reserve(self, ref: ObjectRef, extent_no: int, first: int, count: int) -> Fill | None:
        """Room for ``count`` absent blocks from bit ``first``; None if the tier cannot take them."""
        content_id, unit = ref.content_id, (ref.content_id, extent_no)
        while True:
            if not self.takes_clean:
                return None
            if content_id in self._removing:
                await self.wait_change()
                continue
            create = not self.has_file(content_id)
            if create and content_id not in self._fills and self.index.committed_has(content_id):
                try:
                    await self.commit()
                except IndexWriteFailed:
                    return None
                continue
            break
        ledger = self.ledger
        extent = self.extent(content_id, extent_no)
        if extent is None:
            extent = Extent(ref.size_bytes, blocks.blocks_in_extent(ref.size_bytes, extent_no))
        fill = Fill(self.root, ref, extent, extent_no, first, count, create=create)
        ledger.fit_policy()
        if unit in ledger.policy:
            ledger.policy.grow(unit, fill.nbytes)
        elif ledger.policy.admit(unit, fill.nbytes):
            if content_id in self.pins:
                ledger.policy.pin(unit)
        else:
            return None
        self._extents[unit] = extent
        extent.busy += 1
        self._fills.setdefault(content_id, []).append(fill)
        try:
            made = await self.evictor.make_room()
        except BaseException:
            self.abandon(fill)
            raise
        if fill.dead or not made:
            held_too_much = not made and not ledger.can_make_room(0)
            self.abandon(fill)
            if held_too_much:
                self.health.full("what is in it is pinned or dirty")
            return None
        return fill

    def complete(self, fill: Fill, sums: bytes) -> bool:
        """The bytes are in the file; ``sums`` are the checksums of the blocks. False: nobody wants them."""
        self._end(fill)
        if fill.dead:
            self._remove_garbage(fill)
            return False
        fill.extent.mark(fill.first, sums)
        self.index.put(fill.content_id, fill.extent_no, fill.extent, fill.identity)
        self.commit_wanted.set()
        self.health.worked()
        return True

    def abandon(self, fill: Fill, *, wrote: bool = False) -> None:
        """The fetch failed, or the bytes could not be written (``wrote``: some may have been)."""
        self._end(fill)
        if not fill.dead:
            unit = (fill.content_id, fill.extent_no)
            policy = self.ledger.policy
            policy.grow(unit, -fill.nbytes)
            if not fill.extent.present and not fill.extent.busy:
                policy.remove(unit, remember=False)
                self._extents.pop(unit, None)
        if wrote:
            self._remove_garbage(fill)

    def _end(self, fill: Fill) -> None:
        fill.extent.busy -= 1
        fills = self._fills[fill.content_id]
        fills.remove(fill)
        if not fills:
            del self._fills[fill.content_id]
        self.note_change()

    def _remove_garbage(self, fill: Fill) -> None:
        """Bytes without a record: unlink a file that has none at all, else free the range."""
        if fill.content_id in self._fills or fill.content_id in self._removing:
            return
        if self.has_file(fill.content_id):
            mask = blocks.span_mask(fill.first, fill.count) & ~fill.extent.present
            self.evictor.punch_later(fill.content_id, fill.extent_no, mask)
        else:
            self.evictor.unlink_later(fill.content_id)

    def kill_fills(self, content_id: ContentId) -> None:
        for fill in self._fills.get(content_id, ()):
            fill.dead = True

    # changing what is there

    def _put(self, content_id: ContentId, extent_no: int, extent: Extent) -> None:
        identity = self.index.keep_identity(content_id, extent_no)
        self.index.put(content_id, extent_no, extent, identity)
        self.commit_wanted.set()

    def forget_records(self, content_id: ContentId) -> int:
        """Nothing of that content counts as here any more; returns the accounted bytes. The file stays."""
        self.kill_fills(content_id)
        numbers = set(self.index.extents_of(content_id))
        numbers.update(fill.extent_no for fill in self._fills.get(content_id, ()))
        freed = 0
        for number in numbers:
            self.extent(content_id, number)
            freed += self.ledger.policy.remove((content_id, number), remember=False)
            self._extents.pop((content_id, number), None)
        if numbers:
            self.index.drop(content_id)
            self.commit_wanted.set()
        self.pins.discard(content_id)
        return freed

    def take_units(self, units: list[tuple[ContentId, int]], *, remember: bool) -> list[Taken]:
        """Mark units absent, so that nobody finds them any more; the bytes are still in the file."""
        taken = []
        wanted_below = self.on_evict is not None and remember
        for content_id, number in units:
            extent = self.extent(content_id, number)
            found = self.index.identity(content_id, number) if wanted_below else None
            nbytes = self.ledger.policy.remove((content_id, number), remember=remember)
            self._extents.pop((content_id, number), None)
            self.index.remove(content_id, number)
            if extent is not None:
                ref = None
                if found is not None:
                    etag, version, key = found
                    ref = ObjectRef(content_id, key, etag, extent.size_bytes, version)
                taken.append(Taken(content_id, number, extent, nbytes, ref))
        self.commit_wanted.set()
        return taken

    def is_busy(self, content_id: ContentId, extent_no: int) -> bool:
        extent = self._extents.get((content_id, extent_no))
        return extent is not None and extent.busy > 0

    def has_fills(self, content_id: ContentId) -> bool:
        return content_id in self._fills

    def in_use(self, content_id: ContentId) -> bool:
        """Some worker thread reads or fills the content's file."""
        return content_id in self._fills or any(
            self.is_busy(content_id, number) for number in self.index.extents_of(content_id))

    def begin_removal(self, content_id: ContentId) -> None:
        self._removing[content_id] = self._removing.get(content_id, 0) + 1

    def end_removal(self, content_id: ContentId) -> None:
        left = self._removing[content_id] - 1
        if left:
            self._removing[content_id] = left
        else:
            del self._removing[content_id]
        self.note_change()

    def is_being_removed(self, content_id: ContentId) -> bool:
        return content_id in self._removing

    def set_pinned(self, content_id: ContentId, pinned: bool) -> None:
        """From now on (not) to be evicted; what is not here yet is pinned as it comes."""
        if pinned == (content_id in self.pins):
            return
        policy = self.ledger.policy
        units = [(content_id, number) for number in self.index.extents_of(content_id)]
        for unit in units:
            self.extent(*unit)
        units.extend((content_id, fill.extent_no) for fill in self._fills.get(content_id, ()))
        for unit in dict.fromkeys(units):
            if unit in policy and pinned:
                policy.pin(unit)
            elif policy.is_pinned(unit):
                policy.unpin(unit)
        (self.pins.add if pinned else self.pins.discard)(content_id)
        self.index.set_pin(content_id, pinned)
        self.commit_wanted.set()

    async def surrender(self, content_id: ContentId) -> dict[int, int]:
        """Give up the content's file: nothing of it counts as here, nobody uses it or will make it anew.

        Returns the words of the blocks that are right. The caller takes the file away, and then calls
        ``end_removal``.
        """
        while self.in_use(content_id) or content_id in self._removing:
            await self.wait_change()
        words = {}
        for number in self.index.extents_of(content_id):
            extent = self.extent(content_id, number)
            if extent is not None and extent.present & ~extent.unverified:
                words[number] = extent.present & ~extent.unverified
        self.forget_records(content_id)
        self.begin_removal(content_id)
        return words

    def adopt(self, ref: ObjectRef, extents: dict[int, Extent]) -> None:
        """A complete or partial file of that content has just been moved into ``objects``."""
        identity = record.identity_of(ref)
        policy = self.ledger.policy
        for number, extent in extents.items():
            unit = (ref.content_id, number)
            self.ledger.fit_policy()
            policy.load(unit, extent.allocated(number))
            self._extents[unit] = extent
            self.index.put(ref.content_id, number, extent, identity)
        self.commit_wanted.set()

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
                await trio.to_thread.run_sync(self.index.commit_batch, batch, limiter=self._commit_limiter)
            except IndexWriteFailed as error:
                self.health.failed(str(error))
                raise
            self.index.batch_done()


def _read_verified(
    root: str, content_id: ContentId, fd: int | None, offset_bytes: int, length_bytes: int, sums: bytes
) -> tuple[int | None, bytes, int, OSError | None]:
    """Worker thread: (descriptor if one was opened, bytes, bad blocks as bits, error)."""
    opened: int | None = None
    try:
        if fd is None:
            fd = opened = os.open(device.object_path(root, content_id), os.O_RDONLY | os.O_CLOEXEC)
        data = device.pread_all(fd, length_bytes, offset_bytes)
    except OSError as error:
        return opened, b"", 0, error
    found = record.checksums(data)
    if found == sums and len(data) == length_bytes:
        return opened, data, 0, None
    bad = 0
    for bit in range(len(sums) // 8):
        if found[bit * 8 : bit * 8 + 8] != sums[bit * 8 : bit * 8 + 8]:
            bad |= 1 << bit
    return opened, data, bad or 1, None


def _move_aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.rename(aside)
    return aside
