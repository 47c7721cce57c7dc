"""System calls that Python's ``os`` does not offer, and calls made as another user."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
RENAME_WHITEOUT = 4
AT_FDCWD = -100
AT_SYMLINK_FOLLOW = 0x400
AT_EMPTY_PATH = 0x1000
KEEP_SIZE = 1
PUNCH_HOLE = 2
COLLAPSE_RANGE = 8
ZERO_RANGE = 16
INSERT_RANGE = 32

_libc = ctypes.CDLL(None, use_errno=True)
_SET_IDS = {"x86_64": (116, 119, 117), "aarch64": (159, 149, 147)}
"""System call numbers of setgroups, setresgid, setresuid."""


def _check(result: int, *what: object) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), *what)
    return result


def renameat2(old: Path | bytes, new: Path | bytes, flags: int) -> None:
    result = _libc.renameat2(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), ctypes.c_uint(flags))
    _check(result, str(old), None, str(new))


def fallocate(fd: int, mode: int, offset_bytes: int, length_bytes: int) -> None:
    _check(_libc.fallocate(fd, mode, ctypes.c_long(offset_bytes), ctypes.c_long(length_bytes)))


def linkat(directory: int, old: Path | bytes | str, new: Path, flags: int) -> None:
    """A name for what ``old`` means, which may be a link below ``/proc/self/fd``, or nothing (AT_EMPTY_PATH)."""
    result = _libc.linkat(directory, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags)
    _check(result, str(old), None, str(new))


def syncfs(fd: int) -> None:
    _check(_libc.syncfs(fd))


class _Dirent(ctypes.Structure):
    _fields_ = (
        ("d_ino", ctypes.c_ulong),
        ("d_off", ctypes.c_long),
        ("d_reclen", ctypes.c_ushort),
        ("d_type", ctypes.c_ubyte),
        ("d_name", ctypes.c_char * 256),
    )


_libc.opendir.restype = ctypes.c_void_p
_libc.opendir.argtypes = (ctypes.c_char_p,)
_libc.readdir.restype = ctypes.POINTER(_Dirent)
_libc.readdir.argtypes = (ctypes.c_void_p,)
_libc.telldir.restype = ctypes.c_long
_libc.telldir.argtypes = (ctypes.c_void_p,)
_libc.seekdir.restype = None
_libc.seekdir.argtypes = (ctypes.c_void_p, ctypes.c_long)
_libc.rewinddir.restype = None
_libc.rewinddir.argtypes = (ctypes.c_void_p,)
_libc.closedir.argtypes = (ctypes.c_void_p,)


class DirStream:
    """``opendir``, ``readdir``, ``telldir``, ``seekdir``, ``rewinddir`` of the C library."""

    def __init__(self, path: Path) -> None:
        self._stream = _libc.opendir(os.fsencode(path))
        if not self._stream:
            _check(-1, str(path))

    def __enter__(self) -> DirStream:
        return self

    def __exit__(self, *_: object) -> None:
        _libc.closedir(self._stream)

    def read(self) -> bytes | None:
        """The next name, or None at the end."""
        ctypes.set_errno(0)
        entry = _libc.readdir(self._stream)
        if not entry:
            if ctypes.get_errno():
                _check(-1)
            return None
        name: bytes = entry.contents.d_name
        return name

    def rest(self) -> list[bytes]:
        """All names from here to the end, without ``.`` and ``..``."""
        names = []
        while (name := self.read()) is not None:
            if name not in (b".", b".."):
                names.append(name)
        return names

    def tell(self) -> int:
        return int(_libc.telldir(self._stream))

    def seek(self, position: int) -> None:
        _libc.seekdir(self._stream, position)

    def rewind(self) -> None:
        _libc.rewinddir(self._stream)


def as_user(uid: int, gid: int, work: Callable[[], T], *, groups: Sequence[int] = ()) -> T:
    """Run ``work`` in a thread that has these ids and no capability, and hand back what it returns or raises.

    The raw system calls change the calling thread alone, unlike the C library's functions.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []

    def body() -> None:
        try:
            setgroups, setresgid, setresuid = _SET_IDS[platform.machine()]
            ids = (ctypes.c_uint * max(1, len(groups)))(*groups)
            _check(_libc.syscall(setgroups, ctypes.c_long(len(groups)), ids))
            _check(_libc.syscall(setresgid, gid, gid, gid))
            _check(_libc.syscall(setresuid, uid, uid, uid))
            outcome.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def errno_of(work: Callable[[], object]) -> int:
    """The errno that ``work`` fails with, or 0 if it succeeds."""
    try:
        work()
    except OSError as error:
        return error.errno or 0
    return 0
