"""Nothing that a power cut cannot bring back goes before the commit that makes it unneeded is durable.

A commit whose header has not been synced may be undone by a power cut. Were a staging file gone by then, or an
object, the namespace would speak of bytes that nobody has.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.engine import ROOT_CALLER, Engine, drained, objects_in, running_engine, settings_for
from tests.support.watched_store import WatchedStore
from tierfs.cache import device, sealing
from tierfs.namespace.change import Change
from tierfs.namespace.db import Database
from tierfs.namespace.group_commit import GroupCommit
from tierfs.store.base import ObjectStore
from tierfs.types import ROOT_INO


class Watch:
    """Notes what goes, and whether there was a durable commit by then, both since ``begin``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gone: list[tuple[str, bool]] = []
        self._durable = False
        commit, unlink, move = GroupCommit._commit_group, device.unlink_if_there, sealing.move

        def watched_commit(committer: GroupCommit, waiting: deque[Change[Any]]) -> list[Change[Any]]:
            group = commit(committer, waiting)
            self._durable = self._durable or any(job.durable for job in group)
            return group

        def watched_unlink(path: str) -> None:
            if "/dirty/" in path:
                self.note("file")
            unlink(path)

        def watched_move(source: str, target: str, sidecar: str | None, stale_fds: Sequence[int]) -> None:
            self.note("sealed")
            move(source, target, sidecar, stale_fds)

        monkeypatch.setattr(GroupCommit, "_commit_group", watched_commit)
        monkeypatch.setattr(device, "unlink_if_there", watched_unlink)
        monkeypatch.setattr(sealing, "move", watched_move)

    def begin(self) -> None:
        self.gone.clear()
        self._durable = False

    async def wait(self, what: str) -> bool:
        """Until that has gone; whether there was a durable commit before."""
        with trio.fail_after(60):
            while what not in dict(self.gone):
                await trio.sleep(0.005)
        return dict(self.gone)[what]

    def note(self, what: str) -> None:
        self.gone.append((what, self._durable))

    def wrap(self, store: ObjectStore) -> ObjectStore:
        watched = WatchedStore(store)
        watched.before = lambda operation, key: self.note("object") if operation == "delete" else None
        return watched  # type: ignore[return-value]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


async def unlink(engine: Engine, name: bytes) -> None:
    await engine.names.unlink(ROOT_INO, name)


async def test_a_staging_file_that_was_uploaded(tmp_path: Path, watch: Watch) -> None:
    async with running_engine(settings_for(tmp_path), wrap=watch.wrap) as engine:
        watch.begin()
        await engine.write_file("f", b"x" * 5000)
        assert await watch.wait("sealed")


async def test_a_file_that_was_removed_before_its_upload(tmp_path: Path, watch: Watch) -> None:
    async with running_engine(settings_for(tmp_path), publishing=False, wrap=watch.wrap) as engine:
        await engine.write_file("f", b"x" * 5000)
        watch.begin()
        await unlink(engine, b"f")
        assert watch.gone == [("file", True)]


async def test_a_file_that_was_open_when_it_was_removed(tmp_path: Path, watch: Watch) -> None:
    async with running_engine(settings_for(tmp_path), publishing=False, wrap=watch.wrap) as engine:
        inode = await engine.write_file("f", b"x" * 5000)
        number = await engine.files.open(inode.ino, 0, ROOT_CALLER)
        watch.begin()
        await unlink(engine, b"f")
        assert watch.gone == []
        await engine.files.release(number)
        assert watch.gone == [("file", True)]


async def test_an_object_whose_file_was_removed_or_renamed(tmp_path: Path, watch: Watch) -> None:
    async with running_engine(settings_for(tmp_path), wrap=watch.wrap) as engine:
        await engine.write_file("f", b"x" * 5000)
        await engine.write_file("g", b"y" * 5000)
        await drained(engine)
        with trio.fail_after(60):
            while [what for what, _ in watch.gone].count("sealed") < 2:
                await trio.sleep(0.005)
        watch.begin()
        await unlink(engine, b"f")
        assert await watch.wait("object")
        await drained(engine)
        watch.begin()
        await engine.names.rename(ROOT_INO, b"g", ROOT_INO, b"h", 0)
        assert await watch.wait("object")
        await drained(engine)
        assert objects_in(engine.bucket) == {"h": b"y" * 5000}


def test_the_names_of_a_new_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.add(os.fstat(fd).st_ino), fsync(fd)))
    with Database.open(tmp_path / "state"):
        above = (tmp_path, tmp_path / "state", tmp_path / "state" / "namespace.lmdb")
        assert {path.stat().st_ino for path in above} <= synced


def test_the_table_of_readers_has_its_blocks(tmp_path: Path) -> None:
    """A store into a hole of a mapped file on a full disk would end the process with SIGBUS."""
    with Database.open(tmp_path / "state"):
        lock = (tmp_path / "state" / "namespace.lmdb" / "lock.mdb").stat()
        assert lock.st_blocks * 512 >= lock.st_size > 0
