"""What is measured, and the work itself, which runs in a process of its own, on a mounted directory.

*cold*: mounted anew, nothing of it local; the server's own data are in its page cache, for everybody alike.
*warm*: in the local cache, and the kernel has forgotten everything (``drop_caches``, where root runs the
suite). *hot*: read a moment ago. The plain directory has all of it at all times: its cold is its warm.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.compare.content import read_checked, read_pages_checked, write_checked
from tierfs.bench.files import FileSet, large_files, share, small_files
from tierfs.bench.loops import on_each, walk_tree
from tierfs.bench.processes import Outcome, Task, run_together

SEED = 20
LARGE_BASE, SMALL_BASE, SHARD_BASE = 0, 1_000_000, 2_000_000
"""Where the numbers of files begin, so that no two files of a run have the same content."""
KIB, MIB = 1024, 1024 * 1024


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything. ``limit_s``: of one loop, which is judged by what it has done until then."""

    large_count: int = 2
    large_bytes: int = 256 * MIB
    small_count: int = 2000
    small_low_bytes: int = 4 * KIB
    small_high_bytes: int = 100 * KIB
    readers: int = 4
    random_reads: int = 20_000
    entries: int = 500
    ranks: int = 2
    rank_bytes: int = 256 * MIB
    limit_s: float = 20.0

    def large(self, root: Path) -> FileSet:
        return large_files(str(root / "data" / "large"), self.large_count, self.large_bytes, seed=SEED)

    def small(self, root: Path) -> FileSet:
        return small_files(
            str(root / "data" / "small"), self.small_count, low_bytes=self.small_low_bytes,
            high_bytes=self.small_high_bytes, per_directory=200, seed=SEED,
        )  # fmt: skip

    @property
    def total_bytes(self) -> int:
        """Of one copy of the data that are read."""
        return self.large(Path("/")).total_bytes + self.small(Path("/")).total_bytes

    def described(self) -> str:
        return (
            f"{self.large_count} files of {self.large_bytes // MIB} MiB; {self.small_count} files of "
            f"{self.small_low_bytes // KIB}-{self.small_high_bytes // KIB} KiB; checkpoint of {self.ranks} x "
            f"{self.rank_bytes // MIB} MiB; {self.entries} files to make and remove"
        )


QUICK = Scale(
    large_count=2, large_bytes=64 * MIB, small_count=400, random_reads=4000, entries=150, rank_bytes=48 * MIB,
    limit_s=4.0,
)  # fmt: skip
TINY = Scale(
    large_count=1, large_bytes=4 * MIB, small_count=20, readers=2, random_reads=50, entries=10,
    rank_bytes=MIB, limit_s=10.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Metric:
    """``per``: what CPU time is divided by, ``GiB`` or ``1,000`` operations."""

    key: str
    title: str
    unit: str
    per: str
    higher_is_better: bool = True


MOUNT = Metric("mount", "mount, nothing known yet", "s", "mount", higher_is_better=False)
COLD_LARGE = Metric("cold-large", "cold, large files, 1 reader", "MiB/s", "GiB")
COLD_SMALL = Metric("cold-small", "cold, small files, shuffled", "files/s", "1,000")
WARM_SMALL = Metric("warm-small", "warm, small files, 1 reader", "files/s", "1,000")
HOT_SMALL = Metric("hot-small", "hot, small files, shuffled", "files/s", "1,000")
WARM_LARGE = Metric("warm-large", "warm, large files, 1 reader", "MiB/s", "GiB")
WARM_RANDOM = Metric("warm-random", "warm, random 4 KiB, 1 reader", "reads/s", "1,000")
HOT_RANDOM = Metric("hot-random", "hot, random 4 KiB, 1 reader", "reads/s", "1,000")
WALK = Metric("walk", "list and stat all, kernel cold", "entries/s", "1,000")
CREATE = Metric("create", "create empty files", "files/s", "1,000")
UNLINK = Metric("unlink", "unlink them", "files/s", "1,000")
BLOCKED = Metric("checkpoint", "checkpoint: blocked until closed", "s", "GiB", higher_is_better=False)
STORED = Metric("stored", "checkpoint: all in the store", "s", "GiB", higher_is_better=False)
RESTORE = Metric("restore", "restore it, cold, all ranks", "MiB/s", "GiB")
METRICS = (
    MOUNT, COLD_LARGE, COLD_SMALL, WARM_SMALL, HOT_SMALL, WARM_LARGE, WARM_RANDOM, HOT_RANDOM, WALK, CREATE,
    UNLINK, BLOCKED, STORED, RESTORE,
)  # fmt: skip


class Done(msgspec.Struct, kw_only=True):
    """What one loop did. ``p50_us``, ``p99_us``: of single operations; ``application_s``: CPU of the loop."""

    seconds: float
    operations: int = 0
    bytes: int = 0
    p50_us: float = 0.0
    p99_us: float = 0.0
    application_s: float = 0.0
    cut: bool = False

    @classmethod
    def of(cls, outcome: Outcome) -> Done:
        return cls(
            seconds=outcome.seconds,
            operations=outcome.operations,
            bytes=outcome.bytes,
            p50_us=outcome.latency.quantile_ns(0.5) / 1000,
            p99_us=outcome.latency.quantile_ns(0.99) / 1000,
            application_s=outcome.cpu_s,
            cut=outcome.cut,
        )

    def value(self, metric: Metric) -> float:
        """In the unit of the metric; 0 if nothing was done."""
        if metric.unit == "s":
            return self.seconds
        amount = self.bytes / MIB if metric.unit == "MiB/s" else self.operations
        return amount / self.seconds if self.seconds else 0.0


Work = Callable[[Path, Scale, int], Done]
"""Of the directory under test, the scale, and the number of the round."""


def _run(tasks: Sequence[Task], scale: Scale) -> Done:
    return Done.of(run_together(tasks, limit_s=scale.limit_s, hang_s=scale.limit_s))


def large(root: Path, scale: Scale, number: int) -> Done:
    files = scale.large(root)
    return _run([read_checked(files, range(len(files.entries)), LARGE_BASE)], scale)


def small_by_one(root: Path, scale: Scale, number: int) -> Done:
    files = scale.small(root)
    return _run([read_checked(files, files.order(number), SMALL_BASE)], scale)


def small_by_many(root: Path, scale: Scale, number: int) -> Done:
    files = scale.small(root)
    shares = share(files.order(100 + number), scale.readers)
    return _run([read_checked(files, each, SMALL_BASE) for each in shares], scale)


def random_pages(root: Path, scale: Scale, number: int) -> Done:
    return _run([read_pages_checked(scale.large(root), reads=scale.random_reads, seed=number)], scale)


def walk(root: Path, scale: Scale, number: int) -> Done:
    return _run([walk_tree(str(root / "data"), open_files=False)], scale)


def everything_once(root: Path, scale: Scale, number: int) -> Done:
    """All data, so that they are local afterwards; not a measurement."""
    small, large = scale.small(root), scale.large(root)
    return _run(
        [
            read_checked(small, range(len(small.entries)), SMALL_BASE),
            read_checked(large, range(len(large.entries)), LARGE_BASE),
        ],
        scale,
    )


def own_place(root: Path, number: int) -> Path:
    """Where a peer writes in a round. Made by whoever uses it first."""
    return root / f"round-{number}"


def _names(root: Path, scale: Scale, number: int) -> list[str]:
    place = own_place(root, number) / "names"
    place.mkdir(parents=True, exist_ok=True)
    return [str(place / f"f{each:05d}") for each in range(scale.entries)]


def create(root: Path, scale: Scale, number: int) -> Done:
    return _run([on_each(_names(root, scale, number), "create")], scale)


def unlink(root: Path, scale: Scale, number: int) -> Done:
    """Those that were made: a loop that was cut short has made less."""
    names = _names(root, scale, number)
    there = set(os.listdir(os.path.dirname(names[0])))
    return _run([on_each([name for name in names if os.path.basename(name) in there], "unlink")], scale)


def shards(root: Path, scale: Scale, number: int) -> FileSet:
    """The files of a checkpoint; their numbers differ from round to round, and so does their content."""
    place = own_place(root, number) / "checkpoint"
    return large_files(str(place), scale.ranks, scale.rank_bytes, stem="rank", seed=SEED)


def checkpoint(root: Path, scale: Scale, number: int) -> Done:
    """Every rank writes, syncs and closes its shard. It is not cut short: half a checkpoint is none."""
    files = shards(root, scale, number)
    os.makedirs(files.root, exist_ok=True)
    tasks = [
        write_checked(path, size, seed=SEED, number=_shard_base(number) + rank)
        for rank, (path, (_, size)) in enumerate(zip(files.paths(), files.entries, strict=True))
    ]
    return Done.of(run_together(tasks))


def restore(root: Path, scale: Scale, number: int) -> Done:
    files = shards(root, scale, number)
    return _run([read_checked(files, [rank], _shard_base(number)) for rank in range(scale.ranks)], scale)


def _shard_base(number: int) -> int:
    return SHARD_BASE + 1000 * number


def clean_up(root: Path, scale: Scale, number: int) -> Done:
    """Remove what was written in a round."""
    shutil.rmtree(own_place(root, number), ignore_errors=True)
    return Done(seconds=0.0)


@dataclass(frozen=True, slots=True)
class Step:
    """One loop, with what has to be so before it: ``cold`` (mounted anew) or ``dropped`` (kernel caches).

    Without a metric it is not a measurement. ``own``: in the peer's own place; else on everybody's data.
    ``drain``: it is followed until the store has everything.
    """

    work: Work
    metric: Metric | None = None
    before: str = ""
    own: bool = False
    drain: bool = False


BLOCKS: tuple[tuple[Step, ...], ...] = (
    (Step(large, COLD_LARGE, "cold"), Step(small_by_many, COLD_SMALL)),
    (
        Step(everything_once),
        Step(small_by_one, WARM_SMALL, "dropped"),
        Step(small_by_many, HOT_SMALL),
        Step(large, WARM_LARGE, "dropped"),
        Step(random_pages, WARM_RANDOM, "dropped"),
        Step(random_pages, HOT_RANDOM),
    ),
    (
        Step(walk, WALK, "dropped"),
        Step(create, CREATE, own=True),
        Step(unlink, UNLINK, own=True),
    ),
    (
        Step(checkpoint, BLOCKED, own=True, drain=True),
        Step(restore, RESTORE, "cold", own=True),
        Step(clean_up, own=True),
    ),
)
"""Within a block, one peer does all steps, then the next: what is compared is at most a block apart."""
FAR_BLOCKS = (BLOCKS[0], BLOCKS[3])
"""What depends on the distance to the store."""
