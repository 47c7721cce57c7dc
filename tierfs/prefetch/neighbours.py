"""Who comes after whom in a directory, by name: asked from the namespace, never from the store."""

from __future__ import annotations

import stat

from tierfs.namespace import publish, records
from tierfs.namespace.db import Database
from tierfs.namespace.schema import DIRENT, NUL_EPOCH_0, pack_u64
from tierfs.namespace.transaction import ReadTransaction
from tierfs.prefetch.succession import Following, Successor

_MAX_SKIPPED = 64
"""Give up after this many entries in a row that are no files with an object."""


def following_in(db: Database) -> Following:
    """The ``Following`` that answers from this namespace. Trio thread; some microseconds per file."""

    def following(ino: int, count: int) -> list[Successor]:
        with db.read() as txn:
            return following_files(txn, ino, count)

    return following


def following_files(txn: ReadTransaction, ino: int, count: int) -> list[Successor]:
    """Up to ``count`` regular files after ``ino`` in the directory of its first name.

    Directories, links, empty files and files whose content is not in the store yet are passed over. Only
    what the namespace knows: an unlisted part of a directory is not asked for.
    """
    found: list[Successor] = []
    place = records.first_name(txn, ino)
    if place is None:
        return found
    parent, name = place
    prefix = pack_u64(parent)
    cursor = txn.cursor(txn.tables.dirent)
    if not cursor.set_range(prefix + name + NUL_EPOCH_0):
        return found
    left = count + _MAX_SKIPPED
    for key, value in cursor.iternext(True, True):
        if not key.startswith(prefix) or len(found) >= count or left == 0:
            break
        left -= 1
        number, _, kind, _ = DIRENT.unpack(value)
        if number == ino or kind != stat.S_IFREG:
            continue
        inode = records.find_inode(txn, number)
        ref = None if inode is None else publish.ref_of(txn, inode)
        if ref is not None and ref.size_bytes:
            found.append(Successor(number, ref))
    return found
