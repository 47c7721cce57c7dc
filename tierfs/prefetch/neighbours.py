"""Who comes after whom in a directory, by name: asked from the namespace, never from the store."""

from __future__ import annotations

import stat

from tierfs.namespace import publish, records
from tierfs.namespace.db import Database
from tierfs.namespace.schema import DIRENT, NUL_EPOCH_0, pack_u64
from tierfs.prefetch.succession import Neighbours
from tierfs.types import ObjectRef

_MAX_SKIPPED = 64
"""Give up after this many entries that are no regular files."""


def following_in(db: Database) -> Neighbours:
    """The ``Neighbours`` that answer from this namespace. Trio thread."""
    return _NamespaceNeighbours(db)


class _NamespaceNeighbours:
    """Only what the namespace knows: an unlisted part of a directory is not asked for."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def after(self, ino: int, count: int) -> list[int]:
        """Up to ``count`` regular files after ``ino`` in the directory of its first name."""
        found: list[int] = []
        with self._db.read() as txn:
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
                if left == 0 or not key.startswith(prefix):
                    break
                left -= 1
                number, _, kind, _ = DIRENT.unpack(value)
                if kind == stat.S_IFREG and number != ino:
                    found.append(number)
                    if len(found) == count:
                        break
        return found

    def ref_of(self, ino: int) -> ObjectRef | None:
        with self._db.read() as txn:
            inode = records.find_inode(txn, ino)
            ref = None if inode is None else publish.ref_of(txn, inode)
        return ref if ref is not None and ref.size_bytes else None
