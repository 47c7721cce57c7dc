"""Extended attributes: any name, any value; which namespaces are allowed is the caller's business."""

from __future__ import annotations

import errno

from tierfs.errors import AlreadyExists, NameTooLong, NoAttribute
from tierfs.namespace import records, schema
from tierfs.namespace.schema import pack_u64
from tierfs.namespace.transaction import ReadTransaction, WriteTransaction

MAX_VALUE_BYTES = 64 * 1024
MAX_LIST_BYTES = 64 * 1024
"""What listxattr(2) can return (XATTR_LIST_MAX)."""


def get_xattr(txn: ReadTransaction, ino: int, name: bytes) -> bytes:
    """Raises ``NoAttribute``, ``NotFound``."""
    value: bytes | None = None
    if len(name) <= schema.NAME_MAX_BYTES:
        value = txn.get(pack_u64(ino) + name, None, txn.tables.xattr)
    if value is None:
        records.get_inode(txn, ino)
        raise NoAttribute(name.decode("utf-8", "backslashreplace"))
    return value


def list_xattrs(txn: ReadTransaction, ino: int) -> list[bytes]:
    """Names in byte order. Raises ``NotFound``."""
    if not records.get_inode(txn, ino).flags & schema.HAS_XATTR:
        return []
    prefix = pack_u64(ino)
    names: list[bytes] = []
    cursor = txn.cursor(txn.tables.xattr)
    if cursor.set_range(prefix):
        for key in cursor.iternext(True, False):
            if not key.startswith(prefix):
                break
            names.append(key[8:])
    return names


def set_xattr(
    txn: WriteTransaction,
    ino: int,
    name: bytes,
    value: bytes,
    *,
    now_ns: int,
    create: bool = False,
    replace: bool = False,
) -> None:
    """``create``: it must not exist yet (``AlreadyExists``); ``replace``: it must (``NoAttribute``).

    Raises ``NameTooLong`` for names over 255 bytes, values over 64 KiB and lists that would not fit.
    """
    inode = records.get_inode(txn, ino)
    if not 0 < len(name) <= schema.NAME_MAX_BYTES:
        raise NameTooLong(f"attribute name of {len(name)} bytes")
    if len(value) > MAX_VALUE_BYTES:
        raise _too_big(f"attribute value of {len(value)} bytes")
    exists = txn.get(pack_u64(ino) + name, None, txn.tables.xattr) is not None
    if create and exists:
        raise AlreadyExists(name.decode("utf-8", "backslashreplace"))
    if replace and not exists:
        raise NoAttribute(name.decode("utf-8", "backslashreplace"))
    if not exists and sum(len(known) + 1 for known in list_xattrs(txn, ino)) + len(name) + 1 > MAX_LIST_BYTES:
        raise _no_space("too many extended attributes")
    keep_xattrs(txn, ino)
    txn.put(pack_u64(ino) + name, value, db=txn.tables.xattr)
    schema.put_inode(txn, schema.replace_inode(inode, ctime_ns=now_ns, flags=inode.flags | schema.HAS_XATTR))


def remove_xattr(txn: WriteTransaction, ino: int, name: bytes, *, now_ns: int) -> None:
    """Raises ``NoAttribute``, ``NotFound``."""
    get_xattr(txn, ino, name)
    inode = records.get_inode(txn, ino)
    keep_xattrs(txn, ino)
    txn.delete(pack_u64(ino) + name, txn.tables.xattr)
    flags = inode.flags if list_xattrs(txn, ino) else inode.flags & ~schema.HAS_XATTR
    schema.put_inode(txn, schema.replace_inode(inode, ctime_ns=now_ns, flags=flags))


def remove_all_xattrs(txn: WriteTransaction, ino: int) -> None:
    """The inode goes: its attributes go. The inode record is not touched."""
    keep_xattrs(txn, ino)
    prefix = pack_u64(ino)
    cursor = txn.cursor(txn.tables.xattr)
    while cursor.set_range(prefix) and cursor.key().startswith(prefix):
        cursor.delete()


def keep_xattrs(txn: WriteTransaction, ino: int) -> None:
    """They are about to change: see ``history``. All of them are kept together."""
    epoch, limit = txn.frontier()
    if ino >= limit:
        return
    key = schema.pack_u64_pair(ino, epoch)
    if txn.get(key, None, txn.tables.oldxattr) is None:
        txn.put(key, schema.encode_row(all_xattrs(txn, ino)), db=txn.tables.oldxattr)


def all_xattrs(txn: ReadTransaction, ino: int) -> dict[bytes, bytes]:
    """Names and values, whether or not the inode says that there are any."""
    prefix = pack_u64(ino)
    found: dict[bytes, bytes] = {}
    cursor = txn.cursor(txn.tables.xattr)
    if cursor.set_range(prefix):
        for key, value in cursor.iternext(True, True):
            if not key.startswith(prefix):
                break
            found[key[8:]] = value
    return found


def copy_xattrs(txn: WriteTransaction, from_ino: int, to_ino: int) -> None:
    """Give a new inode the attributes of the one that it replaces; its record must carry ``HAS_XATTR``."""
    for name in list_xattrs(txn, from_ino):
        value = txn.get(pack_u64(from_ino) + name, None, txn.tables.xattr)
        if value is not None:
            txn.put(pack_u64(to_ino) + name, value, db=txn.tables.xattr)


def _too_big(message: str) -> NameTooLong:
    error = NameTooLong(message)
    error.errno = errno.E2BIG
    return error


def _no_space(message: str) -> NameTooLong:
    error = NameTooLong(message)
    error.errno = errno.ENOSPC
    return error
