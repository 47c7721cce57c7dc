"""Arithmetic of blocks and extents, and a sparse bitmap over blocks. Pure; no I/O.

A content is cut into blocks of 128 KiB (presence, checksums) and extents of 64 blocks (8 MiB: one index
record, one unit of eviction, the largest request to the store). The blocks of one extent are the bits of
one 64-bit word, bit 0 first.
"""

from __future__ import annotations

from collections.abc import Iterator

from tierfs.types import BLOCK_SIZE_BYTES as BLOCK_SIZE_BYTES

EXTENT_BLOCKS = 64
EXTENT_SIZE_BYTES = EXTENT_BLOCKS * BLOCK_SIZE_BYTES
ALLOCATION_BYTES = 4096
"""What a local file system gives to a file at least, and at a time: the unit of accounting."""


def block_count(size_bytes: int) -> int:
    """Blocks of a content of that size."""
    return -(-size_bytes // BLOCK_SIZE_BYTES)


def extent_count(size_bytes: int) -> int:
    return -(-size_bytes // EXTENT_SIZE_BYTES)


def blocks_in_extent(size_bytes: int, extent_no: int) -> int:
    """How many blocks that extent of a content of that size has (0 if it lies behind the end)."""
    return max(0, min(EXTENT_BLOCKS, block_count(size_bytes) - extent_no * EXTENT_BLOCKS))


def span_mask(first: int, count: int) -> int:
    """A word with ``count`` bits set from bit ``first``."""
    return ((1 << count) - 1) << first


def full_mask(size_bytes: int, extent_no: int) -> int:
    """The word of an extent that is all there."""
    return (1 << blocks_in_extent(size_bytes, extent_no)) - 1


def block_length(size_bytes: int, block_no: int) -> int:
    """Bytes in that block: a full block, except at the end of the content."""
    return max(0, min(BLOCK_SIZE_BYTES, size_bytes - block_no * BLOCK_SIZE_BYTES))


def allocated_bytes(mask: int, size_bytes: int, extent_no: int) -> int:
    """What the blocks in ``mask`` of that extent take on a device, rounded up as a file system does."""
    count = mask.bit_count()
    total = count * BLOCK_SIZE_BYTES
    last = block_count(size_bytes) - 1
    if last // EXTENT_BLOCKS == extent_no and mask >> (last % EXTENT_BLOCKS) & 1:
        tail = size_bytes - last * BLOCK_SIZE_BYTES
        total -= BLOCK_SIZE_BYTES - (-(-tail // ALLOCATION_BYTES) * ALLOCATION_BYTES)
    return total


def content_bytes(mask: int, size_bytes: int, extent_no: int) -> int:
    """Bytes of the content that the blocks in ``mask`` of that extent hold."""
    total = mask.bit_count() * BLOCK_SIZE_BYTES
    last = block_count(size_bytes) - 1
    if last // EXTENT_BLOCKS == extent_no and mask >> (last % EXTENT_BLOCKS) & 1:
        total -= BLOCK_SIZE_BYTES - (size_bytes - last * BLOCK_SIZE_BYTES)
    return total


def runs(mask: int) -> Iterator[tuple[int, int]]:
    """(first, count) of each run of set bits, in order."""
    position = 0
    while mask:
        zeros = (mask & -mask).bit_length() - 1
        position += zeros
        mask >>= zeros
        ones = (~mask & (mask + 1)).bit_length() - 1
        yield position, ones
        position += ones
        mask >>= ones


def bits(mask: int) -> Iterator[int]:
    """Numbers of the set bits, in order."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def extent_spans(offset_bytes: int, end_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(extent number, first offset, end offset) of a byte range, cut at extent boundaries."""
    while offset_bytes < end_bytes:
        extent_no = offset_bytes // EXTENT_SIZE_BYTES
        stop = min(end_bytes, (extent_no + 1) * EXTENT_SIZE_BYTES)
        yield extent_no, offset_bytes, stop
        offset_bytes = stop


def range_mask(offset_bytes: int, end_bytes: int) -> int:
    """The word for a non-empty byte range that lies inside one extent: every block that it touches."""
    first = offset_bytes // BLOCK_SIZE_BYTES
    last = (end_bytes - 1) // BLOCK_SIZE_BYTES
    return span_mask(first % EXTENT_BLOCKS, last - first + 1)
