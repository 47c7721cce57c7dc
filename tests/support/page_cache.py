"""What the kernel has of a file in memory, for tests that want it read from the device."""

from __future__ import annotations

import ctypes
import errno
import os

from tests.support.mount import wait_until

_SYS_CACHESTAT = 451
"""Linux 6.5, all architectures."""


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    _fields_ = (
        ("cached", ctypes.c_uint64),
        ("dirty", ctypes.c_uint64),
        ("writeback", ctypes.c_uint64),
        ("evicted", ctypes.c_uint64),
        ("recently_evicted", ctypes.c_uint64),
    )


def cached_pages(descriptor: int) -> int | None:
    """How many of the file's; None on a kernel that does not tell. Raises ``OSError``."""
    libc = ctypes.CDLL(None, use_errno=True)
    everything, pages = _Range(0, 0), _Pages()
    arguments = (ctypes.byref(everything), ctypes.byref(pages), 0)
    if libc.syscall(_SYS_CACHESTAT, descriptor, *arguments):
        code = ctypes.get_errno()
        if code == errno.ENOSYS:
            return None
        raise OSError(code, os.strerror(code))
    return int(pages.cached)


def drop_pages(descriptor: int) -> None:
    """Have the kernel forget the pages of a file that nobody writes.

    Asked once it leaves out what somebody uses just then, or has just used on another processor.
    """

    def is_gone() -> bool:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return not cached_pages(descriptor)

    wait_until(is_gone, "a page cache without the file")
