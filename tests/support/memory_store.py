"""An object store in memory: the reference reading of the contract, for tests that need no server.

Unlike a directory it can hold any key (``a//b``, ``x`` beside ``x/y``, control characters). ``counts`` has
every request; ``fail`` (called with operation and key before each one) may raise or block; pages come in an
order of their own, because no client may rely on one.
"""

from __future__ import annotations

import bisect
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tierfs.errors import ObjectNotFound, PreconditionFailed, StoreConfigError
from tierfs.store.base import (
    LIST_PAGE_KEYS,
    UNCONDITIONAL,
    Buffer,
    Condition,
    DeleteFailure,
    ListPage,
    Part,
    RequestCounts,
    StoreCapabilities,
    UnfinishedUpload,
)
from tierfs.store.body import WholeBodies
from tierfs.types import ObjectInfo


@dataclass(slots=True)
class _Upload:
    key: str
    metadata: dict[str, str]
    started_ns: int
    parts: dict[int, tuple[Part, bytes]] = field(default_factory=dict)


class MemoryStore(WholeBodies):
    """Every method may be called from any thread. ``url`` is only a name."""

    def __init__(
        self,
        *,
        now_ns: Callable[[], int] = time.time_ns,
        fail: Callable[[str, str], None] | None = None,
        in_order: bool = False,
    ) -> None:
        self.now_ns = now_ns
        self.fail = fail
        self.in_order = in_order
        self.counts = RequestCounts()
        self.keys_asked: Counter[tuple[str, str]] = Counter()
        """(operation, key or prefix) -> requests."""
        self._lock = threading.RLock()
        self._objects: dict[str, tuple[ObjectInfo, bytes]] = {}
        self._sorted: list[str] | None = []
        self._uploads: dict[str, _Upload] = {}
        self._serial = 0

    # -- for tests ------------------------------------------------------------------------------------

    def set(self, key: str, body: bytes = b"", metadata: Mapping[str, str] | None = None) -> ObjectInfo:
        """What another client does: put without being counted."""
        with self._lock:
            return self._write(key, body, dict(metadata or {}))

    def fill(self, keys: Sequence[str], body: bytes = b"x") -> None:
        """Many objects at once."""
        with self._lock:
            for key in keys:
                self._write(key, body, {})

    def remove(self, key: str) -> None:
        """What another client does: delete without being counted."""
        with self._lock:
            if self._objects.pop(key, None) is not None:
                self._sorted = None

    def body(self, key: str) -> bytes:
        with self._lock:
            return self._objects[key][1]

    def bodies(self) -> dict[str, bytes]:
        """Everything, by key."""
        with self._lock:
            return {key: body for key, (_, body) in self._objects.items()}

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self._objects

    def keys(self) -> list[str]:
        with self._lock:
            return list(self._order())

    def info(self, key: str) -> ObjectInfo:
        with self._lock:
            return self._objects[key][0]

    def requests(self) -> dict[str, int]:
        """Requests so far by operation; then counts from zero."""
        with self._lock:
            counted, self.counts.by_operation = self.counts.by_operation, {}
            return counted

    # -- the contract -----------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return "memory://test"

    @property
    def capabilities(self) -> StoreCapabilities:
        return StoreCapabilities(
            conditional_put=True,
            conditional_copy=True,
            conditional_delete=True,
            part_copy=True,
            keeps_directory_markers=True,
        )

    def check(self) -> None:
        self._note("list", "")

    def close(self) -> None:
        return None

    def list_page(
        self, prefix: str, *, recursive: bool = False, token: str | None = None, limit: int = LIST_PAGE_KEYS
    ) -> ListPage:
        self._note("list", prefix)
        with self._lock:
            order = self._order()
            position = bisect.bisect_left(order, prefix if token is None else token)
            objects: list[ObjectInfo] = []
            prefixes: list[str] = []
            following: str | None = None
            while position < len(order) and order[position].startswith(prefix):
                key = order[position]
                if len(objects) + len(prefixes) >= limit:
                    following = key
                    break
                slash = -1 if recursive else key.find("/", len(prefix))
                if slash < 0:
                    objects.append(self._listed(key))
                    position += 1
                else:
                    prefixes.append(key[: slash + 1])
                    position = bisect.bisect_left(order, key[:slash] + "0")  # "0" follows "/"
            if not self.in_order:
                objects.reverse()
                prefixes.reverse()
            return ListPage(objects, prefixes, following)

    def head(self, key: str) -> ObjectInfo:
        self._note("head", key)
        with self._lock:
            return self._get(key)[0]

    def get_range(
        self,
        key: str,
        offset_bytes: int,
        length_bytes: int,
        *,
        if_match: str | None = None,
        version_id: str | None = None,
    ) -> bytes:
        self._note("get", key)
        with self._lock:
            info, body = self._get(key)
            if if_match is not None and info.etag != if_match:
                raise PreconditionFailed(key)
            if offset_bytes < 0 or length_bytes < 1 or offset_bytes + length_bytes > len(body):
                raise StoreConfigError(f"{key}: range {offset_bytes}+{length_bytes} of {len(body)}")
            self.counts.bytes_read += length_bytes
            return body[offset_bytes : offset_bytes + length_bytes]

    def put(
        self,
        key: str,
        body: Buffer,
        *,
        metadata: Mapping[str, str] | None = None,
        condition: Condition = UNCONDITIONAL,
    ) -> ObjectInfo:
        self._note("put", key)
        with self._lock:
            self._check(key, condition)
            self.counts.bytes_written += len(body)
            return self._write(key, bytes(body), dict(metadata or {}))

    def copy(
        self,
        source: ObjectInfo,
        target_key: str,
        *,
        metadata: Mapping[str, str] | None = None,
        condition: Condition = UNCONDITIONAL,
    ) -> ObjectInfo:
        self._note("copy", target_key)
        with self._lock:
            info, body = self._get(source.key)
            if info.etag != source.etag:
                raise PreconditionFailed(source.key)
            self._check(target_key, condition)
            return self._write(
                target_key, body, dict((info.metadata or {}) if metadata is None else metadata)
            )

    def delete(self, key: str, *, if_match: str | None = None) -> None:
        self._note("delete", key)
        with self._lock:
            if key in self._objects:
                self._check(key, Condition(if_match=if_match))
            self.remove(key)

    def delete_many(
        self, keys: Sequence[str], etags: Mapping[str, str] | None = None
    ) -> Sequence[DeleteFailure]:
        replaced: list[DeleteFailure] = []
        for start in range(0, len(keys), 1000):
            self._note("delete_many", keys[start])
            with self._lock:
                for key in keys[start : start + 1000]:
                    known = self._objects.get(key)
                    if known is not None and etags and etags.get(key, known[0].etag) != known[0].etag:
                        replaced.append(DeleteFailure(key, "another version", replaced=True))
                    else:
                        self.remove(key)
        return replaced

    def start_multipart(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        self._note("start_multipart", key)
        with self._lock:
            self._serial += 1
            upload_id = f"upload-{self._serial}"
            self._uploads[upload_id] = _Upload(key, dict(metadata or {}), self.now_ns())
            return upload_id

    def upload_part(self, key: str, upload_id: str, number: int, body: Buffer) -> Part:
        self._note("upload_part", key)
        with self._lock:
            part = Part(number, hashlib.md5(body).hexdigest(), len(body))
            self.counts.bytes_written += len(body)
            self._upload(key, upload_id).parts[number] = (part, bytes(body))
            return part

    def copy_part(
        self,
        key: str,
        upload_id: str,
        number: int,
        source: ObjectInfo,
        offset_bytes: int,
        length_bytes: int,
    ) -> Part:
        self._note("copy_part", key)
        with self._lock:
            info, body = self._get(source.key)
            if info.etag != source.etag:
                raise PreconditionFailed(source.key)
            piece = body[offset_bytes : offset_bytes + length_bytes]
            part = Part(number, hashlib.md5(piece).hexdigest(), len(piece))
            self._upload(key, upload_id).parts[number] = (part, piece)
            return part

    def complete_multipart(
        self, key: str, upload_id: str, parts: Sequence[Part], *, condition: Condition = UNCONDITIONAL
    ) -> ObjectInfo:
        self._note("complete_multipart", key)
        with self._lock:
            upload = self._upload(key, upload_id)
            self._check(key, condition)
            for part in parts:
                if upload.parts.get(part.number, (None, b""))[0] != part:
                    raise StoreConfigError(f"{key}: part {part.number} is not what was uploaded")
            body = b"".join(upload.parts[part.number][1] for part in parts)
            del self._uploads[upload_id]
            return self._write(key, body, upload.metadata, f"-{len(parts)}")

    def abort_multipart(self, key: str, upload_id: str) -> None:
        self._note("abort_multipart", key)
        with self._lock:
            self._uploads.pop(upload_id, None)

    def list_unfinished_uploads(self, prefix: str) -> Sequence[UnfinishedUpload]:
        self._note("list_unfinished_uploads", prefix)
        with self._lock:
            return [
                UnfinishedUpload(upload.key, upload_id, upload.started_ns)
                for upload_id, upload in self._uploads.items()
                if upload.key.startswith(prefix)
            ]

    # -- private ------------------------------------------------------------------------------------------

    def _note(self, operation: str, key: str) -> None:
        with self._lock:
            self.counts.by_operation[operation] = self.counts.by_operation.get(operation, 0) + 1
            self.keys_asked[operation, key] += 1
        if self.fail is not None:
            self.fail(operation, key)

    def _order(self) -> list[str]:
        if self._sorted is None:
            self._sorted = sorted(self._objects)
        return self._sorted

    def _get(self, key: str) -> tuple[ObjectInfo, bytes]:
        try:
            return self._objects[key]
        except KeyError:
            raise ObjectNotFound(key) from None

    def _listed(self, key: str) -> ObjectInfo:
        info = self._objects[key][0]
        return ObjectInfo(info.key, info.size_bytes, info.etag, info.mtime_ns)

    def _write(self, key: str, body: bytes, metadata: dict[str, str], suffix: str = "") -> ObjectInfo:
        # MD5 of the body alone would give a rewritten object its old ETag, as S3 does: keep that.
        etag = hashlib.md5(body).hexdigest() + suffix
        info = ObjectInfo(key, len(body), etag, self.now_ns(), None, metadata)
        if key not in self._objects:
            self._sorted = None
        self._objects[key] = (info, body)
        return info

    def _check(self, key: str, condition: Condition) -> None:
        known = self._objects.get(key)
        if condition.if_absent and known is not None:
            raise PreconditionFailed(key)
        if condition.if_match is not None and (known is None or known[0].etag != condition.if_match):
            raise PreconditionFailed(key)

    def _upload(self, key: str, upload_id: str) -> _Upload:
        upload = self._uploads.get(upload_id)
        if upload is None or upload.key != key:
            raise ObjectNotFound(f"{key}: upload {upload_id}")
        return upload
