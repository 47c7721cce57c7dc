"""Which units a tier keeps: admission and eviction by reuse distance, weighed in bytes.

Owns: the list of what is resident in one tier, and a bounded memory of what was. No I/O, no lock, no
clock but its own: the access clock counts bytes, so that "how long ago" means "how many bytes of other
data were visited since". One instance per tier; all calls from one thread (the trio thread). Every call
is O(1) (``victims`` O(number returned)).

A unit is ``(content_id, extent_no)``: what is evicted as a whole, of a size that may grow while it fills.

Protocol of the caller, with no await between the lines of one step::

    if not policy.admit(unit, size):         # or policy.grow(unit, added) for a resident unit
        ...                                  # it cannot fit, whatever is evicted: bypass the tier
    for victim in policy.victims(policy.excess_bytes):
        ...                                  # mark it absent, so that nobody finds it any more
        policy.remove(victim)
    if policy.excess_bytes > 0:              # all that is left is pinned or dirty
        policy.remove(unit, remember=False)  # give the reservation back (or shrink): bypass the tier

The rule. Resident units are in one of two queues. MAIN (95 % of what is not held) keeps what has proved,
or may be presumed, to come back, least recently visited first; PROBATION (5 %, but room for the largest unit)
is a FIFO through which everything else passes, so that every block that is read is local for at least a
while (read-ahead, several readers of one file) and no scan can touch the main queue. While main has room,
also for what the unit may grow to, everything enters it.
Afterwards a unit enters it, at the cost of the oldest main unit, which has been idle for so and so long:

* the unit returns after a known distance, and the oldest has been idle for 4 times that distance: then it
  is likely that the newcomer is used sooner. In a loop over more data than fits every unit comes back after
  the same distance, nothing ever qualifies, and the main queue stays as it is: the hit rate is close to
  capacity / data, where LRU has none at all. In shuffled epochs little qualifies (with a ratio of 2 a
  tenth of the hits would be lost);
* the oldest is idle for clearly longer than the unit's distance, and besides main has gone silent (no hit for
  twice the longest pause there used to be), or the oldest is overdue (idle for longer than anything that
  was ever hit): the data set has been switched;
* the oldest is stale: idle for 2.5 capacities and twice the longest distance that was ever hit. Then whatever
  comes takes its place, and the limit doubles with each turnover of main that brought no hit, so
  that a loop over many capacities finds, in the end, something to hold on to.

"Ever" decays over some capacities of hits. What the distances are is known from the last touch of a resident
unit, and from the ghosts for one that was evicted: 16 bytes each, back to 2 to 4 times as many
units as are resident.

Refused alternatives: LRU and FIFO (0 % in a loop over 1.2 x the capacity), S3-FIFO (its main queue
is reached by frequency, which in an epoch is one for all), ARC and LIRS (they adapt by hit counts of
ghosts kept as objects; LIRS comes closest and is where "reuse distance" comes from; it has no notion of
a data set that is gone).
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass

from tierfs.cache.ghosts import Ghosts
from tierfs.cache.ghosts import Unit as Unit

PROBATION_SHARE = 0.05
"""Part of the capacity that is not held (pinned or dirty) which probation may take from main."""
DISPLACE_RATIO = 4
"""A newcomer displaces the oldest main unit if that has been idle this many times the newcomer's distance."""
SILENT_RATIO = 2
SILENT_SHARE = 1 / 4
"""Main is silent after this many times its longest pause between hits, plus this share of the capacity."""
CLEARLY = 1.1
"""Times as long as means longer: distances of one loop differ by the sizes of its units."""
STALE_RATIO = 2
STALE_CAPACITIES = 2.5
"""The oldest main unit is stale when idle this many times that distance, and this many capacities."""
MEMORY_CAPACITIES = 4
"""Longest pause and longest distance fade over this many capacities of hits."""
SAME_VISIT_SHARE = 1 / 32
"""Touches less than this part of the capacity apart are one visit (blocks of one unit, read in turn)."""

_SIZE_BITS = 40
_SIZE_MASK = (1 << _SIZE_BITS) - 1


class Admission(enum.IntEnum):
    """Where a unit went. False in a condition if it went nowhere."""

    REFUSED = 0
    """It cannot fit, whatever is evicted: the tier is too small, or full of pinned and dirty units."""
    PROBATION = 1
    MAIN = 2


@dataclass(slots=True)
class _Held:
    """A unit that may not be evicted now."""

    size_bytes: int
    touched: int
    was_main: bool
    pins: int = 0
    dirty: bool = False


class EvictionPolicy:
    """See the module docstring for the rule, the protocol and the thread."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._clock = 0
        # Values pack (time of the last touch, size): a plain int costs a third of an object and is not
        # traversed by the garbage collector, and there are millions of them.
        self._main: OrderedDict[Unit, int] = OrderedDict()
        self._probation: OrderedDict[Unit, int] = OrderedDict()
        self._held: dict[Unit, _Held] = {}
        self._ghosts = Ghosts(max(1, capacity_bytes // 65536))
        self._main_bytes = 0
        self._probation_bytes = 0
        self._pinned_bytes = 0
        self._dirty_bytes = 0
        self._held_bytes = 0
        self._grown_bytes = 0
        """The largest size that a unit has grown to: so much room a new one may need."""
        self._largest_bytes = 0
        """The largest unit so far: probation has to have room for one, or it would be made at main's cost."""
        self._last_hit = 0
        self._longest_pause = 0.0
        self._longest_distance = 0.0
        self._stale_after = STALE_CAPACITIES * capacity_bytes

    # what is there

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._main or unit in self._probation or unit in self._held

    contains = __contains__

    @property
    def content_count(self) -> int:
        """Contents of which the first unit is resident. Walks all units: some 50 ns each."""
        return sum(not unit[1] for queue in (self._main, self._probation, self._held) for unit in queue)

    def __len__(self) -> int:
        return len(self._main) + len(self._probation) + len(self._held)

    @property
    def capacity_bytes(self) -> int:
        return self._capacity

    @property
    def used_bytes(self) -> int:
        """Bytes of all resident units, pinned and dirty ones included."""
        return self._main_bytes + self._probation_bytes + self._held_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of resident units with at least one pin."""
        return self._pinned_bytes

    @property
    def dirty_bytes(self) -> int:
        return self._dirty_bytes

    @property
    def evictable_bytes(self) -> int:
        """Bytes that ``victims`` could return."""
        return self._main_bytes + self._probation_bytes

    @property
    def excess_bytes(self) -> int:
        """By how much the resident units exceed the capacity: what has to be evicted now. Never negative."""
        return max(0, self.used_bytes - self._capacity)

    def size_bytes(self, unit: Unit) -> int:
        """Size of a resident unit; 0 for one that is not resident."""
        held = self._held.get(unit)
        if held is not None:
            return held.size_bytes
        return self._main.get(unit, self._probation.get(unit, 0)) & _SIZE_MASK

    def resize(self, capacity_bytes: int) -> None:
        """Change the capacity. ``excess_bytes`` then says what has to go."""
        self._capacity = capacity_bytes

    # what happens to it

    def touch(self, unit: Unit) -> None:
        """A read of a resident unit; any other unit is ignored. Call it for every read, cheap for repeats."""
        packed = self._main.get(unit)
        if packed is not None:
            if packed >> _SIZE_BITS == self._clock:
                return
            distance = self._visit(packed >> _SIZE_BITS, packed & _SIZE_MASK)
            if distance:
                self._learn(distance, packed & _SIZE_MASK)
            self._main[unit] = self._clock << _SIZE_BITS | (packed & _SIZE_MASK)
            self._main.move_to_end(unit)
            return
        packed = self._probation.get(unit)
        if packed is not None:
            size = packed & _SIZE_MASK
            distance = self._visit(packed >> _SIZE_BITS, size)
            if distance and self._deserves_main(size, distance):
                del self._probation[unit]
                self._probation_bytes -= size
                self._main_bytes += size
                self._main[unit] = self._clock << _SIZE_BITS | size
            else:
                self._probation[unit] = self._clock << _SIZE_BITS | size
            return
        held = self._held.get(unit)
        if held is not None:
            self._visit(held.touched, held.size_bytes)
            held.touched = self._clock

    def admit(self, unit: Unit, size_bytes: int, *, dirty: bool = False) -> Admission:
        """A unit that is not resident becomes so, with ``size_bytes`` of data (it may grow).

        ``dirty`` units are not subject to the rule; they are refused only where pinned and dirty data
        would exceed the capacity. Raises ValueError if the unit is resident.
        """
        if unit in self:
            raise ValueError(f"unit {unit!r} is resident already")
        if size_bytes > self._capacity - self._held_bytes:
            return Admission.REFUSED
        self._largest_bytes = max(self._largest_bytes, size_bytes)
        seen = self._ghosts.take(unit)
        distance = None
        if seen is not None:
            distance = max(0, self._clock - seen)
            self._longest_distance = max(distance, self._longest_distance)
        to_main = self._deserves_main(size_bytes, distance)
        self._clock += size_bytes
        self._insert(unit, size_bytes, self._clock, to_main and not dirty)
        if dirty:
            self.set_dirty(unit)
        return Admission.MAIN if to_main else Admission.PROBATION

    def load(self, unit: Unit, size_bytes: int) -> None:
        """A unit found in the tier at start: resident without having been read. Known units are left alone.

        Oldest first if the caller knows; the order among loaded units is the order of the calls.
        """
        if unit not in self:
            self._insert(unit, size_bytes, self._clock, self._main_bytes + size_bytes <= self._main_limit())

    def grow(self, unit: Unit, added_bytes: int) -> None:
        """More of a resident unit is local (or, with a negative number, less). KeyError if not resident."""
        if added_bytes > 0:
            self._clock += added_bytes
        held = self._held.get(unit)
        if held is not None:
            held.size_bytes += added_bytes
            self._held_bytes += added_bytes
            if held.pins:
                self._pinned_bytes += added_bytes
            if held.dirty:
                self._dirty_bytes += added_bytes
            if added_bytes > 0:
                held.touched = self._clock
            return
        queue = self._main if unit in self._main else self._probation
        size = (queue[unit] & _SIZE_MASK) + added_bytes
        if size < 0:
            raise ValueError(f"unit {unit!r} would shrink below zero")
        if size > self._grown_bytes and added_bytes > 0:
            self._grown_bytes = size
            self._largest_bytes = max(self._largest_bytes, size)
        queue[unit] = self._clock << _SIZE_BITS | size
        if queue is self._main:
            self._main_bytes += added_bytes
            queue.move_to_end(unit)
        else:
            self._probation_bytes += added_bytes

    def remove(self, unit: Unit, *, remember: bool = True) -> int:
        """The unit is not resident any more; returns its size, 0 if it was not resident.

        ``remember``: it may be read again (evicted). False: its content is gone for good, or was never
        there (a failed fetch).
        """
        held = self._held.get(unit)
        if held is not None:
            del self._held[unit]
            size, touched = held.size_bytes, held.touched
            self._held_bytes -= size
            self._pinned_bytes -= size if held.pins else 0
            self._dirty_bytes -= size if held.dirty else 0
        else:
            size, touched = self._take(unit)
            if size < 0:
                return 0
        if remember:
            self._ghosts.add(unit, touched, len(self))
        return size

    def victims(self, nbytes: int) -> list[Unit]:
        """Units to evict, in order, that together free at least ``nbytes`` (fewer if there are no more).

        Changes nothing: the caller evicts and calls ``remove``. Never a pinned or dirty one. The unit that
        entered last comes last.
        """
        chosen: list[Unit] = []
        main, probation = iter(self._main.items()), iter(self._probation.items())
        main_left, probation_left = len(self._main), len(self._probation)
        main_bytes, limit = self._main_bytes, self._main_limit()
        freed = 0
        while freed < nbytes and (main_left or probation_left):
            # The youngest unit of probation is the one that room is made for.
            if main_left and (main_bytes > limit or probation_left <= 1):
                unit, packed = next(main)
                main_left -= 1
                main_bytes -= packed & _SIZE_MASK
            else:
                unit, packed = next(probation)
                probation_left -= 1
            freed += packed & _SIZE_MASK
            chosen.append(unit)
        return chosen

    # what may not go

    def pin(self, unit: Unit) -> None:
        """One more reason to keep the unit. Pins are counted. KeyError if not resident."""
        held = self._hold(unit)
        if held.pins == 0:
            self._pinned_bytes += held.size_bytes
        held.pins += 1

    def unpin(self, unit: Unit) -> None:
        """One reason less. KeyError if not resident, ValueError if it has no pin."""
        held = self._held.get(unit)
        if held is None or held.pins == 0:
            raise ValueError(f"unit {unit!r} is not pinned") if unit in self else KeyError(unit)
        held.pins -= 1
        if held.pins == 0:
            self._pinned_bytes -= held.size_bytes
            self._release(unit, held)

    def set_dirty(self, unit: Unit) -> None:
        """It holds what the store does not have. KeyError if not resident."""
        held = self._hold(unit)
        if not held.dirty:
            held.dirty = True
            self._dirty_bytes += held.size_bytes

    def clear_dirty(self, unit: Unit) -> None:
        """The store has it now. Clean units are left alone; KeyError if not resident."""
        held = self._held.get(unit)
        if held is None:
            if unit not in self:
                raise KeyError(unit)
            return
        if held.dirty:
            held.dirty = False
            self._dirty_bytes -= held.size_bytes
            self._release(unit, held)

    def is_pinned(self, unit: Unit) -> bool:
        held = self._held.get(unit)
        return held is not None and held.pins > 0

    def is_dirty(self, unit: Unit) -> bool:
        held = self._held.get(unit)
        return held is not None and held.dirty

    # inside

    def _main_limit(self) -> int:
        free = max(0, self._capacity - self._held_bytes)
        return free - max(int(free * PROBATION_SHARE), min(self._largest_bytes, free // 2))

    def _visit(self, touched: int, size_bytes: int) -> int:
        """Advance the clock if this touch begins a new visit; returns the distance then, else 0."""
        distance = self._clock - touched
        if distance <= self._capacity * SAME_VISIT_SHARE:
            return 0
        self._clock += size_bytes
        return distance

    def _learn(self, distance: int, size_bytes: int) -> None:
        """A main unit was visited again after ``distance``."""
        fading = min(1.0, size_bytes / (MEMORY_CAPACITIES * max(1, self._capacity)))
        if self._last_hit:
            pause = self._clock - self._last_hit
            self._longest_pause = max(pause, self._longest_pause * (1 - fading))
        self._last_hit = self._clock
        self._longest_distance = max(distance, self._longest_distance * (1 - fading))
        self._stale_after = max(STALE_CAPACITIES * self._capacity, STALE_RATIO * self._longest_distance)

    def _deserves_main(self, size_bytes: int, distance: int | None) -> bool:
        """The rule of the module docstring. ``distance`` None: not known to have been here before."""
        if self._main_bytes + max(size_bytes, self._grown_bytes) <= self._main_limit():
            return True
        if not self._main:
            return False
        idle = self._clock - (next(iter(self._main.values())) >> _SIZE_BITS)
        if distance is not None and idle > CLEARLY * distance:
            silent = self._clock - self._last_hit
            if (
                idle > DISPLACE_RATIO * distance
                or silent > SILENT_RATIO * self._longest_pause + SILENT_SHARE * self._capacity
                or idle > CLEARLY * self._longest_distance
            ):
                return True
        if idle > self._stale_after:
            self._stale_after *= 1 + size_bytes / max(1, self._capacity)
            return True
        return False

    def _insert(self, unit: Unit, size_bytes: int, touched: int, to_main: bool) -> None:
        if to_main:
            self._main[unit] = touched << _SIZE_BITS | size_bytes
            self._main_bytes += size_bytes
        else:
            self._probation[unit] = touched << _SIZE_BITS | size_bytes
            self._probation_bytes += size_bytes

    def _take(self, unit: Unit) -> tuple[int, int]:
        """Out of its queue; returns (size, last touch), or (-1, 0) if it is in none."""
        packed = self._main.pop(unit, None)
        if packed is not None:
            self._main_bytes -= packed & _SIZE_MASK
        else:
            packed = self._probation.pop(unit, None)
            if packed is None:
                return -1, 0
            self._probation_bytes -= packed & _SIZE_MASK
        return packed & _SIZE_MASK, packed >> _SIZE_BITS

    def _hold(self, unit: Unit) -> _Held:
        held = self._held.get(unit)
        if held is None:
            was_main = unit in self._main
            size, touched = self._take(unit)
            if size < 0:
                raise KeyError(unit)
            held = self._held[unit] = _Held(size, touched, was_main)
            self._held_bytes += size
        return held

    def _release(self, unit: Unit, held: _Held) -> None:
        if held.pins or held.dirty:
            return
        del self._held[unit]
        self._held_bytes -= held.size_bytes
        self._insert(unit, held.size_bytes, held.touched, held.was_main)
