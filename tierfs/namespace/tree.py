"""POSIX operations on names and inodes, as functions of a transaction.

Permissions are not checked here (the kernel does, with ``default_permissions``), nor is anything that needs
the caller's identity: sticky directories, clearing of set-user-ID after chown. Everything that must be true
of the tree is: types, link counts, times, loops. Checks come before the first write.

Whatever changes what the bucket should hold leaves its dirty and doomed rows in the same transaction.
The caller has asked ``refresh`` first where the bucket may know more: ``rmdir`` and ``rename`` look only
at what is recorded.

Source of the rules: POSIX.1-2017 and Linux man pages of the system call of the same name.
"""

from __future__ import annotations

import stat

from tierfs.errors import (
    AlreadyExists,
    DirectoryNotEmpty,
    InvalidArgument,
    IsADirectory,
    NameTooLong,
    NotADirectory,
    NotFound,
    NotPermitted,
    TooManyLinks,
)
from tierfs.namespace import loans, publish, records, schema
from tierfs.namespace.history import keep_target
from tierfs.namespace.names import check_name, drop_name, get_entry, keep_directory, touch_directory
from tierfs.namespace.records import names_of as names_of
from tierfs.namespace.records import path_of as path_of
from tierfs.namespace.rename import RenameResult as RenameResult
from tierfs.namespace.rename import rename as rename
from tierfs.namespace.schema import EPOCH_0, FOREVER_NS, NUL_EPOCH_0, pack_u64, unpack_inode
from tierfs.namespace.transaction import ReadTransaction, WriteTransaction
from tierfs.namespace.xattr import get_xattr as get_xattr
from tierfs.namespace.xattr import list_xattrs as list_xattrs
from tierfs.namespace.xattr import remove_all_xattrs
from tierfs.namespace.xattr import remove_xattr as remove_xattr
from tierfs.namespace.xattr import set_xattr as set_xattr
from tierfs.types import NO_CONTENT, ROOT_INO, ContentId, Inode

_INT64_MAX = 2**63 - 1

# -- reading ----------------------------------------------------------------------------------------------


def lookup(txn: ReadTransaction, parent: int, name: bytes) -> Inode:
    """The inode called ``name`` in ``parent``. Raises ``NotFound``, ``NotADirectory``, ``NameTooLong``."""
    tables = txn.tables
    if len(name) > schema.NAME_MAX_BYTES:
        raise NameTooLong(f"name of {len(name)} bytes")
    raw = txn.get(pack_u64(parent) + name + NUL_EPOCH_0, None, tables.dirent)
    if raw is None:
        # Only a miss pays for finding out what the parent is: entries exist in directories alone.
        records.get_directory(txn, parent)
        raise NotFound(name.decode("utf-8", "backslashreplace"))
    # The first eight bytes of the record, reversed, are the inode number as keys have it.
    record = txn.get(raw[7::-1] + EPOCH_0, None, tables.inode)
    if record is None:
        raise records.missing_inode(txn, parent, name)
    return unpack_inode(record)


get = records.get_inode


def resolve(txn: ReadTransaction, path: bytes) -> Inode:
    """The inode of a path below the root; empty parts and ``.`` are skipped, links are not followed."""
    inode = get(txn, ROOT_INO)
    for name in path.split(b"/"):
        if name in (b"", b"."):
            continue
        if name == b"..":
            parents = names_of(txn, inode.ino)
            inode = get(txn, parents[0][0]) if parents else inode
            continue
        inode = lookup(txn, inode.ino, name)
    return inode


def readdir(txn: ReadTransaction, ino: int, after_cookie: int, limit: int) -> list[tuple[bytes, int, Inode]]:
    """Up to ``limit`` entries (name, cookie, inode) after a cookie (0: from the start); empty at the end.

    ``.`` and ``..`` are not among them. Cookies are above ``FIRST_FREE_ID`` and only grow: an entry that
    was there all the time comes exactly once, whatever happens to others, also after a restart.
    """
    found: list[tuple[bytes, int, Inode]] = []
    get_record, table = txn.get, txn.tables.inode
    for cookie, name, child, _ in records.iter_entries(txn, ino, after_cookie):
        raw = get_record(pack_u64(child) + EPOCH_0, None, table)
        if raw is None:
            continue
        found.append((name, cookie, unpack_inode(raw)))
        if len(found) >= limit:
            break
    return found


def readlink(txn: ReadTransaction, ino: int) -> bytes:
    """Raises ``InvalidArgument`` unless the inode is a symbolic link."""
    target: bytes | None = txn.get(pack_u64(ino), None, txn.tables.symlink)
    if target is None:
        get(txn, ino)
        raise InvalidArgument(f"inode {ino} is no symbolic link")
    return target


def inode_count(txn: ReadTransaction) -> int:
    """Inodes known here, orphans included; constant time."""
    return txn.entries(txn.tables.inode)


# -- making and removing names ----------------------------------------------------------------------------


def create(
    txn: WriteTransaction,
    parent: int,
    name: bytes,
    *,
    mode: int,
    uid: int,
    gid: int,
    rdev: int = 0,
    target: bytes | None = None,
    content_id: ContentId = NO_CONTENT,
    now_ns: int,
) -> Inode:
    """Make a file of the type in ``mode`` (``target``: a symbolic link to it).

    A regular file with a ``content_id`` starts with ``DATA_LOCAL``. In a set-group-ID directory the group is
    inherited, and by a directory the bit too. Raises ``AlreadyExists``, ``NotFound`` (the parent has been
    removed), ``NotADirectory``, ``NameTooLong``, ``NotPermitted`` (reserved name).
    """
    check_name(parent, name)
    directory = records.get_directory(txn, parent)
    if records.find_entry(txn, parent, name) is not None:
        raise AlreadyExists(name.decode("utf-8", "backslashreplace"))
    is_dir = stat.S_ISDIR(mode)
    if target is not None:
        if len(target) > schema.SYMLINK_MAX_BYTES:
            raise NameTooLong(f"link target of {len(target)} bytes")
        mode = stat.S_IFLNK | 0o777
    flags = schema.UNPUBLISHED | schema.META_KNOWN
    if directory.mode & stat.S_ISGID:
        gid = directory.gid
        if is_dir:
            mode |= stat.S_ISGID
    if is_dir:
        flags |= schema.DIR_LOCAL
    elif content_id != NO_CONTENT:
        flags |= schema.DATA_LOCAL
    ino = records.new_id(txn)
    inode = Inode(
        ino=ino, mode=mode, uid=uid, gid=gid, nlink=2 if is_dir else 1, rdev=rdev,
        size_bytes=len(target) if target is not None else 0,
        atime_ns=now_ns, mtime_ns=now_ns, ctime_ns=now_ns, generation=records.fs_generation(txn),
        flags=flags, content_id=content_id, valid_until_ns=FOREVER_NS,
        listed_until_ns=now_ns + txn.tables.ttl_ns if is_dir else 0,
    )  # fmt: skip
    records.add_inode(txn, inode)
    records.put_entry(txn, parent, name, ino, stat.S_IFMT(mode), seq=ino)
    if target is not None:
        txn.put(pack_u64(ino), target, db=txn.tables.symlink)
    touch_directory(txn, directory, now_ns, subdirectories=int(is_dir))
    publish.mark_created(txn, ino, now_ns)
    return inode


def create_unnamed(
    txn: WriteTransaction,
    parent: int,
    *,
    mode: int,
    uid: int,
    gid: int,
    content_id: ContentId,
    now_ns: int,
) -> Inode:
    """Make a regular file that no directory has: an orphan, to which ``link`` may give a name.

    In a set-group-ID ``parent`` the group is inherited. Raises ``NotFound`` (it has been removed),
    ``NotADirectory``.
    """
    directory = records.get_directory(txn, parent)
    if directory.mode & stat.S_ISGID:
        gid = directory.gid
    inode = Inode(
        ino=records.new_id(txn), mode=mode, uid=uid, gid=gid, nlink=0, rdev=0, size_bytes=0,
        atime_ns=now_ns, mtime_ns=now_ns, ctime_ns=now_ns,
        generation=records.fs_generation(txn),
        flags=schema.UNPUBLISHED | schema.META_KNOWN | schema.DATA_LOCAL | schema.LINKABLE,
        content_id=content_id, valid_until_ns=FOREVER_NS, listed_until_ns=0,
    )  # fmt: skip
    records.add_inode(txn, inode)
    txn.put(pack_u64(inode.ino), b"", db=txn.tables.orphan)
    return inode


def link(txn: WriteTransaction, ino: int, parent: int, name: bytes, *, now_ns: int) -> Inode:
    """Another name for a file, or the first one of an unnamed one.

    Raises ``NotPermitted`` (directory), ``TooManyLinks``, ``AlreadyExists``.
    """
    check_name(parent, name)
    inode = get(txn, ino)
    if inode.is_dir:
        raise NotPermitted("hard link to a directory")
    is_first = inode.nlink == 0
    if is_first and not inode.flags & schema.LINKABLE:
        raise NotFound(f"inode {ino} has been removed")
    directory = records.get_directory(txn, parent)
    if records.find_entry(txn, parent, name) is not None:
        raise AlreadyExists(name.decode("utf-8", "backslashreplace"))
    if inode.nlink >= schema.LINK_MAX:
        raise TooManyLinks(f"inode {ino} has {inode.nlink} names")
    inode = schema.replace_inode(
        inode,
        nlink=inode.nlink + 1,
        ctime_ns=now_ns,
        valid_until_ns=FOREVER_NS,
        flags=inode.flags & ~schema.LINKABLE,
    )
    schema.put_inode(txn, inode)
    if is_first:
        txn.delete(pack_u64(ino), txn.tables.orphan)
    records.put_entry(txn, parent, name, ino, stat.S_IFMT(inode.mode))
    touch_directory(txn, directory, now_ns)
    publish.mark_dirty(txn, ino, schema.CREATED if is_first else schema.MOVED, now_ns)
    return inode


def unlink(txn: WriteTransaction, parent: int, name: bytes, *, now_ns: int) -> Inode:
    """Remove a name of a file. Returns the inode afterwards; with ``nlink`` 0 it is an orphan now.

    Raises ``IsADirectory``, ``NotFound``.
    """
    directory = records.get_directory(txn, parent)
    ino, seq, kind = get_entry(txn, parent, name)
    if kind == stat.S_IFDIR:
        raise IsADirectory(name.decode("utf-8", "backslashreplace"))
    inode = get(txn, ino)
    records.delete_entry(txn, parent, name, ino, seq)
    touch_directory(txn, directory, now_ns)
    inode = drop_name(txn, inode, now_ns)
    keep_directory(txn, parent, now_ns)
    return inode


def rmdir(txn: WriteTransaction, parent: int, name: bytes, *, now_ns: int) -> Inode:
    """Remove an empty directory. Returns it as the orphan that it is now.

    Raises ``NotADirectory``, ``DirectoryNotEmpty``, ``NotFound``.
    """
    directory = records.get_directory(txn, parent)
    ino, seq, kind = get_entry(txn, parent, name)
    if kind != stat.S_IFDIR:
        raise NotADirectory(name.decode("utf-8", "backslashreplace"))
    if records.has_entries(txn, ino):
        raise DirectoryNotEmpty(name.decode("utf-8", "backslashreplace"))
    inode = get(txn, ino)
    records.delete_entry(txn, parent, name, ino, seq)
    touch_directory(txn, directory, now_ns, subdirectories=-1)
    inode = drop_name(txn, inode, now_ns)
    keep_directory(txn, parent, now_ns)
    return inode


# -- attributes ---------------------------------------------------------------------------------------------


def set_attributes(
    txn: WriteTransaction,
    ino: int,
    *,
    mode: int | None = None,
    uid: int | None = None,
    gid: int | None = None,
    size_bytes: int | None = None,
    atime_ns: int | None = None,
    mtime_ns: int | None = None,
    ctime_ns: int | None = None,
    content_id: ContentId | None = None,
    valid_until_ns: int | None = None,
    listed_until_ns: int | None = None,
    set_flags: int = 0,
    clear_flags: int = 0,
    dirty: int | None = None,
    now_ns: int,
) -> Inode:
    """Change what is given; returns the inode afterwards.

    ``ctime`` becomes ``now_ns`` unless given, when anything but validity and flags changes; ``mtime`` does
    when the size or the content changes and it is not given. ``mode`` may come without the file type.
    ``dirty``: reasons to mark (0: none); None: attributes for mode, owner and mtime, content for size and
    content (which also sets ``DATA_LOCAL``).
    """
    inode = get(txn, ino)
    reasons = 0
    changes: dict[str, int | ContentId] = {}
    if mode is not None:
        changes["mode"] = stat.S_IFMT(inode.mode) | stat.S_IMODE(mode)
    if uid is not None:
        changes["uid"] = uid
    if gid is not None:
        changes["gid"] = gid
    if mtime_ns is not None:
        changes["mtime_ns"] = _clamp(mtime_ns)
    if changes:
        reasons = schema.ATTRIBUTES
        set_flags |= schema.META_KNOWN
    if size_bytes is not None or content_id is not None:
        if size_bytes is not None:
            changes["size_bytes"] = size_bytes
        if content_id is not None:
            changes["content_id"] = content_id
        changes.setdefault("mtime_ns", now_ns)
        reasons |= schema.CONTENT
        set_flags |= schema.DATA_LOCAL
    if atime_ns is not None:
        changes["atime_ns"] = _clamp(atime_ns)
    if changes or ctime_ns is not None:
        changes["ctime_ns"] = now_ns if ctime_ns is None else _clamp(ctime_ns)
    if valid_until_ns is not None:
        changes["valid_until_ns"] = valid_until_ns
    if listed_until_ns is not None:
        changes["listed_until_ns"] = listed_until_ns
    flags = (inode.flags | set_flags) & ~clear_flags
    if flags != inode.flags:
        changes["flags"] = flags
    if not changes:
        return inode
    if dirty is not None:
        reasons = dirty
    if reasons and inode.nlink and ino != ROOT_INO:
        changes["valid_until_ns"] = FOREVER_NS
    inode = schema.replace_inode(inode, **changes)
    schema.put_inode(txn, inode)
    if reasons and inode.nlink:
        publish.mark_dirty(txn, ino, reasons, now_ns)
    return inode


# -- orphans ------------------------------------------------------------------------------------------------


def orphans(txn: ReadTransaction, after_ino: int = 0, limit: int = 1000) -> list[int]:
    """Inodes without a name, in order: at start all of them can be reaped."""
    cursor = txn.cursor(txn.tables.orphan)
    found: list[int] = []
    if cursor.set_range(pack_u64(after_ino + 1)):
        for key in cursor.iternext(True, False):
            found.append(schema.unpack_u64(key)[0])
            if len(found) >= limit:
                break
    return found


def reap(txn: WriteTransaction, ino: int) -> Inode | None:
    """Forget an orphan for good. Returns it (its content can go from the tiers), or None if it is none."""
    inode = records.find_inode(txn, ino)
    if not txn.delete(pack_u64(ino), txn.tables.orphan):
        return None
    if inode is None or inode.nlink:
        return None
    tables = txn.tables
    records.delete_inode(txn, ino)
    keep_target(txn, ino)
    txn.delete(pack_u64(ino), tables.symlink)
    txn.delete(pack_u64(ino), tables.object)
    loans.give_back(txn, ino)
    if inode.flags & schema.HAS_XATTR:
        remove_all_xattrs(txn, ino)
    return inode


def _clamp(time_ns: int) -> int:
    """A time that the record can hold: years 1677 to 2262."""
    return max(-_INT64_MAX, min(time_ns, _INT64_MAX))
