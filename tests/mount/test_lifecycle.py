"""Mounting, unmounting, refusing, healing, signals, readiness."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mount import Mounted, MountFactory, mount_entry, wait_until

pytestmark = [pytest.mark.usefixtures("needs_mount"), pytest.mark.needs_fuse]


def attempt(mounted: Mounted, *extra: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """``tierfs mount`` as a user types it, without ``--foreground``."""
    arguments = mounted.arguments(*extra)
    return subprocess.run(
        arguments,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
        env=mounted.process_environment(),
        check=False,
    )


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


@pytest.fixture
def daemon(mount_factory: MountFactory) -> Iterator[Mounted]:
    """A mount whose engine has detached itself from the caller."""
    mounted = mount_factory.prepare()
    answer = attempt(mounted)
    assert answer.returncode == 0, answer.stderr
    pid = mounted.status()["engine"]["pid"]
    yield mounted
    if mount_entry(mounted.path):
        mounted.cli("umount", str(mounted.path))
    wait_until(lambda: gone(pid), "end of the engine")


@pytest.mark.semantics(
    "S-MOUNT-1",
    "`tierfs mount` returns when the root can be listed; if it cannot be, it fails with the reason and leaves no mount.",
)
def test_mount_returns_when_the_root_can_be_listed(daemon: Mounted) -> None:
    assert daemon.is_up()
    (daemon.path / "f").write_bytes(b"1")
    assert os.listdir(daemon.path) == ["f"]
    status = daemon.status()
    assert not gone(status["engine"]["pid"])
    assert status["front"]["kind"] == daemon.front
    assert status["front"]["why"]


def test_existing_content_is_there_at_once(mount_factory: MountFactory) -> None:
    mounted = mount_factory.prepare()
    (mounted.store_dir / "d").mkdir()
    (mounted.store_dir / "d" / "f").write_bytes(b"already here")
    mounted.start()
    assert (mounted.path / "d" / "f").read_bytes() == b"already here"


def test_umount_ends_the_engine_and_says_so(daemon: Mounted) -> None:
    pid = daemon.status()["engine"]["pid"]
    daemon.cli("umount", str(daemon.path))
    assert mount_entry(daemon.path) is None
    wait_until(lambda: gone(pid), "end of the engine")
    again = daemon.cli("umount", str(daemon.path), check=False)
    assert again.returncode != 0
    assert str(daemon.path) in again.stderr + again.stdout


@pytest.mark.parametrize("options", [("--lazy",), ("--force",)])
def test_umount_of_a_busy_mount_when_told_to(daemon: Mounted, options: tuple[str, ...]) -> None:
    pid = daemon.status()["engine"]["pid"]
    handle = os.open(daemon.path, os.O_RDONLY)
    daemon.cli("umount", *options, str(daemon.path))
    assert mount_entry(daemon.path) is None
    os.close(handle)
    wait_until(lambda: gone(pid), "end of the engine")


@pytest.mark.semantics(
    "S-MOUNT-4", "`tierfs umount` of a mount in use names the processes that use it and changes nothing."
)
def test_busy_umount_names_the_holders_and_changes_nothing(mounted: Mounted) -> None:
    (mounted.path / "f").write_bytes(b"1")
    code = "import os, sys; f = open(sys.argv[1]); print('ready', flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(mounted.path / "f")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"ready\n"
    try:
        answer = mounted.cli("umount", str(mounted.path), check=False)
        assert answer.returncode != 0
        assert str(holder.pid) in answer.stderr + answer.stdout
        assert (mounted.path / "f").read_bytes() == b"1"
    finally:
        holder.communicate()
    mounted.umount()


@pytest.mark.semantics("S-WRITE-7", "A clean unmount and SIGTERM return when everything is in the store.")
def test_umount_waits_until_everything_is_in_the_store(mounted: Mounted) -> None:
    contents = {f"f{i}": os.urandom(1_000_000) for i in range(20)}
    for name, data in contents.items():
        (mounted.path / name).write_bytes(data)
    mounted.umount()
    for name, data in contents.items():
        assert (mounted.store_dir / name).read_bytes() == data


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.semantics("S-WRITE-7", "A clean unmount and SIGTERM return when everything is in the store.")
def test_signal_drains_and_unmounts(mounted: Mounted, signal_number: int) -> None:
    contents = {f"f{i}": os.urandom(300_000) for i in range(10)}
    for name, data in contents.items():
        (mounted.path / name).write_bytes(data)
    assert mounted.process is not None
    mounted.process.send_signal(signal_number)
    assert mounted.process.wait(60) == 0
    mounted.process = None
    assert mount_entry(mounted.path) is None
    for name, data in contents.items():
        assert (mounted.store_dir / name).read_bytes() == data


def test_umount_by_the_systems_own_tool(mounted: Mounted) -> None:
    (mounted.path / "f").write_bytes(b"1")
    subprocess.run(["umount", str(mounted.path)], check=True)
    assert mounted.process is not None
    assert mounted.process.wait(60) == 0
    mounted.process = None
    assert (mounted.store_dir / "f").read_bytes() == b"1"


REFUSALS = {
    "source that does not exist": (("SOURCE=/nonexistent/dir",), "/nonexistent/dir"),
    "unknown scheme": (("SOURCE=ftp://host/x",), "ftp"),
    "mountpoint that does not exist": (("MOUNTPOINT=/nonexistent/mnt",), "/nonexistent/mnt"),
    "nonsense size": (("--tier", "ram:many"), "tier"),
    "unknown fsync mode": (("--fsync", "sometimes"), "fsync"),
    "ttl that is no number": (("--ttl", "soon"), "ttl"),
    "bucket that nobody serves": (
        ("SOURCE=s3://bucket", "--endpoint-url", "http://127.0.0.1:9", "--store-timeout", "1"),
        "bucket",
    ),
    "config file that is missing": (("--config", "/nonexistent/tierfs.toml"), "/nonexistent/tierfs.toml"),
}


@pytest.mark.parametrize("case", REFUSALS)
@pytest.mark.semantics(
    "S-MOUNT-1",
    "`tierfs mount` returns when the root can be listed; if it cannot be, it fails with the reason and leaves no mount.",
)
def test_refusals_leave_no_mount_and_give_the_reason(mount_factory: MountFactory, case: str) -> None:
    words, reason = REFUSALS[case]
    mounted = mount_factory.prepare()
    mounted.environment.update(
        AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="y", AWS_EC2_METADATA_DISABLED="true"
    )
    extra = []
    arguments = mounted.arguments()
    for word in words:
        if word.startswith("SOURCE="):
            arguments[arguments.index(mounted.source)] = word.partition("=")[2]
        elif word.startswith("MOUNTPOINT="):
            arguments[arguments.index(str(mounted.path))] = word.partition("=")[2]
        else:
            extra.append(word)
    answer = subprocess.run(
        [*arguments, *extra],
        capture_output=True,
        text=True,
        timeout=90,
        stdin=subprocess.DEVNULL,
        env=mounted.process_environment(),
        check=False,
    )
    said = answer.stdout + answer.stderr
    assert answer.returncode != 0, said
    assert reason in said
    assert "Traceback" not in said
    assert mount_entry(mounted.path) is None


@pytest.mark.semantics(
    "S-MOUNT-3", "A live mount is not mounted over, and the state of a live mount is not used twice."
)
def test_a_live_mount_is_refused(mounted: Mounted) -> None:
    answer = attempt(mounted)
    assert answer.returncode != 0
    assert str(mounted.path) in answer.stdout + answer.stderr
    os.listdir(mounted.path)


def test_a_live_mount_of_another_file_system_is_refused(mount_factory: MountFactory) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    mounted = mount_factory.prepare()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(mounted.path)], check=True)
    try:
        answer = attempt(mounted)
        assert answer.returncode != 0
        assert mount_entry(mounted.path) is not None
    finally:
        subprocess.run(["umount", str(mounted.path)], check=True)


@pytest.mark.semantics(
    "S-MOUNT-3", "A live mount is not mounted over, and the state of a live mount is not used twice."
)
def test_the_state_of_a_live_mount_cannot_be_used_twice(
    mounted: Mounted, mount_factory: MountFactory
) -> None:
    second = mount_factory.prepare(source=mounted.source)
    second.state_dir = mounted.state_dir
    answer = attempt(second)
    assert answer.returncode != 0
    assert mount_entry(second.path) is None
    (mounted.path / "f").write_bytes(b"still alive")


@pytest.mark.semantics(
    "S-MOUNT-2", "A mount whose engine died is cleared away by the next `tierfs mount` at the same place."
)
def test_a_dead_mount_is_cleared_away(mounted: Mounted) -> None:
    (mounted.path / "f").write_bytes(b"1")
    mounted.kill9()
    assert mount_entry(mounted.path) is not None
    with pytest.raises(OSError, match=r"not connected|abort|canceled"):
        os.listdir(mounted.path)
    mounted.start()
    assert (mounted.path / "f").read_bytes() == b"1"
    mounted.umount()
    assert mount_entry(mounted.path) is None


def test_umount_of_a_dead_mount(mounted: Mounted) -> None:
    mounted.kill9()
    mounted.cli("umount", str(mounted.path))
    assert mount_entry(mounted.path) is None


def test_systemd_is_told_when_ready(mount_factory: MountFactory, base_dir: Path) -> None:
    mounted = mount_factory.prepare()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(base_dir / "notify"))
        channel.settimeout(60)
        mounted.environment["NOTIFY_SOCKET"] = str(base_dir / "notify")
        mounted.start()
        said = channel.recv(4096).decode()
        while "READY=1" not in said:
            said = channel.recv(4096).decode()
        assert os.listdir(mounted.path) == []
        mounted.umount()
        said = channel.recv(4096).decode()
        while "STOPPING=1" not in said:
            said = channel.recv(4096).decode()


@pytest.mark.parametrize("open_mode", ["ask", "none"])
def test_read_only_mount(mount_factory: MountFactory, open_mode: str) -> None:
    mounted = mount_factory.prepare(options=("--read-only", "--open-mode", open_mode))
    (mounted.store_dir / "f").write_bytes(b"1")
    mounted.start()
    assert (mounted.path / "f").read_bytes() == b"1"
    for change in (
        lambda: (mounted.path / "g").write_bytes(b""),
        lambda: os.unlink(mounted.path / "f"),
        lambda: os.chmod(mounted.path / "f", 0o600),
        lambda: os.mkdir(mounted.path / "d"),
        lambda: os.rename(mounted.path / "f", mounted.path / "g"),
    ):
        with pytest.raises(OSError, match="Read-only"):
            change()


def test_option_from_environment_and_file(mount_factory: MountFactory, base_dir: Path) -> None:
    """One schema for all three; the command line wins over the environment, and that over the file."""
    config = base_dir / "tierfs.toml"
    config.write_text("read_only = true\nttl = 7\n")
    mounted = mount_factory.prepare(options=("--config", str(config)))
    mounted.start()
    assert mounted.status()["read_only"] is True
    mounted.umount()
    mounted.environment["TIERFS_READ_ONLY"] = "false"
    mounted.start()
    assert mounted.status()["read_only"] is False


def test_only_mount_needs_no_argument(mounted: Mounted) -> None:
    assert mounted.json("status")["mountpoint"] == str(mounted.path)
    (mounted.path / "d").mkdir()
    answer = mounted.json("status", str(mounted.path / "d"))
    assert answer["mountpoint"] == str(mounted.path)


def test_two_mounts_of_two_sources(mount_factory: MountFactory) -> None:
    one, two = mount_factory(), mount_factory()
    (one.path / "f").write_bytes(b"one")
    (two.path / "f").write_bytes(b"two")
    one.umount()
    assert (two.path / "f").read_bytes() == b"two"
