"""``tierfs mount`` up to the engine: detaching, readiness, failures, fstab. The engine is a stub."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tierfs.cli import checks, launch, mount_helper
from tierfs.config import load

STUB = """
import os, sys, types
import tierfs
from tierfs.errors import StoreUnavailable

def run(settings, *, on_ready, under_front, why):
    what = os.environ["STUB"]
    if what == "refuse":
        raise StoreUnavailable("the bucket does not answer")
    if what == "die":
        sys.stderr.write("last words\\n")
        sys.stderr.flush()
        os._exit(9)
    if what == "crash":
        raise ZeroDivisionError("a bug")
    on_ready({"front": {"kind": "python", "why": "stub"}, "pid": os.getpid(), "resumed": {"files": 2, "bytes": 3},
              "tiers": [{"name": "nvme", "path": "/tier", "capacity_bytes": 2**30}]})
    with open(os.environ["UNTIL"]) as until:
        until.read()
    return 0

tierfs.mount = sys.modules["tierfs.mount"] = types.ModuleType("tierfs.mount")
tierfs.mount.run = run
from tierfs.cli import main
sys.argv[0] = os.environ.get("ARGV0", "tierfs")
main()
"""


class Caller:
    """Runs the command line with a stub of the engine that lives until ``release``."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.mountpoint = base / "mnt"
        self.source = base / "source"
        for directory in (self.mountpoint, self.source):
            directory.mkdir()
        self.until = base / "until"
        os.mkfifo(self.until)
        self.words = [
            str(self.source), str(self.mountpoint),
            "--front", "python", "--state-dir", str(base / "state"), "--tier", f"{base / 'tier'}:1G",
        ]  # fmt: skip

    def environment(self, stub: str, **more: str) -> dict[str, str]:
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("TIERFS_", "NOTIFY_"))
        }
        return (
            kept | {"STUB": stub, "UNTIL": str(self.until), "TIERFS_RUN_DIR": str(self.base / "run")} | more
        )

    def __call__(self, stub: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", STUB, *words],
            env=self.environment(stub, **more),
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def release(self) -> None:
        """Let the stub end."""
        with open(self.until, "w"):
            pass


@pytest.fixture
def caller(tmp_path: Path) -> Caller:
    return Caller(tmp_path)


def wait_for_end(pid: int) -> None:
    """Until that process, which is not a child of ours, is gone."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        import select

        assert select.select([handle], [], [], 30)[0]
    finally:
        os.close(handle)


def test_mount_returns_when_ready_and_the_engine_lives_on_detached(caller: Caller) -> None:
    done = caller("serve", "mount", *caller.words, "--json")
    assert done.returncode == 0, done.stderr
    decided = json.loads(done.stdout)
    pid = decided["pid"]
    assert decided["mountpoint"] == str(caller.mountpoint)
    assert decided["front"] == {"kind": "python", "why": "stub"}
    assert os.getsid(pid) != os.getsid(0)
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
    assert os.readlink(f"/proc/{pid}/fd/2") == str(caller.base / "state" / "tierfs.log")
    assert (caller.base / "state").stat().st_mode & 0o777 == 0o700
    assert (caller.base / "state" / "tierfs.log").stat().st_mode & 0o777 == 0o600
    caller.release()
    wait_for_end(pid)


def test_mount_tells_what_it_decided(caller: Caller) -> None:
    done = caller("serve", "mount", *caller.words, "--read-only")
    assert done.returncode == 0, done.stderr
    for word in ("read-only", "1.0 GiB", "/tier", "python (stub)", "2 files", str(caller.mountpoint)):
        assert word in done.stdout
    pid = int(done.stdout.split("pid ")[1].split()[0])
    caller.release()
    wait_for_end(pid)


@pytest.mark.parametrize("foreground", [False, True])
def test_a_mount_that_fails_says_why_and_exits_with_1(caller: Caller, foreground: bool) -> None:
    done = caller("refuse", "mount", *caller.words, *(["--foreground"] if foreground else []))
    assert done.returncode == 1
    assert f"tierfs: {caller.source}: the bucket does not answer" in done.stderr
    assert "Traceback" not in done.stderr


def test_why_the_kernel_refuses_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"source": "s3://bucket", "mountpoint": "/mnt/x", "tier": ["none"], "allow_other": True}
    settings = load(given, environ={})
    fine = checks.Result("x", "ok", "fine")
    for name in ("fuse_device", "fuse_helper", "privileges", "user_allow_other"):
        monkeypatch.setattr(checks, name, lambda: fine)
    assert launch._obstacles(settings) == []
    monkeypatch.setattr(
        checks, "user_allow_other", lambda: checks.Result("x", "note", "only root", "fuse.conf")
    )
    monkeypatch.setattr(checks, "privileges", lambda: checks.Result("x", "blocks", "no right", "get it"))
    assert launch._obstacles(settings) == ["no right: get it", "allow_other: only root: fuse.conf"]


def test_an_engine_that_dies_early_is_reported_with_the_end_of_its_log(caller: Caller) -> None:
    done = caller("die", "mount", *caller.words)
    assert done.returncode == 1
    assert "ended before the mount was ready" in done.stderr
    assert "last words" in done.stderr


def test_a_bug_in_the_engine_leaves_its_stack_in_the_log(caller: Caller) -> None:
    done = caller("crash", "mount", *caller.words)
    assert done.returncode == 1
    assert "internal error" in done.stderr
    assert "ZeroDivisionError: a bug" in (caller.base / "state" / "tierfs.log").read_text()


def test_systemd_hears_of_readiness_in_the_foreground(caller: Caller) -> None:
    address = str(caller.base / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(address)
        channel.settimeout(60)
        process = subprocess.Popen(
            [sys.executable, "-c", STUB, "mount", *caller.words, "--foreground"],
            env=caller.environment("serve", NOTIFY_SOCKET=address),
            stdout=subprocess.DEVNULL,
        )
        said = channel.recv(4096).decode()
        assert "READY=1" in said.splitlines()
        assert f"MAINPID={process.pid}" in said.splitlines()
        caller.release()
        assert process.wait(30) == 0


def test_an_interrupted_mount_command_ends_its_engine(caller: Caller) -> None:
    # The stub never gets ready: it waits for the fifo inside run, before on_ready.
    stub = STUB.replace("    on_ready(", '    open(os.environ["UNTIL"]).read(); on_ready(')
    process = subprocess.Popen(
        [sys.executable, "-c", stub, "mount", *caller.words],
        env=caller.environment("serve"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell lets what it starts in the background ignore it, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    log = caller.base / "state" / "tierfs.log"
    with open(caller.until, "w"):  # returns when the engine has opened the other end
        engine = next(int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _writes(p, log))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode == 130
        wait_for_end(engine)


def _writes(process: Path, log: Path) -> bool:
    try:
        return os.readlink(process / "fd" / "2") == str(log)
    except OSError:
        return False


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (("--ttl", "soon"), 2, "ttl"),
        (("--tier", "ram:many"), 2, "tier"),
        (("-o", "tll=5"), 2, "tll"),
        (("--config", "/nonexistent.toml"), 2, "/nonexistent.toml"),
        (("--no-such-option",), 2, "--no-such-option"),
    ],
)
def test_wrong_settings_are_named(caller: Caller, words: tuple[str, ...], code: int, reason: str) -> None:
    done = caller("serve", "mount", *caller.words, *words)
    assert done.returncode == code
    assert reason in done.stderr
    assert not (caller.base / "state").exists()


def test_a_tier_larger_than_its_disk_is_remarked_on(caller: Caller) -> None:
    caller.words[-1] = f"{caller.base / 'tier'}:9000T"
    assert "holds" in caller("refuse", "mount", *caller.words).stderr


def test_a_state_directory_that_cannot_be_made_is_named(caller: Caller) -> None:
    caller.words[5] = "/proc/state"
    done = caller("serve", "mount", *caller.words)
    assert done.returncode == 1
    assert "/proc/state" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_mountpoint_that_is_no_directory_is_refused(caller: Caller) -> None:
    caller.words[1] = str(caller.base / "absent")
    done = caller("serve", "mount", *caller.words)
    assert done.returncode == 1
    assert "no such directory" in done.stderr


def test_a_mountpoint_that_is_taken_has_its_own_exit_code(caller: Caller) -> None:
    caller.words[1] = "/proc"
    assert caller("serve", "mount", *caller.words).returncode == 4


def test_fstab_options_and_the_command_line_together(caller: Caller) -> None:
    done = caller("serve", "mount", *caller.words, "--json", "-o", "ro,allow_other=no", "--read-write")
    assert done.returncode == 0, done.stderr
    decided = json.loads(done.stdout)
    assert (decided["read_only"], decided["allow_other"]) == (False, False)
    caller.release()
    wait_for_end(decided["pid"])


def test_mount_8_helper(caller: Caller) -> None:
    options = f"rw,_netdev,front=python,state_dir={caller.base / 'state'},tier={caller.base / 'tier'}:1G"
    words = [str(caller.source), str(caller.mountpoint), "-n", "-o", options]
    done = caller("serve", *words, ARGV0="/sbin/mount.tierfs")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    log = caller.base / "state" / "tierfs.log"
    engine = next(int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _writes(p, log))
    caller.release()
    wait_for_end(engine)
    assert caller("refuse", *words, ARGV0="/sbin/mount.tierfs").returncode == 32


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["s3://b"], 1, "usage"),
        (["s3://bucket", "/mnt", "-o"], 1, "-o"),
        (["s3://bucket", "/mnt", "-o", "tll=1"], 1, "tll"),
        (["s3://bucket", "/mnt", "-N", "1"], 1, "-N"),
        (["s3://bucket", "/mnt", "--what"], 1, "--what"),
        (["s3://bucket", "/nonexistent/mnt", "-o", "tier=none"], 32, "/nonexistent/mnt"),
        (["s3://bucket", "/mnt", "-f", "-o", "tier=none"], 0, ""),
    ],
)
def test_mount_8_exit_statuses(
    words: list[str], code: int, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mount_helper.main(words) == code
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (["/sbin/mount.tierfs", "s", "m"], True),
        (["mount.fuse.tierfs"], True),
        (["tierfs", "s3://b/x", "/mnt", "-o", "rw"], True),
        (["tierfs", "mount", "s3://b/x", "/mnt"], False),
        (["tierfs", "status", "/mnt", "--json"], False),
        (["/venv/bin/tierfs"], False),
    ],
)
def test_who_calls_is_told_by_name(argv: list[str], meant: bool) -> None:
    assert mount_helper.is_meant(argv) is meant
