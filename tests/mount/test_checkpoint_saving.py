"""``tierfs.checkpoint`` and ``tierfs checkpoint`` on a real mount: several processes, some of them killed."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

import tierfs.checkpoint
from tests.support.mount import Mounted, MountFactory, wait_until
from tests.support.posix import as_user, errno_of
from tierfs.checkpoint import ranks, sessions
from tierfs.control import protocol, registry
from tierfs.control.client import ControlClient
from tierfs.errors import NotSupported

pytestmark = pytest.mark.usefixtures("needs_mount")
semantics = pytest.mark.semantics
ROOT = Path(__file__).parents[2]
SIZE = 300_000

RANK = """
import os, sys, time
import tierfs.checkpoint
final, rank, ranks, behaviour = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
with tierfs.checkpoint.save(final, rank=rank, world_size=ranks, step=5, timeout_s=60) as directory:
    with open(directory.shard(f"rank{rank}.pt"), "wb") as file:
        file.write(bytes([65 + rank]) * SIZE)
    print("written", flush=True)
    if behaviour == "wait":
        sys.stdin.readline()
    if behaviour == "fail":
        raise ValueError("rank failed on purpose")
print("saved", flush=True)
""".replace("SIZE", str(SIZE))


class Rank:
    """One rank in a process of its own."""

    def __init__(self, final: Path, rank: int, world_size: int, behaviour: str = "") -> None:
        words = [sys.executable, "-c", RANK, str(final), str(rank), str(world_size), behaviour]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    def written(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "written\n"

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> tuple[int, str]:
        """Exit status and standard error."""
        _, said = self.process.communicate(timeout=90)
        return self.process.returncode, said

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)


@contextlib.contextmanager
def running(final: Path, *behaviours: str) -> Iterator[list[Rank]]:
    found = [Rank(final, rank, len(behaviours), behaviour) for rank, behaviour in enumerate(behaviours)]
    try:
        yield found
    finally:
        for rank in found:
            rank.process.kill()
            rank.process.communicate(timeout=30)


def manifest_of(mounted: Mounted, final: Path) -> dict[str, Any]:
    path = mounted.store_dir / ".tierfs" / "checkpoints" / f"{final.relative_to(mounted.path)}.json"
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def is_whole(final: Path, count: int) -> bool:
    return {path.name: path.read_bytes() for path in final.iterdir()} == {
        f"rank{rank}.pt": bytes([65 + rank]) * SIZE for rank in range(count)
    }


@semantics(
    "S-CKPT-1",
    "What the ranks write inside `tierfs.checkpoint.save` becomes visible under the final name when all of them have left it, all shards at once; if one fails or is killed, nothing does, and the other ranks raise `CheckpointError`.",
)
def test_all_shards_or_none_are_visible(shared_mount: Mounted, workdir: Path) -> None:
    final = workdir / "runs" / "step-5"
    with running(final, "wait", "wait", "wait") as found:
        for rank in found:
            rank.written()
        assert not final.exists()
        assert glob.glob(f"{workdir}/runs/*") == [], "patterns pass over what is being written"
        for rank in found[:2]:
            rank.go_on()
        assert not final.exists()
        found[2].go_on()
        assert [rank.end() for rank in found] == [(0, "")] * 3
    assert is_whole(final, 3)
    assert os.listdir(workdir / "runs") == ["step-5"]
    assert os.listxattr(final) == []
    tierfs.checkpoint.wait(final, timeout_s=60)
    assert tierfs.checkpoint.state(final) == {"state": "in the store"}
    known = manifest_of(shared_mount, final)
    assert [(shard["file"], shard["rank"]) for shard in known["shards"]] == [
        (f"rank{rank}.pt", rank) for rank in range(3)
    ]
    assert (known["step"], known["world_size"]) == (5, 3)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_leaves_nothing_and_the_next_save_works(workdir: Path, victim: int) -> None:
    final = workdir / "c"
    with running(final, "wait", "wait") as found:
        for rank in found:
            rank.written()
        found[1 - victim].go_on()
        found[victim].kill()
        status, said = found[1 - victim].end()
        assert status == 1
        assert "CheckpointError" in said
        assert not final.exists()
    with running(final, "", "") as found:
        assert [rank.end() for rank in found] == [(0, "")] * 2
    assert is_whole(final, 2)
    assert os.listdir(workdir) == ["c"]


def test_the_publishing_rank_killed_at_any_moment(workdir: Path) -> None:
    chance = random.Random(5)
    for number in range(4):
        final = workdir / f"c{number}"
        with running(final, "wait", "wait") as found:
            for rank in found:
                rank.written()
            found[1].go_on()
            killer = threading.Timer(chance.uniform(0.0, 0.03), found[0].process.kill)
            found[0].go_on()
            killer.start()
            status, said = found[1].end()
            killer.join()
        assert status == (0 if final.exists() else 1), said
        if final.exists():
            assert is_whole(final, 2)


def test_a_rank_that_raises_ends_the_save_for_all(workdir: Path) -> None:
    final = workdir / "c"
    with running(final, "", "fail") as found:
        (first, said), (second, why) = found[0].end(), found[1].end()
    assert (first, second) == (1, 1)
    assert "rank 1 failed: ValueError" in said
    assert "on purpose" in why
    assert os.listdir(workdir) == []


@semantics(
    "S-CKPT-2",
    "`tierfs.checkpoint.save` returns when the bytes and names of all shards are safe on this node: a killed engine or a remount loses none, and the checkpoint gets into the store and gets its manifest afterwards.",
)
def test_engine_killed_at_any_moment(mount_factory: MountFactory) -> None:
    mounted = mount_factory(options=("--upload-delay", "0.05"))
    chance = random.Random(11)
    for number in range(2):
        final = mounted.path / f"step-{number}"
        engine = mounted.status()["engine"]["pid"]
        with running(final, "wait", "wait") as found:
            for rank in found:
                rank.written()
            killer = threading.Timer(chance.uniform(0.0, 0.12), os.kill, (engine, signal.SIGKILL))
            killer.start()
            for rank in found:
                rank.go_on()
            statuses = {rank.end()[0] for rank in found}
            killer.join()
        if mounted.front != "native":
            mounted.kill9()
            mounted.start()
        wait_until(mounted.is_alive, "the mount answers")
        if 0 in statuses or final.exists():
            assert is_whole(final, 2), "what any rank was told is true for all"
            tierfs.checkpoint.wait(final, timeout_s=60)
            for shard in manifest_of(mounted, final)["shards"]:
                data = (mounted.store_dir / shard["key"]).read_bytes()
                assert xxhash.xxh3_128(data).hexdigest() == shard["xxh3_128"]


def test_an_existing_checkpoint_is_refused_or_exchanged(shared_mount: Mounted, workdir: Path) -> None:
    final = workdir / "latest"
    with tierfs.checkpoint.save(final, step=1) as directory:
        (directory / "a").write_bytes(b"1")
    tierfs.checkpoint.wait(final, timeout_s=60)
    with pytest.raises(FileExistsError), tierfs.checkpoint.save(final):
        pytest.fail("it exists")
    (workdir / "file").write_bytes(b"")
    (workdir / "link").symlink_to("latest")
    for name in ("file", "link"):
        with pytest.raises(FileExistsError), tierfs.checkpoint.save(workdir / name, replace=True):
            pytest.fail("it is no directory")
        (workdir / name).unlink()
    with open(final / "a", "rb") as reader:
        with tierfs.checkpoint.save(final, step=2, replace=True) as directory:
            (directory / "b").write_bytes(b"2")
        assert os.listdir(final) == ["b"]
        assert reader.read() == b"1"
    assert os.listdir(workdir) == ["latest"]
    tierfs.checkpoint.wait(final, timeout_s=60)
    assert manifest_of(shared_mount, final)["step"] == 2
    shared_mount.cli("checkpoint", "verify", str(final), "--full")


def test_an_unmount_waits_for_the_manifest(one_front: None, mount_factory: MountFactory) -> None:
    mounted = mount_factory()
    mounted.fail({"kind": "latency", "operation": "put", "seconds": 0.5})
    with tierfs.checkpoint.save(mounted.path / "c") as directory:
        (directory / "a").write_bytes(b"1")
    mounted.umount()
    assert [shard["file"] for shard in manifest_of(mounted, mounted.path / "c")["shards"]] == ["a"]


def test_a_block_that_raises_leaves_nothing(workdir: Path) -> None:
    with pytest.raises(ZeroDivisionError), tierfs.checkpoint.save(workdir / "c") as directory:
        (directory / "a").write_bytes(b"1")
        raise ZeroDivisionError
    assert os.listdir(workdir) == []


def test_who_may_write_there_may_save_without_being_root(
    shared_mount: Mounted, workdir: Path, other_user: tuple[int, int]
) -> None:
    (workdir / "theirs").mkdir()
    os.chown(workdir / "theirs", *other_user)
    (workdir / "roots").mkdir()

    def save() -> None:
        with tierfs.checkpoint.save(workdir / "theirs" / "c") as directory:
            directory.shard("a").write_bytes(b"1")
        tierfs.checkpoint.wait(workdir / "theirs" / "c", timeout_s=60)

    as_user(*other_user, save)
    assert manifest_of(shared_mount, workdir / "theirs" / "c")["shards"][0]["file"] == "a"
    asked = b'{"action": "commit", "id": "00000000000000000000000000000000"}'
    for refused in (workdir, workdir / "roots"):
        ask = partial(os.setxattr, refused, "user.tierfs.checkpoint", asked)
        assert errno_of(partial(as_user, *other_user, ask)) in (errno.EACCES, errno.EPERM)


def test_training_processes_load_nothing_heavy() -> None:
    code = "import sys, tierfs.checkpoint; print(*{name.partition('.')[0] for name in sys.modules})"
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert not {"trio", "pyfuse3", "boto3", "lmdb", "msgspec", "structlog", "typer"} & set(
        answer.stdout.split()
    )


def test_elsewhere_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match="not on a tierfs mount"), tierfs.checkpoint.save(tmp_path / "c"):
        pytest.fail("there is no mount")


class ThreadGroup:
    """A process group of threads, for ``sessions.GroupSession``."""

    def __init__(self, size: int) -> None:
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def of(self, rank: int) -> ranks.Group:
        group = self

        class Member:
            def gather(self, value: Any) -> list[Any]:
                group._values[rank] = value
                group._barrier.wait()
                values = list(group._values)
                group._barrier.wait()
                return values

        return Member()


def test_nodes_with_mounts_of_their_own_save_one_checkpoint(
    one_front: None, mount_factory: MountFactory
) -> None:
    """Rank 0 and 1 on one mount, rank 2 on another one of the same store: the first engine writes the manifest."""
    first = mount_factory(options=("--ttl", "1"))
    second = mount_factory(source=str(first.store_dir), options=("--ttl", "1"))
    group = ThreadGroup(3)
    failures: list[BaseException] = []

    def save(rank: int, mounted: Mounted, failing: int) -> None:
        try:
            order = sessions.Order(str(mounted.path / "c"), 1, False, True, 60.0)
            session = sessions.begin(order, ranks.Ranks(rank, 3, group.of(rank)))
            if rank == failing:
                session.fail(ValueError("on purpose"))
                return
            Path(session.path, f"rank{rank}.pt").write_bytes(bytes([65 + rank]) * SIZE)
            session.finish([f"rank{rank}.pt"])
        except BaseException as error:
            failures.append(error)

    def save_all(failing: int) -> None:
        threads = [
            threading.Thread(target=save, args=(rank, mounted, failing))
            for rank, mounted in enumerate((first, first, second))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)

    save_all(failing=2)
    assert [str(error).partition(": ")[2] for error in failures] == [
        "rank 2 failed: ValueError('on purpose')"
    ] * 2
    wait_until(lambda: os.listdir(first.path) == os.listdir(second.path) == [], "nothing is left")
    failures.clear()
    save_all(failing=-1)
    assert not failures
    tierfs.checkpoint.wait(first.path / "c", timeout_s=60)
    assert [(shard["file"], shard["rank"]) for shard in manifest_of(first, first.path / "c")["shards"]] == [
        (f"rank{rank}.pt", rank) for rank in range(3)
    ]
    for mounted in (first, second):
        wait_until(lambda mounted=mounted: len(os.listdir(mounted.path / "c")) == 3, "all shards are seen")  # type: ignore[misc]
        assert is_whole(mounted.path / "c", 3)


def test_from_the_command_line(one_front: None, mount_factory: MountFactory, tmp_path: Path) -> None:
    mounted = mount_factory()
    data = {f"part-{number}.bin": os.urandom(SIZE) for number in range(3)}
    for step in range(2):
        directory = mounted.path / f"step-{step}"
        directory.mkdir()
        for name, content in data.items():
            (directory / name).write_bytes(content)
        told = mounted.json("checkpoint", "commit", str(directory), "--step", str(step), "--wait")
        assert (told["state"], told["shards"]) == ("in the store", 3)

    listed = mounted.json("checkpoint", "list", str(mounted.path))["checkpoints"]
    assert [(entry["path"], entry["step"], entry["bytes"]) for entry in listed] == [
        (f"step-{step}", step, 3 * SIZE) for step in range(2)
    ]
    assert "in the store" in mounted.cli("checkpoint", "list", str(mounted.path)).stdout

    told = mounted.json("checkpoint", "keep", "--last", "1", str(mounted.path))
    assert [entry["path"] for entry in told["removed"]] == ["step-0"]
    assert os.listdir(mounted.path) == ["step-1"]
    refused = mounted.cli("checkpoint", "rm", str(mounted.path / "step-0"), check=False)
    assert refused.returncode == 2
    assert "is no checkpoint" in refused.stderr
    mounted.umount()
    assert os.listdir(mounted.store_dir / ".tierfs" / "checkpoints") == ["step-1.json"]
    assert not list(mounted.store_dir.glob("step-0/*"))

    other = mount_factory(source=str(mounted.store_dir))
    assert (
        "ready, 3 shards" in other.cli("checkpoint", "restore", str(other.path / "step-1"), "--wait").stdout
    )
    assert "can be read" in other.cli("checkpoint", "restore", str(other.path / "step-1")).stdout
    assert {path.name: path.read_bytes() for path in (other.path / "step-1").iterdir()} == data
    other.cli("checkpoint", "restore", str(other.path / "step-1"), "--into", str(tmp_path / "out"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == data

    (mounted.store_dir / "step-1" / "part-1.bin").write_bytes(b"replaced")
    damaged = other.cli("checkpoint", "verify", str(other.path / "step-1"), check=False)
    assert damaged.returncode == 5
    assert "part-1.bin: has 8 bytes, not 300000" in damaged.stderr
    assert other.cli("checkpoint", "list", check=False).returncode == 5


@semantics(
    "S-CKPT-9",
    "`tierfs checkpoint rm` and `keep` remove the manifest first: what is half removed is never taken for a whole checkpoint.",
)
def test_removing_begins_with_the_manifest(one_front: None, mount_factory: MountFactory) -> None:
    mounted = mount_factory(options=("--store-timeout", "1"))
    final = mounted.path / "c"
    with tierfs.checkpoint.save(final) as directory:
        (directory / "a").write_bytes(b"1")
        (directory / "b").write_bytes(b"2")
    tierfs.checkpoint.wait(final, timeout_s=60)
    mounted.fail({"kind": "outage", "operation": "delete"})
    assert mounted.cli("checkpoint", "rm", str(final), check=False).returncode == 1
    assert sorted(os.listdir(final)) == ["a", "b"], "nothing is removed while the manifest cannot be"
    mounted.heal()
    # As if it was killed after its first step.
    record = next(
        msgspec.json.decode(path.read_bytes(), type=registry.MountRecord)
        for path in (mounted.base / "run").glob("*.json")
    )
    with ControlClient(record.socket_path, timeout_s=60) as client:
        client.call("checkpoint-remove", protocol.CheckpointRemoveRequest(path=b"c"))
    assert (final / "a").read_bytes() == b"1"
    assert mounted.json("checkpoint", "list")["checkpoints"] == []
    assert mounted.cli("checkpoint", "restore", str(final), check=False).returncode == 1
