"""The engine's part of a commit: when the manifest is written, and what it says."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import xxhash

from tests.support.engine import ROOT_CALLER, Engine, drained, objects_in, running_engine, settings_for
from tests.support.watched_store import WatchedStore
from tierfs.errors import InvalidArgument, NoAttribute, ReadOnly, StoreUnavailable
from tierfs.mount.drain import drain
from tierfs.store.base import ObjectStore
from tierfs.types import ROOT_INO

semantics = pytest.mark.semantics
ATTRIBUTE = b"user.tierfs.checkpoint"
SAVE_ID = "5" * 32


async def make_shards(engine: Engine, name: str = "c", count: int = 3) -> tuple[int, dict[str, bytes]]:
    """A directory with files; returns its inode and their contents."""
    top = await engine.names.create(ROOT_INO, name.encode(), 0o040755, ROOT_CALLER)
    contents = {f"rank{number}.pt": os.urandom(1000 + 200_000 * number) for number in range(count)}
    for file, data in contents.items():
        await engine.write_file(file, data, parent=top.ino)
    return top.ino, contents


def manifest_file(engine: Engine, name: str = "c") -> Path:
    return engine.bucket / ".tierfs" / "checkpoints" / f"{name}.json"


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(60):
        while not condition():
            await trio.sleep(0.01)


async def written(engine: Engine, name: str = "c") -> dict[str, Any]:
    """The manifest, once it is there and the request is done."""
    await until(lambda: manifest_file(engine, name).exists() and not engine.parts.commits.pending())
    found: dict[str, Any] = json.loads(manifest_file(engine, name).read_bytes())
    return found


@semantics(
    "S-CKPT-3",
    "The manifest of a checkpoint is one JSON object below `.tierfs/checkpoints/`, written when every shard is in the store; in rank order it has the size, the xxh3-128 of all bytes, the object key and the ETag of each.",
)
async def test_the_manifest_is_written_last_and_says_what_is_there(tmp_path: Path) -> None:
    done: list[str] = []

    def wrap(store: ObjectStore) -> ObjectStore:
        watched = WatchedStore(store)
        watched.before = lambda operation, key: done.append(f"begin {key}")
        watched.after = lambda operation, key: done.append(f"end {key}")
        return watched  # type: ignore[return-value]

    async with running_engine(settings_for(tmp_path), wrap=wrap) as engine:
        ino, contents = await make_shards(engine, count=11)
        await engine.parts.commits.commit(ino, step=7, world_size=11)
        found = await written(engine)
        last = done.index("begin .tierfs/checkpoints/c.json")
        assert {f"end c/{file}" for file in contents} <= set(done[:last])
        assert (found["name"], found["step"], found["world_size"]) == ("c", 7, 11)
        assert [shard["file"] for shard in found["shards"]] == [f"rank{number}.pt" for number in range(11)]
        for shard in found["shards"]:
            data = contents[shard["file"]]
            assert shard["key"] == f"c/{shard['file']}"
            assert shard["size_bytes"] == len(data)
            assert shard["xxh3_128"] == xxhash.xxh3_128(data).hexdigest()
            assert shard["etag"] == engine.parts.store.head(shard["key"]).etag
        assert await engine.parts.commits.state_of(ino) == {"state": "in the store"}


async def test_no_manifest_while_a_shard_cannot_be_put(tmp_path: Path) -> None:
    fails = [True]

    def before(operation: str, key: str) -> None:
        if fails[0] and key == "c/rank1.pt":
            raise StoreUnavailable(f"{key}: refused by the test")

    def wrap(store: ObjectStore) -> ObjectStore:
        watched = WatchedStore(store)
        watched.before = before
        return watched  # type: ignore[return-value]

    async with running_engine(settings_for(tmp_path, store_timeout_s=0.1), wrap=wrap) as engine:
        ino, _ = await make_shards(engine)
        await engine.parts.commits.commit(ino)
        await until(lambda: bool(engine.parts.publisher.failures))
        assert not manifest_file(engine).exists()
        assert (await engine.attributes.get_xattr(ino, ATTRIBUTE)).startswith(b'{"state": "local"')
        fails[0] = False
        await drained(engine)
        assert len((await written(engine))["shards"]) == 3


async def test_a_manifest_that_cannot_be_put_is_tried_again_and_shown(tmp_path: Path) -> None:
    fails = [True]

    def before(operation: str, key: str) -> None:
        if fails[0] and "checkpoints" in key:
            raise StoreUnavailable(f"{key}: refused by the test")

    def wrap(store: ObjectStore) -> ObjectStore:
        watched = WatchedStore(store)
        watched.before = before
        return watched  # type: ignore[return-value]

    async with running_engine(settings_for(tmp_path, store_timeout_s=0.1), wrap=wrap) as engine:
        ino, _ = await make_shards(engine)
        await engine.parts.commits.commit(ino)
        await until(lambda: any(message for *_, message in engine.parts.commits.pending()))
        state = await engine.parts.commits.state_of(ino)
        assert state["left"] == 0
        assert "refused by the test" in state["message"]
        fails[0] = False
        assert len((await written(engine))["shards"]) == 3


@semantics(
    "S-CKPT-4",
    "A commit that was asked for is finished after a killed engine and after a remount, without being asked for again.",
)
async def test_a_request_outlives_the_engine(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    async with running_engine(settings, publishing=False) as engine:
        ino, contents = await make_shards(engine)
        asked = {"action": "commit", "id": SAVE_ID, "step": 3, "world_size": 3}
        await engine.attributes.set_xattr(ino, ATTRIBUTE, json.dumps(asked).encode())
    async with running_engine(settings) as engine:
        found = await written(engine)
        assert (found["save_id"], found["step"]) == (SAVE_ID, 3)
        assert len(found["shards"]) == len(contents)
    assert list((tmp_path / "state" / "checkpoints").iterdir()) == []


def test_a_drain_without_a_mount_writes_the_manifest(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)

    async def leave() -> None:
        async with running_engine(settings, publishing=False) as engine:
            ino, _ = await make_shards(engine)
            await engine.parts.commits.commit(ino, SAVE_ID)

    trio.run(leave)
    drained = drain(settings, timeout_s=60, on_progress=lambda *_: None)
    assert (drained.remaining_files, drained.failures) == (0, [])
    found = json.loads((tmp_path / "bucket" / ".tierfs" / "checkpoints" / "c.json").read_bytes())
    assert found["save_id"] == SAVE_ID
    assert list((tmp_path / "state" / "checkpoints").iterdir()) == []


async def test_what_is_being_written_is_uploaded_under_its_final_name_only(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        top = await engine.names.create(ROOT_INO, b".c.partial", 0o040755, ROOT_CALLER)
        saving = {"action": "saving", "id": SAVE_ID, "name": b".c.partial".hex()}
        await engine.attributes.set_xattr(top.ino, ATTRIBUTE, json.dumps(saving).encode())
        await engine.write_file("a", b"A", parent=top.ino)
        await engine.write_file("beside", b"B")
        await until(lambda: "beside" in objects_in(engine.bucket))
        assert objects_in(engine.bucket) == {"beside": b"B"}
        assert json.loads(await engine.attributes.get_xattr(top.ino, ATTRIBUTE)) == {"state": "saving"}
        asked = {"action": "commit", "id": SAVE_ID}
        await engine.attributes.set_xattr(top.ino, ATTRIBUTE, json.dumps(asked).encode())
        await engine.names.rename(ROOT_INO, b".c.partial", ROOT_INO, b"c", 0)
        assert [shard["key"] for shard in (await written(engine))["shards"]] == ["c/a"]
        assert objects_in(engine.bucket) == {"beside": b"B", "c/a": b"A"}
        assert engine.parts.store.counts.by_operation.get("copy", 0) == 0


async def test_what_a_killed_save_has_left_is_no_checkpoint(tmp_path: Path) -> None:
    """Killed between request and rename, then put aside by the next save: whatever its name, it is not whole."""
    async with running_engine(settings_for(tmp_path)) as engine:
        top = await engine.names.create(ROOT_INO, b".c.partial.new", 0o040755, ROOT_CALLER)
        saving = {"action": "saving", "id": SAVE_ID, "name": b".c.partial".hex()}
        await engine.attributes.set_xattr(top.ino, ATTRIBUTE, json.dumps(saving).encode())
        await engine.names.rename(ROOT_INO, b".c.partial.new", ROOT_INO, b".c.partial", 0)
        await engine.write_file("a", b"A", parent=top.ino)
        asked = {"action": "commit", "id": SAVE_ID}
        await engine.attributes.set_xattr(top.ino, ATTRIBUTE, json.dumps(asked).encode())
        await engine.names.rename(ROOT_INO, b".c.partial", ROOT_INO, b".c.partial.old", 0)
        await drained(engine)
        await engine.parts.commits.finish()
        assert [pending.save_id for _, pending, *_ in engine.parts.commits.pending()] == [SAVE_ID]
        await engine.names.unlink(top.ino, b"a")
        await engine.names.rmdir(ROOT_INO, b".c.partial.old")
        await until(lambda: not engine.parts.commits.pending())
        assert not list(engine.bucket.rglob("*.json"))


async def test_a_flush_does_not_leave_out_what_is_being_written(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        top = await engine.names.create(ROOT_INO, b".c.partial", 0o040755, ROOT_CALLER)
        saving = {"action": "saving", "id": SAVE_ID, "name": b".c.partial".hex()}
        await engine.attributes.set_xattr(top.ino, ATTRIBUTE, json.dumps(saving).encode())
        await engine.write_file("a", b"A", parent=top.ino)
        await drained(engine)
        assert objects_in(engine.bucket) == {".c.partial/a": b"A"}


async def test_bytes_written_after_the_request_are_in_the_sum(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path, upload_delay_s=3600.0)) as engine:
        ino, _ = await make_shards(engine, count=1)
        await engine.parts.commits.commit(ino)
        # At no moment is there no such file: that would be another story.
        await engine.write_file("rank0.new", b"changed", parent=ino)
        await engine.names.rename(ino, b"rank0.new", ino, b"rank0.pt", 0)
        await engine.write_file("added", b"later", parent=ino)
        await drained(engine)
        (shard,) = (await written(engine))["shards"]
        assert shard["xxh3_128"] == xxhash.xxh3_128(b"changed").hexdigest()


@pytest.mark.parametrize("what", ["shard", "directory"])
async def test_a_checkpoint_that_is_removed_first_gets_no_manifest(tmp_path: Path, what: str) -> None:
    async with running_engine(settings_for(tmp_path, upload_delay_s=3600.0)) as engine:
        ino, contents = await make_shards(engine)
        await engine.parts.commits.commit(ino)
        for file in list(contents) if what == "directory" else ["rank1.pt"]:
            await engine.names.unlink(ino, file.encode())
        if what == "directory":
            await engine.names.rmdir(ROOT_INO, b"c")
        await drained(engine)
        await until(lambda: engine.parts.commits.failure_of(ino) is not None)
        assert not manifest_file(engine).exists()
        assert "removed before" in (engine.parts.commits.failure_of(ino) or "")


async def test_ranks_are_noted_where_they_were_told(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        ino, _ = await make_shards(engine)
        for rank, files in ((0, ["rank2.pt"]), (1, ["rank0.pt", "not there"])):
            told = json.dumps({"state": "done", "files": files}).encode()
            await engine.attributes.set_xattr(ino, b"user.tierfs-save.rank.%d" % rank, told)
        await engine.parts.commits.commit(ino)
        found = await written(engine)
        assert [(shard["file"], shard["rank"]) for shard in found["shards"]] == [
            ("rank2.pt", 0), ("rank0.pt", 1), ("rank1.pt", None),
        ]  # fmt: skip


async def test_the_shards_of_several_nodes_make_one_manifest(tmp_path: Path) -> None:
    nodes = [tmp_path / "n0", tmp_path / "n1"]
    for node in nodes:
        node.mkdir()
    first = settings_for(nodes[0])
    second = settings_for(nodes[1], source=first.source)
    async with running_engine(first) as here, running_engine(second) as there:
        ino, contents = await make_shards(here, count=2)
        await here.parts.commits.commit(ino, SAVE_ID, 1, 3, node=0, nodes=2)
        await until(lambda: any("node 1" in message for *_, message in here.parts.commits.pending()))
        assert not manifest_file(here).exists()
        other = await there.names.create(ROOT_INO, b"c", 0o040755, ROOT_CALLER)
        await there.write_file("rank2.pt", b"from the other node", parent=other.ino)
        # Only what was written there: the directory may show what the first node has put by now.
        await there.parts.commits.commit(other.ino, SAVE_ID, 1, 3, node=1, nodes=2)
        found = await written(here)
        assert {shard["file"] for shard in found["shards"]} == {*contents, "rank2.pt"}
        assert [path.name for path in (here.bucket / ".tierfs").rglob("*.json")] == ["c.json"]


async def test_what_is_asked_wrongly_is_refused(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path)) as engine:
        ino, _ = await make_shards(engine, count=1)
        for value in (b"", b"{}", b'{"action": "x", "id": ""}', b'{"action": "commit", "id": "../../x"}',
                      b'{"action": "saving", "id": "", "name": "not hex"}',
                      b'{"action": "saving", "id": "", "name": ""}'):  # fmt: skip
            with pytest.raises(InvalidArgument):
                await engine.attributes.set_xattr(ino, ATTRIBUTE, value)
        with pytest.raises(InvalidArgument, match="root"):
            await engine.parts.commits.commit(ROOT_INO)
        for nothing_there in (ino, ROOT_INO):
            with pytest.raises(NoAttribute):
                await engine.attributes.get_xattr(nothing_there, ATTRIBUTE)
        assert engine.parts.commits.pending() == []
    async with running_engine(settings_for(tmp_path, read_only=True)) as engine:
        with pytest.raises(ReadOnly):
            await engine.parts.commits.commit(ino)
