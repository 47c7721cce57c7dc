"""A mount for a benchmark, through the ``tierfs`` command line only."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

MOUNT_LIMIT_S = 60.0
UMOUNT_LIMIT_S = 120.0


class MountFailed(Exception):
    """The command line did not do what was asked; the message is what it printed."""


def tierfs_command() -> list[str]:
    """The script beside this interpreter, or the module: the version that this interpreter has."""
    beside = Path(sys.executable).with_name("tierfs")
    return [str(beside)] if beside.exists() else [sys.executable, "-m", "tierfs"]


class Mounted:
    """A mount that is up. ``arguments``: the command line that made it."""

    def __init__(self, mountpoint: Path, arguments: Sequence[str]) -> None:
        self.mountpoint = mountpoint
        self.arguments = list(arguments)

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.command("status", str(self.mountpoint), "--json"))
        return answer

    def flush(self) -> float:
        """Wait until everything written is in the store; seconds."""
        start = time.monotonic()
        self.command("flush", str(self.mountpoint))
        return time.monotonic() - start

    def resident_bytes(self) -> int:
        """Resident memory of all processes that hold the mount: the engine and its children."""
        return sum(resident_bytes(pid) for pid in _family(int(self.status()["engine"]["pid"])))

    def command(self, *arguments: str) -> str:
        return _run([*tierfs_command(), *arguments], UMOUNT_LIMIT_S)


@contextlib.contextmanager
def fresh_mount(
    source_url: str,
    mountpoint: Path,
    work_dir: Path,
    *,
    tier_bytes: int,
    options: Sequence[str] = (),
    prepare: Callable[[Path], None] | None = None,
) -> Iterator[Mounted]:
    """A mount that knows nothing yet: new state, empty tier. Both are removed at the end.

    ``prepare`` is given the state directory before the mount is made.
    """
    state_dir, tier_dir = work_dir / "state", work_dir / "tier"
    for directory in (state_dir, tier_dir):
        shutil.rmtree(directory, ignore_errors=True)
    mountpoint.mkdir(parents=True, exist_ok=True)
    if prepare is not None:
        prepare(state_dir)
    arguments = [
        *tierfs_command(), "mount", source_url, str(mountpoint), "--state-dir", str(state_dir),
        "--tier", f"{tier_dir}:{tier_bytes}", *options,
    ]  # fmt: skip
    _run(arguments, MOUNT_LIMIT_S)
    mounted = Mounted(mountpoint, arguments)
    try:
        yield mounted
    except BaseException:
        with contextlib.suppress(MountFailed):
            mounted.command("umount", "--force", str(mountpoint))
        raise
    else:
        mounted.command("umount", str(mountpoint))
    finally:
        for directory in (state_dir, tier_dir):
            shutil.rmtree(directory, ignore_errors=True)


def _run(arguments: Sequence[str], limit_s: float) -> str:
    """Run and return standard output."""
    try:
        done = subprocess.run(
            arguments, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=False, text=True
        )
    except subprocess.TimeoutExpired:
        raise MountFailed(f"{' '.join(arguments)}: no end within {limit_s:.0f} s") from None
    if done.returncode:
        raise MountFailed(f"{' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}{done.stdout}")
    return done.stdout


def resident_bytes(pid: int) -> int:
    """Resident memory of one process; 0 if it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGESIZE")


def _family(pid: int) -> list[int]:
    """The process and its descendants."""
    family = [pid]
    for member in family:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{member}/task"):
                children = Path(f"/proc/{member}/task/{task}/children").read_text()
                family.extend(int(child) for child in children.split())
    return family
