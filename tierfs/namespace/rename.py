"""rename(2) and renameat2(2): one transaction of constant size, whatever hangs below a directory.

Source of the rules: POSIX.1-2017 rename(), Linux man page renameat2(2).
"""

from __future__ import annotations

import stat
from dataclasses import dataclass

from tierfs.errors import (
    AlreadyExists,
    DirectoryNotEmpty,
    InvalidArgument,
    IsADirectory,
    NotADirectory,
    NotFound,
)
from tierfs.namespace import publish, records, schema
from tierfs.namespace.names import check_name, drop_name, get_entry, keep_directory, touch_directory
from tierfs.namespace.schema import FOREVER_NS
from tierfs.namespace.transaction import ReadTransaction, WriteTransaction
from tierfs.types import Inode


@dataclass(frozen=True, slots=True)
class RenameResult:
    """``moved``: inodes that have another name now (two after an exchange, none if nothing happened).

    ``replaced``: the inode that lost its name to the moved one, as it is afterwards (``nlink`` 0: orphan).
    """

    moved: tuple[int, ...] = ()
    replaced: Inode | None = None


def rename(
    txn: WriteTransaction,
    parent: int,
    name: bytes,
    new_parent: int,
    new_name: bytes,
    *,
    now_ns: int,
    noreplace: bool = False,
    exchange: bool = False,
) -> RenameResult:
    """Give the inode called ``name`` in ``parent`` the name ``new_name`` in ``new_parent``.

    Two names of one inode: nothing happens. A directory that moves has been listed completely before.
    Raises ``NotFound``, ``AlreadyExists`` (``noreplace``), ``InvalidArgument`` (a directory into itself;
    both flags), ``NotADirectory``, ``IsADirectory``, ``DirectoryNotEmpty``, ``NameTooLong``,
    ``NotPermitted`` (reserved name).
    """
    if noreplace and exchange:
        raise InvalidArgument("RENAME_NOREPLACE with RENAME_EXCHANGE")
    check_name(new_parent, new_name)
    old_dir = records.get_directory(txn, parent)
    new_dir = old_dir if new_parent == parent else records.get_directory(txn, new_parent)
    ino, seq, kind = get_entry(txn, parent, name)
    found = records.find_entry(txn, new_parent, new_name)
    if found is not None and noreplace:
        raise AlreadyExists(new_name.decode("utf-8", "backslashreplace"))
    if found is None and exchange:
        raise NotFound(new_name.decode("utf-8", "backslashreplace"))
    if kind == stat.S_IFDIR and new_parent != parent and records.is_ancestor(txn, ino, new_parent):
        raise InvalidArgument("a directory cannot be moved into itself")
    if found is not None and found[0] == ino:
        return RenameResult()
    inode = records.get_inode(txn, ino)
    if found is not None and exchange:
        return _exchange(txn, old_dir, name, inode, seq, new_dir, new_name, found, now_ns)
    return _move(txn, old_dir, name, inode, seq, new_dir, new_name, found, now_ns)


def _move(
    txn: WriteTransaction,
    old_dir: Inode,
    name: bytes,
    inode: Inode,
    seq: int,
    new_dir: Inode,
    new_name: bytes,
    found: tuple[int, int, int] | None,
    now_ns: int,
) -> RenameResult:
    target = _replaceable(txn, inode, found) if found is not None else None
    old_prefix = _prefix_in_store(txn, inode)
    records.delete_entry(txn, old_dir.ino, name, inode.ino, seq)
    if found is not None:
        # The name was there all the time: a scan of the directory must meet it once, so its cookie stays.
        records.delete_parent_row(txn, new_dir.ino, new_name, found[0])
    kept_seq = found[1] if found is not None else None
    records.put_entry(txn, new_dir.ino, new_name, inode.ino, stat.S_IFMT(inode.mode), seq=kept_seq)
    arrived = int(inode.is_dir)
    replaced_dirs = int(target is not None and target.is_dir)
    if old_dir.ino == new_dir.ino:
        touch_directory(txn, old_dir, now_ns, subdirectories=-replaced_dirs)
    else:
        touch_directory(txn, old_dir, now_ns, subdirectories=-arrived)
        touch_directory(txn, new_dir, now_ns, subdirectories=arrived - replaced_dirs)
    schema.put_inode(txn, schema.replace_inode(inode, ctime_ns=now_ns, valid_until_ns=FOREVER_NS))
    replaced = drop_name(txn, target, now_ns) if target is not None else None
    _note_move(txn, inode, old_prefix, now_ns)
    keep_directory(txn, old_dir.ino, now_ns)
    return RenameResult((inode.ino,), replaced)


def _replaceable(txn: ReadTransaction, inode: Inode, found: tuple[int, int, int]) -> Inode:
    target = records.get_inode(txn, found[0])
    if inode.is_dir:
        if not target.is_dir:
            raise NotADirectory("the target of a directory is no directory")
        if records.has_entries(txn, target.ino):
            raise DirectoryNotEmpty("the target directory is not empty")
    elif target.is_dir:
        raise IsADirectory("the target is a directory")
    return target


def _exchange(
    txn: WriteTransaction,
    old_dir: Inode,
    name: bytes,
    inode: Inode,
    seq: int,
    new_dir: Inode,
    new_name: bytes,
    found: tuple[int, int, int],
    now_ns: int,
) -> RenameResult:
    check_name(old_dir.ino, name)
    target = records.get_inode(txn, found[0])
    if target.is_dir and old_dir.ino != new_dir.ino and records.is_ancestor(txn, target.ino, old_dir.ino):
        raise InvalidArgument("a directory cannot be moved into itself")
    prefixes = _prefix_in_store(txn, inode), _prefix_in_store(txn, target)
    records.delete_parent_row(txn, old_dir.ino, name, inode.ino)
    records.delete_parent_row(txn, new_dir.ino, new_name, target.ino)
    records.put_entry(txn, old_dir.ino, name, target.ino, stat.S_IFMT(target.mode), seq=seq)
    records.put_entry(txn, new_dir.ino, new_name, inode.ino, stat.S_IFMT(inode.mode), seq=found[1])
    gained = int(inode.is_dir) - int(target.is_dir)
    if old_dir.ino == new_dir.ino:
        touch_directory(txn, old_dir, now_ns)
    else:
        touch_directory(txn, old_dir, now_ns, subdirectories=-gained)
        touch_directory(txn, new_dir, now_ns, subdirectories=gained)
    for moved, old_prefix in zip((inode, target), prefixes, strict=True):
        # Read again: one of the two may be the other's parent, which has just been touched.
        moved = records.get_inode(txn, moved.ino)
        schema.put_inode(txn, schema.replace_inode(moved, ctime_ns=now_ns, valid_until_ns=FOREVER_NS))
        _note_move(txn, moved, old_prefix, now_ns)
    return RenameResult((inode.ino, target.ino))


def _prefix_in_store(txn: ReadTransaction, inode: Inode) -> str | None:
    """The prefix of a directory that something in the bucket may lie under; taken before it moves."""
    if not inode.is_dir or not inode.flags & schema.IN_STORE:
        return None
    return publish.key_of(txn, inode.ino)[0]


def _note_move(txn: WriteTransaction, inode: Inode, old_prefix: str | None, now_ns: int) -> None:
    publish.mark_dirty(txn, inode.ino, schema.MOVED, now_ns)
    if old_prefix is None:
        return
    if old_prefix.endswith("/"):
        publish.doom(txn, old_prefix, "", now_ns, ino=inode.ino, prefix=True)
    new_prefix = publish.key_of(txn, inode.ino)[0]
    returned = publish.doomed_row(txn, new_prefix, prefix=True)
    if returned is not None and returned.ino == inode.ino:
        # It came back before its objects had left: what lies there is at its place.
        publish.forget_doomed(txn, returned)
