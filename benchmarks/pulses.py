"""Pulses for ``benchmarks.checkpoint``: who takes them, and what a second one meets while the first drains.

A pulse *without fsync* is taken by memory: by the page cache of the write tier's disk until the kernel slows
whoever writes (``vm.dirty_ratio``), or by a tmpfs, which is the limit that it is compared with.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.compare.peer import Peer, Site
from benchmarks.compare.peers import Plain, Tierfs

TIERFS, TIERFS_RAM, MEMORY = "tierfs", "tierfs-ram", "memory"
SHARED_MEMORY = Path("/dev/shm")


class Waiting(Tierfs):
    """Nothing is uploaded before somebody asks for it."""

    name = TIERFS

    def mount_command(self) -> list[str]:
        return [*super().mount_command(), "--upload-delay", "3600"]


class WaitingRam(Waiting):
    """With a RAM tier before the disk: it takes what is read, and clean copies."""

    name = TIERFS_RAM

    def mount_command(self) -> list[str]:
        command = super().mount_command()
        first = command.index("--tier")
        return [*command[:first], "--tier", f"ram:{self.site.cache_bytes}", *command[first:]]


class Draining(Tierfs):
    """Uploads begin at once. ``limit_bytes`` of dirty data at most; 0: as much as the tier allows."""

    name = "tierfs-draining"

    def __init__(self, site: Site, front: str, limit_bytes: int) -> None:
        super().__init__(site)
        self.front = front
        self._limit_bytes = limit_bytes

    def mount_command(self) -> list[str]:
        limit = ["--dirty-limit", str(self._limit_bytes)] if self._limit_bytes else []
        return [*super().mount_command(), "--upload-delay", "0", *limit]


class Memory(Plain):
    """A directory in a tmpfs."""

    name = MEMORY

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._directory: Path | None = None

    @property
    def directory(self) -> Path:
        assert self._directory is not None
        return self._directory

    def version(self) -> str:
        return f"directory in {SHARED_MEMORY}"

    def mount(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="tierfs-checkpoint-", dir=SHARED_MEMORY))

    def unmount(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    abandon = unmount


def memory_missing(wanted_bytes: int) -> str | None:
    """Why no pulse of that size goes to a tmpfs here; None if one can."""
    if not SHARED_MEMORY.is_dir():
        return f"{SHARED_MEMORY} does not exist"
    space = os.statvfs(SHARED_MEMORY)
    if space.f_bavail * space.f_frsize < 2 * wanted_bytes:
        return f"{SHARED_MEMORY} has no room for {2 * wanted_bytes} bytes"
    return None


def two_pulses(peer: Peer, pulse: Callable[[Path], float], drain: Callable[[], None]) -> tuple[float, float]:
    """Two pulses, the second one at the moment when the first has ended. Seconds of each; all drained then.

    Raises what ``pulse`` raises: no write may fail.
    """
    seconds: list[float] = []
    for name in ("first", "second"):
        directory = peer.directory / name
        directory.mkdir()
        seconds.append(pulse(directory))
    drain()
    for name in ("first", "second"):
        shutil.rmtree(peer.directory / name)
    drain()
    return seconds[0], seconds[1]
