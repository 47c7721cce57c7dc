"""Closed files reach the disk by themselves, and what status says of the stages is true."""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.engine import ROOT_CALLER, Engine, drained, objects_in, running_engine, settings_for
from tests.support.watched_store import WatchedStore
from tierfs.cache import device
from tierfs.cache.index import TierIndex
from tierfs.cache.spares import Spare
from tierfs.errors import TierFailed
from tierfs.namespace.change import Change
from tierfs.namespace.group_commit import GroupCommit
from tierfs.store.base import ObjectStore
from tierfs.types import ROOT_INO, new_content_id
from tierfs.writeback.stages import Stage
from tierfs.writeback.syncing import BackgroundSync

DATA = b"d" * 40_000
NOTHING = Stage(0, 0)


class Disk:
    """What fdatasync was called for, and what the file held then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: list[bytes] = []
        self.in_between: Callable[[], None] = lambda: None
        """Called in the first fdatasync of a content, after the device has the bytes."""
        self._fdatasync = os.fdatasync
        monkeypatch.setattr(os, "fdatasync", self._watched)

    def _watched(self, fd: int) -> None:
        self._fdatasync(fd)
        if "/dirty/" in os.readlink(f"/proc/self/fd/{fd}"):
            self.synced.append(os.pread(fd, 1 << 20, 0))
            in_between, self.in_between = self.in_between, lambda: None
            in_between()


def syncs_after(monkeypatch: pytest.MonkeyPatch, delay_s: float) -> None:
    monkeypatch.setattr(BackgroundSync.note, "__defaults__", (delay_s,))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Nothing is synced by itself, unless ``syncs_after`` is called."""
    syncs_after(monkeypatch, 3600.0)
    return Disk(monkeypatch)


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(60):
        while not condition():
            await trio.sleep(0.01)


def held(engine: Engine) -> tuple[int, int, int]:
    """Files in memory, on the disk, being uploaded."""
    stages = engine.parts.stages
    return stages.memory().files, stages.disk().files, stages.uploading().files


async def test_a_closed_file_is_synced_without_an_upload(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_engine(settings_for(tmp_path), publishing=False) as engine:
        stages = engine.parts.stages
        await engine.write_file("a.bin", DATA)
        assert disk.synced == []
        assert (stages.memory(), stages.disk()) == (Stage(1, 40_960), NOTHING)
        syncs_after(monkeypatch, 0.0)
        await engine.write_file("b.bin", b"b")
        await until(lambda: disk.synced == [b"b"])
        await until(lambda: (stages.memory(), stages.disk()) == (Stage(1, 40_960), Stage(1, 4096)))
        assert objects_in(engine.bucket) == {}


async def test_what_is_open_for_writing_is_left_alone(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_engine(settings_for(tmp_path), publishing=False) as engine:
        number, inode = await engine.files.create(ROOT_INO, b"a", 0o644, os.O_RDWR, ROOT_CALLER)
        await engine.files.write(number, 0, DATA)
        engine.parts.background_sync.note(inode.ino, 0.0)
        other = await engine.write_file("b", b"closed")
        engine.parts.background_sync.hurry(other.ino)
        await until(lambda: held(engine) == (1, 1, 0))
        assert disk.synced == [b"closed"]
        await engine.files.fsync(number)
        assert disk.synced == [b"closed", DATA]
        assert held(engine) == (0, 2, 0)
        await engine.files.write(number, 0, b"again")
        assert held(engine) == (1, 1, 0)
        syncs_after(monkeypatch, 0.0)
        await engine.files.release(number)
        await until(lambda: len(disk.synced) == 3)


async def test_a_write_during_a_sync_is_not_on_the_disk(tmp_path: Path, disk: Disk) -> None:
    async with running_engine(settings_for(tmp_path), publishing=False) as engine:
        inode = await engine.write_file("a.bin", DATA)
        number = await engine.files.open(inode.ino, os.O_RDWR, ROOT_CALLER)
        content = engine.parts.services.handles.file(number).content
        assert content.staging is not None
        staging = content.staging
        disk.in_between = lambda: trio.from_thread.run(staging.write, 0, b"later")
        await engine.files.fsync(number)
        assert held(engine) == (1, 0, 0)
        await engine.files.fsync(number)
        assert held(engine) == (0, 1, 0)
        await engine.files.release(number)


async def test_a_file_that_went_is_no_stage(tmp_path: Path, disk: Disk) -> None:
    async with running_engine(settings_for(tmp_path), publishing=False) as engine:
        inode = await engine.write_file("a.bin", DATA)
        await engine.names.unlink(ROOT_INO, b"a.bin")
        engine.parts.background_sync.hurry(inode.ino)
        other = await engine.write_file("b", b"other")
        engine.parts.background_sync.hurry(other.ino)
        await until(lambda: disk.synced == [b"other"])
        await until(lambda: held(engine) == (0, 1, 0))


async def test_what_is_uploaded_soon_is_synced_once(tmp_path: Path, disk: Disk) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        await engine.write_file("a.bin", DATA)
        await drained(engine)
        await until(lambda: held(engine) == (0, 0, 0))  # it becomes a clean copy just after
        assert disk.synced == [DATA]
        writer = engine.parts.writer
        assert (writer.uploaded_files, writer.uploaded_bytes) == (1, len(DATA))


async def test_an_upload_under_way_is_counted(tmp_path: Path) -> None:
    going_on, seen = trio.Event(), []

    def wrap(store: ObjectStore) -> ObjectStore:
        watched = WatchedStore(store)

        def before(operation: str, key: str) -> None:
            if operation == "put":
                seen.append(trio.from_thread.run_sync(held, engine))
                trio.from_thread.run_sync(going_on.set)

        watched.before = before
        return watched  # type: ignore[return-value]

    async with running_engine(settings_for(tmp_path), wrap=wrap) as engine:
        await engine.write_file("a.bin", DATA)
        with trio.fail_after(60):
            await going_on.wait()
        assert seen == [(0, 1, 1)]  # synced before anybody can see it
        await drained(engine)
        await until(lambda: held(engine) == (0, 0, 0))  # it becomes a clean copy just after


async def test_the_end_of_a_mount_syncs_what_is_left(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, synced = settings_for(tmp_path), []
    sync_file_system = device.sync_file_system
    monkeypatch.setattr(
        device, "sync_file_system", lambda path: synced.append((path, sync_file_system(path)))
    )
    async with running_engine(settings, publishing=False) as engine:
        await engine.write_file("a", DATA)
        assert held(engine) == (1, 0, 0)
    assert synced == [(f"{tmp_path}/tier", None)]
    async with running_engine(settings, publishing=False) as engine:
        assert held(engine) == (0, 1, 0)


async def test_what_a_killed_engine_left_is_synced(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, close = settings_for(tmp_path), TierIndex.close
    async with running_engine(settings, publishing=False) as engine:
        await engine.write_file("a.bin", DATA)
        monkeypatch.setattr(TierIndex, "close", lambda index, *, clean: close(index, clean=False))
    assert disk.synced == []
    syncs_after(monkeypatch, 0.0)
    async with running_engine(settings, publishing=False) as engine:
        await until(lambda: held(engine) == (0, 1, 0))
        assert disk.synced == [DATA]


async def test_a_truncated_file_is_synced(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_engine(settings_for(tmp_path), publishing=False) as engine:
        syncs_after(monkeypatch, 0.0)
        inode = await engine.write_file("a.bin", DATA)
        await until(lambda: held(engine) == (0, 1, 0))
        await engine.attributes._set_size(inode.ino, 50)
        await until(lambda: disk.synced == [DATA, DATA[:50]])


async def test_bytes_and_names_go_to_the_disk_at_the_same_time(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = threading.Event()
    commit = GroupCommit._commit_group

    def watched(committer: GroupCommit, waiting: deque[Change[Any]]) -> list[Change[Any]]:
        group = commit(committer, waiting)
        if any(job.durable for job in group):
            committed.set()
        return group

    async with running_engine(settings_for(tmp_path), publishing=False) as engine:
        number, _ = await engine.files.create(ROOT_INO, b"a", 0o644, os.O_RDWR, ROOT_CALLER)
        await engine.files.write(number, 0, DATA)
        monkeypatch.setattr(GroupCommit, "_commit_group", watched)
        overlapped = []
        disk.in_between = lambda: overlapped.append(committed.wait(60))
        await engine.files.fsync(number)
        assert overlapped == [True]
        await engine.files.release(number)


async def test_what_the_disk_refuses_stays_in_memory(tmp_path: Path, disk: Disk) -> None:
    def refuse() -> None:
        raise OSError(errno.EIO, "the device says no")

    async with running_engine(settings_for(tmp_path), publishing=False) as engine:
        number, _ = await engine.files.create(ROOT_INO, b"a", 0o644, os.O_RDWR, ROOT_CALLER)
        await engine.files.write(number, 0, DATA)
        disk.in_between = refuse
        with pytest.raises(TierFailed, match="the device says no"):
            await engine.files.fsync(number)
        assert held(engine) == (1, 0, 0)
        await engine.files.fsync(number)
        assert held(engine) == (0, 1, 0)
        await engine.files.release(number)


async def test_files_made_in_advance_have_durable_names(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    sync_directory = device.sync_directory

    def watched(path: str) -> None:
        sync_directory(path)
        synced.append(path)

    monkeypatch.setattr(device, "sync_directory", watched)
    async with running_engine(settings_for(tmp_path), publishing=False) as engine:
        cache = engine.parts.cache
        async with trio.open_nursery() as nursery:
            await nursery.start(cache.make_spares)
            assert synced == [f"{tmp_path}/tier/dirty"]
            spare = cache.take_spare()
            assert spare is not None
            staging = cache.adopt_spare(spare, 0)
            os.close(spare.descriptor)
            await staging.write(0, DATA)
            await staging.sync()
            assert disk.synced == [DATA]
            assert len(synced) == 1
            await staging.discard()
            late = Spare(new_content_id(), 0, (0, 0), spare.batch + 1)
            assert not cache._area.spares.is_named(late)
            nursery.cancel_scope.cancel()


async def test_what_replaces_a_file_does_not_wait(tmp_path: Path, disk: Disk) -> None:
    async with running_engine(settings_for(tmp_path), publishing=False) as engine:
        await engine.write_file("model", b"old")
        await engine.write_file("model.tmp", b"new")
        await engine.write_file("other.tmp", b"other")
        await engine.names.rename(ROOT_INO, b"other.tmp", ROOT_INO, b"other", 0)
        await engine.names.rename(ROOT_INO, b"model.tmp", ROOT_INO, b"model", 0)
        await until(lambda: bool(disk.synced))
        await until(lambda: held(engine) == (1, 1, 0))
        assert disk.synced == [b"new"]
