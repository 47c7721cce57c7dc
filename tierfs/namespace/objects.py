"""Object keys of names, and the object rows: where in the bucket an inode should be, and where it is.

The lower half of ``publish``, which has the rules.
"""

from __future__ import annotations

import hashlib
import stat
from typing import TYPE_CHECKING

import msgspec

from tierfs.errors import DamagedRecord, NotFound
from tierfs.namespace import records, schema
from tierfs.namespace.schema import ObjectRow, pack_u64, unpack_u64
from tierfs.namespace.transaction import ReadTransaction, WriteTransaction
from tierfs.store.base import MAX_KEY_BYTES
from tierfs.store.keys import decode_key, encode_path, key_size_bytes
from tierfs.types import ROOT_INO

if TYPE_CHECKING:
    from tierfs.namespace.db import Database

RESERVED_PREFIX = ".tierfs/"


def key_of_path(txn: ReadTransaction, path: bytes, is_dir: bool) -> str:
    """The object key of a path below the mount's root; of a directory its marker, ending in ``/``."""
    return key_below(txn.tables.prefix, path, is_dir)


def key_below(prefix: str, path: bytes, is_dir: bool) -> str:
    """The same, of a mount whose keys begin with ``prefix``."""
    key = prefix + encode_path(path) + ("/" if is_dir and path else "")
    if key_size_bytes(key) > MAX_KEY_BYTES:
        digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        return f"{prefix}{RESERVED_PREFIX}long/{digest}"
    return key


def key_of(txn: ReadTransaction, ino: int) -> list[str]:
    """The keys at which the bucket should hold this inode, one per name; empty for an orphan.

    Raises ``NotFound`` if there is no such inode.
    """
    inode = records.get_inode(txn, ino)
    is_dir = stat.S_ISDIR(inode.mode)
    if ino == ROOT_INO:
        return [txn.tables.prefix]
    keys: list[str] = []
    for parent, name in records.names_of(txn, ino):
        try:
            above = records.path_of(txn, parent)
        except NotFound:
            continue
        keys.append(key_of_path(txn, above + b"/" + name if above else name, is_dir))
    return keys


def live_inode_at(txn: ReadTransaction, key: str) -> int | None:
    """The inode whose name, right now, maps to ``key``; None if none does (or the key has no name)."""
    prefix = txn.tables.prefix
    if not key.startswith(prefix):
        return None
    path = decode_key(key[len(prefix) :])
    if path is None:
        return None
    wants_dir = path.endswith(b"/") or not path
    ino = ROOT_INO
    kind = stat.S_IFDIR
    for name in path.removesuffix(b"/").split(b"/") if path else ():
        found = records.find_entry(txn, ino, name)
        if found is None:
            return None
        ino, _, kind = found
    return ino if wants_dir == (kind == stat.S_IFDIR) else None


def parked_key(db: Database, ino: int) -> str:
    """Where the object of an inode waits while two files exchange their keys."""
    return f"{db.tables.prefix}{RESERVED_PREFIX}parked/{ino}"


def object_of(txn: ReadTransaction, ino: int) -> ObjectRow | None:
    """What the bucket holds for this inode, as far as we know."""
    raw = txn.get(pack_u64(ino), None, txn.tables.object)
    if raw is None:
        return None
    try:
        return schema.decode_object(raw)
    except msgspec.DecodeError as error:
        raise DamagedRecord(f"table object, key {ino}: {error}") from None


def owner_of_key(txn: ReadTransaction, key: str) -> int | None:
    """The inode whose bytes are, or are about to be, at ``key``."""
    raw = txn.get(schema.object_key_digest(key), None, txn.tables.objkey)
    return None if raw is None else int(unpack_u64(raw)[0])


def put_object_row(txn: WriteTransaction, ino: int, row: ObjectRow) -> None:
    """Write the row and own its keys; nothing else. For ``listing`` and ``dump``; others ``set_object``."""
    tables = txn.tables
    txn.put(pack_u64(ino), schema.encode_row(row), db=tables.object)
    for key, _ in row.all_keys():
        txn.put(schema.object_key_digest(key), pack_u64(ino), db=tables.objkey)


def keep_object(txn: WriteTransaction, ino: int) -> None:
    """The object row is about to change, and not only because the same bytes have moved: see ``history``."""
    epoch, limit = txn.frontier()
    if ino >= limit:
        return
    key = schema.pack_u64_pair(ino, epoch)
    raw = txn.get(pack_u64(ino), b"", txn.tables.object)
    if txn.put(key, raw, overwrite=False, db=txn.tables.oldobject) and raw:
        object_key = schema.decode_object(raw).key
        txn.put(schema.object_key_digest(object_key) + b"\0" + key, b"", db=txn.tables.oldkey)


def keys_agree(txn: ReadTransaction, ino: int) -> bool:
    """Whether the bucket holds this inode at exactly the keys of its names (or not at all)."""
    row = object_of(txn, ino)
    return row is None or {key for key, _ in row.all_keys()} == set(key_of(txn, ino))


def mark_in_store(txn: WriteTransaction, ino: int) -> None:
    """Note in every directory above that something below it is in the bucket."""
    waiting = [parent for parent, _ in records.names_of(txn, ino)]
    inode = records.find_inode(txn, ino)
    if inode is not None and inode.is_dir:
        waiting.append(ino)
    while waiting:
        directory = records.find_inode(txn, waiting.pop())
        if directory is None or directory.flags & schema.IN_STORE:
            continue
        schema.put_inode(txn, schema.replace_inode(directory, flags=directory.flags | schema.IN_STORE))
        above = records.first_name(txn, directory.ino)
        if above is not None:
            waiting.append(above[0])


def disown_key(txn: WriteTransaction, key: str, ino: int) -> None:
    """The key is nobody's, if it was this inode's."""
    if owner_of_key(txn, key) == ino:
        txn.delete(schema.object_key_digest(key), txn.tables.objkey)
