"""``python -m benchmarks.front.metadata DIR``: operations on names per second, and what they cost.

``measure`` works on any directory, on a mount as on a plain one: compare two of them, in alternating runs.
Every number is of operations that have returned; what a file system does afterwards (uploads, write-back)
would count as processor time of the next step, so a pause lies between the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.loops import Task, Timed, together

CONTENT = b"x" * 100
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
DENTRIES_AND_INODES = "2"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
LISTERS = {"find": ("find", "."), "ls -lR": ("ls", "-lR", ".")}


@dataclass(frozen=True, slots=True)
class Measured:
    """One step, with processor seconds per operation: of the whole machine, and of the watched processes.

    The machine's are those of everybody on it: only a quiet one gives a number that means something.
    """

    step: str
    operations: int
    seconds: float
    machine_cpu_s: float
    watched_cpu_s: dict[int, float]

    @property
    def rate(self) -> float:
        """Operations per second."""
        return self.operations / self.seconds if self.seconds else 0.0


def measure(
    directory: Path,
    *,
    files: int = 4000,
    listed: int = 0,
    threads: Sequence[int] = (1, 8),
    watched: Sequence[int] = (),
    pause_s: float = 2.0,
) -> list[Measured]:
    """Create, rename, stat and unlink ``files`` files below ``directory``, which is then empty again.

    ``threads``: processes that create at once, each in a directory of its own. ``listed``: entries of further
    directories, made here, that ``find`` and ``ls -lR`` walk with dropped caches (root only); 0: none.
    ``watched``: processes whose processor time is counted. Raises ``LoopFailed``, ``OSError``,
    ``CalledProcessError``.
    """
    results: list[Measured] = []

    def step(name: str, tasks: Sequence[Task]) -> None:
        time.sleep(pause_s)
        with _processor_time(watched) as spent:
            outcome = together(tasks)
        count = outcome.amount
        machine, each = spent()
        results.append(
            Measured(
                name, count, outcome.seconds, machine / count, {pid: s / count for pid, s in each.items()}
            )
        )

    for count in threads:
        parts = _parts(directory, count, files)
        step(f"create, {count}", [_each(part, _create) for part in parts])
        if count == min(threads):
            everything = [path for part in parts for path in part]
            step("rename, 1", [_each(everything, _rename)])
            renamed = [path + ".renamed" for path in everything]
            _drop_caches()
            step("stat, 1, dropped", [_each(renamed, os.stat)])
            step("stat, 1, hot", [_each(renamed, os.stat)])
            parts = [renamed]
        step(f"unlink, {count}", [_each(part, os.unlink) for part in parts])
        for number in range(count):
            os.rmdir(directory / f"{count}-{number}")
    if listed:
        tree = directory / "listed"
        paths = _wide(tree, listed)
        step("create, to be listed", [_each(paths, _create)])
        results += list_tree(tree, listed, watched=watched, pause_s=pause_s)
        step("unlink, listed", [_each(paths, os.unlink)])
        for child in tree.iterdir():
            child.rmdir()
        tree.rmdir()
    return results


def list_tree(
    tree: Path, entries: int, *, watched: Sequence[int] = (), pause_s: float = 2.0, rounds: int = 3
) -> list[Measured]:
    """Walk ``tree`` with ``find`` and ``ls -lR``, dentries and inodes dropped before each; best of all."""
    results = []
    for name, command in LISTERS.items():
        best: Measured | None = None
        for _ in range(rounds):
            time.sleep(pause_s)
            _drop_caches()
            with _processor_time(watched) as spent:
                start = time.monotonic()
                subprocess.run(command, cwd=tree, stdout=subprocess.DEVNULL, check=True)
                seconds = time.monotonic() - start
            machine, each = spent()
            found = Measured(
                name, entries, seconds, machine / entries, {pid: s / entries for pid, s in each.items()}
            )
            best = found if best is None or found.seconds < best.seconds else best
        if best is not None:
            results.append(best)
    return results


def _parts(directory: Path, count: int, files: int) -> list[list[str]]:
    parts = []
    for number in range(count):
        own = directory / f"{count}-{number}"
        own.mkdir()
        parts.append([f"{own}/file-{index:07}" for index in range(files // count)])
    return parts


def _wide(tree: Path, entries: int, per_directory: int = 1000) -> list[str]:
    paths = []
    for first in range(0, entries, per_directory):
        own = tree / f"{first // per_directory:05}"
        own.mkdir(parents=True)
        paths += [f"{own}/file-{index:07}" for index in range(first, min(first + per_directory, entries))]
    return paths


def _each(paths: Sequence[str], call: Callable[[str], object]) -> Task:
    def timed() -> int:
        for path in paths:
            call(path)
        return len(paths)

    def prepare() -> Timed:
        return timed

    return prepare


def _create(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    os.write(descriptor, CONTENT)
    os.close(descriptor)


def _rename(path: str) -> None:
    os.rename(path, path + ".renamed")


def _drop_caches() -> None:
    if os.geteuid() == 0:
        os.sync()
        DROP_CACHES.write_text(DENTRIES_AND_INODES)


@contextmanager
def _processor_time(watched: Sequence[int]) -> Iterator[Callable[[], tuple[float, dict[int, float]]]]:
    """Inside, then afterwards: a function that says (seconds of the machine, seconds of each process)."""
    machine = _machine_s()
    each = {pid: _process_s(pid) for pid in watched}
    yield lambda: (_machine_s() - machine, {pid: _process_s(pid) - each[pid] for pid in watched})


def _machine_s() -> float:
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _, _, interrupts, soft, _ = fields
    return (user + nice + system + interrupts + soft) / TICKS_PER_S


def _process_s(pid: int) -> float:
    # The name, in parentheses, may hold anything.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--files", type=int, default=4000)
    parser.add_argument("--listed", type=int, default=0, help="entries that find and ls -lR walk")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--watched", type=int, nargs="*", default=[], metavar="PID")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    results = measure(
        given.directory,
        files=given.files,
        listed=given.listed,
        threads=given.threads,
        watched=given.watched,
    )
    if given.json:
        print(json.dumps([{**asdict(result), "rate": result.rate} for result in results], indent=1))
        return 0
    for result in results:
        watched = " ".join(f"{pid}: {s * 1e6:.0f}" for pid, s in result.watched_cpu_s.items())
        print(f"{result.step:22} {result.rate:9.0f}/s  {result.machine_cpu_s * 1e6:6.0f} us  {watched}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
