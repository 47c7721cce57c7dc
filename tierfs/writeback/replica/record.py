"""What the replica says about one file, and where in the replica it says so."""

from __future__ import annotations

import re

import msgspec
import xxhash

from tierfs.errors import FormatError
from tierfs.store.base import MAX_OBJECT_BYTES, ObjectStore
from tierfs.store.keys import decode_key
from tierfs.types import ObjectInfo

FORMAT = 1
MAX_RECORD_BYTES = 4 * 1024 * 1024
"""10,000 digests take 350 kB."""
_FILE_SYSTEM = re.compile(r"[0-9a-f-]{8,64}")
_RECORD_NAME = re.compile(r"(\d{1,20})\.json")


class ReplicaRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One file as it was when it was copied.

    ``key``: where in the source its object belongs. ``replaces``: the ETag of the object that was there, as
    far as that node knew; None: none was. ``content``: hex of the content id. ``metadata``: as an object
    carries them. ``data_key``: where its bytes are in the replica (empty for an empty file), with that
    ``data_etag``; ``digests``: XXH3-128 of every ``part_bytes`` of them, in hex.
    """

    format: int
    file_system: str
    source: str
    ino: int
    key: str
    replaces: str | None
    content: str
    size_bytes: int
    mtime_ns: int
    copied_ns: int
    metadata: dict[str, str]
    data_key: str
    data_etag: str
    part_bytes: int
    digests: list[str]

    def part(self, number: int) -> tuple[int, int]:
        """Offset and length of a part, counted from 0."""
        offset = number * self.part_bytes
        return offset, min(self.part_bytes, self.size_bytes - offset)


class _Format(msgspec.Struct):
    format: int


def digest(body: bytes | memoryview) -> str:
    """Of one part."""
    return xxhash.xxh3_128_hexdigest(body)


def directory_of(place: str, file_system: str) -> str:
    """The prefix of everything that belongs to one file system; ``place``: empty or ending in ``/``."""
    return f"{place}{file_system}/"


def record_key(place: str, file_system: str, ino: int) -> str:
    return f"{directory_of(place, file_system)}{ino}.json"


def data_key(place: str, file_system: str, ino: int, attempt: str) -> str:
    return f"{directory_of(place, file_system)}{ino}-{attempt}.data"


def is_record(key: str) -> bool:
    return _RECORD_NAME.fullmatch(key.rpartition("/")[2]) is not None


def encode(record: ReplicaRecord) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=1)


def decode(raw: bytes, at: str, place: str) -> ReplicaRecord:
    """The record that was read at that key. Raises ``FormatError``, naming it. Nothing in it is trusted."""
    try:
        version = msgspec.json.decode(raw, type=_Format).format
        if version > FORMAT:
            raise FormatError(f"{at}: a record of format {version}, newer than this tierfs knows ({FORMAT})")
        record = msgspec.json.decode(raw, type=ReplicaRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{at}: not a record of a replica: {error}") from None
    problem = _problem(record, place)
    if problem:
        raise FormatError(f"{at}: {problem}")
    if at != record_key(place, record.file_system, record.ino):
        raise FormatError(f"{at}: the record belongs to another key")
    return record


def read(store: ObjectStore, found: ObjectInfo, place: str) -> ReplicaRecord:
    """The record that a listing has found. Raises ``StoreError``, ``FormatError``. Blocks."""
    if found.size_bytes > MAX_RECORD_BYTES:
        raise FormatError(f"{found.key}: {found.size_bytes} bytes are too many for a record")
    return decode(store.get_range(found.key, 0, found.size_bytes, if_match=found.etag), found.key, place)


def _problem(record: ReplicaRecord, place: str) -> str:
    if not _FILE_SYSTEM.fullmatch(record.file_system):
        return f"file_system: {record.file_system!r} is not an id"
    if not 0 <= record.size_bytes <= MAX_OBJECT_BYTES:
        return f"size_bytes: {record.size_bytes} is not the size of an object"
    if record.size_bytes and record.part_bytes <= 0:
        return f"part_bytes: {record.part_bytes}"
    parts = -(-record.size_bytes // record.part_bytes) if record.size_bytes else 0
    if len(record.digests) != parts:
        return f"digests: {len(record.digests)} of them for {parts} parts"
    below = directory_of(place, record.file_system)
    if record.size_bytes and not (
        record.data_key.startswith(below) and "/" not in record.data_key[len(below) :]
    ):
        return f"data_key: {record.data_key!r} is not beside the record"
    if not decode_key(record.key):
        return f"key: {record.key!r} is not the key of a file"
    return ""
