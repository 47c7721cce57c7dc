"""Finding running mounts, and the lock on a state directory."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tierfs import mountpoint
from tierfs.config import Settings
from tierfs.control import registry
from tierfs.errors import ControlError, MountError


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIERFS_RUN_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def record_at(point: str) -> registry.MountRecord:
    settings = Settings(source="s3://bucket", mountpoint=point, state_dir="/state")
    return registry.record_for(settings, front="python")


def mounted(monkeypatch: pytest.MonkeyPatch, *points: str) -> None:
    base = mountpoint.MountInfo(1, "0:1", "/", mountpoint.FSTYPE, "s3://bucket", "rw")
    root = replace(base, fstype="ext4")
    monkeypatch.setattr(
        mountpoint, "mounts", lambda: [root] + [replace(base, path=point) for point in points]
    )


def test_a_record_is_private_and_found_by_any_path_below(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = record_at("/mnt/a")
    registry.write(record)
    mounted(monkeypatch, "/mnt/a", "/mnt/b")
    (file,) = run_dir.glob("*.json")
    assert file.stat().st_mode & 0o777 == 0o600
    assert run_dir.stat().st_mode & 0o777 == 0o700
    found = registry.find("/mnt/a/some//dir/../file")
    assert found == registry.Found(mountpoint="/mnt/a", relative=b"some/file", record=record, is_mounted=True)
    assert found.record is not None
    assert found.record.is_running()
    assert registry.find("/mnt/b").record is None


def test_names_that_are_not_text_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.write(record_at("/mnt/a"))
    mounted(monkeypatch, "/mnt/a")
    assert registry.find(os.fsdecode(b"/mnt/a/\xff\xfe")).relative == b"\xff\xfe"


def test_without_a_path_the_only_mount_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    mounted(monkeypatch)
    with pytest.raises(ControlError, match="no tierfs mount"):
        registry.find(None)
    registry.write(record_at("/mnt/a"))
    mounted(monkeypatch, "/mnt/a")
    assert registry.find(None).mountpoint == "/mnt/a"
    mounted(monkeypatch, "/mnt/a", "/mnt/b")  # b is another user's
    assert registry.find(None).mountpoint == "/mnt/a"
    registry.write(record_at("/mnt/b"))
    with pytest.raises(ControlError, match="/mnt/a, /mnt/b"):
        registry.find(None)
    monkeypatch.setattr(os, "getcwd", lambda: "/mnt/b/sub")
    assert registry.find(None).mountpoint == "/mnt/b"
    monkeypatch.setattr(os, "getcwd", lambda: "/")
    registry.remove(record_at("/mnt/b"))
    mounted(monkeypatch)
    assert not registry.find(None).is_mounted


def test_a_path_elsewhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.write(record_at("/mnt/a"))
    mounted(monkeypatch, "/mnt/a")
    with pytest.raises(ControlError, match="/srv/x"):
        registry.find("/srv/x")


def test_a_record_whose_process_is_gone_or_another_does_not_run() -> None:
    record = record_at("/mnt/a")
    assert record.is_running()
    assert not msgspec.structs.replace(record, pid_start_ticks=record.pid_start_ticks + 1).is_running()
    child = subprocess.Popen([sys.executable, "-c", ""])
    ticks = registry.start_ticks(child.pid)
    child.wait()
    assert not msgspec.structs.replace(record, pid=child.pid, pid_start_ticks=ticks or 1).is_running()


def test_a_damaged_record_is_passed_over(run_dir: Path) -> None:
    registry.write(record_at("/mnt/a"))
    (run_dir / "other.json").write_text("{")
    assert [record.mountpoint for record in registry.records()] == ["/mnt/a"]


def test_remove_takes_back_only_its_own_record(run_dir: Path) -> None:
    record = record_at("/mnt/a")
    registry.write(record)
    registry.remove(msgspec.structs.replace(record, pid=record.pid + 1))
    assert registry.records() == [record]
    Path(record.socket_path).touch()
    registry.remove(record)
    assert list(run_dir.iterdir()) == []
    registry.remove(record)


def test_a_run_directory_too_deep_for_a_socket_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERFS_RUN_DIR", "/" + "x" * 120)
    with pytest.raises(ControlError, match="TIERFS_RUN_DIR"):
        record_at("/mnt/a")


def test_directories_that_cannot_be_made_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TIERFS_RUN_DIR", str(tmp_path / "file" / "run"))
    with pytest.raises(ControlError, match="TIERFS_RUN_DIR"):
        registry.write(record_at("/mnt/a"))
    with pytest.raises(MountError, match="state_dir"):
        with registry.hold_state_dir(tmp_path / "file" / "state"):
            pass


def test_a_state_directory_has_one_holder(tmp_path: Path) -> None:
    state = tmp_path / "deep" / "state"
    with registry.hold_state_dir(state):
        assert state.stat().st_mode & 0o777 == 0o700
        with pytest.raises(MountError, match=f"in use by pid {os.getpid()}"):
            with registry.hold_state_dir(state):
                pass
    with registry.hold_state_dir(state):
        pass
