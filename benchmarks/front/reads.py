"""Reads of a large file: sequential and at random, in every way that an application has, and what they cost.

*dropped*: data, dentries and inodes of everybody were dropped, so that the bytes come from the device.
*hot*: all of it has been read since, front to back. Reads at random with dropped caches are few enough to
stay cold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial

from benchmarks.front.lines import MOUNT, PLAIN, Lines, Wanted, alternate
from benchmarks.front.places import Data, Place, Scale, drop
from tierfs.bench import fio
from tierfs.bench.files import FileSet
from tierfs.bench.loops import BUFFERED, DIRECT, MMAP, read_random, read_streams
from tierfs.bench.processes import run_together

SECTION = "Reads of a large file"
BLOCK_BYTES = 4096
GB = 1e9
GIB = 1 << 30
FAR = 3600.0
FIO_WAYS = {
    "hot": (BUFFERED, 0.9),
    "mmap, hot": (MMAP, 0.9),
    "O_DIRECT": (DIRECT, 0.9),
    f"io_uring, queue of {fio.IO_URING_DEPTH}, O_DIRECT": (fio.IO_URING, 0.9),
}


def read_all(files: FileSet) -> float:
    """Front to back; GB/s."""
    outcome = run_together([read_streams(files.paths(), [size for _, size in files.entries])], limit_s=FAR)
    return outcome.bytes / outcome.seconds / GB


def again_and_again(files: FileSet, seconds: float) -> float:
    """The same for so long; GB/s."""
    sizes = [size for _, size in files.entries]
    outcome = run_together([read_streams(files.paths(), sizes, repeat=True)], limit_s=seconds)
    return outcome.bytes / outcome.seconds / GB


def at_random(files: FileSet, processes: int, reads: int, seed: int) -> float:
    """Blocks of 4 KiB, ``reads`` of them in all; operations per second."""
    sizes = [size for _, size in files.entries]
    tasks = [
        read_random(
            files.paths(), sizes, block_bytes=BLOCK_BYTES, seed=seed * 100 + number, reads=reads // processes
        )
        for number in range(processes)
    ]
    outcome = run_together(tasks, limit_s=FAR)
    return outcome.operations / outcome.seconds


def by_fio(files: FileSet, way: str, seconds: float, jobs: int = 1, seed: int = 0) -> float:
    """Blocks of 4 KiB at random; operations per second."""
    job = fio.FioJob(files, BLOCK_BYTES, jobs, way, sequential=False, seconds=seconds, seed=seed)
    outcome = fio.run(job)
    return outcome.operations / outcome.seconds


def after_drop(measure: Callable[[], float]) -> float:
    drop()
    return measure()


def measure(lines: Lines, scale: Scale, plain: Data, place: Place, rounds: Iterable[int]) -> None:
    """Raises BenchFailed."""
    files = {PLAIN: plain.large, MOUNT: place.data.large}
    for number in rounds:
        metric = lines.line(SECTION, "sequential 1 MiB, dropped", "GB/s", Wanted(0.95))
        cost = lines.line(
            SECTION,
            "CPU of front and engine, sequential, dropped",
            "s/GiB",
            Wanted(0.02, absolute=True, at_most=True),
            higher_is_better=False,
        )

        def counted(spent: list[float], measured: Callable[[], float]) -> float:
            before_s = place.cpu_s()
            rate = measured()
            spent.append((place.cpu_s() - before_s) * GIB / place.data.large.total_bytes)
            return rate

        spent: list[float] = []
        alternate(
            number,
            metric,
            {
                PLAIN: partial(after_drop, partial(read_all, files[PLAIN])),
                MOUNT: partial(after_drop, partial(counted, spent, partial(read_all, files[MOUNT]))),
            },
        )
        cost.add(MOUNT, spent[0])
        for processes in (1, 4):
            name = f"random 4 KiB, dropped, {processes} process{'es' if processes > 1 else ''}"
            reads = {
                who: partial(at_random, found, processes, scale.random_reads, number)
                for who, found in files.items()
            }
            alternate(
                number,
                lines.line(SECTION, name, "IOPS", Wanted(0.9)),
                {who: partial(after_drop, read) for who, read in reads.items()},
            )
        # What the reads at random have left are single pages among larger folios, which take longer to copy:
        # dropped, so that both sides have been read front to back.
        drop()
        for found in files.values():
            read_all(found)
        metric = lines.line(SECTION, "sequential 1 MiB, hot", "GB/s", Wanted(0.95))
        alternate(
            number,
            metric,
            {who: partial(again_and_again, found, scale.fio_s) for who, found in files.items()},
        )
        for words, (way, wanted) in FIO_WAYS.items():
            alternate(
                number,
                lines.line(SECTION, f"random 4 KiB, {words} (fio)", "IOPS", Wanted(wanted)),
                {who: partial(by_fio, found, way, scale.fio_s, seed=number) for who, found in files.items()},
            )


def measure_tmpfs(lines: Lines, scale: Scale, tmpfs: Data, place: Place, rounds: Iterable[int]) -> None:
    """A mount whose tier is on a tmpfs against files on the same tmpfs."""
    section = "A tier on a tmpfs, against the tmpfs"
    files = {PLAIN: tmpfs.large, MOUNT: place.data.large}
    for found in files.values():
        read_all(found)
    time.sleep(scale.pause_s)
    for number in rounds:
        alternate(
            number,
            lines.line(section, "sequential 1 MiB", "GB/s", Wanted(0.9)),
            {who: partial(again_and_again, found, scale.fio_s) for who, found in files.items()},
        )
        alternate(
            number,
            lines.line(section, "random 4 KiB (fio)", "IOPS", Wanted(0.9)),
            {who: partial(by_fio, found, BUFFERED, scale.fio_s, seed=number) for who, found in files.items()},
        )
