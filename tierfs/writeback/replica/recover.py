"""Bring what a replica holds of a lost node into the store. Needs no mount; may be run again at any point.

An object that another node has written meanwhile stays; ours goes beside it under a conflict name, as when
two nodes write the same file. What has been recovered is removed from the replica.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tierfs.errors import BlockDamaged, FormatError, ObjectNotFound, StoreError, TierfsError
from tierfs.store.base import Condition, ObjectStore
from tierfs.types import ObjectInfo
from tierfs.writeback.objects import CONTENT_METADATA
from tierfs.writeback.replica import record as records
from tierfs.writeback.replica.record import ReplicaRecord


@dataclass(slots=True)
class Recovered:
    """``conflicts``: (key, where ours is); ``failed``: (key, why): those stay in the replica."""

    files: int = 0
    bytes: int = 0
    already_there: int = 0
    conflicts: list[tuple[str, str]] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Place:
    """A store and the prefix in it that is meant: empty, or ending in ``/``."""

    store: ObjectStore
    prefix: str


def held_by(replica: Place, file_system: str | None = None) -> Iterator[ReplicaRecord | tuple[str, str]]:
    """Every record, or (key, why) of one that cannot be read."""
    below = records.directory_of(replica.prefix, file_system) if file_system else replica.prefix
    token = None
    while True:
        page = replica.store.list_page(below, recursive=True, token=token)
        for info in page.objects:
            if not records.is_record(info.key):
                continue
            try:
                yield records.read(replica.store, info, replica.prefix)
            except (StoreError, FormatError) as error:
                yield info.key, str(error)
        token = page.next_token
        if token is None:
            return


def recover(
    replica: Place,
    target: Place,
    source: str,
    *,
    file_system: str | None = None,
    jobs: int = 8,
    report: Callable[[Recovered], None] = lambda _: None,
) -> Recovered:
    """Put everything that the replica holds of ``source`` into ``target``.

    ``report`` is called after each file. Raises ``StoreError`` if the replica cannot be listed.
    """
    found = Recovered()
    with ThreadPoolExecutor(jobs) as pool:
        for outcome in pool.map(
            lambda held: _recover_one(replica, target, source, held), held_by(replica, file_system)
        ):
            _count(found, outcome)
            report(found)
    return found


@dataclass(frozen=True, slots=True)
class _Outcome:
    key: str
    size_bytes: int = 0
    was_there: bool = False
    beside: str | None = None
    problem: str | None = None


def _count(found: Recovered, outcome: _Outcome) -> None:
    if outcome.problem is not None:
        found.failed.append((outcome.key, outcome.problem))
        return
    found.files += 1
    found.bytes += outcome.size_bytes
    found.already_there += outcome.was_there
    if outcome.beside is not None:
        found.conflicts.append((outcome.key, outcome.beside))


def _recover_one(
    replica: Place, target: Place, source: str, held: ReplicaRecord | tuple[str, str]
) -> _Outcome:
    if not isinstance(held, ReplicaRecord):
        return _Outcome(held[0], problem=held[1])
    if held.source != source or not held.key.startswith(target.prefix):
        return _Outcome(held.key, problem=f"it belongs to {held.source}")
    try:
        outcome = _bring(replica, target, held)
        replica.store.delete(records.record_key(replica.prefix, held.file_system, held.ino))
        if held.data_key:
            replica.store.delete(held.data_key)
    except TierfsError as error:
        return _Outcome(held.key, problem=str(error))
    return outcome


def _bring(replica: Place, target: Place, held: ReplicaRecord) -> _Outcome:
    key, condition, beside = held.key, Condition(if_absent=True), None
    there = _head(target.store, key)
    if there is not None:
        tag = (there.metadata or {}).get(CONTENT_METADATA, "")
        if tag.startswith(f"{held.file_system}-{held.content}-") and there.size_bytes == held.size_bytes:
            return _Outcome(key, held.size_bytes, was_there=True)
        if there.etag == held.replaces or tag.startswith(held.file_system):
            condition = Condition(if_match=there.etag)
        else:
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(held.copied_ns / 1e9))
            key = beside = f"{key}.conflict-{held.file_system[:8]}-{stamp}-{os.urandom(2).hex()}"
    _send(replica.store, target.store, held, key, condition)
    return _Outcome(held.key, held.size_bytes, beside=beside)


def _head(store: ObjectStore, key: str) -> ObjectInfo | None:
    try:
        return store.head(key)
    except ObjectNotFound:
        return None


def _send(
    source: ObjectStore, target: ObjectStore, held: ReplicaRecord, key: str, condition: Condition
) -> None:
    tag = f"{held.file_system}-{held.content}-{os.urandom(4).hex()}"
    metadata = {**held.metadata, CONTENT_METADATA: tag}
    if len(held.digests) <= 1:
        body = _part(source, held, 0) if held.digests else b""
        target.put(key, body, metadata=metadata, condition=condition)
        return
    upload_id = target.start_multipart(key, metadata=metadata)
    try:
        parts = [
            target.upload_part(key, upload_id, number + 1, _part(source, held, number))
            for number in range(len(held.digests))
        ]
        target.complete_multipart(key, upload_id, parts, condition=condition)
    except BaseException:
        target.abort_multipart(key, upload_id)
        raise


def _part(store: ObjectStore, held: ReplicaRecord, number: int) -> bytes:
    """Raises ``BlockDamaged`` if it is not what was put there."""
    offset, length = held.part(number)
    body = store.get_range(held.data_key, offset, length, if_match=held.data_etag)
    if records.digest(body) != held.digests[number]:
        raise BlockDamaged(f"{held.data_key}: the {length} bytes at {offset} are not what was put there")
    return body
