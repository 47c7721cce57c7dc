"""Listings that were already under way when something was deleted or uploaded through the mount."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.engine import ROOT_CALLER, Engine, running_engine, settings_for
from tierfs.errors import NotFound
from tierfs.types import ROOT_INO

DIRECTORY = 0o040755


class HeldStore:
    """Passes everything on; while ``armed``, an answer of ``list_page`` is held back until ``let_go``."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.armed = False
        self.has_answer = threading.Event()
        self.may_answer = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def list_page(self, *args: Any, **options: Any) -> Any:
        page = self._store.list_page(*args, **options)
        if self.armed:
            self.armed = False
            self.has_answer.set()
            assert self.may_answer.wait(30)
        return page


class Held:
    """An engine whose next listing stops between the bucket's answer and its being recorded."""

    def __init__(self, engine: Engine, store: HeldStore) -> None:
        self.engine = engine
        self.store = store

    async def listing_under_way(self, nursery: trio.Nursery) -> None:
        """Somebody looks for a name that is not there; the answer has been given and not been read yet."""
        self.store.armed = True
        nursery.start_soon(self._look)
        await trio.to_thread.run_sync(self.store.has_answer.wait, 30)

    async def _look(self) -> None:
        with pytest.raises(NotFound):
            await self.engine.names.lookup(ROOT_INO, b"another")

    async def published(self) -> None:
        assert await self.engine.parts.publisher.draining.drain()


@pytest.fixture
async def held(tmp_path: Path) -> AsyncIterator[Held]:
    stores: list[HeldStore] = []

    def wrap(store: Any) -> Any:
        stores.append(HeldStore(store))
        return stores[-1]

    settings = settings_for(tmp_path, negative_ttl_s=0.0)
    async with running_engine(settings, wrap=wrap) as engine:
        await engine.parts.refresher.listed(ROOT_INO)
        yield Held(engine, stores[0])
        stores[0].may_answer.set()


async def test_a_file_that_was_removed_meanwhile_does_not_come_back(held: Held) -> None:
    await held.engine.write_file("gone", b"bytes")
    await held.published()
    async with trio.open_nursery() as nursery:
        await held.listing_under_way(nursery)
        await held.engine.names.unlink(ROOT_INO, b"gone")
        await held.published()
        assert held.engine.parts.deletions.pending() == 0
        held.store.may_answer.set()
    with pytest.raises(NotFound):
        await held.engine.names.lookup(ROOT_INO, b"gone")


async def test_a_directory_that_was_removed_meanwhile_does_not_come_back(held: Held) -> None:
    names = held.engine.names
    directory = await names.create(ROOT_INO, b"dir", DIRECTORY, ROOT_CALLER)
    below = await names.create(directory.ino, b"below", DIRECTORY, ROOT_CALLER)
    await held.engine.write_file("file", b"bytes", parent=below.ino)
    await held.published()
    async with trio.open_nursery() as nursery:
        await held.listing_under_way(nursery)
        await names.unlink(below.ino, b"file")
        await names.rmdir(directory.ino, b"below")
        await names.rmdir(ROOT_INO, b"dir")
        await held.published()
        assert held.engine.parts.deletions.pending() == 0
        held.store.may_answer.set()
    with pytest.raises(NotFound):
        await names.lookup(ROOT_INO, b"dir")
    await names.create(ROOT_INO, b"dir", DIRECTORY, ROOT_CALLER)


async def test_a_directory_that_was_renamed_meanwhile_does_not_come_back(held: Held) -> None:
    names = held.engine.names
    directory = await names.create(ROOT_INO, b"old", DIRECTORY, ROOT_CALLER)
    await held.engine.write_file("file", b"bytes", parent=directory.ino)
    await held.published()
    async with trio.open_nursery() as nursery:
        await held.listing_under_way(nursery)
        await names.rename(ROOT_INO, b"old", ROOT_INO, b"new", 0)
        await held.published()
        assert held.engine.parts.deletions.pending() == 0
        held.store.may_answer.set()
    with pytest.raises(NotFound):
        await names.lookup(ROOT_INO, b"old")
    file = await names.lookup(directory.ino, b"file")
    assert await held.engine.read_file(file.ino) == b"bytes"


async def test_a_file_that_was_uploaded_meanwhile_keeps_its_new_bytes(held: Held) -> None:
    before = await held.engine.write_file("file", b"old")
    await held.published()
    async with trio.open_nursery() as nursery:
        await held.listing_under_way(nursery)
        number = await held.engine.files.open(before.ino, 2, ROOT_CALLER)
        await held.engine.files.write(number, 0, b"new bytes")
        await held.engine.files.release(number)
        await held.published()
        held.store.may_answer.set()
    after = await held.engine.names.lookup(ROOT_INO, b"file")
    assert after.ino == before.ino
    assert await held.engine.read_file(after.ino) == b"new bytes"


async def test_what_others_delete_is_not_remembered(held: Held, tmp_path: Path) -> None:
    """Only our own deletions are held against a listing, and only against one that began before them."""
    await held.engine.write_file("file", b"ours")
    await held.published()
    await held.engine.names.unlink(ROOT_INO, b"file")
    await held.published()
    (tmp_path / "bucket" / "file").write_bytes(b"theirs")
    found = await held.engine.names.lookup(ROOT_INO, b"file")
    assert await held.engine.read_file(found.ino) == b"theirs"
