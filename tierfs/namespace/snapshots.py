"""Snapshots: making, finding and removing them. Constant time whatever the number of entries.

Making one is a row, the counter of epochs raised by one, and the frontier (``history``). Removing one is the
row gone and a note that old records may be left which nobody sees any more; ``sweep`` takes those away later.
"""

from __future__ import annotations

import os

from tierfs.errors import AlreadyExists, InvalidArgument, NamespaceError, NameTooLong, NotFound
from tierfs.namespace import records, schema
from tierfs.namespace.schema import SnapshotRow, pack_u64, pack_u64_pair, unpack_u64
from tierfs.namespace.transaction import ReadTransaction, WriteTransaction

MAX_EPOCH = (1 << 18) - 1
"""As many snapshots can be made of one file system, in all: their inode numbers carry the epoch."""


def create(txn: WriteTransaction, name: bytes, root_ino: int, *, now_ns: int) -> SnapshotRow:
    """The directory as it is now, under a name that no other snapshot has.

    Raises ``AlreadyExists``, ``InvalidArgument`` and ``NameTooLong`` (the name), ``NotFound``,
    ``NotADirectory``.
    """
    check_name(name)
    root = records.get_directory(txn, root_ino)
    if any(row.name == name for row in every(txn)):
        raise AlreadyExists(f"there is a snapshot called {_text(name)} already")
    meta = txn.tables.meta
    epoch = unpack_u64(txn.get(schema.META_EPOCH, bytes(8), meta))[0] + 1
    if epoch > MAX_EPOCH:
        raise NamespaceError(f"{MAX_EPOCH} snapshots have been made of this file system: no more numbers")
    limit = unpack_u64(txn.get(schema.META_NEXT_ID, None, meta))[0]
    row = SnapshotRow(epoch, name, root.ino, limit, now_ns, records.path_of(txn, root.ino))
    txn.put(pack_u64(epoch), schema.encode_row(row), db=txn.tables.snapshot)
    txn.put(schema.META_EPOCH, pack_u64(epoch), db=meta)
    txn.put(schema.META_FRONTIER, pack_u64_pair(epoch, limit), db=meta)
    txn.put(schema.META_FORMAT, pack_u64(schema.FORMAT_VERSION), db=meta)
    txn.forget_frontier()
    return row


def delete(txn: WriteTransaction, name: bytes) -> SnapshotRow:
    """Raises ``NotFound``. What only this snapshot saw goes later."""
    row = find(txn, name)
    txn.delete(pack_u64(row.epoch), txn.tables.snapshot)
    meta = txn.tables.meta
    # While others are left the frontier stays: a record that was changed since may have been kept under it.
    if not every(txn):
        txn.delete(schema.META_FRONTIER, meta)
    txn.put(schema.META_SWEEP, os.urandom(8), db=meta)
    txn.forget_frontier()
    return row


def every(txn: ReadTransaction) -> list[SnapshotRow]:
    """All of them, the oldest first."""
    table = txn.tables.snapshot
    if table is None:
        return []
    return [schema.decode_snapshot(value) for value in txn.cursor(table).iternext(False, True)]


def find(txn: ReadTransaction, name: bytes) -> SnapshotRow:
    """Raises ``NotFound``."""
    for row in every(txn):
        if row.name == name:
            return row
    raise NotFound(f"there is no snapshot called {_text(name)}")


def find_epoch(txn: ReadTransaction, epoch: int) -> SnapshotRow:
    """Raises ``NotFound``."""
    raw = txn.get(pack_u64(epoch), None, txn.tables.snapshot)
    if raw is None:
        raise NotFound(f"snapshot {epoch} has been deleted")
    return schema.decode_snapshot(raw)


def any_left(txn: ReadTransaction) -> bool:
    """Constant time."""
    return txn.tables.snapshot is not None and txn.entries(txn.tables.snapshot) > 0


def check_name(name: bytes) -> None:
    """Raises unless a snapshot may be called ``name``: it is the name of a directory."""
    if len(name) > schema.NAME_MAX_BYTES:
        raise NameTooLong(f"snapshot name of {len(name)} bytes")
    if not name or name in (b".", b"..") or b"/" in name or b"\0" in name:
        raise InvalidArgument(f"a snapshot cannot be called {_text(name)!r}")


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")
