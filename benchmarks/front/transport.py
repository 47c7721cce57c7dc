"""``python -m benchmarks.front.transport``: requests through /dev/fuse against requests through io_uring.

Two mounts of the same files, which differ in ``--fuse-uring`` alone, measured in alternating order by one
process and by four. What the lines mean:

* *stat*: attributes that the kernel has to ask for each time (``AT_STATX_FORCE_SYNC``); the front answers.
* *open, read, close*: 4 KiB of a small file, past the page cache: three requests; the front answers.
* *read 4 KiB*, *read 1 MiB*: past the page cache, of a small file that stays open; the front answers from the
  tier.
* *attribute of the engine*: ``user.tierfs.*``, which the front hands on: what the way through it costs.
* *CPU*: of the front, the engine and the readers together.
* *hits while N wait*: how long *stat* takes, the 99th of a hundred in order, while so many reads wait for a
  store that does not answer; they begin on all CPUs alike. ``inf``: no end within 15 s.

``enable_uring`` of the kernel's fuse module is switched on for the run where it is off (root), and back then.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.loops import Task, Timed, buffer, together
from benchmarks.mounted import Mounted, MountFailed, fresh_mount
from benchmarks.quick import machine
from benchmarks.samples import Metric, table

PARAMETER = Path("/sys/module/fuse/parameters/enable_uring")
RING, DEVICE = "io_uring", "/dev/fuse"
FILES = 64
SMALL_BYTES = 1024 * 1024 - 4096
"""As large as what the front still opens and reads by itself."""
PIECE_BYTES = SMALL_BYTES // mmap.PAGESIZE * mmap.PAGESIZE
STORE_HANGS_S = 60
WAITING = (16, 64, 256)
WAIT_LIMIT_S = 15.0
_AT_FDCWD, _AT_STATX_FORCE_SYNC, _STATX_BASIC_STATS = -100, 0x2000, 0x7FF
"""Source: Linux ``include/uapi/linux/fcntl.h``, ``stat.h``."""
_libc = ctypes.CDLL(None, use_errno=True)
_statx_buffer = ctypes.create_string_buffer(256)


def stat_now(path: bytes) -> None:
    """stat(2) that the kernel may not answer from what it has."""
    if _libc.statx(_AT_FDCWD, path, _AT_STATX_FORCE_SYNC, _STATX_BASIC_STATS, _statx_buffer):
        raise OSError(ctypes.get_errno(), "statx", path)


def _repeat(count: int, call: Callable[[int], object]) -> Timed:
    def timed() -> int:
        for number in range(count):
            call(number)
        return count

    return timed


def stats(paths: list[str], count: int) -> Task:
    """Amount, as in all of these: calls."""
    names = [os.fsencode(path) for path in paths]
    return lambda: _repeat(count, lambda number: stat_now(names[number % len(names)]))


def open_read_close(paths: list[str], count: int) -> Task:
    def prepare() -> Timed:
        memory = [buffer(4096)]

        def call(number: int) -> None:
            fd = os.open(paths[number % len(paths)], os.O_RDONLY | os.O_DIRECT)
            os.preadv(fd, memory, 0)
            os.close(fd)

        return _repeat(count, call)

    return prepare


def reads(paths: list[str], size_bytes: int, count: int) -> Task:
    def prepare() -> Timed:
        memory = [buffer(size_bytes)]
        descriptors = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths]
        places = SMALL_BYTES // size_bytes

        def call(number: int) -> None:
            offset = number * 7919 % places * size_bytes
            if os.preadv(descriptors[number % len(descriptors)], memory, offset) != size_bytes:
                raise OSError("a read ended early")

        return _repeat(count, call)

    return prepare


def engine_attributes(paths: list[str], count: int) -> Task:
    return lambda: _repeat(count, lambda number: os.getxattr(paths[number % len(paths)], "user.tierfs.key"))


def pids_of(mounted: Mounted) -> list[int]:
    status = mounted.status()
    return [status["engine"]["pid"], status["front"]["pid"]]


def cpu_s(pids: list[int]) -> float:
    """CPU seconds so far of the two processes of the mount, and of processes that have ended here."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ticks / os.sysconf("SC_CLK_TCK") + ended.ru_utime + ended.ru_stime


@contextlib.contextmanager
def offered_by_kernel() -> Iterator[None]:
    """Requests may come through io_uring. Raises ``MountFailed`` where they cannot."""
    try:
        before = PARAMETER.read_text().strip()
        if before != "Y":
            PARAMETER.write_text("1")
    except OSError as error:
        raise MountFailed(f"{PARAMETER}: {error.strerror}; it needs Linux 6.14 and root") from None
    try:
        yield
    finally:
        if before != "Y":
            PARAMETER.write_text("0")


def make_local(mounted: Mounted, paths: list[str]) -> None:
    """Read all, and wait until the front answers for them by itself."""
    deadline = time.monotonic() + WAIT_LIMIT_S
    while True:
        before = mounted.status()["front"]["relayed"]
        together([reads(paths, PIECE_BYTES, 4 * len(paths))])
        if mounted.status()["front"]["relayed"] - before < len(paths) // 4:
            return
        if time.monotonic() > deadline:
            raise MountFailed("the files do not become local")
        time.sleep(0.3)


class Comparison:
    """Measures every line for both mounts, in random order in each round."""

    def __init__(self, mounts: dict[str, Mounted], calls: int, seed: int) -> None:
        self._mounts, self._calls = mounts, calls
        self._pids = {target: pids_of(mounted) for target, mounted in mounts.items()}
        self._chance = random.Random(seed)
        self.metrics: dict[str, Metric] = {}

    def _metric(self, name: str, unit: str, *, higher: bool) -> Metric:
        return self.metrics.setdefault(name, Metric(name, unit, higher))

    def measure_round(self) -> None:
        lines: list[tuple[str, int, Callable[[list[str], int], Task]]] = [
            ("stat", 1, stats),
            ("open, read, close", 2, open_read_close),
            ("read 4 KiB", 1, lambda paths, count: reads(paths, 4096, count)),
            ("read 1 MiB", 20, lambda paths, count: reads(paths, PIECE_BYTES, count)),
            ("attribute of the engine", 10, engine_attributes),
        ]
        for name, share, task_of in lines:
            for readers in (1, 4):
                count = max(self._calls // share // readers, 1)
                targets = list(self._mounts.items())
                self._chance.shuffle(targets)
                for target, mounted in targets:
                    paths = [str(mounted.mountpoint / f"f{number}") for number in range(FILES)]
                    before_s = cpu_s(self._pids[target])
                    rate = together([task_of(paths, count) for _ in range(readers)]).rate
                    spent_s = cpu_s(self._pids[target]) - before_s
                    label = f"{name}, {readers} reader{'s' if readers > 1 else ''}"
                    self._metric(label, "/s", higher=True).add(target, rate)
                    self._metric(f"  CPU, {readers} x {name}", "us each", higher=False).add(
                        target, spent_s * 1e6 / (count * readers)
                    )

    def measure_hits(self, faults: Path) -> None:
        """How long hits take while reads of other files wait for the store."""
        for waiting in (0, *WAITING):
            for target, mounted in self._mounts.items():
                metric = self._metric(f"hits while {waiting} wait, 99th of 100", "ms", higher=False)
                with hanging_reads(mounted, faults, waiting):
                    metric.add(target, worst_hit_s(mounted) * 1e3)


@contextlib.contextmanager
def hanging_reads(mounted: Mounted, faults: Path, count: int) -> Iterator[None]:
    """So many processes each wait for a file that only the store has."""
    rule = {"kind": "hang", "operation": "get", "key": "*absent*", "seconds": STORE_HANGS_S}
    _write(faults, [rule] if count else [])
    cpus = sorted(os.sched_getaffinity(0))
    readers = []
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                os.sched_setaffinity(0, {cpus[number % len(cpus)]})
                fd = os.open(mounted.mountpoint / f"absent{number}", os.O_RDONLY)
                os.pread(fd, 4096, 0)
            os._exit(0)
        readers.append(pid)
    time.sleep(1.0 if count else 0.0)  # they are all under way
    try:
        yield
    finally:
        for pid in readers:
            os.kill(pid, signal.SIGKILL)
        _write(faults, [])
        for pid in readers:
            os.waitpid(pid, 0)


def _write(faults: Path, rules: list[dict[str, object]]) -> None:
    draft = faults.with_suffix(".new")
    draft.write_text(json.dumps({"seed": 1, "rules": rules}))
    draft.rename(faults)
    time.sleep(0.2)  # a store looks at it every 0.1 s


def worst_hit_s(mounted: Mounted) -> float:
    """The 99th of a hundred, in a process that moves from CPU to CPU; inf: no end in time."""
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            cpus = sorted(os.sched_getaffinity(0))
            path = os.fsencode(mounted.mountpoint / "f0")
            took = []
            for number in range(100):
                os.sched_setaffinity(0, {cpus[number % len(cpus)]})
                start = time.perf_counter()
                stat_now(path)
                took.append(time.perf_counter() - start)
            os.write(sender, json.dumps(sorted(took)[98]).encode())
        os._exit(0)
    os.close(sender)
    try:
        deadline = time.monotonic() + WAIT_LIMIT_S
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                return float("inf")
            time.sleep(0.01)
        return float(json.loads(os.read(receiver, 100)))
    finally:
        os.close(receiver)


def run(options: argparse.Namespace, work_dir: Path) -> Comparison:
    """Raises ``MountFailed``, ``LoopFailed``."""
    store, faults = work_dir / "store", work_dir / "faults.json"
    store.mkdir()
    noise = random.Random(6).randbytes(SMALL_BYTES)
    for number in range(FILES):
        (store / f"f{number}").write_bytes(noise)
    for number in range(max(WAITING)):
        (store / f"absent{number}").write_bytes(b"only the store has this")
    os.environ |= {"TIERFS_RUN_DIR": str(work_dir / "run"), "TIERFS_FAULTS": str(faults)}
    _write(faults, [])
    with contextlib.ExitStack() as stack:
        stack.enter_context(offered_by_kernel())
        mounts = {}
        for target, setting in ((DEVICE, "off"), (RING, "on")):
            directory = work_dir / setting
            directory.mkdir()
            kept = ("--ttl", "86400", "--front", "native", "--fuse-uring", setting, "--read-ahead", "0")
            mounts[target] = mounted = stack.enter_context(
                fresh_mount(str(store), directory / "mnt", directory, tier_bytes=1 << 30, options=kept)
            )
            make_local(mounted, [str(mounted.mountpoint / f"f{number}") for number in range(FILES)])
            transport = mounted.status()["front"]["transport"]
            if transport != ("io_uring" if target == RING else "device"):
                raise MountFailed(mounted.status()["front"]["transport_why"])
        comparison = Comparison(mounts, options.calls, options.seed)
        for _ in range(options.rounds):
            comparison.measure_round()
        for _ in range(options.hits_rounds):
            comparison.measure_hits(faults)
        return comparison


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.front.transport",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hits-rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=20_000, help="stats of one round; of the others fewer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work-dir", help="on the disk that is to be measured")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # Told to stop, it still unmounts and puts the parameter back.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="tierfs-transport-", dir=options.work_dir) as directory:
            comparison = run(options, Path(directory))
    except MountFailed as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({
            "machine": machine(), "command": sys.argv,
            "metrics": {name: metric.as_json(RING) for name, metric in comparison.metrics.items()},
        }))  # fmt: skip
    else:
        print(f"machine   {machine()}")
        print(table(comparison.metrics.values(), RING, [DEVICE]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
