"""Which bytes are local: the facade of the cache. Trio thread only."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from tierfs.cache import blocks, opening, upkeep
from tierfs.cache.area import DirtyContent, Drain, StagingArea
from tierfs.cache.blocks import EXTENT_BLOCKS, EXTENT_SIZE_BYTES
from tierfs.cache.fetch import Fetch, Fetcher
from tierfs.cache.placement import Placement
from tierfs.cache.staging import Staging
from tierfs.cache.tier import Tier
from tierfs.config import Settings
from tierfs.errors import InvalidArgument, TierFull
from tierfs.metrics import Metrics
from tierfs.store.base import ObjectStore
from tierfs.types import BLOCK_SIZE_BYTES, ContentId, ObjectRef

SMALL_OBJECT_BYTES = 1024 * 1024
"""An object up to this size is fetched whole when its first byte is read."""
_ATTEMPTS = 4

__all__ = ["Cache", "DirtyContent", "Drain", "TierStatus"]


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One tier as ``status`` shows it. Bytes on the device, not of files."""

    name: str
    path: str
    volatile: bool
    capacity_bytes: int
    used_bytes: int
    """Everything the tier has on its device: clean, dirty, reserved for fetches under way, its own index."""
    clean_bytes: int
    dirty_bytes: int
    pinned_bytes: int
    hits: int
    misses: int
    hit_bytes: int
    state: str
    """``ok``, ``full`` (bypassed for lack of space) or ``failing`` (bypassed after an I/O error)."""
    reason: str
    """Why it is not ``ok``; empty if it is."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """A part of a read that comes from one place."""

    start: int
    stop: int
    source: Tier | Fetch | bytes


class Cache:
    """See the package docstring."""

    def __init__(self, tiers: list[Tier], write_tier: Tier, store: ObjectStore, metrics: Metrics,
                 settings: Settings) -> None:
        self._tiers = tiers
        self._placement = Placement(tiers)
        self._fetcher = Fetcher(store, metrics, self._placement.tiers_for,
                                concurrency=settings.fetch_concurrency,
                                memory_budget_bytes=settings.memory_budget_bytes)
        self._area = StagingArea(write_tier, self, dirty_limit_bytes=settings.dirty_limit_bytes)
        self._all_tiers = tiers if write_tier in tiers else [*tiers, write_tier]
        self._misses = metrics.counter("tierfs_missed_bytes_total", "Bytes read that no tier had.")
        opening.register_gauges(metrics, self._all_tiers)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: Settings,
        store: ObjectStore,
        metrics: Metrics,
        mount_id: str,
        *,
        now_ns: Callable[[], int] = time.time_ns,
        keep_volatile: bool = False,
    ) -> AsyncIterator[Cache]:
        """Open every tier, run the cache's background tasks, and close it all again on the way out.

        Raises ``FormatError`` for a tier of a newer version, ``TierFailed`` if the write tier cannot be
        used or belongs to a running mount. Any other tier that cannot be used is bypassed.
        ``keep_volatile``: leave RAM tiers behind on a clean exit (they are dropped otherwise).
        """
        tiers, write_tier = await opening.open_tiers(settings, mount_id, now_ns)
        cache = cls(tiers, write_tier, store, metrics, settings)
        try:
            await cache._area.recover()
            async with trio.open_nursery() as nursery:
                for tier in cache._all_tiers:
                    tier.evictor.start(nursery)
                    await upkeep.look_at_device(tier)
                    nursery.start_soon(upkeep.run, tier)
                cache._fetcher.start(nursery)
                cache._placement.start(nursery)
                yield cache
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            # The nursery is ours alone; who uses the cache sees the exception that was raised in its block.
            if len(group.exceptions) == 1:
                raise group.exceptions[0] from None
            raise
        finally:
            with trio.CancelScope(shield=True):
                await cache._area.close()
                await opening.close_tiers(cache._all_tiers, keep_volatile=keep_volatile)

    # reading

    def read_nowait(self, ref: ObjectRef, offset_bytes: int, length_bytes: int) -> bytes | None:
        """The bytes (clipped at the size), or None if they cannot be had without waiting."""
        end = min(offset_bytes + length_bytes, ref.size_bytes)
        if end <= offset_bytes:
            return b""
        for tier in self._tiers:
            data = tier.read_nowait(ref.content_id, offset_bytes, end)
            if data is not None:
                if tier is not self._tiers[0]:
                    self._placement.offer(ref, offset_bytes // EXTENT_SIZE_BYTES, tier)
                return data
        return self._fetcher.transit.read(ref.content_id, offset_bytes, end)

    async def read(self, ref: ObjectRef, offset_bytes: int, length_bytes: int) -> bytes:
        """Exactly the bytes, clipped at ``ref.size_bytes``; what is not local is fetched.

        Raises ``StaleContent`` if that version of the object is gone, or another ``StoreError``. Trouble
        with a tier is never an error here.
        """
        end = min(offset_bytes + length_bytes, ref.size_bytes)
        if end <= offset_bytes:
            await trio.lowlevel.checkpoint()
            return b""
        segments = self._locate(ref, offset_bytes, end)
        if len(segments) == 1:
            return await self._obtain(ref, segments[0])
        return b"".join([await self._obtain(ref, segment) for segment in segments])

    def _locate(self, ref: ObjectRef, offset_bytes: int, end_bytes: int, *,
                skip_tiers: bool = False) -> list[_Segment]:
        """Where the bytes come from; starts fetching what is missing. No await in here."""
        segments: list[_Segment] = []
        for extent_no, start, stop in blocks.extent_spans(offset_bytes, end_bytes):
            mask = blocks.range_mask(start, stop)
            sources: list[tuple[int, Tier | Fetch | bytes]] = []
            missing = mask
            if not skip_tiers:
                for tier in self._tiers:
                    here = missing & ~tier.missing(ref.content_id, extent_no, missing)
                    if here and tier.health.readable:
                        sources.append((here, tier))
                        missing &= ~here
                    if not missing:
                        break
            if missing:
                sources.extend(self._fetch_missing(ref, extent_no, start, stop, missing))
            segments.extend(_in_order(extent_no, start, stop, sources))
        return segments

    def _fetch_missing(self, ref: ObjectRef, extent_no: int, start: int, stop: int,
                       missing: int) -> list[tuple[int, Tier | Fetch | bytes]]:
        sources: list[tuple[int, Tier | Fetch | bytes]] = []
        base = extent_no * EXTENT_BLOCKS
        wanted = 0
        for first, count in blocks.runs(missing):
            for bit in range(first, first + count):
                number = base + bit
                low = max(start, number * BLOCK_SIZE_BYTES)
                high = min(stop, (number + 1) * BLOCK_SIZE_BYTES)
                kept = self._fetcher.transit.read(ref.content_id, low, high)
                if kept is not None:
                    sources.append((1 << bit, kept))
                    continue
                fetch = self._fetcher.in_flight(ref.content_id, number)
                if fetch is None:
                    wanted |= 1 << bit
                    continue
                self._fetcher.promote(fetch)
                if sources and sources[-1][1] is fetch:
                    sources[-1] = (sources[-1][0] | 1 << bit, fetch)
                else:
                    sources.append((1 << bit, fetch))
        if wanted:
            for tier in self._tiers:
                tier.misses += 1
            self._misses.add(blocks.content_bytes(wanted, ref.size_bytes, extent_no))
            sources.extend(self._start_fetches(ref, extent_no, start, stop, wanted))
        return sources

    def _start_fetches(self, ref: ObjectRef, extent_no: int, start: int, stop: int,
                       wanted: int) -> list[tuple[int, Tier | Fetch | bytes]]:
        nbytes = blocks.allocated_bytes(wanted, ref.size_bytes, extent_no)
        if not self._placement.accepts(nbytes):
            # Nothing will be kept: ask for what is read and no more.
            exact: list[tuple[int, Tier | Fetch | bytes]] = []
            for first, count in blocks.runs(wanted):
                low = max(start, (extent_no * EXTENT_BLOCKS + first) * BLOCK_SIZE_BYTES)
                high = min(stop, (extent_no * EXTENT_BLOCKS + first + count) * BLOCK_SIZE_BYTES)
                exact.append((blocks.span_mask(first, count),
                              self._fetcher.request_exact(ref, low, high - low)))
            return exact
        if start == 0 and ref.size_bytes <= SMALL_OBJECT_BYTES:
            wanted |= self._not_local(ref, 0, blocks.full_mask(ref.size_bytes, 0))
        return [(blocks.span_mask(fetch.blocks.start % EXTENT_BLOCKS, len(fetch.blocks)), fetch)
                for fetch in self._fetcher.request(ref, extent_no, wanted, demand=True)]

    def _not_local(self, ref: ObjectRef, extent_no: int, mask: int) -> int:
        """Which blocks of ``mask`` no tier has, and nobody is bringing."""
        for tier in self._tiers:
            if not mask:
                return 0
            mask = tier.missing(ref.content_id, extent_no, mask)
        for first, count in blocks.runs(mask):
            for bit in range(first, first + count):
                number = extent_no * EXTENT_BLOCKS + bit
                if (self._fetcher.in_flight(ref.content_id, number) is not None
                        or (ref.content_id, number) in self._fetcher.transit):
                    mask &= ~(1 << bit)
        return mask

    async def _obtain(self, ref: ObjectRef, segment: _Segment, attempt: int = 1) -> bytes:
        source = segment.source
        if isinstance(source, bytes):
            return source
        if isinstance(source, Fetch):
            body = await source.wait()
            start = segment.start - source.offset_bytes
            stop = segment.stop - source.offset_bytes
            return body if start == 0 and stop == len(body) else bytes(memoryview(body)[start:stop])
        data = await source.read_blocks(ref.content_id, segment.start, segment.stop)
        if data is not None:
            if source is not self._tiers[0]:
                self._placement.offer(ref, segment.start // EXTENT_SIZE_BYTES, source)
            return data
        # Evicted, damaged, or the tier fails: look again, and in the end without any tier.
        again = self._locate(ref, segment.start, segment.stop, skip_tiers=attempt >= _ATTEMPTS)
        return b"".join([await self._obtain(ref, part, attempt + 1) for part in again])

    async def prefetch(self, ref: ObjectRef, offset_bytes: int, length_bytes: int) -> int:
        """Make a range local; returns the bytes fetched for it by this call. Behind every ``read``.

        What is local or being fetched already is not fetched again; what is being fetched is waited for.
        If no tier takes it, no more is fetched than the transit buffer holds. Raises what ``read`` raises.
        """
        end = min(offset_bytes + length_bytes, ref.size_bytes)
        piece = self._fetcher.piece_bytes(end - offset_bytes)
        fetched = 0
        waiting: list[tuple[Fetch, bool]] = []
        for extent_no, start, stop in blocks.extent_spans(offset_bytes, end):
            mask = blocks.range_mask(start, stop)
            nbytes = blocks.allocated_bytes(mask, ref.size_bytes, extent_no)
            if not self._placement.accepts(nbytes):
                room = self._fetcher.transit.limit_bytes // 2 - (start - offset_bytes)
                if room < stop - start:
                    break
            others = self._being_fetched(ref, extent_no, mask)
            mine = self._fetcher.request(ref, extent_no, self._not_local(ref, extent_no, mask), demand=False,
                                         piece_bytes=piece)
            waiting.extend((fetch, False) for fetch in others)
            waiting.extend((fetch, True) for fetch in mine)
            while len(waiting) > 2 * self._fetcher.concurrency:
                fetched += await _finish(*waiting.pop(0))
        for fetch, own in waiting:
            fetched += await _finish(fetch, own)
        await trio.lowlevel.checkpoint()
        return fetched

    def _being_fetched(self, ref: ObjectRef, extent_no: int, mask: int) -> list[Fetch]:
        found: dict[Fetch, None] = {}
        for first, count in blocks.runs(mask):
            for bit in range(first, first + count):
                fetch = self._fetcher.in_flight(ref.content_id, extent_no * EXTENT_BLOCKS + bit)
                if fetch is not None:
                    found[fetch] = None
        return list(found)

    # what is local

    def resident_bytes(self, content: ObjectRef | ContentId) -> dict[str, int]:
        """Bytes of that content by tier name; tiers with none are left out. Dirty contents included."""
        content_id = content.content_id if isinstance(content, ObjectRef) else content
        found = {}
        for tier in self._tiers:
            nbytes = tier.resident_bytes(content_id)
            if nbytes:
                found[tier.name] = nbytes
        dirty = self._area.dirty.allocated_bytes(content_id)
        if dirty:
            found[self._area.tier.name] = dirty
        return found

    def is_complete(self, content_id: ContentId) -> bool:
        """Some tier has all bytes of that content."""
        return any(tier.is_complete(content_id) for tier in self._tiers)

    async def pin(self, ref: ObjectRef, tier: str | None = None) -> None:
        """Fetch all of it into that tier (None: the fastest that can hold it) and keep it there.

        Raises ``TierFull`` if it cannot fit, ``InvalidArgument`` if there is no such tier, and what
        ``read`` raises. A pin survives restarts.
        """
        target = self._tier_to_pin(ref, tier)
        target.set_pinned(ref.content_id, True)
        try:
            await self._bring_into(target, ref)
        except BaseException:
            target.set_pinned(ref.content_id, False)
            raise
        await target.commit()

    def _tier_to_pin(self, ref: ObjectRef, name: str | None) -> Tier:
        if name is not None:
            for tier in self._tiers:
                if tier.name == name:
                    return tier
            raise InvalidArgument(f"no tier is called {name!r}; there are {[t.name for t in self._tiers]}")
        for tier in self._tiers:
            needed = ref.size_bytes - tier.resident_bytes(ref.content_id)
            if tier.takes_clean and tier.ledger.can_make_room(needed):
                return tier
        raise TierFull(f"{ref.key}: no tier has room for {ref.size_bytes} bytes that are not to be evicted")

    async def _bring_into(self, tier: Tier, ref: ObjectRef) -> None:
        self._fetcher.transit.forget(ref.content_id)
        for _ in range(_ATTEMPTS):
            for offset in range(0, ref.size_bytes, EXTENT_SIZE_BYTES):
                extent_no = offset // EXTENT_SIZE_BYTES
                mask = tier.missing(ref.content_id, extent_no, blocks.full_mask(ref.size_bytes, extent_no))
                if not mask:
                    continue
                elsewhere = self._not_local(ref, extent_no, mask) ^ mask
                for other in self._tiers:
                    if other is not tier and elsewhere:
                        await self._placement.copy_between(ref, extent_no, other, tier)
                await self.prefetch(ref, offset, EXTENT_SIZE_BYTES)
            if tier.is_complete(ref.content_id) or not ref.size_bytes:
                return
        raise TierFull(f"{ref.key}: tier {tier.name} could not take all {ref.size_bytes} bytes")

    async def unpin(self, content_id: ContentId) -> None:
        """Undo ``pin`` in every tier; the bytes stay until they are evicted."""
        for tier in self._tiers:
            if content_id in tier.pins:
                tier.set_pinned(content_id, False)
                await tier.commit()
        await trio.lowlevel.checkpoint()

    async def evict(self, content_id: ContentId) -> int:
        """Drop clean, unpinned bytes of that content everywhere; returns how many. Dirty: 0."""
        freed = 0
        self._fetcher.transit.forget(content_id)
        for tier in self._tiers:
            units = [(content_id, number) for number in tier.index.extents_of(content_id)]
            idle = [unit for unit in units if tier.extent(*unit) is not None and not tier.is_busy(*unit)]
            if idle and content_id not in tier.pins and not tier.is_being_removed(content_id):
                freed += tier.evictor.evict(idle, keep_copy=False)
                await tier.evictor.settled()
        await trio.lowlevel.checkpoint()
        return freed

    async def forget(self, content_id: ContentId) -> None:
        """The content will not be asked for again: drop its clean bytes, pinned or not. Dirty ones stay."""
        self._fetcher.transit.forget(content_id)
        for tier in self._tiers:
            if tier.has_file(content_id) or tier.has_fills(content_id):
                tier.evictor.forget(content_id)
        await trio.lowlevel.checkpoint()

    def status(self) -> list[TierStatus]:
        """Every tier, fast to slow. With no tier configured, the staging area alone."""
        return [
            TierStatus(
                name=tier.name, path=tier.root, volatile=tier.setting.volatile,
                capacity_bytes=tier.ledger.capacity_bytes, used_bytes=tier.ledger.used_bytes,
                clean_bytes=tier.ledger.clean_bytes, dirty_bytes=tier.ledger.dirty_bytes,
                pinned_bytes=tier.ledger.policy.pinned_bytes, hits=tier.hits, misses=tier.misses,
                hit_bytes=tier.hit_bytes, state=tier.health.state, reason=tier.health.reason,
            )
            for tier in self._all_tiers
        ]

    # what is written here

    @property
    def buffer_bytes(self) -> int:
        """File data in the engine's own memory: fetches under way, and blocks that no tier took."""
        return self._fetcher.budget.used_bytes + self._fetcher.transit.used_bytes

    def set_drain(self, drain: Drain) -> None:
        """How a writer waits for room when the write tier is full of dirty data. Given by write-back."""
        self._area.dirty.drain = drain

    async def create_staging(self, content_id: ContentId) -> Staging:
        """A new, empty dirty content. Raises ``TierFull``, ``TierFailed``, ``AlreadyExists``."""
        return await self._area.create(content_id)

    async def convert(self, ref: ObjectRef, content_id: ContentId) -> Staging:
        """A new dirty content that starts with the bytes of ``ref`` (its ``base``), without copying them.

        The local file of ``ref`` in the write tier becomes the staging file: its clean copy there is gone.
        Raises ``TierFull``, ``TierFailed``, ``AlreadyExists``.
        """
        return await self._area.convert(ref, content_id)

    async def open_staging(self, content_id: ContentId) -> Staging | None:
        """The dirty content of that id, or None if there is none."""
        return await self._area.open(content_id)

    async def keep_sealed(self, ref: ObjectRef, path: str) -> None:
        """For the staging area: ``path`` holds all bytes of ``ref`` and is about to go."""
        await self._placement.take_file(ref, path)

    def dirty_contents(self) -> list[DirtyContent]:
        """Every dirty content: after a restart, what is still to be published (or discarded)."""
        return self._area.contents()


async def _finish(fetch: Fetch, own: bool) -> int:
    body = await fetch.wait()
    return len(body) if own else 0


def _in_order(extent_no: int, start: int, stop: int,
              sources: list[tuple[int, Tier | Fetch | bytes]]) -> list[_Segment]:
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
