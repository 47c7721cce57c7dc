"""A tree made again from a snapshot, on the namespace alone: what is equal afterwards, and what is left over."""

from __future__ import annotations

import random
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.namespace import DIRECTORY, FILE, Namespace, open_namespace
from tierfs.errors import AlreadyExists, Busy, TierfsError
from tierfs.namespace import jobs, loans, publish, rebuild, records, schema, snapshots, sweep, tree
from tierfs.namespace.check import problems
from tierfs.namespace.dump import dump_lines, load_lines
from tierfs.namespace.listing import Defaults
from tierfs.namespace.rebuild import Directory, Frame, Plan
from tierfs.namespace.sameness import survey
from tierfs.namespace.schema import JobRow, SnapshotRow
from tierfs.namespace.transaction import HISTORY_TABLES, ReadTransaction, WriteTransaction
from tierfs.types import ROOT_INO, Inode, ObjectInfo, new_content_id

DEFAULTS = Defaults(uid=1000, gid=1000, file_mode=0o644, dir_mode=0o755)
NAMES = [b"a", b"b", b"c", b"d"]
State = dict[str, tuple[Any, ...]]


class Bucket:
    """What bytes an ETag stands for. A copy has another ETag."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.bytes_of: dict[str, str] = {}
        self._number = 0

    def upload(self, ino: int, bytes_: str, size_bytes: int) -> None:
        """As the publisher does after a PUT or a copy."""
        self._park_others(ino)
        etag = self._new_etag(bytes_)

        def record(txn: WriteTransaction) -> None:
            keys = publish.key_of(txn, ino)
            infos = [ObjectInfo(key, size_bytes, etag, 0, None) for key in keys]
            publish.set_object(txn, ino, infos[0], infos[1:], 1)
            row = publish.dirty_row(txn, ino)
            if row is not None:
                publish.forget_dirty(txn, ino, row.generation)

        self.namespace.change(record)

    def _new_etag(self, bytes_: str) -> str:
        self._number += 1
        self.bytes_of[f"e{self._number}"] = bytes_
        return f"e{self._number}"

    def _park_others(self, ino: int) -> None:
        """No key is overwritten that another file, which has moved, still needs."""
        with self.namespace.db.read() as txn:
            owners = {publish.owner_of_key(txn, key) for key in publish.key_of(txn, ino)} - {None, ino}
            parked = {
                owner: (inode, self.of(txn, inode) if inode.is_regular else "")
                for owner in owners
                if owner is not None and (inode := records.find_inode(txn, owner)) is not None
            }
        for owner, (inode, bytes_) in parked.items():
            info = ObjectInfo(f".tierfs/parked/{owner}", inode.size_bytes, self._new_etag(bytes_), 0, None)

            def record(txn: WriteTransaction, owner: int = owner, info: ObjectInfo = info) -> None:
                if publish.set_object(txn, owner, info, [], 1):
                    publish.mark_dirty(txn, owner, schema.MOVED, 1)

            self.namespace.change(record)

    def write(self, ino: int) -> None:
        """Other bytes, and in the store at once."""
        size_bytes = 1 + self._number
        self.namespace.change(
            lambda txn: tree.set_attributes(
                txn, ino, size_bytes=size_bytes, content_id=new_content_id(), now_ns=self._tick()
            )
        )
        self.upload(ino, f"bytes {self._number}", size_bytes)

    def publish_all(self) -> None:
        """Every file with bytes on loan gets an object of its own, with another ETag; the rest is moved."""
        with self.namespace.db.read() as txn:
            dirty = [row.ino for row in publish.iter_dirty(txn)]
        for ino in dirty:
            with self.namespace.db.read() as txn:
                inode = records.find_inode(txn, ino)
                if inode is None or not inode.nlink or not inode.is_regular:
                    continue
                bytes_ = self.of(txn, inode)
            self.upload(ino, bytes_, inode.size_bytes)

    def of(self, txn: ReadTransaction, inode: Inode) -> str:
        if not inode.size_bytes:
            return ""
        ref = publish.ref_of(txn, inode)
        assert ref is not None
        assert ref.size_bytes == inode.size_bytes
        return self.bytes_of[ref.etag]

    def _tick(self) -> int:
        self.namespace.clock.ns += 1
        return self.namespace.clock.ns


@contextmanager
def with_bucket(directory: Path) -> Iterator[tuple[Namespace, Bucket, int]]:
    """An empty namespace, the bucket below it, and the inode of its one directory, ``top``."""
    with open_namespace(directory) as namespace:
        yield namespace, Bucket(namespace), namespace.mkdir("top").ino


def state_of(namespace: Namespace, bucket: Bucket, top: int) -> State:
    """Everything that a restore promises, by path; names of one inode share a number."""
    found: State = {}
    groups: dict[int, int] = {}
    with namespace.db.read() as txn:
        for path, inode in _walk(txn, top):
            group = groups.setdefault(inode.ino, len(groups)) if inode.nlink > 1 and not inode.is_dir else -1
            found[path] = (
                inode.mode,
                inode.uid,
                inode.gid,
                inode.mtime_ns,
                inode.atime_ns,
                inode.rdev,
                tuple(
                    (name, tree.get_xattr(txn, inode.ino, name)) for name in tree.list_xattrs(txn, inode.ino)
                ),
                tree.readlink(txn, inode.ino) if inode.is_symlink else b"",
                bucket.of(txn, inode) if inode.is_regular else "",
                group,
            )
    return found


def _walk(txn: ReadTransaction, top: int) -> Iterator[tuple[str, Inode]]:
    yield "", tree.get(txn, top)
    waiting = [("", top)]
    while waiting:
        path, directory = waiting.pop(0)
        for name, _, inode in sorted(tree.readdir(txn, directory, 0, 10**6)):
            below = f"{path}/{name.decode()}"
            yield below, inode
            if inode.is_dir:
                waiting.append((below, inode.ino))


class RandomTree:
    """Random changes below one directory."""

    def __init__(self, namespace: Namespace, bucket: Bucket, top: int, seed: int) -> None:
        self.namespace = namespace
        self.bucket = bucket
        self.top = top
        self.chance = random.Random(seed)

    def change(self, count: int) -> None:
        kinds = [self._create] * 6 + [self._mkdir] * 4 + [self._rename] * 4 + [self._write] * 3
        kinds += [self._unlink] * 3 + [self._attributes] * 3 + [self._link] * 2 + [self._xattr] * 2
        kinds += [self._symlink, self._rmdir, self._fifo]
        for _ in range(count):
            self.namespace.clock.advance(1)
            try:
                self.chance.choice(kinds)()
            except TierfsError:
                continue  # as the system call would have failed

    def _directory(self) -> int:
        with self.namespace.db.read() as txn:
            return self.chance.choice([i.ino for _, i in _walk(txn, self.top) if i.is_dir])

    def _file(self) -> tuple[int, bytes, Inode]:
        with self.namespace.db.read() as txn:
            found = [
                (directory.ino, name, inode)
                for _, directory in _walk(txn, self.top)
                if directory.is_dir
                for name, _, inode in tree.readdir(txn, directory.ino, 0, 1000)
                if not inode.is_dir
            ]
        if not found:
            raise AlreadyExists("there is no file")
        return self.chance.choice(found)

    def _name(self) -> bytes:
        return self.chance.choice(NAMES)

    def _create(self) -> None:
        inode = self.namespace.create(
            self._name(), parent=self._directory(), mode=stat.S_IFREG | self.chance.choice([0o600, 0o644])
        )
        if self.chance.random() < 0.8:
            self.bucket.write(inode.ino)

    def _mkdir(self) -> None:
        self.namespace.create(self._name(), parent=self._directory(), mode=DIRECTORY)

    def _symlink(self) -> None:
        self.namespace.create(self._name(), parent=self._directory(), target=self.chance.choice(NAMES))

    def _fifo(self) -> None:
        self.namespace.create(self._name(), parent=self._directory(), mode=stat.S_IFIFO | 0o600)

    def _write(self) -> None:
        inode = self._file()[2]
        if inode.is_regular:
            self.bucket.write(inode.ino)

    def _unlink(self) -> None:
        parent, name, _ = self._file()
        self.namespace.change(lambda txn: tree.unlink(txn, parent, name, now_ns=self.namespace.clock.ns))

    def _rmdir(self) -> None:
        parent, name = self._directory(), self._name()
        self.namespace.change(lambda txn: tree.rmdir(txn, parent, name, now_ns=self.namespace.clock.ns))

    def _rename(self) -> None:
        old, name, new, new_name = self._directory(), self._name(), self._directory(), self._name()
        exchange = self.chance.random() < 0.2
        self.namespace.change(
            lambda txn: tree.rename(
                txn, old, name, new, new_name, now_ns=self.namespace.clock.ns, exchange=exchange
            )
        )

    def _link(self) -> None:
        inode, parent, name = self._file()[2], self._directory(), self._name()
        self.namespace.change(
            lambda txn: tree.link(txn, inode.ino, parent, name, now_ns=self.namespace.clock.ns)
        )

    def _attributes(self) -> None:
        ino = self._file()[2].ino if self.chance.random() < 0.7 else self._directory()
        mode, uid = self.chance.choice([0o600, 0o755, 0o640]), self.chance.choice([0, 1000])
        self.namespace.change(
            lambda txn: tree.set_attributes(
                txn, ino, mode=mode, uid=uid, mtime_ns=self.chance.randrange(10**9), atime_ns=7, now_ns=1
            )
        )

    def _xattr(self) -> None:
        ino = self._file()[2].ino if self.chance.random() < 0.7 else self._directory()
        name = self.chance.choice([b"user.x", b"user.y"])
        if self.chance.random() < 0.4:
            self.namespace.change(lambda txn: tree.remove_xattr(txn, ino, name, now_ns=1))
        else:
            value = self.chance.randbytes(3)
            self.namespace.change(lambda txn: tree.set_xattr(txn, ino, name, value, now_ns=1))


def make_snapshot(namespace: Namespace, name: bytes, top: int) -> SnapshotRow:
    return namespace.change(lambda txn: snapshots.create(txn, name, top, now_ns=1))


def drop_snapshot(namespace: Namespace, name: bytes) -> None:
    namespace.change(lambda txn: snapshots.delete(txn, name))
    swept(namespace)


def swept(namespace: Namespace) -> None:
    with namespace.db.read() as txn:
        place = sweep.begin(txn)
    while place is not None:
        place = namespace.change(partial(sweep.step, place=place, limit=7, now_ns=1))


def begin_restore(namespace: Namespace, row: SnapshotRow, top: int) -> JobRow:
    return namespace.change(lambda txn: jobs.begin_restore(txn, row, row.root_ino, top, b"top", 1))


def begin_clone(namespace: Namespace, row: SnapshotRow) -> JobRow:
    """Of all of the snapshot, to ``copy``."""
    return namespace.change(
        lambda txn: jobs.begin_clone(txn, row, row.root_ino, ROOT_INO, b"copy", b"copy", DEFAULTS, 1)
    )


def run_steps(
    namespace: Namespace, job: JobRow, row: SnapshotRow, *, most: int = 10**9, changes: int = 3
) -> bool:
    """Up to ``most`` batches. False: it was killed then."""
    frames: list[Frame] = [Directory(b"", job.source_ino, job.target_ino)]
    for _ in range(most):
        if not frames:
            return True
        plan = Plan(row, job.number, job.is_clone, DEFAULTS, namespace.clock.ns)
        step = partial(rebuild.step, plan=plan, frames=frames, looks=5, changes=changes)
        frames = namespace.change(step).frames
    return not frames


def end(namespace: Namespace, job: JobRow) -> None:
    while not namespace.change(lambda txn: jobs.end(txn, job, 1)):
        pass


def no_problems(namespace: Namespace) -> None:
    with namespace.db.snapshot() as txn:
        assert list(problems(txn)) == []


def reap_all(namespace: Namespace) -> None:
    """As at the next mount."""
    with namespace.db.read() as txn:
        orphans = tree.orphans(txn, limit=10**6)
    for ino in orphans:
        namespace.change(lambda txn, ino=ino: tree.reap(txn, ino))


@pytest.mark.parametrize("seed", range(12))
def test_restored_is_what_it_was(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    with with_bucket(tmp_path) as (namespace, bucket, top):
        tree_ = RandomTree(namespace, bucket, top, seed)
        tree_.change(60)
        for number in range(4):
            bucket.publish_all()
            row = make_snapshot(namespace, b"s%d" % number, top)
            before = state_of(namespace, bucket, top)
            tree_.change(chance.choice([3, 30, 80]))
            if chance.random() < 0.5:
                make_snapshot(namespace, b"between%d" % number, top)
                tree_.change(10)
            if chance.random() < 0.5:
                bucket.publish_all()
            job = begin_restore(namespace, row, top)
            while not run_steps(namespace, job, row, most=chance.randrange(1, 30)):
                no_problems(namespace)
                if chance.random() < 0.3:
                    bucket.publish_all()
            end(namespace, job)
            no_problems(namespace)
            assert state_of(namespace, bucket, top) == before
            if all(fields[-1] == -1 for fields in before.values()):  # of hard links it cannot say
                with namespace.db.snapshot() as txn:
                    assert survey(txn, row, row.root_ino, top, DEFAULTS, 1000).changes == 0
            reap_all(namespace)
            if chance.random() < 0.5:
                drop_snapshot(namespace, b"s%d" % number)
                assert state_of(namespace, bucket, top) == before
            bucket.publish_all()
            assert state_of(namespace, bucket, top) == before
        with namespace.db.read() as txn:
            left = [row.name for row in snapshots.visible(txn)]
        for name in left:
            drop_snapshot(namespace, name)
        swept(namespace)
        reap_all(namespace)
        no_problems(namespace)
        assert nothing_left(namespace) == []


def nothing_left(namespace: Namespace) -> list[str]:
    with namespace.db.read() as txn:
        return [name for name in HISTORY_TABLES if txn.entries(getattr(txn.tables, name))]


@pytest.mark.parametrize("seed", range(8))
def test_a_clone_is_what_the_snapshot_was(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    with with_bucket(tmp_path) as (namespace, bucket, top):
        tree_ = RandomTree(namespace, bucket, top, seed)
        tree_.change(80)
        bucket.publish_all()
        row = make_snapshot(namespace, b"one", top)
        before = state_of(namespace, bucket, top)
        tree_.change(30)
        job = begin_clone(namespace, row)
        while not run_steps(namespace, job, row, most=chance.randrange(1, 20)):
            assert "copy" not in namespace.names()
            no_problems(namespace)
            tree_.change(3)
        if chance.random() < 0.5:
            drop_snapshot(namespace, b"one")
        job = namespace.change(lambda txn: jobs.attach(txn, job, 1))
        copy = namespace.resolve("copy").ino
        assert state_of(namespace, bucket, copy) == before
        after: int | None = 0
        while after is not None:
            announced = namespace.change(lambda txn, at=after: jobs.announce(txn, job, at or 0, 3, 1))
            after = announced.after
        end(namespace, job)
        assert state_of(namespace, bucket, copy) == before
        no_problems(namespace)
        with namespace.db.read() as txn:
            dirty = {found.ino for found in publish.iter_dirty(txn)}
            assert {inode.ino for _, inode in _walk(txn, copy)} <= dirty
        bucket.publish_all()
        assert state_of(namespace, bucket, copy) == before
        with namespace.db.read() as txn:
            assert not txn.entries(txn.tables.loan)
            assert not [found for found in snapshots.every(txn) if found.is_deleted]
            held = [publish.object_of(txn, inode.ino) for _, inode in _walk(txn, copy)]
        assert {row.key.split("/")[0] for row in held if row is not None} <= {"copy"}


def test_a_clone_that_cannot_get_its_name_leaves_nothing(tmp_path: Path) -> None:
    with with_bucket(tmp_path) as (namespace, bucket, top):
        RandomTree(namespace, bucket, top, 5).change(80)
        bucket.publish_all()
        row = make_snapshot(namespace, b"one", top)
        with namespace.db.read() as txn:
            inodes = txn.entries(txn.tables.inode)
        job = begin_clone(namespace, row)
        with pytest.raises(Busy, match="one at a time"):
            begin_restore(namespace, row, top)
        assert run_steps(namespace, job, row)
        taken = namespace.create("copy")
        with pytest.raises(AlreadyExists):
            namespace.change(lambda txn: jobs.attach(txn, job, 1))
        frames: list[Frame] = [rebuild.Removal(0, b"", job.target_ino)]
        while frames:
            plan = Plan(row, job.number, True, DEFAULTS, 1)
            step = partial(rebuild.step, plan=plan, frames=frames, looks=5, changes=3)
            frames = namespace.change(step).frames
            no_problems(namespace)
        end(namespace, job)
        assert namespace.resolve("copy").ino == taken.ino
        with namespace.db.read() as txn:
            assert txn.entries(txn.tables.inode) == inodes + 1
            assert not txn.entries(txn.tables.loan)
            assert not txn.entries(txn.tables.job)
        no_problems(namespace)


def test_a_deleted_snapshot_stays_until_its_bytes_are_not_needed(tmp_path: Path) -> None:
    with with_bucket(tmp_path) as (namespace, bucket, top):
        bucket.write(namespace.create("f", parent=top).ino)
        bucket.write(namespace.create("g", parent=top).ino)
        row = make_snapshot(namespace, b"one", top)
        for name in (b"f", b"g"):
            namespace.change(lambda txn, name=name: tree.unlink(txn, top, name, now_ns=2))
        job = begin_restore(namespace, row, top)
        assert run_steps(namespace, job, row)
        end(namespace, job)
        drop_snapshot(namespace, b"one")
        with namespace.db.read() as txn:
            assert snapshots.visible(txn) == []
            assert [found.epoch for found in snapshots.every(txn)] == [1]
            assert loans.source_of(txn, tree.resolve(txn, b"top/f").ino) is not None
        make_snapshot(namespace, b"one", top)  # the name is free
        f, g = namespace.resolve("top/f").ino, namespace.resolve("top/g").ino
        bucket.publish_all()
        with namespace.db.read() as txn:
            assert [found.epoch for found in snapshots.every(txn)] == [2]
            assert loans.loan_of(txn, f) is loans.loan_of(txn, g) is None
        swept(namespace)
        no_problems(namespace)


def test_a_file_that_goes_before_it_is_published_gives_its_loan_back(tmp_path: Path) -> None:
    with with_bucket(tmp_path) as (namespace, bucket, top):
        bucket.write(namespace.create("f", parent=top).ino)
        row = make_snapshot(namespace, b"one", top)
        namespace.change(lambda txn: tree.unlink(txn, top, b"f", now_ns=2))
        job = begin_restore(namespace, row, top)
        assert run_steps(namespace, job, row)
        end(namespace, job)
        file = namespace.resolve("top/f")
        namespace.change(lambda txn: tree.unlink(txn, top, b"f", now_ns=3))
        with namespace.db.read() as txn:
            assert publish.ref_of(txn, file) is not None  # who has it open can read on
            doomed = {found.key for found in publish.doomed_entries(txn)[0]}
        assert doomed == {"top/f"}, "nothing that the snapshot reads is given up"
        reap_all(namespace)
        with namespace.db.read() as txn:
            assert not txn.entries(txn.tables.loan)
        no_problems(namespace)


def test_what_is_the_same_keeps_its_inode(tmp_path: Path) -> None:
    with with_bucket(tmp_path) as (namespace, bucket, top):
        directory = namespace.mkdir("d", top).ino
        inos = {name: namespace.create(name, parent=directory).ino for name in ("same", "mode", "bytes")}
        for ino in inos.values():
            bucket.write(ino)
        row = make_snapshot(namespace, b"one", top)
        namespace.change(lambda txn: tree.set_attributes(txn, inos["mode"], mode=0o600, now_ns=5))
        bucket.write(inos["bytes"])
        with namespace.db.snapshot() as txn:
            found = survey(txn, row, row.root_ino, top, DEFAULTS, 1000)
        assert (found.entries, found.changes, found.missing_count) == (4, 2, 0)
        assert found.directories == [(b"d", directory, directory)]
        job = begin_restore(namespace, row, top)
        assert run_steps(namespace, job, row)
        assert namespace.resolve("top/d").ino == directory
        assert namespace.resolve("top/d/same").ino == inos["same"]
        assert namespace.resolve("top/d/mode").ino == inos["mode"]
        assert namespace.resolve("top/d/mode").mode == FILE
        assert namespace.resolve("top/d/bytes").ino != inos["bytes"]


def test_jobs_and_loans_are_in_a_dump(tmp_path: Path) -> None:
    with with_bucket(tmp_path / "a") as (namespace, bucket, top):
        bucket.write(namespace.create("f", parent=top).ino)
        row = make_snapshot(namespace, b"one", top)
        job = begin_clone(namespace, row)
        assert run_steps(namespace, job, row)
        with namespace.db.snapshot() as txn:
            lines = list(dump_lines(txn))
    with open_namespace(tmp_path / "b") as other:
        load_lines(other.db, lines)
        no_problems(other)
        with other.db.read() as txn:
            assert snapshots.jobs(txn) == [job]
            assert txn.entries(txn.tables.loan) == 2
        other.change(lambda txn: jobs.attach(txn, job, 1))
        assert state_of(other, bucket, other.resolve("copy").ino)["/f"][8] == "bytes 0"
