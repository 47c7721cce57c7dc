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
    6. ``truncate`` below the limit: the file is cut, then the limit is lowered durably, before anything is
       written again. *kill -9* in between: a limit behind the end of the file is lowered at the next start.

seal (the store has the bytes, and the namespace has recorded that)
    1. Checksums are computed beside ongoing reads; a write in between cancels the whole.
    2. What readers of the object have fetched into the tier meanwhile is forgotten, and nobody uses that file
       any more (``Tier.surrender``): it is about to be replaced.
    3. ``dirty/<hex>`` becomes ``objects/ab/<hex>``, and the sidecar is removed. *kill -9 or power cut
       here*: a file without records, which the next sweep removes; the bytes are in the store. (Between the
       two: a sidecar alone, that is the base; the namespace does not refer to it, and discards it.)
    4. The records go into the index with the next commit.

discard
    The data file is unlinked, then the sidecar. *kill -9 in between*: the content is its base again; the
    namespace does not refer to it, and discards it anew at the next start.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TypeVar

import trio

from tierfs.cache import blocks, device, sealing
from tierfs.cache.blocks import EXTENT_BLOCKS
from tierfs.cache.dirty import DirtyFiles
from tierfs.cache.health import is_no_space
from tierfs.cache.index import IndexWriteFailed
from tierfs.cache.overlay import Overlay
from tierfs.cache.record import Extent
from tierfs.cache.sidecar import Sidecar
from tierfs.errors import InvalidArgument, TierFailed
from tierfs.types import BLOCK_SIZE_BYTES, ContentId, ObjectRef

T = TypeVar("T")

NOWAIT_BYTES = 128 * 1024
"""The largest write that is done on the trio thread."""
_TICK_NS = 10_000_000
_EVERY_BLOCK = (1 << EXTENT_BLOCKS) - 1


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
        self._is_direct = False
        """Others may write into the file, or have written, without passing here."""
        self._seen: tuple[int, int] | None = None
        """Size and mtime of the file when it was last looked at for direct writes."""
        self._overlay = None if sidecar is None else Overlay(sidecar)

    @property
    def base(self) -> ObjectRef | None:
        """What absent blocks are filled from; None for a file made here (nothing is absent)."""
        return None if self._overlay is None else self._overlay.base

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
    def is_unsynced(self) -> bool:
        """Written since the last sync, as far as that has been noticed."""
        entry = self._dirty.entries.get(self.content_id)
        return entry is not None and entry.unsynced

    def _changed(self) -> None:
        """After the bytes have been changed. Before would be too early: a sync in between would count as one
        of them."""
        self._generation += 1
        self._dirty.note_written(self.content_id)

    @property
    def allocated_bytes(self) -> int:
        """What the file takes on the device; holes take nothing."""
        return self._dirty.allocated_bytes(self.content_id)

    # reading

    def read_nowait(self, offset_bytes: int, length_bytes: int) -> bytes | None:
        """The bytes (clipped at the size), or None if they cannot be had without waiting."""
        end = min(offset_bytes + length_bytes, self._size_bytes)
        if end <= offset_bytes:
            return b""
        if self._closed or (self._overlay is not None and self._overlay.any_absent(offset_bytes, end)):
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
            self._check_open()
            end = min(offset_bytes + length_bytes, self._size_bytes)
            if end <= offset_bytes:
                await trio.lowlevel.checkpoint()
                return b""
            data = await self._read_parts(offset_bytes, end)
            if len(data) == end - offset_bytes:
                return data
            # Cut short by a truncate meanwhile: the size has changed.

    async def _read_parts(self, start: int, stop: int) -> bytes:
        overlay = self._overlay
        if overlay is None or not overlay.any_absent(start, stop):
            return await self._read_own(start, stop)
        return b"".join([
            await (self._read_base(overlay, low, high) if absent else self._read_own(low, high))
            for low, high, absent in overlay.parts(start, stop)
        ])

    async def _read_own(self, start: int, stop: int) -> bytes:
        return await self.with_file(lambda fd: device.pread_all(fd, stop - start, start))

    async def _read_base(self, overlay: Overlay, start: int, stop: int) -> bytes:
        limit = min(stop, overlay.limit_bytes)
        data = await self._dirty.reader.read(overlay.base, start, limit - start) if limit > start else b""
        touched = range(start // BLOCK_SIZE_BYTES, blocks.block_count(stop))
        if limit != min(stop, overlay.limit_bytes) or not all(overlay.is_absent(n) for n in touched):
            # Written or cut while the base was being fetched: what is in the file counts.
            return await self._read_parts(start, stop)
        return data.ljust(stop - start, b"\0")

    # writing

    def write_nowait(self, offset_bytes: int, data: bytes) -> bool:
        """Write all of ``data`` if that can be done without waiting; False: call ``write``."""
        dirty, overlay = self._dirty, self._overlay
        nbytes = len(data)
        end = offset_bytes + nbytes
        if (nbytes > NOWAIT_BYTES or self._closed or self._lock.locked() or not dirty.may_write_now
                or (overlay is not None and overlay.partly_covered(offset_bytes, end))):
            return False
        if not nbytes:
            return True
        room = nbytes + 2 * blocks.ALLOCATION_BYTES
        if not dirty.try_reserve(room):
            return False
        try:
            fd = dirty.files.get(self.content_id)
            if fd is None:
                return False
            if overlay is not None:
                self._about_to_change(overlay, offset_bytes, end)
            try:
                written = dirty.write_now(fd, data, offset_bytes)
            except OSError:
                # Nothing was written. The slow path makes room, or reports the error.
                return False
            self._changed()
            self._size_bytes = max(self._size_bytes, offset_bytes + written)
            if overlay is not None and written == nbytes:
                overlay.mark_present(offset_bytes, end)
            dirty.set_allocated(self.content_id, os.fstat(fd).st_blocks * 512)
            return written == nbytes
        finally:
            dirty.release(room)

    def _about_to_change(self, overlay: Overlay, offset_bytes: int, end_bytes: int) -> None:
        overlay.mark_changed(offset_bytes, end_bytes)
        self._dirty.note_written(self.content_id)

    async def write(self, offset_bytes: int, data: bytes) -> None:
        """Write all of ``data``; returns once it is in the page cache of the write tier.

        Raises ``TierFull`` if there is no room, nothing can be evicted and nothing drains; ``TierFailed``
        on an I/O error; ``ObjectTooLarge`` behind the largest offset that the file system knows;
        ``StaleContent`` or ``StoreError`` if a block must first be filled from ``base``.
        """
        if not data:
            await trio.lowlevel.checkpoint()
            return
        async with self.locked():
            await self.fill_edges(offset_bytes, offset_bytes + len(data))
            await self._put(offset_bytes, data, changed=True)

    async def _put(self, offset_bytes: int, data: bytes, *, changed: bool) -> None:
        """Under the lock: into the file, however much has to be moved out of the way."""
        await self.apply(offset_bytes, offset_bytes + len(data),
                         lambda fd: device.pwrite_all(fd, data, offset_bytes),
                         room_bytes=len(data), grows=changed, changed=changed)

    # for ``ranges``, and what writes are made of

    @property
    def overlay(self) -> Overlay | None:
        """Which blocks are absent; None for a file made here."""
        return self._overlay

    @property
    def dirty(self) -> DirtyFiles:
        return self._dirty

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Nobody else changes the file or turns it clean, but for direct writes. Raises ``TierFailed``."""
        async with self._lock:
            self._check_open()
            yield

    async def fill_edges(self, offset_bytes: int, end_bytes: int) -> None:
        """Under the lock: bring those absent blocks here that a change of that range does not replace."""
        overlay = self._overlay
        if overlay is None:
            return
        for number in overlay.partly_covered(offset_bytes, end_bytes):
            start = number * BLOCK_SIZE_BYTES
            stop = min(start + BLOCK_SIZE_BYTES, overlay.limit_bytes)
            body = await self._dirty.reader.read(overlay.base, start, stop - start)
            await self._put(start, body, changed=False)

    async def apply(
        self, offset_bytes: int, end_bytes: int, work: Callable[[int], None], *,
        room_bytes: int, grows: bool, changed: bool = True, present: bool = True,
    ) -> None:
        """Under the lock: ``work(fd)`` in a worker, and all that has to be known and noted around it.

        ``room_bytes``: what it may take on the device; 0: it goes ahead however full that is. ``grows``: the
        file reaches to the end of the range afterwards. ``changed``: bytes of the range may be others then.
        ``present``: all blocks of the range are in the file then.
        """
        dirty, overlay = self._dirty, self._overlay
        room = room_bytes + 2 * blocks.ALLOCATION_BYTES if room_bytes else 0
        if room and not dirty.try_reserve(room):
            if not await self.with_file(lambda fd: device.has_hole(fd, offset_bytes, end_bytes)):
                room = 0  # Overwriting takes nothing.
            await dirty.reserve(room)
        with dirty.releasing(room):
            if changed and overlay is not None:
                self._about_to_change(overlay, offset_bytes, end_bytes)
            try:
                error = await self.with_file(lambda fd: _try(work, fd))
                while error is not None and is_no_space(error) and await dirty.make_real_room(room_bytes):
                    error = await self.with_file(lambda fd: _try(work, fd))
                if error is None:
                    size = max(self._size_bytes, end_bytes) if grows else self._size_bytes
                    if changed or size != self._size_bytes:
                        self._changed()
                    self._size_bytes = size
                    if present and overlay is not None:
                        overlay.mark_present(offset_bytes, end_bytes)
            finally:
                with trio.CancelScope(shield=True):
                    await self._measure()
        if error is not None:
            raise dirty.failure(error) from error

    async def replace(self, size_bytes: int, work: Callable[[int], None]) -> None:
        """``work(fd)`` in a worker writes the first ``size_bytes``; what is behind goes. See ``live``."""
        if size_bytes < self._size_bytes:
            await self.truncate(size_bytes)
        if size_bytes:
            async with self.locked():
                await self.apply(0, size_bytes, work, room_bytes=size_bytes, grows=True)

    async def copy_in(
            self, work: Callable[[], Awaitable[int]], offset_bytes: int, length_bytes: int) -> int:
        """Under the lock, with room reserved: ``work`` copies into that range; how much. See ``ranges``."""
        overlay = self._overlay
        if overlay is not None:
            self._about_to_change(overlay, offset_bytes, offset_bytes + length_bytes)
        try:
            copied = await work()
            if overlay is not None and overlay.partly_covered(offset_bytes, offset_bytes + copied):
                # It ended early, in a block whose rest is not here.
                copied = max(0, copied - (offset_bytes + copied) % BLOCK_SIZE_BYTES)
            if copied:
                self._changed()
                self._size_bytes = max(self._size_bytes, offset_bytes + copied)
                if overlay is not None:
                    overlay.mark_present(offset_bytes, offset_bytes + copied)
        finally:
            with trio.CancelScope(shield=True):
                await self._measure()
        return copied

    async def _measure(self) -> None:
        """Under the lock: size and allocation as the file system has them."""
        size, allocated = await self.with_file(_size_and_allocation)
        if self._is_direct:
            # What is there now may be somebody's write.
            self._size_bytes = size
        elif size > self._size_bytes:
            # A write that failed half way has grown the file.
            await self.with_file(lambda fd: os.ftruncate(fd, self._size_bytes))
        self._dirty.set_allocated(self.content_id, allocated)

    async def truncate(self, size_bytes: int) -> None:
        """Set the size; what is cut off is gone, what is added reads as zeros and costs nothing."""
        async with self._lock:
            self._check_open()
            overlay = self._overlay
            with trio.CancelScope(shield=True):
                self._generation += 1
                self._size_bytes = min(self._size_bytes, size_bytes)
                await self.with_file(lambda fd: os.ftruncate(fd, size_bytes))
                self._dirty.note_written(self.content_id)
                if overlay is not None and size_bytes < overlay.limit_bytes:
                    await self._dirty.call(overlay.sidecar.set_limit, size_bytes)
                self._size_bytes = size_bytes
                await self._measure()

    @property
    def identity(self) -> tuple[int, int] | None:
        """(device, inode) of the file; None if it has gone. Blocks for as long as stat(2) takes."""
        try:
            return device.identity(self._file())
        except FileNotFoundError:
            return None

    def _file(self) -> int | str:
        """What stat(2) takes: a descriptor if there is one."""
        fd = self._dirty.files.get(self.content_id)
        return self._dirty.path_of(self.content_id) if fd is None else fd

    def lend(self, mtime_ns: int) -> int | None:
        """A descriptor of the file, into which others may write from now on; None: it has not got all bytes.

        The caller closes it. It is not for writing, so that ``device.is_open_for_writing`` sees who writes.
        ``mtime_ns``: of the content, which the file gets. Blocks for as long as open(2) takes.
        """
        if self._closed or (self._overlay is not None and self._overlay.any_absent(0, self._size_bytes)):
            return None
        try:
            self.begin_direct_writes(mtime_ns)
            return device.open_to_lend(self._dirty.path_of(self.content_id))
        except OSError:
            return None

    async def is_open_elsewhere(self) -> bool:
        """Whether a file of an earlier run is open for writing: through a mount that died.

        May say so by mistake while another request uses the file. Raises ``TierFailed``.
        """
        entry = self._dirty.entries[self.content_id]
        if not entry.is_found:
            await trio.lowlevel.checkpoint()
            return False
        fd = self._dirty.files.detach(self.content_id)
        path = self._dirty.path_of(self.content_id)
        entry.is_found = await self._dirty.call(device.close_and_look_for_writers, fd, path)
        return entry.is_found

    def begin_direct_writes(self, mtime_ns: int) -> None:
        """Others may write from now on. Raises ``OSError``."""
        if self._is_direct:
            return
        file = self._file()
        os.utime(file, ns=(mtime_ns, mtime_ns))
        info = os.stat(file)
        self._is_direct = True
        self._seen = info.st_size, info.st_mtime_ns

    def note_direct_writes(self, mtime_ns: int) -> None:
        """Others write already, into a file that was empty and had that mtime."""
        self._is_direct = True
        self._seen = 0, mtime_ns

    def set_mtime(self, mtime_ns: int) -> None:
        """Of the file. Raises ``OSError``."""
        if self._seen is None or self._seen[1] != mtime_ns:
            file = self._file()
            os.utime(file, ns=(mtime_ns, mtime_ns))
            if self._seen is not None:
                # Should somebody have written just now, it cannot be seen any more.
                self._generation += 1
                self._seen = self._seen[0], os.stat(file).st_mtime_ns

    def measure_direct_writes(self) -> None:
        """What the file takes on the device by now. Blocks for as long as fstat(2) takes."""
        try:
            info = os.stat(self._file())
        except OSError:
            return  # gone, or trouble that the next request about it reports
        if (info.st_size, info.st_mtime_ns) != self._seen:
            self._dirty.note_written(self.content_id)
        self._dirty.set_allocated(self.content_id, info.st_blocks * 512)

    def notice_direct_writes(self, mtime_ns: int) -> int | None:
        """Take in what others have written into the file.

        ``mtime_ns``: what is known of the content; a file that an earlier engine lent may have another.
        Returns its mtime if it has been changed since the last look, else None. All of it counts as changed.
        """
        if self._closed:
            return None
        self._is_direct = True
        try:
            info = os.stat(self._file())
        except FileNotFoundError:
            return None
        known = self._seen or (self._size_bytes, mtime_ns)
        self._seen = info.st_size, info.st_mtime_ns
        if known == self._seen:
            return None
        self._changed()
        self._size_bytes = info.st_size
        if self._overlay is not None:
            self._about_to_change(self._overlay, 0, info.st_size)
            self._overlay.mark_present(0, info.st_size)
        self._dirty.set_allocated(self.content_id, info.st_blocks * 512)
        if 0 < mtime_ns - info.st_mtime_ns < _TICK_NS:
            # The kernel's clock for files may be a tick behind ours: no reason for time to go backwards.
            return mtime_ns
        return info.st_mtime_ns

    # durability

    async def sync(self) -> None:
        """Everything written before the call is durable on the device when it returns: bytes, size, name,
        and which blocks are ours. Raises ``TierFailed``."""
        self._check_open()
        dirty, overlay = self._dirty, self._overlay
        entry = dirty.entries[self.content_id]
        present = overlay.present_words() if overlay is not None else {}
        changes = entry.changes
        if entry.named:
            await self.with_file(os.fdatasync)
        else:
            await self.with_file(self._sync_with_name)
            entry.named = True
        if overlay is not None:
            fresh = overlay.newly_durable(present)
            await dirty.call(overlay.sidecar.set_durable, fresh)
            overlay.note_durable(fresh)
        dirty.note_synced(self.content_id, changes)

    def _sync_with_name(self, fd: int) -> None:
        """In a worker: one wake-up for both."""
        os.fdatasync(fd)
        device.sync_directory(self._dirty.directory)

    async def fill(self) -> None:
        """Make every absent block local, from ``base``. Raises what ``read`` and ``write`` raise."""
        overlay = self._overlay
        await trio.lowlevel.checkpoint()
        if overlay is None:
            return
        for extent_no in range(blocks.extent_count(overlay.limit_bytes)):
            for first, count in blocks.runs(overlay.absent(extent_no, _EVERY_BLOCK)):
                start = (extent_no * EXTENT_BLOCKS + first) * BLOCK_SIZE_BYTES
                stop = min(start + count * BLOCK_SIZE_BYTES, overlay.limit_bytes)
                if stop <= start:
                    continue
                data = await self._dirty.reader.read(overlay.base, start, stop - start)
                async with self._lock:
                    self._check_open()
                    stop = min(stop, overlay.limit_bytes)
                    if stop <= start:
                        continue
                    for low, high, absent in list(overlay.parts(start, stop)):
                        if absent:
                            await self._put(low, data[low - start : high - start], changed=False)

    def unchanged_ranges(self) -> Iterator[tuple[int, int]]:
        """(offset, length) of what is known to equal ``base`` at the same offset; for server-side copies."""
        return iter(()) if self._overlay is None else self._overlay.unchanged_ranges(self._size_bytes)

    # the end

    async def seal(self, ref: ObjectRef, *, on_clean: Callable[[], None] | None = None) -> bool:
        """The object ``ref`` (same content id) now holds these bytes: become an ordinary clean content.

        Call it after the namespace has recorded the object: from here on the local copy may be evicted.
        False, and nothing has changed, if the content was written while checksums were computed, or is
        not of that size. After True this object is closed: read through ``Cache.read(ref)``, write through
        ``Cache.convert(ref)``. Raises ``TierFailed``; then it is still open, and dirty.

        ``on_clean`` is called just before the file goes away from here: until then reads may come from this
        object (they cost no request), from then on they have to come from the cache.
        """
        if ref.content_id != self.content_id:
            raise InvalidArgument(f"object {ref.key} is not the content {self.content_id.hex()}")
        self._check_open()
        generation, overlay, tier = self._generation, self._overlay, self._dirty.tier
        if ref.size_bytes != self._size_bytes:
            return False
        keep = tier.keeps_clean and ref.size_bytes > 0
        extents: dict[int, Extent] = {}
        if keep:
            extents = await sealing.summed(self._dirty, self.content_id, ref.size_bytes, self._absent)
        async with self._lock:
            self._check_open()
            if generation != self._generation:
                return False
            if keep:
                await tier.surrender(ref.content_id)
            with trio.CancelScope(shield=True):
                if keep:
                    try:
                        await self._move_to_tier(ref, extents, on_clean)
                    finally:
                        tier.end_removal(ref.content_id)
                else:
                    if on_clean is not None:
                        on_clean()
                    if overlay is None and ref.size_bytes:
                        await self._dirty.reader.keep_sealed(ref, self._dirty.path_of(self.content_id))
                    await self._dirty.remove(self.content_id)
            self._end()
        return True

    def _absent(self, extent_no: int, mask: int) -> int:
        return 0 if self._overlay is None else self._overlay.absent(extent_no, mask)

    async def _move_to_tier(
            self, ref: ObjectRef, extents: dict[int, Extent], on_clean: Callable[[], None] | None) -> None:
        """Under the lock, after ``surrender``."""
        dirty, tier = self._dirty, self._dirty.tier
        if tier.index.committed_has(ref.content_id):
            # Else a crash would leave records of blocks that this file may not have.
            try:
                await tier.commit()
            except IndexWriteFailed as error:
                raise TierFailed(f"the index of tier {tier.name} cannot be written: {error}") from error
        if on_clean is not None:
            on_clean()
        if tier.place_of(ref.content_id) is not None:
            # Fetched meanwhile, all of it, and packed with others.
            await dirty.remove(self.content_id)
            return
        source = dirty.path_of(self.content_id)
        stale = [dirty.files.detach(self.content_id), tier.files.detach(ref.content_id)]
        sidecar = dirty.sidecar_path(self.content_id) if self._overlay is not None else None
        target = device.object_path(tier.root, ref.content_id)
        await dirty.call(sealing.move, source, target, sidecar, [fd for fd in stale if fd is not None])
        dirty.drop(self.content_id)
        tier.adopt(ref, extents)

    async def discard(self) -> None:
        """The bytes are not wanted any more: drop them, durable or not. Closes. Idempotent."""
        async with self._lock:
            if not self._closed:
                self._end()
                await self._dirty.remove(self.content_id)

    async def close(self) -> None:
        """Forget the descriptor; the bytes stay, dirty, until ``seal`` or ``discard``. Idempotent."""
        async with self._lock:
            if not self._closed:
                self._close()

    def close_now(self) -> bool:
        """``close``, unless that has to wait for somebody; then False, and nothing has happened."""
        if self._lock.locked():
            return False
        if not self._closed:
            self._close()
        return True

    def _close(self) -> None:
        self._end()
        self._dirty.entries[self.content_id].size_bytes = self._size_bytes
        fd = self._dirty.files.detach(self.content_id)
        if fd is not None:
            os.close(fd)

    def _end(self) -> None:
        self._closed = True
        if self._overlay is not None:
            self._overlay.sidecar.close()

    def _check_open(self) -> None:
        if self._closed:
            raise TierFailed(f"staging of content {self.content_id.hex()} is closed")

    async def with_file(self, function: Callable[[int], T]) -> T:
        """``function(fd)`` in a worker."""
        return await self._dirty.with_file(self.content_id, function)


def _try(work: Callable[[int], None], fd: int) -> OSError | None:
    try:
        work(fd)
    except OSError as error:
        return error
    return None


def _size_and_allocation(fd: int) -> tuple[int, int]:
    info = os.fstat(fd)
    return info.st_size, info.st_blocks * 512
