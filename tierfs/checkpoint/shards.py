"""The files of a checkpoint, as the namespace has them. Functions of a transaction."""

from __future__ import annotations

import os
import stat

import msgspec

from tierfs.checkpoint.pending import PendingFile
from tierfs.errors import CheckpointError
from tierfs.namespace import publish, records, schema, tree
from tierfs.namespace.transaction import ReadTransaction
from tierfs.store.keys import decode_key, encode_path
from tierfs.types import NO_CONTENT, ObjectRef

RANK_MARK = b"user.tierfs-save.rank."
"""See ``working``."""


class Lost(CheckpointError):
    """The manifest can never be written."""


class Ready(msgspec.Struct, frozen=True):
    """One file that is in the store. ``content_id``: ``NO_CONTENT`` of an empty one."""

    file: str
    rank: int | None
    ref: ObjectRef
    mtime_ns: int


class _RankFiles(msgspec.Struct, kw_only=True):
    files: list[str] = []


def ready_file(txn: ReadTransaction, ino: int, path: bytes, wanted: PendingFile) -> Ready | None:
    """The file as it is in the store; None: it is not there yet. Raises ``Lost`` if it never will be."""
    ino = inode_of(txn, ino, wanted)
    inode = records.find_inode(txn, ino)
    if inode is None or not inode.is_regular:
        raise Lost(f"{wanted.file}: replaced by something else before the checkpoint was in the store")
    row = publish.object_of(txn, ino)
    if row is None or publish.is_dirty(txn, ino) or inode.flags & schema.DATA_LOCAL:
        return None
    key = publish.key_of_path(txn, path + b"/" + (decode_key(wanted.file) or b""), False)
    etag = dict(row.all_keys()).get(key)
    if etag is None or row.size_bytes != inode.size_bytes:
        return None
    content_id = inode.content_id if row.size_bytes else NO_CONTENT
    ref = ObjectRef(content_id, key, etag, row.size_bytes, row.version_id if key == row.key else None)
    return Ready(wanted.file, wanted.rank, ref, row.mtime_ns)


def inode_of(txn: ReadTransaction, ino: int, wanted: PendingFile) -> int:
    """Raises ``Lost`` if there is no such name below directory ``ino``."""
    for part in (decode_key(wanted.file) or b"").split(b"/"):
        entry = records.find_entry(txn, ino, part)
        if entry is None:
            raise Lost(f"{wanted.file}: removed before the checkpoint was in the store")
        ino = entry[0]
    return ino


def files_below(txn: ReadTransaction, ino: int) -> list[str]:
    """Every regular file, as keys below the directory have it."""
    found: list[str] = []
    waiting: list[tuple[bytes, int]] = [(b"", ino)]
    while waiting:
        above, directory = waiting.pop()
        for _, name, child, kind in records.iter_entries(txn, directory):
            path = above + b"/" + name if above else name
            if kind == stat.S_IFDIR:
                waiting.append((path, child))
            elif kind == stat.S_IFREG:
                found.append(encode_path(path))
    return sorted(found)


def ranks_of(txn: ReadTransaction, ino: int) -> dict[str, int]:
    """Which rank wrote which file, as the ranks have left it in attributes of the directory."""
    found: dict[str, int] = {}
    for name in tree.list_xattrs(txn, ino):
        number = name.removeprefix(RANK_MARK)
        if number == name or not number.isdigit():
            continue
        try:
            told = msgspec.json.decode(tree.get_xattr(txn, ino, name), type=_RankFiles)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        found.update({encode_path(os.fsencode(file)): int(number) for file in told.files})
    return found
