"""Seeded random file system operations, and the state of a tree in a form that two can be compared by.

``RandomOperations`` draws the next operation without looking at any tree: one seed means one sequence.
``Replica`` carries operations out below one directory and tells what came of each.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.posix import RENAME_EXCHANGE, RENAME_NOREPLACE, renameat2

BLOCK = 128 * 1024
OLD_NS = 10**18

Outcome = tuple[str, Any]
"""("ok", what was returned) or ("errno", its name)."""


@dataclass(frozen=True, slots=True)
class Operation:
    name: str
    arguments: tuple[Any, ...]

    def __str__(self) -> str:
        shown = ", ".join(f"<{len(a)} bytes>" if isinstance(a, bytes) else repr(a) for a in self.arguments)
        return f"{self.name}({shown})"


class RandomOperations:
    """An endless, reproducible sequence of operations on few names, so that they collide often."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        chance = self._chance
        self._kinds: list[tuple[int, str, Callable[[], tuple[Any, ...]]]] = [
            (10, "create", lambda: (self._path(), chance.choice([0o600, 0o644, 0o755]))),
            (12, "write", lambda: (self._path(), self._offset(), self._data())),
            (5, "append", lambda: (self._path(), self._data())),
            (4, "replace", lambda: (self._path(), self._data())),
            (8, "read", lambda: (self._path(), self._offset(), self._length())),
            (5, "truncate", lambda: (self._path(), self._offset())),
            (8, "mkdir", lambda: (self._directory(), 0o755)),
            (2, "rmdir", lambda: (self._directory(),)),
            (6, "unlink", lambda: (self._path(),)),
            (8, "rename", lambda: (self._path(), self._path())),
            (4, "rename", lambda: (self._directory(), self._directory())),
            (2, "rename_noreplace", lambda: (self._path(), self._path())),
            (2, "rename_exchange", lambda: (self._path(), self._path())),
            (1, "rename_exchange", lambda: (self._directory(), self._path())),
            (4, "link", lambda: (self._path(), self._path())),
            (3, "symlink", lambda: (chance.choice(["a", "../b", "nowhere", "x" * 300]), self._path())),
            (2, "readlink", lambda: (self._path(),)),
            (1, "mkfifo", lambda: (self._path(),)),
            (4, "chmod", lambda: (self._path(), chance.choice([0o600, 0o640, 0o755, 0o4711, 0o1777]))),
            (3, "utime", lambda: (self._path(), OLD_NS + chance.randrange(10**15))),
            (3, "setxattr", lambda: (self._path(), f"user.{chance.choice('abc')}", chance.randbytes(20))),
            (1, "removexattr", lambda: (self._path(), f"user.{chance.choice('abc')}")),
            (2, "listdir", lambda: (self._directory(),)),
            (6, "stat", lambda: (self._path(),)),
            (5, "handle_open", lambda: (chance.randrange(4), self._path())),
            (6, "handle_write", lambda: (chance.randrange(4), self._offset(), self._data())),
            (5, "handle_read", lambda: (chance.randrange(4), self._offset(), self._length())),
            (2, "handle_truncate", lambda: (chance.randrange(4), self._offset())),
            (2, "handle_stat", lambda: (chance.randrange(4),)),
            (1, "handle_fsync", lambda: (chance.randrange(4),)),
            (3, "handle_close", lambda: (chance.randrange(4),)),
        ]
        self._weights = [weight for weight, _, _ in self._kinds]

    def __iter__(self) -> Iterator[Operation]:
        while True:
            ((_, name, arguments),) = self._chance.choices(self._kinds, self._weights)
            yield Operation(name, arguments())

    def _path(self) -> str:
        """Mostly a file name below directory names; now and then the other way round, for the errors."""
        parents = [self._chance.choice("pqr") for _ in range(self._chance.choices([0, 1, 2], [4, 5, 1])[0])]
        leaf = self._chance.choice("abcd" if self._chance.random() < 0.85 else "pqr")
        return "/".join([*parents, leaf])

    def _directory(self) -> str:
        depth = self._chance.choices([1, 2], [2, 1])[0]
        return "/".join(
            self._chance.choice("pqr" if self._chance.random() < 0.93 else "a") for _ in range(depth)
        )

    def _offset(self) -> int:
        near = self._chance.choice([0, 0, 0, 4096, BLOCK, 3 * BLOCK])
        return max(0, near + self._chance.choice([-1, 0, 1, self._chance.randrange(10_000)]))

    def _length(self) -> int:
        return self._chance.choice([0, 1, 100, 4096, 5000, BLOCK, 2 * BLOCK + 1])

    def _data(self) -> bytes:
        return self._chance.randbytes(self._length())


class Replica:
    """Carries out operations below ``root``. Handles 0 to 3 stay open between operations."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._handles: dict[int, int] = {}

    def perform(self, operation: Operation) -> Outcome:
        try:
            return "ok", getattr(self, f"_{operation.name}")(*operation.arguments)
        except OSError as error:
            return "errno", errno.errorcode.get(error.errno or 0, str(error.errno))

    def close_handles(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def _at(self, path: str) -> Path:
        return self.root / path

    @contextlib.contextmanager
    def _opened(self, path: str, flags: int) -> Iterator[int]:
        # Not blocking: the path may be a fifo.
        handle = os.open(self._at(path), flags | os.O_NONBLOCK | os.O_NOFOLLOW, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            yield handle
        finally:
            os.close(handle)

    def _create(self, path: str, mode: int) -> None:
        os.close(os.open(self._at(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))

    def _write(self, path: str, offset: int, data: bytes) -> int:
        with self._opened(path, os.O_WRONLY | os.O_CREAT) as handle:
            return os.pwrite(handle, data, offset)

    def _append(self, path: str, data: bytes) -> int:
        with self._opened(path, os.O_WRONLY | os.O_APPEND) as handle:
            return os.write(handle, data)

    def _replace(self, path: str, data: bytes) -> int:
        with self._opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as handle:
            return os.write(handle, data)

    def _read(self, path: str, offset: int, length: int) -> str:
        with self._opened(path, os.O_RDONLY) as handle:
            return _digest(os.pread(handle, length, offset))

    def _truncate(self, path: str, size: int) -> None:
        if stat.S_ISLNK(os.lstat(self._at(path)).st_mode):
            raise OSError(errno.ELOOP, "a symlink")
        os.truncate(self._at(path), size)

    def _mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._at(path), mode)

    def _rmdir(self, path: str) -> None:
        os.rmdir(self._at(path))

    def _unlink(self, path: str) -> None:
        os.unlink(self._at(path))

    def _rename(self, old: str, new: str) -> None:
        os.rename(self._at(old), self._at(new))

    def _rename_noreplace(self, old: str, new: str) -> None:
        renameat2(self._at(old), self._at(new), RENAME_NOREPLACE)

    def _rename_exchange(self, old: str, new: str) -> None:
        renameat2(self._at(old), self._at(new), RENAME_EXCHANGE)

    def _link(self, old: str, new: str) -> None:
        os.link(self._at(old), self._at(new), follow_symlinks=False)

    def _symlink(self, target: str, path: str) -> None:
        os.symlink(target, self._at(path))

    def _readlink(self, path: str) -> str:
        return os.readlink(self._at(path))

    def _mkfifo(self, path: str) -> None:
        os.mkfifo(self._at(path), 0o644)

    def _chmod(self, path: str, mode: int) -> None:
        if stat.S_ISLNK(os.lstat(self._at(path)).st_mode):
            raise OSError(errno.ELOOP, "a symlink")
        os.chmod(self._at(path), mode)

    def _utime(self, path: str, when_ns: int) -> int:
        os.utime(self._at(path), ns=(when_ns, when_ns), follow_symlinks=False)
        return os.lstat(self._at(path)).st_mtime_ns

    def _setxattr(self, path: str, name: str, value: bytes) -> None:
        os.setxattr(self._at(path), name, value, follow_symlinks=False)

    def _removexattr(self, path: str, name: str) -> None:
        os.removexattr(self._at(path), name, follow_symlinks=False)

    def _listdir(self, path: str) -> list[str]:
        return sorted(os.listdir(self._at(path)))

    def _stat(self, path: str) -> tuple[int, ...]:
        return _fields(os.lstat(self._at(path)))

    def _handle_open(self, number: int, path: str) -> None:
        handle = os.open(self._at(path), os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW, 0o644)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise OSError(errno.EINVAL, "not a regular file")
        if number in self._handles:
            os.close(self._handles[number])
        self._handles[number] = handle

    def _handle(self, number: int) -> int:
        if number not in self._handles:
            raise OSError(errno.EBADF, "not open")
        return self._handles[number]

    def _handle_write(self, number: int, offset: int, data: bytes) -> int:
        return os.pwrite(self._handle(number), data, offset)

    def _handle_read(self, number: int, offset: int, length: int) -> str:
        return _digest(os.pread(self._handle(number), length, offset))

    def _handle_truncate(self, number: int, size: int) -> None:
        os.ftruncate(self._handle(number), size)

    def _handle_stat(self, number: int) -> tuple[int, ...]:
        return _fields(os.fstat(self._handle(number)))

    def _handle_fsync(self, number: int) -> None:
        os.fsync(self._handle(number))

    def _handle_close(self, number: int) -> None:
        handle = self._handle(number)
        del self._handles[number]
        os.close(handle)


def _digest(data: bytes) -> str:
    return f"{len(data)}:{hashlib.sha256(data).hexdigest()[:16]}"


def _fields(found: os.stat_result) -> tuple[int, ...]:
    """What must be equal on two file systems: a directory's size and everybody's times of "now" need not."""
    size = 0 if stat.S_ISDIR(found.st_mode) else found.st_size
    explicit = found.st_mtime_ns if OLD_NS <= found.st_mtime_ns < OLD_NS + 10**15 else 0
    return (found.st_mode, found.st_nlink, found.st_uid, found.st_gid, size, explicit)


def tree_state(root: Path) -> dict[str, tuple[Any, ...]]:
    """Everything below ``root``: stat fields, content, link target, attributes; hard links by first name."""
    state: dict[str, tuple[Any, ...]] = {}
    first_names: dict[int, str] = {}
    for directory, names, files in os.walk(root):
        names.sort()
        for name in sorted(names + files):
            path = Path(directory, name)
            found = os.lstat(path)
            relative = str(path.relative_to(root))
            content: Any = None
            if stat.S_ISREG(found.st_mode):
                content = _digest(path.read_bytes())
            elif stat.S_ISLNK(found.st_mode):
                content = os.readlink(path)
            attributes: tuple[tuple[str, bytes], ...] = ()
            if stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode):
                own = sorted(a for a in os.listxattr(path) if a.startswith("user.") and ".tierfs." not in a)
                attributes = tuple((a, os.getxattr(path, a)) for a in own)
            same_as = first_names.setdefault(found.st_ino, relative)
            state[relative] = (_fields(found), content, attributes, same_as)
    return state
