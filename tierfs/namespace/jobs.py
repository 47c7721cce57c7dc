"""Restores and clones under way: what stands in the namespace of one, from its beginning to its end.

A restore works on a directory that everybody sees. A clone is made in a directory that has no name; when it
is complete it gets one (``attach``), and only then is what is in it announced to the publisher, which cannot
put anything into the store that has no path. That is done by inode number (``announce``), so that nothing is
missed that is renamed meanwhile. A clone that cannot get its name is taken away again.

Functions of a transaction.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass

import msgspec

from tierfs.errors import AlreadyExists, Busy
from tierfs.namespace import past, publish, rebuild, records, schema, snapshots
from tierfs.namespace.listing import Defaults
from tierfs.namespace.names import check_name, touch_directory
from tierfs.namespace.schema import JobRow, SnapshotRow, pack_u64, unpack_inode, unpack_u64
from tierfs.namespace.transaction import ReadTransaction, WriteTransaction


def begin_restore(
    txn: WriteTransaction, row: SnapshotRow, source_ino: int, target_ino: int, path: bytes, now_ns: int
) -> JobRow:
    """``target_ino`` is to become what ``source_ino`` was. Raises ``Busy``, ``NotFound``."""
    check_free(txn)
    records.get_directory(txn, target_ino)
    job = JobRow(
        records.new_id(txn), False, row.epoch, source_ino, target_ino, path, now_ns, schema.JOB_BUILDS
    )
    put(txn, job)
    return job


def begin_clone(
    txn: WriteTransaction,
    row: SnapshotRow,
    source_ino: int,
    parent_ino: int,
    name: bytes,
    path: bytes,
    defaults: Defaults,
    now_ns: int,
) -> JobRow:
    """``name`` in that directory is to become what ``source_ino`` was.

    Raises ``AlreadyExists``, ``Busy``, ``NotFound``, and what ``check_name`` raises.
    """
    check_free(txn)
    _check_place(txn, parent_ino, name)
    number = records.new_id(txn)
    plan = rebuild.Plan(row, number, True, defaults, now_ns)
    target_ino = rebuild.make_directory(txn, plan, past.inode(txn, row, source_ino))
    job = JobRow(
        number, True, row.epoch, source_ino, target_ino, path, now_ns, schema.JOB_BUILDS, parent_ino, name
    )
    put(txn, job)
    return job


def put(txn: WriteTransaction, job: JobRow) -> None:
    txn.put(b"j" + pack_u64(job.number), schema.encode_row(job), db=txn.tables.job)


def with_phase(txn: WriteTransaction, job: JobRow, phase: int) -> JobRow:
    job = msgspec.structs.replace(job, phase=phase)
    put(txn, job)
    return job


def end(txn: WriteTransaction, job: JobRow, limit: int) -> bool:
    """Forget the job. False: call again, there is more to forget."""
    if not rebuild.forget_links(txn, job.number, limit):
        return False
    txn.delete(b"j" + pack_u64(job.number), txn.tables.job)
    snapshots.let_go(txn, job.epoch)
    return True


def attach(txn: WriteTransaction, job: JobRow, now_ns: int) -> JobRow:
    """A clone gets its name. Raises ``AlreadyExists``, ``NotFound`` (the directory above has gone)."""
    _check_place(txn, job.parent_ino, job.name)
    directory = records.get_directory(txn, job.parent_ino)
    records.put_entry(txn, job.parent_ino, job.name, job.target_ino, stat.S_IFDIR)
    touch_directory(txn, directory, now_ns, subdirectories=1)
    last_ino = unpack_u64(txn.get(schema.META_NEXT_ID, None, txn.tables.meta))[0] - 1
    job = msgspec.structs.replace(job, phase=schema.JOB_ANNOUNCES, last_ino=last_ino)
    put(txn, job)
    return job


@dataclass(frozen=True, slots=True)
class Announced:
    """``dirty``: inodes that are to be published now. ``after``: where to go on; None: that was all."""

    dirty: list[int]
    after: int | None


def announce(txn: WriteTransaction, job: JobRow, after: int, limit: int, now_ns: int) -> Announced:
    """Mark what a clone made and nobody has marked yet, among the next ``limit`` inodes."""
    cursor = txn.cursor(txn.tables.inode)
    seen: list[tuple[int, bytes]] = []
    if cursor.set_range(pack_u64(max(after + 1, job.target_ino))):
        for key, value in cursor.iternext(True, True):
            ino = unpack_u64(key[:8])[0]
            if ino > job.last_ino or len(seen) >= limit:
                break
            seen.append((ino, value))
    dirty: list[int] = []
    for ino, value in seen:
        inode = unpack_inode(value)
        if inode.flags & schema.UNPUBLISHED and inode.nlink and not publish.is_dirty(txn, ino):
            publish.mark_created(txn, ino, now_ns)
            dirty.append(ino)
    return Announced(dirty, seen[-1][0] if len(seen) == limit else None)


def check_free(txn: ReadTransaction) -> None:
    """Raises ``Busy`` while another restore or clone makes something."""
    for job in snapshots.jobs(txn):
        if job.phase == schema.JOB_BUILDS:
            what = "clone" if job.is_clone else "restore"
            where = "/" + job.path.decode("utf-8", "backslashreplace")
            raise Busy(f"a {what} to {where} is under way: one at a time")


def _check_place(txn: ReadTransaction, parent_ino: int, name: bytes) -> None:
    check_name(parent_ino, name)
    records.get_directory(txn, parent_ino)
    if records.find_entry(txn, parent_ino, name) is not None:
        raise AlreadyExists(f"{name.decode('utf-8', 'backslashreplace')} exists already")
