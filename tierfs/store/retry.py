"""A store that tries again: the only place where a request is repeated.

What is a ``TransientStoreError`` is repeated with exponentially growing, jittered pauses until
``timeout_s`` have passed since the first attempt; then the last error is raised as it is. An expired token
is refreshed and tried again at once. A pause the server asks for is honoured, within the time left.

A write whose answer was lost may have been carried out, so that its repetition meets its own success. A
conditional put, copy or completion that fails its condition *after* such a loss is therefore compared with
what the store holds now: if that is what was to be written, the write has succeeded. An upload in parts that
was started without our learning its name is looked for and aborted.

Called from any worker thread; sleeps in it. ``close`` wakes the sleepers, which then raise what they had.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from tierfs.errors import (
    ClockSkewed,
    CredentialsExpired,
    ObjectNotFound,
    PreconditionFailed,
    StoreError,
    StoreThrottled,
    TransientStoreError,
)
from tierfs.log import get_logger
from tierfs.metrics import Metrics
from tierfs.store.base import (
    LIST_PAGE_KEYS,
    UNCONDITIONAL,
    Buffer,
    Condition,
    DeleteFailure,
    ListPage,
    ObjectStore,
    Part,
    UnfinishedUpload,
    lower_names,
)
from tierfs.store.body import Consume
from tierfs.store.counting import FAILURES, RETRIES
from tierfs.store.prepared import PreparedGet, way_of
from tierfs.store.wrapper import StoreWrapper
from tierfs.types import ObjectInfo

_log = get_logger(__name__)
T = TypeVar("T")

_CLOCK_SKEW_NS = 15 * 60 * 10**9
"""Servers refuse requests of clients whose clock is further off."""
_FIRST_PAUSE_S = 0.1
_FIRST_THROTTLED_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 5.0
"""Also how late, at worst, a waiting request notices that an outage has ended."""
_CHECK_TIMEOUT_S = 10.0
_OUTAGE_S = 2.0
_CERTAINLY_NOT_DONE = (StoreThrottled, CredentialsExpired, ClockSkewed)


@runtime_checkable
class Refreshable(Protocol):
    """A store whose credentials can be fetched anew."""

    def refresh_credentials(self) -> None: ...


class RetryingStore(StoreWrapper):
    """Wraps a store; the contract is ``base.ObjectStore``. ``timeout_s`` bounds when a retry may begin."""

    def __init__(self, inner: ObjectStore, *, timeout_s: float, metrics: Metrics | None = None,
                 clock: Callable[[], float] = time.monotonic,
                 sleep: Callable[[float], None] | None = None,
                 jitter: Callable[[], float] = random.random) -> None:
        super().__init__(inner)
        self.retries = 0
        """Requests repeated since the store was opened."""
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._clock = clock
        self._closing = threading.Event()
        self._sleep: Callable[[float], object] = sleep or self._closing.wait
        self._jitter = jitter
        self._lock = threading.Lock()
        self._failing_since: float | None = None
        self._last_error: str | None = None
        self._outage_logged = False
        self._started: dict[str, dict[str, str]] = {}

    @property
    def failure(self) -> str | None:
        """The error of the last attempt if it was a transient one, else None: is the store well?"""
        return self._last_error

    def stop_retrying(self) -> None:
        """From now on the first failure of a request is its last: the mount ends."""
        self._closing.set()

    def close(self) -> None:
        self._closing.set()
        super().close()

    def check(self) -> None:
        """Gives up after 10 s, so that ``tierfs mount`` can say what is wrong while somebody waits."""
        self._retry("check", self.inner.check, timeout_s=min(self._timeout_s, _CHECK_TIMEOUT_S))

    # Requests that can simply be sent again

    def list_page(
        self, prefix: str, *, recursive: bool = False, token: str | None = None, limit: int = LIST_PAGE_KEYS
    ) -> ListPage:
        return self._retry("list", lambda: self.inner.list_page(
            prefix, recursive=recursive, token=token, limit=limit))

    def head(self, key: str) -> ObjectInfo:
        return self._retry("head", lambda: self.inner.head(key))

    def get_range(self, key: str, offset_bytes: int, length_bytes: int, *,
                  if_match: str | None = None, version_id: str | None = None) -> bytes:
        return self._retry("get", lambda: self.inner.get_range(
            key, offset_bytes, length_bytes, if_match=if_match, version_id=version_id))

    def prepare_get(self, key: str, offset_bytes: int, length_bytes: int, *, etag: str | None = None,
                    version_id: str | None = None) -> PreparedGet | None:
        """That of the store below, if it has one. It is not tried again."""
        way = way_of(self.inner)
        return None if way is None else way(key, offset_bytes, length_bytes, etag=etag, version_id=version_id)

    def stream(self, key: str, offset_bytes: int, length_bytes: int, consume: Consume[T], *,
               if_match: str | None = None, version_id: str | None = None) -> T:
        return self._retry("get", lambda: self.inner.stream(
            key, offset_bytes, length_bytes, consume, if_match=if_match, version_id=version_id))

    def delete(self, key: str, *, if_match: str | None = None) -> None:
        self._retry("delete", lambda: self.inner.delete(key, if_match=if_match))

    def delete_many(self, keys: Sequence[str], etags: Mapping[str, str] | None = None
                    ) -> Sequence[DeleteFailure]:
        """Keys that failed in the batch are tried once more, each by itself."""
        still: list[DeleteFailure] = []
        for failure in self._retry("delete_many", lambda: self.inner.delete_many(keys, etags)):
            if failure.replaced:
                still.append(failure)
                continue
            try:
                self.delete(failure.key, if_match=etags.get(failure.key) if etags else None)
            except StoreError as error:
                still.append(DeleteFailure(failure.key, str(error), isinstance(error, PreconditionFailed)))
        return still

    def start_multipart(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        began_ns = time.time_ns()
        answer_lost = False

        def start() -> str:
            nonlocal answer_lost
            try:
                return self.inner.start_multipart(key, metadata=metadata)
            except TransientStoreError as error:
                answer_lost = answer_lost or not isinstance(error, _CERTAINLY_NOT_DONE)
                raise

        upload_id = self._retry("start_multipart", start)
        with self._lock:
            self._started[upload_id] = lower_names(metadata)
        if answer_lost:
            self._abort_nameless(key, began_ns)
        return upload_id

    def _abort_nameless(self, key: str, since_ns: int) -> None:
        """Uploads to ``key`` that were started for us, and whose names we were never told.

        One that another node has just started for the same object is among them; it begins anew.
        """
        try:
            for upload in self.list_unfinished_uploads(key):
                is_new = upload.started_ns >= since_ns - _CLOCK_SKEW_NS
                if upload.key == key and is_new and upload.upload_id not in self._started:
                    self.abort_multipart(key, upload.upload_id)
        except StoreError as error:
            _log.warning("an upload without a name may be left in the store", key=key, reason=str(error))

    def upload_part(self, key: str, upload_id: str, number: int, body: Buffer) -> Part:
        return self._retry("upload_part", lambda: self.inner.upload_part(key, upload_id, number, body))

    def copy_part(self, key: str, upload_id: str, number: int, source: ObjectInfo,
                  offset_bytes: int, length_bytes: int) -> Part:
        return self._retry("copy_part", lambda: self.inner.copy_part(
            key, upload_id, number, source, offset_bytes, length_bytes))

    def abort_multipart(self, key: str, upload_id: str) -> None:
        self._retry("abort_multipart", lambda: self.inner.abort_multipart(key, upload_id))
        with self._lock:
            self._started.pop(upload_id, None)

    def list_unfinished_uploads(self, prefix: str) -> Sequence[UnfinishedUpload]:
        return self._retry("list_uploads", lambda: self.inner.list_unfinished_uploads(prefix))

    # Requests whose repetition may meet their own success

    def put(self, key: str, body: Buffer, *, metadata: Mapping[str, str] | None = None,
            condition: Condition = UNCONDITIONAL) -> ObjectInfo:
        def is_ours(found: ObjectInfo) -> bool:
            data = memoryview(body).cast("B")
            if found.size_bytes != len(data) or dict(found.metadata or {}) != lower_names(metadata):
                return False
            if found.etag == hashlib.md5(data, usedforsecurity=False).hexdigest():
                return True
            # An ETag need not be an MD5 (encryption, other servers): compare the bytes.
            return not len(data) or self.inner.get_range(key, 0, len(data), if_match=found.etag) == data

        return self._retry("put", lambda: self.inner.put(key, body, metadata=metadata, condition=condition),
                           key=key, is_ours=is_ours)

    def copy(self, source: ObjectInfo, target_key: str, *, metadata: Mapping[str, str] | None = None,
             condition: Condition = UNCONDITIONAL) -> ObjectInfo:
        def is_ours(found: ObjectInfo) -> bool:
            if found.size_bytes != source.size_bytes:
                return False
            if metadata is None:
                return found.etag == source.etag and source.key != target_key
            return dict(found.metadata or {}) == lower_names(metadata)

        return self._retry("copy", lambda: self.inner.copy(
            source, target_key, metadata=metadata, condition=condition), key=target_key, is_ours=is_ours)

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[Part], *,
                           condition: Condition = UNCONDITIONAL) -> ObjectInfo:
        def is_ours(found: ObjectInfo) -> bool:
            if found.size_bytes != sum(part.size_bytes for part in parts):
                return False
            with self._lock:
                metadata = self._started.get(upload_id)
            return found.etag == multipart_etag(parts) or (
                bool(metadata) and dict(found.metadata or {}) == metadata)

        info = self._retry("complete_multipart", lambda: self.inner.complete_multipart(
            key, upload_id, parts, condition=condition), key=key, is_ours=is_ours)
        with self._lock:
            self._started.pop(upload_id, None)
        return info

    # The loop

    def _retry(self, operation: str, attempt: Callable[[], T], *, key: str = "",
               is_ours: Callable[[ObjectInfo], bool] | None = None, timeout_s: float | None = None) -> T:
        deadline = self._clock() + (self._timeout_s if timeout_s is None else timeout_s)
        tries = 0
        answer_lost = False
        refreshed = False
        while True:
            try:
                result = attempt()
            except TransientStoreError as error:
                self._note_failure(operation, error)
                answer_lost = answer_lost or not isinstance(error, _CERTAINLY_NOT_DONE)
                pause_s = self._pause_s(tries, error)
                if isinstance(error, CredentialsExpired) and not refreshed:
                    refreshed = self._refresh(error)
                    pause_s = 0.0 if refreshed else pause_s
                if self._clock() + pause_s > deadline or self._closing.is_set():
                    raise
                if pause_s:
                    self._sleep(pause_s)
                tries += 1
                self._note_retry(operation)
            except (PreconditionFailed, ObjectNotFound):
                self._note_success()
                if answer_lost and is_ours is not None:
                    found = self._own_success(key, is_ours)
                    if found is not None:
                        return found  # type: ignore[return-value]  # is_ours is given with ObjectInfo only
                raise
            else:
                self._note_success()
                return result

    def _own_success(self, key: str, is_ours: Callable[[ObjectInfo], bool]) -> ObjectInfo | None:
        try:
            found = self.head(key)
            return found if is_ours(found) else None
        except StoreError:
            return None  # the caller raises what it had

    def _pause_s(self, tries: int, error: TransientStoreError) -> float:
        first_s = _FIRST_THROTTLED_PAUSE_S if isinstance(error, StoreThrottled) else _FIRST_PAUSE_S
        full_s = min(_LONGEST_PAUSE_S, first_s * 2.0 ** min(tries, 16))
        # Half of it is fixed: with full jitter many clients come back at once after a short draw.
        return max(full_s * (0.5 + self._jitter() / 2), error.retry_after_s or 0.0)

    def _refresh(self, error: StoreError) -> bool:
        if not isinstance(self.inner, Refreshable):
            return False
        try:
            self.inner.refresh_credentials()
        except StoreError as failure:
            _log.warning("credentials could not be refreshed", error=str(failure), after=str(error))
            return False
        return True

    def _note_retry(self, operation: str) -> None:
        with self._lock:
            self.retries += 1
        if self._metrics is not None:
            self._metrics.counter(RETRIES, "Requests to the object store that were repeated",
                                  operation=operation).add()

    def _note_failure(self, operation: str, error: TransientStoreError) -> None:
        if self._metrics is not None:
            self._metrics.counter(FAILURES, "Attempts at a request that failed and may be repeated",
                                  operation=operation, kind=type(error).__name__).add()
        with self._lock:
            self._last_error = str(error)
            if self._failing_since is None:
                self._failing_since = self._clock()
            failing_s = self._clock() - self._failing_since
            # One line per outage, none for single failures among successes, which are counted anyway.
            if self._outage_logged or failing_s < _OUTAGE_S:
                return
            self._outage_logged = True
        _log.warning("store failing", store=self.url, since_s=round(failing_s, 1), operation=operation,
                     kind=type(error).__name__, error=str(error))

    def _note_success(self) -> None:
        if self._last_error is None:
            return
        with self._lock:
            since, self._failing_since, self._last_error = self._failing_since, None, None
            was_logged, self._outage_logged = self._outage_logged, False
        if since is not None and was_logged:
            _log.info("store recovered", store=self.url, after_s=round(self._clock() - since, 1))


def multipart_etag(parts: Sequence[Part]) -> str | None:
    """The ETag that S3 gives an object made of these parts, if their ETags are MD5 digests."""
    try:
        digests = b"".join(bytes.fromhex(part.etag) for part in parts)
    except ValueError:
        return None
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"
