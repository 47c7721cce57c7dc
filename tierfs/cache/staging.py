"""Staging: the bytes of one file that the store does not have yet.

Trio thread only. ``write_nowait`` and ``read_nowait`` do their system call on it (page cache only), all
else goes to worker threads. ``_lock`` is held by whatever changes the file and has to wait in between
(slow writes, truncate, the writing part of ``fill``); ``write_nowait`` steps back while it is held. Reads
take no lock: they look again at which blocks are local after they waited.

Writes that do not pass here are told by ``direct_writes``; ``sealing`` turns the content clean.

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

from tierfs.cache import blocks, device
from tierfs.cache.blocks import EXTENT_BLOCKS
from tierfs.cache.dirty import DirtyFiles
from tierfs.cache.health import is_no_space
from tierfs.cache.overlay import Overlay
from tierfs.cache.sidecar import Sidecar
from tierfs.errors import TierFailed
from tierfs.types import BLOCK_SIZE_BYTES, ContentId, ObjectRef

T = TypeVar("T")

NOWAIT_BYTES = 128 * 1024
"""The largest write that is done on the trio thread."""
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
        self.is_direct = False
        """Others may write into the file, or have written, without passing here: see ``direct_writes``."""
        self.seen: tuple[int, int] | None = None
        """Size and mtime of the file when it was last looked at for such writes."""
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

    def note_rewritten(self, size_bytes: int, allocated_bytes: int) -> None:
        """Others have changed the file, of that size now, and it may be anywhere. See ``direct_writes``."""
        self._changed()
        self._size_bytes = size_bytes
        if self._overlay is not None:
            self._about_to_change(self._overlay, 0, size_bytes)
            self._overlay.mark_present(0, size_bytes)
        self._dirty.set_allocated(self.content_id, allocated_bytes)

    def doubt(self) -> None:
        """Nobody can tell any more whether others have changed it: the generation grows as if they had."""
        self._generation += 1

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
            self.check_open()
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
            self.check_open()
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
        if self.is_direct:
            # What is there now may be somebody's write.
            self._size_bytes = size
        elif size > self._size_bytes:
            # A write that failed half way has grown the file.
            await self.with_file(lambda fd: os.ftruncate(fd, self._size_bytes))
        self._dirty.set_allocated(self.content_id, allocated)

    async def truncate(self, size_bytes: int) -> None:
        """Set the size; what is cut off is gone, what is added reads as zeros and costs nothing."""
        async with self._lock:
            self.check_open()
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

    # durability

    async def sync(self) -> None:
        """Everything written before the call is durable on the device when it returns: bytes, size, name,
        and which blocks are ours. Raises ``TierFailed``."""
        self.check_open()
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
                    self.check_open()
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

    async def discard(self) -> None:
        """The bytes are not wanted any more: drop them, durable or not. Closes. Idempotent."""
        async with self._lock:
            if not self._closed:
                self.retire()
                await self._dirty.remove(self.content_id)

    async def close(self) -> None:
        """Forget the descriptor; the bytes stay, dirty, until ``sealing.seal`` or ``discard``. Idempotent."""
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
        self.retire()
        self._dirty.entries[self.content_id].size_bytes = self._size_bytes
        fd = self._dirty.files.detach(self.content_id)
        if fd is not None:
            os.close(fd)

    def retire(self) -> None:
        """Under the lock, or with nobody else at it: this object is closed; its file is somebody else's."""
        self._closed = True
        if self._overlay is not None:
            self._overlay.sidecar.close()

    def check_open(self) -> None:
        """Raises ``TierFailed`` if it is closed."""
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
