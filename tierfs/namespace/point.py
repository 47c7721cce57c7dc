"""What one HEAD said, applied to one name: the object's user metadata come along."""

from __future__ import annotations

import stat

from tierfs.namespace import publish, records, schema
from tierfs.namespace.listing import (
    Changes,
    Listing,
    apply_entries,
    forget_name,
    is_removable,
    keep,
    key_in,
    new_inode,
    note_changed,
    replace_file,
    row_of,
)
from tierfs.namespace.metadata import Attributes, attributes_of
from tierfs.namespace.schema import pack_u64
from tierfs.namespace.transaction import WriteTransaction
from tierfs.types import NO_CONTENT, Inode, ObjectInfo


def needs_target(info: ObjectInfo) -> bool:
    """Whether the object is a symbolic link, whose target is its body."""
    mode = attributes_of(info.metadata).mode
    return mode is not None and stat.S_ISLNK(mode) and 0 < info.size_bytes <= schema.SYMLINK_MAX_BYTES


def apply_object(
    txn: WriteTransaction,
    directory: Inode,
    prefix: str,
    name: bytes,
    info: ObjectInfo,
    target: bytes | None,
    listing: Listing,
) -> Changes:
    """The object of ``name`` exists. ``target``: its body, if ``needs_target``."""
    changes = apply_entries(txn, directory, prefix, (), [(name, info)], listing)
    found = records.find_entry(txn, directory.ino, name)
    if found is None or found[2] == stat.S_IFDIR:
        return changes
    inode = records.find_inode(txn, found[0])
    row = publish.object_of(txn, found[0])
    if inode is None or row is None or (row.key, row.etag) != (info.key, info.etag):
        return changes
    if inode.flags & schema.META_KNOWN or publish.is_dirty(txn, inode.ino):
        return changes
    attributes = attributes_of(info.metadata)
    if attributes.mode is not None and stat.S_IFMT(attributes.mode) not in (stat.S_IFREG, stat.S_IFDIR):
        _become_special(txn, directory.ino, name, found[1], inode, info, attributes, target, listing, changes)
    else:
        schema.put_inode(txn, _with_attributes(inode, attributes, stat.S_IFREG))
    return changes


def apply_absence(
    txn: WriteTransaction, directory: Inode, prefix: str, name: bytes, listing: Listing
) -> Changes:
    """There is neither an object nor a directory of that name in the bucket. A directory has gone before."""
    changes = Changes()
    found = records.find_entry(txn, directory.ino, name)
    if found is None:
        return changes
    inode = records.find_inode(txn, found[0])
    if inode is None:
        return changes
    if inode.is_dir:
        # ``subtree`` has removed it by now, unless something below it is only here.
        keep(txn, inode, listing)
    elif is_removable(txn, inode, key_in(prefix, name, False), listing):
        forget_name(txn, directory.ino, name, found[1], inode, listing, changes)
        note_changed(txn, directory.ino, listing, 0)
    else:
        keep(txn, inode, listing)
    return changes


def apply_marker(txn: WriteTransaction, ino: int, info: ObjectInfo) -> None:
    """The user metadata of a directory's own object."""
    inode = records.find_inode(txn, ino)
    if inode is None or inode.flags & schema.META_KNOWN or publish.is_dirty(txn, ino):
        return
    schema.put_inode(txn, _with_attributes(inode, attributes_of(info.metadata), stat.S_IFDIR))


def _with_attributes(inode: Inode, attributes: Attributes, kind: int) -> Inode:
    changes: dict[str, int] = {"flags": inode.flags | schema.META_KNOWN}
    if attributes.mode is not None:
        changes["mode"] = kind | stat.S_IMODE(attributes.mode)
    if attributes.uid is not None:
        changes["uid"] = attributes.uid
    if attributes.gid is not None:
        changes["gid"] = attributes.gid
    if attributes.mtime_ns is not None:
        changes["mtime_ns"] = attributes.mtime_ns
    return schema.replace_inode(inode, **changes)


def _become_special(
    txn: WriteTransaction,
    parent_ino: int,
    name: bytes,
    seq: int,
    old: Inode,
    info: ObjectInfo,
    attributes: Attributes,
    target: bytes | None,
    listing: Listing,
    changes: Changes,
) -> None:
    """A listing took it for a file; the metadata say link, fifo, socket or device."""
    kind = stat.S_IFMT(attributes.mode or 0)
    if kind == stat.S_IFLNK and (target is None or b"\0" in target):
        return
    new = _with_attributes(new_inode(txn, info, listing), attributes, kind)
    size_bytes = len(target) if target is not None and kind == stat.S_IFLNK else 0
    new = schema.replace_inode(new, content_id=NO_CONTENT, size_bytes=size_bytes)
    replace_file(txn, parent_ino, name, seq, old, new, row_of(info, listing), listing, changes)
    if kind == stat.S_IFLNK and target is not None:
        txn.put(pack_u64(new.ino), target, db=txn.tables.symlink)
