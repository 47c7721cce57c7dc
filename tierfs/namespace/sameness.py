"""Whether what is there now is what a snapshot saw, and how much is not. Reads only."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from tierfs.errors import NotFound, StaleContent
from tierfs.namespace import loans, past, records, schema
from tierfs.namespace.listing import Defaults
from tierfs.namespace.objects import object_of
from tierfs.namespace.schema import SnapshotRow, pack_u64
from tierfs.namespace.transaction import ReadTransaction
from tierfs.namespace.xattr import all_xattrs
from tierfs.types import Inode

MOST_NAMED = 20
"""Paths of which a survey says that they cannot be had; it counts the rest."""


@dataclass(slots=True)
class Survey:
    """What making a directory what it was would change.

    ``directories``: (path, inode in the snapshot, inode here) of all in which something differs; None: more
    than ``limit`` changes. ``missing``: (path, reason) of what cannot be had any more.
    """

    entries: int = 0
    changes: int = 0
    directories: list[tuple[bytes, int, int]] | None = field(default_factory=list)
    missing: list[tuple[bytes, str]] = field(default_factory=list)
    missing_count: int = 0

    def note_missing(self, path: bytes, reason: str) -> None:
        self.missing_count += 1
        if len(self.missing) < MOST_NAMED:
            self.missing.append((path, reason))


def attributes_of(inode: Inode, defaults: Defaults) -> tuple[int, int, int]:
    """(mode, uid, gid) as an application sees them."""
    if inode.flags & schema.META_KNOWN:
        return inode.mode, inode.uid, inode.gid
    permissions = defaults.dir_mode if inode.is_dir else defaults.file_mode
    return stat.S_IFMT(inode.mode) | permissions, defaults.uid, defaults.gid


def same_attributes(
    txn: ReadTransaction, row: SnapshotRow, old: Inode, here: Inode, defaults: Defaults
) -> bool:
    """Mode, owner, mtime, atime and extended attributes of ``old`` in the snapshot and ``here``."""
    if (old.mtime_ns, old.atime_ns) != (here.mtime_ns, here.atime_ns):
        return False
    if attributes_of(old, defaults) != attributes_of(here, defaults):
        return False
    if not (old.flags | here.flags) & schema.HAS_XATTR:
        return True
    return past.xattrs(txn, row, old.ino) == all_xattrs(txn, here.ino)


def same_file(txn: ReadTransaction, row: SnapshotRow, old: Inode, here: Inode) -> bool:
    """Whether type and bytes (target, device) are the same; attributes may differ. Not for directories.

    By identity of the object version: equal bytes that were written anew count as others.
    """
    if stat.S_IFMT(old.mode) != stat.S_IFMT(here.mode):
        return False
    if old.is_symlink:
        target: bytes | None = txn.get(pack_u64(here.ino), None, txn.tables.symlink)
        return target == past.readlink(txn, row, old.ino)
    if not old.is_regular:
        return old.rdev == here.rdev
    if old.size_bytes != here.size_bytes or here.flags & schema.DATA_LOCAL:
        return old.size_bytes == here.size_bytes == 0
    if not old.size_bytes:
        return True
    held = past.object_row(txn, row, old.ino)
    if held is None:
        return False
    if here.content_id == loans.content_id_of_loan(here.ino, held):
        return True
    current = object_of(txn, here.ino)
    if current is None:
        loan = loans.loan_of(txn, here.ino)
        return loan is not None and (loan.epoch, loan.ino) == (row.epoch, old.ino)
    return (current.key, current.etag) == (held.key, held.etag)


def survey(
    txn: ReadTransaction, row: SnapshotRow, old_ino: int, ino: int, defaults: Defaults, limit: int
) -> Survey:
    """Compare directory ``old_ino`` of the snapshot with ``ino`` as it is now (0: with nothing).

    Memory grows with the depth of the tree, not with its size.
    """
    found = Survey()
    waiting = [iter([(b"", old_ino, ino)])]
    while waiting:
        pair = next(waiting[-1], None)
        if pair is None:
            waiting.pop()
            continue
        path, old_dir, here_dir = pair
        changes = _compare_directory(txn, row, path, old_dir, here_dir, defaults, found)
        found.changes += changes
        if found.changes > limit:
            found.directories = None
        elif changes and here_dir and found.directories is not None:
            found.directories.append((path, old_dir, here_dir))
        waiting.append(_subdirectories(txn, row, path, old_dir, here_dir))
    return found


def _compare_directory(
    txn: ReadTransaction,
    row: SnapshotRow,
    path: bytes,
    old_dir: int,
    here_dir: int,
    defaults: Defaults,
    found: Survey,
) -> int:
    """Changes of the directory itself and of what is directly in it, and of all below what is only here."""
    changes = 0
    for _, name, child, kind in past.entries(txn, row, old_dir):
        found.entries += 1
        below = path + b"/" + name if path else name
        try:
            old = past.inode(txn, row, child)
        except NotFound:
            continue
        if kind != stat.S_IFDIR:
            changes += _compare_file(txn, row, old, _child(txn, here_dir, name), below, defaults, found)
        elif not old.listed_until_ns:
            found.note_missing(below + b"/", "not listed when the snapshot was made")
        else:
            changes += not _directory_here(txn, here_dir, name)
    if here_dir:
        changes += sum(1 for _ in _surplus(txn, row, old_dir, here_dir))
        here = records.get_inode(txn, here_dir)
        changes += not same_attributes(txn, row, past.inode(txn, row, old_dir), here, defaults)
    return changes


def _subdirectories(
    txn: ReadTransaction, row: SnapshotRow, path: bytes, old_dir: int, here_dir: int
) -> Iterator[tuple[bytes, int, int]]:
    """(path, inode in the snapshot, inode here or 0)"""
    for _, name, child, kind in past.entries(txn, row, old_dir):
        if kind != stat.S_IFDIR:
            continue
        try:
            is_known = past.inode(txn, row, child).listed_until_ns
        except NotFound:
            continue
        if is_known:
            yield path + b"/" + name if path else name, child, _directory_here(txn, here_dir, name)


def _directory_here(txn: ReadTransaction, directory: int, name: bytes) -> int:
    """The inode of a directory of that name; 0: there is none."""
    here = _child(txn, directory, name)
    return here.ino if here is not None and here.is_dir else 0


def _child(txn: ReadTransaction, directory: int, name: bytes) -> Inode | None:
    entry = records.find_entry(txn, directory, name) if directory else None
    return records.find_inode(txn, entry[0]) if entry is not None else None


def _compare_file(
    txn: ReadTransaction,
    row: SnapshotRow,
    old: Inode,
    here: Inode | None,
    path: bytes,
    defaults: Defaults,
    found: Survey,
) -> int:
    if here is not None and not here.is_dir and same_file(txn, row, old, here):
        # Of several names each may have to become a name of the same inode.
        is_linked = old.nlink > 1 and here.ino != old.ino
        return int(is_linked or not same_attributes(txn, row, old, here, defaults))
    if old.is_regular:
        try:
            past.content(txn, row, old.ino)
        except StaleContent as error:
            found.note_missing(path, str(error))
            return 0
    return 1 + (sum(1 for _ in _below(txn, here.ino)) if here is not None and here.is_dir else 0)


def _surplus(txn: ReadTransaction, row: SnapshotRow, old_dir: int, here_dir: int) -> Iterator[int]:
    for _, name, ino, kind in records.iter_entries(txn, here_dir):
        if past.entry(txn, row, old_dir, name) is None:
            yield ino
            if kind == stat.S_IFDIR:
                yield from _below(txn, ino)


def _below(txn: ReadTransaction, ino: int) -> Iterator[int]:
    """Every entry below a directory."""
    waiting = [ino]
    while waiting:
        for _, _, child, kind in records.iter_entries(txn, waiting.pop()):
            yield child
            if kind == stat.S_IFDIR:
                waiting.append(child)
