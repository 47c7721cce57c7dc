"""One node of the simulation: where the bytes of a read come from, and when they are there.

Two kinds of node, with one question: ``read`` tells what a reader has to wait for. Which units (extents) are
local is decided once per visit, when the reader or the read-ahead gets to a unit, and is counted then; bytes
that were fetched stay at hand until the reader is through with the unit, as the bytes that a mount has just
fetched are in its tier and in the page cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Generator
from typing import Any, NamedTuple, Protocol, cast

from simpy import Environment, Event

from tierfs.cache import blocks
from tierfs.cache.blocks import BLOCK_SIZE_BYTES, EXTENT_SIZE_BYTES
from tierfs.cache.policy import Unit
from tierfs.cache.reading import SMALL_OBJECT_BYTES
from tierfs.config import Settings, TierSetting
from tierfs.plan.fetching import Fetch, FetchQueue
from tierfs.plan.queueing import Route
from tierfs.plan.scenario import DEFAULTS, MIB, Scenario
from tierfs.plan.tiers import Kept
from tierfs.plan.trace import DataSet, Names, ino_of
from tierfs.prefetch.readahead import ReadAheadTable
from tierfs.types import ContentId, ObjectRef

PIECE_BYTES = MIB
"""A read is at most that long, and lies inside one piece."""
_BEGINNING_BYTES = 2 * MIB
"""So far into a file, the read-ahead is told of each request of the kernel; behind it, of each piece."""


class Read(NamedTuple):
    """``arrival`` None: at once. ``length``: how much of the read that is, from its start."""

    arrival: Event | None
    length: int


class Node(Protocol):
    """See the module docstring."""

    kept: Kept
    visited: set[Unit]
    """Units that were counted."""
    arrived_bytes: int
    """What came from a place or from the store so far, read or ahead of the reader."""

    def read(self, content: int, offset: int, length: int) -> Read: ...


@dataclasses.dataclass(slots=True)
class _Visit:
    """How a unit was found. ``place`` None: it is being fetched. Words have a bit per block of the extent."""

    place: int | None
    arrived: int = 0
    flying: list[tuple[int, Fetch]] = dataclasses.field(default_factory=list)

    @property
    def under_way(self) -> int:
        word = 0
        for mask, _ in self.flying:
            word |= mask
        return word


class MountNode:
    """A mount of tierfs: its tiers, and its own read-ahead, driven in simulated time.

    ``routes``: how bytes get from each tier to a reader. Implements ``prefetch.runner.LocalBytes``.
    """

    def __init__(
        self,
        environment: Environment,
        scenario: Scenario,
        data: DataSet,
        kept: Kept,
        fetches: FetchQueue,
        routes: list[Route],
    ) -> None:
        self.kept = kept
        self.visited: set[Unit] = set()
        self.arrived_bytes = 0
        self._environment = environment
        self._data = data
        self._fetches = fetches
        self._routes = routes
        self._visits: dict[Unit, _Visit] = {}
        following = Names(data) if scenario.order == "sequential" else None
        self._readahead = ReadAheadTable(self, _settings(scenario), following=following)
        self._readahead.runner.start(self._spawn)

    def read(self, content: int, offset: int, length: int) -> Read:
        """What is not at hand comes block by block: so the kernel asks for it."""
        ref = self._data.ref(content)
        self._observe(ref, content, offset, length)
        unit = (ref.content_id, offset // EXTENT_SIZE_BYTES)
        visit = self._visit(unit, ref.size_bytes)
        if visit.place is not None:
            now_s = self._environment.now
            arrival_s = self._routes[visit.place].arrival_s(now_s, length)
            found = Read(self._environment.timeout(arrival_s - now_s), length)
            self.arrived_bytes += length
        else:
            found = self._read_fetched(ref, visit, offset, length)
        end = offset + found.length
        if end == ref.size_bytes or end % EXTENT_SIZE_BYTES == 0:
            self._visits.pop(unit, None)
        return found

    def _observe(self, ref: ObjectRef, content: int, offset: int, length: int) -> None:
        step = BLOCK_SIZE_BYTES if offset < _BEGINNING_BYTES else length
        for start in range(offset, offset + length, step):
            self._readahead.observe(ino_of(content), ref, start, min(step, offset + length - start))

    def _read_fetched(self, ref: ObjectRef, visit: _Visit, offset: int, length: int) -> Read:
        wanted = blocks.range_mask(offset, offset + length)
        if not wanted & ~visit.arrived:
            return Read(None, length)
        first = wanted & -wanted
        length = min(length, BLOCK_SIZE_BYTES - offset % BLOCK_SIZE_BYTES)
        if visit.arrived & first:
            return Read(None, length)
        for mask, fetch in visit.flying:
            if mask & first:
                self._fetches.promote(fetch)
                return Read(fetch.done, length)
        if ref.size_bytes <= SMALL_OBJECT_BYTES:
            first = blocks.full_mask(ref.size_bytes, 0) & ~visit.arrived & ~visit.under_way
        extent_no = offset // EXTENT_SIZE_BYTES
        return Read(self._fetch(ref, visit, extent_no, first, demand=True).done, length)

    # what the read-ahead asks of a cache

    def is_complete(self, content_id: ContentId) -> bool:
        for number in range(blocks.extent_count(self._data.content_bytes)):
            visit = self._visits.get((content_id, number))
            if visit is not None and visit.place is None:
                return False
            if (content_id, number) not in self.kept:
                return False
        return True

    async def prefetch(self, ref: ObjectRef, offset_bytes: int, length_bytes: int) -> int:
        mine: list[Fetch] = []
        others: list[Fetch] = []
        end = min(offset_bytes + length_bytes, ref.size_bytes)
        for number, start, stop in blocks.extent_spans(offset_bytes, end):
            unit = (ref.content_id, number)
            if unit in self.visited and unit not in self._visits:
                continue  # the reader has passed
            visit = self._visit(unit, ref.size_bytes)
            if visit.place is not None:
                continue
            wanted = blocks.range_mask(start, stop)
            others += [fetch for mask, fetch in visit.flying if mask & wanted]
            for first, count in blocks.runs(wanted & ~visit.arrived & ~visit.under_way):
                mine.append(self._fetch(ref, visit, number, blocks.span_mask(first, count), demand=False))
        for fetch in (*mine, *others):
            await _Until(fetch.done)
        return sum(fetch.nbytes for fetch in mine)

    def _visit(self, unit: Unit, size_bytes: int) -> _Visit:
        visit = self._visits.get(unit)
        if visit is None:
            length = min(EXTENT_SIZE_BYTES, size_bytes - unit[1] * EXTENT_SIZE_BYTES)
            visit = self._visits[unit] = _Visit(self.kept.read(unit, length))
            self.visited.add(unit)
        return visit

    def _fetch(self, ref: ObjectRef, visit: _Visit, extent_no: int, mask: int, *, demand: bool) -> Fetch:
        nbytes = blocks.content_bytes(mask, ref.size_bytes, extent_no)
        fetch = self._fetches.request(nbytes, demand=demand)
        flight = (mask, fetch)
        visit.flying.append(flight)

        def arrived(_: Event) -> None:
            visit.arrived |= mask
            self.arrived_bytes += nbytes
            visit.flying.remove(flight)

        assert fetch.done.callbacks is not None
        fetch.done.callbacks.append(arrived)
        return fetch

    def _spawn(self, call: Callable[[], Awaitable[None]]) -> None:
        self._environment.process(_steps(call()))


class StreamNode:
    """Files read as one stream each, with a fixed read-ahead or none: NFS, or a loader that speaks to the
    store.

    ``reads_ahead_bytes`` 0: what was not asked for does not travel, and only the first read of a file pays
    the latency.
    """

    def __init__(
        self,
        environment: Environment,
        data: DataSet,
        kept: Kept,
        route: Route,
        local: Route,
        *,
        reads_ahead_bytes: int,
    ) -> None:
        self.kept = kept
        self.visited: set[Unit] = set()
        self.arrived_bytes = 0
        self._environment = environment
        self._data = data
        self._route = route
        self._local = local
        self._pieces_ahead = reads_ahead_bytes // PIECE_BYTES
        self._open: dict[int, dict[int, float]] = {}
        """Content -> piece -> when it arrives (or has)."""
        self._places: dict[Unit, int | None] = {}

    def read(self, content: int, offset: int, length: int) -> Read:
        size = self._data.content_bytes
        arrivals = self._open.setdefault(content, {})
        piece = offset // PIECE_BYTES
        last = -(-size // PIECE_BYTES)
        for wanted in range(piece, min(piece + 1 + self._pieces_ahead, last)):
            if wanted not in arrivals:
                arrivals[wanted] = self._ask(content, wanted, min(PIECE_BYTES, size - wanted * PIECE_BYTES))
        arrival_s = arrivals[piece]
        if offset + length == size:
            del self._open[content]
            for number in range(-(-size // EXTENT_SIZE_BYTES)):
                self._places.pop((self._data.ref(content).content_id, number), None)
        wait_s = arrival_s - self._environment.now
        return Read(self._environment.timeout(wait_s) if wait_s > 0 else None, length)

    def _ask(self, content: int, piece: int, nbytes: int) -> float:
        self.arrived_bytes += nbytes
        number = piece * PIECE_BYTES // EXTENT_SIZE_BYTES
        unit = (self._data.ref(content).content_id, number)
        if unit not in self._places:
            size = min(EXTENT_SIZE_BYTES, self._data.content_bytes - number * EXTENT_SIZE_BYTES)
            self._places[unit] = self.kept.read(unit, size)
            self.visited.add(unit)
        if self._places[unit] is not None:
            return self._local.arrival_s(self._environment.now, nbytes)
        continued = piece > 0 and not self._pieces_ahead
        return self._route.arrival_s(self._environment.now, nbytes, continued=continued)


class Nothing:
    """Keeps nothing."""

    def __init__(self) -> None:
        self.hit_bytes = 0
        self.missed_bytes = 0

    def __contains__(self, unit: Unit) -> bool:
        return False

    def read(self, unit: Unit, size_bytes: int) -> int | None:
        self.missed_bytes += size_bytes
        return None


class _Until:
    """Awaits an event of the simulation."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def __await__(self) -> Generator[Event, None, None]:
        if not self._event.processed:
            yield self._event


def _steps(call: Awaitable[None]) -> Generator[Event, Any, None]:
    """A coroutine that awaits nothing but ``_Until``, as a process of the simulation."""
    yield from cast("Generator[Event, Any, None]", call.__await__())


def _settings(scenario: Scenario) -> Settings:
    """What the read-ahead of a mount is told. Capacities are the real ones: they bound its window."""
    tiers = tuple(
        TierSetting(name=str(number), path="/", capacity_bytes=size, volatile=False)
        for number, size in enumerate(scenario.tier_sizes)
    )
    return Settings(
        source="/",
        mountpoint="/",
        state_dir="/",
        tiers=tiers,
        read_ahead_bytes=scenario.read_ahead_bytes,
        fetch_concurrency=scenario.fetch_concurrency,
        memory_budget_bytes=DEFAULTS.memory_budget_bytes,
    )
