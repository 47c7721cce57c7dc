"""What one operation costs, and how many there are with one to four processes.

Processor time is that of the loop (its system calls included, and what the kernel does within them) and that
of front and engine together, which comes in steps of 10 ms: cheap operations need many.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.front.lines import MOUNT, PLAIN
from benchmarks.front.places import Data, Place, Scale, drop, may_drop
from tierfs.bench.files import FileSet, share
from tierfs.bench.loops import on_each, read_files, read_random, walk_tree
from tierfs.bench.processes import Task, run_together

PROCESSES = (1, 2, 3, 4)
CREATE, UNLINK = "create", "unlink"


@dataclass(frozen=True, slots=True)
class Cost:
    """One operation on one target with so many processes; microseconds of processor time per operation."""

    operation: str
    target: str
    processes: int
    per_s: float
    loop_us: float
    daemons_us: float


@dataclass(frozen=True, slots=True)
class Operation:
    """``tasks(data, directory, processes)``; ``directory``: an empty one of the target's own."""

    name: str
    tasks: Callable[[Data, Path, int], list[Task]]
    is_cold: bool = False
    has_end: bool = False
    """It ends by itself; else it is stopped after a time."""


def _parts(files: FileSet, processes: int) -> list[list[str]]:
    paths = files.paths()
    return [[paths[i] for i in part] for part in share(range(len(paths)), processes)]


def operations(scale: Scale) -> list[Operation]:
    def small(data: Data, _: Path, processes: int) -> list[Task]:
        size_of = dict(zip(data.small.paths(), (size for _, size in data.small.entries), strict=True))
        return [
            read_files(part, [size_of[path] for path in part], block_bytes=128 * 1024, repeat=True)
            for part in _parts(data.small, processes)
        ]

    def random_reads(data: Data, _: Path, processes: int) -> list[Task]:
        sizes = [size for _, size in data.large.entries]
        return [read_random(data.large.paths(), sizes, seed=seed) for seed in range(processes)]

    def changes(operation: str) -> Callable[[Data, Path, int], list[Task]]:
        return lambda _, directory, processes: [
            on_each(
                [f"{directory}/p{number}-{index}" for index in range(scale.made_count // processes)],
                operation,
            )
            for number in range(processes)
        ]

    return [
        Operation(
            "stat, dropped",
            lambda data, _, n: [on_each(part, "stat") for part in _parts(data.small, n)],
            is_cold=True,
            has_end=True,
        ),
        Operation(
            "stat, hot",
            lambda data, _, n: [on_each(part, "stat") for part in _parts(data.small, n)],
            has_end=True,
        ),
        Operation("open, read, close of a small file, hot", small),
        Operation("read 4 KiB, hot", random_reads),
        Operation(
            "list and stat an entry, dropped",
            lambda data, _, n: [walk_tree(data.listed.root, open_files=False) for _ in range(n)],
            is_cold=True,
            has_end=True,
        ),
        Operation(CREATE, changes("create"), has_end=True),
        Operation(UNLINK, changes("unlink"), has_end=True),
    ]


def measure(scale: Scale, plain: Data, plain_dir: Path, place: Place, rounds: Iterable[int]) -> list[Cost]:
    """The median round of each. Raises BenchFailed."""
    targets = {PLAIN: (plain, plain_dir), MOUNT: (place.data, place.mounted.mountpoint)}
    found: dict[tuple[str, str, int], list[Cost]] = {}
    chosen = [operation for operation in operations(scale) if may_drop() or not operation.is_cold]
    for number in rounds:
        for processes in PROCESSES:
            directories = {who: root / f"costs{number}-{processes}" for who, (_, root) in targets.items()}
            for directory in directories.values():
                directory.mkdir()
            for operation in chosen:
                for who in reversed(list(targets)) if number % 2 else targets:
                    cost = _one(scale, operation, who, targets[who][0], directories[who], processes, place)
                    found.setdefault((operation.name, who, processes), []).append(cost)
            for directory in directories.values():
                shutil.rmtree(directory)
    return [sorted(costs, key=lambda cost: cost.per_s)[len(costs) // 2] for costs in found.values()]


def _one(
    scale: Scale, operation: Operation, who: str, data: Data, directory: Path, processes: int, place: Place
) -> Cost:
    if operation.is_cold:
        drop()
    tasks = operation.tasks(data, directory, processes)
    before_s = place.cpu_s()
    outcome = run_together(tasks, limit_s=3600.0 if operation.has_end else scale.cost_s)
    spent_s = place.cpu_s() - before_s if who == MOUNT else 0.0
    return Cost(
        operation.name,
        who,
        processes,
        outcome.operations / outcome.seconds,
        outcome.cpu_s * 1e6 / outcome.operations,
        spent_s * 1e6 / outcome.operations,
    )
