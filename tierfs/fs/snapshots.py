"""Requests about what lies under ``.tierfs/snapshots/``: the same tree, as it was, read-only.

``.tierfs`` can be looked up in the root of a mount while there are snapshots, but no listing shows it. Inodes
in there have numbers of their own, made of the snapshot's epoch and the inode's number, so that nothing that
the kernel knows of one is taken for the other. Nothing of a snapshot is ever in a ``FileContent``: bytes come
from the object that the snapshot sees, by way of the tiers, under a content id that is made from its key and
ETag.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass

from tierfs.cache.residency import Cache
from tierfs.config import Settings
from tierfs.errors import InvalidArgument, IsADirectory, NoAttribute, NotFound, ReadOnly, StaleContent
from tierfs.fs.interrupt import InterruptWatch
from tierfs.fs.placed import FRONT_HANDLE, TAKES_PLACES
from tierfs.namespace import past, records, schema, snapshots
from tierfs.namespace.db import Database
from tierfs.namespace.schema import FOREVER_NS, SnapshotRow
from tierfs.namespace.transaction import ReadTransaction
from tierfs.prefetch.readahead import ReadAheadTable
from tierfs.types import NO_CONTENT, ROOT_INO, Inode, ObjectRef

_BIT_SHIFT = 61
SNAPSHOT_BIT = 1 << _BIT_SHIFT
"""The highest bit in the number of every inode here (``tierfs_is_of_snapshot`` in records.h)."""
_EPOCH_SHIFT = 43
_INO_MASK = (1 << _EPOCH_SHIFT) - 1
TOP_INO = SNAPSHOT_BIT | 2
"""``.tierfs``"""
LIST_INO = SNAPSHOT_BIT | 3
"""``.tierfs/snapshots``"""
LIST_NAME = b"snapshots"
PAGE = 256
_INO_BITS = 2 * SNAPSHOT_BIT - 1
"""Of the number of a handle that a front has given out: the inode's."""


def is_snapshot(ino: int) -> bool:
    """Whether an inode number belongs to what is described here."""
    return ino >> _BIT_SHIFT == 1


def number_of(epoch: int, ino: int) -> int:
    """The inode number of ``ino`` in the snapshot with that epoch."""
    return SNAPSHOT_BIT | epoch << _EPOCH_SHIFT | ino


@dataclass(slots=True, eq=False)
class _OpenFile:
    ino: int
    ref: ObjectRef | None
    """None: empty."""


class Snapshots:
    """See the module docstring. Trio thread only."""

    def __init__(
        self,
        db: Database,
        cache: Cache,
        settings: Settings,
        readahead: ReadAheadTable,
        interrupts: InterruptWatch,
        new_number: Callable[[], int],
    ) -> None:
        self._db = db
        self._cache = cache
        self._settings = settings
        self._readahead = readahead
        self._interrupts = interrupts
        self._new_number = new_number
        self._open: dict[int, _OpenFile] = {}

    # -- names and attributes --------------------------------------------------------------------------

    def is_name(self, parent: int, name: bytes) -> bool:
        """Whether a name is looked up here."""
        return is_snapshot(parent) or (name == schema.RESERVED_NAME and parent == ROOT_INO)

    def lookup(self, parent: int, name: bytes) -> Inode:
        """Raises ``NotFound``."""
        with self._db.read() as txn:
            if parent == ROOT_INO and snapshots.any_visible(txn):
                return self._directory(txn, TOP_INO)
            if parent == TOP_INO and name == LIST_NAME:
                return self._directory(txn, LIST_INO)
            if parent == LIST_INO:
                return self._root(txn, snapshots.find(txn, name))
            if parent in (ROOT_INO, TOP_INO):
                raise NotFound(name.decode("utf-8", "backslashreplace"))
            row, ino = self._locate(txn, parent)
            return self._view(row, past.lookup(txn, row, ino, name))

    def get(self, ino: int) -> Inode:
        """Raises ``NotFound``."""
        with self._db.read() as txn:
            if ino in (TOP_INO, LIST_INO):
                return self._directory(txn, ino)
            row, number = self._locate(txn, ino)
            return self._view(row, past.inode(txn, row, number))

    def readlink(self, ino: int) -> bytes:
        """Raises ``InvalidArgument``, ``NotFound``."""
        with self._db.read() as txn:
            if ino in (TOP_INO, LIST_INO):
                raise InvalidArgument(f"inode {ino} is no symbolic link")
            row, number = self._locate(txn, ino)
            return past.readlink(txn, row, number)

    def xattrs(self, ino: int) -> dict[bytes, bytes]:
        """Raises ``NotFound``."""
        if ino in (TOP_INO, LIST_INO):
            return {}
        with self._db.read() as txn:
            row, number = self._locate(txn, ino)
            return past.xattrs(txn, row, number)

    def get_xattr(self, ino: int, name: bytes) -> bytes:
        """Raises ``NoAttribute``, ``NotFound``."""
        try:
            return self.xattrs(ino)[name]
        except KeyError:
            raise NoAttribute(name.decode("utf-8", "backslashreplace")) from None

    def open_directory(self, ino: int) -> None:
        """Raises ``StaleContent`` for a directory whose listing was not known when the snapshot was made."""
        if ino in (TOP_INO, LIST_INO):
            return
        with self._db.read() as txn:
            row, number = self._locate(txn, ino)
            if not past.inode(txn, row, number).listed_until_ns:
                raise StaleContent(
                    f"inode {number}: not listed yet when snapshot {row.epoch} was made, so nobody knows "
                    "what was in it"
                )

    def read_directory(self, ino: int, after_cookie: int) -> list[tuple[bytes, int, Inode]]:
        """As ``Names.read_directory``."""
        with self._db.read() as txn:
            if ino == TOP_INO:
                return [] if after_cookie else [(LIST_NAME, 1, self._directory(txn, LIST_INO))]
            if ino == LIST_INO:
                rows = [row for row in snapshots.visible(txn) if row.epoch > after_cookie]
                return [(row.name, row.epoch, self._root(txn, row)) for row in rows[:PAGE]]
            row, number = self._locate(txn, ino)
            found = past.readdir(txn, row, number, after_cookie, PAGE)
            return [(name, cookie, self._view(row, inode)) for name, cookie, inode in found]

    def directory_inodes(self, ino: int) -> tuple[Inode, Inode]:
        """The inodes of ``.`` and ``..``; where the latter is not known, of ``.`` twice."""
        with self._db.read() as txn:
            if ino == TOP_INO:
                return self._directory(txn, TOP_INO), records.get_inode(txn, ROOT_INO)
            if ino == LIST_INO:
                return self._directory(txn, LIST_INO), self._directory(txn, TOP_INO)
            row, number = self._locate(txn, ino)
            here = self._view(row, past.inode(txn, row, number))
            return here, self._directory(txn, LIST_INO) if number == row.root_ino else here

    # -- files -----------------------------------------------------------------------------------------

    def open(self, ino: int, flags: int) -> int:
        """Returns a handle number. Raises ``ReadOnly``, ``StaleContent`` (see ``past.content``)."""
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            raise ReadOnly("a snapshot cannot be changed")
        if stat.S_ISDIR(self.get(ino).mode):
            raise IsADirectory(f"inode {ino} is a directory")
        number = self._new_number()
        self._open[number] = _OpenFile(ino, self._content(ino))
        return number

    def restore(self, number: int, ino: int) -> None:
        """A file that was open under that number when an earlier engine died."""
        try:
            self._open[number] = _OpenFile(ino, self._content(ino))
        except (NotFound, StaleContent):
            return

    def has_open(self, number: int) -> bool:
        """Whether a handle number, as a request carries it, is of a file here."""
        if number & FRONT_HANDLE:
            return is_snapshot(number & _INO_BITS)
        return number & ~TAKES_PLACES in self._open

    def release(self, number: int) -> None:
        opened = self._open.pop(number, None)
        if opened is not None:
            self._readahead.forget(opened.ino)

    async def read(self, number: int, offset: int, length: int) -> bytes:
        """Up to ``length`` bytes; fewer only at the end of the file.

        Raises ``StaleContent``: the snapshot has been deleted, or others have replaced the object.
        """
        if number & FRONT_HANDLE:
            # Opened without asking: the rest of the number is the inode's.
            ino = number & _INO_BITS
            opened = _OpenFile(ino, self._content(ino))
        else:
            opened = self._open[number & ~TAKES_PLACES]
        if opened.ref is None:
            return b""
        data = self._cache.read_nowait(opened.ref, offset, length)
        self._readahead.observe(opened.ino, opened.ref, offset, length)
        if data is not None:
            return data
        return await self._interrupts.guard(self._read_waiting, opened, offset, length)

    def size_bytes(self, number: int) -> int:
        """Of an open file."""
        if number & FRONT_HANDLE:
            return self.get(number & _INO_BITS).size_bytes
        opened = self._open[number]
        return opened.ref.size_bytes if opened.ref is not None else 0

    async def _read_waiting(self, opened: _OpenFile, offset: int, length: int) -> bytes:
        ref = opened.ref
        if ref is None:
            return b""
        try:
            return await self._cache.read(ref, offset, length)
        except StaleContent:
            # Copied away, or moved, since it was opened: there it is the same version under another name.
            found = self._content(opened.ino)
            if found is None or found == ref or found.size_bytes != ref.size_bytes:
                raise
            opened.ref = found
        return await self._cache.read(found, offset, length)

    def _content(self, ino: int) -> ObjectRef | None:
        with self._db.read() as txn:
            try:
                row, number = self._locate(txn, ino)
                return past.content(txn, row, number)
            except NotFound:
                raise StaleContent(f"inode {ino} is gone with its snapshot") from None

    # -- private ---------------------------------------------------------------------------------------

    def _locate(self, txn: ReadTransaction, ino: int) -> tuple[SnapshotRow, int]:
        """The snapshot, and the inode number in the namespace. Raises ``NotFound``."""
        return snapshots.find_epoch(txn, (ino & ~SNAPSHOT_BIT) >> _EPOCH_SHIFT), ino & _INO_MASK

    def _root(self, txn: ReadTransaction, row: SnapshotRow) -> Inode:
        return self._view(row, past.inode(txn, row, row.root_ino))

    def _view(self, row: SnapshotRow, inode: Inode) -> Inode:
        mode, uid, gid = inode.mode, inode.uid, inode.gid
        if not inode.flags & schema.META_KNOWN:
            permissions = self._settings.dir_mode if inode.is_dir else self._settings.file_mode
            mode = stat.S_IFMT(mode) | permissions
            uid, gid = self._settings.uid, self._settings.gid
        return schema.replace_inode(
            inode,
            ino=number_of(row.epoch, inode.ino),
            mode=mode,
            uid=uid,
            gid=gid,
            flags=schema.META_KNOWN,
            valid_until_ns=FOREVER_NS,
        )

    def _directory(self, txn: ReadTransaction, ino: int) -> Inode:
        rows = snapshots.visible(txn)
        time_ns = rows[-1].created_ns if rows else 0
        below = len(rows) if ino == LIST_INO else 1
        return Inode(
            ino=ino, mode=stat.S_IFDIR | 0o755, uid=self._settings.uid, gid=self._settings.gid,
            nlink=2 + below, rdev=0, size_bytes=0, atime_ns=time_ns, mtime_ns=time_ns, ctime_ns=time_ns,
            generation=1, flags=schema.META_KNOWN, content_id=NO_CONTENT,
            valid_until_ns=0, listed_until_ns=FOREVER_NS,
        )  # fmt: skip
