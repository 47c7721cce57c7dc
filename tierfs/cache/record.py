"""The record of one extent, in memory and in a tier's index. Pure; no I/O.

Binary, little endian: a fixed head, eight bytes of checksum for each block of the extent, then the
identity of the object (ETag, version id, key; NUL between them) so that a tier explains itself.

======== ====== =============================================================================
offset   type   meaning
======== ====== =============================================================================
0        u64    size of the whole content in bytes
8        u64    present: the file holds these blocks
16       u64    zeros: present blocks known to be holes (nothing allocated)
24       u64    unverified: present blocks that must match their checksum before anything else
32       u64    segment that holds the content; 0: a file of its own
40       u64    offset of the content in its segment
48       u32    epoch: number of unclean reboots of the tier when this was written
52       u32    slack: bytes of present blocks that are holes all the same (a file that was written sparsely)
56       u16    number of checksums
58       u16    length of the identity
60       u32    0
======== ====== =============================================================================
"""

from __future__ import annotations

import struct

import xxhash

from tierfs.cache import blocks
from tierfs.types import BLOCK_SIZE_BYTES, ObjectRef

_HEAD = struct.Struct("<QQQQQQIIHHI")
SUM_BYTES = 8
_WORD = (1 << 64) - 1
_ZERO_SUM: dict[int, bytes] = {}


class BadRecord(ValueError):
    """An index record that does not decode: damage, treated as absent."""


class Extent:
    """Presence and checksums of up to 64 blocks. Mutable; trio thread only.

    ``busy`` counts worker threads that read or fill it right now: such an extent is never evicted.
    """

    __slots__ = ("busy", "place_bytes", "present", "segment", "size_bytes", "slack_bytes", "sums",
                 "unverified", "zeros")

    def __init__(self, size_bytes: int, block_total: int) -> None:
        self.size_bytes = size_bytes
        self.present = 0
        self.zeros = 0
        self.unverified = 0
        self.slack_bytes = 0
        self.segment = 0
        self.place_bytes = 0
        self.sums = bytearray(block_total * SUM_BYTES)
        self.busy = 0

    def sum_of(self, bit: int) -> bytes:
        return bytes(self.sums[bit * SUM_BYTES : (bit + 1) * SUM_BYTES])

    def allocated(self, extent_no: int) -> int:
        """Bytes on the device, by our accounting."""
        return max(0, blocks.allocated_bytes(self.present & ~self.zeros, self.size_bytes, extent_no)
                   - self.slack_bytes)

    def mark(self, first: int, sums: bytes, zeros: int = 0) -> None:
        """Blocks from bit ``first`` are there and right; ``sums`` holds their checksums."""
        mask = blocks.span_mask(first, len(sums) // SUM_BYTES)
        self.sums[first * SUM_BYTES : first * SUM_BYTES + len(sums)] = sums
        self.present |= mask
        self.unverified &= ~mask
        self.zeros = self.zeros & ~mask | zeros & mask

    def clear(self, mask: int) -> None:
        self.present &= ~mask
        self.unverified &= ~mask
        self.zeros &= ~mask


def checksums(data: bytes | memoryview) -> bytes:
    """Checksums (xxh3, 64 bit, little endian) of the blocks of ``data``, which starts at a block boundary."""
    view = memoryview(data)
    return b"".join(
        xxhash.xxh3_64_intdigest(view[start : start + BLOCK_SIZE_BYTES]).to_bytes(SUM_BYTES, "little")
        for start in range(0, len(view), BLOCK_SIZE_BYTES)
    )


def zero_checksum(length_bytes: int) -> bytes:
    """The checksum of one block of zeros of that length."""
    found = _ZERO_SUM.get(length_bytes)
    if found is None:
        found = checksums(bytes(length_bytes))
        if length_bytes == BLOCK_SIZE_BYTES:
            _ZERO_SUM[length_bytes] = found
    return found


def identity_of(ref: ObjectRef) -> bytes:
    """The identity that goes into the records of that object version."""
    text = "\0".join((ref.etag, ref.version_id or "", ref.key))
    return text.encode("utf-8", "surrogatepass")[:0xFFFF]


def encode(extent: Extent, epoch: int, identity: bytes) -> bytes:
    head = _HEAD.pack(extent.size_bytes, extent.present, extent.zeros, extent.unverified, extent.segment,
                      extent.place_bytes, epoch, extent.slack_bytes, len(extent.sums) // SUM_BYTES,
                      len(identity), 0)
    return head + extent.sums + identity


def decode(value: bytes | memoryview, extent_no: int, epoch: int) -> Extent:
    """Raises ``BadRecord``. Nothing in the record is believed that the rest of it contradicts.

    A record of an older epoch was written before an unclean reboot: all of it is unverified.
    """
    if len(value) < _HEAD.size:
        raise BadRecord("record too short")
    (size, present, zeros, unverified, segment, place, written, slack, sum_count, identity_bytes,
     _) = _HEAD.unpack_from(value)
    total = blocks.blocks_in_extent(size, extent_no)
    if sum_count != total or len(value) != _HEAD.size + total * SUM_BYTES + identity_bytes:
        raise BadRecord("record length and size disagree")
    if present >> total or zeros & ~present or unverified & ~present:
        raise BadRecord("record marks blocks that cannot be there")
    extent = Extent(size, 0)
    extent.present, extent.zeros, extent.slack_bytes = present, zeros, slack
    extent.segment, extent.place_bytes = segment, place
    extent.unverified = present if written != epoch else unverified
    extent.sums = bytearray(value[_HEAD.size : _HEAD.size + total * SUM_BYTES])
    return extent


def identity_in(value: bytes | memoryview) -> tuple[str, str | None, str]:
    """(etag, version id, key) of a record that decodes."""
    length = _HEAD.unpack_from(value)[9]
    tail = bytes(value[len(value) - length :]) if length else b"\0\0"
    etag, _, rest = tail.partition(b"\0")
    version, _, key = rest.partition(b"\0")
    return _text(etag), _text(version) or None, _text(key)


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace")


def place_in(value: bytes | memoryview) -> tuple[int, int]:
    """(segment, offset in it) of an encoded record; (0, 0) if it has none, or does not decode."""
    if len(value) < _HEAD.size:
        return 0, 0
    segment, place = _HEAD.unpack_from(value)[4:6]
    return int(segment), int(place)


def allocated_in(value: bytes | memoryview, extent_no: int) -> int:
    """Accounted bytes of an encoded record; 0 if it does not decode."""
    if len(value) < _HEAD.size:
        return 0
    size, present, zeros, _, _, _, _, slack, *_ = _HEAD.unpack_from(value)
    allocated = blocks.allocated_bytes(present & ~zeros & _WORD, size, extent_no)
    return max(0, allocated - int(slack))
