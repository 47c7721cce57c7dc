"""Hits beside misses: how long it takes to open, read and close a local file while 64 reads of others hang.

The store of the mount answers those 64 not at all until the round is over (``tierfs.store.faulty``, through
``TIERFS_FAULTS``). What is compared is the 99th percentile of the same reader with and without them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.front.lines import MOUNT, Lines, Wanted
from benchmarks.front.places import MIB, Place, Scale
from tierfs.bench.files import FileSet
from tierfs.bench.histogram import Histogram
from tierfs.bench.loops import read_files
from tierfs.bench.processes import run_together
from tierfs.errors import BenchFailed

SECTION = "Hits while misses hang"
MISSES = 64
DIRECTORY = "cold"
COLD_BYTES = MIB
FAULTS_SEEN_S = 0.3
"""A running store looks at its faults file ten times a second."""
STARTED_S = 1.0
"""What 64 reads need to arrive in the front, and to hang."""


def make_cold(plain: Path, rounds: int) -> None:
    """For each round files that nobody has read."""
    noise = os.urandom(COLD_BYTES)
    for number in range(rounds):
        directory = plain / DIRECTORY / f"r{number}"
        directory.mkdir(parents=True)
        for index in range(MISSES):
            (directory / f"f{index}").write_bytes(noise)


@contextlib.contextmanager
def faults_file(path: Path) -> Iterator[Path]:
    """Mounts that are made meanwhile have a store that does what the file says; there are no faults yet."""
    before = os.environ.get("TIERFS_FAULTS")
    os.environ["TIERFS_FAULTS"] = str(path)
    try:
        yield path
    finally:
        if before is None:
            del os.environ["TIERFS_FAULTS"]
        else:
            os.environ["TIERFS_FAULTS"] = before


def measure(
    lines: Lines, scale: Scale, place: Place, faults: Path, rounds: Iterable[int]
) -> list[tuple[str, Histogram]]:
    """Returns the latencies with and without, over all rounds. Raises BenchFailed."""
    small = place.data.small
    metric = lines.line(
        SECTION, f"p99 of open, read, close of a local file: with {MISSES} hanging misses / without", "x",
        Wanted(1.5, absolute=True, at_most=True), higher_is_better=False,
    )  # fmt: skip
    alone = lines.line(SECTION, "p99 without", "us", higher_is_better=False)
    beside = lines.line(SECTION, f"p99 with {MISSES}", "us", higher_is_better=False)
    total = {"without": Histogram(), f"with {MISSES}": Histogram()}
    _hits(small, scale.hits_s, 0)
    for number in rounds:
        found: dict[bool, Histogram] = {}
        for hanging in (True, False) if number % 2 else (False, True):
            if hanging:
                with _hanging(place, faults, number):
                    found[True] = _hits(small, scale.hits_s, number)
            else:
                found[False] = _hits(small, scale.hits_s, number)
        with_ns, without_ns = found[True].quantile_ns(0.99), found[False].quantile_ns(0.99)
        alone.add(MOUNT, without_ns / 1000)
        beside.add(MOUNT, with_ns / 1000)
        metric.add(MOUNT, with_ns / without_ns)
        total["without"].merge(found[False])
        total[f"with {MISSES}"].merge(found[True])
    return list(total.items())


def _hits(files: FileSet, seconds: float, number: int) -> Histogram:
    order = files.order(number)
    paths, sizes = files.paths(), [size for _, size in files.entries]
    task = read_files(
        [paths[i] for i in order], [sizes[i] for i in order], block_bytes=128 * 1024, repeat=True
    )
    return run_together([task], limit_s=seconds).latency


@contextlib.contextmanager
def _hanging(place: Place, faults: Path, number: int) -> Iterator[None]:
    """64 reads that hang from the beginning of the block to its end; BenchFailed if one of them returned."""
    _say(faults, [{"kind": "block", "operation": "get", "key": f"{DIRECTORY}/*"}])
    context = multiprocessing.get_context("fork")
    returned = context.Value(ctypes.c_int, 0)
    directory = place.mounted.mountpoint / DIRECTORY / f"r{number}"
    os.listdir(directory)
    child = context.Process(target=_read_all, args=(directory, returned), daemon=True)
    child.start()
    try:
        time.sleep(STARTED_S)
        yield
        if returned.value:
            raise BenchFailed(f"{returned.value} of {MISSES} reads that should hang came back")
    finally:
        child.kill()
        child.join()
        _say(faults, [])


def _read_all(directory: Path, returned: ctypes.c_int) -> None:
    def read(path: Path) -> None:
        with contextlib.suppress(OSError):
            path.read_bytes()
        with returned.get_lock():  # type: ignore[attr-defined]
            returned.value += 1

    threads = [threading.Thread(target=read, args=(directory / f"f{index}",)) for index in range(MISSES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _say(faults: Path, rules: list[dict[str, object]]) -> None:
    draft = faults.with_suffix(".new")
    draft.write_text(json.dumps({"rules": rules}))
    draft.rename(faults)
    time.sleep(FAULTS_SEEN_S)
