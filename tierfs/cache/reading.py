"""A read of clean content: which part comes from where, and making a range local. Trio thread only.

A read is cut into segments, each with one source: a tier, a fetch under way, or bytes at hand. All fetches
that it needs are started before any source is waited for. What is missing is asked for in whole blocks, and
as the whole object if that is small and read from its start; but if no tier would take it, for the very
bytes that are read and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import trio

from tierfs.cache import blocks
from tierfs.cache.blocks import EXTENT_BLOCKS, EXTENT_SIZE_BYTES
from tierfs.cache.fetch import Fetch, Fetcher
from tierfs.cache.placement import Placement
from tierfs.cache.tier import Tier
from tierfs.metrics import Metrics
from tierfs.types import BLOCK_SIZE_BYTES, ContentId, ObjectRef

SMALL_OBJECT_BYTES = 1024 * 1024
"""An object up to this size is fetched whole when its first byte is read."""
_ATTEMPTS = 4
_KEPT_GAPS = 65536

_Source = Tier | Fetch | bytes


class Place(NamedTuple):
    """Blocks in a file of their own content; ``tier``: its number, fast to slow. The file is not held."""

    tier: int
    content_id: ContentId
    offset_bytes: int
    length_bytes: int
    sums: bytes
    """The checksum of each block."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """A part of a read that comes from one place."""

    start: int
    stop: int
    source: _Source


class Reader:
    """See the module docstring. ``tiers`` fast to slow."""

    def __init__(self, tiers: Sequence[Tier], placement: Placement, fetcher: Fetcher,
                 metrics: Metrics) -> None:
        self._tiers = tuple(tiers)
        self._placement = placement
        self._fetcher = fetcher
        self._gaps: dict[ContentId, int] = {}
        self._missed = metrics.counter("tierfs_missed_bytes_total", "Bytes read that no tier had.")

    def read_nowait(self, ref: ObjectRef, offset_bytes: int, end_bytes: int) -> bytes | None:
        """A non-empty range inside the content, or None if it cannot be had without waiting."""
        for tier in self._tiers:
            data = tier.read_nowait(ref.content_id, offset_bytes, end_bytes)
            if data is not None:
                self._offer(ref, offset_bytes, tier)
                return data
        return self._fetcher.transit.read(ref.content_id, offset_bytes, end_bytes)

    def _offer(self, ref: ObjectRef, offset_bytes: int, tier: Tier) -> None:
        """Bytes from there on were read from ``tier``: a faster one, if there is one, may want the extent."""
        if tier is not self._tiers[0]:
            self._placement.offer(ref, offset_bytes // EXTENT_SIZE_BYTES, tier)

    def place(self, ref: ObjectRef, offset_bytes: int, end_bytes: int) -> Place | None:
        """Where a range of whole blocks lies, if all of it is in one file; counts as read from there."""
        for number, tier in enumerate(self._tiers):
            sums = tier.sums_of(ref.content_id, offset_bytes, end_bytes)
            if sums is not None:
                tier.count_hit(ref.content_id, offset_bytes, end_bytes)
                self._offer(ref, offset_bytes, tier)
                return Place(number, ref.content_id, offset_bytes, end_bytes - offset_bytes, sums)
        return None

    async def bring(self, ref: ObjectRef, offset_bytes: int, end_bytes: int) -> None:
        """Wait until what no tier has of a range has been fetched, if a tier takes it. See ``Cache.read``."""
        if not self._placement.accepts(end_bytes - offset_bytes):
            return  # it would be fetched once more to be read
        for segment in self._locate(ref, offset_bytes, end_bytes):
            if isinstance(segment.source, Fetch):
                await segment.source.wait()

    async def read(self, ref: ObjectRef, offset_bytes: int, end_bytes: int) -> bytes:
        """A non-empty range inside the content. See ``Cache.read`` for errors."""
        segments = self._locate(ref, offset_bytes, end_bytes)
        if len(segments) == 1:
            return await self._obtain(ref, segments[0])
        return b"".join([await self._obtain(ref, segment) for segment in segments])

    async def _obtain(self, ref: ObjectRef, segment: _Segment, attempt: int = 1) -> bytes:
        source = segment.source
        if isinstance(source, bytes):
            await trio.lowlevel.checkpoint()
            return source
        if isinstance(source, Fetch):
            body = await source.read()
            if body is not None:
                start = segment.start - source.offset_bytes
                stop = segment.stop - source.offset_bytes
                return body if start == 0 and stop == len(body) else bytes(memoryview(body)[start:stop])
            data = self.read_nowait(ref, segment.start, segment.stop)
            if data is not None:
                return data
        else:
            data = await source.read_blocks(ref.content_id, segment.start, segment.stop)
            if data is not None:
                self._offer(ref, segment.start, source)
                return data
        # Not in the page cache, evicted, damaged, or the tier fails: look again, in the end without any tier.
        again = self._locate(ref, segment.start, segment.stop, skip_tiers=attempt >= _ATTEMPTS)
        return b"".join([await self._obtain(ref, part, attempt + 1) for part in again])

    # no await below, up to ``prefetch``

    def _locate(self, ref: ObjectRef, offset_bytes: int, end_bytes: int, *,
                skip_tiers: bool = False) -> list[_Segment]:
        """Where the bytes come from; starts fetching what is missing."""
        segments: list[_Segment] = []
        for extent_no, start, stop in blocks.extent_spans(offset_bytes, end_bytes):
            missing = blocks.range_mask(start, stop)
            sources: list[tuple[int, _Source]] = []
            for tier in () if skip_tiers else self._tiers:
                here = missing & ~tier.presence.missing(ref.content_id, extent_no, missing)
                if here and tier.health.readable:
                    sources.append((here, tier))
                    missing &= ~here
                    if not missing:
                        break
            if missing:
                sources.extend(self._from_elsewhere(ref, extent_no, start, stop, missing, skip_tiers))
            segments.extend(_in_order(extent_no, start, stop, sources))
        return segments

    def _from_elsewhere(self, ref: ObjectRef, extent_no: int, start: int, stop: int, missing: int,
                        skip_tiers: bool) -> list[tuple[int, _Source]]:
        """Sources for blocks that no tier has: at hand, on their way, or asked for now."""
        sources: list[tuple[int, _Source]] = []
        fetches: dict[Fetch, int] = {}
        wanted = 0
        for bit in blocks.bits(missing):
            number = extent_no * EXTENT_BLOCKS + bit
            low = max(start, number * BLOCK_SIZE_BYTES)
            high = min(stop, (number + 1) * BLOCK_SIZE_BYTES)
            kept = self._fetcher.transit.read(ref.content_id, low, high)
            fetch = self._fetcher.in_flight(ref.content_id, number)
            if kept is not None:
                sources.append((1 << bit, kept))
            elif fetch is not None and not skip_tiers:
                fetches[fetch] = fetches.get(fetch, 0) | 1 << bit
            else:
                wanted |= 1 << bit
        for fetch, mask in fetches.items():
            fetch.readers += 1
            self._fetcher.promote(fetch)
            sources.append((mask, fetch))
        if wanted:
            for tier in self._tiers:
                tier.misses += 1
            self._missed.add(blocks.content_bytes(wanted, ref.size_bytes, extent_no))
            sources.extend(self._start_fetches(ref, extent_no, start, stop, wanted, skip_tiers))
        return sources

    def _start_fetches(self, ref: ObjectRef, extent_no: int, start: int, stop: int, wanted: int,
                       skip_tiers: bool) -> list[tuple[int, _Source]]:
        new_bytes = blocks.allocated_bytes(wanted, ref.size_bytes, extent_no)
        if skip_tiers or not self._placement.accepts(new_bytes):
            exact: list[tuple[int, _Source]] = []
            for first, count in blocks.runs(wanted):
                low = max(start, (extent_no * EXTENT_BLOCKS + first) * BLOCK_SIZE_BYTES)
                high = min(stop, (extent_no * EXTENT_BLOCKS + first + count) * BLOCK_SIZE_BYTES)
                fetch = self._fetcher.request_exact(ref, low, high - low)
                fetch.readers += 1
                exact.append((blocks.span_mask(first, count), fetch))
            return exact
        if start == 0 and ref.size_bytes <= SMALL_OBJECT_BYTES:
            wanted |= self._not_local(ref, 0, blocks.full_mask(ref.size_bytes, 0))
        found: list[tuple[int, _Source]] = []
        for fetch in self._fetcher.request(ref, extent_no, wanted, demand=True):
            fetch.readers += 1
            mask = blocks.span_mask(fetch.blocks.start % EXTENT_BLOCKS, len(fetch.blocks))
            found.append((mask, fetch))
        return found

    def _not_local(self, ref: ObjectRef, extent_no: int, mask: int) -> int:
        """Which blocks of ``mask`` no tier has, and nobody is bringing."""
        for tier in self._tiers:
            if mask:
                mask = tier.presence.missing(ref.content_id, extent_no, mask)
        for bit in blocks.bits(mask):
            number = extent_no * EXTENT_BLOCKS + bit
            if (self._fetcher.in_flight(ref.content_id, number) is not None
                    or (ref.content_id, number) in self._fetcher.transit):
                mask &= ~(1 << bit)
        return mask

    def is_complete(self, content_id: ContentId) -> bool:
        """All bytes are in some tier or other."""
        if any(tier.presence.is_complete(content_id) for tier in self._tiers):
            return True
        if len(self._tiers) < 2:
            return False
        size = max(tier.presence.size_of(content_id) for tier in self._tiers)
        count = blocks.extent_count(size)
        # Begin where it was not complete when last asked: the answer is the same more often than not.
        start = self._gaps.pop(content_id, 0)
        for number in (*range(start, count), *range(min(start, count))):
            missing = blocks.full_mask(size, number)
            for tier in self._tiers:
                missing = tier.presence.missing(content_id, number, missing)
            if missing:
                if len(self._gaps) >= _KEPT_GAPS:
                    self._gaps.clear()
                self._gaps[content_id] = number
                return False
        return count > 0

    # making local

    async def prefetch(self, ref: ObjectRef, offset_bytes: int, end_bytes: int, *,
                       only: Tier | None = None) -> int:
        """Make a range local; returns the bytes that this call fetched. See ``Cache.prefetch``.

        ``only``: it has to be in that tier; what another has is copied, as far as that can be read.
        """
        piece = self._fetcher.piece_bytes(end_bytes - offset_bytes)
        fetched = 0
        waiting: list[tuple[Fetch, bool]] = []
        for extent_no, start, stop in blocks.extent_spans(offset_bytes, end_bytes):
            mask = blocks.range_mask(start, stop)
            # What no tier takes stays in the transit buffer: no more than half of that at a time.
            for_transit = not self._placement.accepts(blocks.allocated_bytes(mask, ref.size_bytes, extent_no))
            if for_transit and stop - offset_bytes > self._fetcher.transit.limit_bytes // 2:
                break
            if only is not None:
                await self._placement.copy_into(ref, extent_no, mask, only)
            others = {self._fetcher.in_flight(ref.content_id, extent_no * EXTENT_BLOCKS + bit): None
                      for bit in blocks.bits(mask)}
            mine = self._fetcher.request(ref, extent_no, self._not_local(ref, extent_no, mask), demand=False,
                                         piece_bytes=piece)
            waiting.extend((fetch, False) for fetch in others if fetch is not None)
            waiting.extend((fetch, True) for fetch in mine)
            while len(waiting) > 2 * self._fetcher.concurrency:
                fetched += await _finish(*waiting.pop(0))
        for fetch, own in waiting:
            fetched += await _finish(fetch, own)
        await trio.lowlevel.checkpoint()
        return fetched


async def _finish(fetch: Fetch, own: bool) -> int:
    await fetch.wait()
    return fetch.length_bytes if own else 0


def _in_order(extent_no: int, start: int, stop: int, sources: list[tuple[int, _Source]]) -> list[_Segment]:
    """Segments of [start, stop) inside one extent, by offset, from sources with their blocks."""
    parts = []
    base = extent_no * EXTENT_BLOCKS
    for mask, source in sources:
        for first, count in blocks.runs(mask):
            low = max(start, (base + first) * BLOCK_SIZE_BYTES)
            high = min(stop, (base + first + count) * BLOCK_SIZE_BYTES)
            if low < high:
                parts.append(_Segment(low, high, source))
    parts.sort(key=lambda part: part.start)
    return parts
