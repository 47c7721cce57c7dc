"""Files read in the ordinary way, through the mount or from any other file system."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

THREADS = 16
"""Files that are asked for at once: each may have to come from the store."""
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # not to wait for the writer of a fifo

AnyPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]
T = TypeVar("T")
R = TypeVar("R")


def in_parallel(function: Callable[[T], R], items: Sequence[T]) -> list[R | OSError]:
    """``function`` of each item, several at once; an ``OSError`` becomes the item's result."""

    def guarded(item: T) -> R | OSError:
        try:
            return function(item)
        except OSError as error:
            return error

    if len(items) < 2:
        return [guarded(item) for item in items]
    with ThreadPoolExecutor(min(THREADS, len(items)), thread_name_prefix="tierfs-batch") as pool:
        return list(pool.map(guarded, items))


def open_file(path: AnyPath) -> tuple[int, os.stat_result]:
    """Descriptor and attributes of a regular file. Raises ``OSError`` with the path."""
    descriptor = os.open(path, _OPEN_FLAGS)
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            code = errno.EISDIR if stat.S_ISDIR(info.st_mode) else errno.EINVAL
            raise OSError(code, os.strerror(code), os.fsdecode(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, info


def read_descriptor(descriptor: int, size_bytes: int, path: AnyPath) -> memoryview:
    """All bytes; ``size_bytes`` is where the file probably ends. Raises ``OSError`` with the path."""
    data = bytearray(size_bytes)
    done = 0
    try:
        while done < len(data) and (count := os.preadv(descriptor, [memoryview(data)[done:]], done)):
            done += count
        while more := os.pread(descriptor, 1 << 20, done) if done == len(data) else b"":
            data += more
            done += len(more)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fsdecode(path)) from None
    return memoryview(data)[:done]


def read_file(path: AnyPath) -> memoryview:
    """All bytes. Raises ``OSError`` with the path."""
    descriptor, info = open_file(path)
    try:
        return read_descriptor(descriptor, info.st_size, path)
    finally:
        os.close(descriptor)
