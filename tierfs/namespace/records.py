"""One record, one table at a time: what ``tree``, ``publish`` and ``listing`` are made of.

No POSIX rule and no idea of the bucket here; every function leaves exactly the tables it names changed.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator

from tierfs.errors import DamagedRecord, NotADirectory, NotFound
from tierfs.namespace import history, schema
from tierfs.namespace.schema import (
    DIRENT,
    DIRSEQ,
    EPOCH_0,
    NUL_EPOCH_0,
    U64_PAIR,
    pack_u64,
    pack_u64_pair,
    unpack_inode,
)
from tierfs.namespace.transaction import ReadTransaction, WriteTransaction
from tierfs.types import NO_CONTENT, ROOT_INO, Inode

_MAX_DEPTH = 4096
"""Longer chains of parents than any path: a loop, so a damaged database."""


def new_id(txn: WriteTransaction) -> int:
    """A number that was never given out: an inode number or a directory cookie."""
    meta = txn.tables.meta
    number: int = schema.unpack_u64(txn.get(schema.META_NEXT_ID, None, meta))[0]
    txn.put(schema.META_NEXT_ID, pack_u64(number + 1), db=meta)
    return number


def make_root(txn: WriteTransaction, now_ns: int) -> None:
    """The root directory of a new database: 0755, root:root; ``set_attributes`` makes it the mount's."""
    generation = fs_generation(txn)
    schema.put_inode(
        txn,
        Inode(
            ino=ROOT_INO, mode=stat.S_IFDIR | 0o755, uid=0, gid=0, nlink=2, rdev=0, size_bytes=0,
            atime_ns=now_ns, mtime_ns=now_ns, ctime_ns=now_ns, generation=generation,
            flags=schema.DIR_SEEN | schema.IN_STORE, content_id=NO_CONTENT,
            valid_until_ns=schema.FOREVER_NS, listed_until_ns=0,
        ),
    )  # fmt: skip


def fs_generation(txn: ReadTransaction) -> int:
    number: int = schema.unpack_u64(txn.get(schema.META_GENERATION, None, txn.tables.meta))[0]
    return number


# -- inodes ---------------------------------------------------------------------------------------------


def find_inode(txn: ReadTransaction, ino: int) -> Inode | None:
    raw = txn.get(pack_u64(ino) + EPOCH_0, None, txn.tables.inode)
    return None if raw is None else unpack_inode(raw)


def get_inode(txn: ReadTransaction, ino: int) -> Inode:
    """Raises ``NotFound``."""
    raw = txn.get(pack_u64(ino) + EPOCH_0, None, txn.tables.inode)
    if raw is None:
        raise NotFound(f"inode {ino}")
    return unpack_inode(raw)


def get_directory(txn: ReadTransaction, ino: int) -> Inode:
    """Raises ``NotFound`` (also for a removed directory that is still open) and ``NotADirectory``."""
    inode = get_inode(txn, ino)
    if not stat.S_ISDIR(inode.mode):
        raise NotADirectory(f"inode {ino}")
    if not inode.nlink:
        raise NotFound(f"directory {ino} has been removed")
    return inode


def add_inode(txn: WriteTransaction, inode: Inode) -> None:
    """Write the record of a new inode, whose number is the highest yet.

    Appending fills pages; inserting in order would leave every page half empty.
    """
    key, record, table = pack_u64(inode.ino) + EPOCH_0, schema.pack_inode(inode), txn.tables.inode
    if not txn.put(key, record, db=table, append=True):
        txn.put(key, record, db=table)


def delete_inode(txn: WriteTransaction, ino: int) -> None:
    history.keep_inode(txn, ino, None)
    txn.delete(pack_u64(ino) + EPOCH_0, txn.tables.inode)


# -- directory entries ------------------------------------------------------------------------------------


def find_entry(txn: ReadTransaction, parent_ino: int, name: bytes) -> tuple[int, int, int] | None:
    """(ino, cookie, file type) of a name, or None: one exact get."""
    raw = txn.get(pack_u64(parent_ino) + name + NUL_EPOCH_0, None, txn.tables.dirent)
    if raw is None:
        return None
    ino, seq, kind, _ = DIRENT.unpack(raw)
    return ino, seq, kind


def missing_inode(txn: ReadTransaction, parent_ino: int, name: bytes) -> DamagedRecord:
    """The error for an entry whose inode record is not there."""
    found = find_entry(txn, parent_ino, name)
    ino = found[0] if found is not None else 0
    return DamagedRecord(f"table dirent, {name!r} in {parent_ino}: inode {ino} is missing")


def put_entry(
    txn: WriteTransaction, parent_ino: int, name: bytes, ino: int, kind: int, seq: int | None = None
) -> int:
    """Let ``name`` mean ``ino``. With ``seq`` the name keeps that cookie (it existed before)."""
    if seq is None:
        seq = new_id(txn)
    history.keep_entry(txn, parent_ino, name)
    tables = txn.tables
    txn.put(pack_u64(parent_ino) + name + NUL_EPOCH_0, DIRENT.pack(ino, seq, kind, 0), db=tables.dirent)
    txn.put(pack_u64_pair(parent_ino, seq), DIRSEQ.pack(ino, kind, 0) + name, db=tables.dirseq)
    txn.put(pack_u64_pair(ino, parent_ino) + name, b"", db=tables.parent)
    return seq


def delete_entry(txn: WriteTransaction, parent_ino: int, name: bytes, ino: int, seq: int) -> None:
    history.keep_entry(txn, parent_ino, name)
    tables = txn.tables
    txn.delete(pack_u64(parent_ino) + name + NUL_EPOCH_0, tables.dirent)
    txn.delete(pack_u64_pair(parent_ino, seq), tables.dirseq)
    txn.delete(pack_u64_pair(ino, parent_ino) + name, tables.parent)


def delete_parent_row(txn: WriteTransaction, parent_ino: int, name: bytes, ino: int) -> None:
    """Forget that ``ino`` has this name; used when the name goes to another inode with its cookie."""
    txn.delete(pack_u64_pair(ino, parent_ino) + name, txn.tables.parent)


def iter_entries(
    txn: ReadTransaction, parent_ino: int, after_seq: int = 0
) -> Iterator[tuple[int, bytes, int, int]]:
    """(cookie, name, ino, file type) of a directory's entries after a cookie, in cookie order."""
    cursor = txn.cursor(txn.tables.dirseq)
    if not cursor.set_range(pack_u64_pair(parent_ino, after_seq + 1)):
        return
    unpack_key, unpack_value, header = U64_PAIR.unpack, DIRSEQ.unpack_from, DIRSEQ.size
    for key, value in cursor.iternext(True, True):
        parent, seq = unpack_key(key)
        if parent != parent_ino:
            return
        ino, kind, _ = unpack_value(value)
        yield seq, value[header:], ino, kind


def has_entries(txn: ReadTransaction, parent_ino: int) -> bool:
    cursor = txn.cursor(txn.tables.dirseq)
    return cursor.set_range(pack_u64(parent_ino)) and cursor.key().startswith(pack_u64(parent_ino))


def count_entries(txn: ReadTransaction, parent_ino: int, limit: int) -> int:
    """Number of entries, counted no further than ``limit``."""
    cursor = txn.cursor(txn.tables.dirseq)
    prefix = pack_u64(parent_ino)
    count = 0
    if cursor.set_range(prefix):
        for key in cursor.iternext(True, False):
            if count >= limit or not key.startswith(prefix):
                break
            count += 1
    return count


# -- names of an inode --------------------------------------------------------------------------------------


def names_of(txn: ReadTransaction, ino: int) -> list[tuple[int, bytes]]:
    """(parent, name) of every name of an inode; empty for the root and for orphans."""
    cursor = txn.cursor(txn.tables.parent)
    prefix = pack_u64(ino)
    names: list[tuple[int, bytes]] = []
    if cursor.set_range(prefix):
        for key in cursor.iternext(True, False):
            if not key.startswith(prefix):
                break
            names.append((schema.unpack_u64(key[8:16])[0], key[16:]))
    return names


def first_name(txn: ReadTransaction, ino: int) -> tuple[int, bytes] | None:
    cursor = txn.cursor(txn.tables.parent)
    prefix = pack_u64(ino)
    if not cursor.set_range(prefix):
        return None
    key = cursor.key()
    if not key.startswith(prefix):
        return None
    return schema.unpack_u64(key[8:16])[0], key[16:]


def path_of(txn: ReadTransaction, ino: int) -> bytes:
    """Path by first names, without a leading slash; empty for the root. Raises ``NotFound``."""
    parts: list[bytes] = []
    while ino != ROOT_INO:
        found = first_name(txn, ino)
        if found is None:
            raise NotFound(f"inode {ino} has no name")
        ino, name = found
        parts.append(name)
        if len(parts) > _MAX_DEPTH:
            raise DamagedRecord(f"table parent: loop above inode {ino}")
    parts.reverse()
    return b"/".join(parts)


def is_below(path: bytes, above: bytes) -> bool:
    """Whether ``path``, as ``path_of`` gives it, is ``above`` or lies below it."""
    return not above or path == above or path.startswith(above + b"/")


def is_ancestor(txn: ReadTransaction, ino: int, descendant: int) -> bool:
    """Whether directory ``descendant`` is ``ino`` or lies below it."""
    depth = 0
    while descendant != ino:
        if descendant == ROOT_INO:
            return False
        found = first_name(txn, descendant)
        if found is None:
            return False
        descendant = found[0]
        depth += 1
        if depth > _MAX_DEPTH:
            raise DamagedRecord(f"table parent: loop above inode {descendant}")
    return True
