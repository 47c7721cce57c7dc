"""A checkpoint: every writer saves its shard at once, with fsync."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from benchmarks.front.lines import MOUNT, PLAIN, Lines, Wanted, alternate
from benchmarks.front.places import MIB, Place, Scale
from tierfs.bench.loops import write_file
from tierfs.bench.processes import run_together


def checkpoint(base: Path, scale: Scale, number: int) -> float:
    """Seconds until the last of all has closed its file. The files are removed, whatever happens."""
    directory = base / f"checkpoint{number}"
    directory.mkdir()
    try:
        paths = [str(directory / f"rank{rank}") for rank in range(scale.shards)]
        return run_together([write_file(path, scale.shard_bytes) for path in paths], limit_s=3600.0).seconds
    finally:
        shutil.rmtree(directory)
        os.sync()


def measure(lines: Lines, scale: Scale, plain: Path, place: Place, rounds: Iterable[int]) -> None:
    """``plain``: a directory beside the store. Raises BenchFailed."""
    name = f"write 1 MiB, fsync, close: {scale.shards} x {scale.shard_bytes // MIB} MiB at once"
    metric = lines.line("Writes", name, "s", Wanted(0.9), higher_is_better=False)
    for number in rounds:
        places = {PLAIN: plain, MOUNT: place.mounted.mountpoint}
        alternate(
            number, metric, {who: partial(checkpoint, base, scale, number) for who, base in places.items()}
        )
