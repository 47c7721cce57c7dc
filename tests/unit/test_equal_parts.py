"""What changed in part is sent in part: an engine without a kernel, on a directory store.

Parts are smaller than S3 allows, so that files are.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.engine import (
    ROOT_CALLER,
    Engine,
    drained,
    objects_in,
    running_engine,
    settings_for,
)
from tierfs.config import Settings
from tierfs.errors import StoreUnavailable, StoreUnsupported
from tierfs.fs.attributes import AttributeChange
from tierfs.store import base, part_copy
from tierfs.store.base import ObjectStore, Part, StoreCapabilities
from tierfs.types import ROOT_INO, ObjectInfo
from tierfs.writeback import equal_parts

PART = 256 * 1024
SIZE = 4 * PART


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (base, equal_parts, part_copy):
        monkeypatch.setattr(module, "MIN_PART_SIZE_BYTES", PART)


class Spy:
    """A store that lets a test look at, and change, what becomes of part copies and uploads."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner
        self.before_copy: Callable[[], None] = lambda: None
        self.after_start: Callable[[], None] = lambda: None
        self.has_part_copy = True
        self.copy: Callable[..., Part] = inner.copy_part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def capabilities(self) -> StoreCapabilities:
        return replace(self._inner.capabilities, part_copy=self.has_part_copy)

    def copy_part(self, key: str, upload_id: str, number: int, source: ObjectInfo, *span: int) -> Part:
        if not key.startswith(".tierfs/"):
            self.before_copy()
        return self.copy(key, upload_id, number, source, *span)

    def start_multipart(self, *args: Any, **kwargs: Any) -> str:
        upload_id = self._inner.start_multipart(*args, **kwargs)
        self.after_start()
        return upload_id


def in_parts(root: Path, **changes: object) -> Settings:
    return settings_for(root, part_size_bytes=PART, **changes)


@asynccontextmanager
async def spied_engine(settings: Settings) -> AsyncIterator[tuple[Engine, Spy]]:
    spies: list[Spy] = []

    def wrap(store: ObjectStore) -> ObjectStore:
        spies.append(Spy(store))
        return spies[0]  # type: ignore[return-value]

    async with running_engine(settings, wrap=wrap) as engine:
        yield engine, spies[0]


class Told:
    """In place of a log."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, event: str, **_: object) -> None:
        self.warnings.append(event)


class Traffic:
    """File data sent and copied since it was made, or since the last question."""

    def __init__(self, engine: Engine) -> None:
        self._uploader = engine.parts.uploader
        self._sent, self._copied = self._uploader.bytes_sent, self._uploader.bytes_copied

    @property
    def total(self) -> tuple[int, int]:
        return self._sent, self._copied

    def taken(self) -> tuple[int, int]:
        sent, copied = self._uploader.bytes_sent, self._uploader.bytes_copied
        result = sent - self._sent, copied - self._copied
        self._sent, self._copied = sent, copied
        return result


async def change(engine: Engine, ino: int, offset: int, data: bytes) -> None:
    number = await engine.files.open(ino, os.O_RDWR, ROOT_CALLER)
    await engine.files.write(number, offset, data)
    await engine.files.flush(number)
    await engine.files.release(number)


async def set_size(engine: Engine, ino: int, size_bytes: int) -> None:
    await engine.attributes.set(ino, AttributeChange(size_bytes=size_bytes), ROOT_CALLER)


def patched(body: bytes, offset: int, data: bytes) -> bytes:
    return body[:offset] + data + body[offset + len(data) :]


def unfinished(engine: Engine) -> int:
    return len(engine.parts.store.list_unfinished_uploads(""))


async def test_a_file_changed_in_place(tmp_path: Path) -> None:
    body = os.urandom(SIZE + 7)
    async with running_engine(in_parts(tmp_path)) as engine:
        inode = await engine.write_file("f", body)
        await drained(engine)
        traffic = Traffic(engine)
        await change(engine, inode.ino, PART + 3, b"changed")
        await drained(engine)
        body = patched(body, PART + 3, b"changed")
        assert objects_in(engine.bucket) == {"f": body}
        assert traffic.taken() == (PART, SIZE + 7 - PART)
        assert unfinished(engine) == 0


@pytest.mark.parametrize("way", ["written anew", "renamed over"])
async def test_a_file_saved_again(tmp_path: Path, way: str) -> None:
    body = os.urandom(SIZE)
    async with running_engine(in_parts(tmp_path, upload_delay_s=60.0)) as engine:
        inode = await engine.write_file("f", body)
        await drained(engine)
        traffic = Traffic(engine)
        body = patched(body, 2 * PART, b"changed")
        if way == "written anew":
            await set_size(engine, inode.ino, 0)
            await change(engine, inode.ino, 0, body)
        else:
            await engine.write_file("f.tmp", body)
            await engine.names.rename(ROOT_INO, b"f.tmp", ROOT_INO, b"f", 0)
        await drained(engine)
        assert objects_in(engine.bucket) == {"f": body}
        assert traffic.taken() == (PART, SIZE - PART)


@pytest.mark.parametrize(
    ("size_bytes", "sent_bytes"),
    [
        (SIZE + 100, 100),  # the last part was short: it goes again, longer
        (SIZE + 2 * PART, 2 * PART),
        (SIZE - PART, 0),
        (SIZE - 5, PART - 5),
        (PART + 1, 1),
    ],
)
async def test_a_file_that_grows_or_shrinks(tmp_path: Path, size_bytes: int, sent_bytes: int) -> None:
    body = os.urandom(SIZE + 9)
    async with running_engine(in_parts(tmp_path)) as engine:
        inode = await engine.write_file("f", body)
        await drained(engine)
        traffic = Traffic(engine)
        if size_bytes > SIZE + 9:
            more = os.urandom(size_bytes - SIZE - 9)
            await change(engine, inode.ino, SIZE + 9, more)
            body += more
        else:
            await set_size(engine, inode.ino, size_bytes)
            body = body[:size_bytes]
        await drained(engine)
        assert objects_in(engine.bucket) == {"f": body}
        assert traffic.taken() == (sent_bytes, size_bytes - sent_bytes)


async def test_a_file_that_has_been_renamed_or_got_another_mode(tmp_path: Path) -> None:
    body = os.urandom(SIZE)
    async with running_engine(in_parts(tmp_path)) as engine:
        inode = await engine.write_file("f", body)
        await drained(engine)
        traffic = Traffic(engine)
        for step in ("mode", "name"):
            if step == "mode":
                await engine.attributes.set(inode.ino, AttributeChange(mode=0o600), ROOT_CALLER)
            else:
                await engine.names.rename(ROOT_INO, b"f", ROOT_INO, b"g", 0)
            await drained(engine)
            await change(engine, inode.ino, 0, step.encode())
            body = patched(body, 0, step.encode())
            await drained(engine)
            assert traffic.taken() == (PART, SIZE - PART)
        assert objects_in(engine.bucket) == {"g": body}


@pytest.mark.semantics(
    "S-PART-3",
    "Parts that another file of the same owner has, which went up from this mount, are not sent either.",
)
async def test_another_file_with_the_same_parts(tmp_path: Path) -> None:
    body = os.urandom(SIZE)
    async with running_engine(in_parts(tmp_path)) as engine:
        await engine.write_file("step-100", body)
        await drained(engine)
        traffic = Traffic(engine)
        other = os.urandom(PART) + body[:PART] + body[: 2 * PART]
        await engine.write_file("step-200", other)
        await drained(engine)
        assert objects_in(engine.bucket) == {"step-100": body, "step-200": other}
        assert traffic.taken() == (PART, SIZE - PART)


async def test_random_saves(tmp_path: Path) -> None:
    """Whatever happens to a file, its object has its bytes, and most of them are not sent."""
    chance = random.Random(20)
    body = chance.randbytes(SIZE)
    async with running_engine(in_parts(tmp_path, upload_delay_s=60.0)) as engine:
        inode = await engine.write_file("f", body)
        for _ in range(40):
            way = chance.choice(["write", "append", "cut", "extend", "anew", "rename"])
            offset = chance.randrange(len(body) + 1)
            if way == "write":
                data = chance.randbytes(chance.choice([1, 100, PART, PART + 1]))
                body = patched(body, offset, data)
                await change(engine, inode.ino, offset, data)
            elif way == "append":
                data = chance.randbytes(chance.choice([1, 1000, PART]))
                await change(engine, inode.ino, len(body), data)
                body += data
            elif way in ("cut", "extend"):
                size = max(1, offset) if way == "cut" else len(body) + chance.randrange(PART)
                await set_size(engine, inode.ino, size)
                body = body[:size].ljust(size, b"\0")
            else:
                body = patched(body, min(offset, len(body) - 1), b"x")
                if way == "anew":
                    await set_size(engine, inode.ino, 0)
                    await change(engine, inode.ino, 0, body)
                else:
                    inode = await engine.write_file("f.tmp", body)
                    if chance.random() < 0.3:
                        await drained(engine)
                    await engine.names.rename(ROOT_INO, b"f.tmp", ROOT_INO, b"f", 0)
            if chance.random() < 0.8:
                await drained(engine)
                assert objects_in(engine.bucket) == {"f": body}
        await drained(engine)
        assert objects_in(engine.bucket) == {"f": body}
        sent, copied = Traffic(engine).total
        assert copied > sent


async def test_digests_survive_a_restart(tmp_path: Path) -> None:
    body = os.urandom(SIZE)
    async with running_engine(in_parts(tmp_path)) as engine:
        inode = await engine.write_file("f", body)
        await drained(engine)
    async with running_engine(in_parts(tmp_path)) as engine:
        traffic = Traffic(engine)
        await change(engine, inode.ino, 0, b"changed")
        await drained(engine)
        assert objects_in(engine.bucket) == {"f": patched(body, 0, b"changed")}
        assert traffic.taken() == (PART, SIZE - PART)


async def test_without_digests_all_is_sent(tmp_path: Path) -> None:
    body = os.urandom(SIZE)
    async with running_engine(in_parts(tmp_path)) as engine:
        inode = await engine.write_file("f", body)
        await drained(engine)
    shutil.rmtree(tmp_path / "state" / "parts.lmdb")
    async with running_engine(in_parts(tmp_path)) as engine:
        traffic = Traffic(engine)
        await change(engine, inode.ino, 0, b"changed")
        await drained(engine)
        assert objects_in(engine.bucket) == {"f": patched(body, 0, b"changed")}
        assert traffic.taken() == (SIZE, 0)


async def test_the_earlier_version_is_gone_meanwhile(tmp_path: Path) -> None:
    body = os.urandom(SIZE)
    async with spied_engine(in_parts(tmp_path)) as (engine, spy):
        inode = await engine.write_file("f", body)
        await drained(engine)
        traffic = Traffic(engine)
        spy.before_copy = lambda: (engine.bucket / "f").unlink(missing_ok=True)
        await change(engine, inode.ino, 0, b"changed")
        await drained(engine)
        assert objects_in(engine.bucket) == {"f": patched(body, 0, b"changed")}
        assert traffic.taken()[1] == 0
        assert unfinished(engine) == 0


async def test_the_earlier_version_is_replaced_meanwhile(tmp_path: Path) -> None:
    """Another node was there first: both are kept, and nothing of theirs is in ours."""
    body = os.urandom(SIZE)
    async with spied_engine(in_parts(tmp_path)) as (engine, spy):
        inode = await engine.write_file("f", body)
        await drained(engine)
        theirs = os.urandom(SIZE)
        once = threading.Lock()

        def replace_it() -> None:
            if once.acquire(blocking=False):
                (engine.bucket / "new").write_bytes(theirs)
                (engine.bucket / "new").rename(engine.bucket / "f")

        spy.before_copy = replace_it
        await change(engine, inode.ino, 0, b"changed")
        await drained(engine)
        found = objects_in(engine.bucket)
        assert found.pop("f") == theirs
        assert list(found.values()) == [patched(body, 0, b"changed")]


@pytest.mark.semantics(
    "S-PART-2",
    "Where the store does not copy parts, or the earlier version is gone or was replaced, all of the file is sent; `tierfs doctor` says whether the store copies parts.",
)
@pytest.mark.parametrize("lack", ["said", "refused", "ignores the range", "ignores the version"])
async def test_a_store_without_part_copy(tmp_path: Path, lack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    monkeypatch.setattr(equal_parts, "log", told)
    body = os.urandom(SIZE)
    async with spied_engine(in_parts(tmp_path)) as (engine, spy):
        right = spy.copy

        def refuse(*args: Any) -> Part:
            raise StoreUnsupported("501 NotImplemented")

        def whole(key: str, upload_id: str, number: int, source: ObjectInfo, *span: int) -> Part:
            return right(key, upload_id, number, source, 0, source.size_bytes)

        def any_version(key: str, upload_id: str, number: int, source: ObjectInfo, *span: int) -> Part:
            return right(key, upload_id, number, engine.parts.store.head(source.key), *span)

        if lack == "said":
            spy.has_part_copy = False
        else:
            spy.copy = {"refused": refuse, "ignores the range": whole, "ignores the version": any_version}[
                lack
            ]
        inode = await engine.write_file("f", body)
        await drained(engine)
        traffic = Traffic(engine)
        for number in range(2):
            await change(engine, inode.ino, number * PART, b"changed")
            body = patched(body, number * PART, b"changed")
            await drained(engine)
            assert traffic.taken() == (SIZE, 0)
        assert told.warnings == ["what is in the store already is sent all the same"]
        assert objects_in(engine.bucket) == {"f": body}
        assert unfinished(engine) == 0
        assert not list((engine.bucket / ".tierfs").glob("probe-*"))


async def test_part_copy_fails_later_on(tmp_path: Path) -> None:
    """It was there when it was tried out, and is refused afterwards."""
    body = os.urandom(SIZE)
    async with spied_engine(in_parts(tmp_path)) as (engine, spy):
        inode = await engine.write_file("f", body)
        await drained(engine)
        await change(engine, inode.ino, 0, b"1")
        await drained(engine)
        traffic = Traffic(engine)

        def refuse() -> None:
            raise StoreUnsupported("405 MethodNotAllowed")

        spy.before_copy = refuse
        await change(engine, inode.ino, 0, b"2")
        await drained(engine)
        assert objects_in(engine.bucket) == {"f": patched(body, 0, b"2")}
        assert traffic.taken() == (SIZE, 0)


async def test_written_while_parts_are_copied(tmp_path: Path) -> None:
    """A write in the middle of an upload: the next one has the parts of the last state, and no mixture."""
    body = os.urandom(SIZE)
    async with spied_engine(in_parts(tmp_path, upload_concurrency=1)) as (engine, spy):
        inode = await engine.write_file("f", body)
        await drained(engine)
        reached, go = threading.Event(), threading.Event()

        def wait() -> None:
            reached.set()
            assert go.wait(60)

        spy.before_copy = wait
        await change(engine, inode.ino, PART, b"first")
        with trio.fail_after(60):
            while not reached.is_set():
                await trio.sleep(0.005)
        await change(engine, inode.ino, 0, b"second")
        go.set()
        await drained(engine)
        body = patched(patched(body, PART, b"first"), 0, b"second")
        assert objects_in(engine.bucket) == {"f": body}
        assert unfinished(engine) == 0


async def test_stopped_between_the_object_and_its_row(tmp_path: Path) -> None:
    """The store has completed the upload, and nobody here knows: the next start sends what it has to."""
    body = os.urandom(SIZE)
    done, go = threading.Event(), threading.Event()
    async with spied_engine(in_parts(tmp_path)) as (engine, spy):
        inode = await engine.write_file("f", body)
        await drained(engine)
        complete = spy.complete_multipart

        def completed(*args: Any, **kwargs: Any) -> ObjectInfo:
            info: ObjectInfo = complete(*args, **kwargs)
            if args[0] != "f":
                return info  # the store is being tried out
            done.set()
            assert go.wait(60)
            return info

        spy.complete_multipart = completed  # type: ignore[attr-defined]
        await change(engine, inode.ino, 0, b"changed")
        with trio.fail_after(60):
            while not done.is_set():
                await trio.sleep(0.005)
    go.set()
    body = patched(body, 0, b"changed")
    assert objects_in(tmp_path / "bucket") == {"f": body}
    async with running_engine(in_parts(tmp_path)) as engine:
        await drained(engine)
        assert objects_in(engine.bucket) == {"f": body}
        assert unfinished(engine) == 0
        traffic = Traffic(engine)
        await change(engine, inode.ino, 0, b"again")
        await drained(engine)
        assert objects_in(engine.bucket) == {"f": patched(body, 0, b"again")}
        assert traffic.taken() == (PART, SIZE - PART)


@pytest.mark.semantics(
    "S-PART-4",
    "An upload that a kill cut off, at whatever moment, is not left unfinished in the store after the next mount.",
)
async def test_stopped_before_the_name_of_an_upload_is_known(tmp_path: Path) -> None:
    """The store has started an upload and the answer never arrived; one of another node is left alone."""
    body = os.urandom(SIZE)
    started, go = threading.Event(), threading.Event()
    async with spied_engine(in_parts(tmp_path)) as (engine, spy):

        def wait() -> None:
            started.set()
            assert go.wait(60)

        spy.after_start = wait
        await engine.write_file("f", body)
        with trio.fail_after(60):
            while not started.is_set():
                await trio.sleep(0.005)
        assert unfinished(engine) == 1
    go.set()
    async with running_engine(in_parts(tmp_path), publishing=False) as engine:
        theirs = engine.parts.store.start_multipart("f.of-another-node")
        assert [left.upload_id for left in engine.parts.store.list_unfinished_uploads("")] == [theirs]
        assert list((tmp_path / "state" / "uploads").glob("*")) == []


async def test_stopped_while_the_store_is_tried_out(tmp_path: Path) -> None:
    body = os.urandom(SIZE)
    started, go = threading.Event(), threading.Event()
    async with spied_engine(in_parts(tmp_path)) as (engine, spy):
        inode = await engine.write_file("f", body)
        await drained(engine)
        inner = spy.copy

        def gone(*args: Any, **kwargs: Any) -> Any:
            raise StoreUnavailable("the process is gone")

        def wait(*args: Any) -> Any:
            started.set()
            assert go.wait(60)
            gone()

        spy.copy = wait
        await change(engine, inode.ino, 0, b"changed")
        with trio.fail_after(60):
            while not started.is_set():
                await trio.sleep(0.005)
        assert unfinished(engine) == 2
        spy.copy = inner
        spy.delete_many = spy.abort_multipart = gone  # type: ignore[attr-defined]
    go.set()
    async with running_engine(in_parts(tmp_path)) as engine:
        await drained(engine)
        assert objects_in(engine.bucket) == {"f": patched(body, 0, b"changed")}
        assert unfinished(engine) == 0
        assert not list((engine.bucket / ".tierfs").glob("probe-*"))
