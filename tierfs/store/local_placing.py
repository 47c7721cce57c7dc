"""Putting objects of a directory store into place: durable, visible in one step, if the condition holds.

A put is a temporary file, synced, renamed over what is there, under a lock that other processes honour too
(``Place.exclusive``), and its directory synced. Between the look at what is there and the rename nobody of
them changes it.

Any thread; blocks for as long as the file system takes.

Raises ``PreconditionFailed`` if another version is there, ``StoreUnsupported`` for ``x`` beside ``x/y``,
``StoreUnavailable`` if the directory is removed again and again, ``OSError``.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable

from tierfs.errors import PreconditionFailed, StoreUnavailable, StoreUnsupported
from tierfs.store.base import Condition
from tierfs.store.keys import encode_path
from tierfs.store.local_files import is_reached_as
from tierfs.store.local_meta import MetadataKeeper, Record
from tierfs.store.local_place import Place
from tierfs.store.local_walk import etag_of, info_of
from tierfs.types import ObjectInfo

_TRIES = 20


class Placing:
    """See the module docstring. ``path`` is that of ``key``, relative to the store's directory."""

    def __init__(self, place: Place, meta: MetadataKeeper, now_ns: Callable[[], int]) -> None:
        self._place = place
        self._meta = meta
        self._now_ns = now_ns
        self._mtime_lock = threading.Lock()
        self._last_mtime_ns = 0

    def publish(self, descriptor: int, temporary: bytes, key: str, path: bytes, record: Record,
                condition: Condition) -> ObjectInfo:
        """Make a finished temporary file the object: durable and visible in this order."""
        self._place.prepare()
        mtime_ns = self._unique_mtime_ns()
        os.utime(descriptor, ns=(mtime_ns, mtime_ns))
        info = info_of(key, os.fstat(descriptor))
        self._meta.save(descriptor, key, info.etag, record)
        os.fsync(descriptor)
        directory, _, name = path.rpartition(b"/")
        for _ in range(_TRIES):
            parent = self._place.directory_for_writing(key, directory, self._mark_implicit)
            try:
                with self._place.exclusive():
                    replaced = self._check_target(parent, name, key, condition)
                    os.rename(temporary, name, dst_dir_fd=parent)
                if replaced is not None:
                    self._meta.drop(None, key, replaced)
                os.fsync(parent)
            except FileNotFoundError:
                continue  # the parent was pruned between opening it and here
            finally:
                os.close(parent)
            return ObjectInfo(key, info.size_bytes, info.etag, info.mtime_ns, metadata=record.metadata)
        raise StoreUnavailable(f"{key}: its directory is removed again and again")

    def put_marker(self, key: str, path: bytes, record: Record, condition: Condition) -> ObjectInfo:
        """Make the directory an object, ``dir/``."""
        self._place.prepare()
        for _ in range(_TRIES):
            parent = self._place.directory_for_writing(key, path.rstrip(b"/"), self._mark_implicit)
            try:
                with self._place.exclusive():
                    info = info_of(key, os.fstat(parent))
                    exists = not self._meta.load(parent, key, info.etag).implicit
                    _check_condition(key, info.etag if exists else None, condition)
                    self._meta.save(parent, key, info.etag, record)
                    if not os.fstat(parent).st_nlink or not is_reached_as(parent, self._place.full(path)):
                        continue  # pruned meanwhile
                os.fsync(parent)
            finally:
                os.close(parent)
            return ObjectInfo(key, 0, info.etag, info.mtime_ns, metadata=record.metadata)
        raise StoreUnavailable(f"{key}: the directory is removed again and again")

    def change_metadata(self, descriptor: int, key: str, path: bytes, info: ObjectInfo, record: Record,
                        condition: Condition) -> ObjectInfo:
        """Copy onto itself: the bytes, and with them the ETag, stay."""
        self._place.prepare()
        directory, _, name = path.rpartition(b"/")
        parent = self._place.directory_for_writing(key, directory, self._mark_implicit)
        try:
            with self._place.exclusive():
                current = self._check_target(parent, name, key, condition)
                if current != info.etag:
                    raise PreconditionFailed(f"{key}: is version {current}, not {info.etag}")
                self._meta.save(descriptor, key, info.etag, record)
            os.fsync(descriptor)
        finally:
            os.close(parent)
        return ObjectInfo(key, info.size_bytes, info.etag, info.mtime_ns, metadata=record.metadata)

    def _check_target(self, parent: int, name: bytes, key: str, condition: Condition) -> str | None:
        """The ETag of what is there now; raises if it must not be replaced."""
        try:
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            _check_condition(key, None, condition)
            return None
        if stat.S_ISDIR(status.st_mode):
            raise StoreUnsupported(
                f"{key}: there are objects below '{key}/', and a directory store cannot hold both")
        etag = etag_of(status) if stat.S_ISREG(status.st_mode) else ""
        _check_condition(key, etag, condition)
        return etag

    def _mark_implicit(self, path: bytes) -> None:
        full = self._place.full(path)
        with contextlib.suppress(FileNotFoundError):
            self._meta.save(full, encode_path(path), etag_of(os.lstat(full)), Record(implicit=True))

    def _unique_mtime_ns(self) -> int:
        with self._mtime_lock:
            self._last_mtime_ns = max(self._now_ns(), self._last_mtime_ns + 1)
            return self._last_mtime_ns


def _check_condition(key: str, current: str | None, condition: Condition) -> None:
    if condition.if_absent and current is not None:
        raise PreconditionFailed(f"{key}: exists")
    if condition.if_match is not None and current != condition.if_match:
        raise PreconditionFailed(f"{key}: is version {current}, not {condition.if_match}")
