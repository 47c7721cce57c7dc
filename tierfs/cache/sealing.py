"""Sealing: the store has the bytes of a staging file, which becomes an ordinary clean copy as it is.

The steps, after the namespace has recorded the object (``staging`` has those before):

1. Checksums are computed beside ongoing reads; a write in between cancels the whole.
2. What readers of the object have fetched into the tier meanwhile is forgotten, and nobody uses that file
   any more (``Tier.surrender``): it is about to be replaced.
3. ``dirty/<hex>`` becomes ``objects/ab/<hex>``, and the sidecar is removed. *kill -9 or power cut
   here*: a file without records, which the next sweep removes; the bytes are in the store. (Between the
   two: a sidecar alone, that is the base; the namespace does not refer to it, and discards it.)
4. The records go into the index with the next commit.

``seal`` and ``summed`` are for the trio thread, all else here for worker threads. From step 2 on nobody else
changes the file (``Staging.locked``), and step 3 cannot be cancelled. Files are read in pieces of one extent,
a few threads at a time (``DirtyFiles.call_sealer``), so that sealing a large checkpoint leaves room for
others.

Raises ``TierFailed``; then the content is still dirty.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from functools import partial

import trio

from tierfs.cache import blocks, device, record
from tierfs.cache.blocks import EXTENT_BLOCKS, EXTENT_SIZE_BYTES
from tierfs.cache.dirty import DirtyFiles
from tierfs.cache.index import IndexWriteFailed
from tierfs.cache.overlay import Overlay
from tierfs.cache.record import Extent
from tierfs.cache.staging import Staging
from tierfs.errors import InvalidArgument, TierFailed
from tierfs.types import BLOCK_SIZE_BYTES, ContentId, ObjectRef

_DENSE_EXTENTS = 16384
_USUAL_SLACK_BYTES = 64 * 1024
"""The last block of a file, and what a file system keeps about it."""


async def seal(staging: Staging, ref: ObjectRef, *, on_clean: Callable[[], None] | None = None) -> bool:
    """The object ``ref`` (same content id) now holds these bytes: they become an ordinary clean content.

    Call it after the namespace has recorded the object: from here on the local copy may be evicted.
    False, and nothing has changed, if the content was written while checksums were computed, or is
    not of that size. After True ``staging`` is closed: read through ``Cache.read(ref)``, write through
    ``Cache.convert(ref)``. Raises ``TierFailed``; then it is still open, and dirty.

    ``on_clean`` is called just before the file goes away from here: until then reads may come from
    ``staging`` (they cost no request), from then on they have to come from the cache.
    """
    if ref.content_id != staging.content_id:
        raise InvalidArgument(f"object {ref.key} is not the content {staging.content_id.hex()}")
    staging.check_open()
    generation, overlay, tier = staging.generation, staging.overlay, staging.dirty.tier
    if ref.size_bytes != staging.size_bytes:
        return False
    keep = tier.keeps_clean and ref.size_bytes > 0
    extents: dict[int, Extent] = {}
    if keep:
        extents = await summed(staging.dirty, staging.content_id, ref.size_bytes, partial(_absent, overlay))
    async with staging.locked():
        if generation != staging.generation:
            return False
        if keep:
            await tier.surrender(ref.content_id)
        with trio.CancelScope(shield=True):
            if keep:
                try:
                    await _move_to_tier(staging, ref, extents, on_clean)
                finally:
                    tier.end_removal(ref.content_id)
            else:
                if on_clean is not None:
                    on_clean()
                if overlay is None and ref.size_bytes:
                    await staging.dirty.reader.keep_sealed(ref, staging.dirty.path_of(staging.content_id))
                await staging.dirty.remove(staging.content_id)
        staging.retire()
    return True


def _absent(overlay: Overlay | None, extent_no: int, mask: int) -> int:
    return 0 if overlay is None else overlay.absent(extent_no, mask)


async def _move_to_tier(staging: Staging, ref: ObjectRef, extents: dict[int, Extent],
                        on_clean: Callable[[], None] | None) -> None:
    """Under the lock, after ``surrender``."""
    dirty, tier = staging.dirty, staging.dirty.tier
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
        await dirty.remove(staging.content_id)
        return
    source = dirty.path_of(staging.content_id)
    stale = [dirty.files.detach(staging.content_id), tier.files.detach(ref.content_id)]
    sidecar = dirty.sidecar_path(staging.content_id) if staging.overlay is not None else None
    target = device.object_path(tier.root, ref.content_id)
    await dirty.call(move, source, target, sidecar, [fd for fd in stale if fd is not None])
    dirty.drop(staging.content_id)
    tier.adopt(ref, extents)


async def summed(dirty: DirtyFiles, content_id: ContentId, size_bytes: int,
                 absent: Callable[[int, int], int]) -> dict[int, Extent]:
    """Presence and checksums of what is local of that file, by extent.

    ``absent(extent_no, mask)``: which of these blocks are not. Of a huge sparse file only extents with data
    are returned: a record for each that is all zeros would cost more than reading zeros from the store,
    should anybody want them.
    """
    path = dirty.path_of(content_id)
    if size_bytes <= EXTENT_SIZE_BYTES:
        # One wake-up of a worker for all of it: most of what sealing a small file costs.
        word = blocks.full_mask(size_bytes, 0)
        return await dirty.call_sealer(_sum_small, path, size_bytes, word & ~absent(0, word))
    data = await dirty.with_file(content_id, lambda fd: _data_by_extent(fd, size_bytes))
    count = blocks.extent_count(size_bytes)
    found: dict[int, Extent] = {}
    for number in range(count) if count <= _DENSE_EXTENTS else sorted(data):
        full = blocks.full_mask(size_bytes, number)
        word = full & ~absent(number, full)
        if word:
            data_word, allocated = data.get(number, (0, 0))
            found[number] = await dirty.call_sealer(
                _sum_extent, path, size_bytes, number, word, word & ~data_word, allocated
            )
    return found


def _sum_small(path: str, size_bytes: int, word: int) -> dict[int, Extent]:
    """``summed`` for a file of one extent, of which the blocks in ``word`` are local."""
    if not word:
        return {}
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data_word, allocated = _data_by_extent(fd, size_bytes).get(0, (0, 0))
    finally:
        os.close(fd)
    return {0: _sum_extent(path, size_bytes, 0, word, word & ~data_word, allocated)}


def _data_by_extent(fd: int, size_bytes: int) -> dict[int, tuple[int, int]]:
    """(blocks that are not holes, bytes that are not), by extent.

    Only for accounting: a hole and a block of zeros read alike.
    """
    found: dict[int, tuple[int, int]] = {}
    for start, stop in device.data_ranges(fd, size_bytes):
        for number, low, high in blocks.extent_spans(start, stop):
            word, nbytes = found.get(number, (0, 0))
            rounded = -(-(high - low) // blocks.ALLOCATION_BYTES) * blocks.ALLOCATION_BYTES
            found[number] = (word | blocks.range_mask(low, high), nbytes + rounded)
    return found


def _sum_extent(
    path: str, size_bytes: int, extent_no: int, word: int, zeros: int, allocated_bytes: int
) -> Extent:
    """The extent with the blocks in ``word`` and checksums; the device holds ``allocated_bytes`` of it."""
    extent = Extent(size_bytes, blocks.blocks_in_extent(size_bytes, extent_no))
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
    for bit in blocks.bits(zeros):
        length = blocks.block_length(extent.size_bytes, extent_no * EXTENT_BLOCKS + bit)
        extent.mark(bit, record.zero_checksum(length), 1 << bit)
    extent.slack_bytes = max(0, extent.allocated(extent_no) - allocated_bytes)
    return extent


def _give_back_unused(path: str) -> None:
    """Space that was allocated and never written, and behind the end: no record would count it."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        info = os.fstat(fd)
        ranges = device.data_ranges(fd, info.st_size)
        if info.st_blocks * 512 <= sum(stop - start for start, stop in ranges) + _USUAL_SLACK_BYTES:
            return
        os.ftruncate(fd, info.st_size)
        position = 0
        for start, stop in [*ranges, (info.st_size, info.st_size)]:
            if start > position:
                device.punch(fd, position, start - position)
            position = stop
    finally:
        os.close(fd)


def move(source: str, target: str, sidecar: str | None, stale_fds: Sequence[int]) -> None:
    """From ``dirty`` to ``objects``, in which nobody writes any more. Raises ``OSError``."""
    for fd in stale_fds:
        os.close(fd)
    _give_back_unused(source)
    try:
        os.rename(source, target)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        os.rename(source, target)
    if sidecar is not None:
        device.unlink_if_there(sidecar)
