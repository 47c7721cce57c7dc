"""What is measured: a directory (``directory``, which a tierfs mount is too) or a bucket (``bucket``).

A target owns one place that it made itself, with a name nobody else has, and in it only what it was told to
make: that is all it ever removes. Tasks that it returns run in forked processes (``processes``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tierfs.bench import result
from tierfs.bench.files import FileSet
from tierfs.bench.processes import Task

Tick = Callable[[], None]
DIRECTORY, MOUNT, STORE = "directory", "tierfs", "store"
PLACE_PREFIX = "tierfs-bench-"


class BenchTarget(Protocol):
    """``ways``: the ways to read (``loops``) that it has. ``cold``: what that word means here, or empty
    where there is nothing that could be warm. ``place``: its own directory or prefix."""

    kind: str
    cold: str
    ways: tuple[str, ...]

    @property
    def place(self) -> str: ...

    def open(self, needed_bytes: int) -> list[str]:
        """Make the place; returns what the user should know. Raises ConfigError: no space, no right..."""
        ...

    def describe(self) -> result.Target: ...

    def make(self, files: FileSet, *, stop_s: float, tick: Tick) -> FileSet:
        """Write them, as many as the time allows (at least one); returns those that are there."""
        ...

    def remove(self, files: FileSet, *, tick: Tick) -> None:
        """Remove what ``make`` made or a task wrote."""
        ...

    def settle(self, *, limit_s: float, tick: Tick) -> str | None:
        """Wait until all that was written is where it belongs; None, or why it is not."""
        ...

    def make_cold(self, files: FileSet, *, limit_s: float, tick: Tick) -> str | None:
        """None, or why they are not cold."""
        ...

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of the processes behind the target, by their role."""
        ...

    def close(self, tick: Tick) -> list[str]:
        """Remove everything; what could not be removed, and why."""
        ...

    # -- tasks; ``which`` are indices of the file set

    def read_files(self, files: FileSet, which: Sequence[int], *, repeat: bool = False) -> Task: ...

    def read_streams(
        self,
        files: FileSet,
        which: Sequence[int],
        *,
        block_bytes: int,
        way: str,
        repeat: bool = False,
    ) -> Task: ...

    def read_random(
        self, files: FileSet, *, block_bytes: int, way: str, seed: int, chain: int = 1
    ) -> Task: ...

    def write_file(self, files: FileSet, which: int) -> Task: ...

    def walk(self, files: FileSet) -> Task: ...
