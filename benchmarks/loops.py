"""The timed inner loops, each in a process of its own.

A task is a function that prepares (opens nothing that is to be timed, allocates its buffers) and returns the
function that is timed; that one returns the amount that it moved. ``together`` starts all of them at one
moment and measures from the first start to the last end.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier

BUFFER_BYTES = 8 * 1024 * 1024
START_LIMIT_S = 60.0

Timed = Callable[[], int]
Task = Callable[[], Timed]


class LoopFailed(Exception):
    """A loop raised; the message is its traceback."""


@dataclass(frozen=True, slots=True)
class Outcome:
    seconds: float
    amount: int

    @property
    def rate(self) -> float:
        """Amount per second."""
        return self.amount / self.seconds if self.seconds else 0.0


def together(tasks: Sequence[Task]) -> Outcome:
    """Run every task in its own process. Raises LoopFailed."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(len(tasks))
    connections = []
    processes = []
    for task in tasks:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(task, barrier, theirs), daemon=True)
        process.start()
        theirs.close()
        connections.append(mine)
        processes.append(process)
    results = []
    for connection, process in zip(connections, processes, strict=True):
        try:
            results.append(connection.recv())
        except EOFError:
            results.append((0, 0, 0, "a measuring process died"))
        connection.close()
        process.join()
    failures = [failure for *_, failure in results if failure]
    if failures:
        raise LoopFailed(failures[0])
    seconds = (max(end for _, end, _, _ in results) - min(start for start, *_ in results)) / 1e9
    return Outcome(seconds, sum(amount for _, _, amount, _ in results))


def _child(task: Task, barrier: Barrier, connection: multiprocessing.connection.Connection) -> None:
    try:
        timed = task()
        barrier.wait(START_LIMIT_S)
        start = time.monotonic_ns()
        amount = timed()
        result = (start, time.monotonic_ns(), amount, "")
    except BaseException:
        barrier.abort()
        result = (0, 0, 0, traceback.format_exc())
    connection.send(result)
    connection.close()
    # No exit handlers of the parent: they stop servers and unmount.
    os._exit(0)


def buffer(size_bytes: int = BUFFER_BYTES) -> memoryview:
    """Page-aligned memory, touched once so that no page fault is timed."""
    memory = mmap.mmap(-1, size_bytes)
    for offset in range(0, size_bytes, mmap.PAGESIZE):
        memory[offset] = 1
    return memoryview(memory)


def read_files(paths: Sequence[str]) -> Task:
    """Open, read to the end, close; each path in turn. Amount: bytes."""

    def prepare() -> Timed:
        memory = [buffer()]

        def timed() -> int:
            total = 0
            for path in paths:
                fd = os.open(path, os.O_RDONLY)
                while count := os.readv(fd, memory):
                    total += count
                os.close(fd)
            return total

        return timed

    return prepare


def write_file(path: str, size_bytes: int, piece_bytes: int = BUFFER_BYTES, *, fsync: bool = True) -> Task:
    """Create, write (``piece_bytes`` at a time), fsync, close, as one rank saves its shard. Amount: bytes."""

    def prepare() -> Timed:
        piece = os.urandom(min(size_bytes, piece_bytes))

        def timed() -> int:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            left = size_bytes
            while left:
                left -= os.write(fd, memoryview(piece)[: min(left, len(piece))])
            if fsync:
                os.fsync(fd)
            os.close(fd)
            return size_bytes

        return timed

    return prepare


def _each(paths: Sequence[str], call: Callable[[str], object]) -> Task:
    def prepare() -> Timed:
        def timed() -> int:
            for path in paths:
                call(path)
            return len(paths)

        return timed

    return prepare


def _create(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))


def create_files(paths: Sequence[str]) -> Task:
    """Amount: files."""
    return _each(paths, _create)


def stat_files(paths: Sequence[str]) -> Task:
    """Amount: files."""
    return _each(paths, os.stat)


def unlink_files(paths: Sequence[str]) -> Task:
    """Amount: files."""
    return _each(paths, os.unlink)


def drop_page_cache(paths: Sequence[str]) -> None:
    """Make the kernel forget the data of these files (they must be written back already)."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
