"""The directory behind a directory store: its boundary, its lock and its temporary files.

Nothing outside the directory is reached through it: directories are not entered through symbolic links, and
a symbolic link to a file counts only if the file lies inside. Checks are made on open descriptors, by the
path that the kernel reports for them, so that nobody can swap a link in between.

Thread-safe. Raises OSError and StoreError; ``failure`` turns the first into the second.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from tierfs.errors import (
    ObjectNotFound,
    StoreAccessDenied,
    StoreConfigError,
    StoreUnavailable,
    StoreUnsupported,
)
from tierfs.log import get_logger
from tierfs.store.keys import decode_key
from tierfs.store.local_files import fsync_directory, is_reached_as, open_directory, path_of_descriptor
from tierfs.store.local_walk import HIDDEN_DIR, RESERVED

_log = get_logger(__name__)
_STALE_TEMPORARY_S = 24 * 3600
_TRIES = 20


class Place:
    """``root`` is absolute and free of links; ``hidden`` is the store's own directory in it."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.root = os.path.realpath(os.fsencode(directory))
        self.hidden = self.root + b"/" + HIDDEN_DIR
        self.url = "file://" + os.fsdecode(self.root)
        self._identity = _identity(self.root)
        self._lock = threading.Lock()
        self._lock_fd = -1
        self._lock_pid = 0
        self._prepared = False
        self._skipped: set[bytes] = set()

    def close(self) -> None:
        with self._lock:
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
                self._lock_fd = -1

    def check(self, key: str) -> None:
        """An unmounted disk leaves an empty directory: that is an outage, not an empty store."""
        if _identity(self.root) != self._identity:
            raise StoreUnavailable(f"{key or '/'}: {self.url} is not the directory it was (unmounted?)")

    def path(self, key: str) -> bytes | None:
        """Relative path of a key that may be an object here, else None."""
        path = decode_key(key)
        if not path or path == b"/":
            return None
        first, _, rest = path.partition(b"/")
        if first == HIDDEN_DIR and (not rest or rest.partition(b"/")[0] in RESERVED):
            return None
        return path

    def writable_path(self, key: str) -> bytes:
        path = self.path(key)
        if path is None:
            raise StoreConfigError(f"{key!r} cannot be the name of a file in {self.url}")
        return path

    def full(self, path: bytes) -> bytes:
        """Absolute path of a relative one, whose trailing slash is dropped; "" is the root."""
        return self.root + b"/" + path.rstrip(b"/") if path else self.root

    # Reading

    def open(self, key: str) -> tuple[int, os.stat_result]:
        """Open the file (or, for a key that ends in ``/``, the directory) for reading."""
        path = self.path(key)
        if path is None:
            raise ObjectNotFound(f"{key!r}: no such object")
        full = self.full(path)
        try:
            # O_NONBLOCK: opening a foreign FIFO must not hang.
            descriptor = os.open(full, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as error:
            self.failure(error, key, "open")
        try:
            status = os.fstat(descriptor)
            is_directory = key.endswith("/")
            wanted = stat.S_ISDIR if is_directory else stat.S_ISREG
            if not wanted(status.st_mode) or not self._is_inside(descriptor, full, is_directory):
                raise ObjectNotFound(f"{key}: no such object")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor, status

    def _is_inside(self, descriptor: int, full: bytes, is_directory: bool) -> bool:
        """Whether an open file was reached without a link, or by a final link to a file inside."""
        if is_reached_as(descriptor, full):
            return True
        directory = os.path.dirname(full)
        if is_directory or os.path.realpath(directory) != directory:
            return False
        real = path_of_descriptor(descriptor) or os.path.realpath(full)
        return self._is_public(real)

    def _is_public(self, real: bytes) -> bool:
        return real.startswith(self.root + b"/") and not real.startswith(self.hidden + b"/")

    def stat_link(self, path: bytes) -> os.stat_result | None:
        """Status of what a symbolic link leads to, if that is a file inside."""
        real = os.path.realpath(self.full(path))
        if not self._is_public(real):
            self.note_skipped(path, "symbolic link out of the store")
            return None
        try:
            status = os.stat(real)
        except OSError:
            return None
        return status if stat.S_ISREG(status.st_mode) else None

    def note_skipped(self, path: bytes, reason: str) -> None:
        """Log, once per path, what is in the directory but not in the store."""
        if path not in self._skipped and len(self._skipped) < 1000:
            self._skipped.add(path)
            _log.warning("entry of the store skipped", path=os.fsdecode(path), reason=reason)

    # Writing

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """One at a time, among threads and among processes that have this directory open."""
        with self._lock:
            if self._lock_fd < 0 or self._lock_pid != os.getpid():
                # flock belongs to the open file: after a fork both processes would hold it together.
                self._lock_pid = os.getpid()
                self._lock_fd = os.open(self.hidden + b"/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def prepare(self) -> None:
        """Make the hidden directory, at the first write only: a read-only directory can be a store too."""
        if self._prepared:
            return
        temporary = self.hidden + b"/tmp"
        os.makedirs(temporary, exist_ok=True)
        fsync_directory(self.root)
        oldest = time.time() - _STALE_TEMPORARY_S
        with os.scandir(temporary) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime < oldest:
                        os.unlink(entry.path)
        self._prepared = True

    @contextlib.contextmanager
    def temporary(self) -> Iterator[tuple[int, bytes]]:
        """A new empty file, open for writing; removed afterwards unless it was renamed."""
        self.prepare()
        path = self.hidden + b"/tmp/" + os.urandom(12).hex().encode()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            yield descriptor, path
        finally:
            os.close(descriptor)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def directory_for_writing(self, key: str, directory: bytes, on_made: Callable[[bytes], None]) -> int:
        """An open descriptor of the relative directory, made if missing; never through a symbolic link.

        ``on_made`` is told the relative path (ending in ``/``) of each directory made.
        """
        full = self.full(directory)
        for _ in range(_TRIES):
            try:
                return open_directory(full)
            except FileNotFoundError:
                pass
            except NotADirectoryError:
                raise StoreUnsupported(f"{key}: a part of its path is an object (or a symbolic link), "
                                       "and a directory store cannot hold both") from None
            self.check(key)
            made = self.root
            for part in directory.split(b"/"):
                above, made = made, made + b"/" + part
                try:
                    os.mkdir(made)
                except FileExistsError:
                    continue
                except (FileNotFoundError, NotADirectoryError):
                    break
                on_made(made[len(self.root) + 1:] + b"/")
                fsync_directory(above)
        raise StoreUnavailable(f"{key}: its directory is removed again and again")

    def failure(self, error: OSError, key: str, operation: str, *, writing: bool = False) -> NoReturn:
        """Raise the StoreError for an OSError."""
        code = error.errno or errno.EIO
        text = f"{key or '/'}: {operation} in {self.url}: {os.strerror(code)}"
        if code in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV):
            self.check(key)
            if not writing:
                raise ObjectNotFound(f"{key}: no such object") from None
        if code in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StoreAccessDenied(text) from error
        if code in (errno.ENAMETOOLONG, errno.EINVAL, errno.EXDEV):
            raise StoreConfigError(text) from error
        raise StoreUnavailable(text) from error


def _identity(path: bytes) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
