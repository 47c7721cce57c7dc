"""The loops that are timed, on files. Each function returns a task for ``processes.run_together``.

Ways to read: ``buffered`` (read and pread through the page cache), ``direct`` (O_DIRECT: past it, block and
offset aligned), ``mmap``. A file that is shorter than it should be fails the measurement: figures of wrong
reads are worth nothing.
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
import time
from collections.abc import Callable, Sequence

from tierfs.bench.processes import Loop, Recorder, Task
from tierfs.errors import BenchFailed

BUFFERED, DIRECT, MMAP = "buffered", "direct", "mmap"
WAYS = (BUFFERED, DIRECT, MMAP)
WRITE_BYTES = 1024 * 1024


def aligned_buffer(size_bytes: int) -> memoryview:
    """Page-aligned memory, touched once so that no page fault is timed."""
    memory = mmap.mmap(-1, size_bytes)
    for offset in range(0, size_bytes, mmap.PAGESIZE):
        memory[offset] = 1
    return memoryview(memory)


def read_files(
    paths: Sequence[str], sizes: Sequence[int], *, block_bytes: int = 1024 * 1024, repeat: bool = False
) -> Task:
    """Open, read to the end, close; each in turn. An operation is a file.

    ``repeat``: again and again until time is over.
    """

    def prepare() -> Loop:
        memory = [aligned_buffer(block_bytes)]

        def loop(recorder: Recorder) -> None:
            began = time.monotonic_ns()
            pairs = list(zip(paths, sizes, strict=True))
            for path, size in itertools.cycle(pairs) if repeat else pairs:
                fd = os.open(path, os.O_RDONLY)
                total = 0
                while count := os.readv(fd, memory):
                    total += count
                os.close(fd)
                if total != size:
                    raise BenchFailed(f"{path}: read {total} of {size} bytes")
                began = recorder.done(began, total)
                if began >= recorder.stop_ns:
                    recorder.cut = not repeat
                    return

        return loop

    return prepare


def read_stream(
    path: str, length: int, *, offset: int = 0, block_bytes: int = 1024 * 1024, way: str = BUFFERED
) -> Task:
    """One file, or a part of it, from front to back. An operation is a block."""
    return _read_parts([(path, offset, length)], block_bytes, way, repeat=False)


def read_streams(
    paths: Sequence[str],
    sizes: Sequence[int],
    *,
    block_bytes: int = 1024 * 1024,
    way: str = BUFFERED,
    repeat: bool = False,
) -> Task:
    """Files one after the other, each from front to back; with ``repeat`` until time is over."""
    parts = [(path, 0, size) for path, size in zip(paths, sizes, strict=True)]
    return _read_parts(parts, block_bytes, way, repeat=repeat)


def _read_parts(parts: Sequence[tuple[str, int, int]], block_bytes: int, way: str, *, repeat: bool) -> Task:
    def prepare() -> Loop:
        memory = aligned_buffer(block_bytes)

        def loop(recorder: Recorder) -> None:
            began = recorder.start_ns
            for path, position, length in itertools.cycle(parts) if repeat else parts:
                end = position + length
                with _Reader(path, way, memory) as reader:
                    while position < end:
                        count = min(reader.read(position), end - position)
                        if count <= 0:
                            raise BenchFailed(f"{path}: ends at {position} of {end} bytes")
                        position += count
                        began = recorder.done(began, count)
                        if began >= recorder.stop_ns:
                            recorder.cut = not repeat
                            return

        return loop

    return prepare


def read_random(
    paths: Sequence[str],
    sizes: Sequence[int],
    *,
    block_bytes: int = 4096,
    way: str = BUFFERED,
    seed: int = 0,
    reads: int | None = None,
    chain: int = 1,
) -> Task:
    """Blocks at random aligned places, until time is over or after ``reads`` operations.

    An operation is ``chain`` blocks one after the other, as a query that follows a graph reads them.
    """

    def prepare() -> Loop:
        chosen = random.Random(seed)
        blocks = [size // block_bytes for size in sizes]
        if not any(blocks):
            raise BenchFailed(f"no file holds a block of {block_bytes} bytes")

        def loop(recorder: Recorder) -> None:
            memory = aligned_buffer(block_bytes)
            readers = [_Reader(path, way, memory) for path in paths]
            usable = [(reader, count) for reader, count in zip(readers, blocks, strict=True) if count]
            left = -1 if reads is None else reads
            try:
                began = time.monotonic_ns()
                while left:
                    left -= 1
                    for _ in range(chain):
                        reader, count = (
                            usable[chosen.randrange(len(usable))] if len(usable) > 1 else usable[0]
                        )
                        place = chosen.randrange(count) * block_bytes
                        if reader.read(place) != block_bytes:
                            raise BenchFailed(f"{reader.path}: short read at {place}")
                    began = recorder.done(began, block_bytes * chain)
                    if began >= recorder.stop_ns:
                        return
            finally:
                for reader in readers:
                    reader.close()

        return loop

    return prepare


def write_file(path: str, size_bytes: int, *, fsync: bool = True) -> Task:
    """Create, write in blocks of 1 MiB, fsync, close: one rank saves its shard. An operation is the file.

    When time is over, the rest of it is not written.
    """

    def prepare() -> Loop:
        piece = os.urandom(min(max(size_bytes, 1), WRITE_BYTES))

        def loop(recorder: Recorder) -> None:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                left = size_bytes
                while left:
                    count = os.write(fd, memoryview(piece)[: min(left, len(piece))])
                    left -= count
                    if recorder.moved(count) >= recorder.stop_ns and left:
                        recorder.cut = True
                        break
                if fsync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            recorder.finished(recorder.start_ns)

        return loop

    return prepare


def walk_tree(root: str, *, open_files: bool = True, rounds: int | None = 1) -> Task:
    """List every directory, stat every entry, open and close every file. An operation is an entry.

    ``rounds`` None: again and again until time is over.
    """

    def prepare() -> Loop:
        def loop(recorder: Recorder) -> None:
            left = -1 if rounds is None else rounds
            while left:
                left -= 1
                waiting = [root]
                began = time.monotonic_ns()
                while waiting:
                    with os.scandir(waiting.pop()) as entries:
                        for entry in entries:
                            entry.stat(follow_symlinks=False)
                            if entry.is_dir(follow_symlinks=False):
                                waiting.append(entry.path)
                            elif open_files:
                                os.close(os.open(entry.path, os.O_RDONLY))
                            began = recorder.done(began, 0)
                    if began >= recorder.stop_ns:
                        recorder.cut = rounds is not None and bool(waiting)
                        return

        return loop

    return prepare


def on_each(paths: Sequence[str], operation: str) -> Task:
    """``create``, ``stat``, ``open`` or ``unlink`` each path. An operation is a file."""
    calls: dict[str, Callable[[str], object]] = {
        "create": _create,
        "stat": os.stat,
        "open": _open,
        "unlink": os.unlink,
    }
    call = calls[operation]

    def prepare() -> Loop:
        def loop(recorder: Recorder) -> None:
            began = time.monotonic_ns()
            for path in paths:
                call(path)
                began = recorder.done(began, 0)
                if began >= recorder.stop_ns:
                    recorder.cut = True
                    return

        return loop

    return prepare


def _create(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))


def _open(path: str) -> None:
    os.close(os.open(path, os.O_RDONLY))


class _Reader:
    """One open file, read in blocks of the size of ``memory`` at any place."""

    def __init__(self, path: str, way: str, memory: memoryview) -> None:
        self.path = path
        self._memory = [memory]
        self._block_bytes = len(memory)
        self._fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if way == DIRECT else 0))
        self._map = mmap.mmap(self._fd, 0, prot=mmap.PROT_READ) if way == MMAP else None

    def read(self, offset: int) -> int:
        """The block there, into memory; how many bytes it had."""
        if self._map is not None:
            return len(self._map[offset : offset + self._block_bytes])
        return os.preadv(self._fd, self._memory, offset)

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
        os.close(self._fd)

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
