"""System calls on ranges of one local file: allocate, free, zero, find, copy. Blocking; worker threads.

Raises ``OSError``. Where a file system lacks a call, the next best does the same to the bytes.
"""

from __future__ import annotations

import ctypes
import errno
import os

from tierfs.cache import device

_KEEP_SIZE = 1
_ZERO_RANGE = 16
"""Source: Linux ``include/uapi/linux/falloc.h``."""
_LACKING = (errno.EOPNOTSUPP, errno.ENOSYS)
_NOT_BETWEEN_THESE = (errno.EXDEV, errno.EINVAL, errno.EBADF, *_LACKING)
_PIECE_BYTES = 1024 * 1024

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate64.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def allocate(fd: int, offset_bytes: int, length_bytes: int, *, keep_size: bool) -> None:
    """Space for that range; without ``keep_size`` the file grows to its end."""
    _fallocate(fd, _KEEP_SIZE if keep_size else 0, offset_bytes, length_bytes)


def clear(fd: int, offset_bytes: int, length_bytes: int) -> None:
    """Zeros, without space if the file system can. The range lies inside the file."""
    if not device.punch(fd, offset_bytes, length_bytes):
        _write_zeros(fd, offset_bytes, offset_bytes + length_bytes)


def zero(fd: int, offset_bytes: int, length_bytes: int, *, keep_size: bool) -> None:
    """Zeros with space of their own; without ``keep_size`` the file grows to the end of the range."""
    mode = _ZERO_RANGE | (_KEEP_SIZE if keep_size else 0)
    try:
        _fallocate(fd, mode, offset_bytes, length_bytes)
    except OSError as error:
        if error.errno not in _LACKING:
            raise
        inside = min(offset_bytes + length_bytes, os.fstat(fd).st_size) - offset_bytes
        if inside > 0:
            clear(fd, offset_bytes, inside)
        allocate(fd, offset_bytes, length_bytes, keep_size=keep_size)


def data_bytes(fd: int, offset_bytes: int, end_bytes: int) -> int:
    """How much of that range is not a hole. Only for accounting."""
    found, position = 0, offset_bytes
    while position < end_bytes:
        start = seek(fd, position, data=True)
        if start is None or start >= end_bytes:
            break
        stop = seek(fd, start, data=False)
        position = end_bytes if stop is None else min(stop, end_bytes)
        found += position - start
    return found


def seek(fd: int, offset_bytes: int, *, data: bool) -> int | None:
    """Where data (or a hole) begins at or behind the offset; None: nowhere. The end of the file is a hole."""
    try:
        return os.lseek(fd, offset_bytes, os.SEEK_DATA if data else os.SEEK_HOLE)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        if error.errno in (errno.EINVAL, *_LACKING):
            size = os.fstat(fd).st_size
            if offset_bytes >= size:
                return None
            return offset_bytes if data else size
        raise


def copy(source: int, source_bytes: int, target: int, target_bytes: int, length_bytes: int) -> int:
    """Returns how many bytes were copied before the source ended, or the first error came."""
    copied = 0
    by_kernel = True
    while copied < length_bytes:
        left = length_bytes - copied
        try:
            if by_kernel:
                some = os.copy_file_range(source, target, left, source_bytes + copied, target_bytes + copied)
            else:
                data = os.pread(source, min(left, _PIECE_BYTES), source_bytes + copied)
                some = os.pwrite(target, data, target_bytes + copied)
        except OSError as error:
            if not by_kernel or error.errno not in _NOT_BETWEEN_THESE:
                break
            by_kernel = False
            continue
        if not some:
            break
        copied += some
    return copied


def _fallocate(fd: int, mode: int, offset_bytes: int, length_bytes: int) -> None:
    while _libc.fallocate64(fd, mode, offset_bytes, length_bytes) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def _write_zeros(fd: int, offset_bytes: int, end_bytes: int) -> None:
    zeros = bytes(min(_PIECE_BYTES, end_bytes - offset_bytes))
    while offset_bytes < end_bytes:
        piece = zeros[: end_bytes - offset_bytes]
        device.pwrite_all(fd, piece, offset_bytes)
        offset_bytes += len(piece)
