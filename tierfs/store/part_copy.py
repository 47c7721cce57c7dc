"""Whether a store copies parts of objects on the server as ``ObjectStore.copy_part`` promises.

Found out by trying: what is missed is not an answer that says no, but a server that says yes and copies
something else, the whole object for a range or a newer version for the one that was asked for.
"""

from __future__ import annotations

import contextlib
import os

from tierfs.errors import ObjectNotFound, PreconditionFailed, StoreError, TransientStoreError
from tierfs.store.base import MIN_PART_SIZE_BYTES, ObjectStore
from tierfs.types import ObjectInfo

_OFFSET_BYTES = 4096
_LOOK_BYTES = 1024


def why_no_part_copy(store: ObjectStore, key: str) -> str | None:
    """None if parts can be copied, else what is wrong with it, in words.

    Writes two objects of 5 MiB, ``key`` and ``copy_key(key)``, the second one by a multipart upload, and
    removes them: S3 copies no range of a smaller one (Amazon S3 API reference, UploadPartCopy). Blocks.
    Raises ``StoreError`` if the store refuses something that has nothing to do with copying.
    """
    if not store.capabilities.part_copy:
        return "the store has no part copy"
    body = os.urandom(_OFFSET_BYTES + MIN_PART_SIZE_BYTES)
    try:
        source = store.put(key, body)
        return _why_not(store, source, copy_key(key), body)
    finally:
        with contextlib.suppress(StoreError):
            store.delete_many([key, copy_key(key)])


def copy_key(key: str) -> str:
    """The other object that ``why_no_part_copy(store, key)`` writes."""
    return f"{key}-copy"


def _why_not(store: ObjectStore, source: ObjectInfo, target: str, body: bytes) -> str | None:
    upload_id = store.start_multipart(target)
    is_complete = False
    try:
        try:
            part = store.copy_part(target, upload_id, 1, source, _OFFSET_BYTES, MIN_PART_SIZE_BYTES)
        except TransientStoreError:
            raise
        except StoreError as error:
            return f"a part cannot be copied: {error}"
        if not _refuses_other_versions(store, source, target, upload_id):
            return "it copies parts of another version than the one that it was asked for"
        store.complete_multipart(target, upload_id, [part])
        is_complete = True
    finally:
        if not is_complete:
            with contextlib.suppress(StoreError):
                store.abort_multipart(target, upload_id)
    found = store.head(target)
    wanted = body[_OFFSET_BYTES:]
    ends = 0, MIN_PART_SIZE_BYTES - _LOOK_BYTES
    if found.size_bytes != len(wanted) or any(
        store.get_range(target, start, _LOOK_BYTES) != wanted[start : start + _LOOK_BYTES] for start in ends
    ):
        return "it copies other bytes than those that it was asked for"
    return None


def _refuses_other_versions(store: ObjectStore, source: ObjectInfo, target: str, upload_id: str) -> bool:
    other = ObjectInfo(source.key, source.size_bytes, "0" * 32, 0)
    try:
        store.copy_part(target, upload_id, 2, other, _OFFSET_BYTES, MIN_PART_SIZE_BYTES)
    except (PreconditionFailed, ObjectNotFound):
        return True
    return False
