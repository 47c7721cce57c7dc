"""The sidecar of a converted file: what its absent blocks are to be filled from, and which those are.

``TIER/dirty/<hex>.base`` beside ``TIER/dirty/<hex>.part``. It is the dirty mark of a converted content: with
the sidecar alone, the content is the base, unchanged. Layout, little endian:

======= ====== ==========================================================================
offset  type   meaning
======= ====== ==========================================================================
0       8 b    magic
8       u64    limit: absent blocks take bytes below it from the base, zeros from there on
16      u64    the same, inverted bit by bit (both change in one write, within one sector)
24      u32    length of the description
28      8 b    checksum (xxh3) of the description
36      bytes  description (JSON): base object, boot id
65536   words  present: blocks that the file holds, one u64 per extent of the base
...     words  changed: present blocks that may differ from the base
...     words  durable: present blocks whose bytes are on the device
======= ====== ==========================================================================

Present words are written after the block's bytes, into the page cache: they survive the end of the process
with the bytes they speak of. After a reboot that may have cost either, only the durable words are believed;
``Staging.sync`` writes them after the bytes were synced, and bits are only ever added.

Blocking; worker threads, except ``mark_*``: eight bytes into the page cache. Raises ``OSError``.
"""

from __future__ import annotations

import os
import struct

import msgspec
import xxhash

from tierfs.cache import blocks, device
from tierfs.types import ContentId, ObjectRef

_MAGIC = b"TFSBASE1"
_HEAD = struct.Struct("<8s16sI8s")
_WORDS_AT = 65536
_LIMIT_AT = 8


class BadSidecar(ValueError):
    """Not a sidecar, or a damaged one."""


class _Description(msgspec.Struct):
    """Names as bytes: a key may hold what JSON cannot."""

    key: bytes
    etag: bytes
    size_bytes: int
    version_id: bytes | None
    content_id: bytes
    boot: bytes


class Sidecar:
    """One open sidecar."""

    def __init__(self, fd: int, base: ObjectRef, limit_bytes: int) -> None:
        self._fd = fd
        self.base = base
        self.limit_bytes = limit_bytes
        self._extents = blocks.extent_count(base.size_bytes)

    @classmethod
    def create(cls, path: str, base: ObjectRef, boot: bytes, *, limit_bytes: int, present: dict[int, int],
               changed: dict[int, int], durable: dict[int, int]) -> Sidecar:
        """Write it whole, durable but for its name (the caller syncs the directory), replacing another."""
        temporary = path + ".tmp"
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            sidecar = cls(fd, base, limit_bytes)
            version = None if base.version_id is None else _to_bytes(base.version_id)
            text = msgspec.json.encode(_Description(
                _to_bytes(base.key), _to_bytes(base.etag), base.size_bytes, version, base.content_id, boot))
            device.pwrite_all(fd, _HEAD.pack(_MAGIC, _twice(limit_bytes), len(text), _sum(text)) + text, 0)
            os.ftruncate(fd, _WORDS_AT + 3 * 8 * sidecar._extents)
            for table, words in enumerate((present, changed, durable)):
                sidecar._write_words(table, words)
            os.fdatasync(fd)
            os.rename(temporary, path)
        except BaseException:
            os.close(fd)
            device.unlink_if_there(temporary)
            raise
        return sidecar

    @classmethod
    def open(cls, path: str) -> tuple[Sidecar, bytes]:
        """The sidecar, and the boot id under which it was written. Raises ``BadSidecar``."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            head = os.pread(fd, _WORDS_AT, 0)
            if len(head) < _HEAD.size:
                raise BadSidecar(f"{path}: too short")
            magic, limits, length, checksum = _HEAD.unpack_from(head)
            limit = int.from_bytes(limits[:8], "little")
            text = head[_HEAD.size : _HEAD.size + length]
            if magic != _MAGIC or len(text) != length or _sum(text) != checksum:
                raise BadSidecar(f"{path}: damaged")
            try:
                found = msgspec.json.decode(text, type=_Description)
                version = None if found.version_id is None else _to_text(found.version_id)
                base = ObjectRef(ContentId(found.content_id), _to_text(found.key), _to_text(found.etag),
                                 found.size_bytes, version)
            except (msgspec.DecodeError, ValueError) as error:
                raise BadSidecar(f"{path}: {error}") from error
            if limits != _twice(limit) or limit > base.size_bytes or len(base.content_id) != 16:
                raise BadSidecar(f"{path}: contradicts itself")
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, base, limit), found.boot

    def words(self) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
        """(present, changed, durable), zero words left out."""
        data = device.pread_all(self._fd, 3 * 8 * self._extents, _WORDS_AT)
        data = data.ljust(3 * 8 * self._extents, b"\0")
        tables = []
        for table in range(3):
            values = struct.unpack_from(f"<{self._extents}Q", data, table * 8 * self._extents)
            tables.append({number: value & blocks.full_mask(self.base.size_bytes, number)
                           for number, value in enumerate(values) if value})
        return tables[0], tables[1], tables[2]

    def mark_present(self, extent_no: int, word: int) -> None:
        """The present word of that extent. Does not wait for a device."""
        os.pwrite(self._fd, word.to_bytes(8, "little"), self._at(0, extent_no))

    def mark_changed(self, extent_no: int, word: int) -> None:
        """The changed word of that extent. Does not wait for a device."""
        os.pwrite(self._fd, word.to_bytes(8, "little"), self._at(1, extent_no))

    def set_durable(self, words: dict[int, int]) -> None:
        """These blocks are on the device; so is this, when it returns."""
        self._write_words(2, words)
        os.fdatasync(self._fd)

    def set_limit(self, limit_bytes: int) -> None:
        """Durable when it returns. In memory it holds in any case: what was cut off never comes back."""
        self.limit_bytes = limit_bytes
        os.pwrite(self._fd, _twice(limit_bytes), _LIMIT_AT)
        os.fdatasync(self._fd)

    @property
    def allocated_bytes(self) -> int:
        """What it takes on the device."""
        return os.fstat(self._fd).st_blocks * 512

    def close(self) -> None:
        os.close(self._fd)

    def _at(self, table: int, extent_no: int) -> int:
        return _WORDS_AT + 8 * (table * self._extents + extent_no)

    def _write_words(self, table: int, words: dict[int, int]) -> None:
        for number, word in words.items():
            if number < self._extents:
                device.pwrite_all(self._fd, word.to_bytes(8, "little"), self._at(table, number))


def _twice(number: int) -> bytes:
    return struct.pack("<QQ", number, number ^ (1 << 64) - 1)


def _to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _to_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _sum(text: bytes) -> bytes:
    return xxhash.xxh3_64_digest(text)
