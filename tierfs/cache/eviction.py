"""Making room in a tier: which units go, and how their bytes are given back.

Trio thread only. The units are marked absent first, without an await between choosing and marking; then a
job of its own (it goes on when the one who asked is cancelled) lets the next tier have them, and
removes the bytes: a content of which nothing is left is unlinked, of any other a hole is punched. Unlinking
may come before the index is committed (a missing file makes its records void), punching only after.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

import trio

from tierfs.cache import blocks, device
from tierfs.cache.blocks import EXTENT_BLOCKS
from tierfs.cache.health import TierHealth
from tierfs.cache.index import IndexWriteFailed
from tierfs.cache.ledger import Ledger
from tierfs.cache.policy import Unit
from tierfs.cache.record import Extent
from tierfs.cache.segments import Segments, segment_path
from tierfs.log import get_logger
from tierfs.types import BLOCK_SIZE_BYTES, ContentId, ObjectRef

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Taken:
    """A unit that was marked absent, with what is needed to copy it elsewhere before its bytes go."""

    content_id: ContentId
    extent_no: int
    extent: Extent
    nbytes: int
    ref: ObjectRef | None


class EvictableTier(Protocol):
    """What making room needs of a tier; see ``Tier``."""

    root: str
    ledger: Ledger
    health: TierHealth
    files: device.OpenFiles[ContentId]
    segments: Segments
    can_punch: bool
    needs_sweep: bool
    io: trio.CapacityLimiter
    walked: trio.Event
    on_evict: Callable[[Taken], Awaitable[None]] | None

    def take_units(self, units: list[Unit], *, remember: bool) -> list[Taken]: ...
    def take_tail(self, unit: Unit, keep_bytes: int) -> Taken | None: ...
    def forget_records(self, content_id: ContentId) -> int: ...
    def units_of(self, content_id: ContentId) -> list[Unit]: ...
    def place_of(self, content_id: ContentId) -> tuple[int, int, int] | None: ...
    def is_busy(self, content_id: ContentId, extent_no: int) -> bool: ...
    def has_file(self, content_id: ContentId) -> bool: ...
    def has_fills(self, content_id: ContentId) -> bool: ...
    def is_being_removed(self, content_id: ContentId) -> bool: ...
    def begin_removal(self, content_id: ContentId) -> None: ...
    def end_removal(self, content_id: ContentId) -> None: ...
    def note_change(self) -> None: ...
    async def wait_change(self) -> None: ...
    async def commit(self) -> None: ...


@dataclass(slots=True)
class _Job:
    """What one worker call removes. ``nbytes`` count as being freed until it is done."""

    nbytes: int = 0
    unlink: list[str] = field(default_factory=list)
    """Paths. May go before the index is committed: a missing file makes its records void."""
    punch: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """(offset, length) by path. Only after the commit."""
    close: list[int] = field(default_factory=list)
    taken: list[Taken] = field(default_factory=list)
    removing: list[ContentId] = field(default_factory=list)
    offer: bool = False


class Evictor:
    """Part of a tier, which it changes."""

    def __init__(self, tier: EvictableTier) -> None:
        self._tier = tier
        self._nursery: trio.Nursery | None = None
        self._jobs = 0
        self.evicted_bytes = 0

    def start(self, nursery: trio.Nursery) -> None:
        """Where the jobs run."""
        self._nursery = nursery

    @property
    def is_active(self) -> bool:
        """Something is being removed."""
        return self._jobs > 0

    async def make_room(self, nbytes: int = 0) -> bool:
        """Wait until what is accounted, and ``nbytes`` more, fit the tier; False if that cannot be."""
        tier, ledger = self._tier, self._tier.ledger
        while True:
            ledger.fit_policy()
            excess = ledger.excess_bytes + nbytes
            if excess > 0:
                wanted = max(excess, ledger.batch_bytes)
                units = self._choose(wanted, excess)
                if units:
                    self.evict(units, spare_bytes=self._spare_bytes(units, wanted))
                elif self._jobs or not tier.walked.is_set():
                    await tier.wait_change()
                else:
                    return False
            elif ledger.used_bytes + nbytes > ledger.limit_bytes and ledger.freeing_bytes:
                await tier.wait_change()
            else:
                return True

    def has_room(self, nbytes: int) -> bool:
        """That many more bytes fit, and nothing has to go or to be waited for."""
        ledger = self._tier.ledger
        ledger.fit_policy()
        return ledger.excess_bytes + nbytes <= 0 and ledger.used_bytes + nbytes <= ledger.limit_bytes

    def _choose(self, wanted_bytes: int, needed_bytes: int) -> list[Unit]:
        """Idle units that free ``wanted_bytes``, or at least ``needed_bytes``; else none at all."""
        tier, policy = self._tier, self._tier.ledger.policy
        asked = wanted_bytes
        while True:
            offered = policy.victims(asked)
            chosen, freed = [], 0
            for unit in offered if tier.can_punch else self._whole_contents(offered):
                if not tier.is_busy(*unit) and not tier.is_being_removed(unit[0]):
                    chosen.append(unit)
                    freed += policy.size_bytes(unit)
            if freed >= wanted_bytes:
                return chosen
            if asked >= policy.evictable_bytes:
                return chosen if freed >= needed_bytes else []
            asked = max(asked * 2, blocks.EXTENT_SIZE_BYTES)

    def _whole_contents(self, units: list[Unit]) -> list[Unit]:
        """All units of the contents of which one is offered: without holes only whole files can be freed."""
        found: dict[Unit, None] = {}
        for content_id in dict.fromkeys(unit[0] for unit in units):
            all_of_it = self._tier.units_of(content_id)
            if not any(self._tier.is_busy(*unit) for unit in all_of_it):
                found.update(dict.fromkeys(all_of_it))
        return list(found)

    def _spare_bytes(self, units: list[Unit], wanted_bytes: int) -> int:
        """How much of the last of these units may stay, where that matters."""
        ledger = self._tier.ledger
        if not ledger.is_fine_grained or not self._tier.can_punch:
            return 0
        return max(0, sum(map(ledger.policy.size_bytes, units)) - wanted_bytes)

    def evict(self, units: list[Unit], *, keep_copy: bool = True, spare_bytes: int = 0) -> int:
        """Mark them absent now and remove their bytes soon; returns the accounted bytes.

        ``keep_copy``: the next tier may have them. ``spare_bytes``: so much of the last one may stay.
        """
        tier = self._tier
        tail = tier.take_tail(units[-1], spare_bytes) if spare_bytes >= BLOCK_SIZE_BYTES else None
        job = _Job(taken=tier.take_units(units if tail is None else units[:-1], remember=keep_copy))
        if tail is not None:
            job.taken.append(tail)
        job.offer = keep_copy
        job.nbytes = sum(taken.nbytes for taken in job.taken)
        self.evicted_bytes += job.nbytes
        for taken in job.taken:
            content_id, extent = taken.content_id, taken.extent
            if extent.segment:
                self._add_place(job, extent.segment, extent.place_bytes, extent.size_bytes)
            elif tier.has_file(content_id) or tier.has_fills(content_id):
                self._add_punch(job, content_id, taken.extent_no, extent.present & ~extent.zeros)
            elif content_id not in job.removing:
                self._add_unlink(job, content_id)
        self._start(job)
        return job.nbytes

    def release(self, nbytes: int) -> int:
        """Evict about that much (or what there is); ``settled`` waits for it. Returns the bytes."""
        units = self._choose(nbytes, 1)
        return self.evict(units) if units else 0

    async def settled(self) -> None:
        """Wait until nothing is being removed."""
        while self._jobs:
            await self._tier.wait_change()

    def forget(self, content_id: ContentId) -> None:
        """Nothing of that content is wanted any more, pinned or not."""
        place = self._tier.place_of(content_id)
        job = _Job(nbytes=self._tier.forget_records(content_id))
        if place is not None:
            self._add_place(job, *place)
        else:
            self._add_unlink(job, content_id)
        self._start(job)

    def unlink_later(self, content_id: ContentId) -> None:
        """Remove the file of a content that has no records (any more)."""
        job = _Job()
        self._add_unlink(job, content_id)
        self._start(job)

    def punch_later(self, content_id: ContentId, extent_no: int, mask: int) -> None:
        """Free blocks that no record speaks of."""
        job = _Job()
        self._add_punch(job, content_id, extent_no, mask)
        self._start(job)

    def free_place(self, segment: int, place_bytes: int, nbytes: int) -> None:
        """Free a part of a segment that no record speaks of."""
        job = _Job()
        self._add_place(job, segment, place_bytes, nbytes)
        self._start(job)

    def free_segment(self, segment: int) -> None:
        """Remove a segment that no record speaks of."""
        job = _Job()
        self._add_segment(job, segment)
        self._start(job)

    def _add_unlink(self, job: _Job, content_id: ContentId) -> None:
        job.unlink.append(device.object_path(self._tier.root, content_id))
        job.removing.append(content_id)
        fd = self._tier.files.detach(content_id)
        if fd is not None:
            job.close.append(fd)

    def _add_punch(self, job: _Job, content_id: ContentId, extent_no: int, mask: int) -> None:
        if content_id not in job.removing:
            job.removing.append(content_id)
        ranges = job.punch.setdefault(device.object_path(self._tier.root, content_id), [])
        for first, count in blocks.runs(mask):
            start = (extent_no * EXTENT_BLOCKS + first) * BLOCK_SIZE_BYTES
            ranges.append((start, count * BLOCK_SIZE_BYTES))

    def _add_place(self, job: _Job, segment: int, place_bytes: int, nbytes: int) -> None:
        """After the content was taken off the segment's count."""
        if self._tier.walked.is_set() and self._tier.segments.is_dead(segment):
            self._add_segment(job, segment)
            return
        rounded = -(-nbytes // blocks.ALLOCATION_BYTES) * blocks.ALLOCATION_BYTES
        job.punch.setdefault(segment_path(self._tier.root, segment), []).append((place_bytes, rounded))

    def _add_segment(self, job: _Job, segment: int) -> None:
        job.unlink.append(segment_path(self._tier.root, segment))
        fd = self._tier.segments.files.detach(segment)
        if fd is not None:
            job.close.append(fd)

    def _start(self, job: _Job) -> None:
        assert self._nursery is not None
        for content_id in job.removing:
            self._tier.begin_removal(content_id)
        self._tier.ledger.freeing_bytes += job.nbytes
        self._jobs += 1
        self._nursery.start_soon(self._carry_out, job)

    async def _carry_out(self, job: _Job) -> None:
        tier = self._tier
        try:
            if tier.on_evict is not None and job.offer:
                for taken in job.taken:
                    await tier.on_evict(taken)
        except Exception:
            _log.exception("evicted data could not be kept in the next tier", path=tier.root)
        finally:
            # Also when the cache is being closed: nobody will find these bytes any more.
            with trio.CancelScope(shield=True):
                await self._remove(job)

    async def _remove(self, job: _Job) -> None:
        tier = self._tier
        try:
            if job.punch:
                await self._commit_before(job)
            await trio.to_thread.run_sync(_remove, job, limiter=tier.io)
        except OSError as error:
            tier.needs_sweep = True
            tier.health.failed(error)
        except Exception:
            tier.needs_sweep = True
            _log.exception("evicted data could not be removed", path=tier.root)
        finally:
            self._jobs -= 1
            tier.ledger.freeing_bytes -= job.nbytes
            for content_id in job.removing:
                tier.end_removal(content_id)
            tier.note_change()

    async def _commit_before(self, job: _Job) -> None:
        try:
            await self._tier.commit()
        except IndexWriteFailed:
            # The committed index still calls these blocks present: they must stay what they are. The space
            # is found by the sweep at the next start.
            self._tier.needs_sweep = True
            job.punch.clear()


def _remove(job: _Job) -> None:
    """Worker thread."""
    for fd in job.close:
        os.close(fd)
    for path in job.unlink:
        device.unlink_if_there(path)
    for path, ranges in job.punch.items():
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            for start, length in ranges:
                device.punch(fd, start, length)
        finally:
            os.close(fd)
