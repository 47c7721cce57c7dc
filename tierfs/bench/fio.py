"""fio, for reads of blocks in many ways: it spends less time per read than a loop in Python does.

fio reads files that are there already; it is told never to make any. Its JSON (``json+``) has latencies as
counts per bin; they are put into ``Histogram``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tierfs.bench.files import FileSet
from tierfs.bench.histogram import Histogram
from tierfs.bench.loops import BUFFERED, DIRECT, MMAP
from tierfs.bench.processes import Outcome
from tierfs.bench.result import Timeline
from tierfs.errors import BenchFailed

IO_URING = "io_uring"
ENGINES = {
    BUFFERED: ("psync", False),
    DIRECT: ("psync", True),
    MMAP: ("mmap", False),
    IO_URING: ("io_uring", True),
}
"""Way to read: fio's engine, and whether with O_DIRECT."""
IO_URING_DEPTH = 16
HANG_S = 60.0
MISSING = "fio is not installed (Debian and Ubuntu: apt-get install fio)"


@dataclass(frozen=True, slots=True)
class FioJob:
    """``sequential``: each of ``jobs`` has files of its own; else each reads at random in all of them."""

    files: FileSet
    block_bytes: int
    jobs: int
    way: str
    sequential: bool
    seconds: float
    seed: int = 0

    def arguments(self) -> list[str]:
        engine, direct = ENGINES[self.way]
        paths = [path.replace("\\", "\\\\").replace(":", "\\:") for path in self.files.paths()]
        options = [
            "--output-format=json+",
            "--allow_file_create=0",
            "--readonly",
            f"--rw={'read' if self.sequential else 'randread'}",
            f"--bs={self.block_bytes}",
            f"--ioengine={engine}",
            f"--direct={int(direct)}",
            f"--iodepth={IO_URING_DEPTH if self.way == IO_URING else 1}",
            "--time_based",
            f"--runtime={max(round(self.seconds * 1000), 100)}ms",
            "--invalidate=0",
            "--norandommap",
            f"--randseed={self.seed + 1}",
            "--lat_percentiles=1",
            "--clat_percentiles=0",
            "--group_reporting",
            f"--file_service_type={'sequential' if self.sequential else 'roundrobin'}",
        ]
        sizes = [size for _, size in self.files.entries]
        for number in range(self.jobs):
            mine = slice(number % len(paths), None, self.jobs) if self.sequential else slice(None)
            options += [
                f"--name=job{number}",
                f"--filename={':'.join(paths[mine])}",
                f"--size={sum(sizes[mine])}",
            ]
        return options


def path() -> str | None:
    """Where fio is, or None."""
    return shutil.which("fio")


def run(job: FioJob, *, tick: Callable[[], None] | None = None) -> Outcome:
    """Raises BenchFailed with what fio said."""
    program = path()
    if program is None:
        raise BenchFailed(MISSING)
    for name in job.files.paths():
        if not os.path.isfile(name):  # fio would go on trying
            raise BenchFailed(f"{name}: No such file or directory")
    process = subprocess.Popen(
        [program, *job.arguments()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # its jobs are processes of their own: they have to end with it
    )
    give_up = time.monotonic() + job.seconds + HANG_S
    try:
        while True:
            try:
                output, complaints = process.communicate(timeout=0.25)
                break
            except subprocess.TimeoutExpired:
                if tick is not None:
                    tick()
                if time.monotonic() > give_up:
                    raise BenchFailed(f"fio did not end within {job.seconds + HANG_S:.0f} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        raise BenchFailed(f"fio: {_reason(complaints or output)}")
    return parse(output, complaints=complaints)


def parse(output: str, *, complaints: str = "") -> Outcome:
    """What one run of fio (``group_reporting``) says about its reads. Raises BenchFailed."""
    start = output.find("{")  # warnings come before it
    try:
        answer: Any = json.loads(output[start:]) if start >= 0 else None
        jobs: list[Any] = answer["jobs"]
        failed = [job for job in jobs if job["error"]]
        reads = [job["read"] for job in jobs]
        operations = sum(int(read["total_ios"]) for read in reads)
        if failed or not operations:
            raise BenchFailed(f"fio: {_reason(complaints or output[:start])}")
        latency = Histogram.merged(_latency(read) for read in reads)
        return Outcome(
            seconds=max(int(read["runtime"]) for read in reads) / 1000,
            operations=operations,
            bytes=sum(int(read["io_bytes"]) for read in reads),
            latency=latency,
            timeline=Timeline(slot_s=1.0, amounts=[]),
            cpu_s=sum((job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000 for job in jobs),
            cut=False,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise BenchFailed(f"the answer of fio cannot be read: {type(error).__name__}: {error}") from error


def _latency(read: Any) -> Histogram:
    """Total latencies; fio's bins are known by their middle."""
    found = read["lat_ns"]
    if "bins" not in found:
        raise KeyError("lat_ns without bins")
    histogram = Histogram.of_counts({int(middle): int(count) for middle, count in found["bins"].items()})
    if histogram.count:
        histogram.min_ns, histogram.max_ns = int(found["min"]), int(found["max"])
        histogram.sum_ns = round(float(found["mean"]) * histogram.count)
    return histogram


def _reason(text: str) -> str:
    """The line that says most."""
    found = re.search(r"func=(.*), error=(.*)", text)
    if found:
        return f"{found[1]}: {found[2].strip()}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in lines:
        if "error" in line.lower() or "fio:" in line:
            return line.removeprefix("fio: ")
    return lines[0] if lines else "it read nothing and said nothing"
