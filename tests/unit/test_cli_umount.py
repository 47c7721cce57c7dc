"""``tierfs umount``: what is asked of the engine and of the kernel, and what it exits with."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.unit.test_cli_commands import StubEngine
from tierfs import mountpoint
from tierfs.cli import exit_codes, holders, umount
from tierfs.cli.app import run
from tierfs.cli.holders import holders_of
from tierfs.config import Settings
from tierfs.control import protocol as p
from tierfs.control import registry


class Kernel:
    """What the kernel would do: the mounts, and a list of the unmounts it was asked for."""

    def __init__(self, point: str) -> None:
        root = mountpoint.MountInfo(1, "0:1", "/", "ext4", "/dev/vda", "rw")
        self.mounts = [root, replace(root, path=point, fstype=mountpoint.FSTYPE, source="s3://bucket")]
        self.asked: list[str] = []
        self.state: mountpoint.Liveness = "live"
        self.busy = False

    def unmount(self, path: str, *, lazy: bool = False, force: bool = False) -> None:
        self.asked.append("force" if force else "lazy" if lazy else "plain")
        if self.busy and not (lazy or force):
            raise OSError(errno.EBUSY, "busy", path)
        self.mounts = [mount for mount in self.mounts if mount.path != path]


@pytest.fixture
def point(tmp_path: Path) -> str:
    (tmp_path / "mnt").mkdir()
    return str(tmp_path / "mnt")


@pytest.fixture
def kernel(point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel(point)
    monkeypatch.setenv("TIERFS_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(mountpoint, "mounts", lambda: found.mounts)
    monkeypatch.setattr(holders, "mounts", lambda: found.mounts)
    monkeypatch.setattr(mountpoint, "unmount", found.unmount)
    monkeypatch.setattr(mountpoint, "probe", lambda _path: found.state)
    monkeypatch.chdir("/")
    return found


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Stands for the engine's process, which ends when the kernel lets go."""
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield child
    child.kill()
    child.communicate()


@pytest.fixture
def record(point: str, kernel: Kernel, process: subprocess.Popen[bytes]) -> registry.MountRecord:
    settings = Settings(source="s3://bucket", mountpoint=point, state_dir="/nonexistent/state")
    found = msgspec.structs.replace(
        registry.record_for(settings, front="python"),
        pid=process.pid,
        pid_start_ticks=registry.start_ticks(process.pid),
    )
    registry.write(found)
    return found


@pytest.fixture
def engine(
    record: registry.MountRecord,
    kernel: Kernel,
    process: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[StubEngine]:
    unmount = kernel.unmount

    def unmount_and_end(path: str, *, lazy: bool = False, force: bool = False) -> None:
        unmount(path, lazy=lazy, force=force)
        assert process.stdin is not None
        process.stdin.close()

    monkeypatch.setattr(mountpoint, "unmount", unmount_and_end)
    with StubEngine(Path(record.socket_path)) as stub:
        stub.replies["drain"] = p.DrainReply(remaining_files=0, remaining_bytes=0)
        stub.replies["unmount"] = p.UnmountReply(pid=process.pid, remaining_files=0, remaining_bytes=0)
        yield stub


def test_drain_then_notice_then_unmount_then_the_end_of_the_engine(
    engine: StubEngine, kernel: Kernel, point: str, process: subprocess.Popen[bytes]
) -> None:
    assert run(["umount", point]) == 0
    assert engine.asked == [
        p.DrainRequest(timeout_s=None),
        p.UnmountRequest(mode="normal", grace_s=umount.GRACE_S),
    ]
    assert kernel.asked == ["plain"]
    assert registry.start_ticks(process.pid) == 0


def test_an_engine_that_still_uploads_after_umount_8_is_waited_for(
    engine: StubEngine, kernel: Kernel, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del kernel.mounts[1]
    monkeypatch.setattr(umount, "_wait_for_end", lambda _record, _timeout_s: True)
    assert run(["umount", point]) == 0
    assert isinstance(engine.asked[0], p.DrainRequest)
    assert kernel.asked == []


def test_what_is_left_is_told_and_kept(
    engine: StubEngine, point: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.replies["drain"] = p.DrainReply(
        remaining_files=3, remaining_bytes=1024, failed=[p.Failure(path="x", message="access denied")]
    )
    assert run(["umount", "--timeout", "5", point]) == exit_codes.PARTLY
    assert engine.asked[0] == p.DrainRequest(timeout_s=5.0)
    told = capsys.readouterr().err
    for word in ("3 files (1.0 KiB)", "/nonexistent/state", "next mount", "x: access denied"):
        assert word in told


def test_as_json(engine: StubEngine, point: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["umount", point, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["remaining_files"], shown["engine_ended"]) == (0, True)


def test_a_mount_in_use_stays_and_its_users_are_named(
    engine: StubEngine, kernel: Kernel, point: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(point) / "file"
    file.touch()
    code = "import sys; f = open(sys.argv[1]); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(file)], cwd=point, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as user:
        assert user.stdout is not None
        user.stdout.readline()
        assert run(["umount", point]) == exit_codes.BUSY
        told = capsys.readouterr().err
        for word in (str(user.pid), f"cwd {point}", f"open {file}"):
            assert word in told
        assert (kernel.asked, engine.asked) == ([], [])
        user.communicate()


def test_a_user_that_comes_during_the_drain_is_seen_by_the_kernel(
    engine: StubEngine, kernel: Kernel, point: str
) -> None:
    kernel.busy = True
    assert run(["umount", point]) == exit_codes.BUSY
    assert engine.asked[-1] == p.UnmountRequest(mode="normal", grace_s=umount.NO_LIMIT_S)


def test_a_mount_below_keeps_it_busy(
    engine: StubEngine, kernel: Kernel, point: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel.mounts.append(replace(kernel.mounts[0], path=f"{point}/inner"))
    assert run(["umount", point]) == exit_codes.BUSY
    assert f"{point}/inner" in capsys.readouterr().err


def test_lazy_does_not_wait(
    engine: StubEngine, kernel: Kernel, point: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.replies["unmount"] = p.UnmountReply(pid=1, remaining_files=2, remaining_bytes=5)
    assert run(["umount", "--lazy", point]) == 0
    assert [request.mode for request in engine.asked] == ["lazy"]
    assert kernel.asked == ["lazy"]
    assert "goes on uploading 2 files" in capsys.readouterr().err


def test_force_ends_the_engine_and_tells_what_is_left(engine: StubEngine, kernel: Kernel, point: str) -> None:
    engine.replies["unmount"] = p.UnmountReply(pid=1, remaining_files=2, remaining_bytes=5)
    assert run(["umount", "--force", point]) == exit_codes.PARTLY
    assert engine.asked == [p.UnmountRequest(mode="force", grace_s=0.0)]
    assert kernel.asked == ["force"]
    assert registry.records() == []


def test_an_engine_may_be_faster_with_the_unmount_when_forced(
    engine: StubEngine, kernel: Kernel, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(path: str, *, lazy: bool = False, force: bool = False) -> None:
        kernel.unmount(path, lazy=lazy, force=force)
        raise OSError(errno.EINVAL, "not mounted", path)

    monkeypatch.setattr(mountpoint, "unmount", gone)
    monkeypatch.setattr(umount, "_wait_for_end", lambda _record, _timeout_s: True)
    assert run(["umount", "--force", point]) == 0


def test_an_engine_that_does_not_answer_is_killed_only_by_force(
    record: registry.MountRecord,
    kernel: Kernel,
    point: str,
    process: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(umount, "FORCED_EXIT_TIMEOUT_S", 0.05)
    assert run(["umount", point]) == exit_codes.NO_ANSWER  # nobody listens on its socket
    told = capsys.readouterr().err
    for word in (str(process.pid), "umount --force", "/nonexistent/state"):
        assert word in told
    assert kernel.asked == []
    assert process.poll() is None
    assert run(["umount", "--force", point]) == 0
    assert kernel.asked == ["force"]
    assert process.wait(30) == -9


def test_a_dead_mount_is_cleared_away(
    record: registry.MountRecord, kernel: Kernel, point: str, process: subprocess.Popen[bytes]
) -> None:
    process.kill()
    process.wait()
    kernel.state = "dead"
    assert run(["umount", point]) == 0
    assert kernel.asked == ["lazy"]
    assert registry.records() == []


def test_if_dead_leaves_a_living_mount_alone_and_is_never_an_error(
    record: registry.MountRecord, kernel: Kernel, point: str, tmp_path: Path
) -> None:
    assert run(["umount", "--if-dead", point]) == 0
    assert kernel.asked == []
    kernel.state = "dead"
    config = tmp_path / "mount.toml"
    config.write_text(f'mountpoint = "{point}"\nttl = "not looked at"\n')
    assert run(["umount", "--if-dead", "--config", str(config)]) == 0
    assert kernel.asked == ["lazy"]
    assert run(["umount", "--if-dead", point]) == 0


def test_what_is_not_mounted_is_named(
    kernel: Kernel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["umount", str(tmp_path)]) == exit_codes.NO_MOUNT
    assert str(tmp_path) in capsys.readouterr().err


def test_lazy_and_force_exclude_each_other(kernel: Kernel, point: str) -> None:
    assert run(["umount", "--lazy", "--force", point]) == exit_codes.USAGE


def test_a_mapped_file_makes_a_holder(tmp_path: Path) -> None:
    file = tmp_path / "mapped"
    file.write_bytes(b"x" * 4096)
    code = (
        "import mmap, os, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDONLY); m = mmap.mmap(fd, 4096, prot=mmap.PROT_READ); os.close(fd)\n"
        "print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/"
    ) as user:
        assert user.stdout is not None
        user.stdout.readline()
        (holder,) = holders_of(str(tmp_path))
        assert holder.pid == user.pid
        # Python's mmap keeps a duplicate of the descriptor, so the file also shows as open.
        assert f"mapped {file}" in holder.uses
        user.communicate()
    assert os.getpid() not in [holder.pid for holder in holders_of("/")]
