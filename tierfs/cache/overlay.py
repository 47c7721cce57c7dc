"""Which blocks of a converted file are its own, and which are still those of its base. Trio thread only.

Words by extent, as in ``blocks``; written through to the sidecar, whose docstring says what each survives.
Blocks at or behind ``limit_bytes`` are always the file's own: what was cut off never comes back.
"""

from __future__ import annotations

from collections.abc import Iterator

from tierfs.cache import blocks
from tierfs.cache.blocks import EXTENT_BLOCKS
from tierfs.cache.sidecar import Sidecar
from tierfs.types import BLOCK_SIZE_BYTES, ObjectRef


class Overlay:
    """See the module docstring."""

    def __init__(self, sidecar: Sidecar) -> None:
        self.sidecar = sidecar
        self._present, self._changed, self._durable = sidecar.words()

    @property
    def base(self) -> ObjectRef:
        return self.sidecar.base

    @property
    def limit_bytes(self) -> int:
        return self.sidecar.limit_bytes

    def absent(self, extent_no: int, mask: int) -> int:
        """Blocks of ``mask`` that have to come from the base."""
        below = blocks.full_mask(self.sidecar.limit_bytes, extent_no)
        return mask & below & ~self._present.get(extent_no, 0)

    def is_absent(self, block_no: int) -> bool:
        extent_no, bit = divmod(block_no, EXTENT_BLOCKS)
        return self.absent(extent_no, 1 << bit) != 0

    def any_absent(self, offset_bytes: int, end_bytes: int) -> bool:
        """Some block that the range touches is absent."""
        return any(self.absent(number, blocks.range_mask(start, stop))
                   for number, start, stop in blocks.extent_spans(offset_bytes, end_bytes))

    def next_absent(self, offset_bytes: int, end_bytes: int) -> tuple[int, int]:
        """(start, stop) of the first absent bytes of a range, neighbouring blocks taken together.

        Both are the end of the range if there are none. What lies behind the limit in an absent block counts
        as absent.
        """
        start = stop = end_bytes
        for number in range(offset_bytes // blocks.EXTENT_SIZE_BYTES, blocks.extent_count(end_bytes)):
            for first, count in blocks.runs(self.absent(number, (1 << EXTENT_BLOCKS) - 1)):
                low = (number * EXTENT_BLOCKS + first) * BLOCK_SIZE_BYTES
                high = low + count * BLOCK_SIZE_BYTES
                if high <= offset_bytes:
                    continue
                if start == end_bytes:
                    start = stop = max(low, offset_bytes)
                if low > stop or low >= end_bytes:
                    return min(start, end_bytes), min(stop, end_bytes)
                stop = high
            if start < end_bytes and stop < (number + 1) * blocks.EXTENT_SIZE_BYTES:
                break
        return min(start, end_bytes), min(stop, end_bytes)

    def parts(self, offset_bytes: int, end_bytes: int) -> Iterator[tuple[int, int, bool]]:
        """(start, stop, absent) of pieces of a range that are all the file's own or all absent."""
        start = offset_bytes
        while start < end_bytes:
            absent = self.is_absent(start // BLOCK_SIZE_BYTES)
            stop = start
            while stop < end_bytes and self.is_absent(stop // BLOCK_SIZE_BYTES) == absent:
                stop = min(end_bytes, (stop // BLOCK_SIZE_BYTES + 1) * BLOCK_SIZE_BYTES)
            yield start, stop, absent
            start = stop

    def partly_covered(self, offset_bytes: int, end_bytes: int) -> list[int]:
        """Absent blocks that a write of that range touches, but does not replace."""
        if end_bytes <= offset_bytes:
            return []
        found = []
        for number in {offset_bytes // BLOCK_SIZE_BYTES, (end_bytes - 1) // BLOCK_SIZE_BYTES}:
            start = number * BLOCK_SIZE_BYTES
            stop = min(start + BLOCK_SIZE_BYTES, self.limit_bytes)
            if (offset_bytes > start or end_bytes < stop) and self.is_absent(number):
                found.append(number)
        return sorted(found)

    def mark_changed(self, offset_bytes: int, end_bytes: int) -> None:
        """Before the write: the blocks of that range may differ from the base from now on."""
        for number, start, stop in blocks.extent_spans(offset_bytes, min(end_bytes, self.base.size_bytes)):
            word = self._changed.get(number, 0) | blocks.range_mask(start, stop)
            if word != self._changed.get(number):
                self._changed[number] = word
                self.sidecar.mark_changed(number, word)

    def mark_present(self, offset_bytes: int, end_bytes: int) -> None:
        """After the write: the blocks of that range are in the file."""
        for number, start, stop in blocks.extent_spans(offset_bytes, min(end_bytes, self.base.size_bytes)):
            word = self._present.get(number, 0) | blocks.range_mask(start, stop)
            if word != self._present.get(number):
                self._present[number] = word
                self.sidecar.mark_present(number, word)

    def present_words(self) -> dict[int, int]:
        """A copy, for ``newly_durable``."""
        return dict(self._present)

    def newly_durable(self, present: dict[int, int]) -> dict[int, int]:
        """Which of these words the durable ones do not say yet."""
        return {number: word for number, word in present.items() if self._durable.get(number) != word}

    def note_durable(self, words: dict[int, int]) -> None:
        self._durable.update(words)

    def unchanged_ranges(self, size_bytes: int) -> Iterator[tuple[int, int]]:
        """(offset, length) of what is known to equal the base at the same offset."""
        limit = min(self.limit_bytes, size_bytes)
        start = stop = 0
        for extent_no in range(blocks.extent_count(limit)):
            same = blocks.full_mask(limit, extent_no) & ~self._changed.get(extent_no, 0)
            for first, count in blocks.runs(same):
                low = (extent_no * EXTENT_BLOCKS + first) * BLOCK_SIZE_BYTES
                if low != stop:
                    if stop > start:
                        yield start, stop - start
                    start = low
                stop = min(low + count * BLOCK_SIZE_BYTES, limit)
        if stop > start:
            yield start, stop - start
