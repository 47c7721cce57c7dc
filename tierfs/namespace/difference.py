"""What differs between a snapshot and another one, or the namespace as it is now.

Directories whose inode is the same on both sides are walked side by side; one that is only on one side is
reported with everything below it. Memory grows with the largest directory, not with the tree.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from typing import Literal

from tierfs.errors import NotFound
from tierfs.namespace import objects, past, records, schema
from tierfs.namespace.schema import SnapshotRow
from tierfs.namespace.transaction import ReadTransaction
from tierfs.types import Inode

Change = Literal["added", "removed", "changed"]
Difference = tuple[Change, bytes, str]
"""(change, path below the snapshot's directory, what has changed)"""


def between(txn: ReadTransaction, old: SnapshotRow, new: SnapshotRow | None) -> Iterator[Difference]:
    """``new`` None: the live namespace. Paths are relative to the directory of which ``old`` was made.

    Raises ``NotFound`` if that directory is not there any more.
    """
    new_root = old.root_ino if new is None else new.root_ino
    if _inode(txn, new, new_root) is None:
        raise NotFound("the directory of the snapshot has been removed")
    waiting = [(b"", old.root_ino, new_root)]
    while waiting:
        path, old_ino, new_ino = waiting.pop()
        before = {name: ino for _, name, ino, _ in past.entries(txn, old, old_ino)}
        for _, name, ino, _ in _entries(txn, new, new_ino):
            below = path + b"/" + name if path else name
            known = before.pop(name, None)
            here = _inode(txn, new, ino)
            if here is None:
                continue
            there = None if known is None else _inode(txn, old, known)
            if there is None:
                yield from _all(txn, new, "added", below, here)
                continue
            what = _what_changed(txn, old, there, new, here)
            if what:
                yield "changed", below, what
            if here.is_dir and there.is_dir:
                waiting.append((below, there.ino, here.ino))
            elif here.is_dir:
                yield from _below(txn, new, "added", below, here)
            elif there.is_dir:
                yield from _below(txn, old, "removed", below, there)
        for name, ino in before.items():
            gone = _inode(txn, old, ino)
            if gone is not None:
                yield from _all(txn, old, "removed", path + b"/" + name if path else name, gone)


def _what_changed(
    txn: ReadTransaction, old: SnapshotRow, there: Inode, new: SnapshotRow | None, here: Inode
) -> str:
    if stat.S_IFMT(there.mode) != stat.S_IFMT(here.mode):
        return "type"
    what: list[str] = []
    if here.is_regular and _bytes_differ(txn, old, there, new, here):
        what.append("content")
    elif here.is_symlink and there.ino != here.ino and _target(txn, old, there) != _target(txn, new, here):
        what.append("target")
    if (there.mode, there.uid, there.gid) != (here.mode, here.uid, here.gid):
        what.append("attributes")
    return ",".join(what)


def _bytes_differ(
    txn: ReadTransaction, old: SnapshotRow, there: Inode, new: SnapshotRow | None, here: Inode
) -> bool:
    """By identity of the object version: equal bytes that were written anew count as changed."""
    if there.size_bytes != here.size_bytes:
        return True
    if not here.size_bytes:
        return False
    if new is None and here.flags & schema.DATA_LOCAL:
        return True
    before = past.object_row(txn, old, there.ino)
    after = objects.object_of(txn, here.ino) if new is None else past.object_row(txn, new, here.ino)
    if before is None or after is None:
        return True
    return (before.key, before.etag) != (after.key, after.etag)


def _target(txn: ReadTransaction, row: SnapshotRow | None, inode: Inode) -> bytes:
    if row is not None:
        return past.readlink(txn, row, inode.ino)
    target: bytes = txn.get(schema.pack_u64(inode.ino), b"", txn.tables.symlink)
    return target


def _all(
    txn: ReadTransaction, row: SnapshotRow | None, change: Change, path: bytes, inode: Inode
) -> Iterator[Difference]:
    yield change, path, ""
    if inode.is_dir:
        yield from _below(txn, row, change, path, inode)


def _below(
    txn: ReadTransaction, row: SnapshotRow | None, change: Change, path: bytes, inode: Inode
) -> Iterator[Difference]:
    waiting = [(path, inode.ino)]
    while waiting:
        path, ino = waiting.pop()
        for _, name, child, kind in _entries(txn, row, ino):
            yield change, path + b"/" + name, ""
            if kind == stat.S_IFDIR:
                waiting.append((path + b"/" + name, child))


def _entries(txn: ReadTransaction, row: SnapshotRow | None, ino: int) -> Iterator[past.Entry]:
    return records.iter_entries(txn, ino) if row is None else past.entries(txn, row, ino)


def _inode(txn: ReadTransaction, row: SnapshotRow | None, ino: int) -> Inode | None:
    if row is None:
        inode = records.find_inode(txn, ino)
        return inode if inode is not None and inode.nlink else None
    try:
        return past.inode(txn, row, ino)
    except NotFound:
        return None
