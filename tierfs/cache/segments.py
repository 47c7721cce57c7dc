"""Segments: append-only files that hold many small contents each. Trio thread only; nothing here blocks.

A content up to ``PACKED_BYTES`` that is fetched whole gets a place in the current segment instead of a file
of its own: making a file costs a local file system more than all the rest of a small fetch, and so does
opening it again. Places are aligned to 4 KiB, given out in order of arrival, and never given out twice, so
that an old record can at worst point to a hole that was punched after the record had been taken back. The
bytes of an evicted content are punched out; a segment without contents is unlinked. Names are random for
the same reason.
"""

from __future__ import annotations

import os

from tierfs.cache import device
from tierfs.cache.blocks import ALLOCATION_BYTES

PACKED_BYTES = 256 * 1024
SEGMENT_BYTES = 256 * 1024 * 1024
OWN_FILE = 0
"""Instead of a segment's name: the content has a file of its own."""


def segment_path(root: str, segment: int) -> str:
    return f"{root}/segments/{segment:016x}"


class Segments:
    """Which segment has how many contents, and where the next one goes."""

    def __init__(self, root: str, *, never_blocks: bool) -> None:
        self.files: device.OpenFiles[int] = device.OpenFiles(
            lambda segment: segment_path(root, segment), never_blocks=never_blocks, shared=True)
        self._contents: dict[int, int] = {}
        """Contents and fills by segment; complete once the index was walked."""
        self._current = OWN_FILE
        self._position = 0

    def place(self, nbytes: int) -> tuple[int, int]:
        """(segment, offset) for that many bytes; counts as a content of the segment from now on."""
        if self._current == OWN_FILE or self._position + nbytes > SEGMENT_BYTES:
            self._current = int.from_bytes(os.urandom(8), "little") | 1
            self._position = 0
        offset = self._position
        self._position += -(-nbytes // ALLOCATION_BYTES) * ALLOCATION_BYTES
        self.add(self._current)
        return self._current, offset

    def add(self, segment: int) -> None:
        """One more content is there."""
        if segment != OWN_FILE:
            self._contents[segment] = self._contents.get(segment, 0) + 1

    def remove(self, segment: int) -> None:
        """One content less."""
        if segment != OWN_FILE:
            left = self._contents[segment] - 1
            if left:
                self._contents[segment] = left
            else:
                del self._contents[segment]

    def is_dead(self, segment: int) -> bool:
        """No content is in it, and none will be. True only after the index was walked."""
        return segment not in self._contents and segment != self._current

    def known(self) -> set[int]:
        """Segments with contents."""
        return set(self._contents)
