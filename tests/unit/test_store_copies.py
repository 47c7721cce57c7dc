"""All of a file copied into an empty one by the store: what it costs, and what may happen before, during and after."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from tests.support.engine import MIB, ROOT_CALLER, Engine, drained, objects_in, running_engine, settings_for
from tests.support.snapshots import delete_snapshot, kept_objects, make_snapshot, read_in_snapshots
from tests.support.watched_store import Hold, WatchedStore
from tierfs.config import Settings
from tierfs.errors import Interrupted, StaleContent, StoreAccessDenied
from tierfs.fs.attributes import AttributeChange
from tierfs.fs.expected import PATIENCE_S, ExpectedCopies
from tierfs.fs.handles import FileHandle
from tierfs.fs.ranges import Ranges
from tierfs.namespace import check, publish, schema, tree
from tierfs.store.base import ObjectStore
from tierfs.types import ROOT_INO, Inode

SIZE = 2 * MIB + 77
DATA = random.Random(1).randbytes(SIZE)
OTHER = random.Random(2).randbytes(SIZE)
NEW = os.O_RDWR | os.O_CREAT


@dataclass(slots=True, eq=False)
class Bench:
    """An engine, its store, and a source that is in the bucket and not here."""

    engine: Engine
    store: WatchedStore
    ranges: Ranges
    source: Inode

    async def open(self, ino: int, flags: int = os.O_RDONLY) -> int:
        return await self.engine.files.open(ino, flags, ROOT_CALLER)

    async def create(self, name: str) -> tuple[int, Inode]:
        return await self.engine.files.create(ROOT_INO, name.encode(), 0o644, NEW, ROOT_CALLER)

    async def close(self, *numbers: int) -> None:
        for number in numbers:
            await self.engine.files.flush(number)
            await self.engine.files.release(number)

    async def copy(self, source: int, target: int, length: int = SIZE) -> int:
        """Until there is nothing more, as cp(1) does."""
        done = 0
        while some := await self.ranges.copy(source, done, target, done, length - done):
            done += some
        return done

    async def cp(self, name: str, source: Inode | None = None) -> Inode:
        reader = await self.open((source or self.source).ino)
        writer, inode = await self.create(name)
        await self.copy(reader, writer)
        await self.close(reader, writer)
        return inode

    def requests(self, *operations: str) -> list[int]:
        counts = self.engine.parts.store.counts.by_operation
        return [counts.get(operation, 0) for operation in operations]

    def is_settled(self, ino: int) -> bool:
        """The namespace says that all of it is in the store, and nothing waits."""
        with self.engine.parts.db.read() as txn:
            inode = tree.get(txn, ino)
            held = publish.object_of(txn, ino)
            return (
                not inode.flags & (schema.DATA_LOCAL | schema.UNPUBLISHED)
                and publish.dirty_row(txn, ino) is None
                and held is not None
                and held.size_bytes == inode.size_bytes
            )


@asynccontextmanager
async def bench(settings: Settings, *, publishing: bool = True) -> AsyncIterator[Bench]:
    stores: list[WatchedStore] = []

    def wrap(store: ObjectStore) -> ObjectStore:
        stores.append(WatchedStore(store))
        return stores[0]  # type: ignore[return-value]

    async with running_engine(settings, publishing=publishing, wrap=wrap) as engine:
        source = engine.bucket / "source"
        if not source.exists():
            source.write_bytes(DATA)
        inode = await engine.names.lookup(ROOT_INO, b"source")
        yield Bench(engine, stores[0], Ranges(engine.parts.services, engine.files), inode)


async def reached(hold: Hold) -> None:
    with trio.fail_after(60):
        while not hold.reached.is_set():
            await trio.sleep(0.005)


def all_is_right(made: Bench, expected: dict[str, bytes]) -> None:
    assert objects_in(made.engine.bucket) == expected
    assert not made.engine.parts.cache.dirty_contents()
    with made.engine.parts.db.read() as txn:
        assert list(check.problems(txn)) == []


async def test_the_bytes_do_not_pass_through_here(tmp_path: Path) -> None:
    async with bench(settings_for(tmp_path)) as made:
        reader = await made.open(made.source.ino)
        writer, inode = await made.create("target")
        before = made.engine.parts.services.now_ns()
        assert await made.ranges.copy(reader, 0, writer, 0, 1 << 62) == SIZE
        assert made.requests("get", "put", "copy") == [0, 0, 1]
        assert made.is_settled(inode.ino)
        seen = made.engine.attributes.get(inode.ino)
        assert (seen.size_bytes, seen.mode, seen.mtime_ns >= before) == (SIZE, 0o100644, True)
        assert await made.ranges.copy(reader, SIZE, writer, SIZE, 1 << 62) == 0
        await made.engine.files.fsync(writer)
        await made.close(reader, writer)
        await drained(made.engine)
        assert made.requests("get", "put", "copy") == [0, 0, 1]
        assert await made.engine.read_file(inode.ino) == DATA
        all_is_right(made, {"source": DATA, "target": DATA})
    async with bench(settings_for(tmp_path)) as made:
        found = await made.engine.names.lookup(ROOT_INO, b"target")
        assert (found.ino, found.size_bytes, found.mtime_ns) == (inode.ino, SIZE, seen.mtime_ns)
        assert made.requests("put", "copy") == [0, 0]


async def overwritten(made: Bench, source: int) -> None:
    writer = await made.open(made.source.ino, os.O_RDWR)
    await made.engine.files.write(writer, 0, OTHER)
    await made.close(writer)


async def removed(made: Bench, source: int) -> None:
    await made.engine.names.unlink(ROOT_INO, b"source")


async def replaced_by_others(made: Bench, source: int) -> None:
    (made.engine.bucket / "new").write_bytes(OTHER)
    (made.engine.bucket / "new").rename(made.engine.bucket / "source")


@pytest.mark.parametrize("happens", [overwritten, removed, replaced_by_others])
@pytest.mark.parametrize("publishing", [True, False])
async def test_nothing_that_happens_to_the_source_changes_the_copy(
    tmp_path: Path, happens: Callable[[Bench, int], Awaitable[None]], publishing: bool
) -> None:
    async with bench(settings_for(tmp_path), publishing=publishing) as made:
        reader = await made.open(made.source.ino)
        writer, inode = await made.create("target")
        assert await made.copy(reader, writer) == SIZE
        await happens(made, reader)
        assert await made.engine.files.read(writer, 0, SIZE) == DATA
        await made.close(reader, writer)
        if publishing:
            await drained(made.engine)
    async with running_engine(settings_for(tmp_path)) as engine:
        await drained(engine)
        assert await engine.read_file(inode.ino) == DATA
        assert objects_in(engine.bucket)["target"] == DATA


async def written(made: Bench, writer: int, inode: Inode) -> bytes:
    await made.engine.files.write(writer, MIB + 5, b"changed")
    return DATA[: MIB + 5] + b"changed" + DATA[MIB + 12 :]


async def appended(made: Bench, writer: int, inode: Inode) -> bytes:
    await made.engine.files.write(writer, SIZE, b"more")
    return DATA + b"more"


async def truncated(made: Bench, writer: int, inode: Inode) -> bytes:
    await made.engine.attributes.set(inode.ino, AttributeChange(size_bytes=MIB), ROOT_CALLER)
    return DATA[:MIB]


async def emptied(made: Bench, writer: int, inode: Inode) -> bytes:
    await made.engine.attributes.set(inode.ino, AttributeChange(size_bytes=0), ROOT_CALLER)
    return b""


async def relabelled(made: Bench, writer: int, inode: Inode) -> bytes:
    """As cp -p does."""
    await made.engine.attributes.set(inode.ino, AttributeChange(mode=0o600, mtime_ns=10**18), ROOT_CALLER)
    return DATA


@pytest.mark.parametrize("change", [written, appended, truncated, emptied, relabelled])
async def test_the_copy_can_be_changed_at_once(
    tmp_path: Path, change: Callable[[Bench, int, Inode], Awaitable[bytes]]
) -> None:
    async with bench(settings_for(tmp_path)) as made:
        reader = await made.open(made.source.ino)
        writer, inode = await made.create("target")
        assert await made.copy(reader, writer) == SIZE
        expected = await change(made, writer, inode)
        assert await made.engine.files.read(writer, 0, 2 * SIZE) == expected
        await made.close(reader, writer)
        await made.engine.names.rename(ROOT_INO, b"target", ROOT_INO, b"moved", 0)
        await drained(made.engine)
        all_is_right(made, {"source": DATA, "moved": expected})
        if change is relabelled:
            seen = await made.engine.names.lookup(ROOT_INO, b"moved")
            assert (seen.mode, seen.mtime_ns) == (0o100600, 10**18)


async def test_onto_a_file_that_has_been_in_the_store(tmp_path: Path) -> None:
    async with bench(settings_for(tmp_path)) as made:
        inode = await made.engine.write_file("target", OTHER)
        await drained(made.engine)
        reader = await made.open(made.source.ino)
        writer = await made.open(inode.ino, os.O_WRONLY | os.O_TRUNC)
        copies = made.requests("copy")[0]
        assert await made.copy(reader, writer) == SIZE
        assert made.requests("get", "copy") == [0, copies + 1]
        await made.close(reader, writer)
        await drained(made.engine)
        assert await made.engine.read_file(inode.ino) == DATA
        all_is_right(made, {"source": DATA, "target": DATA})


async def test_a_copy_of_a_copy_and_of_a_file_that_was_moved(tmp_path: Path) -> None:
    async with bench(settings_for(tmp_path)) as made:
        second = await made.cp("second")
        await made.engine.names.rename(ROOT_INO, b"second", ROOT_INO, b"moved", 0)
        await drained(made.engine)
        third = await made.cp("third", second)
        assert made.requests("get", "put") == [0, 0]
        await drained(made.engine)
        assert await made.engine.read_file(third.ino) == DATA
        all_is_right(made, {"source": DATA, "moved": DATA, "third": DATA})


async def test_snapshots_before_and_after_a_copy(tmp_path: Path) -> None:
    async with bench(settings_for(tmp_path)) as made:
        inode = await made.engine.write_file("target", OTHER)
        await make_snapshot(made.engine, "before")
        reader = await made.open(made.source.ino)
        writer = await made.open(inode.ino, os.O_RDWR | os.O_TRUNC)
        assert await made.copy(reader, writer) == SIZE
        await make_snapshot(made.engine, "after")
        await made.engine.files.write(writer, 0, b"changed")
        await made.engine.names.unlink(ROOT_INO, b"source")
        await made.close(reader, writer)
        await drained(made.engine)
        assert await read_in_snapshots(made.engine, "before/target") == OTHER
        assert await read_in_snapshots(made.engine, "after/target") == DATA
        assert await read_in_snapshots(made.engine, "after/source") == DATA
        await delete_snapshot(made.engine, "before")
        await delete_snapshot(made.engine, "after")
        assert kept_objects(made.engine) == []
        all_is_right(made, {"target": b"changed" + DATA[7:]})


# -- while the store is at work


async def moved(made: Bench, inode: Inode) -> str:
    await made.engine.names.rename(ROOT_INO, b"target", ROOT_INO, b"moved", 0)
    return "moved"


async def linked(made: Bench, inode: Inode) -> str:
    await made.engine.names.link(inode.ino, ROOT_INO, b"also")
    await made.engine.names.unlink(ROOT_INO, b"target")
    return "also"


async def unlinked(made: Bench, inode: Inode) -> str:
    await made.engine.names.unlink(ROOT_INO, b"target")
    return ""


async def replaced(made: Bench, inode: Inode) -> str:
    other = await made.engine.write_file("other", OTHER)
    await made.engine.names.rename(ROOT_INO, b"other", ROOT_INO, b"target", 0)
    assert other.ino != inode.ino
    return ""


async def flushed(made: Bench, inode: Inode) -> str:
    """Nobody waits for what is open for writing."""
    await drained(made.engine)
    return "target"


async def closed_by_another(made: Bench, inode: Inode) -> str:
    """What was known of the file before is recorded at that moment."""
    number = await made.open(inode.ino, os.O_RDWR | os.O_TRUNC)
    await made.close(number)
    return "target"


@pytest.mark.parametrize("happens", [moved, linked, unlinked, replaced, flushed, closed_by_another])
@pytest.mark.parametrize("done", [False, True])
async def test_what_happens_to_the_target_meanwhile(
    tmp_path: Path, happens: Callable[[Bench, Inode], Awaitable[str]], done: bool
) -> None:
    """``done``: the store has made the copy already, and only its answer is missing."""
    async with bench(settings_for(tmp_path)) as made:
        reader = await made.open(made.source.ino)
        writer, inode = await made.create("target")
        hold = made.store.hold("copy", "target", done=done)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.copy, reader, writer)
            await reached(hold)
            name = await happens(made, inode)
            hold.go.set()
        assert await made.engine.files.read(writer, 0, 2 * SIZE) == DATA
        await made.close(reader, writer)
        await drained(made.engine)
        expected = {"source": DATA, name: DATA}
        if not name:
            expected = {"source": DATA, "target": OTHER} if happens is replaced else {"source": DATA}
        else:
            assert await made.engine.read_file(inode.ino) == DATA
        all_is_right(made, expected)


async def test_a_signal_ends_the_wait_and_the_copy_changes_nothing(tmp_path: Path) -> None:
    async with bench(settings_for(tmp_path)) as made:
        reader = await made.open(made.source.ino)
        writer, inode = await made.create("target")
        hold = made.store.hold("copy", "target")
        tasks: list[trio.lowlevel.Task] = []
        interrupts = made.engine.parts.services.interrupts

        async def copy() -> None:
            tasks.append(trio.lowlevel.current_task())
            with pytest.raises(Interrupted):
                await made.copy(reader, writer)
            interrupts.forget(tasks[0])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(copy)
            await reached(hold)
            interrupts.interrupt(tasks[0])
        assert made.engine.attributes.get(inode.ino).size_bytes == 0
        await made.engine.files.write(writer, 0, b"written after the signal")
        await made.close(reader, writer)
        # The older request is still under way: nothing else is sent to that key before it has ended.
        await trio.sleep(0.3)
        assert made.requests("put") == [0]
        hold.go.set()
        await drained(made.engine)
        assert await made.engine.read_file(inode.ino) == b"written after the signal"
        all_is_right(made, {"source": DATA, "target": b"written after the signal"})


@pytest.mark.parametrize("done", [False, True])
async def test_the_engine_is_gone_before_the_copy_is_recorded(tmp_path: Path, done: bool) -> None:
    async with bench(settings_for(tmp_path)) as made:
        reader = await made.open(made.source.ino)
        writer, inode = await made.create("target")
        hold = made.store.hold("copy", "target", done=done)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.copy, reader, writer)
            await reached(hold)
            nursery.cancel_scope.cancel()
        # Left as it is: nothing of this engine runs any more.
    hold.go.set()
    await trio.to_thread.run_sync(made.store.wait_until_idle)
    async with bench(settings_for(tmp_path), publishing=False) as made:
        assert made.engine.attributes.get(inode.ino).size_bytes == 0
        # The front repeats what it has no answer to.
        reader, writer = await made.open(made.source.ino), await made.open(inode.ino, os.O_RDWR)
        assert await made.copy(reader, writer) == SIZE
        assert made.requests("get", "put") == [0, 0]
        await made.close(reader, writer)
    async with bench(settings_for(tmp_path)) as made:
        await drained(made.engine)
        assert await made.engine.read_file(inode.ino) == DATA
        all_is_right(made, {"source": DATA, "target": DATA})


async def test_the_engine_is_gone_and_nobody_repeats_the_call(tmp_path: Path) -> None:
    async with bench(settings_for(tmp_path)) as made:
        reader = await made.open(made.source.ino)
        writer, _ = await made.create("target")
        hold = made.store.hold("copy", "target", done=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.copy, reader, writer)
            await reached(hold)
            nursery.cancel_scope.cancel()
    hold.go.set()
    await trio.to_thread.run_sync(made.store.wait_until_idle)
    async with bench(settings_for(tmp_path)) as made:
        await drained(made.engine)
        all_is_right(made, {"source": DATA, "target": b""})


# -- where the bytes go through here


async def test_a_store_that_does_not_copy(tmp_path: Path) -> None:
    async with bench(settings_for(tmp_path)) as made:

        def refuse(operation: str, key: str) -> None:
            if operation == "copy":
                raise StoreAccessDenied(f"{key}: no")

        made.store.before = refuse
        for name in ("first", "second"):
            inode = await made.cp(name)
            assert await made.engine.read_file(inode.ino) == DATA
        await drained(made.engine)
        assert made.requests("copy") == [0]
        all_is_right(made, {"source": DATA, "first": DATA, "second": DATA})


async def test_a_source_that_others_have_replaced(tmp_path: Path) -> None:
    async with bench(settings_for(tmp_path)) as made:
        reader = await made.open(made.source.ino)
        writer, inode = await made.create("target")
        await replaced_by_others(made, reader)
        with pytest.raises(StaleContent):
            await made.copy(reader, writer)
        assert made.engine.attributes.get(inode.ino).size_bytes == 0
        await made.close(reader, writer)
        await drained(made.engine)
        all_is_right(made, {"source": OTHER, "target": b""})


async def test_an_object_that_others_have_put_at_the_target(tmp_path: Path) -> None:
    async with bench(settings_for(tmp_path)) as made:
        reader = await made.open(made.source.ino)
        writer, inode = await made.create("target")
        (made.engine.bucket / "target").write_bytes(b"theirs")
        assert await made.copy(reader, writer) == SIZE
        await made.close(reader, writer)
        await drained(made.engine)
        objects = objects_in(made.engine.bucket)
        assert objects.pop("target") == b"theirs"
        assert objects.pop("source") == DATA
        ((name, body),) = objects.items()
        assert name.startswith("target.conflict-")
        assert body == DATA
        assert await made.engine.read_file(inode.ino) == DATA


@pytest.mark.parametrize(
    "case", ["dirty", "here", "part", "shifted", "not empty", "small", "passed", "two names"]
)
async def test_what_the_store_is_not_asked_for(tmp_path: Path, case: str) -> None:
    settings = settings_for(tmp_path)
    (tmp_path / "bucket" / "small").write_bytes(DATA[:1000])
    async with bench(settings, publishing=False) as made:
        source, expected, length = made.source, DATA, SIZE
        if case == "dirty":
            number = await made.open(source.ino, os.O_RDWR)
            await made.engine.files.write(number, 0, b"changed")
            await made.close(number)
            expected = b"changed" + DATA[7:]
        if case == "here":
            await made.engine.read_file(source.ino)
        if case == "small":
            source, expected = await made.engine.names.lookup(ROOT_INO, b"small"), DATA[:1000]
        reader = await made.open(source.ino)
        writer, inode = await made.create("target")
        start = 0
        if case == "part":
            length, expected = SIZE - 1, DATA[:-1]
        if case == "shifted":
            start, expected = 3, b"\0\0\0" + DATA
        if case == "not empty":
            await made.engine.files.write(writer, 0, OTHER + b"end")
            expected = DATA + b"end"
        if case == "two names":
            await made.engine.names.link(inode.ino, ROOT_INO, b"also")
        handle: FileHandle = made.engine.parts.services.handles.file(writer)
        if case == "passed":
            handle.content.passed_through += 1
        copied = 0
        while copied < length:
            some = await made.ranges.copy(reader, copied, writer, start + copied, length - copied)
            if not some:
                break
            copied += some
        if case == "passed":
            handle.content.passed_through -= 1
        assert made.requests("copy") == [0]
        assert await made.engine.files.read(writer, 0, 2 * SIZE) == expected
        await made.close(reader, writer)


async def test_a_file_below_a_checkpoint_that_is_being_saved_stays_here(tmp_path: Path) -> None:
    async with bench(settings_for(tmp_path), publishing=False) as made:
        held: set[int] = set()
        made.engine.parts.publisher.holds = held.__contains__
        reader = await made.open(made.source.ino)
        writer, inode = await made.create("target")
        held.add(inode.ino)
        assert await made.copy(reader, writer) == SIZE
        assert made.requests("copy") == [0]
        await made.close(reader, writer)


# -- what is expected


def test_a_copy_is_expected_while_its_source_is_open_and_unread() -> None:
    now = [100.0]
    expected = ExpectedCopies(clock=lambda: now[0])
    assert not expected.is_likely
    expected.note_open(1)
    expected.note_open(2)
    assert expected.is_likely
    expected.note_used(1)
    expected.note_used(7)
    assert expected.is_likely
    expected.note_used(2)
    assert not expected.is_likely
    expected.note_open(3)
    now[0] += PATIENCE_S + 1
    assert not expected.is_likely


async def test_who_opens_reads_and_closes(tmp_path: Path) -> None:
    async with bench(settings_for(tmp_path), publishing=False) as made:
        services = made.engine.parts.services
        lent: list[int] = []

        def lend(ino: int, descriptor: int) -> bool:
            lent.append(ino)
            return False

        services.lend = lend
        again = await made.open(made.source.ino)
        reader = await made.open(made.source.ino)
        assert services.expected_copies.is_likely
        await made.close(again)
        assert services.expected_copies.is_likely
        writer, _ = await made.create("first")
        assert lent == []
        await made.engine.files.read(reader, 0, 10)
        assert not services.expected_copies.is_likely
        other, inode = await made.create("second")
        assert lent == [inode.ino]
        await made.close(reader, writer, other)
