"""Which file of a directory is opened next. Pure but for the question who follows whom.

Shards and small files are often read in the order of their names, by one process or by several that share the
work. A cursor is one such walk through a directory: it expects the next few names after the last file
that it saw. A file that is opened where a cursor expects it moves that cursor; any other file that is not
local begins one. Nothing is foretold before a cursor has been right three times; then twice as much with
every further time, so that files in random order cost a look-up each and fetch next to nothing.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tierfs.types import ObjectRef

MAX_CURSORS = 64
EXPECTED_AT_FIRST = 2
MAX_DEPTH = 32
RIGHT_BEFORE_PREFETCH = 3
OPENS_BETWEEN = 16
"""A cursor that was right once must be right again within this many opened files, or that was chance."""


@dataclass(frozen=True, slots=True)
class Successor:
    """A regular file, with the content that it has in the store now."""

    ino: int
    ref: ObjectRef


class Neighbours(Protocol):
    """What a directory knows about the order of its files. Asked for every cold file: some microseconds."""

    def after(self, ino: int, count: int) -> Sequence[int]:
        """Up to ``count`` regular files that come after that one in its directory, by name."""
        ...

    def ref_of(self, ino: int) -> ObjectRef | None:
        """Where the bytes of a file are in the store; None if they are not there, or there are none."""
        ...


@dataclass(slots=True, eq=False)
class _Cursor:
    right: int = 0
    """How many files in a row were opened as expected."""
    seen: int = 0
    """Number of the open that it saw last."""
    expected: OrderedDict[int, None] = field(default_factory=OrderedDict)
    last: int = 0
    """The inode after which no name has been asked for yet."""
    at_end: bool = False


class SuccessionDetector:
    """See the module docstring. ``limit_bytes``: how much of unopened files one cursor may foretell."""

    def __init__(self, neighbours: Neighbours, limit_bytes: int) -> None:
        self._neighbours = neighbours
        self._limit_bytes = limit_bytes
        self._cursors: OrderedDict[_Cursor, None] = OrderedDict()
        self._by_ino: dict[int, _Cursor] = {}
        self._opens = 0

    def opened(self, ino: int, *, local: bool) -> list[Successor]:
        """A file is read from its start; returns what is likely to be opened after it, nearest first.

        Files that were returned before and have not been opened since are returned again. ``local``: all
        of it is here already; such a file moves a cursor, but begins none.
        """
        self._opens += 1
        cursor = self._by_ino.get(ino)
        if cursor is None:
            if local:
                return []
            cursor = _Cursor(last=ino, seen=self._opens)
            self._cursors[cursor] = None
            self._expect(cursor, EXPECTED_AT_FIRST)
            if len(self._cursors) > MAX_CURSORS:
                self._forget(next(iter(self._cursors)))
            return []
        self._cursors.move_to_end(cursor)
        cursor.right = cursor.right + 1 if self._opens - cursor.seen <= OPENS_BETWEEN else 1
        cursor.seen = self._opens
        self._arrive(cursor, ino)
        depth = self._depth(cursor)
        wanted = max(depth, EXPECTED_AT_FIRST)
        if len(cursor.expected) <= wanted // 2 or depth <= EXPECTED_AT_FIRST:
            self._expect(cursor, wanted)
        if not cursor.expected:
            self._forget(cursor)
        return self._within_limit(cursor, depth)

    @staticmethod
    def _depth(cursor: _Cursor) -> int:
        if cursor.right < RIGHT_BEFORE_PREFETCH:
            return 0
        return min(MAX_DEPTH, 2 << min(cursor.right - RIGHT_BEFORE_PREFETCH, 16))

    def _within_limit(self, cursor: _Cursor, depth: int) -> list[Successor]:
        """The first is always returned: how much of it is fetched is for the caller to say."""
        found: list[Successor] = []
        total = 0
        for ino in itertools.islice(cursor.expected, depth):
            ref = self._neighbours.ref_of(ino)
            if ref is None:
                continue
            total += ref.size_bytes
            if found and total > self._limit_bytes:
                break
            found.append(Successor(ino, ref))
        return found

    def _arrive(self, cursor: _Cursor, ino: int) -> None:
        """Several readers may overtake each other a little; what is far behind has been skipped."""
        expected = cursor.expected
        behind = list(expected)[: list(expected).index(ino)]
        del expected[ino], self._by_ino[ino]
        for skipped in behind[: max(0, len(behind) - EXPECTED_AT_FIRST)]:
            del expected[skipped], self._by_ino[skipped]

    def _expect(self, cursor: _Cursor, count: int) -> None:
        """Let the cursor expect ``count`` files, as far as there are so many."""
        missing = count - len(cursor.expected)
        if missing <= 0 or cursor.at_end:
            return
        found = self._neighbours.after(cursor.last, missing)
        cursor.at_end = len(found) < missing
        for ino in found:
            cursor.last = ino
            if ino not in self._by_ino:
                cursor.expected[ino] = None
                self._by_ino[ino] = cursor

    def _forget(self, cursor: _Cursor) -> None:
        del self._cursors[cursor]
        for ino in cursor.expected:
            del self._by_ino[ino]
