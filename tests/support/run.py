"""What the processes of one test run share: a directory, locks, and the duty to leave nothing behind.

With pytest-xdist a run is one process that hands out tests and several that execute them; without, one process is
both. The first makes the directory (``begin``) and clears up after all of them (``clear``); the others are told
where it is (``join``). Each has a part of the directory to itself, so that what a process that died has left can
be told from what the others still use.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

GRACE_S = 3.0
"""How long a process that is told to end may take."""

_directory: Path | None = None
_part = "main"


def begin() -> Path:
    """Make the directory. Every user can pass through it, unlike pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="tierfs-test-", dir=os.environ.get("TIERFS_TEST_DIR")))
    path.chmod(0o755)
    join(path, "main")
    return path


def join(path: Path, part: str) -> None:
    """Be one of the processes of the run in ``path``, under a name that no other has."""
    global _directory, _part
    _directory, _part = path, part


def directory() -> Path:
    assert _directory is not None, "no test run: tests.support.run.begin() comes first"
    return _directory


def own_directory() -> Path:
    """This process's part, made at first use."""
    path = directory() / _part
    path.mkdir(mode=0o755, exist_ok=True)
    return path


@contextlib.contextmanager
def lock(name: str, *, shared: bool = False) -> Iterator[None]:
    """One process at a time, or any number of those that ask for it ``shared``."""
    descriptor = os.open(directory() / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Not left to the closing: a child that a test forked may still hold the descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def machine(*, alone: bool) -> Iterator[None]:
    """The time of one test; of one that is ``alone`` no other test of the run has a part.

    Who wants to be alone closes the gate first: without it, others that come and go could keep it waiting.
    """
    if alone:
        with lock("gate"), lock("machine"):
            yield
        return
    with contextlib.ExitStack() as stack:
        with lock("gate", shared=True):
            stack.enter_context(lock("machine", shared=True))
        yield


def clear(path: Path) -> list[str]:
    """End every process and mount that belongs to ``path``; returns a line about each, none if all is well."""
    found = []
    for number in (signal.SIGTERM, signal.SIGKILL):
        pids = processes_of(path)
        for pid in pids:
            if number == signal.SIGTERM:
                found.append(f"process {pid}: {_command_line(pid)}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        until = time.monotonic() + GRACE_S
        while any(map(is_running, pids)) and time.monotonic() < until:
            time.sleep(0.02)
    for where in reversed(mounts_below(path)):
        found.append(f"mount: {os.fsdecode(where)}")
        subprocess.run(["umount", "-l", where], check=False, capture_output=True)
    return found


def mounts_below(path: Path) -> list[bytes]:
    """Mountpoints inside ``path`` in the order in which they were mounted; no mount is touched."""
    inside = os.fsencode(path) + b"/"
    lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    points = [
        re.sub(rb"\\(\d{3})", lambda m: bytes([int(m.group(1), 8)]), line.split(b" ")[4]) for line in lines
    ]
    return [point for point in points if point.startswith(inside)]


def processes_of(path: Path) -> list[int]:
    """Running processes, other than this one, whose command line or environment names something in ``path``."""
    inside = os.fsencode(path) + b"/"
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            about = Path(f"/proc/{entry}/cmdline").read_bytes() + Path(f"/proc/{entry}/environ").read_bytes()
            if inside in about and is_running(int(entry)):
                found.append(int(entry))
    return found


def is_running(pid: int) -> bool:
    """False once it has ended, also if nobody has asked for its exit status yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "has ended"
