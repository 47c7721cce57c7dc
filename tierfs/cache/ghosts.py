"""What an eviction policy remembers of units that it let go: 16 bytes each, and nothing of the unit itself.

Pure; used by ``policy`` only.
"""

from __future__ import annotations

from array import array

import xxhash

from tierfs.types import ContentId

Unit = tuple[ContentId, int]
"""Content, and number of the extent in it: what is evicted as a whole."""

_BUCKET = 8
_GHOSTS_PER_UNIT = 2
_MIN_GHOSTS = 1024
_MAX_GHOSTS = 4 * 1024 * 1024
_LOW_32 = 0xFFFF_FFFF


class Ghosts:
    """When units that are gone were last touched: two generations of a table of fingerprints.

    The current generation takes what is evicted; when it has taken twice as many units as are resident
    it becomes the previous one, and that is forgotten. An entry is 32 bits of fingerprint and 32 bits of
    time, in steps of ``quantum_bytes``; a full bucket loses its oldest. A false match is a wrong guess
    about one unit, once in 2**28 look-ups.
    """

    def __init__(self, quantum_bytes: int) -> None:
        self._quantum = quantum_bytes
        self._generations = [_table(_MIN_GHOSTS), _table(_MIN_GHOSTS)]
        self._room = _MIN_GHOSTS

    def add(self, unit: Unit, touched: int, resident: int) -> None:
        if self._room <= 0:
            self._room = min(_MAX_GHOSTS, max(_MIN_GHOSTS, _GHOSTS_PER_UNIT * resident))
            self._generations = [_table(self._room), self._generations[0]]
        self._room -= 1
        table = self._generations[0]
        mixed = _mix(unit)
        start = mixed % (len(table) // _BUCKET) * _BUCKET
        bucket = table[start : start + _BUCKET]
        entry = (touched // self._quantum & _LOW_32) << 32 | mixed >> 32 & _LOW_32
        table[start + bucket.index(min(bucket))] = entry

    def take(self, unit: Unit) -> int | None:
        """When the unit was last touched, None if that is not known any more. Forgets it."""
        mixed = _mix(unit)
        fingerprint = mixed >> 32 & _LOW_32
        for table in self._generations:
            start = mixed % (len(table) // _BUCKET) * _BUCKET
            for slot in range(start, start + _BUCKET):
                entry = table[slot]
                if entry & _LOW_32 == fingerprint and entry:
                    table[slot] = 0
                    return (entry >> 32) * self._quantum
        return None


def _table(entries: int) -> array[int]:
    """Empty slots for that many entries, half of them spare (about 2 % of the entries overflow)."""
    buckets = -(-entries * 2 // _BUCKET)
    return array("Q", bytes(buckets * _BUCKET * 8))


def _mix(unit: Unit) -> int:
    """64 well-mixed bits of a unit's name, the same in every process (hash() of bytes is not)."""
    return xxhash.xxh3_64_intdigest(unit[0], unit[1])
