"""Makes the data, puts them into the store, and runs every load on both targets, in alternating order."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.compare import processes
from benchmarks.compare.peer import PeerFailed, is_mounted, run
from benchmarks.compare.rounds import drop_kernel_caches, in_turn
from benchmarks.mounted import MountFailed, fresh_mount
from benchmarks.sources import Source, fill
from benchmarks.training.driver import LoadFailed, call
from benchmarks.training.plan import Load
from benchmarks.training.result import MOUNT, PLAIN, TARGETS, Failure, TrainingResult, Value

LIMIT_S = 300.0
TIER_BYTES = 8 * 1024**3


def objects_of(directory: Path) -> dict[str, bytes]:
    """Everything below a directory as objects, by key; an empty directory is an empty object with a slash."""
    found = {}
    for path in sorted(directory.rglob("*")):
        key = str(path.relative_to(directory.parent))
        if path.is_file():
            found[key] = path.read_bytes()
        elif not any(path.iterdir()):
            found[key + "/"] = b""
    return found


@dataclass(slots=True)
class Rounds:
    """``mark``: of the mount's processes. ``deadline_s`` (monotonic): nothing is begun after it."""

    interpreter: Path
    source: Source
    work_dir: Path
    result: TrainingResult
    deadline_s: float
    say: Callable[[str], None]
    mark: str = field(default_factory=lambda: processes.new_mark(MOUNT))

    @property
    def mountpoint(self) -> Path:
        return self.work_dir / "mnt"

    def run(self, wanted: Sequence[Load], rounds: int) -> None:
        """All of it; afterwards no mount is left."""
        try:
            ready = [load for load in wanted if self._prepare(load)]
            for number in range(rounds):
                for load in ready:
                    if time.monotonic() > self.deadline_s:
                        self.say("time is over")
                        return
                    self.say(f"round {number + 1}: {load.name}")
                    for index in in_turn(len(TARGETS), number):
                        self._measure(load, TARGETS[index], number)
                self.result.rounds = number + 1
        finally:
            self._abandon()

    def _prepare(self, load: Load) -> bool:
        """Make the data of a load in the directory, and put the same into the store. Whether it worked."""
        self.say(f"making data: {load.name}")
        directory = self.work_dir / PLAIN / load.name
        directory.parent.mkdir(exist_ok=True)
        try:
            call(self.interpreter, load, "make", directory, LIMIT_S, lambda: None)
        except LoadFailed as error:
            self._failed(load, "making its data", error)
            return False
        fill(self.source, objects_of(directory))
        return True

    def _measure(self, load: Load, target: str, number: int) -> None:
        try:
            found = self._on_directory(load) if target == PLAIN else self._on_mount(load)
        except (LoadFailed, MountFailed) as error:
            self._failed(load, target, error)
            return
        for figure in load.figures:
            value = found[figure.key]
            self.result.values.append(
                Value(load=load.name, figure=figure.key, target=target, round=number, value=value)
            )

    def _on_directory(self, load: Load) -> dict[str, float]:
        drop_kernel_caches()
        return call(self.interpreter, load, "run", self.work_dir / PLAIN / load.name, LIMIT_S, lambda: None)

    def _on_mount(self, load: Load) -> dict[str, float]:
        with self._mounted():
            drop_kernel_caches()
            watch = processes.Stopwatch({"daemon": [self.mark]})
            found = call(self.interpreter, load, "run", self.mountpoint / load.name, LIMIT_S, self._abandon)
            self.result.daemon_s.setdefault(load.name, []).append(watch.stop()["daemon"])
        return found

    @contextlib.contextmanager
    def _mounted(self) -> Iterator[None]:
        """New and empty; its processes carry the mark, those that measure do not."""
        os.environ[processes.MARK] = self.mark
        try:
            with fresh_mount(
                self.source.url, self.mountpoint, self.work_dir, tier_bytes=TIER_BYTES
            ) as mounted:
                del os.environ[processes.MARK]
                self.result.mount = shlex.join(mounted.arguments)
                yield
        finally:
            os.environ.pop(processes.MARK, None)

    def _abandon(self) -> None:
        """End the mount whatever state it is in."""
        processes.end(self.mark, grace_s=2.0)
        if is_mounted(self.mountpoint):
            with contextlib.suppress(PeerFailed):
                run(["umount", "-l", str(self.mountpoint)], limit_s=10)

    def _failed(self, load: Load, target: str, error: Exception) -> None:
        # Of a command that failed, what it said is more telling than the command.
        first, _, rest = str(error).partition("\n")
        reason = f"{rest.strip()}\n{first}" if isinstance(error, MountFailed) and rest.strip() else str(error)
        self.say(f"{load.name}, {target}: {reason.splitlines()[0]}")
        self.result.failures.append(Failure(load=load.name, target=target, reason=reason))
