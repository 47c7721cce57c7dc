"""Snapshots: making, finding and removing them. Constant time whatever the number of entries.

Making one is a row, the counter of epochs raised by one, and the frontier (``history``). Removing one is the
row gone and a note that old records may be left which nobody sees any more; ``sweep`` takes those away later.
"""

from __future__ import annotations

import os

import msgspec

from tierfs.errors import AlreadyExists, InvalidArgument, NamespaceError, NameTooLong, NotFound
from tierfs.namespace import records, schema
from tierfs.namespace.schema import JobRow, SnapshotRow, pack_u64, pack_u64_pair, unpack_u64
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
    if any(row.name == name for row in visible(txn)):
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
    txn.forget_frontier()
    return row


def delete(txn: WriteTransaction, name: bytes) -> SnapshotRow:
    """Raises ``NotFound``. What only this snapshot saw goes later; also, once they do not need it any more,
    what files that were made from it have there."""
    row = find(txn, name)
    if is_used(txn, row.epoch):
        hidden = msgspec.structs.replace(row, is_deleted=True)
        txn.put(pack_u64(row.epoch), schema.encode_row(hidden), db=txn.tables.snapshot)
    else:
        _remove(txn, row.epoch)
    return row


def is_used(txn: ReadTransaction, epoch: int) -> bool:
    """Whether files have their bytes in that snapshot, or a job is at work on it."""
    if txn.tables.loan is None or txn.tables.job is None:
        return False
    prefix = b"e" + pack_u64(epoch)
    cursor = txn.cursor(txn.tables.loan)
    if cursor.set_range(prefix) and cursor.key().startswith(prefix):
        return True
    return any(job.epoch == epoch for job in jobs(txn))


def let_go(txn: WriteTransaction, epoch: int) -> None:
    """Something that used the snapshot does not any more. If it was deleted meanwhile, it may go now."""
    raw = txn.get(pack_u64(epoch), None, txn.tables.snapshot)
    if raw is not None and schema.decode_snapshot(raw).is_deleted and not is_used(txn, epoch):
        _remove(txn, epoch)


def jobs(txn: ReadTransaction) -> list[JobRow]:
    """Restores and clones that have not ended, the oldest first."""
    table = txn.tables.job
    if table is None:
        return []
    cursor = txn.cursor(table)
    found: list[JobRow] = []
    if cursor.set_range(b"j"):
        for key, value in cursor.iternext(True, True):
            if not key.startswith(b"j"):
                break
            found.append(schema.decode_job(value))
    return found


def _remove(txn: WriteTransaction, epoch: int) -> None:
    txn.delete(pack_u64(epoch), txn.tables.snapshot)
    meta = txn.tables.meta
    # While others are left the frontier stays: a record that was changed since may have been kept under it.
    if not every(txn):
        txn.delete(schema.META_FRONTIER, meta)
    txn.put(schema.META_SWEEP, os.urandom(8), db=meta)
    txn.forget_frontier()


def visible(txn: ReadTransaction) -> list[SnapshotRow]:
    """Those that can be named, the oldest first."""
    return [row for row in every(txn) if not row.is_deleted]


def every(txn: ReadTransaction) -> list[SnapshotRow]:
    """All whose records are kept, the oldest first."""
    table = txn.tables.snapshot
    if table is None:
        return []
    return [schema.decode_snapshot(value) for value in txn.cursor(table).iternext(False, True)]


def find(txn: ReadTransaction, name: bytes) -> SnapshotRow:
    """Raises ``NotFound``."""
    for row in visible(txn):
        if row.name == name:
            return row
    raise NotFound(f"there is no snapshot called {_text(name)}")


def find_epoch(txn: ReadTransaction, epoch: int) -> SnapshotRow:
    """Raises ``NotFound``."""
    row = find_kept(txn, epoch)
    if row is None or row.is_deleted:
        raise NotFound(f"snapshot {epoch} has been deleted")
    return row


def find_kept(txn: ReadTransaction, epoch: int) -> SnapshotRow | None:
    """The same, also if it has been deleted, as long as its records are kept."""
    raw = txn.get(pack_u64(epoch), None, txn.tables.snapshot)
    return None if raw is None else schema.decode_snapshot(raw)


def any_left(txn: ReadTransaction) -> bool:
    """Whether the records of one are kept; constant time."""
    return txn.tables.snapshot is not None and txn.entries(txn.tables.snapshot) > 0


def any_visible(txn: ReadTransaction) -> bool:
    """Whether there is one that can be named."""
    return any_left(txn) and bool(visible(txn))


def check_name(name: bytes) -> None:
    """Raises unless a snapshot may be called ``name``: it is the name of a directory."""
    if len(name) > schema.NAME_MAX_BYTES:
        raise NameTooLong(f"snapshot name of {len(name)} bytes")
    if not name or name in (b".", b"..") or b"/" in name or b"\0" in name:
        raise InvalidArgument(f"a snapshot cannot be called {_text(name)!r}")


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")
