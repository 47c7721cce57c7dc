"""Snapshots of an engine without a kernel: what they keep, what they cost, what is left when they are gone."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.support.engine import (
    ROOT_CALLER,
    drained,
    objects_in,
    running_engine,
    settings_for,
)
from tests.support.namespace import open_namespace
from tests.support.snapshots import (
    delete_snapshot,
    find_in_snapshots,
    kept_objects,
    make_snapshot,
    overwrite,
    read_in_snapshots,
)
from tests.support.watched_store import WatchedStore
from tierfs.control.protocol import SnapshotDiffRequest
from tierfs.errors import (
    AlreadyExists,
    InvalidArgument,
    NotADirectory,
    NotFound,
    NotPermitted,
    ReadOnly,
    StaleContent,
    StoreError,
    StoreUnavailable,
    TierfsError,
)
from tierfs.fs.attributes import AttributeChange
from tierfs.fs.placed import FRONT_HANDLE
from tierfs.mount.snapshots import SnapshotHandlers
from tierfs.namespace import past, snapshots, tree
from tierfs.namespace.dump import check, dump, load
from tierfs.namespace.transaction import HISTORY_TABLES
from tierfs.store.base import ObjectStore
from tierfs.types import ROOT_INO

semantics = pytest.mark.semantics


async def test_a_snapshot_keeps_what_is_overwritten_renamed_and_removed(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        changed = await engine.write_file("changed", b"old")
        await engine.write_file("moved", b"moved")
        await engine.write_file("gone", b"gone")
        await make_snapshot(engine, "one")
        await overwrite(engine, changed, b"new")
        await engine.names.rename(ROOT_INO, b"moved", ROOT_INO, b"elsewhere", 0)
        await engine.names.unlink(ROOT_INO, b"gone")
        await engine.write_file("later", b"later")
        await drained(engine)
        assert objects_in(engine.bucket) == {"changed": b"new", "elsewhere": b"moved", "later": b"later"}
        # What only moved is read where it is now: no copy of it was made.
        assert kept_objects(engine) == [b"gone", b"old"]
        assert await read_in_snapshots(engine, "one/changed") == b"old"
        assert await read_in_snapshots(engine, "one/moved") == b"moved"
        assert await read_in_snapshots(engine, "one/gone") == b"gone"
        for name in ("elsewhere", "later"):
            with pytest.raises(NotFound):
                await find_in_snapshots(engine, f"one/{name}")
        await delete_snapshot(engine, "one")
        assert kept_objects(engine) == []
        with pytest.raises(NotFound):
            await engine.names.lookup(ROOT_INO, b".tierfs")
        with engine.parts.db.read() as txn:
            assert not [name for name in HISTORY_TABLES if txn.entries(getattr(txn.tables, name))]


async def test_a_version_that_two_snapshots_see_is_copied_once_and_goes_with_the_last(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        inode = await engine.write_file("f", b"1")
        await make_snapshot(engine, "a")
        await make_snapshot(engine, "b")
        await overwrite(engine, inode, b"2")
        await drained(engine)
        await make_snapshot(engine, "c")
        await overwrite(engine, inode, b"3")
        await drained(engine)
        assert kept_objects(engine) == [b"1", b"2"]
        await delete_snapshot(engine, "b")
        assert await read_in_snapshots(engine, "a/f") == b"1"
        assert await read_in_snapshots(engine, "c/f") == b"2"
        await delete_snapshot(engine, "c")
        assert kept_objects(engine) == [b"1"]
        assert await read_in_snapshots(engine, "a/f") == b"1"
        await delete_snapshot(engine, "a")
        assert kept_objects(engine) == []


async def test_an_open_file_that_is_written_is_in_the_snapshot_as_it_was_then(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        number, _ = await engine.files.create(ROOT_INO, b"log", 0o644, os.O_RDWR, ROOT_CALLER)
        await engine.files.write(number, 0, b"first")
        await make_snapshot(engine, "one")
        await engine.files.write(number, 5, b" second")
        assert await read_in_snapshots(engine, "one/log") == b"first"
        await engine.files.release(number)
        await drained(engine)
        assert await read_in_snapshots(engine, "one/log") == b"first"
        assert (await find_in_snapshots(engine, "one/log")).size_bytes == 5


@semantics(
    "S-SNAP-5",
    "With `--no-flush` a file whose newest bytes were not in the store is in the snapshot as the store had it, and cannot be opened there (ESTALE) if the store had nothing of it.",
)
async def test_without_a_flush_a_file_is_there_as_the_store_had_it(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path, upload_delay_s=3600.0)) as engine:
        known = await engine.write_file("known", b"stored")
        await drained(engine)
        await overwrite(engine, known, b"not yet stored")
        await engine.write_file("new", b"only here")
        await make_snapshot(engine, "one", flush=False)
        for _ in range(2):
            assert await read_in_snapshots(engine, "one/known") == b"stored"
            assert (await find_in_snapshots(engine, "one/known")).size_bytes == len(b"stored")
            with pytest.raises(StaleContent):
                await read_in_snapshots(engine, "one/new")
            await drained(engine)  # and it stays so when the bytes have reached the store
        assert objects_in(engine.bucket) == {"known": b"not yet stored", "new": b"only here"}


async def test_nothing_in_a_snapshot_can_be_changed(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        directory = await engine.names.create(ROOT_INO, b"d", 0o040755, ROOT_CALLER)
        await engine.write_file("f", b"bytes", parent=directory.ino)
        await make_snapshot(engine, "one")
        folder, file = await find_in_snapshots(engine, "one/d"), await find_in_snapshots(engine, "one/d/f")
        names, files, attributes = engine.names, engine.files, engine.attributes
        attempts = [
            lambda: names.create(folder.ino, b"x", 0o100644, ROOT_CALLER),
            lambda: names.create_unnamed(folder.ino, 0o100644, ROOT_CALLER),
            lambda: names.unlink(folder.ino, b"f"),
            lambda: names.rmdir(folder.ino, b"x"),
            lambda: names.rename(folder.ino, b"f", ROOT_INO, b"f", 0),
            lambda: names.rename(ROOT_INO, b"d", folder.ino, b"d", 0),
            lambda: names.link(directory.ino, folder.ino, b"x"),
            lambda: files.open(file.ino, os.O_RDWR, ROOT_CALLER),
            lambda: attributes.set(file.ino, AttributeChange(mode=0o600), ROOT_CALLER),
            lambda: attributes.set_xattr(file.ino, b"user.x", b"1"),
            lambda: attributes.remove_xattr(file.ino, b"user.x"),
        ]
        for attempt in attempts:
            with pytest.raises(ReadOnly) as caught:
                await attempt()  # type: ignore[no-untyped-call]
            assert caught.value.errno == errno.EROFS
        with pytest.raises(NotPermitted):
            await names.link(file.ino, ROOT_INO, b"x")


async def test_a_handle_of_the_front_and_one_of_the_engine_are_not_mixed_up(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        await engine.write_file("f", b"bytes")
        await make_snapshot(engine, "one")
        file = await find_in_snapshots(engine, "one/f")
        number = await engine.files.open(file.ino, os.O_RDONLY, ROOT_CALLER)
        assert engine.parts.services.snapshots.has_open(number)
        assert not engine.parts.services.snapshots.has_open(FRONT_HANDLE | number)
        assert await engine.files.read(FRONT_HANDLE | file.ino, 1, 3) == b"yte"
        await engine.files.release(number)
        assert not engine.parts.services.snapshots.has_open(number)


async def test_a_reader_goes_on_while_the_object_is_copied_away(tmp_path: Path) -> None:
    # Without tiers every read asks the store.
    async with running_engine(settings_for(tmp_path, tiers=())) as engine:
        inode = await engine.write_file("f", b"old")
        await make_snapshot(engine, "one")
        number = await engine.files.open((await find_in_snapshots(engine, "one/f")).ino, os.O_RDONLY, ROOT_CALLER)
        await overwrite(engine, inode, b"new")
        await drained(engine)
        assert await engine.files.read(number, 0, 10) == b"old"
        await engine.files.release(number)


async def test_an_object_is_not_overwritten_when_it_cannot_be_copied(tmp_path: Path) -> None:
    store: WatchedStore

    def wrap(inner: ObjectStore) -> ObjectStore:
        nonlocal store
        store = WatchedStore(inner)
        return store  # type: ignore[return-value]

    def refuse(operation: str, key: str) -> None:
        if operation == "copy":
            raise StoreUnavailable("no copies today")

    async with running_engine(settings_for(tmp_path, store_timeout_s=0.05), wrap=wrap) as engine:
        inode = await engine.write_file("f", b"old")
        await make_snapshot(engine, "one")
        store.before = refuse
        await overwrite(engine, inode, b"new")
        with trio.fail_after(60):
            while inode.ino not in engine.parts.publisher.failures:
                await trio.sleep(0.01)
        assert objects_in(engine.bucket) == {"f": b"old"}
        store.before = lambda operation, key: None
        await drained(engine)
        assert objects_in(engine.bucket) == {"f": b"new"}
        assert await read_in_snapshots(engine, "one/f") == b"old"


async def test_a_snapshot_waits_for_an_upload_that_is_under_way(tmp_path: Path) -> None:
    store: WatchedStore

    def wrap(inner: ObjectStore) -> ObjectStore:
        nonlocal store
        store = WatchedStore(inner)
        return store  # type: ignore[return-value]

    async with running_engine(settings_for(tmp_path), wrap=wrap) as engine:
        inode = await engine.write_file("f", b"old")
        await drained(engine)
        hold = store.hold("put", "f")
        await overwrite(engine, inode, b"new")
        await trio.to_thread.run_sync(hold.reached.wait)
        made: list[str] = []

        async def make() -> None:
            await make_snapshot(engine, "one", flush=False)
            made.append("one")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(make)
            await trio.testing.wait_all_tasks_blocked()
            assert made == []
            hold.go.set()
        assert await read_in_snapshots(engine, "one/f") == b"new"


async def test_a_store_that_does_not_answer_makes_no_snapshot(tmp_path: Path) -> None:
    store: WatchedStore

    def wrap(inner: ObjectStore) -> ObjectStore:
        nonlocal store
        store = WatchedStore(inner)
        return store  # type: ignore[return-value]

    def refuse(operation: str, key: str) -> None:
        raise StoreUnavailable("not today")

    async with running_engine(settings_for(tmp_path, store_timeout_s=0.05), wrap=wrap) as engine:
        store.before = refuse
        await engine.write_file("f", b"bytes")
        with pytest.raises(StoreError, match="no snapshot was made"):
            await make_snapshot(engine, "one")
        with engine.parts.db.read() as txn:
            assert snapshots.every(txn) == []


@semantics(
    "S-SNAP-6",
    "A directory whose listing was not known when a snapshot was made cannot be opened in it (ESTALE); with `--complete` everything is listed first.",
)
async def test_only_what_was_listed_can_be_opened(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    (tmp_path / "bucket" / "d").mkdir()
    (tmp_path / "bucket" / "d" / "f").write_bytes(b"theirs")
    for number in range(1100):  # more than one page: the root's listing does not answer for all of it
        (tmp_path / "bucket" / "d" / f"g{number}").touch()
    async with running_engine(settings) as engine:
        await engine.names.open_directory(ROOT_INO)
        await make_snapshot(engine, "bare")
        with pytest.raises(StaleContent):
            await engine.names.open_directory((await find_in_snapshots(engine, "bare/d")).ino)
        await make_snapshot(engine, "full", complete=True)
        await engine.names.open_directory((await find_in_snapshots(engine, "full/d")).ino)
        assert await read_in_snapshots(engine, "full/d/f") == b"theirs"
        with pytest.raises(StaleContent):
            await engine.names.open_directory((await find_in_snapshots(engine, "bare/d")).ino)


async def test_differences(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        handlers = SnapshotHandlers(engine.parts)
        directory = await engine.names.create(ROOT_INO, b"d", 0o040755, ROOT_CALLER)
        changed = await engine.write_file("changed", b"old")
        mode = await engine.write_file("mode", b"same")
        await engine.write_file("gone", b"", parent=directory.ino)
        await engine.write_file("same", b"same", parent=directory.ino)
        await make_snapshot(engine, "one")
        await overwrite(engine, changed, b"new")
        await engine.attributes.set(mode.ino, AttributeChange(mode=0o600), ROOT_CALLER)
        await engine.names.unlink(directory.ino, b"gone")
        fresh = await engine.names.create(ROOT_INO, b"fresh", 0o040755, ROOT_CALLER)
        await engine.write_file("f", b"1", parent=fresh.ino)

        async def diff(other: bytes | None) -> set[tuple[str, str, str]]:
            reply = await handlers.diff(SnapshotDiffRequest(name=b"one", other=other), lambda progress: None)
            assert reply.added + reply.removed + reply.changed == len(reply.differences)
            return {(found.change, found.path, found.what) for found in reply.differences}

        expected = {
            ("changed", "changed", "content"),
            ("changed", "mode", "attributes"),
            ("removed", "d/gone", ""),
            ("added", "fresh", ""),
            ("added", "fresh/f", ""),
        }
        assert await diff(None) == expected
        await drained(engine)
        assert await diff(None) == expected
        await make_snapshot(engine, "two")
        await engine.names.unlink(ROOT_INO, b"changed")
        assert await diff(b"two") == expected
        assert await diff(b"one") == set()


async def test_what_cannot_be_a_snapshot_is_refused(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        await engine.write_file("f", b"x")
        await make_snapshot(engine, "one")
        for name, path, error in (
            ("one", "", AlreadyExists),
            ("", "", InvalidArgument),
            ("..", "", InvalidArgument),
            ("a/b", "", InvalidArgument),
            ("n", "f", NotADirectory),
            ("n", "none", NotFound),
            ("n", ".tierfs/snapshots/one", InvalidArgument),
        ):
            with pytest.raises(error):
                await make_snapshot(engine, name, path)
        with pytest.raises(NotFound):
            await delete_snapshot(engine, "two")


@semantics(
    "S-SNAP-7",
    "When a snapshot is deleted, the copies of objects and the records that no other one needs go, also if the engine is killed meanwhile.",
)
async def test_a_snapshot_is_there_after_a_restart_and_its_sweep_goes_on(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    async with running_engine(settings) as engine:
        inode = await engine.write_file("f", b"old")
        await make_snapshot(engine, "one")
        await overwrite(engine, inode, b"new")
        await drained(engine)
    assert check(tmp_path / "state") == []
    async with running_engine(settings) as engine:
        assert await read_in_snapshots(engine, "one/f") == b"old"
        # The row goes, and the engine ends before anything is swept.
        await engine.parts.db.commit(lambda txn: snapshots.delete(txn, b"one"))
        assert kept_objects(engine) == [b"old"]
    async with running_engine(settings) as engine:
        with trio.fail_after(60):
            while sum(len(names) for _, _, names in os.walk(engine.bucket / ".tierfs" / "snapshots")):
                await trio.sleep(0.01)
    assert check(tmp_path / "state") == []


async def test_a_dump_has_the_snapshots_too(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        inode = await engine.write_file("f", b"old")
        await make_snapshot(engine, "one")
        await overwrite(engine, inode, b"new")
        await drained(engine)
        with engine.parts.db.read() as txn:
            before = history(txn)
    text = io.StringIO()
    lines = dump(tmp_path / "state", text)
    text.seek(0)
    (tmp_path / "other").mkdir()
    assert load(tmp_path / "other", text) == lines
    assert check(tmp_path / "other") == []
    with open_namespace(tmp_path / "other") as ns, ns.db.read() as txn:
        assert history(txn) == before
        assert snapshots.find(txn, b"one").path == b""


def history(txn: object) -> dict[str, list[tuple[bytes, bytes]]]:
    return {
        name: list(txn.cursor(getattr(txn.tables, name)).iternext(True, True))  # type: ignore[attr-defined]
        for name in HISTORY_TABLES
    }


@semantics(
    "S-SNAP-4",
    "Making a snapshot is one transaction that writes the same few rows whatever the number of entries.",
)
def test_making_a_snapshot_writes_the_same_few_rows_whatever_there_is(tmp_path: Path) -> None:
    """Of time the benchmark speaks; here the rows are counted."""
    for count in (3, 3000):
        with open_namespace(tmp_path / str(count)) as ns:

            def fill(txn: object, count: int = count) -> None:
                for number in range(count):
                    tree.create(
                        txn,  # type: ignore[arg-type]
                        ROOT_INO,
                        b"f%d" % number,
                        mode=0o100644,
                        uid=0,
                        gid=0,
                        now_ns=1,
                    )

            ns.change(fill)
            before = entries(ns.db)
            ns.change(lambda txn: snapshots.create(txn, b"one", ROOT_INO, now_ns=1))
            after = entries(ns.db)
            assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {
                "snapshot": 1,
                "meta": 1,  # the frontier; epoch and format are changed
            }


def entries(db: object) -> dict[str, int]:
    with db.read() as txn:  # type: ignore[attr-defined]
        return {
            name: txn.entries(getattr(txn.tables, name))
            for name in ("inode", "dirent", "meta", *HISTORY_TABLES)
        }


def test_a_database_without_snapshots_keeps_its_records_in_place(tmp_path: Path) -> None:
    with open_namespace(tmp_path) as ns:
        file = ns.create("f")
        ns.change(lambda txn: tree.set_attributes(txn, file.ino, mode=0o600, now_ns=2))
        ns.change(lambda txn: tree.unlink(txn, ROOT_INO, b"f", now_ns=3))
        with ns.db.read() as txn:
            assert not [name for name in HISTORY_TABLES if txn.entries(getattr(txn.tables, name))]


def test_a_change_in_the_same_group_as_a_snapshot_is_kept_for_it(tmp_path: Path) -> None:
    """Changes that arrive together share a transaction: what comes after the snapshot in it is after it."""
    with open_namespace(tmp_path) as ns:
        file = ns.create("f")

        def both(txn: object) -> None:
            tree.set_attributes(txn, file.ino, mode=0o640, now_ns=2)  # type: ignore[arg-type]
            snapshots.create(txn, b"one", ROOT_INO, now_ns=3)  # type: ignore[arg-type]
            tree.set_attributes(txn, file.ino, mode=0o600, now_ns=4)  # type: ignore[arg-type]

        ns.change(both)
        with ns.db.read() as txn:
            row = snapshots.find(txn, b"one")
            assert past.inode(txn, row, file.ino).mode & 0o777 == 0o640
            assert tree.get(txn, file.ino).mode & 0o777 == 0o600


def test_a_link_that_was_forgotten_still_has_its_target(tmp_path: Path) -> None:
    with open_namespace(tmp_path) as ns:
        link = ns.create("link", target=b"there")
        ns.change(lambda txn: tree.set_xattr(txn, link.ino, b"trusted.a", b"1", now_ns=1))
        ns.change(lambda txn: snapshots.create(txn, b"one", ROOT_INO, now_ns=2))
        ns.change(lambda txn: tree.unlink(txn, ROOT_INO, b"link", now_ns=3))
        ns.change(lambda txn: tree.reap(txn, link.ino))
        with ns.db.read() as txn:
            row = snapshots.find(txn, b"one")
            assert past.lookup(txn, row, ROOT_INO, b"link").ino == link.ino
            assert past.readlink(txn, row, link.ino) == b"there"
            assert past.xattrs(txn, row, link.ino) == {b"trusted.a": b"1"}


def test_a_snapshot_that_failed_leaves_no_trace(tmp_path: Path) -> None:
    with open_namespace(tmp_path) as ns:
        file = ns.create("f")

        def fail(txn: object) -> None:
            snapshots.create(txn, b"one", ROOT_INO, now_ns=3)  # type: ignore[arg-type]
            raise TierfsError("changed my mind")

        with pytest.raises(TierfsError):
            ns.change(fail)
        ns.change(lambda txn: tree.set_attributes(txn, file.ino, mode=0o600, now_ns=4))
        with ns.db.read() as txn:
            assert snapshots.every(txn) == []
            assert not txn.entries(txn.tables.oldinode)
