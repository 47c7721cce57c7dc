"""``python -m benchmarks.batch``: ``tierfs.read_many`` against open, read and close on the local disk.

Small files in random order, in batches, by one reader and by several processes; every reader has a part of
the files to itself and keeps one batch of results while it reads the next, as a data loader does. What is
compared runs in alternating order. What the lines mean:

* *cold*: dentries, inodes and data have been dropped (needs root). *hot*: all of it has been read once since
  then, so that everybody's bytes are in the page cache as reading left them there.
* *x keeping*: against open, read and close on the local disk, where the bytes of a batch are kept until the
  next is complete, which is what ``read_many`` does. This is the ratio that the goals are about.
* *x discarding*: against the same into one buffer that is used again for every file: less than any
  application does, because nobody ever sees two files.
* *x mount*: against open, read and close through the mount.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import tierfs.batch
from benchmarks.loops import LoopFailed, Task, Timed, read_files, together
from benchmarks.mounted import Mounted, MountFailed, fresh_mount
from benchmarks.quick import machine
from benchmarks.samples import Metric, table

BATCH, KEEPING, DISCARDING, MOUNT = "read_many", "keeping", "discarding", "mount"
SMALLEST_BYTES, LARGEST_BYTES = 4 * 1024, 100 * 1024
DIRECTORIES = 100
GOAL = 2.0
LOCAL_LIMIT_S = 60.0


def in_batches(paths: Sequence[str], size: int, read: Callable[[Sequence[str]], Sequence[object]]) -> Task:
    """Amount: files. The results of one batch live until the next is complete."""

    def prepare() -> Timed:
        # Connections are made, and memory for two batches is got, once in the life of a process.
        held = read(paths[:size])
        read(paths[-size:])
        del held

        def timed() -> int:
            count = 0
            for start in range(0, len(paths), size):
                results = read(paths[start : start + size])
                count += len(results)
            return count

        return timed

    return prepare


def read_keeping(paths: Sequence[str]) -> list[bytes]:
    """Open, read and close each; the least that gives an application the bytes of a whole batch."""
    results = []
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        results.append(os.read(fd, LARGEST_BYTES + 1))
        os.close(fd)
    return results


def read_discarding(paths: Sequence[str], size: int) -> Task:
    """Amount: files."""
    loop = read_files(paths)

    def prepare() -> Timed:
        timed = loop()
        read_keeping(paths[:size])

        def counted() -> int:
            timed()
            return len(paths)

        return counted

    return prepare


def make_files(directory: Path, count: int) -> list[str]:
    """Names below ``directory``."""
    chance = random.Random(20_000)
    noise = chance.randbytes(LARGEST_BYTES)
    for number in range(min(DIRECTORIES, count)):
        (directory / f"d{number}").mkdir(parents=True)
    names = []
    for number in range(count):
        name = f"d{number % DIRECTORIES}/f{number}"
        (directory / name).write_bytes(noise[: chance.randint(SMALLEST_BYTES, LARGEST_BYTES)])
        names.append(name)
    return names


def drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


def make_local(mounted: Mounted, paths: list[str]) -> None:
    """Until ``read_many`` has all of them from the tier."""
    mounted.command("prefetch", str(mounted.mountpoint), "--wait")
    deadline = time.monotonic() + LOCAL_LIMIT_S
    while True:
        before = tierfs.batch.status().files.get("local", 0)
        for start in range(0, len(paths), 1000):
            tierfs.batch.read_many(paths[start : start + 1000])
        said = tierfs.batch.status()
        if said.files.get("local", 0) - before == len(paths):
            return
        if time.monotonic() > deadline:
            raise LoopFailed(f"the files do not become local: {said}")
        time.sleep(0.2)


class Plan:
    """Measures every line in alternating order."""

    def __init__(self, disk: list[str], mount: list[str], batch: int, seed: int, passes: int) -> None:
        self._disk, self._mount, self._batch, self._passes = disk, mount, batch, passes
        self._chance = random.Random(seed)
        self.metrics: dict[str, Metric] = {}

    def measure(self, readers: int, *, cold: bool, through_mount: bool) -> None:
        """One round of one line."""
        order: list[int] = []
        for _ in range(1 if cold else self._passes):
            part = list(range(len(self._disk)))
            self._chance.shuffle(part)
            order += part
        each = -(-len(order) // readers)
        parts = [order[start : start + each] for start in range(0, len(order), each)]
        name = f"{'cold' if cold else 'hot'}, {readers} reader{'s' if readers > 1 else ''}"
        metric = self.metrics.setdefault(name, Metric(name, "files/s"))
        targets: list[tuple[str, Callable[[list[int]], Task]]] = [
            (BATCH, lambda part: in_batches(_those(self._mount, part), self._batch, tierfs.batch.read_many)),
            (KEEPING, lambda part: in_batches(_those(self._disk, part), self._batch, read_keeping)),
            (DISCARDING, lambda part: read_discarding(_those(self._disk, part), self._batch)),
        ]
        if through_mount:
            targets.append(
                (MOUNT, lambda part: in_batches(_those(self._mount, part), self._batch, read_keeping)))
        self._chance.shuffle(targets)
        for target, task_of in targets:
            tasks = [self._after_drop(task_of(part), cold and not number)
                     for number, part in enumerate(parts)]
            metric.add(target, together(tasks).rate)

    @staticmethod
    def _after_drop(task: Task, drop: bool) -> Task:
        """Caches are dropped when that reader is prepared, that is, before any of them begins."""

        def prepare() -> Timed:
            timed = task()
            if drop:
                time.sleep(0.3)  # the others' preparation reads too
                drop_caches()
            return timed

        return prepare


def _those(paths: list[str], part: list[int]) -> list[str]:
    return [paths[number] for number in part]


def goals(plan: Plan) -> list[str]:
    lines = []
    for name, metric in plan.metrics.items():
        ratio = metric.ratio(BATCH, KEEPING)
        if ratio is not None and not name.endswith(" 1 reader"):
            verdict = "reached" if ratio >= GOAL else "MISSED"
            lines.append(f"goal      {name}: {ratio:.2f} x keeping, wanted {GOAL:.1f}: {verdict}")
    return lines


def run(options: argparse.Namespace, work_dir: Path) -> tuple[Plan, list[str]]:
    os.environ["TIERFS_RUN_DIR"] = str(work_dir / "run")
    store = work_dir / "store"
    names = make_files(store, options.files)
    disk = [str(store / name) for name in names]
    tier_bytes = 2 * options.files * LARGEST_BYTES + (1 << 28)
    kept = ("--ttl", "86400")
    with fresh_mount(str(store), work_dir / "mnt", work_dir, tier_bytes=tier_bytes, options=kept) as mounted:
        mount = [str(mounted.mountpoint / name) for name in names]
        make_local(mounted, mount)
        said = tierfs.batch.status()
        plan = Plan(disk, mount, options.batch, options.seed, options.passes)
        may_drop = os.geteuid() == 0 and not options.hot_only
        if may_drop:
            drop_caches()
        for paths in (disk, mount):
            for start in range(0, len(paths), 1000):
                tierfs.batch.read_many(paths[start : start + 1000])
        for number in range(options.rounds):
            for readers in (1, options.readers):
                plan.measure(readers, cold=False, through_mount=not number)
        # Last: what one target has dropped, the others would find cold.
        for _ in range(options.rounds if may_drop else 0):
            for readers in (1, options.readers):
                plan.measure(readers, cold=True, through_mount=False)
        notes = [
            f"mount     {shlex.join(mounted.arguments)}",
            f"io_uring  {'yes' if said.uses_io_uring else 'no'}",
        ]
    return plan, notes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.batch", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=256, help="files per call")
    parser.add_argument("--readers", type=int, default=8, help="processes of the second line of each kind")
    parser.add_argument("--passes", type=int, default=4, help="over the files, in a round of a hot line")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hot-only", action="store_true", help="drop no caches")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work-dir", type=Path, help="on the disk to be compared with (default: a new one)")
    parser.add_argument("--json", type=Path, help="write all values to this file")
    options = parser.parse_args(arguments)
    if not tierfs.batch.status().is_native:
        print(f"benchmarks.batch: no extension module: {tierfs.batch.status().why}", file=sys.stderr)
        return 1
    about = machine()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tierfs-batch-", dir=options.work_dir) as directory:
        try:
            plan, notes = run(options, Path(directory))
        except (MountFailed, LoopFailed) as error:
            print(f"benchmarks.batch: {error}", file=sys.stderr)
            return 1
    print(
        f"machine   {about['processor']}, {about['cores']} cores, {about['memory_gib']} GiB, "
        f"Linux {about['kernel']}, Python {about['python']}, load before {about['load']:.2f}",
        *notes,
        f"command   {shlex.join(sys.orig_argv)}",
        f"          {options.files} files of 4 to 100 KiB, batches of {options.batch}, "
        f"{options.rounds} rounds in {time.monotonic() - start:.0f} s",
        "",
        table(plan.metrics.values(), BATCH, (KEEPING, DISCARDING, MOUNT)),
        "",
        *goals(plan),
        sep="\n",
    )
    if options.json:
        found = {name: metric.as_json(BATCH) for name, metric in plan.metrics.items()}
        content = {"machine": about, "command": shlex.join(sys.orig_argv), "notes": notes, "metrics": found}
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
