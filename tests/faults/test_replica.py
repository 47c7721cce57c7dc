"""The node is lost before everything was in the store; another one brings it back from the replica."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.lost_node import OUTAGE, lose, mount, recover, replica_of, told, wait_for_replica
from tests.support.mount import MountFactory, files_below, wait_until

pytestmark = pytest.mark.usefixtures("needs_mount")

MIB = 1 << 20


@pytest.mark.semantics(
    "S-REPLICA-1",
    "With `--replica` a file that has been closed is copied there at once, while nobody waits for it; `tierfs status` says how many files are only on this node.",
)
@pytest.mark.semantics(
    "S-REPLICA-2",
    "After the loss of a node `tierfs recover REPLICA SOURCE`, on any other node, puts what the replica holds into the store: bytes, path, mode, owner and time.",
)
def test_a_checkpoint_outlives_its_node(mount_factory: MountFactory) -> None:
    mounted = mount(mount_factory)
    chance = random.Random(5)
    (mounted.path / "old").write_bytes(b"in the store before")
    mounted.flush()
    mounted.fail(OUTAGE)
    contents = {
        "step/rank0.pt": chance.randbytes(12 * MIB + 7),
        "step/rank1.pt": chance.randbytes(300_000),
        "step/empty": b"",
        "old": b"changed since",
    }
    (mounted.path / "step").mkdir()
    for name, data in contents.items():
        (mounted.path / name).write_bytes(data)
    os.chmod(mounted.path / "step/rank0.pt", 0o640)
    os.utime(mounted.path / "step/rank1.pt", ns=(10**18, 10**18))
    os.rename(mounted.path / "step/rank1.pt", mounted.path / "step/rank01.pt")
    contents["step/rank01.pt"] = contents.pop("step/rank1.pt")
    wait_for_replica(mounted, len(contents))
    assert told(mounted)["held_bytes"] == sum(map(len, contents.values()))
    assert told(mounted)["state"] == "ok"
    assert files_below(mounted.store_dir) == {"old": b"in the store before"}
    lose(mounted)

    found = recover(mounted)
    assert (found["files"], found["failed"], found["conflicts"]) == (len(contents), [], [])
    assert found["bytes"] == sum(map(len, contents.values()))
    assert files_below(mounted.store_dir) == contents
    assert recover(mounted)["files"] == 0, "what has been recovered is gone from the replica"
    assert files_below(replica_of(mounted)) == {}

    mounted.heal()
    mounted.start()
    mounted.cli("import", "--metadata", str(mounted.path))
    assert stat.S_IMODE(os.stat(mounted.path / "step/rank0.pt").st_mode) == 0o640
    assert os.stat(mounted.path / "step/rank01.pt").st_mtime_ns == 10**18
    assert (mounted.path / "step/rank0.pt").read_bytes() == contents["step/rank0.pt"]


@pytest.mark.semantics(
    "S-REPLICA-3",
    "What another node has written at the same path meanwhile stays; what is recovered lies beside it, under a name with `.conflict-`.",
)
def test_another_node_has_gone_on(mount_factory: MountFactory) -> None:
    mounted = mount(mount_factory)
    mounted.fail(OUTAGE)
    (mounted.path / "latest").write_bytes(b"of the lost node")
    wait_for_replica(mounted, 1)
    lose(mounted)
    (mounted.store_dir / "latest").write_bytes(b"of the node that went on")
    found = recover(mounted)
    assert [key for key, _ in found["conflicts"]] == ["latest"]
    beside = found["conflicts"][0][1]
    assert ".conflict-" in beside
    assert files_below(mounted.store_dir) == {
        "latest": b"of the node that went on",
        beside: b"of the lost node",
    }


@pytest.mark.semantics(
    "S-REPLICA-4",
    "What is in the store is removed from the replica. A replica that fails delays neither applications nor uploads.",
)
def test_the_replica_holds_only_what_the_store_lacks(mount_factory: MountFactory) -> None:
    mounted = mount(mount_factory, "--upload-delay", "2")
    (mounted.path / "d").mkdir()
    for name in ("a", "d/b", "gone"):
        (mounted.path / name).write_bytes(name.encode() * 1000)
    os.unlink(mounted.path / "gone")
    os.rename(mounted.path / "d", mounted.path / "e")
    mounted.flush()
    wait_for_replica(mounted, 0)
    wait_until(lambda: not files_below(replica_of(mounted)), "an empty replica")
    # It cannot be written any more: a file stands in its way.
    os.rename(replica_of(mounted), replica_of(mounted).with_name("away"))
    replica_of(mounted).write_bytes(b"")
    (mounted.path / "c").write_bytes(b"more")
    mounted.flush()
    assert files_below(mounted.store_dir) == {"a": b"a" * 1000, "e/b": b"d/b" * 1000, "c": b"more"}


def test_damage_in_the_replica_is_told_and_kept(mount_factory: MountFactory) -> None:
    mounted = mount(mount_factory)
    mounted.fail(OUTAGE)
    for name in ("good", "bad"):
        (mounted.path / name).write_bytes(name.encode() * 9)
    wait_for_replica(mounted, 2)
    lose(mounted)
    damage(replica_of(mounted), b"bad" * 9, lambda data: b"BAD" + data[3:])
    found = recover(mounted, code=5)
    assert found["files"] == 1
    [(key, why)] = found["failed"]
    assert key == "bad"
    assert "not what was put there" in why or "changed" in why or "precondition" in why.lower(), why
    assert files_below(mounted.store_dir) == {"good": b"good" * 9}
    assert any(name.endswith(".json") for name in files_below(replica_of(mounted)))


def damage(replica: Path, data: bytes, change: Callable[[bytes], bytes]) -> None:
    for path in replica.rglob("*.data"):
        if path.read_bytes() == data:
            status = path.stat()
            path.write_bytes(change(data))
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            return
    raise AssertionError("no such bytes in the replica")
