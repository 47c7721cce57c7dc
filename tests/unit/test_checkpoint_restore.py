"""A checkpoint comes back on a node that has nothing: restore, verify, list and remove, without a kernel."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from tests.support.engine import ROOT_CALLER, Engine, drained, objects_in, running_engine, settings_for
from tests.support.watched_store import WatchedStore
from tierfs.control import protocol as p
from tierfs.errors import CheckpointError, ManifestDamaged, ReadOnly
from tierfs.mount.checkpoints import CheckpointHandlers
from tierfs.namespace import tree
from tierfs.store.base import ObjectStore
from tierfs.types import ROOT_INO

semantics = pytest.mark.semantics


@asynccontextmanager
async def handlers_of(engine: Engine) -> AsyncIterator[CheckpointHandlers]:
    async with trio.open_nursery() as nursery:
        yield CheckpointHandlers(engine.parts, nursery)
        nursery.cancel_scope.cancel()


def nothing(progress: p.Progress) -> None:
    pass


async def save(engine: Engine, path: str, step: int | None = None) -> dict[str, bytes]:
    """A checkpoint that is in the store; returns its files."""
    ino = ROOT_INO
    for name in path.split("/"):
        try:
            with engine.parts.db.read() as txn:
                ino = tree.lookup(txn, ino, name.encode()).ino
        except Exception:
            ino = (await engine.names.create(ino, name.encode(), 0o040755, ROOT_CALLER)).ino
    sub = await engine.names.create(ino, b"sub", 0o040755, ROOT_CALLER)
    contents = {"rank0.pt": os.urandom(300_000), "rank1.pt": b"", "rank2.pt": os.urandom(10)}
    for file, data in contents.items():
        await engine.write_file(file, data, parent=ino)
    await engine.write_file("x", b"nested", parent=sub.ino)
    async with handlers_of(engine) as handlers:
        asked = p.CheckpointCommitRequest(path=path.encode(), step=step, wait=True, timeout_s=60)
        reply = await handlers.commit(asked, nothing)
    assert reply.checkpoint.state == "in the store", reply
    return {**contents, "sub/x": b"nested"}


@asynccontextmanager
async def another_node(tmp_path: Path, source: str) -> AsyncIterator[tuple[Engine, CheckpointHandlers]]:
    place = tmp_path / f"node{len(list(tmp_path.iterdir()))}"
    place.mkdir()
    async with running_engine(settings_for(place, source=source)) as engine, handlers_of(engine) as handlers:
        yield engine, handlers


@semantics(
    "S-CKPT-5",
    "`tierfs checkpoint restore` needs the manifest and no listing: on a node without any local state the shards can be opened when it returns, and with `--wait` all of them are local.",
)
async def test_restore_makes_no_listing(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    async with running_engine(settings) as engine:
        contents = await save(engine, "runs/step-1")
    async with another_node(tmp_path, settings.source) as (engine, handlers):
        reply = await handlers.restore(p.CheckpointRestoreRequest(path=b"runs/step-1", wait=True), nothing)
        assert (reply.shards, reply.failed, reply.cached_bytes) == (4, [], sum(map(len, contents.values())))
        assert engine.parts.store.counts.by_operation.get("list", 0) == 0
        gets = engine.parts.store.counts.by_operation["get"]
        ino = ROOT_INO
        for name in (b"runs", b"step-1"):
            found = engine.parts.refresher.lookup_local(ino, name)
            assert found is not None
            ino = found.ino
        for file, data in contents.items():
            directory = ino
            *above, name = file.split("/")
            for part in above:
                found = engine.parts.refresher.lookup_local(directory, part.encode())
                assert found is not None
                directory = found.ino
            found = engine.parts.refresher.lookup_local(directory, name.encode())
            assert found is not None
            assert await engine.read_file(found.ino) == data
        assert engine.parts.store.counts.by_operation["get"] == gets, "nothing is fetched twice"
        assert engine.parts.store.counts.by_operation.get("list", 0) == 0


async def test_a_read_only_mount_restores_and_changes_nothing(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    async with running_engine(settings) as engine:
        contents = await save(engine, "c")
    place = tmp_path / "readonly"
    place.mkdir()
    reader = settings_for(place, source=settings.source, read_only=True)
    async with running_engine(reader) as engine, handlers_of(engine) as handlers:
        reply = await handlers.restore(p.CheckpointRestoreRequest(path=b"c", wait=True), nothing)
        assert (reply.failed, reply.cached_bytes) == ([], sum(map(len, contents.values())))
        with pytest.raises(ReadOnly):
            await handlers.remove(p.CheckpointRemoveRequest(path=b"c"), nothing)
        with pytest.raises(ReadOnly):
            await handlers.commit(p.CheckpointCommitRequest(path=b"c"), nothing)


async def test_restored_names_agree_with_a_listing_made_later(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    async with running_engine(settings) as engine:
        contents = await save(engine, "c")
    async with another_node(tmp_path, settings.source) as (engine, handlers):
        await handlers.restore(p.CheckpointRestoreRequest(path=b"c", wait=True), nothing)
        with engine.parts.db.read() as txn:
            before = {file: tree.resolve(txn, b"c/" + file.encode()).ino for file in contents}
        await engine.parts.refresher.listed(ROOT_INO)
        with engine.parts.db.read() as txn:
            assert {file: tree.resolve(txn, b"c/" + file.encode()).ino for file in contents} == before


@semantics(
    "S-CKPT-6",
    "`restore` never gives a shard other bytes than the checkpoint had: one that is missing or was replaced in the store is named as failed.",
)
async def test_replaced_and_missing_shards_are_named(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    async with running_engine(settings) as engine:
        contents = await save(engine, "c")
    bucket = tmp_path / "bucket"
    (bucket / "c" / "rank0.pt").write_bytes(b"x" * len(contents["rank0.pt"]))
    (bucket / "c" / "rank2.pt").unlink()
    async with another_node(tmp_path, settings.source) as (_, handlers):
        reply = await handlers.restore(p.CheckpointRestoreRequest(path=b"c", wait=True), nothing)
        assert {failure.path for failure in reply.failed} == {"c/rank0.pt", "c/rank2.pt"}
        verified = await handlers.verify(p.CheckpointVerifyRequest(path=b"c"), nothing)
        assert [(found.path, found.message.split(":")[0]) for found in verified.damaged] == [
            ("rank0.pt", "replaced"), ("rank2.pt", "missing"),
        ]  # fmt: skip
        (listed,) = (await handlers.list_all(p.CheckpointListRequest(), nothing)).checkpoints
        assert (listed.path, listed.state) == ("c", "damaged")
        assert "and 1 more" in listed.message


async def test_names_that_were_listed_before_are_compared_with_the_manifest(tmp_path: Path) -> None:
    """What an older listing says is asked for again, and what is newer is not taken for the checkpoint."""
    settings = settings_for(tmp_path)
    async with running_engine(settings) as engine:
        await save(engine, "c")
    async with another_node(tmp_path, settings.source) as (engine, handlers):
        await engine.parts.refresher.listed(ROOT_INO)
        async with running_engine(settings) as first:
            with first.parts.db.read() as txn:
                ino = tree.resolve(txn, b"c").ino
            await first.write_file("again", b"1", parent=ino)
            await drained(first)
            async with handlers_of(first) as theirs:
                await theirs.commit(p.CheckpointCommitRequest(path=b"c", wait=True, timeout_s=60), nothing)
        reply = await handlers.restore(p.CheckpointRestoreRequest(path=b"c", wait=True), nothing)
        assert (reply.shards, reply.failed) == (5, [])


async def test_what_is_written_here_is_not_taken_for_the_checkpoint(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path, upload_delay_s=3600.0)) as engine:
        await save(engine, "c")
        with engine.parts.db.read() as txn:
            ino = tree.resolve(txn, b"c").ino
        await engine.names.unlink(ino, b"rank2.pt")
        await engine.write_file("rank2.pt", b"0123456789", parent=ino)
        async with handlers_of(engine) as handlers:
            reply = await handlers.restore(p.CheckpointRestoreRequest(path=b"c", wait=True), nothing)
            assert [failure.path for failure in reply.failed] == ["c/rank2.pt"]


@semantics(
    "S-CKPT-7",
    "`tierfs checkpoint verify` finds a shard that is missing, has another size or was replaced, and with `--full` one whose bytes differ from the checksum.",
)
async def test_full_verification_reads_the_bytes(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine, handlers_of(engine) as handlers:
        contents = await save(engine, "c")
        request = p.CheckpointVerifyRequest(path=b"c", full=True)
        whole = await handlers.verify(request, nothing)
        assert (whole.damaged, whole.checked_bytes) == ([], sum(map(len, contents.values())))
        # The ETag of a directory store is inode, time and size: so the same bytes, and then one that is not.
        victim = engine.bucket / "c" / "rank0.pt"
        status = victim.stat()
        with victim.open("r+b") as file:
            file.seek(200_000)
            file.write(b"damaged")
        os.utime(victim, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert (await handlers.verify(p.CheckpointVerifyRequest(path=b"c"), nothing)).damaged == []
        (found,) = (await handlers.verify(request, nothing)).damaged
        assert found.path == "rank0.pt"
        assert "have the checksum" in found.message
        with victim.open("ab") as file:
            file.write(b"!")
        (found,) = (await handlers.verify(p.CheckpointVerifyRequest(path=b"c"), nothing)).damaged
        assert "bytes, not 300000" in found.message


async def test_a_bad_manifest_is_listed_as_damaged_and_refused(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine, handlers_of(engine) as handlers:
        await save(engine, "c")
        path = engine.bucket / ".tierfs" / "checkpoints" / "c.json"
        body = json.loads(path.read_bytes())
        body["shards"][0]["key"] = "../../etc/passwd"
        path.write_text(json.dumps(body))
        (listed,) = (await handlers.list_all(p.CheckpointListRequest(), nothing)).checkpoints
        assert listed.state == "damaged"
        assert "not trusted" in listed.message
        for call, request in (
            (handlers.restore, p.CheckpointRestoreRequest(path=b"c", wait=True)),
            (handlers.verify, p.CheckpointVerifyRequest(path=b"c")),
        ):
            with pytest.raises(ManifestDamaged, match="not trusted"):
                await call(request, nothing)  # type: ignore[operator]
        with pytest.raises(CheckpointError, match="no checkpoint is in the store under this name"):
            await handlers.restore(p.CheckpointRestoreRequest(path=b"nowhere"), nothing)


async def test_lists_what_lies_below_and_what_is_on_its_way(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine, handlers_of(engine) as handlers:
        for step in (1, 2):
            await save(engine, f"runs/step-{step}", step)
        await save(engine, "other")
        entries = (await handlers.list_all(p.CheckpointListRequest(), nothing)).checkpoints
        assert [(found.path, found.step, found.state, found.shards) for found in entries] == [
            ("other", None, "in the store", 4),
            ("runs/step-1", 1, "in the store", 4),
            ("runs/step-2", 2, "in the store", 4),
        ]
        below = (await handlers.list_all(p.CheckpointListRequest(path=b"runs/step-1"), nothing)).checkpoints
        assert [found.path for found in below] == ["runs/step-1"]
    async with (
        running_engine(settings_for(tmp_path), publishing=False) as engine,
        handlers_of(engine) as handlers,
    ):
        with engine.parts.db.read() as txn:
            ino = tree.resolve(txn, b"runs/step-2").ino
        await engine.write_file("more", b"1", parent=ino)
        reply = await handlers.commit(p.CheckpointCommitRequest(path=b"runs/step-2", step=2), nothing)
        assert (reply.checkpoint.state, reply.checkpoint.left) == ("local", 5)
        (found,) = (
            await handlers.list_all(p.CheckpointListRequest(path=b"runs/step-2"), nothing)
        ).checkpoints
        assert found.state == "local", "the newer of the two"


async def test_a_removed_manifest_is_gone_before_anything_else(tmp_path: Path) -> None:
    done: list[tuple[str, str]] = []

    def wrap(store: ObjectStore) -> ObjectStore:
        watched = WatchedStore(store)
        watched.after = lambda operation, key: done.append((operation, key))
        return watched  # type: ignore[return-value]

    async with running_engine(settings_for(tmp_path), wrap=wrap) as engine, handlers_of(engine) as handlers:
        contents = await save(engine, "c")
        assert (await handlers.remove(p.CheckpointRemoveRequest(path=b"c"), nothing)).had_manifest
        assert ("delete", ".tierfs/checkpoints/c.json") in done
        assert set(objects_in(engine.bucket)) >= {f"c/{file}" for file in contents}
        assert not (await handlers.remove(p.CheckpointRemoveRequest(path=b"c"), nothing)).had_manifest
