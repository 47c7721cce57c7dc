"""What a function of a transaction gets: LMDB's own calls, the tables, and two facts about the mount.

The calls are bound methods of py-lmdb, not wrappers: a key get costs 0.15 us, a wrapper would double it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import lmdb

from tierfs.namespace.departures import Departures

TABLES = (
    "dirent",
    "dirseq",
    "inode",
    "parent",
    "symlink",
    "xattr",
    "object",
    "objkey",
    "dirty",
    "doomed",
    "orphan",
    "meta",
)
"""Names of the LMDB databases; ``schema`` says what is in them."""

HISTORY_TABLES = (
    "snapshot",
    "oldinode",
    "olddirent",
    "olddirseq",
    "oldobject",
    "oldkey",
    "oldxattr",
    "oldlink",
    "kept",
    "loan",
    "job",
)
"""What snapshots need. None of them is looked at before there is one; a database that was opened read-only
may lack them."""

_U64_PAIR = struct.Struct(">QQ")
META_FRONTIER = b"frontier"
"""Of the newest snapshot: its epoch, and the next number to be given out when it was made (U64 each)."""


class Tables:
    """Handles of the tables, and what functions of a transaction have to know about the mount."""

    __slots__ = (*TABLES, *HISTORY_TABLES, "departures", "prefix", "ttl_ns")

    dirent: Any
    dirseq: Any
    inode: Any
    parent: Any
    symlink: Any
    xattr: Any
    object: Any
    objkey: Any
    dirty: Any
    doomed: Any
    orphan: Any
    meta: Any
    snapshot: Any
    oldinode: Any
    olddirent: Any
    olddirseq: Any
    oldobject: Any
    oldkey: Any
    oldxattr: Any
    oldlink: Any
    kept: Any
    loan: Any
    job: Any
    prefix: str
    """Key of the mount's root in the bucket: empty, or ending in ``/``."""
    ttl_ns: int
    """For how long what the bucket said is believed."""
    departures: Departures

    def __init__(self) -> None:
        self.departures = Departures()


class ReadTransaction:
    """A snapshot. ``get(key, None, table)`` is LMDB's own call."""

    __slots__ = ("get", "raw", "tables")

    def __init__(self, raw: lmdb.Transaction[bytes], tables: Tables) -> None:
        self.raw = raw
        self.tables = tables
        self.get: Callable[..., Any] = raw.get

    def cursor(self, table: Any) -> lmdb.Cursor[bytes]:
        return self.raw.cursor(table)

    def entries(self, table: Any) -> int:
        """Number of keys in a table; constant time."""
        return self.raw.stat(table)["entries"]


class WriteTransaction(ReadTransaction):
    """A change in progress. ``put(key, value, db=table)`` is LMDB's own call."""

    __slots__ = ("_frontier", "put")

    def __init__(self, raw: lmdb.Transaction[bytes], tables: Tables) -> None:
        super().__init__(raw, tables)
        self.put: Callable[..., bool] = raw.put
        self._frontier: tuple[int, int] | None = None

    def frontier(self) -> tuple[int, int]:
        """(epoch, limit) of the newest snapshot, (0, 0) if there is none: see ``history``. Read once."""
        frontier = self._frontier
        if frontier is None:
            raw = self.get(META_FRONTIER, None, self.tables.meta)
            frontier = self._frontier = (0, 0) if raw is None else _U64_PAIR.unpack(raw)
        return frontier

    def forget_frontier(self) -> None:
        """It has changed, or may have."""
        self._frontier = None

    def delete(self, key: bytes, table: Any) -> bool:
        """True if the key was there."""
        return self.raw.delete(key, db=table)
