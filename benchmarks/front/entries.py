"""Mounts whose namespace has a thousand to ten million entries: the same questions at every size."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.front import imported
from benchmarks.front.places import KEPT, Scale, drop, may_drop
from benchmarks.mounted import fresh_mount
from tierfs.bench.loops import on_each, walk_tree
from tierfs.bench.processes import call_in_child, run_together

LISTED_DIRECTORIES = 20


@dataclass(frozen=True, slots=True)
class Size:
    """``ready_s``: the command ``tierfs mount``. Rates are of names that the kernel did not know before."""

    entries: int
    database_bytes: int
    ready_s: float
    stat_per_s: float
    list_per_s: float
    create_per_s: float


def measure(scale: Scale, work_dir: Path, is_over: Callable[[], bool]) -> list[Size]:
    """From few to many, until that is all or time is over. Raises BenchFailed, MountFailed."""
    found = []
    for count in scale.namespace_counts:
        if is_over():
            break
        found.append(_at(scale, work_dir / f"entries{count}", count))
    return found


def _at(scale: Scale, work_dir: Path, count: int) -> Size:
    source = work_dir / "source"
    source.mkdir(parents=True)
    began_s = 0.0

    def prepare(state_dir: Path) -> None:
        nonlocal began_s
        # In a child: LMDB must not be open in a process that forks.
        call_in_child(partial(imported.fill, state_dir, count, str(source)))
        if may_drop():
            drop()
        began_s = time.monotonic()

    with fresh_mount(
        str(source), work_dir / "mnt", work_dir, tier_bytes=1 << 26, options=KEPT, prepare=prepare
    ) as mount:
        ready_s = time.monotonic() - began_s
        root = str(mount.mountpoint)
        chance = random.Random(count)
        names = [
            imported.path_of(number)
            for number in chance.sample(range(count), min(count, scale.namespace_samples))
        ]
        stats = run_together([on_each([f"{root}/{name}" for name in names], "stat")], limit_s=3600.0)
        directories = -(-count // imported.PER_DIRECTORY)
        chosen = chance.sample(range(directories), min(directories, LISTED_DIRECTORIES))
        walks = [
            walk_tree(f"{root}/{imported.directory_name(number)}", open_files=False) for number in chosen
        ]
        listed, listing_s = 0, 0.0
        for walk in walks:
            outcome = run_together([walk], limit_s=3600.0)
            listed, listing_s = listed + outcome.operations, listing_s + outcome.seconds
        os.mkdir(f"{root}/new")
        new = [f"{root}/new/{number}" for number in range(scale.made_count)]
        made = run_together([on_each(new, "create")], limit_s=3600.0)
        run_together([on_each(new, "unlink")], limit_s=3600.0)
        os.rmdir(f"{root}/new")
        database = work_dir / "state" / "namespace.lmdb" / "data.mdb"
        return Size(
            count,
            database.stat().st_blocks * 512,
            ready_s,
            stats.operations / stats.seconds,
            listed / listing_s,
            made.operations / made.seconds,
        )
