"""Rules that every change of a name shares: what may be a name, and what it does to parents and links."""

from __future__ import annotations

from tierfs.errors import InvalidArgument, NameTooLong, NotFound, NotPermitted
from tierfs.namespace import publish, records, schema
from tierfs.namespace.schema import FOREVER_NS, pack_u64
from tierfs.namespace.transaction import ReadTransaction, WriteTransaction
from tierfs.types import ROOT_INO, Inode


def check_name(parent: int, name: bytes) -> None:
    """Raises unless ``name`` may be made in ``parent``."""
    if len(name) > schema.NAME_MAX_BYTES:
        raise NameTooLong(f"name of {len(name)} bytes")
    if not name or name in (b".", b"..") or b"/" in name or b"\0" in name:
        raise InvalidArgument(f"name {name!r}")
    if parent == ROOT_INO and name == schema.RESERVED_NAME:
        raise NotPermitted("the name .tierfs is reserved at the root of the mount")


def touch_directory(
    txn: WriteTransaction, directory: Inode, now_ns: int, *, subdirectories: int = 0
) -> Inode:
    """Its entries changed: mtime, ctime and, by ``subdirectories``, the link count."""
    directory = schema.replace_inode(
        directory, mtime_ns=now_ns, ctime_ns=now_ns, nlink=directory.nlink + subdirectories
    )
    schema.put_inode(txn, directory)
    return directory


def drop_name(txn: WriteTransaction, inode: Inode, now_ns: int) -> Inode:
    """One name less (the entry itself is gone already). The last one makes it an orphan."""
    nlink = 0 if inode.is_dir else inode.nlink - 1
    inode = schema.replace_inode(inode, nlink=nlink, ctime_ns=now_ns)
    schema.put_inode(txn, inode)
    if nlink:
        publish.mark_dirty(txn, inode.ino, schema.MOVED, now_ns)
        return schema.replace_inode(inode, valid_until_ns=FOREVER_NS)
    publish.release(txn, inode.ino, now_ns)
    txn.put(pack_u64(inode.ino), b"", db=txn.tables.orphan)
    return inode


def keep_directory(txn: WriteTransaction, ino: int, now_ns: int) -> None:
    """A directory that exists in the bucket only by what was below it needs a marker once it is empty."""
    if ino == ROOT_INO or records.has_entries(txn, ino):
        return
    if publish.object_of(txn, ino) is None and not publish.is_dirty(txn, ino):
        publish.mark_dirty(txn, ino, schema.CREATED, now_ns)


def get_entry(txn: ReadTransaction, parent: int, name: bytes) -> tuple[int, int, int]:
    """(ino, cookie, file type). Raises ``NotFound``, ``NameTooLong``."""
    if len(name) > schema.NAME_MAX_BYTES:
        raise NameTooLong(f"name of {len(name)} bytes")
    found = records.find_entry(txn, parent, name)
    if found is None:
        raise NotFound(name.decode("utf-8", "backslashreplace"))
    return found
