"""Staging: the bytes of one file that the store does not have yet.

Trio thread only. ``write_nowait`` and ``read_nowait`` do their system call on it (page cache only), all
else goes to worker threads. ``_lock`` is held by whatever changes the file and has to wait in between
(slow writes, truncate, the writing part of ``fill``); ``write_nowait`` steps back while it is held. Reads
take no lock: they look again at which blocks are local after they waited.

What is on disk, step by step (``dirty`` explains the names):

new file
    1. ``create``: ``dirty/<hex>`` exists, empty. All of a content made here is in its file, so nothing
       else has to be remembered, and no index is involved.
    2. ``write``: bytes in the page cache. *kill -9*: all of them are there. *Power cut*: what the
       kernel had written back by itself; the namespace has not promised more.
    3. ``sync``: fdatasync of the file (bytes and size), then, the first time, fsync of ``dirty/`` (name).
       From here on neither costs anything.

converted file (a clean content that is to be changed)
    1. The tier forgets the content: nobody finds it any more, nobody uses the file (``Tier.surrender``).
    2. The sidecar is written, fdatasynced, and renamed to ``dirty/<new>.base``. *kill -9 or power cut here*:
       a sidecar alone, that is the base unchanged; nobody refers to it, and it is discarded.
    3. ``objects/ab/<old>`` becomes ``dirty/<new>.part``, and the directory is fsynced, before ``convert``
       returns: the dirty mark and the base are durable before the first byte changes, and before the
       namespace can say that the content is local. The index may still have records of the old content; a
       missing file makes them void. From here on the content exists whatever happens: absent blocks
       come from the base.
    4. ``write``: the block's changed bit into the sidecar, the bytes into the file, the present bit into the
       sidecar, all of it page cache. A block that is written in part is filled from the base first.
       *kill -9* in between: an absent block stays absent, and a write that nobody was told had succeeded
       is undone. Present is never inferred from the file.
    5. ``sync``: fdatasync of the file; then those bits that were set before it began go into the durable
       words, and the sidecar is fdatasynced. *Power cut*: only durable words are believed. So a block whose
       bit reached the device before its bytes did counts as absent, and comes from the base.
    6. ``truncate`` below the limit: the limit is lowered durably, then the file is cut.

seal (the store has the bytes, and the namespace has recorded that)
    1. Checksums are computed beside ongoing reads; a write in between cancels the whole.
    2. ``dirty/<hex>`` becomes ``objects/ab/<hex>``, and the sidecar is removed. *kill -9 or power cut
       here*: a file without records, which the next sweep removes; the bytes are in the store. (Between the
       two: a sidecar alone, that is the base; the namespace does not refer to it, and discards it.)
    3. The records go into the index with the next commit.

discard
    The data file is unlinked, then the sidecar. *kill -9 in between*: the content is its base again; the
    namespace does not refer to it, and discards it anew at the next start.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import trio

from tierfs.cache import blocks, device, record
from tierfs.cache.blocks import EXTENT_BLOCKS, EXTENT_SIZE_BYTES
from tierfs.cache.dirty import DirtyFiles
from tierfs.cache.health import is_no_space
from tierfs.cache.record import Extent
from tierfs.cache.sidecar import Sidecar
from tierfs.errors import InvalidArgument, TierFailed
from tierfs.types import BLOCK_SIZE_BYTES, ContentId, ObjectRef

T = TypeVar("T")

NOWAIT_BYTES = 128 * 1024
"""The largest write that is done on the trio thread."""
_DENSE_EXTENTS = 16384


class Staging:
    """Mutable content of one inode in the write tier. Made by ``Cache``; trio thread only.

    One object per content id: ``Cache.open_staging`` returns the same one while it is open.
    """

    def __init__(self, dirty: DirtyFiles, content_id: ContentId, size_bytes: int,
                 sidecar: Sidecar | None = None) -> None:
        self.content_id = content_id
        self._dirty = dirty
        self._size_bytes = size_bytes
        self._generation = 0
        self._lock = trio.Lock()
        self._closed = False
        self._sidecar = sidecar
        self._present: dict[int, int] = {}
        self._changed: dict[int, int] = {}
        self._durable: dict[int, int] = {}
        if sidecar is not None:
            self._present, self._changed, self._durable = sidecar.words()

    @property
    def base(self) -> ObjectRef | None:
        """What absent blocks are filled from; None for a file made here (nothing is absent)."""
        return None if self._sidecar is None else self._sidecar.base

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def generation(self) -> int:
        """Grows with every write and truncate. Starts anew when the content is opened anew."""
        return self._generation

    @property
    def allocated_bytes(self) -> int:
        """What the file takes on the device; holes take nothing."""
        return self._dirty.allocated_bytes(self.content_id)

    # which blocks are local

    def _absent(self, extent_no: int, mask: int) -> int:
        """Blocks of ``mask`` that have to come from the base."""
        if self._sidecar is None:
            return 0
        below = blocks.full_mask(self._sidecar.limit_bytes, extent_no)
        return mask & below & ~self._present.get(extent_no, 0)

    def _is_absent(self, block_no: int) -> bool:
        extent_no, bit = divmod(block_no, EXTENT_BLOCKS)
        return self._absent(extent_no, 1 << bit) != 0

    def _any_absent(self, offset_bytes: int, end_bytes: int) -> bool:
        return self._sidecar is not None and any(
            self._absent(number, blocks.range_mask(start, stop))
            for number, start, stop in blocks.extent_spans(offset_bytes, end_bytes))

    def _mark_changed(self, offset_bytes: int, end_bytes: int) -> None:
        """Before the write: the blocks of that range may differ from the base from now on."""
        sidecar = self._sidecar
        if sidecar is None:
            return
        for number, start, stop in blocks.extent_spans(offset_bytes, min(end_bytes, sidecar.base.size_bytes)):
            word = self._changed.get(number, 0) | blocks.range_mask(start, stop)
            if word != self._changed.get(number):
                self._changed[number] = word
                sidecar.mark_changed(number, word)
        self._dirty.entries[self.content_id].unsynced = True

    def _mark_present(self, offset_bytes: int, end_bytes: int) -> None:
        """After the write: the blocks of that range are in the file."""
        sidecar = self._sidecar
        if sidecar is None:
            return
        for number, start, stop in blocks.extent_spans(offset_bytes, min(end_bytes, sidecar.base.size_bytes)):
            word = self._present.get(number, 0) | blocks.range_mask(start, stop)
            if word != self._present.get(number):
                self._present[number] = word
                sidecar.mark_present(number, word)

    def _partly_written(self, offset_bytes: int, end_bytes: int) -> list[int]:
        """Absent blocks that a write of that range touches, but does not replace."""
        sidecar = self._sidecar
        if sidecar is None or end_bytes <= offset_bytes:
            return []
        found = []
        for number in {offset_bytes // BLOCK_SIZE_BYTES, (end_bytes - 1) // BLOCK_SIZE_BYTES}:
            start = number * BLOCK_SIZE_BYTES
            stop = min(start + BLOCK_SIZE_BYTES, sidecar.limit_bytes)
            if (offset_bytes > start or end_bytes < stop) and self._is_absent(number):
                found.append(number)
        return sorted(found)

    # reading

    def read_nowait(self, offset_bytes: int, length_bytes: int) -> bytes | None:
        """The bytes (clipped at the size), or None if they cannot be had without waiting."""
        end = min(offset_bytes + length_bytes, self._size_bytes)
        if end <= offset_bytes:
            return b""
        if self._sidecar is not None and self._any_absent(offset_bytes, end):
            return None
        fd = self._dirty.files.get(self.content_id)
        if fd is None:
            return None
        return self._dirty.tier.nowait.read(fd, end - offset_bytes, offset_bytes)

    async def read(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Exactly the bytes, clipped at the size; absent blocks come from ``base``.

        Raises ``StaleContent`` or ``StoreError`` if ``base`` is needed and cannot be had, ``TierFailed`` if
        the local file cannot be read.
        """
        while True:
            end = min(offset_bytes + length_bytes, self._size_bytes)
            if end <= offset_bytes:
                await trio.lowlevel.checkpoint()
                return b""
            generation = self._generation
            pieces = [await self._read_part(low, high, absent=absent)
                      for low, high, absent in self._parts(offset_bytes, end)]
            if generation == self._generation or sum(map(len, pieces)) == end - offset_bytes:
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)
            # Cut short by a truncate meanwhile.

    def _parts(self, offset_bytes: int, end_bytes: int) -> Iterator[tuple[int, int, bool]]:
        """(start, stop, absent) of pieces that are all local or all absent."""
        if not self._any_absent(offset_bytes, end_bytes):
            yield offset_bytes, end_bytes, False
            return
        start = offset_bytes
        while start < end_bytes:
            absent = self._is_absent(start // BLOCK_SIZE_BYTES)
            stop = start
            while stop < end_bytes and self._is_absent(stop // BLOCK_SIZE_BYTES) == absent:
                stop = min(end_bytes, (stop // BLOCK_SIZE_BYTES + 1) * BLOCK_SIZE_BYTES)
            yield start, stop, absent
            start = stop

    async def _read_part(self, start: int, stop: int, *, absent: bool) -> bytes:
        if not absent:
            data = await self._with_file(lambda fd: device.pread_all(fd, stop - start, start))
            return data.ljust(min(stop, self._size_bytes) - start, b"\0")
        sidecar = self._sidecar
        assert sidecar is not None
        limit = min(stop, sidecar.limit_bytes)
        data = await self._dirty.reader.read(sidecar.base, start, limit - start) if limit > start else b""
        touched = range(start // BLOCK_SIZE_BYTES, blocks.block_count(limit))
        if not all(self._is_absent(number) for number in touched):
            # Written while the base was being fetched: what is in the file counts.
            return b"".join([await self._read_part(low, high, absent=still)
                             for low, high, still in self._parts(start, stop)])
        return data.ljust(stop - start, b"\0")

    # writing

    def write_nowait(self, offset_bytes: int, data: bytes) -> bool:
        """Write all of ``data`` if that can be done without waiting; else change nothing and return False."""
        nbytes = len(data)
        end = offset_bytes + nbytes
        if (nbytes > NOWAIT_BYTES or self._closed or self._lock.locked() or not self._dirty.may_write_now
                or (self._sidecar is not None and self._partly_written(offset_bytes, end))):
            return False
        room = nbytes + 2 * blocks.ALLOCATION_BYTES
        if not self._dirty.try_reserve(room):
            return False
        try:
            fd = self._dirty.files.get(self.content_id)
            if fd is None:
                return False
            try:
                self._mark_changed(offset_bytes, end)
                written = self._dirty.write_now(fd, data, offset_bytes)
            except OSError:
                # Nothing was written. The slow path makes room, or reports the error.
                return False
            self._generation += 1
            self._size_bytes = max(self._size_bytes, offset_bytes + written)
            if written == nbytes:
                self._mark_present(offset_bytes, end)
            self._dirty.set_allocated(self.content_id, os.fstat(fd).st_blocks * 512)
            return written == nbytes
        finally:
            self._dirty.release(room)

    async def write(self, offset_bytes: int, data: bytes) -> None:
        """Write all of ``data``; returns once it is in the page cache of the write tier.

        Raises ``TierFull`` if there is no room, nothing can be evicted and nothing drains; ``TierFailed``
        on an I/O error; ``StaleContent`` or ``StoreError`` if a block must first be filled from ``base``.
        """
        if not data:
            await trio.lowlevel.checkpoint()
            return
        async with self._lock:
            self._check_open()
            end = offset_bytes + len(data)
            for number in self._partly_written(offset_bytes, end):
                await self._fill_block(number)
            await self._put(offset_bytes, data, changed=True)

    async def _fill_block(self, block_no: int) -> None:
        """Under the lock: make one absent block local."""
        sidecar = self._sidecar
        assert sidecar is not None
        start = block_no * BLOCK_SIZE_BYTES
        stop = min(start + BLOCK_SIZE_BYTES, sidecar.limit_bytes)
        data = await self._dirty.reader.read(sidecar.base, start, stop - start)
        await self._put(start, data, changed=False)

    async def _put(self, offset_bytes: int, data: bytes, *, changed: bool) -> None:
        """Under the lock: into the file, however much has to be moved out of the way."""
        dirty, end = self._dirty, offset_bytes + len(data)
        room = len(data) + 2 * blocks.ALLOCATION_BYTES
        if not dirty.try_reserve(room):
            if not await self._with_file(lambda fd: device.has_hole(fd, offset_bytes, end)):
                room = 0  # Overwriting takes nothing.
            await dirty.reserve(room)
        with dirty.releasing(room):
            if changed:
                self._mark_changed(offset_bytes, end)
            try:
                error = await self._with_file(lambda fd: _try_write(fd, data, offset_bytes))
                while error is not None and is_no_space(error) and await dirty.make_real_room(len(data)):
                    error = await self._with_file(lambda fd: _try_write(fd, data, offset_bytes))
                if error is None:
                    if changed:
                        self._generation += 1
                        self._size_bytes = max(self._size_bytes, end)
                    self._mark_present(offset_bytes, end)
            finally:
                with trio.CancelScope(shield=True):
                    await self._measure()
        if error is not None:
            raise dirty.failure(error) from error

    async def _measure(self) -> None:
        """Under the lock: size and allocation as the file system has them."""
        size, allocated = await self._with_file(_size_and_allocation)
        if size > self._size_bytes:
            # A write that failed half way has grown the file.
            await self._with_file(lambda fd: os.ftruncate(fd, self._size_bytes))
        self._dirty.set_allocated(self.content_id, allocated)

    async def truncate(self, size_bytes: int) -> None:
        """Set the size; what is cut off is gone, what is added reads as zeros and costs nothing."""
        async with self._lock:
            self._check_open()
            sidecar = self._sidecar
            with trio.CancelScope(shield=True):
                if sidecar is not None and size_bytes < sidecar.limit_bytes:
                    await self._dirty.call(sidecar.set_limit, size_bytes)
                self._generation += 1
                if size_bytes < self._size_bytes:
                    self._size_bytes = size_bytes
                await self._with_file(lambda fd: os.ftruncate(fd, size_bytes))
                self._size_bytes = size_bytes
                await self._measure()

    # durability

    async def sync(self) -> None:
        """Everything written before the call is durable on the device when it returns: bytes, size, name,
        and which blocks are ours. Raises ``TierFailed``."""
        entry = self._dirty.entries[self.content_id]
        present, sidecar = dict(self._present), self._sidecar
        entry.unsynced = False
        try:
            await self._with_file(os.fdatasync)
            if not entry.named:
                await self._dirty.call(device.sync_directory, self._dirty.directory)
                entry.named = True
            if sidecar is not None:
                known = self._durable
                fresh = {number: word for number, word in present.items() if known.get(number) != word}
                await self._dirty.call(sidecar.set_durable, fresh)
                self._durable.update(fresh)
        except BaseException:
            entry.unsynced = sidecar is not None
            raise

    async def fill(self) -> None:
        """Make every absent block local, from ``base``. Raises what ``read`` and ``write`` raise."""
        sidecar = self._sidecar
        await trio.lowlevel.checkpoint()
        if sidecar is None:
            return
        for extent_no in range(blocks.extent_count(sidecar.limit_bytes)):
            for first, count in blocks.runs(self._absent(extent_no, (1 << EXTENT_BLOCKS) - 1)):
                start = (extent_no * EXTENT_BLOCKS + first) * BLOCK_SIZE_BYTES
                stop = min(start + count * BLOCK_SIZE_BYTES, sidecar.limit_bytes)
                if stop <= start:
                    continue
                data = await self._dirty.reader.read(sidecar.base, start, stop - start)
                async with self._lock:
                    self._check_open()
                    limit = min(stop, sidecar.limit_bytes)
                    if limit <= start:
                        continue
                    still = self._absent(extent_no, blocks.range_mask(start, limit))
                    for bit, run in blocks.runs(still):
                        low = (extent_no * EXTENT_BLOCKS + bit) * BLOCK_SIZE_BYTES
                        high = min(low + run * BLOCK_SIZE_BYTES, limit)
                        await self._put(low, data[low - start : high - start], changed=False)

    def unchanged_ranges(self) -> Iterator[tuple[int, int]]:
        """(offset, length) of what is known to equal ``base`` at the same offset; for server-side copies."""
        sidecar = self._sidecar
        if sidecar is None:
            return
        limit = min(sidecar.limit_bytes, self._size_bytes)
        start = stop = 0
        for extent_no in range(blocks.extent_count(limit)):
            same = blocks.full_mask(limit, extent_no) & ~self._changed.get(extent_no, 0)
            for first, count in blocks.runs(same):
                low = (extent_no * EXTENT_BLOCKS + first) * BLOCK_SIZE_BYTES
                high = min(low + count * BLOCK_SIZE_BYTES, limit)
                if low != stop:
                    if stop > start:
                        yield start, stop - start
                    start = low
                stop = high
        if stop > start:
            yield start, stop - start

    # the end

    async def seal(self, ref: ObjectRef) -> bool:
        """The object ``ref`` (same content id) now holds these bytes: become an ordinary clean content.

        Call it after the namespace has recorded the object: from here on the local copy may be evicted.
        False, and nothing has changed, if the content was written while checksums were computed, or is
        not of that size. After True this object is closed: read through ``Cache.read(ref)``, write through
        ``Cache.convert(ref)``.
        """
        if ref.content_id != self.content_id:
            raise InvalidArgument(f"object {ref.key} is not the content {self.content_id.hex()}")
        self._check_open()
        generation = self._generation
        if ref.size_bytes != self._size_bytes:
            return False
        dirty, tier = self._dirty, self._dirty.tier
        extents = await self._summed(ref.size_bytes) if tier.keeps_clean else {}
        async with self._lock:
            if self._closed or generation != self._generation:
                return False
            self._closed = True
            with trio.CancelScope(shield=True):
                if tier.keeps_clean and ref.size_bytes:
                    await self._move_to_tier(ref, extents)
                else:
                    if self._sidecar is None:
                        await dirty.reader.keep_sealed(ref, dirty.path_of(self.content_id))
                    await dirty.remove(self.content_id)
                self._close_sidecar()
        return True

    async def _summed(self, size_bytes: int) -> dict[int, Extent]:
        """Presence and checksums of what is local, by extent.

        Of a huge sparse file only extents with data: a record for each that is all zeros would cost more
        than reading zeros from the store, should anybody want them.
        """
        path = self._dirty.path_of(self.content_id)
        data_words = await self._with_file(lambda fd: _data_words(fd, size_bytes))
        count = blocks.extent_count(size_bytes)
        found: dict[int, Extent] = {}
        for number in range(count) if count <= _DENSE_EXTENTS else sorted(data_words):
            full = blocks.full_mask(size_bytes, number)
            word = full & ~self._absent(number, full)
            if word:
                extent = Extent(size_bytes, blocks.blocks_in_extent(size_bytes, number))
                await self._dirty.call_sealer(_sum_extent, path, extent, number, word,
                                              word & ~data_words.get(number, 0))
                found[number] = extent
        return found

    async def _move_to_tier(self, ref: ObjectRef, extents: dict[int, Extent]) -> None:
        """Under the lock."""
        dirty, tier = self._dirty, self._dirty.tier
        while tier.is_being_removed(ref.content_id):
            await tier.wait_change()
        source = dirty.path_of(self.content_id)
        stale = dirty.files.detach(self.content_id)
        sidecar = dirty.sidecar_path(self.content_id) if self._sidecar is not None else None
        await dirty.call(_move, source, device.object_path(tier.root, ref.content_id), sidecar, stale)
        dirty.drop(self.content_id)
        tier.adopt(ref, extents)

    async def discard(self) -> None:
        """The bytes are not wanted any more: drop them, durable or not. Closes."""
        async with self._lock:
            if self._closed:
                return
            self._closed = True
            self._close_sidecar()
            await self._dirty.remove(self.content_id)

    async def close(self) -> None:
        """Forget the descriptor; the bytes stay, dirty, until ``seal`` or ``discard``. Idempotent."""
        async with self._lock:
            if self._closed:
                return
            self._closed = True
            self._close_sidecar()
            self._dirty.entries[self.content_id].size_bytes = self._size_bytes
            fd = self._dirty.files.detach(self.content_id)
            if fd is not None:
                os.close(fd)

    def _close_sidecar(self) -> None:
        if self._sidecar is not None:
            self._sidecar.close()

    def _check_open(self) -> None:
        if self._closed:
            raise TierFailed(f"staging of content {self.content_id.hex()} is closed")

    async def _with_file(self, function: Callable[[int], T]) -> T:
        return await self._dirty.with_file(self.content_id, function)


def _try_write(fd: int, data: bytes, offset_bytes: int) -> OSError | None:
    try:
        device.pwrite_all(fd, data, offset_bytes)
    except OSError as error:
        return error
    return None


def _size_and_allocation(fd: int) -> tuple[int, int]:
    info = os.fstat(fd)
    return info.st_size, info.st_blocks * 512


def _data_words(fd: int, size_bytes: int) -> dict[int, int]:
    """Blocks that are not holes, by extent. Only for accounting: a hole and a block of zeros read alike."""
    words: dict[int, int] = {}
    for start, stop in device.data_ranges(fd, size_bytes):
        for number, low, high in blocks.extent_spans(start, stop):
            words[number] = words.get(number, 0) | blocks.range_mask(low, high)
    return words


def _sum_extent(path: str, extent: Extent, extent_no: int, word: int, zeros: int) -> None:
    """Worker thread: checksums of the blocks in ``word`` into ``extent``."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for first, count in blocks.runs(word & ~zeros):
            start = extent_no * EXTENT_SIZE_BYTES + first * BLOCK_SIZE_BYTES
            stop = min(start + count * BLOCK_SIZE_BYTES, extent.size_bytes)
            data = device.pread_all(fd, stop - start, start)
            if len(data) != stop - start:
                raise OSError(errno.EIO, "file is shorter than it was", path)
            extent.mark(first, record.checksums(data))
    finally:
        os.close(fd)
    for first, count in blocks.runs(zeros):
        for bit in range(first, first + count):
            length = blocks.block_length(extent.size_bytes, extent_no * EXTENT_BLOCKS + bit)
            extent.mark(bit, record.zero_checksum(length), 1 << bit)


def _move(source: str, target: str, sidecar: str | None, stale_fd: int | None) -> None:
    """Worker thread."""
    if stale_fd is not None:
        os.close(stale_fd)
    try:
        os.rename(source, target)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        os.rename(source, target)
    if sidecar is not None:
        device.unlink_if_there(sidecar)
