"""What ``benchmarks.quick`` measures: the data, the targets, and one metric per line of its table."""

from __future__ import annotations

import os
import random
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import loops
from benchmarks.budget import SERVER, Budget, spending
from benchmarks.loops import drop_page_cache, together
from benchmarks.mounted import Mounted, fresh_mount
from benchmarks.samples import Metric
from benchmarks.sources import Range, Source, client, fill

MIB = 1024 * 1024
MOUNT, PLAIN, DIRECT, CLIENT = "mount", "plain", "direct", "client"
PARALLEL_GETS = 16
READERS = 8
GET_BYTES = 8 * MIB
STREAM = f"cold sequential, 1 reader, against {PARALLEL_GETS} GETs"
MANY_SMALL = f"cold small files, {READERS} readers"
GOAL = 0.8
"""Part of what the store gives by itself that is wanted through the mount."""
MEMORY_BESIDE_BYTES = 300 * MIB
"""What the daemon may need beside its budget for file data."""


@dataclass(frozen=True)
class Scale:
    """How much is measured. The default fits into three minutes and 2 GiB."""

    rounds: int = 3
    large_bytes: int = 256 * MIB
    small_files: int = 800
    small_bytes: tuple[int, int] = (4 * 1024, 100 * 1024)
    meta_files: int = 500
    shards: int = 8
    shard_bytes: int = 64 * MIB
    entries: int = 20_000
    handles: int = 400


TINY = Scale(
    rounds=1,
    large_bytes=4 * MIB,
    small_files=24,
    meta_files=20,
    shards=2,
    shard_bytes=MIB,
    entries=50,
    handles=10,
)


class Plan:
    """One run: the data, the targets, and a metric per line of the table."""

    def __init__(self, scale: Scale, source: Source, mountpoint: Path, work_dir: Path) -> None:
        self.scale = scale
        self.source = source
        self.mountpoint = mountpoint
        self.work_dir = work_dir
        self.plain_dir = work_dir / "plain"
        self.metrics: list[Metric] = []
        self.notes: dict[str, Any] = {}
        sizes = random.Random(1)
        self.small = [
            {
                f"small{number}/{index:05}.bin": sizes.randint(*scale.small_bytes)
                for index in range(scale.small_files)
            }
            for number in (1, READERS)
        ]
        self.memory_goal_bytes = 0
        self.budgets = {name: Budget(name, unit) for name, unit in ((STREAM, "MiB"), (MANY_SMALL, "file"))}
        self._daemons: dict[str, int] = {}
        self._by_name: dict[str, Metric] = {}

    def metric(self, name: str, unit: str, *, higher_is_better: bool = True) -> Metric:
        found = self._by_name.get(name)
        if found is None:
            found = self._by_name[name] = Metric(name, unit, higher_is_better)
            self.metrics.append(found)
        return found

    # data

    def prepare(self) -> None:
        """Fill the store and the plain directory with the same data."""
        noise = random.Random(2)
        large = bytearray()
        block = noise.randbytes(min(MIB, self.scale.large_bytes))
        while len(large) < self.scale.large_bytes:
            large += len(large).to_bytes(8, "little") + block[8:]
        objects: dict[str, bytes | memoryview] = {"large.bin": memoryview(large)[: self.scale.large_bytes]}
        for sizes in self.small:
            for key, size in sizes.items():
                start = noise.randrange(max(1, len(block) - size))
                objects[key] = block[start : start + size]
        for key, body in objects.items():
            path = self.plain_dir / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body)
        for index in range(self.scale.entries):
            objects[f"entries/{index:07}"] = b"x"
        os.sync()
        # In a process of its own: the store client's threads must not exist when the loops fork.
        source = self.source
        together([lambda: lambda: fill(source, objects)])

    # rounds

    def measure(self, number: int) -> None:
        """One round: everything once for every target, in an order that alternates from round to round."""
        tier_bytes = self.scale.large_bytes + 2 * self.scale.shards * self.scale.shard_bytes + 512 * MIB
        with fresh_mount(self.source.url, self.mountpoint, self.work_dir, tier_bytes=tier_bytes) as mount:
            self.notes["mount command"] = shlex.join(mount.arguments)
            status = mount.status()
            self._daemons = {"engine": int(status["engine"]["pid"])}
            if status["front"]["kind"] == "native":
                self._daemons["front"] = int(status["front"]["pid"])
            backwards = bool(number % 2)
            self._cold_sequential(backwards)
            self._compare(number)
            self._warm_sequential(backwards)
            for sizes, readers in zip(self.small, (1, READERS), strict=True):
                self._cold_small(sizes, readers, backwards, seed=number)
            self._metadata(number, backwards)
            self._checkpoint(mount, number, backwards)

    def _cold_sequential(self, backwards: bool) -> None:
        size = self.scale.large_bytes
        whole = self.metric("cold sequential, 1 reader, against 1 GET", "MiB/s")
        parallel = self.metric(STREAM, "MiB/s")
        ranges = pieces("large.bin", size)
        plain = str(self.plain_dir / "large.bin")

        def by_mount() -> None:
            reader = loops.read_files([str(self.mountpoint / "large.bin")])
            rate = self._run(STREAM, MOUNT, [reader], size / MIB).rate / MIB
            whole.add(MOUNT, rate)
            parallel.add(MOUNT, rate)

        def by_others() -> None:
            drop_page_cache([plain])
            whole.add(PLAIN, together([loops.read_files([plain])]).rate / MIB)
            whole.add(DIRECT, together([self.source.direct(ranges)]).rate / MIB)
            shares = [ranges[first::PARALLEL_GETS] for first in range(min(PARALLEL_GETS, len(ranges)))]
            gets = [self.source.direct(share) for share in shares]
            parallel.add(DIRECT, self._run(STREAM, DIRECT, gets, size / MIB).rate / MIB)
            parallel.add(CLIENT, together([client(self.source, ranges, PARALLEL_GETS)]).rate / MIB)

        in_order([by_others, by_mount], backwards)

    def _run(self, line: str, target: str, tasks: Sequence[loops.Task], amount: float) -> loops.Outcome:
        """Like ``together``; notes what it costs, if that line has a budget."""
        budget, server = self.budgets.get(line), self.source.server_pid
        if budget is None or server is None:
            return together(tasks)
        with spending({SERVER: server, **(self._daemons if target == MOUNT else {})}) as spent:
            outcome = together(tasks)
        budget.add(target, spent, amount, amount / outcome.seconds)
        return outcome

    def _compare(self, seed: int) -> None:
        """Fast and wrong does not count: samples of the mount against the plain directory."""
        chooser = random.Random(seed)
        places = [("large.bin", chooser.randrange(self.scale.large_bytes)) for _ in range(16)]
        for key, offset in places:
            found = []
            for base in (self.mountpoint, self.plain_dir):
                with (base / key).open("rb", buffering=0) as file:
                    file.seek(offset)
                    found.append(file.read(64 * 1024))
            if found[0] != found[1]:
                raise loops.LoopFailed(f"wrong bytes in {key} at {offset}")

    def _warm_sequential(self, backwards: bool) -> None:
        metric = self.metric("warm sequential, 1 reader", "MiB/s")

        def by_mount() -> None:
            path = str(self.mountpoint / "large.bin")
            drop_page_cache([path])
            metric.add(MOUNT, together([loops.read_files([path])]).rate / MIB)

        def by_plain() -> None:
            metric.add(PLAIN, together([loops.read_files([str(self.plain_dir / "large.bin")])]).rate / MIB)

        in_order([by_plain, by_mount], backwards)

    def _cold_small(self, sizes: dict[str, int], readers: int, backwards: bool, seed: int) -> None:
        name = MANY_SMALL if readers == READERS else "cold small files, 1 reader"
        metric = self.metric(name, "files/s")
        keys = random.Random(seed).sample(sorted(sizes), len(sizes))
        shares = [keys[first::readers] for first in range(readers)]
        ranges: list[list[Range]] = [[(key, 0, sizes[key]) for key in share] for share in shares]

        def rate(target: str, tasks: Sequence[loops.Task]) -> float:
            return len(keys) / self._run(name, target, tasks, len(keys)).seconds

        def by_mount() -> None:
            os.listdir(self.mountpoint / Path(keys[0]).parent)
            metric.add(MOUNT, rate(MOUNT, [read_all(self.mountpoint, share) for share in shares]))

        def by_others() -> None:
            drop_page_cache([str(self.plain_dir / key) for key in keys])
            metric.add(PLAIN, rate(PLAIN, [read_all(self.plain_dir, share) for share in shares]))
            metric.add(DIRECT, rate(DIRECT, [self.source.direct(share) for share in ranges]))
            every = [wanted for share in ranges for wanted in share]
            metric.add(CLIENT, rate(CLIENT, [client(self.source, every, readers)]))

        in_order([by_others, by_mount], backwards)

    def _metadata(self, number: int, backwards: bool) -> None:
        steps = (("create", loops.create_files), ("stat", loops.stat_files), ("unlink", loops.unlink_files))
        metrics = [self.metric(f"{name}, 1 process", "files/s") for name, _ in steps]

        def measure(target: str, base: Path) -> None:
            directory = base / f"meta{number}"
            directory.mkdir()
            paths = [str(directory / f"{index:06}") for index in range(self.scale.meta_files)]
            for metric, (_, loop) in zip(metrics, steps, strict=True):
                metric.add(target, together([loop(paths)]).rate)
            directory.rmdir()

        in_order([lambda: measure(PLAIN, self.plain_dir), lambda: measure(MOUNT, self.mountpoint)], backwards)

    def _checkpoint(self, mount: Mounted, number: int, backwards: bool) -> None:
        scale = self.scale
        what = f"{scale.shards} x {scale.shard_bytes // MIB} MiB"
        metric = self.metric(f"checkpoint, {what} + fsync: blocked for", "s", higher_is_better=False)

        uploaded = self.metric("checkpoint: after that, in the store in", "s", higher_is_better=False)

        def measure(target: str, base: Path) -> None:
            directory = base / f"checkpoint{number}"
            directory.mkdir()
            paths = [str(directory / f"rank{rank}.pt") for rank in range(scale.shards)]
            writers = [loops.write_file(path, scale.shard_bytes) for path in paths]
            metric.add(target, together(writers).seconds)
            if target == MOUNT and number == 0:
                uploaded.add(MOUNT, mount.flush())
            shutil.rmtree(directory)

        in_order([lambda: measure(PLAIN, self.plain_dir), lambda: measure(MOUNT, self.mountpoint)], backwards)

    # memory

    def measure_memory(self) -> None:
        """Resident memory after a large directory has been read, and with many files open."""
        with fresh_mount(self.source.url, self.mountpoint, self.work_dir, tier_bytes=1024 * MIB) as mount:
            after = self.metric("memory of the daemon: new mount", "MiB", higher_is_better=False)
            after.add(MOUNT, mount.resident_bytes() / MIB)
            found = sum(1 for _ in os.scandir(self.mountpoint / "entries"))
            self.notes["entries read"] = found
            name = f"memory: after reading {found:,} entries"
            self.metric(name, "MiB", higher_is_better=False).add(MOUNT, mount.resident_bytes() / MIB)
            self.memory_goal_bytes = (
                int(mount.status()["engine"]["buffer_budget_bytes"]) + MEMORY_BESIDE_BYTES
            )
            keys = sorted(self.small[1])[: self.scale.handles]
            descriptors = [os.open(self.mountpoint / key, os.O_RDONLY) for key in keys]
            try:
                for fd in descriptors:
                    os.pread(fd, 4096, 0)
                name = f"memory: with {len(descriptors)} files open and read"
                self.metric(name, "MiB", higher_is_better=False).add(MOUNT, mount.resident_bytes() / MIB)
            finally:
                for fd in descriptors:
                    os.close(fd)

    def budget_lines(self) -> list[str]:
        """What the processors allow of what is wanted; empty where the server's share is not known."""
        cores = len(os.sched_getaffinity(0))
        references = {STREAM: DIRECT, MANY_SMALL: CLIENT}
        return [
            line
            for name, budget in self.budgets.items()
            for line in budget.lines(MOUNT, references[name], GOAL, cores)
        ]

    def goals(self) -> list[str]:
        """What is wanted, what was reached, and whether that is enough."""
        lines = []
        for name, reference in ((STREAM, DIRECT), (MANY_SMALL, CLIENT)):
            ratio = self.metric(name, "").ratio(MOUNT, reference)
            if ratio is not None:
                lines.append(f"{_met(ratio >= GOAL)}  {name}: {ratio:.2f} x {reference}, wanted {GOAL:.2f}")
        for metric in self.metrics:
            most = max(metric.values.get(MOUNT, ()), default=None)
            if metric.name.startswith("memory") and most is not None and self.memory_goal_bytes:
                goal = self.memory_goal_bytes / MIB
                lines.append(
                    f"{_met(most <= goal)}  {metric.name}: {most:.0f} MiB, at most {goal:.0f} wanted"
                )
        return lines


def _met(enough: bool) -> str:
    return "met    " if enough else "MISSED "


def pieces(key: str, size: int) -> list[Range]:
    return [(key, offset, min(GET_BYTES, size - offset)) for offset in range(0, size, GET_BYTES)]


def read_all(base: Path, keys: Sequence[str]) -> loops.Task:
    return loops.read_files([str(base / key) for key in keys])


def in_order(steps: Sequence[Callable[[], None]], backwards: bool) -> None:
    for step in reversed(steps) if backwards else steps:
        step()
