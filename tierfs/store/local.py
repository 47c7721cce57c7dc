"""A directory as an object store: each object is a plain file at its key's path.

The directory stays readable and writable with ordinary tools; what they put there appears. An object's ETag
is made of inode, mtime and size. An object that this store writes always gets a new inode and a new mtime;
a tool that changes a file in place without changing its size or mtime goes unnoticed.

Differences to S3, all of them refusals, never wrong answers: ``x`` beside ``x/y`` cannot be held
(``StoreUnsupported``); keys without a POSIX path are refused (``StoreConfigError``). Directories made by
other tools are marker objects (``dir/``); those that appear with the first key below them are not, and go
with the last.

Nothing outside the directory is ever read or written: directories are not entered through symbolic links,
and a symbolic link to a file is followed only if the file lies inside.

A put is a temporary file in ``.tierfs/tmp``, synced, renamed into place under a lock that other processes
honour too, and its directory synced. ``.tierfs/uploads`` holds unfinished multipart uploads, and
``.tierfs/meta`` metadata where extended attributes are not available.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn

import structlog

from tierfs.errors import (
    ObjectNotFound,
    PreconditionFailed,
    StoreAccessDenied,
    StoreConfigError,
    StoreError,
    StoreUnavailable,
    StoreUnsupported,
)
from tierfs.metrics import Metrics
from tierfs.store.base import (
    LIST_PAGE_KEYS,
    UNCONDITIONAL,
    Buffer,
    Condition,
    DeleteFailure,
    ListPage,
    Part,
    StoreCapabilities,
    UnfinishedUpload,
)
from tierfs.store.counting import RequestMeter
from tierfs.store.keys import decode_key, encode_path
from tierfs.store.local_files import copy_range, fsync_directory, open_directory, path_of_descriptor, write_all
from tierfs.store.local_meta import MetadataKeeper, Record, lower_names
from tierfs.store.local_uploads import Uploads
from tierfs.store.local_walk import HIDDEN_DIR, RESERVED, Walker, etag_of, info_of
from tierfs.types import ObjectInfo

_log = structlog.get_logger(__name__)
_STALE_TEMPORARY_S = 24 * 3600
_PUBLISH_TRIES = 20


class LocalStore:
    """See the module docstring; the contract is ``base.ObjectStore``."""

    def __init__(self, directory: str | os.PathLike[str], *, metrics: Metrics | None = None,
                 use_xattrs: bool = True, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._root = os.path.realpath(os.fsencode(directory))
        self._root_identity = _identity(self._root)
        self._meter = RequestMeter(metrics)
        self.counts = self._meter.counts
        self._now_ns = now_ns
        self._last_mtime_ns = 0
        self._hidden = self._root + b"/" + HIDDEN_DIR
        self._meta = MetadataKeeper(self._hidden + b"/meta", use_xattrs=use_xattrs)
        self._uploads = Uploads(self._hidden + b"/uploads")
        self._walker = Walker(self._root, marker_of=self._marker_of, stat_link=self._stat_link,
                              on_skipped=self._note_skipped)
        self._skipped: set[bytes] = set()
        self._lock = threading.Lock()
        self._lock_fd = -1
        self._prepared = False

    def __repr__(self) -> str:
        return f"LocalStore({self.url!r})"

    @property
    def url(self) -> str:
        return "file://" + os.fsdecode(self._root)

    @property
    def capabilities(self) -> StoreCapabilities:
        return StoreCapabilities(conditional_put=True, conditional_copy=True, part_copy=True,
                                 keeps_directory_markers=True)

    def check(self) -> None:
        try:
            self._check_root("")
            with os.scandir(self._root) as entries:
                next(entries, None)
        except OSError as error:
            self._fail(error, "", "list")

    def close(self) -> None:
        with self._lock:
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
                self._lock_fd = -1

    # Reading

    def list_page(
        self, prefix: str, *, recursive: bool = False, token: str | None = None, limit: int = LIST_PAGE_KEYS
    ) -> ListPage:
        self._meter.note("list")
        try:
            self._check_root(prefix)
            return self._walker.page(prefix, recursive, token, max(1, min(limit, LIST_PAGE_KEYS)))
        except (FileNotFoundError, NotADirectoryError):
            return ListPage((), (), None)
        except OSError as error:
            self._fail(error, prefix, "list")

    def head(self, key: str) -> ObjectInfo:
        self._meter.note("head")
        with self._object(key) as (descriptor, info):
            record = self._meta.load(descriptor, key, info.etag)
            return ObjectInfo(key, info.size_bytes, info.etag, info.mtime_ns, metadata=record.metadata)

    def get_range(self, key: str, offset_bytes: int, length_bytes: int, *,
                  if_match: str | None = None, version_id: str | None = None) -> bytes:
        with self._object(key) as (descriptor, info):
            if if_match is not None and info.etag != if_match:
                self._meter.note("get")
                raise PreconditionFailed(f"{key}: is version {info.etag}, not {if_match}")
            data = os.pread(descriptor, length_bytes, offset_bytes)
            while len(data) < length_bytes:
                more = os.pread(descriptor, length_bytes - len(data), offset_bytes + len(data))
                if not more:
                    break
                data += more
            self._meter.note("get", read_bytes=len(data))
            changed = if_match is not None and etag_of(os.fstat(descriptor)) != if_match
            if changed or len(data) < length_bytes:
                # Also without if_match: whoever asks for bytes past the end believes in another version.
                raise PreconditionFailed(
                    f"{key}: changed, or is shorter than {offset_bytes + length_bytes} bytes")
            return data

    # Writing

    def put(self, key: str, body: Buffer, *, metadata: Mapping[str, str] | None = None,
            condition: Condition = UNCONDITIONAL) -> ObjectInfo:
        self._meter.note("put", written_bytes=len(memoryview(body).cast("B")))
        path = self._writable(key)
        record = Record(metadata=lower_names(metadata))
        try:
            if key.endswith("/"):
                if len(body):
                    raise StoreUnsupported(f"{key}: a directory store keeps no data in a key that ends in '/'")
                return self._put_marker(key, path, record, condition)
            with self._temporary() as (descriptor, temporary):
                write_all(descriptor, body, 0)
                return self._publish(descriptor, temporary, key, path, record, condition)
        except OSError as error:
            self._fail(error, key, "put", writing=True)

    def copy(self, source: ObjectInfo, target_key: str, *, metadata: Mapping[str, str] | None = None,
             condition: Condition = UNCONDITIONAL) -> ObjectInfo:
        self._meter.note("copy")
        path = self._writable(target_key)
        with self._object(source.key) as (origin, info):
            self._check_source(source, info)
            try:
                record = (self._meta.load(origin, source.key, info.etag) if metadata is None
                          else Record(metadata=lower_names(metadata)))
                if target_key.endswith("/"):
                    return self._put_marker(target_key, path, Record(metadata=record.metadata), condition)
                if source.key == target_key and os.fstat(origin).st_nlink == 1:
                    return self._change_metadata(origin, target_key, path, info, record, condition)
                with self._temporary() as (descriptor, temporary):
                    copy_range(origin, 0, descriptor, 0, info.size_bytes)
                    self._check_source(source, info_of(source.key, os.fstat(origin)))
                    return self._publish(descriptor, temporary, target_key, path, record, condition)
            except OSError as error:
                self._fail(error, target_key, "copy", writing=True)

    def delete(self, key: str) -> None:
        self._meter.note("delete")
        parent = self._delete(key)
        if parent is not None:
            self._sync_and_prune({parent})

    def delete_many(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        failures: list[DeleteFailure] = []
        for start in range(0, len(keys), 1000):
            self._meter.note("delete_many")
            parents: set[bytes] = set()
            for key in keys[start:start + 1000]:
                try:
                    parent = self._delete(key)
                except StoreError as error:
                    failures.append(DeleteFailure(key, str(error)))
                else:
                    if parent is not None:
                        parents.add(parent)
            self._sync_and_prune(parents)
        return failures

    # Multipart

    def start_multipart(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        self._meter.note("start_multipart")
        self._writable(key)
        if key.endswith("/"):
            raise StoreUnsupported(f"{key}: a directory store keeps no data in a key that ends in '/'")
        try:
            self._prepare()
            return self._uploads.start(key, lower_names(metadata), self._now_ns())
        except OSError as error:
            self._fail(error, key, "start_multipart", writing=True)

    def upload_part(self, key: str, upload_id: str, number: int, body: Buffer) -> Part:
        self._meter.note("upload_part", written_bytes=len(memoryview(body).cast("B")))
        try:
            return self._uploads.write_part(key, upload_id, number, body)
        except OSError as error:
            self._fail(error, key, "upload_part", writing=True)

    def copy_part(self, key: str, upload_id: str, number: int, source: ObjectInfo,
                  offset_bytes: int, length_bytes: int) -> Part:
        self._meter.note("copy_part")
        with self._object(source.key) as (origin, info):
            self._check_source(source, info)
            if offset_bytes + length_bytes > info.size_bytes:
                raise StoreConfigError(f"{source.key}: no range {offset_bytes}+{length_bytes} in {info.size_bytes}")
            try:
                part = self._uploads.copy_part(key, upload_id, number, origin, offset_bytes, length_bytes)
                self._check_source(source, info_of(source.key, os.fstat(origin)))
                return part
            except OSError as error:
                self._fail(error, key, "copy_part", writing=True)

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[Part], *,
                           condition: Condition = UNCONDITIONAL) -> ObjectInfo:
        self._meter.note("complete_multipart")
        path = self._writable(key)
        try:
            with self._uploads.assemble(key, upload_id, parts) as (descriptor, assembled, metadata):
                return self._publish(descriptor, assembled, key, path, Record(metadata=metadata), condition)
        except OSError as error:
            self._fail(error, key, "complete_multipart", writing=True)

    def abort_multipart(self, key: str, upload_id: str) -> None:
        self._meter.note("abort_multipart")
        try:
            self._uploads.remove(upload_id)
        except OSError as error:
            self._fail(error, key, "abort_multipart", writing=True)

    def list_unfinished_uploads(self, prefix: str) -> Sequence[UnfinishedUpload]:
        self._meter.note("list_uploads")
        try:
            return self._uploads.unfinished(prefix)
        except OSError as error:
            self._fail(error, prefix, "list_uploads")

    # Finding files without leaving the directory

    def _path(self, key: str) -> bytes | None:
        """Relative path of a key that may be an object here, else None."""
        path = decode_key(key)
        if not path or path == b"/":
            return None
        first, _, rest = path.partition(b"/")
        if first == HIDDEN_DIR and (not rest or rest.partition(b"/")[0] in RESERVED):
            return None
        return path

    def _writable(self, key: str) -> bytes:
        path = self._path(key)
        if path is None:
            raise StoreConfigError(f"{key!r} cannot be the name of a file in {self.url}")
        return path

    @contextlib.contextmanager
    def _object(self, key: str) -> Iterator[tuple[int, ObjectInfo]]:
        """The object's file or directory, open for reading, and what it is."""
        path = self._path(key)
        if path is None:
            raise ObjectNotFound(f"{key!r}: no such object")
        full = self._root + b"/" + path.rstrip(b"/")
        try:
            # O_NONBLOCK: opening a foreign FIFO must not hang.
            descriptor = os.open(full, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as error:
            self._fail(error, key, "open")
        try:
            status = os.fstat(descriptor)
            is_marker = key.endswith("/")
            wanted = stat.S_ISDIR if is_marker else stat.S_ISREG
            if not wanted(status.st_mode) or not self._is_inside(descriptor, full, is_marker):
                raise ObjectNotFound(f"{key}: no such object")
            info = info_of(key, status)
            if is_marker and self._meta.load(descriptor, key, info.etag).implicit:
                raise ObjectNotFound(f"{key}: no such object")
            yield descriptor, info
        except OSError as error:
            self._fail(error, key, "read")
        finally:
            os.close(descriptor)

    def _is_inside(self, descriptor: int, full: bytes, is_directory: bool) -> bool:
        """Whether an open file was reached without a link, or by a final link to a file inside."""
        real = path_of_descriptor(descriptor)
        if real == full:
            return True
        if is_directory or os.path.realpath(os.path.dirname(full)) != os.path.dirname(full):
            return False
        if real is None:  # no /proc: ask again by name
            real = os.path.realpath(full)
        return real.startswith(self._root + b"/") and not real.startswith(self._hidden + b"/")

    def _stat_link(self, path: bytes) -> os.stat_result | None:
        real = os.path.realpath(self._root + b"/" + path)
        if not real.startswith(self._root + b"/") or real.startswith(self._hidden + b"/"):
            self._note_skipped(path, "symbolic link out of the store")
            return None
        try:
            status = os.stat(real)
        except OSError:
            return None
        return status if stat.S_ISREG(status.st_mode) else None

    def _marker_of(self, path: bytes) -> ObjectInfo | None:
        if path == HIDDEN_DIR + b"/":
            return None
        key = encode_path(path)
        full = self._root + b"/" + path.rstrip(b"/")
        try:
            info = info_of(key, os.lstat(full))
            record = self._meta.load(full, key, info.etag)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return None if record.implicit else info

    def _note_skipped(self, path: bytes, reason: str) -> None:
        if path not in self._skipped and len(self._skipped) < 1000:
            self._skipped.add(path)
            _log.warning("store_entry_skipped", path=os.fsdecode(path), reason=reason)

    def _check_source(self, source: ObjectInfo, info: ObjectInfo) -> None:
        if info.etag != source.etag:
            raise PreconditionFailed(f"{source.key}: is version {info.etag}, not {source.etag}")

    def _check_root(self, key: str) -> None:
        """An unmounted disk leaves an empty directory: that is an outage, not an empty store."""
        if _identity(self._root) != self._root_identity:
            raise StoreUnavailable(f"{key or '/'}: {self.url} is not the directory it was (unmounted?)")

    # Putting files into place

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One at a time, among threads and among processes that have this directory open."""
        with self._lock:
            if self._lock_fd < 0:
                self._lock_fd = os.open(self._hidden + b"/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def _prepare(self) -> None:
        if self._prepared:
            return
        temporary = self._hidden + b"/tmp"
        os.makedirs(temporary, exist_ok=True)
        fsync_directory(self._root)
        oldest = time.time() - _STALE_TEMPORARY_S
        with os.scandir(temporary) as entries:
            for entry in entries:
                if entry.stat(follow_symlinks=False).st_mtime < oldest:
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)
        self._prepared = True

    @contextlib.contextmanager
    def _temporary(self) -> Iterator[tuple[int, bytes]]:
        self._prepare()
        path = self._hidden + b"/tmp/" + os.urandom(12).hex().encode()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            yield descriptor, path
        finally:
            os.close(descriptor)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def _publish(self, descriptor: int, temporary: bytes, key: str, path: bytes, record: Record,
                 condition: Condition) -> ObjectInfo:
        """Make a finished temporary file the object: durable and visible in this order."""
        self._prepare()
        mtime_ns = self._unique_mtime_ns()
        os.utime(descriptor, ns=(mtime_ns, mtime_ns))
        info = info_of(key, os.fstat(descriptor))
        self._meta.save(descriptor, key, info.etag, record)
        os.fsync(descriptor)
        directory, _, name = path.rpartition(b"/")
        for _ in range(_PUBLISH_TRIES):
            parent = self._parent_for_writing(key, directory)
            try:
                with self._exclusive():
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

    def _put_marker(self, key: str, path: bytes, record: Record, condition: Condition) -> ObjectInfo:
        self._prepare()
        for _ in range(_PUBLISH_TRIES):
            parent = self._parent_for_writing(key, path.rstrip(b"/"))
            try:
                with self._exclusive():
                    status = os.fstat(parent)
                    info = info_of(key, status)
                    exists = not self._meta.load(parent, key, info.etag).implicit
                    _check_condition(key, info.etag if exists else None, condition)
                    self._meta.save(parent, key, info.etag, record)
                    if status.st_nlink == 0 or path_of_descriptor(parent) not in (
                            None, self._root + b"/" + path.rstrip(b"/")):
                        continue  # pruned meanwhile
                os.fsync(parent)
            finally:
                os.close(parent)
            return ObjectInfo(key, 0, info.etag, info.mtime_ns, metadata=record.metadata)
        raise StoreUnavailable(f"{key}: the directory is removed again and again")

    def _change_metadata(self, descriptor: int, key: str, path: bytes, info: ObjectInfo, record: Record,
                         condition: Condition) -> ObjectInfo:
        """Copy onto itself: the bytes, and with them the ETag, stay."""
        self._prepare()
        directory, _, name = path.rpartition(b"/")
        parent = self._parent_for_writing(key, directory)
        try:
            with self._exclusive():
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

    def _parent_for_writing(self, key: str, directory: bytes) -> int:
        """An open descriptor of the directory, made if missing; never through a symbolic link."""
        full = self._root + b"/" + directory if directory else self._root
        for _ in range(_PUBLISH_TRIES):
            try:
                return open_directory(full)
            except FileNotFoundError:
                pass
            except NotADirectoryError:
                raise StoreUnsupported(f"{key}: a part of its path is an object (or a symbolic link), "
                                       "and a directory store cannot hold both") from None
            self._check_root(key)
            made = self._root
            for part in directory.split(b"/"):
                above, made = made, made + b"/" + part
                try:
                    os.mkdir(made)
                except FileExistsError:
                    continue
                except (FileNotFoundError, NotADirectoryError):
                    break
                relative = made[len(self._root) + 1:] + b"/"
                self._mark_implicit(made, relative)
                fsync_directory(above)
        raise StoreUnavailable(f"{key}: its directory is removed again and again")

    def _mark_implicit(self, full: bytes, relative: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._meta.save(full, encode_path(relative), etag_of(os.lstat(full)), Record(implicit=True))

    def _unique_mtime_ns(self) -> int:
        with self._lock:
            self._last_mtime_ns = max(self._now_ns(), self._last_mtime_ns + 1)
            return self._last_mtime_ns

    # Deleting

    def _delete(self, key: str) -> bytes | None:
        """Remove it; returns the (relative) directory that lost an entry, still to be synced and pruned."""
        path = self._path(key)
        if path is None:
            return None
        directory, _, name = path.rstrip(b"/").rpartition(b"/")
        full = self._root + b"/" + directory if directory else self._root
        try:
            parent = open_directory(full)
        except (FileNotFoundError, NotADirectoryError):
            self._check_root(key)
            return None
        except OSError as error:
            self._fail(error, key, "delete", writing=True)
        try:
            self._prepare()
            with self._exclusive():
                status = os.stat(name, dir_fd=parent, follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode) != key.endswith("/"):
                    return None
                etag = etag_of(status)
                if not key.endswith("/"):
                    os.unlink(name, dir_fd=parent)
                    self._meta.drop(None, key, etag)
                elif not self._remove_empty(parent, name):
                    self._meta.save(full + b"/" + name, key, etag, Record(implicit=True))
                else:
                    self._meta.drop(None, key, etag)
            return directory
        except FileNotFoundError:
            return None
        except OSError as error:
            self._fail(error, key, "delete", writing=True)
        finally:
            os.close(parent)

    @staticmethod
    def _remove_empty(parent: int, name: bytes) -> bool:
        try:
            os.rmdir(name, dir_fd=parent)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        return True

    def _sync_and_prune(self, directories: set[bytes]) -> None:
        """Make deletions durable, and remove directories that existed only for what was in them."""
        for directory in directories:
            while True:
                full = self._root + b"/" + directory if directory else self._root
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    fsync_directory(full)
                if not directory:
                    break
                with self._exclusive():
                    try:
                        etag = etag_of(os.lstat(full))
                        key = encode_path(directory + b"/")
                        if not self._meta.load(full, key, etag).implicit:
                            break
                        os.rmdir(full)
                        self._meta.drop(None, key, etag)
                    except OSError:
                        break  # not empty, or gone
                directory = directory.rpartition(b"/")[0]

    def _fail(self, error: OSError, key: str, operation: str, *, writing: bool = False) -> NoReturn:
        code = error.errno
        text = f"{key or '/'}: {operation} in {self.url}: {os.strerror(code or errno.EIO)}"
        if code in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV):
            self._check_root(key)
            if not writing:
                raise ObjectNotFound(f"{key}: no such object") from None
        if code in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StoreAccessDenied(text) from error
        if code in (errno.ENAMETOOLONG, errno.EINVAL, errno.EXDEV):
            raise StoreConfigError(text) from error
        raise StoreUnavailable(text) from error


def _check_condition(key: str, current: str | None, condition: Condition) -> None:
    if condition.if_absent and current is not None:
        raise PreconditionFailed(f"{key}: exists")
    if condition.if_match is not None and current != condition.if_match:
        raise PreconditionFailed(f"{key}: is version {current}, not {condition.if_match}")


def _identity(path: bytes) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
