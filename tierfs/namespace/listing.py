"""A listing of the bucket, applied to a directory as a difference.

What was published or changed here and is not in the bucket yet is never touched: a dirty inode, an object
that lies under another key than its name says (a rename on its way), an object row that the store confirmed
after the listing began. Keys that are doomed, or that another inode owns, are not shown.

A changed object gives the *name* a new inode; the old one becomes an orphan, so that whoever has it open
reads on in the version that it opened. The sequence for one directory is ``apply_entries`` for each page or
part of one, ``sweep`` until it is done, ``finish``. A name is missing if, after the pages, its inode is
valid for less long than this listing makes it.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass, field

from tierfs.namespace import publish, records, schema
from tierfs.namespace.names import drop_name
from tierfs.namespace.schema import FOREVER_NS, ObjectRow, pack_u64
from tierfs.namespace.transaction import ReadTransaction, WriteTransaction
from tierfs.namespace.xattr import copy_xattrs
from tierfs.store.keys import encode_path
from tierfs.types import NO_CONTENT, ContentId, Inode, ObjectInfo, content_id_of_object


@dataclass(frozen=True, slots=True)
class Defaults:
    """Owner and permission bits of what carries none."""

    uid: int
    gid: int
    file_mode: int
    dir_mode: int


@dataclass(frozen=True, slots=True)
class Invalidation:
    """``name`` in that directory means something else now, or nothing.

    ``old_ino``: the inode that it meant, now perhaps without a name (see ``tree.reap``); 0: it meant none.
    """

    parent_ino: int
    name: bytes
    old_ino: int


@dataclass(frozen=True, slots=True)
class Listing:
    """One listing: when it began, and until when what it says is believed (wall clock)."""

    started_ns: int
    valid_until_ns: int
    now_ns: int
    defaults: Defaults
    keeps_markers: bool = True
    """Whether the store lists empty directories that were made here."""
    began: int = 0
    """Deletions with a higher number (``Departures``) may be missing in what it says."""


@dataclass(slots=True)
class Changes:
    """What applying did. ``deferred``: files where a directory is known that this page did not show."""

    invalidations: list[Invalidation] = field(default_factory=list)
    deferred: list[tuple[bytes, ObjectInfo]] = field(default_factory=list)
    gone_directories: list[int] = field(default_factory=list)
    shadowed: list[str] = field(default_factory=list)
    added: int = 0
    removed: int = 0

    def extend(self, other: Changes) -> None:
        self.invalidations += other.invalidations
        self.deferred += other.deferred
        self.gone_directories += other.gone_directories
        self.shadowed += other.shadowed
        self.added += other.added
        self.removed += other.removed


def apply_entries(
    txn: WriteTransaction,
    directory: Inode,
    prefix: str,
    dirs: Iterable[bytes],
    files: Iterable[tuple[bytes, ObjectInfo]],
    listing: Listing,
) -> Changes:
    """Add and change entries; removes none. ``prefix``: the key of the directory, empty or ending in ``/``.

    Give at most a few thousand entries, so that other commits need not wait long.
    """
    changes = Changes()
    any_doomed = publish.doomed_count(txn) > 0
    departures = txn.tables.departures
    if departures.covers(prefix, listing.began) or (
        any_doomed and publish.covering_prefix(txn, prefix) is not None
    ):
        # A directory of that name was renamed away and a new one made: what lies here is still the old one's.
        return changes
    subdirectories = 0
    for name in dirs:
        if any_doomed and _is_left_behind(txn, directory.ino, prefix, name):
            continue
        subdirectories += _apply_directory(txn, directory, prefix, name, listing, changes)
    for name, info in files:
        if departures.has_key(info.key, listing.began) or (any_doomed and _is_doomed(txn, info)):
            continue
        _apply_file(txn, directory.ino, name, info, listing, changes)
    if subdirectories or changes.added:
        note_changed(txn, directory.ino, listing, subdirectories, set_flags=schema.DIR_SEEN)
    return changes


def resolve_deferred(
    txn: WriteTransaction, directory: Inode, deferred: list[tuple[bytes, ObjectInfo]], listing: Listing
) -> Changes:
    """After all pages and the sweep: files whose name was a directory's. If it still is, they are hidden."""
    changes = Changes()
    for name, info in deferred:
        found = records.find_entry(txn, directory.ino, name)
        if found is not None and found[2] == stat.S_IFDIR:
            changes.shadowed.append(info.key)
        elif not txn.tables.departures.has_key(info.key, listing.began) and not _is_doomed(txn, info):
            _apply_file(txn, directory.ino, name, info, listing, changes)
    return changes


def sweep(
    txn: WriteTransaction, directory: Inode, prefix: str, listing: Listing, after_seq: int, limit: int
) -> tuple[Changes, int | None]:
    """Remove files that no page showed, among the next ``limit`` entries. Returns where to go on.

    Directories that no page showed are only named in ``gone_directories``: ``subtree`` removes them.
    """
    changes = Changes()
    looked_at = 0
    last: int | None = None
    gone: list[tuple[bytes, int, int, Inode]] = []
    for seq, name, ino, _ in records.iter_entries(txn, directory.ino, after_seq):
        if looked_at >= limit:
            break
        looked_at += 1
        last = seq
        inode = records.find_inode(txn, ino)
        if inode is None or inode.valid_until_ns >= listing.valid_until_ns:
            continue
        gone.append((name, seq, ino, inode))
    else:
        last = None
    for name, seq, ino, inode in gone:
        if not is_removable(txn, inode, key_in(prefix, name, inode.is_dir), listing):
            keep(txn, inode, listing)
        elif inode.is_dir:
            changes.gone_directories.append(ino)
        else:
            forget_name(txn, directory.ino, name, seq, inode, listing, changes)
    if changes.removed:
        note_changed(txn, directory.ino, listing, 0)
    return changes, last


def finish(txn: WriteTransaction, directory_ino: int, marker: ObjectInfo | None, listing: Listing) -> None:
    """The listing of this directory is complete: until ``valid_until_ns`` it need not be asked again."""
    directory = records.find_inode(txn, directory_ino)
    if directory is None or not directory.nlink:
        return
    valid_until_ns = max(directory.valid_until_ns, listing.valid_until_ns)
    schema.put_inode(
        txn,
        schema.replace_inode(
            directory, valid_until_ns=valid_until_ns, listed_until_ns=listing.valid_until_ns
        ),
    )
    note_marker(txn, directory_ino, marker, listing)


def note_marker(
    txn: WriteTransaction, directory_ino: int, marker: ObjectInfo | None, listing: Listing
) -> None:
    """Whether the directory has an object of its own, by a listing that would have shown it."""
    row = publish.object_of(txn, directory_ino)
    if row is not None and (row.confirmed_ns > listing.started_ns or publish.is_dirty(txn, directory_ino)):
        return
    if marker is not None:
        if txn.tables.departures.has_key(marker.key, listing.began):
            return
        if publish.owner_of_key(txn, marker.key) not in (None, directory_ino) or _is_doomed(txn, marker):
            return
        if row is None or row.etag != marker.etag or row.key != marker.key:
            publish.put_object_row(txn, directory_ino, row_of(marker, listing))
    elif row is not None and publish.keys_agree(txn, directory_ino):
        publish.disown(txn, directory_ino, row.key)
        directory = records.find_inode(txn, directory_ino)
        if directory is not None:
            # Others removed the marker: from now on the bucket says whether the directory exists.
            schema.put_inode(txn, schema.replace_inode(directory, flags=directory.flags | schema.DIR_SEEN))


# -- shared with ``subtree`` and ``point`` -----------------------------------------------------------------


def key_in(prefix: str, name: bytes, is_dir: bool) -> str:
    return prefix + encode_path(name) + ("/" if is_dir else "")


def is_removable(txn: ReadTransaction, inode: Inode, key: str, listing: Listing) -> bool:
    """Whether an entry that the bucket does not show may go: it was there, and nothing here is ahead."""
    if inode.valid_until_ns == FOREVER_NS or publish.is_dirty(txn, inode.ino):
        return False
    if inode.flags & schema.DIR_LOCAL and not listing.keeps_markers:
        return False
    row = publish.object_of(txn, inode.ino)
    if row is None:
        # A directory that others made has no object; everything else without one is only here.
        return inode.is_dir and bool(inode.flags & schema.DIR_SEEN)
    if row.confirmed_ns > listing.started_ns:
        return False
    return any(known == key for known, _ in row.all_keys())


def keep(txn: WriteTransaction, inode: Inode, listing: Listing) -> None:
    """The local state stands although the bucket does not show it."""
    if inode.valid_until_ns < listing.valid_until_ns:
        schema.put_inode(txn, schema.replace_inode(inode, valid_until_ns=listing.valid_until_ns))


def forget_name(
    txn: WriteTransaction,
    parent_ino: int,
    name: bytes,
    seq: int,
    inode: Inode,
    listing: Listing,
    changes: Changes,
) -> None:
    """Remove an entry because the bucket did. Nothing is doomed: there is nothing left to delete.

    The parent's record is not touched. The inode becomes an orphan unless it has other names.
    """
    records.delete_entry(txn, parent_ino, name, inode.ino, seq)
    lose_name(txn, inode, publish.key_of_path(txn, _path(txn, parent_ino, name), inode.is_dir), listing)
    changes.invalidations.append(Invalidation(parent_ino, name, inode.ino))
    changes.removed += 1


def lose_name(txn: WriteTransaction, inode: Inode, key: str, listing: Listing) -> None:
    """One name less, with the object at ``key`` gone or somebody else's now; the rest stays as it is."""
    if inode.nlink > 1 and not inode.is_dir:
        publish.disown(txn, inode.ino, key)
        schema.put_inode(txn, schema.replace_inode(inode, nlink=inode.nlink - 1, ctime_ns=listing.now_ns))
        return
    # An orphan keeps its row for open readers, but owns no key: then nothing is doomed.
    row = publish.object_of(txn, inode.ino)
    publish.disown(txn, inode.ino, key)
    drop_name(txn, inode, listing.now_ns)
    if row is not None:
        txn.put(pack_u64(inode.ino), schema.encode_row(row), db=txn.tables.object)


def new_inode(
    txn: WriteTransaction, info: ObjectInfo | None, listing: Listing, *, like: Inode | None = None
) -> Inode:
    """The record, not yet written, of an object (None: a directory) that others made.

    ``like``: the inode that it replaces, whose owner, permission bits and attributes it keeps.
    """
    defaults = listing.defaults
    mode = stat.S_IFDIR | defaults.dir_mode if info is None else stat.S_IFREG | defaults.file_mode
    uid, gid, flags = defaults.uid, defaults.gid, 0
    if like is not None and like.is_regular:
        mode = stat.S_IFMT(mode) | stat.S_IMODE(like.mode)
        uid, gid, flags = like.uid, like.gid, like.flags & (schema.HAS_XATTR | schema.META_KNOWN)
    time_ns = listing.now_ns if info is None else info.mtime_ns
    return Inode(
        ino=records.new_id(txn), mode=mode, uid=uid, gid=gid, nlink=2 if info is None else 1, rdev=0,
        size_bytes=0 if info is None else info.size_bytes,
        atime_ns=time_ns, mtime_ns=time_ns, ctime_ns=time_ns, generation=records.fs_generation(txn),
        flags=flags if info is not None else schema.DIR_SEEN | schema.IN_STORE,
        content_id=NO_CONTENT if info is None or not info.size_bytes else _content_id(info),
        valid_until_ns=listing.valid_until_ns, listed_until_ns=0,
    )  # fmt: skip


def replace_file(
    txn: WriteTransaction,
    parent_ino: int,
    name: bytes,
    seq: int,
    old: Inode,
    new: Inode,
    row: ObjectRow | None,
    listing: Listing,
    changes: Changes,
) -> None:
    """Let ``name`` mean ``new`` instead of ``old``, with the same cookie. Both are no directories, or ``new``
    is one: then the caller counts it."""
    key = publish.key_of_path(txn, _path(txn, parent_ino, name), False)
    records.add_inode(txn, new)
    if new.flags & schema.HAS_XATTR:
        copy_xattrs(txn, old.ino, new.ino)
    records.delete_parent_row(txn, parent_ino, name, old.ino)
    records.put_entry(txn, parent_ino, name, new.ino, stat.S_IFMT(new.mode), seq=seq)
    lose_name(txn, old, key, listing)
    if row is not None:
        publish.put_object_row(txn, new.ino, row)
    changes.invalidations.append(Invalidation(parent_ino, name, old.ino))


def note_changed(
    txn: WriteTransaction, directory_ino: int, listing: Listing, subdirectories: int, *, set_flags: int = 0
) -> None:
    """Entries came or went. The first listing of a directory is no change of it."""
    directory = records.find_inode(txn, directory_ino)
    if directory is None:
        return
    times = {}
    if directory.listed_until_ns:
        times = {"mtime_ns": listing.now_ns, "ctime_ns": listing.now_ns}
    schema.put_inode(
        txn,
        schema.replace_inode(
            directory, nlink=directory.nlink + subdirectories, flags=directory.flags | set_flags, **times
        ),
    )


# -- private -------------------------------------------------------------------------------------------------


def _apply_directory(
    txn: WriteTransaction, directory: Inode, prefix: str, name: bytes, listing: Listing, changes: Changes
) -> int:
    """Returns how many subdirectories there are more than before."""
    found = records.find_entry(txn, directory.ino, name)
    if found is None or found[2] != stat.S_IFDIR:
        marker_key = key_in(prefix, name, True)
        if txn.tables.departures.has_below(marker_key, listing.began) or publish.is_prefix_needed(
            txn, marker_key
        ):
            # Removed or emptied here: what makes it show up is still to be deleted or moved away, or was so
            # since the bucket was asked.
            return 0
    if found is None:
        new = new_inode(txn, None, listing)
        records.add_inode(txn, new)
        records.put_entry(txn, directory.ino, name, new.ino, stat.S_IFDIR, seq=new.ino)
        changes.added += 1
        return 1
    known = records.find_inode(txn, found[0])
    if known is None:
        return 0
    if known.is_dir:
        # That the bucket shows a directory which was made here says nothing: we put it there.
        flags = known.flags | schema.IN_STORE | (0 if known.flags & schema.DIR_LOCAL else schema.DIR_SEEN)
        valid_until_ns = max(known.valid_until_ns, listing.valid_until_ns)
        if flags != known.flags or valid_until_ns != known.valid_until_ns:
            schema.put_inode(txn, schema.replace_inode(known, flags=flags, valid_until_ns=valid_until_ns))
        return 0
    key = key_in(prefix, name, False)
    if known.valid_until_ns == FOREVER_NS or not is_removable(txn, known, key, listing):
        changes.shadowed.append(key + "/")
        return 0
    changes.shadowed.append(key)
    replace_file(
        txn, directory.ino, name, found[1], known, new_inode(txn, None, listing), None, listing, changes
    )
    return 1


def _apply_file(
    txn: WriteTransaction,
    parent_ino: int,
    name: bytes,
    info: ObjectInfo,
    listing: Listing,
    changes: Changes,
) -> None:
    found = records.find_entry(txn, parent_ino, name)
    owner = publish.owner_of_key(txn, info.key)
    if found is None:
        if owner is None:
            new = new_inode(txn, info, listing)
            records.add_inode(txn, new)
            records.put_entry(txn, parent_ino, name, new.ino, stat.S_IFREG, seq=new.ino)
            publish.put_object_row(txn, new.ino, row_of(info, listing))
            changes.added += 1
        return
    ino, seq, kind = found
    if kind == stat.S_IFDIR:
        known_dir = records.find_inode(txn, ino)
        if known_dir is not None and known_dir.valid_until_ns >= listing.valid_until_ns:
            changes.shadowed.append(info.key)
        else:
            changes.deferred.append((name, info))
        return
    known = records.find_inode(txn, ino)
    if known is None or owner not in (None, ino):
        return
    if known.valid_until_ns == FOREVER_NS and publish.is_dirty(txn, ino):
        return
    row = publish.object_of(txn, ino)
    if row is not None and row.confirmed_ns > listing.started_ns:
        return
    if row is not None and owner is None:
        # Its object lies under another key: a rename on its way. What is here now is somebody else's.
        return
    if row is not None and (info.key, info.etag) in row.all_keys() and row.size_bytes == info.size_bytes:
        if known.valid_until_ns < listing.valid_until_ns or known.valid_until_ns == FOREVER_NS:
            schema.put_inode(txn, schema.replace_inode(known, valid_until_ns=listing.valid_until_ns))
        return
    new = new_inode(txn, info, listing, like=known)
    replace_file(txn, parent_ino, name, seq, known, new, row_of(info, listing), listing, changes)


def _is_left_behind(txn: WriteTransaction, parent_ino: int, prefix: str, name: bytes) -> bool:
    """Whether a prefix shows up only because a directory was renamed away from it, and no other is there."""
    if publish.doomed_row(txn, key_in(prefix, name, True), prefix=True) is None:
        return False
    found = records.find_entry(txn, parent_ino, name)
    return found is None or found[2] != stat.S_IFDIR


def _is_doomed(txn: WriteTransaction, info: ObjectInfo) -> bool:
    """Whether a key is only waiting to be deleted. Somebody else's newer object under it is spared."""
    row = publish.doomed_row(txn, info.key)
    if row is None:
        return False
    if row.etag and row.etag != info.etag and not publish.is_key_needed(txn, info.key):
        publish.forget_doomed(txn, row)
        return False
    return True


def _path(txn: ReadTransaction, parent_ino: int, name: bytes) -> bytes:
    above = records.path_of(txn, parent_ino)
    return above + b"/" + name if above else name


def _content_id(info: ObjectInfo) -> ContentId:
    return content_id_of_object(info.key, info.etag, info.size_bytes, info.version_id)


def row_of(info: ObjectInfo, listing: Listing) -> ObjectRow:
    return ObjectRow(
        key=info.key, etag=info.etag, version_id=info.version_id, size_bytes=info.size_bytes,
        mtime_ns=info.mtime_ns, confirmed_ns=listing.started_ns,
    )  # fmt: skip
