"""From names and bytes in the namespace to objects in the bucket: an engine without a kernel."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import cast

import pytest
import trio
import trio.testing

from tests.support.engine import (
    MIB,
    ROOT_CALLER,
    Engine,
    drained,
    objects_in,
    running_engine,
    settings_for,
)
from tests.support.watched_store import WatchedStore
from tierfs.config import TierSetting
from tierfs.errors import PreconditionFailed, StaleContent, StoreUnavailable, TierfsError, TierFull
from tierfs.fs.attributes import AttributeChange
from tierfs.namespace import publish, tree
from tierfs.store.base import ObjectStore
from tierfs.store.faulty import Faults, FaultyStore, Rule
from tierfs.types import ROOT_INO
from tierfs.writeback.backlog import Awaited
from tierfs.writeback.content import FileContent


async def test_a_closed_file_becomes_an_object_and_stays_readable(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        inode = await engine.write_file("a.bin", b"hello")
        await drained(engine)
        assert objects_in(engine.bucket) == {"a.bin": b"hello"}
        assert await engine.read_file(inode.ino) == b"hello"
        with engine.parts.db.read() as txn:
            assert publish.dirty_row(txn, inode.ino) is None


@pytest.mark.semantics(
    "S-DUR-6",
    "What is uploaded has been synced on this node before anybody can see it in the store, so that what a power cut leaves of unsynced bytes never replaces it there.",
)
async def test_what_the_store_gets_is_durable_here_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut could take the commit that notes an upload: what is uploaded again has to be the same."""
    synced: list[bytes] = []
    real = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        synced.append(os.pread(descriptor, 100, 0))
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    seen: list[tuple[str, bool]] = []

    def wrap(store: ObjectStore) -> ObjectStore:
        watched = WatchedStore(store)
        watched.before = lambda operation, key: seen.append((operation, b"not synced by anybody" in synced))
        return cast(ObjectStore, watched)

    async with running_engine(settings_for(tmp_path), wrap=wrap) as engine:
        await engine.write_file("a.bin", b"not synced by anybody")
        await drained(engine)
    assert seen == [("put", True)]


async def test_a_file_that_is_removed_while_it_is_opened_is_looked_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the inode and the use of its bytes others may remove both: no error of ours."""
    async with running_engine(settings_for(tmp_path), publishing=False) as engine:
        inode = await engine.write_file("a.bin", b"bytes")
        contents = engine.parts.contents
        acquire = contents.acquire

        async def late(ino: int) -> FileContent:
            await engine.names.unlink(ROOT_INO, b"a.bin")
            return await acquire(ino)

        monkeypatch.setattr(contents, "acquire", late)
        with pytest.raises(StaleContent):
            await engine.files.open(inode.ino, os.O_RDONLY, ROOT_CALLER)


async def test_a_file_that_is_opened_while_its_bytes_go_is_looked_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of a removed file go after a wait for the device: who opens it then does not get an error."""
    async with running_engine(settings_for(tmp_path), publishing=False) as engine:
        inode = await engine.write_file("a.bin", b"bytes")
        db = engine.parts.db
        sync = db.sync
        outcome: list[bytes | Exception] = []

        async def read() -> None:
            try:
                number = await engine.files.open(inode.ino, os.O_RDONLY, ROOT_CALLER)
                removed.set()
                await gone.wait()
                outcome.append(await engine.files.read(number, 0, 5))
                await engine.files.release(number)
            except TierfsError as error:
                outcome.append(error)

        async def sync_slowly() -> None:
            nursery.start_soon(read)
            with trio.move_on_after(0.5):
                await removed.wait()
            await sync()

        removed, gone = trio.Event(), trio.Event()
        async with trio.open_nursery() as nursery:
            monkeypatch.setattr(db, "sync", sync_slowly)
            await engine.names.unlink(ROOT_INO, b"a.bin")
            monkeypatch.undo()
            gone.set()
        assert [type(found) for found in outcome] == [StaleContent], outcome


async def test_what_a_change_answers_has_the_size_that_a_close_records_meanwhile(tmp_path: Path) -> None:
    """rsync and tar close a file and set its times at once: the kernel believes the size in the answer."""
    async with running_engine(settings_for(tmp_path, upload_delay_s=60.0)) as engine:
        sizes: list[int] = []

        async def set_time(ino: int) -> None:
            sizes.append((await engine.attributes.set(ino, AttributeChange(mtime_ns=1), ROOT_CALLER)).size_bytes)

        async def link(ino: int, name: bytes) -> None:
            sizes.append((await engine.names.link(ino, ROOT_INO, name)).size_bytes)

        # Who of two that share a transaction goes on first is left to chance.
        for number in range(30):
            name = f"{number}".encode()
            handle, inode = await engine.files.create(ROOT_INO, name, 0o644, os.O_WRONLY, ROOT_CALLER)
            await engine.files.write(handle, 0, b"bytes")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.files.release, handle)
                nursery.start_soon(set_time, inode.ino)
                nursery.start_soon(link, inode.ino, name + b".link")
        assert sizes == [5] * 60


async def test_what_is_done_after_a_write_is_not_older_than_it(tmp_path: Path) -> None:
    """The kernel stamps a write that it passes through some milliseconds ahead of our clock.

    Else the ctime would change once more when the close is recorded, if it is only then.
    """
    async with running_engine(settings_for(tmp_path, upload_delay_s=60.0)) as engine:
        handle, inode = await engine.files.create(ROOT_INO, b"a", 0o644, os.O_WRONLY, ROOT_CALLER)
        await engine.files.write(handle, 0, b"bytes")
        content = engine.parts.contents.peek(inode.ino)
        assert content is not None
        written_ns = content.mtime_ns = content.ctime_ns = content.ctime_ns + 10**12
        changed = await engine.attributes.set(inode.ino, AttributeChange(mtime_ns=1), ROOT_CALLER)
        await engine.files.release(handle)
        assert changed.ctime_ns == engine.attributes.get(inode.ino).ctime_ns == written_ns


async def test_write_close_rename_costs_one_upload(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path, upload_delay_s=60.0)) as engine:
        await engine.write_file("tmp", b"state")
        await engine.names.rename(ROOT_INO, b"tmp", ROOT_INO, b"final", 0)
        await drained(engine)
        assert objects_in(engine.bucket) == {"final": b"state"}
        assert engine.parts.store.counts.by_operation.get("put", 0) == 1
        assert engine.parts.store.counts.by_operation.get("copy", 0) == 0


async def test_rename_after_the_upload_moves_the_object_on_the_server(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        inode = await engine.write_file("old", b"bytes")
        await drained(engine)
        await engine.names.rename(ROOT_INO, b"old", ROOT_INO, b"new", 0)
        await drained(engine)
        assert objects_in(engine.bucket) == {"new": b"bytes"}
        assert engine.parts.store.counts.by_operation["put"] == 1
        assert await engine.read_file(inode.ino) == b"bytes"


async def test_two_files_exchange_names(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        await engine.write_file("a", b"AAAA")
        await engine.write_file("b", b"BBBB")
        await drained(engine)
        await engine.names.rename(ROOT_INO, b"a", ROOT_INO, b"b", 2)
        await drained(engine)
        assert objects_in(engine.bucket) == {"a": b"BBBB", "b": b"AAAA"}


async def test_a_directory_moves_with_everything_below(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        top = await engine.names.create(ROOT_INO, b"d", 0o040755, ROOT_CALLER)
        sub = await engine.names.create(top.ino, b"s", 0o040755, ROOT_CALLER)
        for number in range(5):
            await engine.write_file(f"f{number}", b"x" * number, parent=sub.ino)
        await drained(engine)
        await engine.names.rename(ROOT_INO, b"d", ROOT_INO, b"e", 0)
        await drained(engine)
        assert objects_in(engine.bucket) == {f"e/s/f{n}": b"x" * n for n in range(5)}


async def test_an_old_name_is_reused_before_the_object_has_moved_away(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        await engine.write_file("log", b"first")
        await drained(engine)
        await engine.names.rename(ROOT_INO, b"log", ROOT_INO, b"log.1", 0)
        await engine.write_file("log", b"second")
        await drained(engine)
        assert objects_in(engine.bucket) == {"log": b"second", "log.1": b"first"}


async def test_an_unlinked_file_leaves_no_object(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        await engine.write_file("a", b"1")
        await drained(engine)
        await engine.names.unlink(ROOT_INO, b"a")
        await drained(engine)
        assert objects_in(engine.bucket) == {}


async def test_a_drain_after_an_outage_waits_for_deletions(tmp_path: Path) -> None:
    """That the last sweep failed says nothing of the next one."""
    faults = Faults()
    async with running_engine(
        settings_for(tmp_path), wrap=lambda store: FaultyStore(store, faults)
    ) as engine:
        await engine.write_file("a", b"hello")
        await drained(engine)
        faults.set(Rule("outage", operation="delete*"))
        await engine.names.unlink(ROOT_INO, b"a")
        with trio.fail_after(60):
            while not engine.parts.deletions.failing:
                await trio.sleep(0.01)
        assert not await engine.parts.publisher.draining.drain()
        faults.clear()
        assert await engine.parts.publisher.draining.drain()
        assert objects_in(engine.bucket) == {}


@pytest.mark.semantics(
    "S-WRITE-14", "`tierfs flush` does not wait for what is written after it was called."
)
async def test_a_flush_does_not_wait_for_what_is_written_meanwhile(tmp_path: Path) -> None:
    """Whenever something is written, more is written: a drain would never end, a flush does."""
    async with running_engine(settings_for(tmp_path, upload_delay_s=3600.0)) as engine:
        publisher = engine.parts.publisher
        more = 0

        async def write_on() -> None:
            nonlocal more
            while True:
                await engine.write_file(f"later-{more}", b"later")
                more += 1

        for number in range(20):
            await engine.write_file(f"before-{number}", b"before")
        awaited = Awaited(later=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write_on)
            with trio.fail_after(60):
                assert await publisher.draining.settle(awaited)
            nursery.cancel_scope.cancel()
        found = objects_in(engine.bucket)
        assert {f"before-{number}" for number in range(20)} <= found.keys()
        assert more > 0
        assert (awaited.left_files, awaited.left_bytes) == (0, 0)
        assert awaited.found_files >= 20


async def test_a_change_during_the_upload_does_not_put_off_what_a_drain_waits_for(tmp_path: Path) -> None:
    stores: list[WatchedStore] = []

    def wrap(store: ObjectStore) -> ObjectStore:
        stores.append(WatchedStore(store))
        return cast(ObjectStore, stores[-1])

    async with running_engine(settings_for(tmp_path, upload_delay_s=3600.0), wrap=wrap) as engine:
        inode = await engine.write_file("a", b"first")
        hold = stores[-1].hold("put", "a")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drained, engine)
            await trio.to_thread.run_sync(hold.reached.wait, 60)
            handle = await engine.files.open(inode.ino, os.O_WRONLY, ROOT_CALLER)
            await engine.files.write(handle, 0, b"later")
            await engine.files.release(handle)
            hold.go.set()
        assert objects_in(engine.bucket) == {"a": b"later"}


async def test_a_flush_waits_for_the_files_below_a_renamed_directory(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path, upload_delay_s=3600.0)) as engine:
        directory = await engine.names.create(ROOT_INO, b"old", stat.S_IFDIR | 0o755, ROOT_CALLER)
        for number in range(5):
            await engine.write_file(f"f{number}", b"content", parent=directory.ino)
        await drained(engine)
        await engine.names.rename(ROOT_INO, b"old", ROOT_INO, b"new", 0)
        with trio.fail_after(60):
            assert await engine.parts.publisher.draining.settle(Awaited(later=False))
        assert objects_in(engine.bucket) == {f"new/f{number}": b"content" for number in range(5)}


async def test_a_flush_says_what_is_open_for_writing(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path, upload_delay_s=3600.0)) as engine:
        handle, _ = await engine.files.create(ROOT_INO, b"log", 0o644, os.O_WRONLY, ROOT_CALLER)
        await engine.files.write(handle, 0, b"12345")
        await engine.files.fsync(handle)
        awaited = Awaited(later=False)
        with trio.fail_after(60):
            assert await engine.parts.publisher.draining.settle(awaited)
        assert engine.parts.publisher.backlog.still_open(awaited) == (1, 5)
        await engine.files.flush(handle)
        await engine.files.release(handle)
        await drained(engine)
        assert engine.parts.publisher.backlog.still_open(awaited) == (0, 0)


async def test_an_upload_that_needs_room_does_not_wait_for_itself(tmp_path: Path) -> None:
    """What it has to fetch first finds the tier full of a file that is being written: nobody waits for ever."""
    tier = TierSetting(name="nvme", path=f"{tmp_path}/tier", capacity_bytes=8 * MIB, volatile=False)
    settings = settings_for(tmp_path, tiers=(tier,))
    old = os.urandom(6 * MIB)
    (tmp_path / "bucket" / "old").write_bytes(old)
    async with running_engine(settings) as engine:
        changed = await engine.files.open((await engine.names.lookup(ROOT_INO, b"old")).ino, 2, ROOT_CALLER)
        await engine.files.write(changed, 0, b"new" * MIB)
        growing, _ = await engine.files.create(ROOT_INO, b"growing", 0o644, 2, ROOT_CALLER)
        await engine.files.write(growing, 0, b"g" * (3 * MIB))
        await engine.files.flush(changed)
        await engine.files.release(changed)
        with trio.fail_after(60), pytest.raises(TierFull):
            for offset in range(3 * MIB, 12 * MIB, MIB):
                await engine.files.write(growing, offset, b"g" * MIB)
        await engine.files.flush(growing)
        await engine.files.release(growing)
        with trio.fail_after(60):
            while not await engine.parts.publisher.draining.drain():
                await trio.sleep(0.05)
        found = objects_in(engine.bucket)
        assert found["old"] == b"new" * MIB + old[3 * MIB :]
        assert set(found["growing"]) == set(b"g")


async def test_a_time_that_is_set_is_not_undone_by_the_close_before_it(tmp_path: Path) -> None:
    """RELEASE may come while the change of the time is being committed: neither waits for the other."""
    async with running_engine(settings_for(tmp_path, upload_delay_s=3600.0)) as engine:
        handle, inode = await engine.files.create(ROOT_INO, b"copy", 0o644, os.O_WRONLY, ROOT_CALLER)
        await engine.files.write(handle, 0, b"12345")
        gate = threading.Event()
        db, attributes = engine.parts.db, engine.attributes
        async with trio.open_nursery() as nursery:
            nursery.start_soon(db.commit, lambda txn: gate.wait(60))
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(attributes.set, inode.ino, AttributeChange(mtime_ns=1_000), ROOT_CALLER)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(engine.files.release, handle)
            await trio.testing.wait_all_tasks_blocked()
            gate.set()
        assert attributes.get(inode.ino).mtime_ns == 1_000
        with db.read() as txn:
            assert tree.get(txn, inode.ino).mtime_ns == 1_000


async def test_writes_to_an_unlinked_file_do_not_bring_it_back(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        number, _ = await engine.files.create(ROOT_INO, b"pid", 0o644, os.O_RDWR, ROOT_CALLER)
        await engine.names.unlink(ROOT_INO, b"pid")
        assert await engine.files.write(number, 0, b"123") == 3
        assert await engine.files.read(number, 0, 10) == b"123"
        await engine.files.flush(number)
        await engine.files.release(number)
        await drained(engine)
        assert objects_in(engine.bucket) == {}
        assert engine.parts.cache.dirty_contents() == []


async def test_append_to_an_object_of_others(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    (tmp_path / "bucket" / "log").write_bytes(b"a" * 300_000)
    async with running_engine(settings) as engine:
        inode = await engine.names.lookup(ROOT_INO, b"log")
        number = await engine.files.open(inode.ino, os.O_RDWR, ROOT_CALLER)
        await engine.files.write(number, 300_000, b"tail")
        await engine.files.flush(number)
        await engine.files.release(number)
        await drained(engine)
        assert objects_in(engine.bucket) == {"log": b"a" * 300_000 + b"tail"}


async def test_a_hard_link_is_a_second_object(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        inode = await engine.write_file("a", b"same")
        await engine.names.link(inode.ino, ROOT_INO, b"b")
        await drained(engine)
        assert objects_in(engine.bucket) == {"a": b"same", "b": b"same"}
        await engine.names.unlink(ROOT_INO, b"a")
        await drained(engine)
        assert objects_in(engine.bucket) == {"b": b"same"}


async def test_a_large_file_goes_up_in_parts(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, part_size_bytes=5 * MIB)
    body = os.urandom(MIB) * 12
    async with running_engine(settings) as engine:
        await engine.write_file("big", body)
        await drained(engine)
        assert objects_in(engine.bucket) == {"big": body}
        assert engine.parts.store.counts.by_operation["upload_part"] == 3
    assert list((tmp_path / "state" / "uploads").glob("*")) == []


async def test_the_backlog_survives_a_stop(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    async with running_engine(settings, publishing=False) as engine:
        inode = await engine.write_file("a", b"kept")
        assert objects_in(engine.bucket) == {}
    async with running_engine(settings) as engine:
        assert (await engine.names.lookup(ROOT_INO, b"a")).ino == inode.ino
        assert await engine.read_file(inode.ino) == b"kept"
        await drained(engine)
        assert objects_in(engine.bucket) == {"a": b"kept"}


async def test_both_versions_are_kept_when_another_node_wrote_first(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path, upload_delay_s=60.0)) as engine:
        await engine.write_file("model", b"ours")
        (engine.bucket / "model").write_bytes(b"theirs")
        await drained(engine)
        found = objects_in(engine.bucket)
        assert found.pop("model") == b"theirs"
        ((name, body),) = found.items()
        assert name.startswith("model.conflict-")
        assert body == b"ours"


class Unreachable:
    """A store whose uploads fail while ``down`` is set."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner
        self.down = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def put(self, *args: object, **kwargs: object) -> object:
        if self.down:
            raise StoreUnavailable("down")
        return self._inner.put(*args, **kwargs)  # type: ignore[arg-type]


@pytest.mark.semantics(
    "S-WRITE-15",
    "Above the dirty limit writers go no faster than the store takes the bytes; while the store fails they use the "
    "room that the tier has.",
)
async def test_above_the_dirty_limit_nobody_waits_for_what_has_failed_and_is_tried_again(tmp_path: Path) -> None:
    """A store that is full, or down for long: some attempt is always under way. There is room in the tier."""
    gate = threading.Event()
    attempts: list[str] = []

    class Failing(Unreachable):
        def put(self, *args: object, **kwargs: object) -> object:
            attempts.append(str(args[0]))
            if attempts.count(attempts[-1]) > 1:
                gate.wait(120)
            raise StoreUnavailable("no room in the store")

    settings = settings_for(tmp_path, store_timeout_s=0.0, dirty_limit_bytes=4 * MIB)
    async with running_engine(settings, wrap=lambda store: Failing(store)) as engine:  # type: ignore[arg-type, return-value]
        try:
            for name in ("a", "b"):
                await engine.write_file(name, bytes(2 * MIB))
            publisher = engine.parts.publisher
            with trio.fail_after(60):
                while len(publisher.failures) < 2 or len(attempts) < 4:
                    await trio.sleep(0.01)
            handle, _ = await engine.files.create(ROOT_INO, b"c", 0o644, os.O_WRONLY, ROOT_CALLER)
            with trio.fail_after(60):
                for offset in range(0, 4 * MIB, MIB):
                    await engine.files.write(handle, offset, bytes(MIB))
            await engine.files.release(handle)
        finally:
            gate.set()


async def test_an_outage_keeps_the_bytes_and_is_reported(tmp_path: Path) -> None:
    stores: list[Unreachable] = []

    def wrap(store: ObjectStore) -> ObjectStore:
        stores.append(Unreachable(store))
        stores[0].down = True
        return stores[0]  # type: ignore[return-value]

    async with running_engine(settings_for(tmp_path, store_timeout_s=0.05), wrap=wrap) as engine:
        inode = await engine.write_file("a", b"precious")
        with trio.fail_after(60):
            assert not await engine.parts.publisher.draining.drain()
        assert [failure.path for failure in engine.parts.publisher.failures.values()] == ["a"]
        assert await engine.read_file(inode.ino) == b"precious"
        stores[0].down = False
        await drained(engine)
        assert objects_in(engine.bucket) == {"a": b"precious"}
        assert engine.parts.publisher.failures == {}


async def test_a_replaced_object_is_a_new_inode(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, ttl_s=0.0, negative_ttl_s=0.0)
    (tmp_path / "bucket" / "f").write_bytes(b"old" * 100_000)
    async with running_engine(settings) as engine:
        old = await engine.names.lookup(ROOT_INO, b"f")
        number = await engine.files.open(old.ino, os.O_RDONLY, ROOT_CALLER)
        (tmp_path / "bucket" / "f").write_bytes(b"new" * 100_000)
        new = await engine.names.lookup(ROOT_INO, b"f")
        assert new.ino != old.ino
        assert await engine.read_file(new.ino) == b"new" * 100_000
        with pytest.raises((StaleContent, PreconditionFailed)):
            await engine.files.read(number, 0, 300_000)
        await engine.files.release(number)


async def test_sizes_follow_the_staging_file_after_a_crash(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    async with running_engine(settings, publishing=False) as engine:
        number, inode = await engine.files.create(ROOT_INO, b"a", 0o644, os.O_RDWR, ROOT_CALLER)
        await engine.files.write(number, 0, b"never flushed")
        with engine.parts.db.read() as txn:
            assert tree.get(txn, inode.ino).size_bytes == 0
    async with running_engine(settings) as engine:
        assert (await engine.names.lookup(ROOT_INO, b"a")).size_bytes == 13
        await drained(engine)
        assert objects_in(engine.bucket) == {"a": b"never flushed"}


async def test_three_files_change_places_in_a_ring(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        for name in "abc":
            await engine.write_file(name, name.encode() * 3)
        await drained(engine)
        await engine.names.rename(ROOT_INO, b"a", ROOT_INO, b"t", 0)
        await engine.names.rename(ROOT_INO, b"b", ROOT_INO, b"a", 0)
        await engine.names.rename(ROOT_INO, b"c", ROOT_INO, b"b", 0)
        await engine.names.rename(ROOT_INO, b"t", ROOT_INO, b"c", 0)
        await drained(engine)
        assert objects_in(engine.bucket) == {"a": b"bbb", "b": b"ccc", "c": b"aaa"}
        assert not any((engine.bucket / ".tierfs" / "parked").glob("*"))


async def test_a_file_and_a_directory_exchange_names(tmp_path: Path) -> None:
    """The store of directories cannot hold ``x`` beside ``x/y``: one has to be out of the way first."""
    async with running_engine(settings_for(tmp_path)) as engine:
        await engine.write_file("x", b"file")
        directory = await engine.names.create(ROOT_INO, b"d", 0o040755, ROOT_CALLER)
        await engine.write_file("y", b"below", parent=directory.ino)
        await drained(engine)
        await engine.names.rename(ROOT_INO, b"x", ROOT_INO, b"d", 2)
        await drained(engine)
        assert objects_in(engine.bucket) == {"d": b"file", "x/y": b"below"}


async def test_a_directory_takes_the_name_of_a_removed_file(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        await engine.write_file("x", b"file")
        await drained(engine)
        await engine.names.unlink(ROOT_INO, b"x")
        directory = await engine.names.create(ROOT_INO, b"x", 0o040755, ROOT_CALLER)
        await engine.write_file("y", b"below", parent=directory.ino)
        await drained(engine)
        assert objects_in(engine.bucket) == {"x/y": b"below"}


async def test_a_further_name_and_another_file_exchange_keys(tmp_path: Path) -> None:
    """A hard link needs the key of a file that in turn needs a key of the hard link's inode."""
    async with running_engine(settings_for(tmp_path)) as engine:
        inode = await engine.write_file("first", b"linked")
        await engine.names.link(inode.ino, ROOT_INO, b"a")
        await engine.write_file("b", b"other")
        await drained(engine)
        await engine.names.rename(ROOT_INO, b"a", ROOT_INO, b"b", 2)
        await drained(engine)
        assert objects_in(engine.bucket) == {"first": b"linked", "b": b"linked", "a": b"other"}


async def test_a_file_changed_in_part_keeps_its_bytes_when_its_object_makes_way(tmp_path: Path) -> None:
    """What was never fetched of it would come from an object that another file's upload overwrites."""
    settings = settings_for(tmp_path)
    old = os.urandom(700_000)
    (tmp_path / "bucket" / "a").write_bytes(old)
    (tmp_path / "bucket" / "b").write_bytes(b"other")
    async with running_engine(settings) as engine:
        inode = await engine.names.lookup(ROOT_INO, b"a")
        number = await engine.files.open(inode.ino, os.O_RDWR, ROOT_CALLER)
        await engine.files.write(number, 300_000, b"changed")
        await engine.names.rename(ROOT_INO, b"a", ROOT_INO, b"b", 2)
        with trio.move_on_after(1.0):
            await engine.parts.publisher.draining.drain()
        # The writer is still there, and so are all bytes, old and new.
        expected = old[:300_000] + b"changed" + old[300_007:]
        assert await engine.files.read(number, 0, 700_000) == expected
        await engine.files.release(number)
        await drained(engine)
        assert objects_in(engine.bucket) == {"a": b"other", "b": expected}


async def test_a_reader_follows_an_object_that_we_moved(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    body = os.urandom(600_000)
    (tmp_path / "bucket" / "a").write_bytes(body)
    async with running_engine(settings) as engine:
        inode = await engine.names.lookup(ROOT_INO, b"a")
        number = await engine.files.open(inode.ino, os.O_RDONLY, ROOT_CALLER)
        await engine.names.rename(ROOT_INO, b"a", ROOT_INO, b"b", 0)
        await drained(engine)
        assert objects_in(engine.bucket) == {"b": body}
        assert await engine.files.read(number, 0, 600_000) == body
        await engine.files.release(number)


class LostAnswers:
    """A store that does what it is told, and then says that it failed."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner
        self.lose = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def put(self, *args: object, **kwargs: object) -> object:
        info = self._inner.put(*args, **kwargs)  # type: ignore[arg-type]
        if self.lose:
            self.lose -= 1
            raise StoreUnavailable("the answer was lost")
        return info


async def test_an_upload_whose_answer_was_lost_is_no_conflict(tmp_path: Path) -> None:
    stores: list[LostAnswers] = []

    def wrap(store: ObjectStore) -> ObjectStore:
        stores.append(LostAnswers(store))
        return stores[0]  # type: ignore[return-value]

    async with running_engine(settings_for(tmp_path, store_timeout_s=0.0), wrap=wrap) as engine:
        stores[0].lose = 1
        inode = await engine.write_file("a", b"one")
        await drained_in_the_end(engine)
        number = await engine.files.open(inode.ino, os.O_RDWR, ROOT_CALLER)
        await engine.files.write(number, 0, b"two")
        stores[0].lose = 1
        await engine.files.release(number)
        await drained_in_the_end(engine)
        assert objects_in(engine.bucket) == {"a": b"two"}


async def drained_in_the_end(engine: Engine) -> None:
    with trio.fail_after(60):
        while not await engine.parts.publisher.draining.drain():
            await trio.sleep(0.05)
