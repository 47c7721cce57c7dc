"""What is not in the store yet can be looked at, and brought there, without a mount."""

from __future__ import annotations

import json
import os

import pytest

from tests.support.mount import Mounted, MountFactory, files_below

pytestmark = pytest.mark.usefixtures("needs_mount")
PUTS_FAIL = {"kind": "outage", "operation": "put"}


@pytest.fixture
def left(mount_factory: MountFactory) -> Mounted:
    """Killed with a backlog: two new files, one renamed object, one removed."""
    mounted = mount_factory.prepare(options=("--upload-delay", "30", "--store-timeout", "1"))
    for name in ("old", "gone"):
        (mounted.store_dir / name).write_bytes(name.encode())
    mounted.start()
    (mounted.path / "new").write_bytes(b"n" * 5000)
    (mounted.path / "d").mkdir()
    (mounted.path / "d" / "below").write_bytes(b"b" * 70_000)
    os.rename(mounted.path / "old", mounted.path / "d" / "moved")
    os.unlink(mounted.path / "gone")
    mounted.kill9()
    return mounted


EXPECTED = {"new": b"n" * 5000, "d/below": b"b" * 70_000, "d/moved": b"old"}


@pytest.mark.semantics(
    "S-WRITE-13",
    "The backlog of a file system that is not mounted is listed by `tierfs meta backlog`, and brought into the store by `tierfs meta drain`.",
)
def test_listed_and_drained(left: Mounted) -> None:
    state = str(left.state_dir)
    found = left.json("meta", "backlog", state)
    assert {one["path"]: one["bytes"] for one in found["uploads"]} == {
        "new": 5000,
        "d": 0,
        "d/below": 70_000,
        "d/moved": 0,
    }
    assert {one["path"]: one["reasons"] for one in found["uploads"]}["d/moved"] == ["moved"]
    assert all(one["since_ns"] for one in found["uploads"])
    assert {one["key"] for one in found["deletes"]} == {"gone"}
    text = left.cli("meta", "backlog", state)
    assert "d/below" in text.stdout
    assert "4 files" in text.stderr

    left.fail(PUTS_FAIL)
    answer = left.cli("meta", "drain", state, check=False)
    assert answer.returncode == 5
    assert "injected fault" in answer.stderr
    assert "kept in" in answer.stderr
    left.heal()
    result = left.json("meta", "drain", state)
    assert (result["remaining_files"], result["remaining_deletes"], result["failures"]) == (0, 0, [])
    assert files_below(left.store_dir) == EXPECTED
    assert left.json("meta", "backlog", state)["uploads"] == []
    left.start()
    assert files_below(left.path) == EXPECTED


def test_found_by_its_source(left: Mounted) -> None:
    answer = left.cli("meta", "backlog", "s3://nothing-of-the-kind", check=False)
    assert answer.returncode == 2
    assert "no state directory" in answer.stderr
    by_source = left.cli("meta", "backlog", str(left.store_dir), "--json")
    assert len(json.loads(by_source.stdout)["uploads"]) == 4


def test_refused_while_it_is_mounted(mount_factory: MountFactory) -> None:
    mounted = mount_factory(options=("--upload-delay", "30"))
    (mounted.path / "f").write_bytes(b"x")
    answer = mounted.cli("meta", "drain", str(mounted.state_dir), check=False)
    assert answer.returncode == 1
    assert "in use by pid" in answer.stderr
    assert mounted.json("meta", "backlog", str(mounted.path))["uploads"][0]["path"] == "f"


def test_timeout_of_a_drain(left: Mounted) -> None:
    left.fail({"kind": "block", "operation": "put"})
    answer = left.cli("meta", "drain", str(left.state_dir), "--timeout", "1", check=False)
    assert answer.returncode == 5
    left.heal()
    left.cli("meta", "drain", str(left.state_dir))
    assert files_below(left.store_dir) == EXPECTED
