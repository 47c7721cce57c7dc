"""Loops that are timed, each in a process of its own, all started at the same moment.

A task prepares what is not to be timed (its buffers, its order of files) and returns the loop; the loop gets
a ``Recorder``, tells it each operation, and stops when it is told that time is over. Tasks run in forked
processes, as the workers of a data loader do: nothing of the parent is imported or opened again.

A process that hangs (a mount that does not answer) is given up: ``BenchFailed``.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import time
import traceback
import warnings
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkProcess
from multiprocessing.synchronize import Barrier
from typing import TypeVar

from tierfs.bench.histogram import Histogram
from tierfs.bench.result import Timeline
from tierfs.errors import BenchFailed, TierfsError

SLOT_NS = 100_000_000
PREPARE_LIMIT_S = 60.0
HANG_S = 60.0
"""How long after its time a loop may still be inside one operation."""
TICK_S = 0.25
NO_LIMIT_NS = 1 << 62


class Recorder:
    """What one loop did. ``stop_ns``: when it has to end, on the clock of ``time.monotonic_ns``.

    ``cut``: the loop sets it when it ended for that reason with something left to do.
    """

    __slots__ = ("_latencies", "_more", "_slots", "bytes", "cut", "start_ns", "stop_ns")

    def __init__(self) -> None:
        self.start_ns = 0
        self.stop_ns = NO_LIMIT_NS
        self.bytes = 0
        self.cut = False
        self._latencies = array("q")
        self._slots: dict[int, int] = {}
        self._more = 0

    def begin(self, limit_s: float | None) -> None:
        self.start_ns = time.monotonic_ns()
        if limit_s is not None:
            self.stop_ns = self.start_ns + int(limit_s * 1e9)

    def done(self, began_ns: int, size_bytes: int) -> int:
        """One operation that began then is over now. Returns now, which is when the next one begins."""
        now_ns = time.monotonic_ns()
        self._latencies.append(now_ns - began_ns)
        self.bytes += size_bytes
        slot = (now_ns - self.start_ns) // SLOT_NS
        self._slots[slot] = self._slots.get(slot, 0) + (size_bytes or 1)
        return now_ns

    def moved(self, size_bytes: int) -> int:
        """A part of an operation that ``finished`` will end. Returns now."""
        now_ns = time.monotonic_ns()
        self.bytes += size_bytes
        slot = (now_ns - self.start_ns) // SLOT_NS
        self._slots[slot] = self._slots.get(slot, 0) + size_bytes
        return now_ns

    def finished(self, began_ns: int) -> int:
        """The operation whose bytes ``moved`` has counted is over. Returns now."""
        now_ns = time.monotonic_ns()
        self._latencies.append(now_ns - began_ns)
        return now_ns

    def several(self, began_ns: int, count: int) -> int:
        """So many operations (one at least) that one request answered; its time counts once. Returns now."""
        now_ns = self.done(began_ns, 0)
        self._more += count - 1
        slot = (now_ns - self.start_ns) // SLOT_NS
        self._slots[slot] += count - 1
        return now_ns

    @property
    def operations(self) -> int:
        return len(self._latencies) + self._more

    def histogram(self) -> Histogram:
        return Histogram.of(self._latencies)

    def slots(self) -> dict[int, int]:
        return self._slots


T = TypeVar("T")
Loop = Callable[[Recorder], None]
Task = Callable[[], Loop]


@dataclass(slots=True)
class Outcome:
    """What tasks did together. ``seconds``: from the first start to the last end. ``cut``: one was cut short.

    ``cpu_s``: of the loops alone, system calls included. ``each``: (seconds, bytes) of every task in order.
    """

    seconds: float
    operations: int
    bytes: int
    latency: Histogram
    timeline: Timeline
    cpu_s: float
    cut: bool
    each: list[tuple[float, int]] = field(default_factory=list)


@dataclass(slots=True)
class _Report:
    """What one process sends back."""

    start_ns: int = 0
    end_ns: int = 0
    operations: int = 0
    bytes: int = 0
    latency: Histogram = field(default_factory=Histogram)
    slots: dict[int, int] = field(default_factory=dict)
    cpu_s: float = 0.0
    cut: bool = False
    failure: str = ""


def own_cost_ns() -> float:
    """What a loop's own book-keeping adds to each operation, measured now."""
    recorder = Recorder()
    recorder.begin(None)
    began_ns = recorder.start_ns
    rounds = 20_000
    for _ in range(rounds):
        began_ns = recorder.done(began_ns, 4096)
    return (began_ns - recorder.start_ns) / rounds


def run_together(
    tasks: Sequence[Task],
    *,
    limit_s: float | None = None,
    hang_s: float = HANG_S,
    tick: Callable[[], None] | None = None,
) -> Outcome:
    """Run every task in its own process and wait for all.

    ``limit_s``: when loops are told to end. ``tick`` is called a few times a second meanwhile. Raises
    BenchFailed with what the first failed process said, and leaves no process behind.
    """
    return run_groups([tasks], limit_s=limit_s, hang_s=hang_s, tick=tick)[0]


def run_groups(
    groups: Sequence[Sequence[Task]],
    *,
    limit_s: float | None = None,
    hang_s: float = HANG_S,
    tick: Callable[[], None] | None = None,
) -> list[Outcome]:
    """As ``run_together``, all at the same moment, with one outcome per group.

    Their timelines begin at the same moment too.
    """
    tasks = [task for group in groups for task in group]
    if not all(groups) or not tasks:
        raise ValueError("nothing to run")
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(len(tasks))
    connections: list[multiprocessing.connection.Connection] = []
    processes: list[ForkProcess] = []
    try:
        for task in tasks:
            mine, theirs = context.Pipe(duplex=False)
            connections.append(mine)
            process = context.Process(target=_child, args=(task, barrier, theirs, limit_s), daemon=True)
            _start(process)
            theirs.close()
            processes.append(process)
        give_up_s = None if limit_s is None else PREPARE_LIMIT_S + limit_s + hang_s
        reports = _collect(connections, give_up_s, tick)
        for process in processes:
            process.join()
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join(5)  # one that hangs in the kernel stays; it ends when the mount does
        for connection in connections:
            connection.close()
    failures = [report.failure for report in reports if report.failure]
    if failures:
        # Who waited for one that failed only says that the barrier broke.
        raise BenchFailed(next((text for text in failures if "BrokenBarrierError" not in text), failures[0]))
    first_ns = min(report.start_ns for report in reports)
    outcomes = []
    for group in groups:
        outcomes.append(_together(reports[: len(group)], first_ns))
        reports = reports[len(group) :]
    return outcomes


def call_in_child(function: Callable[[], T], *, tick: Callable[[], None] | None = None) -> T:
    """What ``function`` returns, run in a forked process: for what must not be opened in this one.

    Raises BenchFailed with what it raised.
    """
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(function, theirs), daemon=True)
    _start(process)
    theirs.close()
    try:
        while not mine.poll(TICK_S):
            if tick is not None:
                tick()
        answer: tuple[T | None, str] = mine.recv()
        process.join()
    except EOFError:
        raise BenchFailed("a process of the measurement died") from None
    finally:
        if process.is_alive():
            process.kill()
            process.join(5)
        mine.close()
    value, failure = answer
    if failure:
        raise BenchFailed(failure)
    return value  # type: ignore[return-value]  # None where T is None


def _start(process: ForkProcess) -> None:
    with warnings.catch_warnings():
        # Of forking beside other threads (Python 3.12). The command has none; in whoever has some, the child
        # takes no lock of theirs and ends without running anything of the parent's.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()


def delayed(task: Task, delay_s: float) -> Task:
    """The same, begun so much later than the others; its own time starts then."""

    def prepare() -> Loop:
        loop = task()

        def later(recorder: Recorder) -> None:
            time.sleep(delay_s)
            recorder.start_ns = time.monotonic_ns()
            loop(recorder)

        return later

    return prepare


def _collect(
    connections: Sequence[multiprocessing.connection.Connection],
    give_up_s: float | None,
    tick: Callable[[], None] | None,
) -> list[_Report]:
    started_s = time.monotonic()
    found: dict[int, _Report] = {}
    waiting = {connection: number for number, connection in enumerate(connections)}
    while waiting:
        for ready in multiprocessing.connection.wait(list(waiting), TICK_S):
            assert isinstance(ready, multiprocessing.connection.Connection)
            number = waiting.pop(ready)
            try:
                found[number] = ready.recv()
            except EOFError:
                found[number] = _Report(failure="a measuring process died")
        if tick is not None:
            tick()
        if waiting and give_up_s is not None and time.monotonic() - started_s > give_up_s:
            raise BenchFailed(
                f"{len(waiting)} of {len(connections)} measuring processes did not end within "
                f"{give_up_s:.0f} s: an operation hangs"
            )
    return [found[number] for number in range(len(connections))]


def _together(reports: Sequence[_Report], first_ns: int) -> Outcome:
    started_ns = min(report.start_ns for report in reports)
    slots: dict[int, int] = {}
    for report in reports:
        shift = (report.start_ns - first_ns) // SLOT_NS
        for slot, amount in report.slots.items():
            slots[slot + shift] = slots.get(slot + shift, 0) + amount
    total_bytes = sum(report.bytes for report in reports)
    return Outcome(
        seconds=(max(report.end_ns for report in reports) - started_ns) / 1e9,
        operations=sum(report.operations for report in reports),
        bytes=total_bytes,
        latency=Histogram.merged(report.latency for report in reports),
        timeline=Timeline(
            slot_s=SLOT_NS / 1e9,
            amounts=[slots.get(slot, 0) for slot in range(max(slots, default=-1) + 1)],
            count_of="bytes" if total_bytes else "operations",
        ),
        cpu_s=sum(report.cpu_s for report in reports),
        cut=any(report.cut for report in reports),
        each=[((report.end_ns - report.start_ns) / 1e9, report.bytes) for report in reports],
    )


def _child(
    task: Task,
    barrier: Barrier,
    connection: multiprocessing.connection.Connection,
    limit_s: float | None,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent cleans up
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        loop = task()
        recorder = Recorder()
        barrier.wait(PREPARE_LIMIT_S)
        before_s = _cpu_s()
        recorder.begin(limit_s)
        loop(recorder)
        end_ns = time.monotonic_ns()
        report = _Report(
            recorder.start_ns, end_ns, recorder.operations, recorder.bytes, Histogram(), recorder.slots(),
            _cpu_s() - before_s, recorder.cut,
        )  # fmt: skip
        report.latency = recorder.histogram()
    except BaseException as error:
        barrier.abort()
        report = _Report(failure=_failure_of(error))
    connection.send(report)
    connection.close()
    os._exit(0)  # no exit handlers of the parent: they are not meant for its copy


def _call(function: Callable[[], object], connection: multiprocessing.connection.Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        answer: tuple[object, str] = (function(), "")
    except BaseException as error:
        answer = (None, _failure_of(error))
    connection.send(answer)
    connection.close()
    os._exit(0)


def _failure_of(error: BaseException) -> str:
    if isinstance(error, TierfsError):
        return str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        name = error.filename
        where = os.fsdecode(name) if isinstance(name, str | bytes) else "" if name is None else str(name)
        return f"{where}: {error.strerror}" if where else error.strerror
    return traceback.format_exc()


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
