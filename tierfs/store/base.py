"""The contract of an object store.

Owns: nothing but its connections. A store never caches, never retries (``store.retry`` does) and never
interprets a key.

Who may call: any worker thread, any number at once; every method blocks. Never the trio thread.

Raises: only ``errors.StoreError`` and its children, each naming the key. What is worth another try is a
``TransientStoreError``. 404 is ``ObjectNotFound``, 403 is ``StoreAccessDenied``, 412 is
``PreconditionFailed``. A body that ends early is ``ShortBody`` and none of it is returned.

Keys are ``str`` relative to the bucket (the mount's prefix is already in front of them), as the S3 API has
them. ``tierfs.store.keys`` maps POSIX names to keys and back. ETags are without quotes. Sizes and names
that a store answers are not trusted: the range, the length and the prefix of every answer are checked.

Source of the rules: Amazon S3 API reference (GetObject, PutObject, ListObjectsV2, UploadPart,
UploadPartCopy, CompleteMultipartUpload, DeleteObjects).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from tierfs.store.body import Consume
from tierfs.types import ObjectInfo

MAX_KEY_BYTES = 1024
MAX_PARTS = 10_000
MIN_PART_SIZE_BYTES = 5 * 1024 * 1024
MAX_PART_SIZE_BYTES = 5 * 1024**3
MAX_SINGLE_COPY_BYTES = 5 * 1024**3
MAX_OBJECT_BYTES = 5 * 1024**4
LIST_PAGE_KEYS = 1000

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreCapabilities:
    """What this store can do beyond the basics; found out by ``probe``, not believed from a name."""

    conditional_put: bool
    conditional_copy: bool
    conditional_delete: bool
    part_copy: bool
    keeps_directory_markers: bool


@dataclass(frozen=True, slots=True)
class ListPage:
    """One page of a listing. ``prefixes`` end in ``/``. ``next_token`` is None on the last page.

    Keys come in no particular order. Listings carry no user metadata.
    """

    objects: Sequence[ObjectInfo]
    prefixes: Sequence[str]
    next_token: str | None


@dataclass(frozen=True, slots=True)
class Condition:
    """``if_match``: the ETag that the object must have now. ``if_absent``: it must not exist."""

    if_match: str | None = None
    if_absent: bool = False


UNCONDITIONAL = Condition()


@dataclass(frozen=True, slots=True)
class Part:
    number: int
    etag: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    key: str
    upload_id: str
    started_ns: int


@dataclass(frozen=True, slots=True)
class DeleteFailure:
    """Why a key was not deleted. ``replaced``: it holds another version than the one that was to go."""

    key: str
    message: str
    replaced: bool = False


@dataclass(slots=True)
class RequestCounts:
    """Requests sent, by operation name (``list``, ``head``, ``get``, ``put``...), and body bytes."""

    by_operation: dict[str, int] = field(default_factory=dict)
    bytes_read: int = 0
    bytes_written: int = 0


class ObjectStore(Protocol):
    """See the module docstring for threads and errors."""

    @property
    def url(self) -> str:
        """The SOURCE this store was made from, without credentials."""
        ...

    @property
    def capabilities(self) -> StoreCapabilities: ...

    def check(self) -> None:
        """Raise unless the bucket can be listed now. The message says what to do about it."""
        ...

    def close(self) -> None: ...

    def list_page(
        self, prefix: str, *, recursive: bool = False, token: str | None = None, limit: int = LIST_PAGE_KEYS
    ) -> ListPage:
        """One page of what lies below ``prefix``; with ``recursive`` no delimiter is sent."""
        ...

    def head(self, key: str) -> ObjectInfo:
        """Size, ETag, mtime and user metadata (lower-case names)."""
        ...

    def get_range(self, key: str, offset_bytes: int, length_bytes: int, *,
                  if_match: str | None = None, version_id: str | None = None) -> bytes:
        """Exactly ``length_bytes`` bytes from ``offset_bytes``; the range must lie inside the object.

        With ``if_match`` the bytes are of that version or the call raises ``PreconditionFailed``.
        """
        ...

    def stream(self, key: str, offset_bytes: int, length_bytes: int, consume: Consume[T], *,
               if_match: str | None = None, version_id: str | None = None) -> T:
        """Like ``get_range``, for long ranges: ``consume`` takes the bytes while they come in.

        It is called in this thread, perhaps several times, each time with a body from the start. What it
        returned last is returned if all bytes were right; if the call raises, they may have been wrong.
        Should it stop before the end of the body, that goes unnoticed here.
        """
        ...

    def put(self, key: str, body: Buffer, *, metadata: Mapping[str, str] | None = None,
            condition: Condition = UNCONDITIONAL) -> ObjectInfo:
        """Create or replace the object in one request."""
        ...

    def copy(self, source: ObjectInfo, target_key: str, *, metadata: Mapping[str, str] | None = None,
             condition: Condition = UNCONDITIONAL) -> ObjectInfo:
        """Copy on the server, pinned to ``source.etag``; in parts above 5 GiB (``MAX_SINGLE_COPY_BYTES``).

        ``metadata`` None keeps the source's metadata, else it replaces it. ``target_key`` may equal the
        source key (then only metadata change). ``condition`` speaks of the target.
        """
        ...

    def delete(self, key: str, *, if_match: str | None = None) -> None:
        """Deleting what is not there succeeds.

        With ``if_match`` only that version is deleted; ``PreconditionFailed`` if another one is there.
        """
        ...

    def delete_many(self, keys: Sequence[str], etags: Mapping[str, str] | None = None
                    ) -> Sequence[DeleteFailure]:
        """Delete any number of keys (sent in batches of 1000); returns those that were not deleted.

        Of a key in ``etags`` only that version is deleted; if another one is there, the key is returned as
        ``replaced``. Where ``capabilities.conditional_delete`` says no, batches take any version.
        """
        ...

    def start_multipart(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        """Begin a multipart upload; returns its upload id."""
        ...

    def upload_part(self, key: str, upload_id: str, number: int, body: Buffer) -> Part: ...

    def copy_part(self, key: str, upload_id: str, number: int, source: ObjectInfo,
                  offset_bytes: int, length_bytes: int) -> Part:
        """One part whose bytes are a range of ``source``, copied on the server, pinned to its ETag."""
        ...

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[Part], *,
                           condition: Condition = UNCONDITIONAL) -> ObjectInfo: ...

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """Aborting what is not there succeeds."""
        ...

    def list_unfinished_uploads(self, prefix: str) -> Sequence[UnfinishedUpload]: ...


def part_size_for(size_bytes: int, preferred_bytes: int) -> int:
    """The part size for an object of that size: ``preferred_bytes``, grown until 10,000 parts suffice.

    Source: S3 user guide, "Amazon S3 multipart upload limits" (parts of 5 MiB to 5 GiB, 10,000 of them,
    5 TiB in all).
    """
    part = max(preferred_bytes, MIN_PART_SIZE_BYTES)
    least = -(-size_bytes // MAX_PARTS)
    if least > part:
        part = -(-least // (1024 * 1024)) * 1024 * 1024
    return part


def lower_names(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """User metadata as every store returns them: with lower-case names."""
    return {name.lower(): value for name, value in (metadata or {}).items()}
