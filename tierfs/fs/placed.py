"""Answers to READ that say where the bytes lie, not what they are: the native front copies them from there.

The other end, and why that is safe, is ``tierfs_native/src/placed.h``.
"""

from __future__ import annotations

import struct

from tierfs.cache.reading import Place

FRONT_HANDLE = 1 << 63
"""In the number of a handle that a native front has given out by itself, for reading; the rest is the
inode."""
TAKES_PLACES = 1 << 62
"""In the number of a handle, from a native front that takes such an answer (``TIERFS_FH_PLACES``)."""
MARK_BYTES = 16
_SUMS_BYTES = 8 * 8
_PLACE = struct.Struct(f"<{MARK_BYTES}s16sQII{_SUMS_BYTES}s")


def pack(mark: bytes, place: Place) -> bytes | None:
    """The answer; None if it cannot say so much. ``mark``: what the front knows such an answer by."""
    if len(place.sums) > _SUMS_BYTES:
        return None
    return _PLACE.pack(mark, place.content_id, place.offset_bytes, place.length_bytes, place.tier, place.sums)
