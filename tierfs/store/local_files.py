"""System calls of the directory store that need a loop or a fall-back. Raises OSError only."""

from __future__ import annotations

import errno
import os

from tierfs.store.base import Buffer

_COPY_CHUNK_BYTES = 64 * 1024 * 1024
_NO_KERNEL_COPY = {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.EBADF}


def write_all(descriptor: int, body: Buffer, offset_bytes: int) -> None:
    rest = memoryview(body).cast("B")
    while rest:
        written = os.pwrite(descriptor, rest[:_COPY_CHUNK_BYTES], offset_bytes)
        offset_bytes += written
        rest = rest[written:]


def copy_range(source: int, source_offset: int, target: int, target_offset: int, length_bytes: int) -> None:
    """Copy in the kernel (sharing blocks where the file system can), else through memory.

    Raises OSError(ESTALE) if the source ends early.
    """
    in_kernel = True
    while length_bytes:
        if in_kernel:
            try:
                done = os.copy_file_range(
                    source, target, min(length_bytes, 1 << 30), source_offset, target_offset)
            except OSError as error:
                if error.errno not in _NO_KERNEL_COPY:
                    raise
                in_kernel = False
                continue
        else:
            data = os.pread(source, min(length_bytes, _COPY_CHUNK_BYTES), source_offset)
            write_all(target, data, target_offset)
            done = len(data)
        if not done:
            raise OSError(errno.ESTALE, "the source became shorter while it was copied")
        source_offset += done
        target_offset += done
        length_bytes -= done


def open_directory(path: bytes) -> int:
    """Open a directory that must be reached without any symbolic link; else NotADirectoryError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not is_reached_as(descriptor, path):
        os.close(descriptor)
        if not os.path.lexists(path):
            raise FileNotFoundError(errno.ENOENT, "removed while it was opened")
        raise NotADirectoryError(errno.ENOTDIR, "reached through a symbolic link")
    return descriptor


def is_reached_as(descriptor: int, path: bytes) -> bool:
    """Whether this absolute path, without any link in it, is (or was) the open file's own."""
    real = path_of_descriptor(descriptor)
    if real is None:
        return os.path.realpath(path) == path
    return real in (path, path + b" (deleted)")


def path_of_descriptor(descriptor: int) -> bytes | None:
    """The open file's own path as the kernel knows it, with " (deleted)" behind a removed one's.

    None without /proc.
    """
    try:
        return os.readlink(b"/proc/self/fd/%d" % descriptor)
    except OSError:
        return None


def fsync_directory(path: bytes) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
