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

A put is a temporary file in ``.tierfs/tmp`` that is renamed into place (``local_placing``); ``local_removal``
takes objects away. ``.tierfs/uploads`` holds unfinished multipart uploads, and ``.tierfs/meta`` metadata
where extended attributes are not available.

Any thread; see ``base.ObjectStore`` for what is raised.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from tierfs.errors import (
    ObjectNotFound,
    PreconditionFailed,
    StoreConfigError,
    StoreError,
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
    lower_names,
)
from tierfs.store.body import Consume, FileBody
from tierfs.store.counting import RequestMeter
from tierfs.store.keys import encode_path
from tierfs.store.local_files import copy_range, write_all
from tierfs.store.local_meta import MetadataKeeper, Record
from tierfs.store.local_place import Place
from tierfs.store.local_placing import Placing
from tierfs.store.local_removal import Removal
from tierfs.store.local_uploads import Uploads
from tierfs.store.local_walk import HIDDEN_DIR, Walker, etag_of, info_of
from tierfs.types import ObjectInfo

T = TypeVar("T")


class LocalStore:
    """See the module docstring; the contract is ``base.ObjectStore``."""

    def __init__(self, directory: str | os.PathLike[str], *, metrics: Metrics | None = None,
                 use_xattrs: bool = True, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._place = Place(directory)
        self._meter = RequestMeter(metrics)
        self.counts = self._meter.counts
        self._now_ns = now_ns
        self._meta = MetadataKeeper(self._place.hidden + b"/meta", use_xattrs=use_xattrs)
        self._placing = Placing(self._place, self._meta, now_ns)
        self._removal = Removal(self._place, self._meta)
        self._uploads = Uploads(self._place.hidden + b"/uploads")
        self._walker = Walker(self._place.root, marker_of=self._marker_of, stat_link=self._place.stat_link,
                              on_skipped=self._place.note_skipped)

    def __repr__(self) -> str:
        return f"LocalStore({self.url!r})"

    @property
    def url(self) -> str:
        return self._place.url

    @property
    def capabilities(self) -> StoreCapabilities:
        return StoreCapabilities(conditional_put=True, conditional_copy=True, conditional_delete=True,
                                 part_copy=True, keeps_directory_markers=True)

    def check(self) -> None:
        try:
            self._place.check("")
            with os.scandir(self._place.root) as entries:
                next(entries, None)
        except OSError as error:
            self._place.failure(error, "", "list")

    def close(self) -> None:
        self._place.close()

    # Reading

    def list_page(
        self, prefix: str, *, recursive: bool = False, token: str | None = None, limit: int = LIST_PAGE_KEYS
    ) -> ListPage:
        self._meter.note("list")
        try:
            self._place.check(prefix)
            return self._walker.page(prefix, recursive, token, max(1, min(limit, LIST_PAGE_KEYS)))
        except (FileNotFoundError, NotADirectoryError):
            return ListPage((), (), None)
        except OSError as error:
            self._place.failure(error, prefix, "list")

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

    def stream(self, key: str, offset_bytes: int, length_bytes: int, consume: Consume[T], *,
               if_match: str | None = None, version_id: str | None = None) -> T:
        self._meter.note("get")
        with self._object(key) as (descriptor, info):
            if if_match is not None and info.etag != if_match:
                raise PreconditionFailed(f"{key}: is version {info.etag}, not {if_match}")
            os.lseek(descriptor, offset_bytes, os.SEEK_SET)
            result = consume(FileBody(key, descriptor, length_bytes))
            self._meter.note_read(length_bytes)
            if if_match is not None and etag_of(os.fstat(descriptor)) != if_match:
                raise PreconditionFailed(f"{key}: changed while it was read")
            return result

    # Writing

    def put(self, key: str, body: Buffer, *, metadata: Mapping[str, str] | None = None,
            condition: Condition = UNCONDITIONAL) -> ObjectInfo:
        self._meter.note("put", written_bytes=len(memoryview(body).cast("B")))
        path = self._place.writable_path(key)
        record = Record(metadata=lower_names(metadata))
        try:
            if key.endswith("/"):
                if len(body):
                    raise StoreUnsupported(f"{key}: a directory store keeps no data in a key ending in '/'")
                return self._placing.put_marker(key, path, record, condition)
            with self._place.temporary() as (descriptor, temporary):
                write_all(descriptor, body, 0)
                return self._placing.publish(descriptor, temporary, key, path, record, condition)
        except OSError as error:
            self._place.failure(error, key, "put", writing=True)

    def copy(self, source: ObjectInfo, target_key: str, *, metadata: Mapping[str, str] | None = None,
             condition: Condition = UNCONDITIONAL) -> ObjectInfo:
        self._meter.note("copy")
        path = self._place.writable_path(target_key)
        with self._object(source.key) as (origin, info):
            self._check_source(source, info)
            try:
                record = (self._meta.load(origin, source.key, info.etag) if metadata is None
                          else Record(metadata=lower_names(metadata)))
                if target_key.endswith("/"):
                    marker = Record(metadata=record.metadata)
                    return self._placing.put_marker(target_key, path, marker, condition)
                if source.key == target_key and os.fstat(origin).st_nlink == 1:
                    return self._placing.change_metadata(origin, target_key, path, info, record, condition)
                with self._place.temporary() as (descriptor, temporary):
                    copy_range(origin, 0, descriptor, 0, info.size_bytes)
                    self._check_source(source, info_of(source.key, os.fstat(origin)))
                    return self._placing.publish(descriptor, temporary, target_key, path, record, condition)
            except OSError as error:
                self._place.failure(error, target_key, "copy", writing=True)

    def delete(self, key: str, *, if_match: str | None = None) -> None:
        self._meter.note("delete")
        parent = self._removal.delete(key, if_match)
        if parent is not None:
            self._removal.sync_and_prune({parent})

    def delete_many(self, keys: Sequence[str], etags: Mapping[str, str] | None = None
                    ) -> Sequence[DeleteFailure]:
        failures: list[DeleteFailure] = []
        for start in range(0, len(keys), 1000):
            self._meter.note("delete_many")
            parents: set[bytes] = set()
            for key in keys[start:start + 1000]:
                try:
                    parent = self._removal.delete(key, etags.get(key) if etags else None)
                except StoreError as error:
                    failures.append(DeleteFailure(key, str(error), isinstance(error, PreconditionFailed)))
                else:
                    if parent is not None:
                        parents.add(parent)
            self._removal.sync_and_prune(parents)
        return failures

    # Multipart

    def start_multipart(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        self._meter.note("start_multipart")
        self._place.writable_path(key)
        if key.endswith("/"):
            raise StoreUnsupported(f"{key}: a directory store keeps no data in a key ending in '/'")
        try:
            self._place.prepare()
            return self._uploads.start(key, lower_names(metadata), self._now_ns())
        except OSError as error:
            self._place.failure(error, key, "start_multipart", writing=True)

    def upload_part(self, key: str, upload_id: str, number: int, body: Buffer) -> Part:
        self._meter.note("upload_part", written_bytes=len(memoryview(body).cast("B")))
        try:
            return self._uploads.write_part(key, upload_id, number, body)
        except OSError as error:
            self._place.failure(error, key, "upload_part", writing=True)

    def copy_part(self, key: str, upload_id: str, number: int, source: ObjectInfo,
                  offset_bytes: int, length_bytes: int) -> Part:
        self._meter.note("copy_part")
        with self._object(source.key) as (origin, info):
            self._check_source(source, info)
            if offset_bytes + length_bytes > info.size_bytes:
                raise StoreConfigError(
                    f"{source.key}: no range {offset_bytes}+{length_bytes} in {info.size_bytes} bytes")
            try:
                part = self._uploads.copy_part(key, upload_id, number, origin, offset_bytes, length_bytes)
                self._check_source(source, info_of(source.key, os.fstat(origin)))
                return part
            except OSError as error:
                self._place.failure(error, key, "copy_part", writing=True)

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[Part], *,
                           condition: Condition = UNCONDITIONAL) -> ObjectInfo:
        self._meter.note("complete_multipart")
        path = self._place.writable_path(key)
        try:
            with self._uploads.assemble(key, upload_id, parts) as (descriptor, assembled, metadata):
                record = Record(metadata=metadata)
                return self._placing.publish(descriptor, assembled, key, path, record, condition)
        except OSError as error:
            self._place.failure(error, key, "complete_multipart", writing=True)

    def abort_multipart(self, key: str, upload_id: str) -> None:
        self._meter.note("abort_multipart")
        try:
            self._uploads.remove(upload_id)
        except OSError as error:
            self._place.failure(error, key, "abort_multipart", writing=True)

    def list_unfinished_uploads(self, prefix: str) -> Sequence[UnfinishedUpload]:
        self._meter.note("list_uploads")
        try:
            return self._uploads.unfinished(prefix)
        except OSError as error:
            self._place.failure(error, prefix, "list_uploads")

    # Reading objects

    @contextlib.contextmanager
    def _object(self, key: str) -> Iterator[tuple[int, ObjectInfo]]:
        """The object's file or directory, open for reading, and what it is."""
        descriptor, status = self._place.open(key)
        try:
            info = info_of(key, status)
            if key.endswith("/") and self._meta.load(descriptor, key, info.etag).implicit:
                raise ObjectNotFound(f"{key}: no such object")
            yield descriptor, info
        except OSError as error:
            self._place.failure(error, key, "read")
        finally:
            os.close(descriptor)

    def _marker_of(self, path: bytes) -> ObjectInfo | None:
        if path == HIDDEN_DIR + b"/":
            return None
        key = encode_path(path)
        full = self._place.full(path)
        try:
            info = info_of(key, os.lstat(full))
            record = self._meta.load(full, key, info.etag)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return None if record.implicit else info

    def _check_source(self, source: ObjectInfo, info: ObjectInfo) -> None:
        if info.etag != source.etag:
            raise PreconditionFailed(f"{source.key}: is version {info.etag}, not {source.etag}")
