"""Walks over everything below a directory. They take time: call them in a worker thread, on a snapshot."""

from __future__ import annotations

import stat

from tierfs.namespace import records, schema
from tierfs.namespace.objects import object_of
from tierfs.namespace.transaction import ReadTransaction
from tierfs.types import Inode


def unlisted_below(txn: ReadTransaction, ino: int, now_ns: int, *, skip_own: bool = False) -> list[int]:
    """The topmost directories at or below ``ino`` whose listing is not, or no longer, complete.

    ``skip_own``: without those in which nothing was ever seen in, or put into, the bucket.
    """
    found: list[int] = []
    waiting = [ino]
    while waiting:
        inode = records.find_inode(txn, waiting.pop())
        if inode is None or not inode.is_dir:
            continue
        own = inode.flags & (schema.DIR_LOCAL | schema.DIR_SEEN | schema.IN_STORE) == schema.DIR_LOCAL
        if inode.listed_until_ns <= now_ns and not (skip_own and own):
            found.append(inode.ino)
        else:
            waiting.extend(_subdirectories(txn, inode))
    return found


def unlearned_below(txn: ReadTransaction, ino: int) -> list[int]:
    """Inodes at and below ``ino`` that have an object of which only a listing is known, not its metadata."""
    found: list[int] = []
    waiting = [ino]
    while waiting:
        inode = records.find_inode(txn, waiting.pop())
        if inode is None:
            continue
        if not inode.flags & schema.META_KNOWN and object_of(txn, inode.ino) is not None:
            found.append(inode.ino)
        if inode.is_dir:
            waiting.extend(child for _, _, child, _ in records.iter_entries(txn, inode.ino))
    return found


def count_below(txn: ReadTransaction, ino: int) -> tuple[int, int]:
    """(entries, directories) recorded below a directory, itself not counted."""
    entries = directories = 0
    waiting = [ino]
    while waiting:
        for _, _, child, kind in records.iter_entries(txn, waiting.pop()):
            entries += 1
            if kind == stat.S_IFDIR:
                directories += 1
                waiting.append(child)
    return entries, directories


def _subdirectories(txn: ReadTransaction, inode: Inode) -> list[int]:
    if inode.nlink <= 2:
        # The link count of a directory says how many directories are in it: millions of files cost nothing.
        return []
    return [child for _, _, child, kind in records.iter_entries(txn, inode.ino) if kind == stat.S_IFDIR]
