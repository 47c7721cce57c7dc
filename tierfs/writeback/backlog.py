"""What is not in the store yet: how much that is, why, and what somebody waits for.

Trio thread only. A dirty row costs 3 us to look at, and there may be a million: what happens often (a scrape,
a look at what a flush still waits for) must not walk them all without letting other tasks run.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from tierfs.errors import NotFound
from tierfs.namespace import publish, records, schema, tree
from tierfs.namespace.db import Database
from tierfs.namespace.transaction import ReadTransaction
from tierfs.writeback.content_table import ContentTable

WALK_BATCH = 1000
"""Rows between two moments at which other tasks may run."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Inodes that are not in the store yet, their file data, and since when the first waits (0: none)."""

    files: int
    bytes: int
    oldest_ns: int


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an inode is not in the store yet, and how often that was tried."""

    path: str
    message: str
    attempts: int


@dataclass(slots=True, eq=False)
class Awaited:
    """The part of the backlog that somebody waits for, and how it fares.

    ``below``: a path; empty for everything. ``later``: also what is written while it waits. Otherwise what
    was waiting at the first look is enough, in that version or a newer one, with what follows from it: the
    files below a directory that was renamed.
    """

    below: bytes = b""
    later: bool = True
    sizes: dict[int, int] = field(default_factory=dict)
    """Inode -> bytes of file data, of all that is still to come."""
    found_files: int = 0
    found_bytes: int = 0
    """All that was ever waited for."""
    left_bytes: int = 0
    open: set[int] = field(default_factory=set)
    """Inodes that were open for writing at the first look: nobody waits for them."""
    ended: set[int] = field(default_factory=set)
    """Inodes whose publication has ended, in whichever way, since the last look."""
    published: set[int] = field(default_factory=set)
    """Those of ``ended`` that reached the store."""
    failed: set[int] = field(default_factory=set)
    """Inodes that failed after the first look and have not been published since."""
    attempts: dict[int, int] = field(default_factory=dict)
    """How often those that were failing at the first look had been tried."""
    has_looked: bool = False

    @property
    def left_files(self) -> int:
        """Inodes that are still to come."""
        return len(self.sizes)

    def takes(self, row: schema.DirtyRow) -> bool:
        """Whether that row, which was not there at an earlier look, is waited for as well."""
        return self.later or not self.has_looked or bool(row.reasons & schema.MOVED)

    def add(self, ino: int, size_bytes: int) -> None:
        """One more to wait for."""
        self.sizes[ino] = size_bytes
        self.found_files += 1
        self.found_bytes += size_bytes
        self.left_bytes += size_bytes

    def drop(self, ino: int) -> None:
        """It is in the store, or there is nothing to wait for any more."""
        self.left_bytes -= self.sizes.pop(ino)
        self.failed.discard(ino)


class Backlog:
    """Walks the dirty rows."""

    def __init__(self, db: Database, contents: ContentTable) -> None:
        self._db = db
        self._contents = contents

    def totals(self) -> Totals:
        """One walk over all rows."""
        files = size_bytes = oldest_ns = 0
        with self._db.read() as txn:
            for row in publish.iter_dirty(txn):
                if self.is_kept_for_readers(row):
                    continue
                inode_bytes = self._data_bytes(txn, row.ino)
                if inode_bytes is None:
                    continue
                files += 1
                size_bytes += inode_bytes
                oldest_ns = min(oldest_ns or row.since_ns, row.since_ns)
        return Totals(files, size_bytes, oldest_ns)

    def inodes(self, below: bytes = b"") -> tuple[list[int], int]:
        """All that wait (below a path), and their bytes of file data. One walk, 10 us a row with a path."""
        inos: list[int] = []
        size_bytes = 0
        with self._db.read() as txn:
            for row in publish.iter_dirty(txn):
                inode_bytes = self._counted(txn, row, below)
                if inode_bytes is not None:
                    inos.append(row.ino)
                    size_bytes += inode_bytes
        return inos, size_bytes

    async def look(self, awaited: Awaited, on_waiting: Callable[[int, bool], None]) -> None:
        """Compare ``awaited`` with the rows: what is new is added, what has gone is dropped.

        ``on_waiting(ino, is_new)`` is called with each that is waited for. Other tasks run in between.
        """
        seen: set[int] = set()
        after_ino = 0
        while True:
            with self._db.read() as txn:
                rows = publish.dirty_entries(txn, after_ino=after_ino, limit=WALK_BATCH)
                for row in rows:
                    is_new = row.ino not in awaited.sizes
                    if self._is_awaited(txn, row, awaited):
                        seen.add(row.ino)
                        on_waiting(row.ino, is_new)
            if len(rows) < WALK_BATCH:
                break
            after_ino = rows[-1].ino
            await trio.lowlevel.checkpoint()
        for ino in awaited.sizes.keys() - seen:
            awaited.drop(ino)
        awaited.has_looked = True

    def take_in(self, awaited: Awaited, failed_attempts: Callable[[int], int]) -> list[int]:
        """Look at those whose publication has ended; returns those of them that are still waited for.

        ``failed_attempts(ino)``: how often it was tried in vain; 0 if it is not failing.
        """
        left: list[int] = []
        with self._db.read() as txn:
            for ino in awaited.ended & awaited.sizes.keys():
                row = publish.dirty_row(txn, ino)
                is_enough = ino in awaited.published and not awaited.later
                if row is None or is_enough or self.is_being_written(ino) or self.is_kept_for_readers(row):
                    awaited.drop(ino)
                    continue
                if failed_attempts(ino) > awaited.attempts.get(ino, 0):
                    awaited.failed.add(ino)
                else:
                    awaited.failed.discard(ino)
                left.append(ino)
        awaited.ended.clear()
        awaited.published.clear()
        return left

    def still_open(self, awaited: Awaited) -> tuple[int, int]:
        """(files, bytes) that were open for writing at the first look and are not in the store yet."""
        files = size_bytes = 0
        with self._db.read() as txn:
            for ino in awaited.open - awaited.sizes.keys():
                row = publish.dirty_row(txn, ino)
                inode_bytes = None if row is None else self._counted(txn, row, awaited.below)
                if inode_bytes is not None:
                    files += 1
                    size_bytes += inode_bytes
        return files, size_bytes

    def is_being_written(self, ino: int) -> bool:
        """Whether somebody has it open for writing."""
        content = self._contents.peek(ino)
        return content is not None and content.writers > 0

    def is_kept_for_readers(self, row: schema.DirtyRow) -> bool:
        """It is in the store, and dirty until it is closed; see ``FileContent``."""
        content = self._contents.peek(row.ino)
        return content is not None and content.kept_for_readers == row.generation

    def _is_awaited(self, txn: ReadTransaction, row: schema.DirtyRow, awaited: Awaited) -> bool:
        """Whether ``awaited`` waits for it, from now on perhaps."""
        is_known = row.ino in awaited.sizes
        if not is_known and not awaited.takes(row):
            return False
        inode_bytes = self._counted(txn, row, awaited.below)
        if inode_bytes is None:
            return False
        if self.is_being_written(row.ino):
            if not awaited.has_looked:
                awaited.open.add(row.ino)
            return False
        if not is_known:
            awaited.add(row.ino, inode_bytes)
        return True

    def _counted(self, txn: ReadTransaction, row: schema.DirtyRow, below: bytes) -> int | None:
        """Bytes of file data of an inode that is not in the store yet; None: not part of the backlog."""
        if self.is_kept_for_readers(row):
            return None
        inode_bytes = self._data_bytes(txn, row.ino)
        if inode_bytes is None or not below:
            return inode_bytes
        try:
            path = tree.path_of(txn, row.ino)
        except NotFound:
            return None
        return inode_bytes if records.is_below(path, below) else None

    def _data_bytes(self, txn: ReadTransaction, ino: int) -> int | None:
        """Bytes of file data that only we have; None if there is no such inode."""
        inode = records.find_inode(txn, ino)
        if inode is None:
            return None
        if not (stat.S_ISREG(inode.mode) and inode.flags & schema.DATA_LOCAL):
            return 0
        content = self._contents.peek(ino)
        # Of an open file the record may say how long it was a while ago.
        return content.size_bytes if content is not None and content.unsaved else inode.size_bytes
