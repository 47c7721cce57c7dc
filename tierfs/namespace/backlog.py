"""What a namespace says is still to be done in the store, without an engine: for people to look at.

Reads beside a live engine, or after one. Raises ``NamespaceError``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from tierfs.errors import NotFound
from tierfs.namespace import publish, schema, tree
from tierfs.namespace.db import Database, ReadTransaction
from tierfs.types import ContentId


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """One inode that is not in the store as it is here.

    ``bytes``: of file data that only this node has. ``reasons``: see ``schema.REASON_NAMES``.
    """

    path: str
    bytes: int
    since_ns: int
    reasons: list[str]


class Doomed(msgspec.Struct, frozen=True, kw_only=True):
    """One object, or with ``is_prefix`` all below a prefix, that has to go from the store."""

    key: str
    is_prefix: bool
    since_ns: int


class Backlog(msgspec.Struct, frozen=True, kw_only=True):
    """All of it; ``source`` is the store that it is for."""

    source: str
    uploads: list[Waiting]
    deletes: list[Doomed]

    @property
    def upload_bytes(self) -> int:
        return sum(one.bytes for one in self.uploads)


def source_of(state_dir: Path) -> str:
    """The source that the namespace in that directory belongs to; empty if none is recorded."""
    with Database.open(state_dir, read_only=True) as db, db.snapshot() as txn:
        return _source(txn)


def backlog_of(state_dir: Path, staged_bytes: Callable[[ContentId], int | None]) -> Backlog:
    """Oldest uploads first.

    ``staged_bytes``: size of the file with the bytes of a content, None if there is none. It counts, as it
    does for ``mount.recovery``: when an engine dies, sizes may not be recorded yet.
    """
    with Database.open(state_dir, read_only=True) as db, db.snapshot() as txn:
        waiting = (_waiting(txn, row, staged_bytes) for row in publish.iter_dirty(txn))
        uploads = [found for found in waiting if found is not None]
        deletes: list[Doomed] = []
        cursor: bytes | None = None
        while True:
            rows, cursor = publish.doomed_entries(txn, cursor)
            deletes += [Doomed(key=row.key, is_prefix=row.prefix, since_ns=row.since_ns) for row in rows]
            if cursor is None:
                break
        uploads.sort(key=lambda found: (found.since_ns, found.path))
        return Backlog(source=_source(txn), uploads=uploads, deletes=deletes)


def _source(txn: ReadTransaction) -> str:
    found: bytes = txn.get(schema.META_SOURCE, b"", txn.tables.meta)
    return found.decode("utf-8", "surrogateescape")


def _waiting(
    txn: ReadTransaction, row: schema.DirtyRow, staged_bytes: Callable[[ContentId], int | None]
) -> Waiting | None:
    try:
        inode = tree.get(txn, row.ino)
        path = tree.path_of(txn, row.ino)
    except NotFound:
        return None  # it has no name any more: nothing of it goes to the store
    size_bytes = 0
    if inode.is_regular and inode.flags & schema.DATA_LOCAL:
        staged = staged_bytes(inode.content_id)
        size_bytes = inode.size_bytes if staged is None else staged
    return Waiting(
        path=path.decode("utf-8", "backslashreplace"),
        bytes=size_bytes,
        since_ns=row.since_ns,
        reasons=schema.reason_names(row.reasons),
    )
