"""Which units of the data a node keeps: the tiers of a mount, a page cache, or nothing. Pure.

The tiers are ``cache.ledger`` and ``cache.policy`` as a mount uses them, called by the protocol that
``policy`` states. Where new data goes, and what moves between tiers, follows ``cache.placement``; copies take
no time here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from tierfs.cache.ledger import Ledger
from tierfs.cache.policy import Admission, Unit


class Kept(Protocol):
    """What a node has locally. ``requested_bytes == hit_bytes + missed_bytes``, always."""

    hit_bytes: int
    missed_bytes: int

    def read(self, unit: Unit, size_bytes: int) -> int | None:
        """A visit: the number of the place that has the unit, fast to slow; None: fetched, and maybe kept."""
        ...

    def __contains__(self, unit: Unit) -> bool: ...


class Tiers:
    """Tiers of one mount, fast to slow."""

    def __init__(self, capacities_bytes: Sequence[int]) -> None:
        self.ledgers = [Ledger(capacity) for capacity in capacities_bytes]
        self.hit_bytes = 0
        self.missed_bytes = 0

    def __contains__(self, unit: Unit) -> bool:
        return any(unit in ledger.policy for ledger in self.ledgers)

    def read(self, unit: Unit, size_bytes: int) -> int | None:
        for number, ledger in enumerate(self.ledgers):
            if unit in ledger.policy:
                ledger.policy.touch(unit)
                self.hit_bytes += size_bytes
                if number:
                    self._offer(self.ledgers[number - 1], number - 1, unit, size_bytes)
                return number
        self.missed_bytes += size_bytes
        for number, ledger in enumerate(self.ledgers):
            if ledger.has_room(size_bytes) and self._admit(number, unit, size_bytes):
                return None
        for number in range(len(self.ledgers) - 1, -1, -1):
            if self._admit(number, unit, size_bytes):
                break
        return None

    def set_dirty(self, dirty_bytes: int) -> None:
        """So much of the slowest tier is taken by what waits for upload."""
        self.ledgers[-1].dirty_bytes = dirty_bytes
        self._make_room(len(self.ledgers) - 1)

    def _admit(self, number: int, unit: Unit, size_bytes: int) -> bool:
        ledger = self.ledgers[number]
        ledger.fit_policy()
        if not ledger.policy.admit(unit, size_bytes):
            return False
        self._make_room(number)
        if ledger.policy.excess_bytes > 0:
            ledger.policy.remove(unit, remember=False)
            return False
        return True

    def _make_room(self, number: int) -> None:
        ledger = self.ledgers[number]
        ledger.fit_policy()
        policy = ledger.policy
        for victim in policy.victims(policy.excess_bytes) if policy.excess_bytes else ():
            size_bytes = policy.remove(victim)
            if number + 1 < len(self.ledgers) and victim not in self.ledgers[number + 1].policy:
                self._admit(number + 1, victim, size_bytes)

    def _offer(self, faster: Ledger, number: int, unit: Unit, size_bytes: int) -> None:
        """A unit was read from a slower tier: it is copied if there is room, or if it earns a place."""
        faster.fit_policy()
        had_room = faster.has_room(size_bytes)
        admission = faster.policy.admit(unit, size_bytes)
        if admission is Admission.MAIN or (had_room and admission is not Admission.REFUSED):
            self._make_room(number)
        elif admission is Admission.PROBATION:
            faster.policy.remove(unit)


class PageCache:
    """What a kernel keeps of a network file system: least recently used goes first. Capacity in bytes."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._units: OrderedDict[Unit, int] = OrderedDict()
        self.hit_bytes = 0
        self.missed_bytes = 0

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._units

    def read(self, unit: Unit, size_bytes: int) -> int | None:
        if unit in self._units:
            self._units.move_to_end(unit)
            self.hit_bytes += size_bytes
            return 0
        self.missed_bytes += size_bytes
        if size_bytes <= self._capacity_bytes:
            self._units[unit] = size_bytes
            self._used_bytes += size_bytes
            while self._used_bytes > self._capacity_bytes:
                self._used_bytes -= self._units.popitem(last=False)[1]
        return None
