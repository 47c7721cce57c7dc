"""Bytes that can be checked: every page says which file and which page of it it is.

Everything else is random, so that nothing compresses or de-duplicates it. What is read is hashed in pieces
as it comes, which costs a few percent of reading it, for everybody alike, and compared with the hash of
what was written; of random reads each page is compared byte by byte. A wrong byte is a ``WrongBytes``, and
the measurement has failed.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence

import xxhash

from benchmarks.compare.peer import MIB
from tierfs.bench.files import FileSet
from tierfs.bench.loops import aligned_buffer
from tierfs.bench.processes import Loop, Recorder, Task
from tierfs.errors import BenchFailed

PAGE_BYTES = 4096
PIECE_BYTES = MIB
STAMP_BYTES = 16


class WrongBytes(BenchFailed):
    """What was read is not what was written."""


class Pages:
    """The content of the files of a set, by number of the file."""

    def __init__(self, seed: int) -> None:
        self._filler = random.Random(f"{seed} pages").randbytes(PIECE_BYTES)

    def page(self, file: int, number: int) -> bytes:
        """One whole page."""
        start = number * PAGE_BYTES % PIECE_BYTES
        return stamp(file, number) + self._filler[start + STAMP_BYTES : start + PAGE_BYTES]

    def piece(self, file: int, offset: int, length: int) -> bytes:
        """``length`` bytes at a multiple of ``PIECE_BYTES``; at most that many."""
        piece = bytearray(self._filler[:length])
        first = offset // PAGE_BYTES
        for start in range(0, length, PAGE_BYTES):
            piece[start : start + STAMP_BYTES] = stamp(file, first + start // PAGE_BYTES)
        return bytes(piece[:length])

    def whole(self, file: int, size_bytes: int) -> bytes:
        return b"".join(
            self.piece(file, offset, min(PIECE_BYTES, size_bytes - offset))
            for offset in range(0, size_bytes, PIECE_BYTES)
        )

    def hashes(self, file: int, size_bytes: int) -> list[int]:
        """Of each piece of a file."""
        return [
            xxhash.xxh3_64_intdigest(self.piece(file, offset, min(PIECE_BYTES, size_bytes - offset)))
            for offset in range(0, size_bytes, PIECE_BYTES)
        ]


def stamp(file: int, page: int) -> bytes:
    return file.to_bytes(8, "little") + page.to_bytes(8, "little")


def read_checked(files: FileSet, numbers: Sequence[int], base: int = 0) -> Task:
    """Open, read to the end, check, close; these files of the set in turn. An operation is a file.

    ``base`` is added to the number of a file to find its content.
    """

    def prepare() -> Loop:
        pages = Pages(files.seed)
        memory = aligned_buffer(PIECE_BYTES)
        paths = files.paths()
        expected = [pages.hashes(base + number, files.entries[number][1]) for number in numbers]

        def loop(recorder: Recorder) -> None:
            began = time.monotonic_ns()
            for number, hashes in zip(numbers, expected, strict=True):
                path, size = paths[number], files.entries[number][1]
                fd = os.open(path, os.O_RDONLY)
                try:
                    for piece, wanted in enumerate(hashes):
                        length = min(PIECE_BYTES, size - piece * PIECE_BYTES)
                        filled = _fill(fd, memory[:length])
                        if filled != length or xxhash.xxh3_64_intdigest(memory[:length]) != wanted:
                            raise WrongBytes(f"{path}: wrong bytes in the {length} at {piece * PIECE_BYTES}")
                        recorder.moved(length)
                        if piece and time.monotonic_ns() >= recorder.stop_ns:
                            recorder.cut = True
                            return
                    if os.readv(fd, [memory[:1]]):
                        raise WrongBytes(f"{path}: is longer than the {size} bytes that were written")
                finally:
                    os.close(fd)
                began = recorder.finished(began)
                if began >= recorder.stop_ns:
                    recorder.cut = True
                    return

        return loop

    return prepare


def _fill(fd: int, memory: memoryview) -> int:
    """Read until the memory is full or the file ends; how many bytes."""
    filled = 0
    while filled < len(memory) and (count := os.readv(fd, [memory[filled:]])):
        filled += count
    return filled


def read_pages_checked(files: FileSet, *, reads: int, seed: int) -> Task:
    """Single pages at random places of all files, which are open throughout. An operation is a page."""

    def prepare() -> Loop:
        pages = Pages(files.seed)
        chosen = random.Random(seed)
        places = []
        for _ in range(reads):
            number = chosen.randrange(len(files.entries))
            places.append((number, chosen.randrange(files.entries[number][1] // PAGE_BYTES)))
        memory = aligned_buffer(PAGE_BYTES)
        paths = files.paths()

        def loop(recorder: Recorder) -> None:
            fds = [os.open(path, os.O_RDONLY) for path in paths]
            try:
                began = time.monotonic_ns()
                for number, page in places:
                    count = os.preadv(fds[number], [memory], page * PAGE_BYTES)
                    if count != PAGE_BYTES or memory.tobytes() != pages.page(number, page):
                        raise WrongBytes(f"{paths[number]}: wrong bytes in page {page}")
                    began = recorder.done(began, PAGE_BYTES)
                    if began >= recorder.stop_ns:
                        recorder.cut = True
                        return
            finally:
                for fd in fds:
                    os.close(fd)

        return loop

    return prepare


def write_checked(path: str, size_bytes: int, *, seed: int, number: int, fsync: bool = True) -> Task:
    """Create, write in pieces, fsync, close, as one rank saves its shard. An operation is the file."""

    def prepare() -> Loop:
        pages = Pages(seed)

        def loop(recorder: Recorder) -> None:
            write_whole(path, pages, number, size_bytes, fsync=fsync, recorder=recorder)
            recorder.finished(recorder.start_ns)

        return loop

    return prepare


def write_whole(
    path: str, pages: Pages, number: int, size_bytes: int, *, fsync: bool, recorder: Recorder | None = None
) -> None:
    """Write one file. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for offset in range(0, size_bytes, PIECE_BYTES):
            piece = memoryview(pages.piece(number, offset, min(PIECE_BYTES, size_bytes - offset)))
            while piece:
                count = os.write(fd, piece)
                piece = piece[count:]
                if recorder is not None:
                    recorder.moved(count)
        if fsync:
            os.fsync(fd)
    finally:
        os.close(fd)


def write_all(files: FileSet, base: int = 0) -> None:
    """Write a whole set, for those who read it later; on the device at the end."""
    pages = Pages(files.seed)
    os.makedirs(files.root, exist_ok=True)
    for directory in files.directories():
        os.makedirs(os.path.join(files.root, directory), exist_ok=True)
    for number, (path, (_, size)) in enumerate(zip(files.paths(), files.entries, strict=True)):
        write_whole(path, pages, base + number, size, fsync=True)
