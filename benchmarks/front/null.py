"""What any FUSE daemon has to do: a mount whose daemon, in C, does nothing else.

Every request that is not passed through takes the kernel a message there and one back, and two wake-ups.
``tierfs_native/bench/null_daemon.c`` answers at once, from memory: what it reaches is the limit of a file
system that is asked, on this kernel and machine, whatever it does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.front.places import Data
from tierfs.errors import BenchFailed

SOURCE = Path(__file__).parents[2] / "tierfs_native" / "bench" / "null_daemon.c"
BUILD_LIMIT_S = 120.0
END_LIMIT_S = 30.0


@dataclass(frozen=True)
class NullMount:
    """The same names and sizes as everywhere else; all bytes are zeros."""

    mountpoint: Path
    data: Data


def why_not() -> str:
    """Why it cannot be built or mounted here; empty if it can."""
    if shutil.which("cc") is None:
        return "the daemon that does nothing: there is no C compiler"
    return "" if os.geteuid() == 0 else "the daemon that does nothing: mounting it needs root"


@contextlib.contextmanager
def mounted(data: Data, work_dir: Path) -> Iterator[NullMount]:
    """Build the daemon and mount it, with the small files and the listed ones. Raises BenchFailed."""
    work_dir.mkdir()
    program, mountpoint = work_dir / "null_daemon", work_dir / "mnt"
    mountpoint.mkdir()
    built = subprocess.run(
        ["cc", "-std=c11", "-O2", "-pthread", "-o", program, SOURCE],
        capture_output=True, text=True, timeout=BUILD_LIMIT_S, check=False,
    )  # fmt: skip
    if built.returncode:
        raise BenchFailed(f"{SOURCE.name} cannot be built: {built.stderr.strip()}")
    tree = "".join(
        f"{size} {name}/{path}\n"
        for name, files in (("small", data.small), ("listed", data.listed))
        for path, size in files.entries
    )
    with subprocess.Popen(
        [program, mountpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as daemon:
        try:
            assert daemon.stdin is not None
            assert daemon.stdout is not None
            daemon.stdin.write(tree)
            daemon.stdin.close()
            if daemon.stdout.readline() != "mounted\n":
                raise BenchFailed(f"{SOURCE.name} has not mounted {mountpoint}")
            yield NullMount(mountpoint, data.at(mountpoint))
        finally:
            subprocess.run(["umount", "--lazy", mountpoint], capture_output=True, check=False)
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(END_LIMIT_S)
            daemon.kill()
