"""A store that fails on purpose, for tests, and for trying out what an outage looks like.

Wraps any store, below its retries. What goes wrong is a list of rules; the first that matches a request
(and whose dice fall) is applied. Rules are set by the test (``Faults``), or read from a JSON file that the
environment variable ``TIERFS_FAULTS`` names (``FileFaults``), so that a running mount can be made to fail::

    {"seed": 7, "rules": [{"kind": "throttle", "operation": "get", "probability": 0.2},
                          {"kind": "latency", "seconds": 0.05, "bytes_per_s": 50e6}]}

``latency`` rules all apply, in addition to at most one other. A file that does not decode changes nothing
and is logged.
"""

from __future__ import annotations

import fnmatch
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

import msgspec

from tierfs.errors import (
    ClockSkewed,
    CredentialsExpired,
    ShortBody,
    StoreAccessDenied,
    StoreThrottled,
    StoreTimeout,
    StoreUnavailable,
)
from tierfs.log import get_logger
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
)
from tierfs.store.body import Consume
from tierfs.store.wrapper import StoreWrapper
from tierfs.types import ObjectInfo

FAULTS_ENVIRONMENT = "TIERFS_FAULTS"
_FILE_CHECK_S = 0.1
_BLOCK_CHECK_S = 0.05
_log = get_logger(__name__)
T = TypeVar("T")

Kind = Literal[
    "outage",  # refused; nothing was done
    "lost_answer",  # done, but the connection broke before the answer
    "throttle",  # 503 SlowDown
    "short_body",  # the body ended early
    "whole_object",  # a range was asked for, everything came
    "hang",  # no answer for ``seconds``, then a timeout
    "block",  # no answer while the rule is in force, then fine
    "latency",  # slow, then fine
    "expired_token",  # until refresh_credentials() is called
    "clock_skew",
    "access_denied",
    "wrong_etag",  # answers of head, list, put... carry an ETag that no object has
]


class Rule(msgspec.Struct, forbid_unknown_fields=True):
    """``operation`` and ``key`` are glob patterns. ``count``: how often it strikes; None: for ever."""

    kind: Kind
    operation: str = "*"
    key: str = "*"
    probability: float = 1.0
    count: int | None = None
    seconds: float = 0.0
    bytes_per_s: float = 0.0


class _File(msgspec.Struct, forbid_unknown_fields=True):
    rules: list[Rule] = []
    seed: int = 0


class Faults:
    """The rules in force; may be changed at any time from any thread."""

    def __init__(self, *rules: Rule, seed: int = 0) -> None:
        self._rules = list(rules)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.struck: dict[str, int] = {}
        """How often each kind was applied."""

    def set(self, *rules: Rule) -> None:
        with self._lock:
            self._rules = list(rules)

    def clear(self) -> None:
        self.set()

    def reseed(self, seed: int) -> None:
        with self._lock:
            self._random = random.Random(seed)

    def choose(self, operation: str, key: str) -> list[Rule]:
        """The rules to apply to this request: any latencies, then at most one other."""
        chosen: list[Rule] = []
        with self._lock:
            for rule in self._rules:
                if rule.count == 0 or not _matches(rule, operation, key):
                    continue
                if self._random.random() >= rule.probability:
                    continue
                if rule.count is not None:
                    rule.count -= 1
                chosen.append(rule)
                self.struck[rule.kind] = self.struck.get(rule.kind, 0) + 1
                if rule.kind != "latency":
                    break
        return chosen

    def is_in_force(self, rule: Rule) -> bool:
        with self._lock:
            return any(one is rule for one in self._rules)

    def end_expiry(self) -> None:
        with self._lock:
            self._rules = [rule for rule in self._rules if rule.kind != "expired_token"]


class FileFaults(Faults):
    """Rules from a file, looked at no more often than every 100 ms; no file: no faults."""

    def __init__(self, path: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._path = path
        self._clock = clock
        self._next_check = 0.0
        self._seen: tuple[int, int, int] | None = None
        self._reloading = threading.Lock()

    def choose(self, operation: str, key: str) -> list[Rule]:
        self._reload()
        return super().choose(operation, key)

    def is_in_force(self, rule: Rule) -> bool:
        self._reload()
        return super().is_in_force(rule)

    def _reload(self) -> None:
        # Whoever comes while somebody reads waits for what that brings: it may be older than their request.
        with self._reloading:
            if self._clock() >= self._next_check:
                self._next_check = self._clock() + _FILE_CHECK_S
                self._read()

    def _read(self) -> None:
        try:
            status = os.stat(self._path)
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
            if seen == self._seen:
                return
            with open(self._path, "rb") as file:
                content = msgspec.json.decode(file.read(), type=_File)
        except FileNotFoundError:
            if self._seen is not None:
                self._seen = None
                self.clear()
            return
        except (OSError, msgspec.DecodeError) as error:
            _log.warning("faults file unusable", path=self._path, error=str(error))
            return
        self._seen = seen
        self.set(*content.rules)
        self.reseed(content.seed)
        _log.info("faults changed", path=self._path, kinds=[rule.kind for rule in content.rules])


class FaultyStore(StoreWrapper):
    """Wraps a store; the contract is ``base.ObjectStore``."""

    def __init__(self, inner: ObjectStore, faults: Faults, *,
                 sleep: Callable[[float], None] | None = None) -> None:
        super().__init__(inner)
        self.faults = faults
        self._closing = threading.Event()
        self._sleep: Callable[[float], object] = sleep or self._closing.wait
        self.refreshes = 0

    def refresh_credentials(self) -> None:
        self.refreshes += 1
        self.faults.end_expiry()
        refresh = getattr(self.inner, "refresh_credentials", None)
        if refresh is not None:
            refresh()

    def close(self) -> None:
        self._closing.set()
        super().close()

    def check(self) -> None:
        self._do("check", "", self.inner.check)

    def list_page(
        self, prefix: str, *, recursive: bool = False, token: str | None = None, limit: int = LIST_PAGE_KEYS
    ) -> ListPage:
        return self._do("list", prefix, lambda: self.inner.list_page(
            prefix, recursive=recursive, token=token, limit=limit))

    def head(self, key: str) -> ObjectInfo:
        return self._do("head", key, lambda: self.inner.head(key))

    def get_range(self, key: str, offset_bytes: int, length_bytes: int, *,
                  if_match: str | None = None, version_id: str | None = None) -> bytes:
        return self._do("get", key, lambda: self.inner.get_range(
            key, offset_bytes, length_bytes, if_match=if_match, version_id=version_id), length_bytes)

    def stream(self, key: str, offset_bytes: int, length_bytes: int, consume: Consume[T], *,
               if_match: str | None = None, version_id: str | None = None) -> T:
        return self._do("get", key, lambda: self.inner.stream(
            key, offset_bytes, length_bytes, consume, if_match=if_match, version_id=version_id), length_bytes)

    def put(self, key: str, body: Buffer, *, metadata: Mapping[str, str] | None = None,
            condition: Condition = UNCONDITIONAL) -> ObjectInfo:
        return self._do("put", key, lambda: self.inner.put(
            key, body, metadata=metadata, condition=condition), len(body))

    def copy(self, source: ObjectInfo, target_key: str, *, metadata: Mapping[str, str] | None = None,
             condition: Condition = UNCONDITIONAL) -> ObjectInfo:
        return self._do("copy", target_key, lambda: self.inner.copy(
            source, target_key, metadata=metadata, condition=condition))

    def delete(self, key: str, *, if_match: str | None = None) -> None:
        self._do("delete", key, lambda: self.inner.delete(key, if_match=if_match))

    def delete_many(self, keys: Sequence[str], etags: Mapping[str, str] | None = None
                    ) -> Sequence[DeleteFailure]:
        return self._do("delete_many", keys[0] if keys else "", lambda: self.inner.delete_many(keys, etags))

    def start_multipart(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        return self._do("start_multipart", key, lambda: self.inner.start_multipart(key, metadata=metadata))

    def upload_part(self, key: str, upload_id: str, number: int, body: Buffer) -> Part:
        return self._do("upload_part", key, lambda: self.inner.upload_part(key, upload_id, number, body),
                        len(body))

    def copy_part(self, key: str, upload_id: str, number: int, source: ObjectInfo,
                  offset_bytes: int, length_bytes: int) -> Part:
        return self._do("copy_part", key, lambda: self.inner.copy_part(
            key, upload_id, number, source, offset_bytes, length_bytes))

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[Part], *,
                           condition: Condition = UNCONDITIONAL) -> ObjectInfo:
        return self._do("complete_multipart", key, lambda: self.inner.complete_multipart(
            key, upload_id, parts, condition=condition))

    def abort_multipart(self, key: str, upload_id: str) -> None:
        self._do("abort_multipart", key, lambda: self.inner.abort_multipart(key, upload_id))

    def list_unfinished_uploads(self, prefix: str) -> Sequence[UnfinishedUpload]:
        return self._do("list_uploads", prefix, lambda: self.inner.list_unfinished_uploads(prefix))

    def _do(self, operation: str, key: str, request: Callable[[], T], body_bytes: int = 0) -> T:
        result: T
        for rule in self.faults.choose(operation, key):
            what = f"{key}: {operation}: injected fault: {rule.kind}"
            match rule.kind:
                case "latency":
                    self._sleep(rule.seconds + (body_bytes / rule.bytes_per_s if rule.bytes_per_s else 0.0))
                case "outage":
                    raise StoreUnavailable(what)
                case "lost_answer":
                    request()
                    raise StoreUnavailable(what)
                case "throttle":
                    error = StoreThrottled(what)
                    error.retry_after_s = rule.seconds or None
                    raise error
                case "short_body" | "whole_object":
                    request()
                    raise ShortBody(what)
                case "hang":
                    self._sleep(rule.seconds)
                    raise StoreTimeout(what)
                case "block":
                    while self.faults.is_in_force(rule) and not self._sleep(_BLOCK_CHECK_S):
                        pass
                case "expired_token":
                    raise CredentialsExpired(what)
                case "clock_skew":
                    raise ClockSkewed(what)
                case "access_denied":
                    raise StoreAccessDenied(what)
                case "wrong_etag":
                    result = request()
                    return _with_wrong_etag(result)
        return request()


def _matches(rule: Rule, operation: str, key: str) -> bool:
    return fnmatch.fnmatchcase(operation, rule.operation) and fnmatch.fnmatchcase(key, rule.key)


def _with_wrong_etag(result: T) -> T:
    if isinstance(result, ObjectInfo):
        return _relabel(result)  # type: ignore[return-value]
    if isinstance(result, ListPage):
        relabelled = [_relabel(info) for info in result.objects]
        return ListPage(relabelled, result.prefixes, result.next_token)  # type: ignore[return-value]
    return result


def _relabel(info: ObjectInfo) -> ObjectInfo:
    return ObjectInfo(info.key, info.size_bytes, "f" * 32, info.mtime_ns, info.version_id, info.metadata)
