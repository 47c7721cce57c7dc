"""The files of one tier directory: paths, and the few system calls that Python lacks.

Layout (everything 0700 or 0600)::

    TIER/lock                 flock of the engine that uses the tier
    TIER/index.lmdb/          see ``index``
    TIER/index.lmdb/ballast   space that is given up when the index cannot be written for lack of it
    TIER/objects/ab/<32 hex>  clean contents, named by content id
    TIER/segments/<16 hex>    small clean contents, many in one file, see ``segments``
    TIER/dirty/               dirty contents, see ``dirty``

Every function blocks (a local file system, as a rule for microseconds): worker threads, except where it
says "never blocks". Raises ``OSError``.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import stat
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Generic, TypeVar

from tierfs.boot import boot_id as boot_id
from tierfs.types import ContentId

_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_SYS_OPENAT2 = 437
_RESOLVE_CACHED = 0x20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate64.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.syncfs.argtypes = (ctypes.c_int,)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_AT_FDCWD = -100

K = TypeVar("K", bound=Hashable)


class TierInUse(OSError):
    """Another process (or another mount of this one) holds the tier."""


def object_path(root: str, content_id: ContentId) -> str:
    name = content_id.hex()
    return f"{root}/objects/{name[:2]}/{name}"


def prepare(root: Path) -> int:
    """Make the directories and take the lock; returns its descriptor. Raises ``TierInUse``.

    A directory in a place that others can write to (``/dev/shm``) must be ours, and no link.
    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = os.lstat(root)
    if not stat.S_ISDIR(info.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "a tier must be a directory", str(root))
    if info.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "the tier's directory belongs to another user", str(root))
    lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise TierInUse(errno.EBUSY, "the tier is used by another mount", str(root)) from error
    try:
        for name in ("objects", "segments", "dirty"):
            (root / name).mkdir(mode=0o700, exist_ok=True)
    except BaseException:
        os.close(lock)
        raise
    return lock


def open_for_fill(path: str, *, create: bool) -> int:
    """Open a file of clean contents for writing; ``create``: made if it is not there, its directory too."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        if not create:
            raise
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        return os.open(path, flags, 0o600)


def pwrite_all(fd: int, data: bytes | bytearray | memoryview, offset_bytes: int) -> None:
    """All of ``data``, however many calls it takes."""
    written = os.pwrite(fd, data, offset_bytes)
    if written == len(data):
        return
    view = memoryview(data)
    while written < len(view):
        count = os.pwrite(fd, view[written:], offset_bytes + written)
        if count <= 0:
            raise OSError(errno.EIO, "pwrite wrote nothing")
        written += count


def pread_all(fd: int, length_bytes: int, offset_bytes: int) -> bytes:
    """Up to ``length_bytes`` bytes; fewer only at the end of the file."""
    data = os.pread(fd, length_bytes, offset_bytes)
    if len(data) == length_bytes or not data:
        return data
    pieces = [data]
    have = len(data)
    while have < length_bytes:
        data = os.pread(fd, length_bytes - have, offset_bytes + have)
        if not data:
            break
        pieces.append(data)
        have += len(data)
    return b"".join(pieces)


def can_punch(root: Path) -> bool:
    """This file system can free a part of a file."""
    fd = os.open(root / "lock", os.O_RDWR | os.O_CLOEXEC)
    try:
        return punch(fd, 0, 4096)
    except OSError:
        return False
    finally:
        os.close(fd)


def punch(fd: int, offset_bytes: int, length_bytes: int) -> bool:
    """Free that range of the file; False if the file system cannot."""
    mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    while _libc.fallocate64(fd, mode, offset_bytes, length_bytes) != 0:
        code = ctypes.get_errno()
        if code == errno.EINTR:
            continue
        if code in (errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        raise OSError(code, os.strerror(code))
    return True


def has_hole(fd: int, offset_bytes: int, end_bytes: int) -> bool:
    """Some of that range is (or lies behind) a hole: writing it may allocate. Only for accounting."""
    try:
        return os.lseek(fd, offset_bytes, os.SEEK_HOLE) < end_bytes
    except OSError as error:
        if error.errno == errno.ENXIO:
            return True
        raise


def data_ranges(fd: int, size_bytes: int) -> list[tuple[int, int]]:
    """(start, end) of what is not a hole. Only for accounting."""
    found: list[tuple[int, int]] = []
    position = 0
    while position < size_bytes:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                break
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return [(0, size_bytes)]
            raise
        position = min(os.lseek(fd, start, os.SEEK_HOLE), size_bytes)
        if start >= size_bytes:
            break
        found.append((start, position))
    return found


def sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file_system(root: str) -> None:
    """Everything written to the file system of ``root`` reaches the device. May take long."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), root)
    finally:
        os.close(fd)


def add_ballast(root: str, nbytes: int) -> None:
    """Set that much space aside, unless it is already. Does nothing where there is too little."""
    path = f"{root}/index.lmdb/ballast"
    if os.path.exists(path):
        return
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError:
        os.unlink(path)
    finally:
        os.close(fd)


def drop_ballast(root: str) -> bool:
    """Give the space up; False if there was none."""
    try:
        os.unlink(f"{root}/index.lmdb/ballast")
    except OSError:
        return False
    return True


def free_bytes(root: str) -> tuple[int, int]:
    """(available to us, size) of the file system."""
    info = os.statvfs(root)
    return info.f_bavail * info.f_frsize, info.f_blocks * info.f_frsize


def identity(file: int | str) -> tuple[int, int]:
    """(device, inode): whether two names or descriptors mean one file."""
    info = os.stat(file)
    return info.st_dev, info.st_ino


def open_to_lend(path: str) -> int:
    """For others to open the file again by. Blocks for as long as open(2) takes."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)


def close_and_look_for_writers(fd: int | None, path: str) -> bool:
    """Close ``fd``; then whether the file is open for writing in this process or any other, or the kernel.

    A read lease is only granted while it is not. Source: fcntl(2), F_SETLEASE. Whoever opens the file for
    writing in the moment that we have it breaks it, which the kernel tells by a signal: one that is ignored,
    instead of SIGIO, which ends the process.
    """
    if fd is not None:
        os.close(fd)
    fd = open_to_lend(path)
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    finally:
        os.close(fd)
    return False


def read_alone(fd: int) -> None:
    """The kernel reads what is asked for, and not what lies beside: that is of other contents.

    What is in the page cache is believed. Never blocks.
    """
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


def unlink_if_there(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


class OpenFiles(Generic[K]):
    """Descriptors kept open, the least recently used closed first. Trio thread only.

    4,000 open handles of an application cost no descriptor here; only recent reads and writes do. A
    descriptor that a worker thread uses is held, and closed when given back if it fell out meanwhile.
    ``never_blocks``: on this file system ``open`` needs no device (tmpfs). ``shared``: see ``read_alone``.
    """

    def __init__(self, path_of: Callable[[K], str], *, write: bool = False, limit: int = 512,
                 never_blocks: bool = False, shared: bool = False) -> None:
        self._path_of = path_of
        self._shared = shared
        self._flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW
        self._how = _OpenHow(self._flags, 0, _RESOLVE_CACHED)
        self._limit = limit
        self._never_blocks = never_blocks
        self._open: dict[K, int] = {}
        self._held: dict[int, int] = {}
        self._doomed: set[int] = set()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, name: K) -> int | None:
        """A descriptor if there is one, or if it can be had without waiting."""
        fd = self._open.pop(name, None)
        if fd is None:
            path = self._path_of(name)
            if self._never_blocks:
                try:
                    fd = os.open(path, self._flags)
                except OSError:
                    return None
            else:
                fd = self._open_cached(path)
                if fd is None:
                    return None
            if self._shared:
                read_alone(fd)
            self._trim()
        self._open[name] = fd
        return fd

    def peek(self, name: K) -> int | None:
        """A descriptor if there is one already."""
        return self._open.get(name)

    def _open_cached(self, path: str) -> int | None:
        """Open if the path is in the kernel's caches. Source: openat2(2), RESOLVE_CACHED (Linux 5.12)."""
        fd: int = _libc.syscall(_SYS_OPENAT2, _AT_FDCWD, os.fsencode(path), ctypes.byref(self._how),
                                ctypes.sizeof(_OpenHow))
        return fd if fd >= 0 else None

    def open_blocking(self, name: K) -> int:
        """Worker thread: open without keeping; ``add`` it, or close it. Raises ``OSError``."""
        return os.open(self._path_of(name), self._flags)

    def add(self, name: K, fd: int) -> int:
        """Take over a descriptor that a worker opened; returns the one to use."""
        known = self._open.get(name)
        if known is not None:
            os.close(fd)
            return known
        self._trim()
        self._open[name] = fd
        return fd

    def hold(self, fd: int) -> None:
        """A worker is going to use it."""
        self._held[fd] = self._held.get(fd, 0) + 1

    def release(self, fd: int) -> None:
        left = self._held[fd] - 1
        if left:
            self._held[fd] = left
            return
        del self._held[fd]
        if fd in self._doomed:
            self._doomed.discard(fd)
            os.close(fd)

    def detach(self, name: K) -> int | None:
        """The file is going, or changes its meaning: a descriptor for the caller to close in a worker (the
        last one of an unlinked file frees its blocks, which takes time), or None."""
        fd = self._open.pop(name, None)
        if fd is not None and fd in self._held:
            self._doomed.add(fd)
            return None
        return fd

    def close(self) -> None:
        """Close all that nobody holds."""
        for fd in self._open.values():
            self._close(fd)
        self._open.clear()

    def _trim(self) -> None:
        while len(self._open) >= self._limit:
            self._close(self._open.pop(next(iter(self._open))))

    def _close(self, fd: int) -> None:
        if fd in self._held:
            self._doomed.add(fd)
        else:
            os.close(fd)


class NowaitReader:
    """``pread`` that never waits for a device. Trio thread only: it reuses one buffer."""

    def __init__(self, *, never_blocks: bool) -> None:
        self._flags = 0 if never_blocks else os.RWF_NOWAIT
        self._buffer = bytearray(256 * 1024)

    def read(self, fd: int, length_bytes: int, offset_bytes: int) -> bytes | None:
        """All of the bytes, or None if some are not in the page cache (or the file ends before)."""
        try:
            if not self._flags:
                data = os.pread(fd, length_bytes, offset_bytes)
                return data if len(data) == length_bytes else None
            if length_bytes > len(self._buffer):
                self._buffer = bytearray(length_bytes)
            with memoryview(self._buffer)[:length_bytes] as view:
                if os.preadv(fd, [view], offset_bytes, self._flags) != length_bytes:
                    return None
                return bytes(view)
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP and self._flags:
                # tmpfs under another name: everything is in memory.
                self._flags = 0
                return self.read(fd, length_bytes, offset_bytes)
            # Not in the page cache (EAGAIN), or trouble: the slow path finds out which.
            return None
