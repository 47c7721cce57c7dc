"""Make a directory what another one was in a snapshot: step by step, each step a part of one transaction.

What is there already and is the same stays as it is, with its inode: names are compared, then files by the
identity of their bytes. So doing it again does only what is left to do, and nothing has to be remembered of
where an interrupted rebuild stood. A file that differs gets another inode, with its bytes on loan
(``loans``), and its name changes from one to the other in one transaction: nobody meets half a file. Only
attributes are changed in place.

Names that are one file in the snapshot become one file again; what stands for it is kept in table job.

A step works off a stack of frames (``Frame``) and returns what is left of it. Functions of a transaction.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from tierfs.errors import NotFound, StaleContent
from tierfs.namespace import loans, past, publish, records, schema, tree
from tierfs.namespace.listing import Defaults, Invalidation
from tierfs.namespace.names import drop_name, touch_directory
from tierfs.namespace.sameness import attributes_of, same_attributes, same_file
from tierfs.namespace.schema import FOREVER_NS, SnapshotRow, pack_u64, pack_u64_pair, unpack_u64
from tierfs.namespace.transaction import ReadTransaction, WriteTransaction
from tierfs.namespace.xattr import remove_all_xattrs
from tierfs.types import NO_CONTENT, Inode

PAGE = 100
ENTRIES, SURPLUS, ATTRIBUTES = range(3)


@dataclass(frozen=True, slots=True)
class Directory:
    """``ino`` becomes what ``old_ino`` was. ``path``: below the top. ``descends``: also what both have."""

    path: bytes
    old_ino: int
    ino: int
    descends: bool = True
    phase: int = ENTRIES
    after: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a directory, which what had it before has lost by now."""

    directory: Directory
    name: bytes


@dataclass(frozen=True, slots=True)
class Removal:
    """Directory ``ino`` goes, with all that is in it. ``parent_ino`` 0: it has no name."""

    parent_ino: int
    name: bytes
    ino: int


Frame = Directory | Entry | Removal


@dataclass(frozen=True, slots=True)
class Plan:
    """``number``: of the job. ``is_hidden``: nobody can see it yet, and nothing of it is to be published."""

    row: SnapshotRow
    number: int
    is_hidden: bool
    defaults: Defaults
    now_ns: int


@dataclass(slots=True)
class Step:
    """What a step has done, and ``frames``: what is left to do.

    ``dirty``: inodes to be announced to the publisher. ``touched``: inodes whose attributes are others now.
    ``missing``: (path, reason) of what cannot be had any more, and is left as it is.
    """

    frames: list[Frame]
    looked_at: int = 0
    made: int = 0
    replaced: int = 0
    removed: int = 0
    changed: int = 0
    dirty: list[int] = field(default_factory=list)
    touched: list[int] = field(default_factory=list)
    invalidations: list[Invalidation] = field(default_factory=list)
    missing: list[tuple[bytes, str]] = field(default_factory=list)

    @property
    def changes(self) -> int:
        return self.made + self.replaced + self.removed + self.changed


def step(txn: WriteTransaction, plan: Plan, frames: Sequence[Frame], *, looks: int, changes: int) -> Step:
    """Go on until about ``looks`` entries have been looked at, or ``changes`` made."""
    done = Step(list(frames))
    while done.frames and done.looked_at < looks and done.changes < changes:
        frame = done.frames.pop()
        if isinstance(frame, Directory):
            _directory(txn, plan, frame, done)
        elif isinstance(frame, Entry):
            found = past.entry(txn, plan.row, frame.directory.old_ino, frame.name)
            if found is not None and _is_there(txn, frame.directory.ino):
                done.frames += _bring(txn, plan, frame.directory, frame.name, found[2], done)
        else:
            _remove_directory(txn, plan, frame, done)
    return done


def forget_links(txn: WriteTransaction, number: int, limit: int) -> bool:
    """The job has ended: drop what it remembered of hard links. False: there is more."""
    prefix = b"l" + pack_u64(number)
    cursor = txn.cursor(txn.tables.job)
    for _ in range(limit):
        if not (cursor.set_range(prefix) and cursor.key().startswith(prefix)):
            return True
        cursor.delete()
    return False


# -- directories ------------------------------------------------------------------------------------------


def _is_there(txn: ReadTransaction, ino: int) -> bool:
    inode = records.find_inode(txn, ino)
    return inode is not None and inode.is_dir and inode.nlink > 0


def _directory(txn: WriteTransaction, plan: Plan, frame: Directory, done: Step) -> None:
    if not _is_there(txn, frame.ino):
        return  # somebody has removed it meanwhile
    if frame.phase == ATTRIBUTES:
        old = past.inode(txn, plan.row, frame.old_ino)
        _restore_attributes(txn, plan, old, records.get_inode(txn, frame.ino), done)
        return
    below: list[Frame] = []
    # A page is taken before anything changes: cursors do not like to be changed under.
    if frame.phase == ENTRIES:
        page = list(islice(past.entries(txn, plan.row, frame.old_ino, frame.after), PAGE))
        for _, name, old_ino, _ in page:
            below += _bring(txn, plan, frame, name, old_ino, done)
        following = ATTRIBUTES if plan.is_hidden else SURPLUS
    else:
        page = list(islice(records.iter_entries(txn, frame.ino, frame.after), PAGE))
        for _, name, ino, kind in page:
            if past.entry(txn, plan.row, frame.old_ino, name) is not None:
                continue
            if kind == stat.S_IFDIR:
                below.append(Removal(frame.ino, name, ino))
            else:
                _unlink(txn, plan, frame.ino, name, done)
        following = ATTRIBUTES
    done.looked_at += len(page)
    if len(page) == PAGE:
        done.frames.append(replace(frame, after=page[-1][0]))
    else:
        done.frames.append(replace(frame, phase=following, after=0))
    done.frames += below


def _remove_directory(txn: WriteTransaction, plan: Plan, frame: Removal, done: Step) -> None:
    if frame.parent_ino:
        found = records.find_entry(txn, frame.parent_ino, frame.name)
        if found is None or found[0] != frame.ino:
            return
    page = list(islice(records.iter_entries(txn, frame.ino), PAGE))
    done.looked_at += len(page) + 1
    if page:
        done.frames.append(frame)
        for _, name, ino, kind in page:
            if kind == stat.S_IFDIR:
                done.frames.append(Removal(frame.ino, name, ino))
            else:
                _unlink(txn, plan, frame.ino, name, done)
        return
    done.removed += 1
    if frame.parent_ino:
        gone = tree.rmdir(txn, frame.parent_ino, frame.name, now_ns=plan.now_ns)
        done.dirty.append(frame.parent_ino)
        done.invalidations.append(Invalidation(frame.parent_ino, frame.name, gone.ino))
    else:
        inode = records.find_inode(txn, frame.ino)
        if inode is not None:
            drop_name(txn, inode, plan.now_ns)
    if plan.is_hidden:
        tree.reap(txn, frame.ino)


def _unlink(txn: WriteTransaction, plan: Plan, parent_ino: int, name: bytes, done: Step) -> None:
    inode = tree.unlink(txn, parent_ino, name, now_ns=plan.now_ns)
    done.removed += 1
    done.dirty += [parent_ino, inode.ino]
    done.invalidations.append(Invalidation(parent_ino, name, inode.ino))
    if plan.is_hidden and not inode.nlink:
        tree.reap(txn, inode.ino)


# -- names ------------------------------------------------------------------------------------------------


def _bring(
    txn: WriteTransaction, plan: Plan, frame: Directory, name: bytes, old_ino: int, done: Step
) -> list[Frame]:
    """Let ``name`` be what it was. Returns what is left to do below it, the last first."""
    try:
        old = past.inode(txn, plan.row, old_ino)
    except NotFound:
        return []
    path = frame.path + b"/" + name if frame.path else name
    found = records.find_entry(txn, frame.ino, name)
    here = records.find_inode(txn, found[0]) if found is not None else None
    if not old.is_dir:
        if here is not None and here.is_dir:
            return [Entry(frame, name), Removal(frame.ino, name, here.ino)]
        _bring_file(txn, plan, frame.ino, name, old, here, path, done)
        return []
    if not old.listed_until_ns:
        done.missing.append((path + b"/", "not listed when the snapshot was made"))
        return []
    if here is not None and here.is_dir:
        return [Directory(path, old.ino, here.ino)] if frame.descends else []
    if here is not None:
        _unlink(txn, plan, frame.ino, name, done)
    ino = make_directory(txn, plan, old)
    records.put_entry(txn, frame.ino, name, ino, stat.S_IFDIR, seq=ino)
    touch_directory(txn, records.get_inode(txn, frame.ino), plan.now_ns, subdirectories=1)
    done.made += 1
    done.invalidations.append(Invalidation(frame.ino, name, 0))
    if not plan.is_hidden:
        publish.mark_created(txn, ino, plan.now_ns)
        done.dirty.append(ino)
    return [Directory(path, old.ino, ino)]


def make_directory(txn: WriteTransaction, plan: Plan, old: Inode) -> int:
    """An empty directory without a name, with mode and owner of ``old``."""
    ino = records.new_id(txn)
    mode, uid, gid = attributes_of(old, plan.defaults)
    inode = schema.replace_inode(
        old, ino=ino, mode=mode, uid=uid, gid=gid, nlink=2, size_bytes=0, ctime_ns=plan.now_ns,
        generation=records.fs_generation(txn),
        flags=schema.DIR_LOCAL | schema.UNPUBLISHED | schema.META_KNOWN, content_id=NO_CONTENT,
        valid_until_ns=FOREVER_NS, listed_until_ns=plan.now_ns + txn.tables.ttl_ns,
    )  # fmt: skip
    records.add_inode(txn, inode)
    return ino


def _bring_file(
    txn: WriteTransaction,
    plan: Plan,
    parent_ino: int,
    name: bytes,
    old: Inode,
    here: Inode | None,
    path: bytes,
    done: Step,
) -> None:
    linked = _stands_for(txn, plan, old)
    if linked is not None:
        if here is None or here.ino != linked.ino:
            _add_name(txn, plan, parent_ino, name, here, linked, done)
        elif here.ino == old.ino:
            _restore_attributes(txn, plan, old, here, done)
        return
    if here is not None and same_file(txn, plan.row, old, here):
        _note_link(txn, plan, old, here.ino)
        _restore_attributes(txn, plan, old, here, done)
        return
    try:
        inode = _make_file(txn, plan, old)
    except (NotFound, StaleContent) as error:
        done.missing.append((path, str(error)))
        return
    _put_name(txn, plan, parent_ino, name, here, inode, done)
    if not plan.is_hidden:
        publish.mark_created(txn, inode.ino, plan.now_ns)
        done.dirty.append(inode.ino)
    _note_link(txn, plan, old, inode.ino)


def _make_file(txn: WriteTransaction, plan: Plan, old: Inode) -> Inode:
    """A file, link or special file as ``old`` was, with one name that is still to be written.

    Raises ``StaleContent``, before anything is written: its bytes cannot be had.
    """
    ref = past.content(txn, plan.row, old.ino) if old.is_regular else None
    target = past.readlink(txn, plan.row, old.ino) if old.is_symlink else None
    xattrs = past.xattrs(txn, plan.row, old.ino)
    ino = records.new_id(txn)
    content_id = NO_CONTENT
    held = past.object_row(txn, plan.row, old.ino) if ref is not None else None
    if held is not None:
        content_id = loans.content_id_of_loan(ino, held)
        loans.lend(txn, ino, plan.row, old.ino)
    mode, uid, gid = attributes_of(old, plan.defaults)
    flags = schema.UNPUBLISHED | schema.META_KNOWN | (schema.HAS_XATTR if xattrs else 0)
    inode = schema.replace_inode(
        old, ino=ino, mode=mode, uid=uid, gid=gid, nlink=1, ctime_ns=plan.now_ns,
        generation=records.fs_generation(txn), flags=flags, content_id=content_id,
        valid_until_ns=FOREVER_NS, listed_until_ns=0,
    )  # fmt: skip
    records.add_inode(txn, inode)
    if target is not None:
        txn.put(pack_u64(ino), target, db=txn.tables.symlink)
    for name, value in xattrs.items():
        txn.put(pack_u64(ino) + name, value, db=txn.tables.xattr)
    return inode


def _put_name(
    txn: WriteTransaction,
    plan: Plan,
    parent_ino: int,
    name: bytes,
    here: Inode | None,
    inode: Inode,
    done: Step,
) -> None:
    """``name`` means ``inode`` from now on, and not ``here``; its cookie stays."""
    found = records.find_entry(txn, parent_ino, name)
    kind = stat.S_IFMT(inode.mode)
    if found is None:
        # As ``tree.create`` does: its first name has the number of the inode for a cookie.
        records.put_entry(txn, parent_ino, name, inode.ino, kind, seq=inode.ino if inode.nlink == 1 else None)
        done.made += 1
    else:
        records.delete_parent_row(txn, parent_ino, name, found[0])
        records.put_entry(txn, parent_ino, name, inode.ino, kind, seq=found[1])
        done.replaced += 1
    touch_directory(txn, records.get_inode(txn, parent_ino), plan.now_ns)
    if here is not None:
        drop_name(txn, here, plan.now_ns)
        done.dirty.append(here.ino)
    done.invalidations.append(Invalidation(parent_ino, name, here.ino if here is not None else 0))


# -- hard links -------------------------------------------------------------------------------------------


def _add_name(
    txn: WriteTransaction,
    plan: Plan,
    parent_ino: int,
    name: bytes,
    here: Inode | None,
    linked: Inode,
    done: Step,
) -> None:
    linked = schema.replace_inode(
        linked, nlink=linked.nlink + 1, ctime_ns=plan.now_ns, valid_until_ns=FOREVER_NS
    )
    schema.put_inode(txn, linked)
    _put_name(txn, plan, parent_ino, name, here, linked, done)
    if not plan.is_hidden:
        publish.mark_dirty(txn, linked.ino, schema.MOVED, plan.now_ns)
        done.dirty.append(linked.ino)
    done.touched.append(linked.ino)


def _stands_for(txn: WriteTransaction, plan: Plan, old: Inode) -> Inode | None:
    """The inode that has the other names of ``old`` already; None: there is none (yet), or it needs none."""
    if old.nlink < 2 or old.is_dir:
        return None
    raw = txn.get(_link_key(plan, old.ino), None, txn.tables.job)
    if raw is not None:
        inode = records.find_inode(txn, unpack_u64(raw)[0])
        if inode is not None and 0 < inode.nlink < schema.LINK_MAX:
            return inode
        return None
    live = records.find_inode(txn, old.ino) if not plan.is_hidden else None
    if live is None or not live.nlink or not same_file(txn, plan.row, old, live):
        return None
    for parent, name in records.names_of(txn, live.ino):
        found = past.entry(txn, plan.row, parent, name)
        if found is not None and found[2] == old.ino:
            _note_link(txn, plan, old, live.ino)
            return live
    return None


def _note_link(txn: WriteTransaction, plan: Plan, old: Inode, ino: int) -> None:
    if old.nlink > 1:
        txn.put(_link_key(plan, old.ino), pack_u64(ino), db=txn.tables.job)


def _link_key(plan: Plan, ino: int) -> bytes:
    return b"l" + pack_u64_pair(plan.number, ino)


# -- attributes -------------------------------------------------------------------------------------------


def _restore_attributes(txn: WriteTransaction, plan: Plan, old: Inode, here: Inode, done: Step) -> None:
    """Mode, owner, times and extended attributes; ctime says when that was."""
    if same_attributes(txn, plan.row, old, here, plan.defaults):
        return
    flags = here.flags | schema.META_KNOWN
    if (old.flags | here.flags) & schema.HAS_XATTR:
        remove_all_xattrs(txn, here.ino)
        wanted = past.xattrs(txn, plan.row, old.ino)
        for name, value in wanted.items():
            txn.put(pack_u64(here.ino) + name, value, db=txn.tables.xattr)
        flags = flags | schema.HAS_XATTR if wanted else flags & ~schema.HAS_XATTR
    mode, uid, gid = attributes_of(old, plan.defaults)
    owned = attributes_of(here, plan.defaults)
    schema.put_inode(
        txn,
        schema.replace_inode(
            here, mode=mode, uid=uid, gid=gid, flags=flags,
            atime_ns=old.atime_ns, mtime_ns=old.mtime_ns, ctime_ns=plan.now_ns,
        ),
    )  # fmt: skip
    done.changed += 1
    done.touched.append(here.ino)
    # As when entries come and go, the mtime of a directory alone is no reason to write its marker.
    in_store = owned != (mode, uid, gid) or (not here.is_dir and here.mtime_ns != old.mtime_ns)
    if in_store and not plan.is_hidden:
        publish.mark_dirty(txn, here.ino, schema.ATTRIBUTES, plan.now_ns)
        done.dirty.append(here.ino)
