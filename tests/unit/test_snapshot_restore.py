"""Restoring and cloning on an engine without a kernel: bytes, open files, the store, interruptions, refusals."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from tests.support.engine import (
    ROOT_CALLER,
    Engine,
    drained,
    objects_in,
    running_engine,
    settings_for,
)
from tests.support.snapshots import (
    delete_snapshot,
    kept_objects,
    make_snapshot,
    overwrite,
    read_in_snapshots,
)
from tierfs.control.protocol import (
    SnapshotCloneReply,
    SnapshotCloneRequest,
    SnapshotRestoreReply,
    SnapshotRestoreRequest,
)
from tierfs.errors import (
    AlreadyExists,
    Busy,
    InvalidArgument,
    NotADirectory,
    NotFound,
    ReadOnly,
    StaleContent,
    StoreError,
    StoreUnavailable,
)
from tierfs.mount import rebuilder
from tierfs.mount.drain import drain
from tierfs.mount.rebuilds import RebuildHandlers
from tierfs.mount.snapshots import SnapshotHandlers
from tierfs.namespace import schema, snapshots, tree
from tierfs.namespace.dump import check
from tierfs.store.base import ObjectStore
from tierfs.types import ROOT_INO, Inode

READS = ("get_range", "stream")


class CountedStore:
    """Counts requests by name; ``refuse`` may raise instead."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner
        self.counts: Counter[str] = Counter()
        self.refuse: Callable[[str], None] = lambda operation: None

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._inner, name)
        if not callable(function):
            return function

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] += 1
            self.refuse(name)
            return function(*args, **kwargs)

        return counted

    def reads(self) -> int:
        return sum(self.counts[name] for name in READS)


class Counting:
    """For ``running_engine(wrap=...)``."""

    store: CountedStore

    def __call__(self, inner: ObjectStore) -> ObjectStore:
        self.store = CountedStore(inner)
        return self.store  # type: ignore[return-value]


def handlers(engine: Engine) -> RebuildHandlers:
    return RebuildHandlers(engine.parts, SnapshotHandlers(engine.parts))


async def restore(engine: Engine, name: str, path: str = "", **options: bool) -> SnapshotRestoreReply:
    request = SnapshotRestoreRequest(name=name.encode(), path=path.encode(), **options)
    with trio.fail_after(60):
        return await handlers(engine).restore(request, lambda progress: None)


async def clone(engine: Engine, name: str, path: str, **options: bool) -> SnapshotCloneReply:
    snapshot_name, _, below = name.partition("/")
    request = SnapshotCloneRequest(
        name=snapshot_name.encode(), below=below.encode(), path=path.encode(), **options
    )
    with trio.fail_after(60):
        return await handlers(engine).clone(request, lambda progress: None)


async def lookup(engine: Engine, path: str) -> Inode:
    inode = await engine.names.lookup(ROOT_INO, path.split("/")[0].encode())
    for name in path.split("/")[1:]:
        inode = await engine.names.lookup(inode.ino, name.encode())
    return inode


async def read(engine: Engine, path: str) -> bytes:
    return await engine.read_file((await lookup(engine, path)).ino)


async def make_directory(engine: Engine, name: str, parent: int = ROOT_INO) -> int:
    return (await engine.names.create(parent, name.encode(), 0o040755, ROOT_CALLER)).ino


async def job_has_ended(engine: Engine) -> None:
    with trio.fail_after(60):
        while True:
            with engine.parts.db.read() as txn:
                if not snapshots.jobs(txn):
                    return
            await trio.sleep(0.01)


def kept_keys(engine: Engine) -> list[str]:
    """Also while some of them are just being deleted."""
    below = engine.bucket / ".tierfs" / "snapshots"
    return os.listdir(below) if below.is_dir() else []


def no_problems(tmp_path: Path) -> None:
    assert check(tmp_path / "state") == []


async def test_a_restore_brings_back_what_was_changed_and_removes_what_was_added(tmp_path: Path) -> None:
    wrap = Counting()
    async with running_engine(settings_for(tmp_path), wrap=wrap) as engine:
        d = await make_directory(engine, "d")
        same = await engine.write_file("same", b"same", parent=d)
        changed = await engine.write_file("changed", b"old")
        await engine.write_file("gone", b"gone", parent=d)
        await engine.names.link((await lookup(engine, "d/gone")).ino, ROOT_INO, b"linked")
        await make_snapshot(engine, "one")
        await overwrite(engine, changed, b"new")
        await engine.names.unlink(d, b"gone")
        await engine.names.unlink(ROOT_INO, b"linked")
        later = await make_directory(engine, "later")
        await engine.write_file("f", b"later", parent=later)
        await drained(engine)
        wrap.store.counts.clear()
        reply = await restore(engine, "one")
        assert (reply.made, reply.replaced, reply.atomic, reply.missing_count) == (2, 1, True, 0)
        assert reply.backup is not None
        assert reply.removed == 2
        # Readable before anything has been copied, and after.
        for _ in range(2):
            assert await read(engine, "changed") == b"old"
            assert await read(engine, "d/gone") == b"gone"
            assert (await lookup(engine, "linked")).ino == (await lookup(engine, "d/gone")).ino
            assert (await lookup(engine, "linked")).nlink == 2
            assert (await lookup(engine, "d/same")).ino == same.ino
            with pytest.raises(NotFound):
                await lookup(engine, "later")
            await drained(engine)
        assert objects_in(engine.bucket) == {
            "changed": b"old", "d/gone": b"gone", "d/same": b"same", "linked": b"gone"
        }  # fmt: skip
        assert await read_in_snapshots(engine, f"{reply.backup}/changed") == b"new"
        assert await read_in_snapshots(engine, f"{reply.backup}/later/f") == b"later"
        # And back again.
        await restore(engine, reply.backup, backup=False)
        await drained(engine)
        assert objects_in(engine.bucket) == {"changed": b"new", "d/same": b"same", "later/f": b"later"}
        again = await restore(engine, reply.backup)
        assert (again.made, again.replaced, again.removed, again.changed, again.backup) == (0, 0, 0, 0, None)
        for name in ("one", reply.backup):
            await delete_snapshot(engine, name)
        assert kept_objects(engine) == []
    no_problems(tmp_path)


async def test_no_content_is_read_and_every_object_is_copied_on_the_server(tmp_path: Path) -> None:
    wrap = Counting()
    async with running_engine(settings_for(tmp_path), wrap=wrap) as engine:
        d = await make_directory(engine, "d")
        for number in range(5):
            await engine.write_file(f"f{number}", b"%d" % number * 1000, parent=d)
        await make_snapshot(engine, "one")
        for number in range(5):
            await engine.names.unlink(d, b"f%d" % number)
        await drained(engine)
        wrap.store.counts.clear()
        await clone(engine, "one", "copy")
        await restore(engine, "one", "d", backup=False)
        await job_has_ended(engine)
        await drained(engine)
        assert wrap.store.reads() == 0
        assert (wrap.store.counts["copy"], wrap.store.counts["start_multipart"]) == (10, 0)
        expected = {f"d/f{number}": b"%d" % number * 1000 for number in range(5)}
        assert objects_in(engine.bucket) == expected | {f"copy/{key}": data for key, data in expected.items()}
    no_problems(tmp_path)


async def test_a_clone_is_writable_and_its_own(tmp_path: Path) -> None:
    wrap = Counting()
    async with running_engine(settings_for(tmp_path), wrap=wrap) as engine:
        d = await make_directory(engine, "d")
        await engine.write_file("f", b"bytes", parent=d)
        await engine.write_file("g", b"other", parent=await make_directory(engine, "e", d))
        await engine.attributes.set_xattr((await lookup(engine, "d/f")).ino, b"user.x", b"1")
        await make_snapshot(engine, "one", "d")
        wrap.store.counts.clear()
        reply = await clone(engine, "one", "copy")
        assert reply.entries == 3
        assert await engine.attributes.get_xattr((await lookup(engine, "copy/f")).ino, b"user.x") == b"1"
        await job_has_ended(engine)
        await drained(engine)
        assert wrap.store.reads() == 0
        assert wrap.store.counts["copy"] == 2
        copied = await lookup(engine, "copy/f")
        number = await engine.files.open(copied.ino, os.O_RDWR, ROOT_CALLER)
        await engine.files.write(number, 0, b"B")
        await engine.files.release(number)
        await clone(engine, "one/e", "d/inner")
        await delete_snapshot(engine, "one")
        await drained(engine)
        assert objects_in(engine.bucket) == {
            "d/f": b"bytes", "d/e/g": b"other", "copy/f": b"Bytes", "copy/e/g": b"other", "d/inner/g": b"other"
        }  # fmt: skip
        assert kept_objects(engine) == []
    no_problems(tmp_path)


async def test_a_clone_outlives_its_snapshot_and_what_it_was_made_of(tmp_path: Path) -> None:
    """Nothing has an object of its own yet when the snapshot and the original go."""
    async with running_engine(settings_for(tmp_path), publishing=False) as engine:
        await engine.write_file("f", b"bytes")
        await engine.parts.publisher.publish_now((await lookup(engine, "f")).ino)
        await make_snapshot(engine, "one", flush=False)
        await clone(engine, "one", "copy")
        await engine.names.unlink(ROOT_INO, b"f")
        await SnapshotHandlers(engine.parts).delete(_named("one"), lambda progress: None)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.parts.publisher.run)
            await drained(engine)
            nursery.cancel_scope.cancel()
        assert objects_in(engine.bucket) == {"copy/f": b"bytes"}
        assert await read(engine, "copy/f") == b"bytes"
    no_problems(tmp_path)
    async with running_engine(settings_for(tmp_path)) as engine:  # what was only kept for the clone goes
        with trio.fail_after(60):
            while kept_keys(engine):
                await drained(engine)
                await trio.sleep(0.01)
        assert await read(engine, "copy/f") == b"bytes"


def _named(name: str) -> Any:
    from tierfs.control.protocol import SnapshotDeleteRequest

    return SnapshotDeleteRequest(name=name.encode())


@pytest.mark.parametrize("store_answers", [True, False])
async def test_a_file_is_written_before_it_has_an_object(tmp_path: Path, store_answers: bool) -> None:
    """It gets one first, by a copy; where that fails all of its bytes are brought here."""
    wrap = Counting()

    def refuse(operation: str) -> None:
        if operation == "copy":
            raise StoreUnavailable("no copies today")

    settings = settings_for(tmp_path, store_timeout_s=0.05, tiers=settings_for(tmp_path).tiers)
    async with running_engine(settings, publishing=False, wrap=wrap) as engine:
        await engine.write_file("f", b"x" * 300_000)
        await engine.parts.publisher.publish_now((await lookup(engine, "f")).ino)
        await make_snapshot(engine, "one", flush=False)
        await clone(engine, "one", "copy")
        await job_has_ended(engine)
        if not store_answers:
            wrap.store.refuse = refuse
        wrap.store.counts.clear()
        number = await engine.files.open((await lookup(engine, "copy/f")).ino, os.O_RDWR, ROOT_CALLER)
        await engine.files.write(number, 299_999, b"yz")
        await engine.files.release(number)
        assert (wrap.store.reads() > 0) == (not store_answers) or wrap.store.counts["copy"] == 1
        wrap.store.refuse = lambda operation: None
        assert await read(engine, "copy/f") == b"x" * 299_999 + b"yz"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.parts.publisher.run)
            await drained(engine)
            nursery.cancel_scope.cancel()
        assert objects_in(engine.bucket) == {"f": b"x" * 300_000, "copy/f": b"x" * 299_999 + b"yz"}


async def test_an_open_file_keeps_what_it_had(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        inode = await engine.write_file("f", b"old")
        await make_snapshot(engine, "one")
        await overwrite(engine, inode, b"newer")
        await drained(engine)
        reader = await engine.files.open(inode.ino, os.O_RDONLY, ROOT_CALLER)
        await restore(engine, "one")
        assert await engine.files.read(reader, 0, 10) == b"newer"
        assert await read(engine, "f") == b"old"
        await drained(engine)
        assert await engine.files.read(reader, 0, 10) == b"newer"
        await engine.files.release(reader)
        await drained(engine)
        assert objects_in(engine.bucket) == {"f": b"old"}


async def test_files_that_are_open_for_writing_are_in_the_way(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        inode = await engine.write_file("f", b"old")
        await make_snapshot(engine, "one")
        number = await engine.files.open(inode.ino, os.O_RDWR | os.O_TRUNC, ROOT_CALLER)
        await engine.files.write(number, 0, b"written")
        with pytest.raises(Busy, match=r"1 files are open for writing \(/f\)"):
            await restore(engine, "one")
        assert await read(engine, "f") == b"written"
        reply = await restore(engine, "one", force=True)
        assert await read(engine, "f") == b"old"
        assert await engine.files.read(number, 0, 10) == b"written"
        await engine.files.release(number)
        await drained(engine)
        assert objects_in(engine.bucket) == {"f": b"old"}
        assert await read_in_snapshots(engine, f"{reply.backup}/f") == b"written"


async def test_bytes_that_are_not_in_the_store_yet_are_in_the_backup(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path, upload_delay_s=3600.0)) as engine:
        inode = await engine.write_file("f", b"old")
        await make_snapshot(engine, "one")
        await overwrite(engine, inode, b"only here")
        reply = await restore(engine, "one")
        assert await read(engine, "f") == b"old"
        assert await read_in_snapshots(engine, f"{reply.backup}/f") == b"only here"
        await drained(engine)
        assert objects_in(engine.bucket) == {"f": b"old"}


async def test_nothing_is_restored_when_the_backup_cannot_be_made(tmp_path: Path) -> None:
    wrap = Counting()

    def refuse(operation: str) -> None:
        if operation == "put":
            raise StoreUnavailable("not today")

    settings = settings_for(tmp_path, store_timeout_s=0.05, upload_delay_s=3600.0)
    async with running_engine(settings, wrap=wrap) as engine:
        inode = await engine.write_file("f", b"old")
        await make_snapshot(engine, "one")
        await overwrite(engine, inode, b"only here")
        wrap.store.refuse = refuse
        with pytest.raises(StoreError, match="no snapshot was made"):
            await restore(engine, "one")
        assert await read(engine, "f") == b"only here"
        await restore(engine, "one", backup=False)
        assert await read(engine, "f") == b"old"
        wrap.store.refuse = lambda operation: None


async def test_what_nobody_has_any_more_is_named_and_left_alone(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path, upload_delay_s=3600.0)) as engine:
        await engine.write_file("new", b"not in the store then")
        await engine.write_file("empty", b"")
        await make_snapshot(engine, "one", flush=False)
        await drained(engine)
        await engine.names.unlink(ROOT_INO, b"empty")
        with pytest.raises(StaleContent, match=r"1 entries of the snapshot .* the first is new: .*--force"):
            await restore(engine, "one")
        with pytest.raises(StaleContent):
            await clone(engine, "one", "copy")
        with pytest.raises(NotFound):
            await lookup(engine, "empty")
        reply = await restore(engine, "one", force=True)
        assert [entry.path for entry in reply.missing] == ["new"]
        assert await read(engine, "new") == b"not in the store then"
        assert await read(engine, "empty") == b""
        cloned = await clone(engine, "one", "copy", force=True)
        assert (cloned.entries, cloned.missing_count) == (1, 1)


async def test_a_directory_that_had_not_been_listed_is_left_alone(tmp_path: Path) -> None:
    below = tmp_path / "bucket" / "d"
    settings = settings_for(tmp_path)
    below.mkdir()
    for number in range(1100):  # more than one page: the root's listing does not answer for all of it
        (below / f"f{number}").write_bytes(b"theirs")
    async with running_engine(settings) as engine:
        await engine.names.open_directory(ROOT_INO)
        await engine.write_file("g", b"old")
        await make_snapshot(engine, "bare")
        await engine.names.unlink(ROOT_INO, b"g")
        with pytest.raises(StaleContent, match="the first is d/: not listed when the snapshot was made"):
            await restore(engine, "bare")
        with pytest.raises(StaleContent, match="/d had not been listed"):
            await restore(engine, "bare", "d")
        reply = await restore(engine, "bare", force=True)
        assert [entry.path for entry in reply.missing] == ["d/"]
        assert await read(engine, "g") == b"old"
        assert len(await _names(engine, "d")) == 1100
        await clone(engine, "bare", "copy", force=True)
        assert await _names(engine, "copy") == [b"g"]
        await job_has_ended(engine)
        await drained(engine)
        assert len(objects_in(engine.bucket)) == 1102


async def test_what_others_replaced_in_the_bucket_is_not_invented(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path, tiers=())) as engine:
        await engine.write_file("f", b"ours")
        await engine.write_file("g", b"kept")
        await make_snapshot(engine, "one")
        (tmp_path / "bucket" / "f").write_bytes(b"theirs, and longer")
        await clone(engine, "one", "copy")
        ino = (await lookup(engine, "copy/f")).ino
        with trio.fail_after(60):
            while ino not in engine.parts.publisher.failures:
                await trio.sleep(0.01)
        assert "replaced or removed in the bucket by others" in engine.parts.publisher.failures[ino].message
        with pytest.raises(StaleContent):
            await read(engine, "copy/f")
        assert await read(engine, "copy/g") == b"kept"
        await engine.names.unlink((await lookup(engine, "copy")).ino, b"f")
        await drained(engine)
        assert objects_in(engine.bucket) == {"f": b"theirs, and longer", "g": b"kept", "copy/g": b"kept"}


async def test_a_directory_that_was_removed_is_made_again(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        d = await make_directory(engine, "d")
        await engine.write_file("f", b"bytes", parent=d)
        await make_snapshot(engine, "one")
        await engine.names.unlink(d, b"f")
        await engine.names.rmdir(ROOT_INO, b"d")
        await drained(engine)
        reply = await restore(engine, "one", "d")
        assert reply.made == 1
        assert await read(engine, "d/f") == b"bytes"
        await job_has_ended(engine)
        await drained(engine)
        assert objects_in(engine.bucket) == {"d/f": b"bytes"}


async def test_a_directory_inside_the_snapshot_is_restored_alone(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        d, e = await make_directory(engine, "d"), await make_directory(engine, "e")
        files = [await engine.write_file("f", b"old", parent=parent) for parent in (d, e)]
        await make_snapshot(engine, "one")
        await make_snapshot(engine, "only-d", "d")
        for file in files:
            await overwrite(engine, file, b"new")
        await engine.names.rename(ROOT_INO, b"d", ROOT_INO, b"moved", 0)
        # The snapshot of d follows it to where it is now.
        assert (await restore(engine, "only-d", "moved")).replaced == 1
        assert (await restore(engine, "one", "e")).replaced == 1
        with pytest.raises(InvalidArgument, match="/e is not in the snapshot only-d, which is of /moved"):
            await restore(engine, "only-d", "e")
        with pytest.raises(NotFound, match="the snapshot one has no /moved"):
            await restore(engine, "one", "moved")
        await drained(engine)
        assert objects_in(engine.bucket) == {"moved/f": b"old", "e/f": b"old"}


async def test_a_file_where_a_directory_was_and_the_other_way_round(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        d = await make_directory(engine, "x")
        await engine.write_file("f", b"in x", parent=d)
        await engine.write_file("y", b"file y")
        await make_snapshot(engine, "one")
        await engine.names.unlink(d, b"f")
        await engine.names.rmdir(ROOT_INO, b"x")
        await engine.write_file("x", b"file x")
        await engine.names.unlink(ROOT_INO, b"y")
        y = await make_directory(engine, "y")
        await engine.write_file("g", b"in y", parent=await make_directory(engine, "z", y))
        await drained(engine)
        await restore(engine, "one")
        assert await read(engine, "x/f") == b"in x"
        assert await read(engine, "y") == b"file y"
        await drained(engine)
        assert objects_in(engine.bucket) == {"x/f": b"in x", "y": b"file y"}
    no_problems(tmp_path)


async def test_refusals(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        await engine.write_file("f", b"bytes")
        await make_directory(engine, "d")
        await make_snapshot(engine, "one")
        with pytest.raises(NotFound, match="no snapshot called two"):
            await restore(engine, "two")
        with pytest.raises(NotFound, match="no snapshot called two"):
            await clone(engine, "two", "copy")
        with pytest.raises(NotADirectory, match="f is a file in the snapshot one: copy it from"):
            await restore(engine, "one", "f")
        with pytest.raises(AlreadyExists, match="/d exists already"):
            await clone(engine, "one", "d")
        for path in ("", ".tierfs/x", "d/../x"):
            with pytest.raises((AlreadyExists, InvalidArgument)):
                await clone(engine, "one", path)
        with pytest.raises(NotFound):
            await clone(engine, "one", "nowhere/copy")
        with pytest.raises(NotADirectory):
            await clone(engine, "one", "f/copy")
        await drained(engine)
    async with running_engine(settings_for(tmp_path, read_only=True)) as engine:
        with pytest.raises(ReadOnly):
            await restore(engine, "one")
        with pytest.raises(ReadOnly):
            await clone(engine, "one", "copy")


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebuilder, "ATOMIC_CHANGES", 2)
    monkeypatch.setattr(rebuilder, "CHANGES", 2)
    monkeypatch.setattr(rebuilder, "ANNOUNCED", 2)
    monkeypatch.setattr(rebuilder, "FORGOTTEN", 1)


@pytest.mark.semantics(
    "S-SNAP-13",
    "A restore or clone that has begun goes on by itself when the command is interrupted, and after a killed engine or an unmount at the next mount; the same command waits for what is left of it.",
)
@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("batches", [0, 1, 3])
@pytest.mark.parametrize("is_clone", [True, False])
async def test_what_was_interrupted_goes_on_at_the_next_mount(
    tmp_path: Path, batches: int, is_clone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(tmp_path)
    step = rebuilder.Rebuilder._step
    done = 0

    async def stopping(self: rebuilder.Rebuilder, *args: Any, **kwargs: Any) -> Any:
        nonlocal done
        if done == batches:
            reached.set()
            await trio.sleep_forever()
        done += 1
        return await step(self, *args, **kwargs)

    async with running_engine(settings) as engine:
        for directory in ("a", "b", "c"):
            parent = await make_directory(engine, directory)
            for number in range(4):
                await engine.write_file(f"f{number}", f"{directory}{number}".encode(), parent=parent)
        await engine.names.link((await lookup(engine, "a/f0")).ino, (await lookup(engine, "c")).ino, b"link")
        await make_snapshot(engine, "one")
        for directory in ("a", "b"):
            parent = (await lookup(engine, directory)).ino
            for number in range(4):
                await engine.names.unlink(parent, b"f%d" % number)
                await engine.write_file(f"g{number}", b"new", parent=parent)
        await drained(engine)
        reached = trio.Event()
        monkeypatch.setattr(rebuilder.Rebuilder, "_step", stopping)
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                await (clone(engine, "one", "copy") if is_clone else restore(engine, "one"))

            nursery.start_soon(ask)
            with trio.fail_after(60):
                await reached.wait()
            if is_clone:
                with pytest.raises(NotFound):
                    await lookup(engine, "copy")
                with pytest.raises(Busy, match="a clone to /copy is under way"):
                    await restore(engine, "one", backup=False)
            nursery.cancel_scope.cancel()  # the command is interrupted, and then the engine
        monkeypatch.setattr(rebuilder.Rebuilder, "_step", step)
        with engine.parts.db.read() as txn:
            assert len(snapshots.jobs(txn)) == 1
    async with running_engine(settings) as engine:
        await job_has_ended(engine)
        await drained(engine)
        expected = {f"{d}/f{number}": f"{d}{number}".encode() for d in "abc" for number in range(4)}
        expected["c/link"] = b"a0"
        found = objects_in(engine.bucket)
        if is_clone:
            assert {k[5:]: v for k, v in found.items() if k.startswith("copy/")} == expected
        else:
            assert found == expected
        above = "copy/" if is_clone else ""
        assert (await lookup(engine, above + "a/f0")).ino == (await lookup(engine, above + "c/link")).ino
        with engine.parts.db.read() as txn:
            names = [row.name for row in snapshots.every(txn)]
        for name in names:
            await delete_snapshot(engine, name.decode())
        assert kept_objects(engine) == []
    no_problems(tmp_path)


@pytest.mark.usefixtures("small_batches")
async def test_the_same_command_waits_for_what_has_begun(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        for number in range(30):
            await engine.write_file(f"f{number}", b"%d" % number)
        await make_snapshot(engine, "one")
        replies: list[SnapshotCloneReply] = []
        with trio.CancelScope() as scope:

            def report(progress: Any) -> None:
                if progress.phase == "clone":
                    scope.cancel()

            request = SnapshotCloneRequest(name=b"one", path=b"copy")
            await handlers(engine).clone(request, report)
        with suppress(AlreadyExists):  # it may have ended between the two
            replies.append(await clone(engine, "one", "copy"))
        assert len(await _names(engine, "copy")) == 30
        await job_has_ended(engine)
        await drained(engine)
        assert len(objects_in(engine.bucket)) == 60


async def _names(engine: Engine, path: str) -> list[bytes]:
    ino = (await lookup(engine, path)).ino
    with engine.parts.db.read() as txn:
        return [name for name, _, _ in tree.readdir(txn, ino, 0, 10**6)]


@pytest.mark.usefixtures("small_batches")
async def test_a_place_that_is_taken_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = rebuilder.Rebuilder._step
    async with running_engine(settings_for(tmp_path)) as engine:
        for number in range(6):
            await engine.write_file(f"f{number}", b"%d" % number)
        await make_snapshot(engine, "one")
        first = True

        async def taking(self: rebuilder.Rebuilder, *args: Any, **kwargs: Any) -> Any:
            nonlocal first
            if first:
                first = False
                await engine.write_file("copy", b"theirs")
            return await step(self, *args, **kwargs)

        monkeypatch.setattr(rebuilder.Rebuilder, "_step", taking)
        with pytest.raises(AlreadyExists, match="copy exists already"):
            await clone(engine, "one", "copy")
        await job_has_ended(engine)
        await drained(engine)
        assert await read(engine, "copy") == b"theirs"
        assert len(objects_in(engine.bucket)) == 7
        with engine.parts.db.read() as txn:
            assert not txn.entries(txn.tables.loan)
            assert not txn.entries(txn.tables.job)
        await delete_snapshot(engine, "one")
        assert kept_objects(engine) == []
    no_problems(tmp_path)


@pytest.mark.usefixtures("small_batches")
async def test_the_snapshot_is_deleted_while_it_is_cloned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = rebuilder.Rebuilder._step
    async with running_engine(settings_for(tmp_path)) as engine:
        for number in range(6):
            await engine.write_file(f"f{number}", b"%d" % number)
        await make_snapshot(engine, "one")

        async def deleting(self: rebuilder.Rebuilder, *args: Any, **kwargs: Any) -> Any:
            with engine.parts.db.read() as txn:
                is_there = bool(snapshots.visible(txn))
            if is_there:
                await SnapshotHandlers(engine.parts).delete(_named("one"), lambda progress: None)
                for number in range(6):
                    await engine.names.unlink(ROOT_INO, b"f%d" % number)
            return await step(self, *args, **kwargs)

        monkeypatch.setattr(rebuilder.Rebuilder, "_step", deleting)
        await clone(engine, "one", "copy")
        assert await read(engine, "copy/f3") == b"3"
        await job_has_ended(engine)
        await drained(engine)
        assert objects_in(engine.bucket) == {f"copy/f{number}": b"%d" % number for number in range(6)}
        with engine.parts.db.read() as txn:
            assert snapshots.every(txn) == []
            assert txn.get(schema.META_FRONTIER, None, txn.tables.meta) is None
    no_problems(tmp_path)


class DyingStore(CountedStore):
    """After a number of changes nothing works any more; of the last one the answer is lost."""

    def __init__(self, inner: ObjectStore, changes: int) -> None:
        super().__init__(inner)
        self._left = changes

    def __getattr__(self, name: str) -> Any:
        function = super().__getattr__(name)
        if name not in ("put", "copy", "delete_many"):
            return function

        def dying(*args: Any, **kwargs: Any) -> Any:
            if self._left < 0:
                raise StoreUnavailable("gone")
            self._left -= 1
            result = function(*args, **kwargs)
            if self._left < 0:
                raise StoreUnavailable("the answer is lost")
            return result

        return dying

    @property
    def is_dead(self) -> bool:
        return self._left < 0


@pytest.mark.parametrize("changes", range(9))
async def test_a_crash_at_any_request_loses_nothing_and_leaves_nothing_behind(
    tmp_path: Path, changes: int
) -> None:
    settings = settings_for(tmp_path, store_timeout_s=0.01, upload_delay_s=0.0)
    async with running_engine(settings) as engine:
        d = await make_directory(engine, "d")
        files = [await engine.write_file(f"f{number}", b"%d" % number, parent=d) for number in range(3)]
        await make_snapshot(engine, "one", "d")
        await overwrite(engine, files[0], b"changed")
        await engine.names.unlink(d, b"f1")
        await engine.names.rename(d, b"f2", ROOT_INO, b"moved", 0)
        await drained(engine)
    stores: list[DyingStore] = []

    def wrap(inner: ObjectStore) -> ObjectStore:
        stores.append(DyingStore(inner, changes))
        return stores[0]  # type: ignore[return-value]

    async with running_engine(settings, wrap=wrap) as engine:
        await clone(engine, "one", "copy")
        await restore(engine, "one", "d", backup=False)
        await SnapshotHandlers(engine.parts).delete(_named("one"), lambda progress: None)
        await engine.names.unlink(ROOT_INO, b"moved")
        with trio.move_on_after(5):  # fewer requests may do
            while not stores[0].is_dead and not await engine.parts.publisher.draining.drain():
                pass
    async with running_engine(settings) as engine:
        await job_has_ended(engine)
        await drained(engine)
        expected = {f"f{number}": b"%d" % number for number in range(3)}
        assert objects_in(engine.bucket) == {
            f"{above}/{name}": data for above in ("d", "copy") for name, data in expected.items()
        }
        for above in ("d", "copy"):
            assert {name: await read(engine, f"{above}/{name}") for name in expected} == expected
        with trio.fail_after(60):
            while kept_keys(engine):
                await drained(engine)
                await trio.sleep(0.01)
        with engine.parts.db.read() as txn:
            assert not txn.entries(txn.tables.loan)
            assert not txn.entries(txn.tables.snapshot)
    no_problems(tmp_path)


@pytest.mark.usefixtures("small_batches")
async def test_a_flush_waits_for_all_of_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are given to the publisher after it has appeared."""
    announce = rebuilder.Rebuilder._announce
    go = trio.Event()

    async def waiting(self: rebuilder.Rebuilder, running: rebuilder.Running) -> None:
        await go.wait()
        await announce(self, running)

    monkeypatch.setattr(rebuilder.Rebuilder, "_announce", waiting)
    async with running_engine(settings_for(tmp_path)) as engine:
        for number in range(5):
            await engine.write_file(f"f{number}", b"%d" % number)
        await make_snapshot(engine, "one")
        await clone(engine, "one", "copy")
        ended = False

        async def flush() -> None:
            nonlocal ended
            await drained(engine)
            ended = True

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flush)
            await trio.testing.wait_all_tasks_blocked()
            assert not ended
            # What moves meanwhile is not missed.
            copy = (await lookup(engine, "copy")).ino
            await engine.names.rename(copy, b"f1", ROOT_INO, b"elsewhere", 0)
            await engine.names.rename(ROOT_INO, b"copy", ROOT_INO, b"renamed", 0)
            go.set()
        expected = {f"renamed/f{number}": b"%d" % number for number in range(5) if number != 1}
        expected |= {f"f{number}": b"%d" % number for number in range(5)} | {"elsewhere": b"1"}
        assert objects_in(engine.bucket) == expected
    no_problems(tmp_path)


@pytest.mark.usefixtures("small_batches")
async def test_what_is_unmounted_is_finished_by_a_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``tierfs meta drain``"""
    settings = settings_for(tmp_path)
    step = rebuilder.Rebuilder._step
    reached = trio.Event()

    async def stopping(self: rebuilder.Rebuilder, *args: Any, **kwargs: Any) -> Any:
        reached.set()
        await trio.sleep_forever()

    async with running_engine(settings) as engine:
        for number in range(5):
            await engine.write_file(f"f{number}", b"%d" % number)
        await make_snapshot(engine, "one")
        monkeypatch.setattr(rebuilder.Rebuilder, "_step", stopping)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(clone, engine, "one", "copy")
            with trio.fail_after(60):
                await reached.wait()
            nursery.cancel_scope.cancel()
    monkeypatch.setattr(rebuilder.Rebuilder, "_step", step)
    with trio.fail_after(60):
        done = await trio.to_thread.run_sync(lambda: drain(settings, on_progress=lambda *counts: None))
    assert (done.remaining_files, done.failures) == (0, [])
    found = objects_in(tmp_path / "bucket")
    assert {key: found[key] for key in found if key.startswith("copy/")} == {
        f"copy/f{number}": b"%d" % number for number in range(5)
    }
