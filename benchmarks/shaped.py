"""Mounts on a directory that answers like a store far away, and what a planner has to know here."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks import loops
from benchmarks.compare.processes import TICK_S, cpu_seconds
from benchmarks.loops import drop_page_cache, together
from benchmarks.mounted import Mounted, fresh_mount
from tierfs.plan.scenario import KIB, MIB
from tierfs.store.faulty import FAULTS_ENVIRONMENT

LATENCY_S = 0.020
STREAM_RATE = 12.0 * MIB
"""What a request takes: so long, and then at that rate."""
LARGE_FILES, LARGE_BYTES, READERS = 8, 32 * MIB, 2
SMALL_FILES, SMALL_BYTES, MISSES = 400, 96 * KIB, 150
SAVED_BYTES = 64 * MIB
TIER_BYTES = 1024 * MIB
MEMORY = "/dev/shm"


class ShapedMounts:
    """One mount at a time, below one directory."""

    def __init__(self, work_dir: Path) -> None:
        self._work_dir = work_dir
        self._mountpoint = work_dir / "mnt"
        self._faults = work_dir / "faults.json"

    @contextlib.contextmanager
    def mount(
        self,
        store: Path,
        *,
        tier_bytes: int,
        shaped: bool,
        connections: int = 32,
        tier_in: Path | None = None,
        upload_delay: str = "0s",
    ) -> Iterator[Mounted]:
        """A new mount. ``tier_in``: where its tier and its state lie, if not on the disk."""
        rules = [
            {"kind": "latency", "operation": operation, "seconds": LATENCY_S, "bytes_per_s": STREAM_RATE}
            for operation in ("get", "put", "upload_part")
        ]
        self._faults.write_bytes(msgspec.json.encode({"rules": rules if shaped else []}))
        os.environ[FAULTS_ENVIRONMENT] = str(self._faults)
        options = [
            "--fetch-concurrency", str(connections), "--upload-concurrency", str(connections),
            "--upload-delay", upload_delay,
        ]  # fmt: skip
        try:
            with fresh_mount(
                store.as_uri(),
                self._mountpoint,
                tier_in or self._work_dir,
                tier_bytes=tier_bytes,
                options=options,
            ) as mounted:
                yield mounted
        finally:
            del os.environ[FAULTS_ENVIRONMENT]


@dataclass(frozen=True, slots=True)
class Probed:
    """Fields of a scenario. ``rates``: as this machine is now, whatever else runs on it. ``per_core``: of a
    mount alone, from the CPU seconds that its processes took: what one core that is all its own would give.
    """

    rates: dict[str, float]
    per_core: dict[str, float]


def probe(mounts: ShapedMounts, store: Path) -> Probed:
    """Some seconds. ``store``: a directory of its own, filled here."""
    large, small = _fill(store)
    with mounts.mount(store, tier_bytes=TIER_BYTES, shaped=False) as mounted:
        os.listdir(mounted.mountpoint)
        cold, fetching_s = _with_cpu(mounted, shares(_below(mounted, large), READERS))
        drop_page_cache(_below(mounted, large))
        warm = together(shares(_below(mounted, large), READERS))
        together([loops.read_files(_below(mounted, small))])
        drop_page_cache(_below(mounted, small))
        one_by_one = together([loops.read_files(_below(mounted, small))])
    with mounts.mount(store, tier_bytes=TIER_BYTES, shaped=True) as mounted:
        os.listdir(mounted.mountpoint)
        missed, missing_s = _with_cpu(mounted, [loops.read_files(_below(mounted, small[:MISSES]))])
    with (
        tempfile.TemporaryDirectory(prefix="tierfs-planned-", dir=MEMORY) as memory,
        mounts.mount(
            store, tier_bytes=TIER_BYTES, shaped=False, tier_in=Path(memory), upload_delay="1h"
        ) as mounted,
    ):
        saved = _below(mounted, [f"rank{rank}" for rank in range(READERS)])
        staged, writing_s = _with_cpu(mounted, [loops.write_file(path, SAVED_BYTES) for path in saved])
        for path in saved:
            os.unlink(path)
    by_store_s = LATENCY_S + SMALL_BYTES / STREAM_RATE
    return Probed(
        rates={
            "mount_rate": cold.rate,
            "mount_write_rate": staged.rate,
            "mount_latency_s": max(0.0, missed.seconds / MISSES - by_store_s),
            "nvme_read_rate": warm.rate,
            "local_latency_s": one_by_one.seconds / SMALL_FILES,
        },
        per_core={
            "mount_rate": cold.amount / fetching_s,
            "mount_write_rate": staged.amount / writing_s,
            "mount_latency_s": missing_s / MISSES,
        },
    )


def shares(paths: Sequence[str], readers: int) -> list[loops.Task]:
    """The files, dealt to so many readers."""
    return [loops.read_files(paths[first::readers]) for first in range(readers)]


def _fill(store: Path) -> tuple[list[str], list[str]]:
    """Names of large and of small files; the small ones in no order, or the next one would be on its way."""
    store.mkdir(exist_ok=True)
    piece = random.Random(2).randbytes(LARGE_BYTES)
    large = [f"large{number}" for number in range(LARGE_FILES)]
    small = [f"small{number}" for number in random.Random(3).sample(range(SMALL_FILES), SMALL_FILES)]
    for names, size_bytes in ((large, LARGE_BYTES), (small, SMALL_BYTES)):
        for name in names:
            (store / name).write_bytes(piece[:size_bytes])
    return large, small


def _below(mounted: Mounted, names: Sequence[str]) -> list[str]:
    return [str(mounted.mountpoint / name) for name in names]


def _with_cpu(mounted: Mounted, tasks: Sequence[loops.Task]) -> tuple[loops.Outcome, float]:
    """What they did, and the CPU seconds that engine and front took for it."""
    status = mounted.status()
    pids = {int(status["engine"]["pid"]), int(status["front"].get("pid") or 0)} - {0}
    before_s = sum(map(cpu_seconds, pids))
    outcome = together(tasks)
    # Less than a clock tick shows as nothing: then it is at most one.
    return outcome, max(sum(map(cpu_seconds, pids)) - before_s, TICK_S)
