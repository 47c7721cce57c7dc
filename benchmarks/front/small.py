"""Shuffled epochs over many small files, by one reader and by eight; in batches with ``read_many`` too."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from benchmarks import batch
from benchmarks.front.lines import MOUNT, NULL, PLAIN, Lines, Wanted
from benchmarks.front.places import LOCAL_LIMIT_S, Data, Place, Scale, drop, may_drop
from tierfs.batch import read_many, status
from tierfs.bench.files import FileSet, share
from tierfs.bench.loops import read_files
from tierfs.bench.processes import run_together
from tierfs.errors import BenchFailed

SECTION = "Shuffled epochs over small files"
READERS = (1, 8)
READ_ONLY = "read-only"
BLOCK_BYTES = 128 * 1024
DROPPED = {1: 0.6, 8: 0.8}
HOT = {1: 0.4, 8: 0.6}
HOT_READ_ONLY = 0.9
BATCH_FILES = 256
BATCH_PASSES = 2


def epoch(files: FileSet, readers: int, number: int) -> float:
    """Every file once: open, read to the end, close; files per second."""
    paths, sizes = files.paths(), [size for _, size in files.entries]
    tasks = [
        read_files([paths[i] for i in part], [sizes[i] for i in part], block_bytes=BLOCK_BYTES)
        for part in share(files.order(number), readers)
    ]
    outcome = run_together(tasks, limit_s=3600.0)
    return outcome.operations / outcome.seconds


def measure(
    lines: Lines,
    plain: Data,
    place: Place,
    read_only: Place | None,
    null: Data | None,
    rounds: Iterable[int],
) -> None:
    """``read_only``: a mount of the same with ``--read-only``; ``null``: one whose daemon does nothing; both
    if they are there. Raises BenchFailed."""
    files = {PLAIN: plain.small, MOUNT: place.data.small}
    if read_only is not None:
        files[READ_ONLY] = read_only.data.small
    if null is not None:
        files[NULL] = null.small
    for number in rounds:
        for readers in READERS:
            _round(lines, files, False, readers, number)
        for found in files.values():
            epoch(found, READERS[-1], number)  # what one target has dropped, the others would find cold
        for readers in READERS:
            _round(lines, files, True, readers, number)


def _round(lines: Lines, files: Mapping[str, FileSet], hot: bool, readers: int, number: int) -> None:
    words = f"{'hot' if hot else 'dropped'}, {readers} reader{'s' if readers > 1 else ''}"
    metric = lines.line(SECTION, words, "files/s", Wanted((HOT if hot else DROPPED)[readers]))
    rates: dict[str, float] = {}
    for who in reversed(list(files)) if number % 2 else files:
        if not hot:
            drop()
        rates[who] = epoch(files[who], readers, number)
    for who in (PLAIN, MOUNT, NULL):
        if who in rates:
            metric.add(who, rates[who])
    if READ_ONLY in rates:
        wanted = Wanted(HOT_READ_ONLY) if hot else None
        metric = lines.line(SECTION, f"--read-only mount, {words}", "files/s", wanted)
        metric.add(PLAIN, rates[PLAIN])
        metric.add(MOUNT, rates[READ_ONLY])


def _until_local(paths: Sequence[str]) -> None:
    """``read_many`` has all of them from the tier from now on. Raises BenchFailed."""
    give_up_s = time.monotonic() + LOCAL_LIMIT_S
    while True:
        before = status().files.get("local", 0)
        for start in range(0, len(paths), BATCH_FILES):
            read_many(paths[start : start + BATCH_FILES])
        if status().files.get("local", 0) - before == len(paths):
            return
        if time.monotonic() > give_up_s:
            raise BenchFailed(f"the files do not become local: {status()}")
        time.sleep(0.2)


def measure_batches(lines: Lines, scale: Scale, plain: Data, place: Place, rounds: Iterable[int]) -> None:
    """``tierfs.read_many`` against open, read and close of the plain files by eight readers."""
    section = f"read_many, batches of {BATCH_FILES}, {READERS[-1]} readers, against open, read and close"
    mounted, disk = place.data.small.paths(), plain.small.paths()
    _until_local(mounted)
    plan = batch.Plan(disk, mounted, min(BATCH_FILES, scale.small_count), 1, BATCH_PASSES)
    for _ in rounds:
        if may_drop():
            plan.measure(READERS[-1], cold=True, through_mount=False)
        for paths in (disk, mounted):
            for start in range(0, len(paths), BATCH_FILES):
                read_many(paths[start : start + BATCH_FILES])
        plan.measure(READERS[-1], cold=False, through_mount=False)
    for found in plan.metrics.values():
        metric = lines.line(section, found.name.partition(",")[0], found.unit, Wanted(2.0))
        for who, theirs in ((MOUNT, batch.BATCH), (PLAIN, batch.KEEPING)):
            for value in found.values[theirs]:
                metric.add(who, value)
