"""Unfinished multipart uploads of a directory store, below ``.tierfs/uploads/ID/``.

Parts of one size (the usual case: all but the last) are written straight to their place in one file, so
that completing the upload moves no byte. The size is taken from the first part that arrives; a part that
does not fit that grid is kept in a file of its own, and completing then copies.

``upload.json`` holds key and metadata, ``N.json`` one finished part. Raises OSError, and StoreError where
the upload or a part is not what the caller says.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
from collections.abc import Iterator, Sequence

import msgspec

from tierfs.errors import ObjectNotFound, StoreConfigError
from tierfs.store.base import MAX_PARTS, Buffer, Part, UnfinishedUpload
from tierfs.store.local_files import copy_range, fsync_directory, write_all

_ID = re.compile(r"[0-9a-f]{32}")


class _Upload(msgspec.Struct, frozen=True):
    key: str
    metadata: dict[str, str]
    started_ns: int


class _Stored(msgspec.Struct, frozen=True):
    etag: str
    size_bytes: int
    file: str
    offset_bytes: int


class Uploads:
    """All uploads below one directory; thread-safe, parts of one upload may be written at once."""

    def __init__(self, directory: bytes) -> None:
        self._dir = directory

    def start(self, key: str, metadata: dict[str, str], now_ns: int) -> str:
        upload_id = os.urandom(16).hex()
        path = self._dir + b"/" + upload_id.encode()
        os.makedirs(path)
        _write_json(path, "upload.json", _Upload(key, metadata, now_ns))
        os.close(os.open(path + b"/data", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        fsync_directory(path)
        fsync_directory(self._dir)
        return upload_id

    def write_part(self, key: str, upload_id: str, number: int, body: Buffer) -> Part:
        data = memoryview(body).cast("B")
        with self._place(key, upload_id, number, len(data)) as (descriptor, stored):
            write_all(descriptor, data, stored.offset_bytes)
        return Part(number, stored.etag, stored.size_bytes)

    def copy_part(self, key: str, upload_id: str, number: int, origin: int, offset_bytes: int,
                  length_bytes: int) -> Part:
        with self._place(key, upload_id, number, length_bytes) as (descriptor, stored):
            copy_range(origin, offset_bytes, descriptor, stored.offset_bytes, length_bytes)
        return Part(number, stored.etag, stored.size_bytes)

    @contextlib.contextmanager
    def _place(self, key: str, upload_id: str, number: int, size_bytes: int) -> Iterator[tuple[int, _Stored]]:
        """Where to write that part; recorded as finished, and synced, when the block is left."""
        path, _ = self._open(key, upload_id)
        if not 1 <= number <= MAX_PARTS:
            raise StoreConfigError(f"{key}: part number {number} is not in 1 to {MAX_PARTS}")
        etag = os.urandom(16).hex()
        grid = self._grid(path, size_bytes)
        # A part is written again only by a retry; a fresh file keeps it apart from the first attempt.
        fits = size_bytes <= grid and not os.path.exists(path + b"/%d.json" % number)
        stored = (_Stored(etag, size_bytes, "data", (number - 1) * grid) if fits
                  else _Stored(etag, size_bytes, f"part-{etag}", 0))
        descriptor = os.open(path + b"/" + stored.file.encode(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            yield descriptor, stored
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        _write_json(path, f"{number}.json", stored)

    def _grid(self, path: bytes, size_bytes: int) -> int:
        """The part size of this upload: that of the first part to ask."""
        name = path + b"/grid"
        with contextlib.suppress(FileNotFoundError), open(name, "rb") as file:
            return int(file.read())
        temporary = name + b"." + os.urandom(8).hex().encode()
        with open(temporary, "wb") as file:
            file.write(b"%d" % size_bytes)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, name)
        os.unlink(temporary)
        with open(name, "rb") as file:
            return int(file.read())

    @contextlib.contextmanager
    def assemble(
        self, key: str, upload_id: str, parts: Sequence[Part]
    ) -> Iterator[tuple[int, bytes, dict[str, str]]]:
        """The whole object as an open file, its path, and the metadata. The caller renames it away.

        If the block is left without an exception the upload is over.
        """
        path, upload = self._open(key, upload_id)
        if not parts or any(one.number >= two.number for one, two in itertools.pairwise(parts)):
            raise StoreConfigError(f"{key}: a multipart upload needs parts in ascending order")
        stored = [self._stored(path, key, part) for part in parts]
        total = sum(part.size_bytes for part in stored)
        name = path + b"/data"
        if not _is_contiguous(stored):
            name = path + b"/whole"
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if name.endswith(b"/whole"):
                _gather(path, stored, descriptor)
            os.ftruncate(descriptor, total)
            yield descriptor, name, upload.metadata
        finally:
            os.close(descriptor)
        self.remove(upload_id)

    def _stored(self, path: bytes, key: str, part: Part) -> _Stored:
        try:
            with open(path + b"/%d.json" % part.number, "rb") as file:
                found = msgspec.json.decode(file.read(), type=_Stored)
        except (FileNotFoundError, msgspec.DecodeError):
            raise StoreConfigError(f"{key}: part {part.number} was not uploaded") from None
        if found.etag != part.etag:
            raise StoreConfigError(f"{key}: part {part.number} has another ETag")
        return found

    def remove(self, upload_id: str) -> None:
        if _ID.fullmatch(upload_id):
            shutil.rmtree(self._dir + b"/" + upload_id.encode(), ignore_errors=True)

    def unfinished(self, prefix: str) -> list[UnfinishedUpload]:
        found: list[UnfinishedUpload] = []
        try:
            names = sorted(os.listdir(self._dir))
        except FileNotFoundError:
            return found
        for name in names:
            upload = self._load(self._dir + b"/" + name)
            if upload is not None and upload.key.startswith(prefix):
                found.append(UnfinishedUpload(upload.key, os.fsdecode(name), upload.started_ns))
        return found

    def _open(self, key: str, upload_id: str) -> tuple[bytes, _Upload]:
        path = self._dir + b"/" + upload_id.encode("utf-8", "replace")
        upload = self._load(path) if _ID.fullmatch(upload_id) else None
        if upload is None or upload.key != key:
            raise ObjectNotFound(f"{key}: no such upload")
        return path, upload

    @staticmethod
    def _load(path: bytes) -> _Upload | None:
        try:
            with open(path + b"/upload.json", "rb") as file:
                return msgspec.json.decode(file.read(), type=_Upload)
        except (OSError, msgspec.DecodeError):
            return None


def _is_contiguous(stored: Sequence[_Stored]) -> bool:
    expected = 0
    for part in stored:
        if part.file != "data" or part.offset_bytes != expected:
            return False
        expected += part.size_bytes
    return True


def _gather(path: bytes, stored: Sequence[_Stored], target: int) -> None:
    offset = 0
    for part in stored:
        origin = os.open(path + b"/" + part.file.encode(), os.O_RDONLY | os.O_CLOEXEC)
        try:
            copy_range(origin, part.offset_bytes, target, offset, part.size_bytes)
        finally:
            os.close(origin)
        offset += part.size_bytes


def _write_json(directory: bytes, name: str, record: msgspec.Struct) -> None:
    """Atomic; durable once the directory is synced."""
    temporary = directory + b"/" + os.urandom(8).hex().encode() + b".new"
    with open(temporary, "wb") as file:
        file.write(msgspec.json.encode(record))
        file.flush()
        os.fsync(file.fileno())
    try:
        os.rename(temporary, directory + b"/" + name.encode())
    except FileNotFoundError:
        raise OSError(errno.ENOENT, "the upload was aborted") from None
