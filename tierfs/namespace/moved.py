"""After a directory was renamed: what below it still lies under old keys, and when that is over."""

from __future__ import annotations

import stat

from tierfs.errors import NotFound
from tierfs.namespace import records, schema
from tierfs.namespace.objects import key_of_path, keys_agree, object_of
from tierfs.namespace.schema import ObjectRow, unpack_u64
from tierfs.namespace.transaction import ReadTransaction
from tierfs.store.keys import encode_path

MoveCursor = tuple[tuple[int, int], ...]
"""Where a walk of ``next_moved_children`` stands: (directory ino, cookie) from the top down."""


def next_moved_children(
    txn: ReadTransaction, dir_ino: int, cursor: MoveCursor | None = None, limit: int = 1000
) -> tuple[list[int], MoveCursor | None]:
    """Inodes below a directory whose objects lie under other keys than their names say.

    One batch of at most ``limit`` inodes, after looking at no more than ``20 * limit`` entries, and where to
    go on (None: that was the end). The tree may change between batches: after a pass that found something,
    make another.
    """
    stack = list(cursor) if cursor is not None else [(dir_ino, 0)]
    moved: list[int] = []
    looked_at = 0
    while stack:
        directory, after = stack.pop()
        prefix = _prefix_of(txn, directory)
        if prefix is None:
            continue
        for seq, name, ino, kind in records.iter_entries(txn, directory, after):
            if len(moved) >= limit or looked_at >= 20 * limit:
                stack.append((directory, after))
                return moved, tuple(stack)
            looked_at += 1
            after = seq
            row = object_of(txn, ino)
            if row is not None and _is_elsewhere(txn, ino, row, prefix + name, kind):
                moved.append(ino)
            if kind == stat.S_IFDIR:
                stack.append((directory, seq))
                stack.append((ino, 0))
                break
    return moved, None


def _prefix_of(txn: ReadTransaction, directory: int) -> bytes | None:
    try:
        path = records.path_of(txn, directory)
    except NotFound:
        return None
    return path + b"/" if path else b""


def _is_elsewhere(txn: ReadTransaction, ino: int, row: ObjectRow, path: bytes, kind: int) -> bool:
    if not row.also and row.key == key_of_path(txn, path, kind == stat.S_IFDIR):
        return False
    return not keys_agree(txn, ino)


def is_prefix_needed(txn: ReadTransaction, prefix: str) -> bool:
    """Whether something below an old prefix still has to be moved or deleted.

    Objects of files that live below that path now do not count. Costs about 3 us for each of those.
    """
    start = b"k" + schema.object_prefix_digest(prefix)
    cursor = txn.cursor(txn.tables.doomed)
    if cursor.set_range(start) and cursor.key().startswith(start):
        return True
    start = start[1:]
    cursor = txn.cursor(txn.tables.objkey)
    if not cursor.set_range(start):
        return False
    paths: dict[int, str] = {}
    for raw_key, raw_ino in cursor.iternext(True, True):
        if not raw_key.startswith(start):
            return False
        ino = unpack_u64(raw_ino)[0]
        if not _lives_at(txn, ino, raw_key, paths):
            return True
    return False


def owners_below(txn: ReadTransaction, prefix: str, limit: int) -> list[tuple[int, str]]:
    """(inode, key) of at most ``limit`` keys below ``prefix`` that are owned; very long keys are left out."""
    start = schema.object_prefix_digest(prefix)
    cursor = txn.cursor(txn.tables.objkey)
    found: list[tuple[int, str]] = []
    if cursor.set_range(start):
        for raw_key, raw_ino in cursor.iternext(True, True):
            if not raw_key.startswith(start) or len(found) >= limit:
                break
            if b"\0" not in raw_key:
                found.append((unpack_u64(raw_ino)[0], raw_key.decode("utf-8", "surrogatepass")))
    return found


def _lives_at(txn: ReadTransaction, ino: int, raw_key: bytes, prefixes: dict[int, str]) -> bool:
    """Whether one of the inode's names maps to that key of table objkey. ``prefixes``: a cache."""
    inode = records.find_inode(txn, ino)
    if inode is None:
        return False
    for parent, name in records.names_of(txn, ino):
        prefix = prefixes.get(parent)
        if prefix is None:
            try:
                prefix = key_of_path(txn, records.path_of(txn, parent), True)
            except NotFound:
                continue
            if len(prefixes) > 1000:
                prefixes.clear()
            prefixes[parent] = prefix
        key = prefix + encode_path(name) + ("/" if inode.is_dir else "")
        if schema.object_key_digest(key) == raw_key:
            return True
    return False
