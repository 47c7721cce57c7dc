"""What a snapshot sees: names, inodes, targets, attributes, objects. ``history`` has the rule.

Functions of a transaction, with inode numbers and cookies of the namespace itself. Every access is a seek in
a table of old records and a get in the table of live ones, whatever has changed since.
"""

from __future__ import annotations

import heapq
import stat
from collections.abc import Iterator
from typing import Any

from tierfs.errors import InvalidArgument, NoAttribute, NotFound, StaleContent
from tierfs.namespace import records, schema
from tierfs.namespace.objects import object_of
from tierfs.namespace.schema import (
    DIRENT,
    DIRSEQ,
    ObjectRow,
    SnapshotRow,
    pack_u64,
    pack_u64_pair,
    unpack_inode,
    unpack_u64,
)
from tierfs.namespace.transaction import ReadTransaction
from tierfs.namespace.xattr import all_xattrs
from tierfs.types import Inode, ObjectRef, content_id_of_object

Entry = tuple[int, bytes, int, int]
"""(cookie, name, ino, file type)"""


def inode(txn: ReadTransaction, row: SnapshotRow, ino: int) -> Inode:
    """The inode as it was. Raises ``NotFound``: the snapshot does not see it.

    Of a file that was not all in the store then, size and mtime are those of the object that it sees. Of what
    was open for writing nobody knows for sure whether it was.
    """
    found = _inode(txn, row, ino)
    if found is None:
        raise NotFound(f"inode {ino} in snapshot {row.epoch}")
    if found.is_regular and found.flags & schema.DATA_LOCAL:
        held = object_row(txn, row, ino)
        if held is not None:
            # It was open, and perhaps written after the upload: then the inode's time is that of other bytes.
            is_whole = found.size_bytes == held.size_bytes and found.mtime_ns <= held.confirmed_ns
            mtime_ns = found.mtime_ns if is_whole else held.mtime_ns
            return schema.replace_inode(found, size_bytes=held.size_bytes, mtime_ns=mtime_ns)
    return found


def lookup(txn: ReadTransaction, row: SnapshotRow, parent_ino: int, name: bytes) -> Inode:
    """Raises ``NotFound``."""
    found = entry(txn, row, parent_ino, name)
    if found is None:
        raise NotFound(name.decode("utf-8", "backslashreplace"))
    return inode(txn, row, found[2])


def entry(txn: ReadTransaction, row: SnapshotRow, parent_ino: int, name: bytes) -> Entry | None:
    """What ``name`` meant in that directory."""
    prefix = pack_u64(parent_ino) + name + b"\0"
    raw = _first(txn, txn.tables.olddirent, prefix, row.epoch)
    if raw is None:
        raw = txn.get(prefix + schema.EPOCH_0, None, txn.tables.dirent)
    if raw is None:
        return None
    ino, seq, kind, _ = DIRENT.unpack(raw)
    return (seq, name, ino, kind) if seq < row.limit else None


def entries(txn: ReadTransaction, row: SnapshotRow, parent_ino: int, after_seq: int = 0) -> Iterator[Entry]:
    """The entries of a directory after a cookie, in the order of cookies."""
    last = 0
    # Of one cookie the old entry comes first, and hides the live one.
    for found in heapq.merge(
        _old_entries(txn, row, parent_ino, after_seq),
        records.iter_entries(txn, parent_ino, after_seq),
        key=_cookie,
    ):
        if found[0] >= row.limit:
            return
        if found[0] != last:
            last = found[0]
            yield found


def readdir(
    txn: ReadTransaction, row: SnapshotRow, ino: int, after_cookie: int, limit: int
) -> list[tuple[bytes, int, Inode]]:
    """As ``tree.readdir``."""
    found: list[tuple[bytes, int, Inode]] = []
    for cookie, name, child, _ in entries(txn, row, ino, after_cookie):
        try:
            found.append((name, cookie, inode(txn, row, child)))
        except NotFound:
            continue
        if len(found) >= limit:
            break
    return found


def readlink(txn: ReadTransaction, row: SnapshotRow, ino: int) -> bytes:
    """Raises ``InvalidArgument`` unless it is a symbolic link, ``NotFound``."""
    if not inode(txn, row, ino).is_symlink:
        raise InvalidArgument(f"inode {ino} is no symbolic link")
    key = pack_u64(ino)
    target: bytes | None = txn.get(key, None, txn.tables.symlink)
    if target is None:
        target = txn.get(key, None, txn.tables.oldlink)
    if target is None:
        raise NotFound(f"target of inode {ino}")
    return target


def xattrs(txn: ReadTransaction, row: SnapshotRow, ino: int) -> dict[bytes, bytes]:
    """Raises ``NotFound``."""
    inode(txn, row, ino)
    raw = _first(txn, txn.tables.oldxattr, pack_u64(ino), row.epoch)
    return all_xattrs(txn, ino) if raw is None else schema.decode_xattrs(raw)


def get_xattr(txn: ReadTransaction, row: SnapshotRow, ino: int, name: bytes) -> bytes:
    """Raises ``NoAttribute``, ``NotFound``."""
    try:
        return xattrs(txn, row, ino)[name]
    except KeyError:
        raise NoAttribute(name.decode("utf-8", "backslashreplace")) from None


# -- bytes ----------------------------------------------------------------------------------------------


def object_row(txn: ReadTransaction, row: SnapshotRow, ino: int) -> ObjectRow | None:
    """Where the bucket held what the snapshot sees of that inode; None: nowhere."""
    if ino >= row.limit:
        return None
    raw = _first(txn, txn.tables.oldobject, pack_u64(ino), row.epoch)
    if raw is None:
        return object_of(txn, ino)
    return schema.decode_object(raw) if raw else None


def follows_moves(txn: ReadTransaction, row: SnapshotRow, ino: int) -> bool:
    """The snapshot sees the bytes that the inode still has: where they go, it finds them."""
    if _first(txn, txn.tables.oldobject, pack_u64(ino), row.epoch) is not None:
        return False
    live = records.find_inode(txn, ino)
    return live is not None and not live.flags & schema.DATA_LOCAL


def content(txn: ReadTransaction, row: SnapshotRow, ino: int) -> ObjectRef | None:
    """Where the bytes of a regular file can be read now; None: it is empty.

    They are named after the object version, never after a content of the live file, whose bytes may change.
    Raises ``StaleContent``: they had not reached the store when the snapshot was made; ``NotFound``.
    """
    found = inode(txn, row, ino)
    held = object_row(txn, row, ino)
    if held is None:
        if found.size_bytes:
            raise StaleContent(
                f"inode {ino}: its bytes were not in the store yet when snapshot {_text(row.name)} was made"
            )
        return None
    if not held.size_bytes or not found.is_regular:
        return None
    content_id = content_id_of_object(held.key, held.etag, held.size_bytes, held.version_id)
    kept = kept_copy(txn, held.key, held.etag)
    if kept is not None and kept.kept_etag:
        return ObjectRef(content_id, kept.kept_key, kept.kept_etag, held.size_bytes, kept.version_id)
    return ObjectRef(content_id, held.key, held.etag, held.size_bytes, held.version_id)


def kept_copy(txn: ReadTransaction, key: str, etag: str) -> schema.KeptRow | None:
    """The row of the copy, made or begun, of that version of an object."""
    raw = txn.get(schema.kept_table_key(key, etag), None, txn.tables.kept)
    return None if raw is None else schema.decode_kept(raw)


def needs(txn: ReadTransaction, row: SnapshotRow, ino: int, key: str) -> ObjectRow | None:
    """The version of the object ``key`` that the snapshot reads as the bytes of ``ino``, if it does."""
    found = _inode(txn, row, ino)
    if found is None or not found.nlink or not found.is_regular:
        return None
    held = object_row(txn, row, ino)
    return held if held is not None and held.key == key and held.size_bytes else None


def inos_with_key(txn: ReadTransaction, key: str) -> list[int]:
    """Inodes of which an old object row names ``key``."""
    prefix = schema.object_key_digest(key) + b"\0"
    found: list[int] = []
    cursor = txn.cursor(txn.tables.oldkey)
    if cursor.set_range(prefix):
        for raw in cursor.iternext(True, False):
            if not raw.startswith(prefix):
                break
            if len(raw) == len(prefix) + 16:
                found.append(unpack_u64(raw[-16:-8])[0])
    return found


# -- private --------------------------------------------------------------------------------------------


def _inode(txn: ReadTransaction, row: SnapshotRow, ino: int) -> Inode | None:
    if ino >= row.limit:
        return None
    raw = _first(txn, txn.tables.oldinode, pack_u64(ino), row.epoch)
    return records.find_inode(txn, ino) if raw is None else unpack_inode(raw)


def _first(txn: ReadTransaction, table: Any, prefix: bytes, epoch: int) -> bytes | None:
    """The value under ``prefix`` and the smallest epoch that is not below ``epoch``."""
    cursor = txn.cursor(table)
    if not cursor.set_range(prefix + pack_u64(epoch)):
        return None
    key = cursor.key()
    if len(key) != len(prefix) + 8 or not key.startswith(prefix):
        return None
    return cursor.value()


def _old_entries(txn: ReadTransaction, row: SnapshotRow, parent_ino: int, after_seq: int) -> Iterator[Entry]:
    cursor = txn.cursor(txn.tables.olddirseq)
    if not cursor.set_range(pack_u64_pair(parent_ino, after_seq + 1)):
        return
    prefix = pack_u64(parent_ino)
    last = 0
    for key, value in cursor.iternext(True, True):
        if not key.startswith(prefix):
            return
        seq, epoch = schema.U64_PAIR.unpack(key[8:])
        if epoch >= row.epoch and seq != last:
            last = seq
            ino, kind, _ = DIRSEQ.unpack_from(value)
            yield seq, value[DIRSEQ.size :], ino, kind


def _cookie(found: Entry) -> int:
    return found[0]


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def is_directory(kind: int) -> bool:
    """Of the file type of an entry."""
    return kind == stat.S_IFDIR
