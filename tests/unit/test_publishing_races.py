"""Names change while requests for them are under way: nothing is lost, nothing comes back, nothing is left."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from tests.support.engine import ROOT_CALLER, Engine, drained, objects_in, running_engine, settings_for
from tests.support.watched_store import Hold, WatchedStore
from tierfs.config import Settings
from tierfs.fs.attributes import AttributeChange
from tierfs.namespace import publish
from tierfs.store.base import ObjectStore
from tierfs.types import ROOT_INO


@asynccontextmanager
async def watched_engine(
    settings: Settings, *, publishing: bool = True
) -> AsyncIterator[tuple[Engine, WatchedStore]]:
    stores: list[WatchedStore] = []

    def wrap(store: ObjectStore) -> ObjectStore:
        stores.append(WatchedStore(store))
        return stores[0]  # type: ignore[return-value]

    async with running_engine(settings, publishing=publishing, wrap=wrap) as engine:
        yield engine, stores[0]


async def reached(hold: Hold) -> None:
    with trio.fail_after(60):
        while not hold.reached.is_set():
            await trio.sleep(0.005)


def assert_both_kept(engine: Engine, key: str, ours: bytes) -> None:
    """``theirs`` at the key, and what was written here under a name beside it; nothing else."""
    objects = objects_in(engine.bucket)
    assert objects.pop(key) == b"theirs"
    ((name, body),) = objects.items()
    assert name.startswith(f"{key}.conflict-")
    assert body == ours


async def change_in_place(engine: Engine, ino: int, data: bytes, offset: int = 0) -> None:
    number = await engine.files.open(ino, os.O_RDWR, ROOT_CALLER)
    await engine.files.write(number, offset, data)
    await engine.files.flush(number)
    await engine.files.release(number)


async def test_a_name_is_reused_while_its_old_file_is_being_uploaded(tmp_path: Path) -> None:
    async with watched_engine(settings_for(tmp_path)) as (engine, store):
        hold = store.hold("put", "a")
        await engine.write_file("a", b"old")
        await reached(hold)
        await engine.names.unlink(ROOT_INO, b"a")
        inode = await engine.write_file("a", b"new")
        await trio.sleep(0.5)  # time to go wrong in
        hold.go.set()
        await drained(engine)
        assert objects_in(engine.bucket) == {"a": b"new"}
        assert await engine.read_file(inode.ino) == b"new"


async def test_a_file_removed_during_its_upload_does_not_come_back(tmp_path: Path) -> None:
    async with watched_engine(settings_for(tmp_path, ttl_s=0.0, negative_ttl_s=0.0)) as (engine, store):
        hold = store.hold("put", "a")
        await engine.write_file("a", b"old")
        await reached(hold)
        await engine.names.unlink(ROOT_INO, b"a")
        engine.parts.publisher.note_deletion()
        await trio.sleep(0.3)  # a pass over the doomed keys, which must leave this one alone
        hold.go.set()
        with trio.fail_after(60):
            while not (engine.bucket / "a").exists():
                await trio.sleep(0.001)
        await engine.parts.services.refresher.listed(ROOT_INO)
        assert [name for name, _, _ in engine.names.read_directory(ROOT_INO, 0)] == []
        await drained(engine)
        assert objects_in(engine.bucket) == {}


async def test_another_version_is_on_its_way_when_the_file_is_removed(tmp_path: Path) -> None:
    """The bucket then holds a version that no row names; it is ours all the same."""
    async with watched_engine(settings_for(tmp_path, ttl_s=0.0, negative_ttl_s=0.0)) as (engine, store):
        inode = await engine.write_file("a", b"first")
        await drained(engine)
        hold = store.hold("put", "a")
        await change_in_place(engine, inode.ino, b"other")
        await reached(hold)
        await engine.names.unlink(ROOT_INO, b"a")
        hold.go.set()
        with trio.fail_after(60):
            while (engine.bucket / "a").exists() and (engine.bucket / "a").read_bytes() != b"other":
                await trio.sleep(0.001)
        await engine.parts.services.refresher.listed(ROOT_INO)
        assert [name for name, _, _ in engine.names.read_directory(ROOT_INO, 0)] == []
        await drained(engine)
        assert objects_in(engine.bucket) == {}


async def test_a_further_name_is_taken_by_another_file_while_it_is_written(tmp_path: Path) -> None:
    async with watched_engine(settings_for(tmp_path)) as (engine, store):
        linked = await engine.write_file("first", b"linked")
        await engine.write_file("other", b"other bytes")
        await drained(engine)
        hold = store.hold("copy", "second")
        await engine.names.link(linked.ino, ROOT_INO, b"second")
        await reached(hold)
        await engine.names.rename(ROOT_INO, b"other", ROOT_INO, b"second", 0)
        await trio.sleep(0.5)
        hold.go.set()
        await drained(engine)
        assert objects_in(engine.bucket) == {"first": b"linked", "second": b"other bytes"}


async def test_a_name_goes_while_another_key_is_being_deleted(tmp_path: Path) -> None:
    """A pass over the doomed keys sees a new file at one of them, and waits; then that file goes as well."""
    async with watched_engine(settings_for(tmp_path, upload_delay_s=0.2)) as (engine, store):
        await engine.write_file("a", b"1")
        await engine.write_file("b", b"2")
        await drained(engine)
        hold = store.hold("delete", "a")
        await engine.names.unlink(ROOT_INO, b"b")
        await engine.names.create(ROOT_INO, b"b", 0o100644, ROOT_CALLER)
        await engine.names.unlink(ROOT_INO, b"a")
        await reached(hold)
        await engine.names.unlink(ROOT_INO, b"b")
        hold.go.set()
        await drained(engine)
        assert objects_in(engine.bucket) == {}


async def test_a_key_that_is_being_deleted_is_not_written(tmp_path: Path) -> None:
    """The new file waits until the old object has gone; else the deletion could take the new one."""
    async with watched_engine(settings_for(tmp_path)) as (engine, store):
        await engine.write_file("a", b"old")
        await drained(engine)
        hold = store.hold("delete", "a")
        await engine.names.unlink(ROOT_INO, b"a")
        await reached(hold)
        await engine.write_file("a", b"new")
        await trio.sleep(0.5)
        assert objects_in(engine.bucket) == {"a": b"old"}
        hold.go.set()
        await drained(engine)
        assert objects_in(engine.bucket) == {"a": b"new"}


def put_of_another_node(engine: Engine, name: str, data: bytes) -> None:
    draft = engine.bucket / ".draft"
    draft.write_bytes(data)
    draft.rename(engine.bucket / name)


async def replaced_after_unlink(engine: Engine, store: WatchedStore) -> Hold:
    """Our file ``a`` has been removed, and another node's is there before the deletion goes out."""
    await engine.write_file("a", b"ours")
    await drained(engine)
    hold = store.hold("delete", "a")
    await engine.names.unlink(ROOT_INO, b"a")
    await reached(hold)
    put_of_another_node(engine, "a", b"theirs")
    return hold


async def listed_names(engine: Engine) -> list[bytes]:
    await engine.parts.services.refresher.listed(ROOT_INO)
    return [name for name, _, _ in engine.names.read_directory(ROOT_INO, 0)]


@pytest.mark.semantics(
    "S-MOVE-7",
    "What others put at the path of a removed or renamed file before its object is deleted stays, and appears as a new file; a bucket whose server does not know conditional deletes cannot promise that.",
)
@pytest.mark.parametrize("renamed", [False, True], ids=["removed", "renamed"])
async def test_another_node_writes_to_a_key_that_is_about_to_be_deleted(tmp_path: Path, renamed: bool) -> None:
    async with watched_engine(settings_for(tmp_path, ttl_s=0.0, negative_ttl_s=0.0)) as (engine, store):
        await engine.write_file("a", b"ours")
        await engine.write_file("gone", b"nobody touches it")
        await drained(engine)
        hold = store.hold("delete", "a")
        if renamed:
            await engine.names.rename(ROOT_INO, b"a", ROOT_INO, b"b", 0)
        else:
            await engine.names.unlink(ROOT_INO, b"a")
        await engine.names.unlink(ROOT_INO, b"gone")
        await reached(hold)
        put_of_another_node(engine, "a", b"theirs")
        before = engine.parts.publisher._deletions.deleted_count
        hold.go.set()
        await drained(engine)
        kept = {"b": b"ours"} if renamed else {}
        assert objects_in(engine.bucket) == {"a": b"theirs", **kept}
        assert engine.parts.publisher._deletions.pending() == 0
        assert engine.parts.publisher._deletions.deleted_count - before <= 1
        assert set(await listed_names(engine)) == {b"a", *(name.encode() for name in kept)}
        inode = await engine.names.lookup(ROOT_INO, b"a")
        assert await engine.read_file(inode.ino) == b"theirs"


async def test_a_listing_is_under_way_when_a_deletion_spares_what_others_wrote(tmp_path: Path) -> None:
    """It knows the other's object already, and must not take it for what was deleted."""
    async with watched_engine(settings_for(tmp_path, ttl_s=0.0, negative_ttl_s=0.0)) as (engine, store):
        hold = await replaced_after_unlink(engine, store)
        departures = engine.parts.db.tables.departures
        with departures.listing() as began:
            hold.go.set()
            await drained(engine)
            assert not departures.has_key("a", began)
        assert await listed_names(engine) == [b"a"]


async def test_a_new_file_meets_what_a_deletion_spared(tmp_path: Path) -> None:
    async with watched_engine(settings_for(tmp_path)) as (engine, store):
        hold = await replaced_after_unlink(engine, store)
        await engine.write_file("a", b"ours again")
        hold.go.set()
        await drained(engine)
        assert_both_kept(engine, "a", b"ours again")


async def test_a_write_begins_while_the_object_is_being_moved(tmp_path: Path) -> None:
    """What the writer leaves as it was comes from an object that is on its way to another key."""
    body = os.urandom(700_000)
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "a").write_bytes(body)
    async with watched_engine(settings_for(tmp_path)) as (engine, store):
        inode = await engine.names.lookup(ROOT_INO, b"a")
        hold = store.hold("copy", "b")
        await engine.names.rename(ROOT_INO, b"a", ROOT_INO, b"b", 0)
        await reached(hold)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(change_in_place, engine, inode.ino, b"changed", 300_000)
            await trio.sleep(0.2)
            hold.go.set()
        await drained(engine)
        expected = body[:300_000] + b"changed" + body[300_007:]
        assert objects_in(engine.bucket) == {"b": expected}
        assert await engine.read_file(inode.ino) == expected


async def test_a_truncation_is_under_way_when_the_upload_ends(tmp_path: Path) -> None:
    """truncate(2) has no handle that would say that somebody is writing."""
    async with watched_engine(settings_for(tmp_path)) as (engine, store):
        hold = store.hold("put", "a")
        inode = await engine.write_file("a", b"0123456789")
        await reached(hold)
        content = engine.parts.contents.peek(inode.ino)
        assert content is not None
        assert content.staging is not None
        lock = content.staging._lock
        await lock.acquire()  # what a truncation waits for
        async with trio.open_nursery() as nursery:
            change = AttributeChange(size_bytes=4)
            nursery.start_soon(engine.attributes.set, inode.ino, change, ROOT_CALLER)
            await trio.sleep(0.05)
            hold.go.set()
            await trio.sleep(0.2)
            lock.release()
        await drained(engine)
        assert objects_in(engine.bucket) == {"a": b"0123"}
        assert await engine.read_file(inode.ino) == b"0123"


async def test_a_crash_while_a_further_name_is_written(tmp_path: Path) -> None:
    """The copy arrives, nobody records it, and the name goes."""
    settings = settings_for(tmp_path)
    async with watched_engine(settings) as (engine, store):
        inode = await engine.write_file("first", b"linked")
        await drained(engine)
        hold = store.hold("copy", "second")
        await engine.names.link(inode.ino, ROOT_INO, b"second")
        await reached(hold)
    hold.go.set()
    await trio.to_thread.run_sync(store.wait_until_idle)
    assert objects_in(tmp_path / "bucket") == {"first": b"linked", "second": b"linked"}
    async with watched_engine(settings, publishing=False) as (engine, store):
        await engine.names.unlink(ROOT_INO, b"second")
    async with watched_engine(settings) as (engine, store):
        await drained(engine)
        assert objects_in(engine.bucket) == {"first": b"linked"}


async def test_two_claims_left_by_a_crash_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Both uploads were under way, neither was acknowledged, and then the files changed places."""
    settings = settings_for(tmp_path)
    async with watched_engine(settings) as (engine, store):
        holds = [store.hold("put", key) for key in ("a", "b")]
        await engine.write_file("a", b"AAAA")
        await engine.write_file("b", b"BBBB")
        for hold in holds:
            await reached(hold)
    for hold in holds:
        hold.go.set()
    await trio.to_thread.run_sync(store.wait_until_idle)
    async with watched_engine(settings, publishing=False) as (engine, store):
        with engine.parts.db.read() as txn:
            assert publish.owner_of_key(txn, "a") is not None
        await engine.names.rename(ROOT_INO, b"a", ROOT_INO, b"b", 2)
    async with watched_engine(settings) as (engine, store):
        await drained(engine)
        assert objects_in(engine.bucket) == {"a": b"BBBB", "b": b"AAAA"}


async def test_an_empty_file_does_not_overwrite_what_another_node_wrote(tmp_path: Path) -> None:
    async with watched_engine(settings_for(tmp_path, upload_delay_s=60.0)) as (engine, _):
        await engine.write_file("a", b"")
        (engine.bucket / "a").write_bytes(b"theirs")
        await drained(engine)
        assert_both_kept(engine, "a", b"")


async def test_a_moved_object_does_not_overwrite_what_another_node_wrote(tmp_path: Path) -> None:
    async with watched_engine(settings_for(tmp_path)) as (engine, _):
        await engine.write_file("a", b"ours")
        await drained(engine)
        (engine.bucket / "b").write_bytes(b"theirs")
        await engine.names.rename(ROOT_INO, b"a", ROOT_INO, b"b", 0)
        await drained(engine)
        assert_both_kept(engine, "b", b"ours")


async def test_an_open_file_is_read_on_after_it_was_removed(tmp_path: Path) -> None:
    """As on any file system; here most of its bytes are still in the store only."""
    body = os.urandom(3_000_000)
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "a").write_bytes(body)
    async with watched_engine(settings_for(tmp_path)) as (engine, _):
        inode = await engine.names.lookup(ROOT_INO, b"a")
        number = await engine.files.open(inode.ino, os.O_RDONLY, ROOT_CALLER)
        assert await engine.files.read(number, 0, 100) == body[:100]
        await engine.names.unlink(ROOT_INO, b"a")
        await drained(engine)
        assert await engine.files.read(number, 2_000_000, 100) == body[2_000_000:2_000_100]
        await engine.files.release(number)
        await drained(engine)
        assert objects_in(engine.bucket) == {}


async def test_an_open_file_is_read_on_after_it_was_replaced(tmp_path: Path) -> None:
    body = os.urandom(3_000_000)
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "a").write_bytes(body)
    async with watched_engine(settings_for(tmp_path)) as (engine, _):
        inode = await engine.names.lookup(ROOT_INO, b"a")
        number = await engine.files.open(inode.ino, os.O_RDONLY, ROOT_CALLER)
        assert await engine.files.read(number, 0, 100) == body[:100]
        await engine.write_file("new", b"new")
        await engine.names.rename(ROOT_INO, b"new", ROOT_INO, b"a", 0)
        await drained(engine)
        assert objects_in(engine.bucket) == {"a": b"new"}
        assert await engine.files.read(number, 2_000_000, 100) == body[2_000_000:2_000_100]
        await engine.files.release(number)
        await drained(engine)
        kept = [path for path in (engine.bucket / ".tierfs").rglob("*") if path.is_file()]
        assert [path.name for path in kept] == ["lock"]


async def test_a_new_file_that_was_found_before_it_was_taken_in(tmp_path: Path) -> None:
    """The commit thread makes files for a native front; the namespace shows them before this thread is told."""
    async with running_engine(settings_for(tmp_path), publishing=False) as engine:
        contents = engine.parts.contents
        inode = await engine.names.create(ROOT_INO, b"a", 0o100644, ROOT_CALLER)
        found = await contents.acquire(inode.ino)
        assert contents.acquire_new(inode) is found
        assert found.users == 2
        await contents.release(found)
        await contents.release(found)
        assert contents.peek(inode.ino) is None
