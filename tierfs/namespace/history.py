"""What a record was before it changed, kept for the snapshots that still see it.

A snapshot is an epoch: the counter raised by one, and the number below which inode numbers and cookies had
been given out by then (both come from one counter that only grows). Live records stay where they are, with or
without snapshots. Before the first change that a record meets after the newest snapshot, what it was is
copied to a table of old records, under that snapshot's epoch (``Frontier``). So what a snapshot sees of a key
is the old record with the smallest epoch that is not below its own, and else the live one, unless that was
made later: then its number or its cookie is not below the snapshot's limit. No tombstones are needed.

Not part of what a snapshot sees, and so changed in place: until when a record is believed, and every flag but
``DATA_LOCAL``; of a directory only whether it had been listed at all.

Functions of a transaction; nothing here raises. The lowest module of the package: ``schema.put_inode`` calls
it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierfs.namespace.transaction import WriteTransaction

_EPOCH_0 = b"\xff" * 8
_NOTHING = bytes(8)
_pack_u64 = struct.Struct(">Q").pack
_DIRENT = struct.Struct("<QQII")
_DIRSEQ = struct.Struct("<QII")
_NLINK = slice(20, 24)
_BEFORE_FLAGS = slice(0, 72)
_FLAGS_LOW_BYTE = 72
_DATA_LOCAL = 1 << 4
_CONTENT_ID = slice(80, 96)
_LISTED_UNTIL = slice(104, 112)


def keep_inode(txn: WriteTransaction, ino: int, record: bytes | None) -> None:
    """The record of ``ino`` is about to become ``record`` (None: to go)."""
    epoch, below = txn.frontier()
    if ino >= below:
        return
    tables = txn.tables
    key = _pack_u64(ino)
    old = txn.get(key + _EPOCH_0, None, tables.inode)
    # Without a name it is out of every snapshot's sight, or was kept when it lost the last one.
    if old is None or old[_NLINK] == b"\0\0\0\0" or (record is not None and not _differs(old, record)):
        return
    txn.put(key + _pack_u64(epoch), old, overwrite=False, db=tables.oldinode)


def _differs(old: bytes, new: bytes) -> bool:
    return (
        old[_BEFORE_FLAGS] != new[_BEFORE_FLAGS]
        or old[_CONTENT_ID] != new[_CONTENT_ID]
        or bool((old[_FLAGS_LOW_BYTE] ^ new[_FLAGS_LOW_BYTE]) & _DATA_LOCAL)
        or (old[_LISTED_UNTIL] == _NOTHING) != (new[_LISTED_UNTIL] == _NOTHING)
    )


def keep_entry(txn: WriteTransaction, parent_ino: int, name: bytes) -> None:
    """``name`` in that directory is about to go, or to mean something else under the same cookie."""
    epoch, below = txn.frontier()
    if not below:
        return
    tables = txn.tables
    prefix = _pack_u64(parent_ino) + name + b"\0"
    old = txn.get(prefix + _EPOCH_0, None, tables.dirent)
    if old is None:
        return
    ino, seq, kind, _ = _DIRENT.unpack(old)
    if seq >= below:
        return
    epoch_key = _pack_u64(epoch)
    if txn.put(prefix + epoch_key, old, overwrite=False, db=tables.olddirent):
        key = _pack_u64(parent_ino) + _pack_u64(seq) + epoch_key
        txn.put(key, _DIRSEQ.pack(ino, kind, 0) + name, db=tables.olddirseq)


def keep_target(txn: WriteTransaction, ino: int) -> None:
    """The inode goes for good: the target of a symbolic link, which never changes, may still be needed."""
    if ino >= txn.frontier()[1]:
        return
    target = txn.get(_pack_u64(ino), None, txn.tables.symlink)
    if target is not None:
        txn.put(_pack_u64(ino), target, db=txn.tables.oldlink)
