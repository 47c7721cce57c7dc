"""Old records that no snapshot sees any more: taken away page by page, as many commits as it takes.

Begins anew after a crash: what is gone is gone, and what is left is looked at again. An old record under
epoch e is seen by the snapshots after the record's predecessor (of the same key) up to e; so taking one away
changes nothing for those that stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tierfs.namespace import past, publish, schema, snapshots
from tierfs.namespace.schema import KeptRow, SnapshotRow, unpack_u64
from tierfs.namespace.transaction import ReadTransaction, WriteTransaction

_TABLES = ("oldinode", "olddirent", "olddirseq", "oldobject", "oldxattr")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sweep goes on: table number, and after which key. ``mark``: which sweep it is."""

    mark: bytes
    table: int = 0
    after: bytes = b""

    @property
    def concerns_copies(self) -> bool:
        """The next step may give up copies of objects: nobody may be relying on finding one just now."""
        return self.table > len(_TABLES)


def begin(txn: ReadTransaction) -> Place | None:
    """None: nothing has to be swept."""
    mark = txn.get(schema.META_SWEEP, None, txn.tables.meta)
    return None if mark is None else Place(mark)


def step(txn: WriteTransaction, place: Place, limit: int, now_ns: int) -> Place | None:
    """Look at up to ``limit`` records; where to go on, None: that was the end.

    Copies of objects that nobody needs are doomed: see ``publish``.
    """
    rows = snapshots.every(txn)
    if place.table < len(_TABLES):
        name = _TABLES[place.table]
        after = _sweep_versions(txn, getattr(txn.tables, name), place.after, limit, rows, name == "oldobject")
    elif place.table == len(_TABLES):
        after = _sweep_links(txn, place.after, limit)
    else:
        after = _sweep_kept(txn, place.after, limit, rows, now_ns)
    if after is not None:
        return Place(place.mark, place.table, after)
    if place.table <= len(_TABLES):
        return Place(place.mark, place.table + 1)
    if txn.get(schema.META_SWEEP, None, txn.tables.meta) == place.mark:
        txn.delete(schema.META_SWEEP, txn.tables.meta)
    return None


def _page(txn: ReadTransaction, table: Any, after: bytes, limit: int) -> list[tuple[bytes, bytes]]:
    cursor = txn.cursor(table)
    page: list[tuple[bytes, bytes]] = []
    if cursor.set_range(after):
        for key, value in cursor.iternext(True, True):
            if key == after:
                continue
            page.append((key, value))
            if len(page) >= limit:
                break
    return page


def _sweep_versions(
    txn: WriteTransaction, table: Any, after: bytes, limit: int, rows: Sequence[SnapshotRow], has_keys: bool
) -> bytes | None:
    page = _page(txn, table, after, limit)
    epochs = [row.epoch for row in rows]
    before = after
    for key, value in page:
        # Whether the predecessor has just been taken away makes no difference: nobody saw it.
        older = unpack_u64(before[-8:])[0] if before[:-8] == key[:-8] and before else 0
        before = key
        epoch = unpack_u64(key[-8:])[0]
        if any(older < seen <= epoch for seen in epochs):
            continue
        txn.delete(key, table)
        if has_keys and value:
            object_key = schema.decode_object(value).key
            txn.delete(schema.object_key_digest(object_key) + b"\0" + key, txn.tables.oldkey)
    return page[-1][0] if len(page) >= limit else None


def _sweep_links(txn: WriteTransaction, after: bytes, limit: int) -> bytes | None:
    page = _page(txn, txn.tables.oldlink, after, limit)
    for key, _ in page:
        cursor = txn.cursor(txn.tables.oldinode)
        if not (cursor.set_range(key) and cursor.key().startswith(key)):
            txn.delete(key, txn.tables.oldlink)
    return page[-1][0] if len(page) >= limit else None


def _sweep_kept(
    txn: WriteTransaction, after: bytes, limit: int, rows: Sequence[SnapshotRow], now_ns: int
) -> bytes | None:
    page = _page(txn, txn.tables.kept, after, limit)
    for key, value in page:
        kept = schema.decode_kept(value)
        if not is_needed(txn, kept, rows):
            txn.delete(key, txn.tables.kept)
            publish.doom(txn, kept.kept_key, "", now_ns)
    return page[-1][0] if len(page) >= limit else None


def is_needed(txn: ReadTransaction, kept: KeptRow, rows: Sequence[SnapshotRow]) -> bool:
    """Whether a snapshot reads that version of the object."""
    inos = {kept.ino, *past.inos_with_key(txn, kept.key)}
    for row in rows:
        for ino in inos:
            held = past.needs(txn, row, ino, kept.key)
            if held is not None and held.etag == kept.etag:
                return True
    return False
