"""What the objects hold that this node has put into the store, part by part: digests, kept on disk.

Owns ``parts.lmdb`` in the state directory. It is a cache: without it everything is sent, nothing is lost. So
what cannot be read is thrown away, and the oldest rows go when there are too many.

=========  ===================================  ==========================================================
table      key                                  value
=========  ===================================  ==========================================================
row        digest of an object key (16)         sequence number (8), ``StoredParts`` (msgpack array)
age        sequence number (8)                  digest of an object key (16); the oldest row is the first
digest     digest of a part (16)                digest of an object key (16), number of the part (4)
meta       "seed", "parts", "next", "copies"    see ``_start``, ``note_copies``
=========  ===================================  ==========================================================

A row speaks of one version (key and ETag) of an object, whose bytes went through this process, so it cannot
become wrong: it can only speak of a version that is gone. Entries of ``digest`` are hints; ``find`` believes
the row that they lead to.

Digests are xxh3-128 with a random seed that never leaves this directory. That is no cryptographic hash: see
``equal_parts`` for what it is taken for.

Threads: every method blocks (for microseconds, ``put`` for a synced commit) and may be called from any one.
None raises but ``open``.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any, Final

import lmdb
import msgspec
import structlog
import xxhash

from tierfs.types import ObjectInfo

log = structlog.get_logger(__name__)

DIGEST_BYTES: Final = 16
MOST_PARTS: Final = 2_000_000
"""Of all rows together: 32 TiB in parts of 16 MiB, and less than half of the map."""
_MAP_SIZES_BYTES: Final = (1 << 30, 1 << 28)
_ROW_COST_PARTS: Final = 8
"""What a row takes besides its digests, counted as parts."""


class StoredParts(msgspec.Struct, frozen=True, array_like=True):
    """One version of an object: ``digests`` of its parts, 16 bytes each; the last part may be shorter.

    ``uid``: the owner of the file that was uploaded.
    """

    key: str
    etag: str
    version_id: str | None
    size_bytes: int
    part_size_bytes: int
    uid: int
    digests: bytes

    @property
    def count(self) -> int:
        return len(self.digests) // DIGEST_BYTES

    @property
    def info(self) -> ObjectInfo:
        """The object, as the store contract wants it (time and metadata unknown)."""
        return ObjectInfo(self.key, self.size_bytes, self.etag, 0, self.version_id)

    def holds(self, number: int, digest: bytes, length_bytes: int) -> bool:
        """Whether part ``number`` (from 1) is that long and has that digest."""
        start = (number - 1) * DIGEST_BYTES
        return (
            1 <= number <= self.count
            and self.digests[start : start + DIGEST_BYTES] == digest
            and min(self.part_size_bytes, self.size_bytes - (number - 1) * self.part_size_bytes)
            == length_bytes
        )


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StoredParts).decode


class PartIndex:
    """See the module docstring. Made by ``open``."""

    def __init__(self, env: Any, path: Path) -> None:
        self._env = env
        self._path = path
        self._rows, self._ages, self._digests, self._meta = (
            env.open_db(name) for name in (b"row", b"age", b"digest", b"meta")
        )
        self._seed = 0
        self._start()

    @classmethod
    def open(cls, path: Path) -> PartIndex:
        """Open or make the directory ``path``. Raises ``OSError`` or ``lmdb.Error`` if neither works."""
        try:
            return cls(_environment(path), path)
        except (lmdb.Error, EOFError) as error:
            log.warning("digests of parts cannot be read, begun anew", path=str(path), reason=str(error))
            shutil.rmtree(path, ignore_errors=True)
            return cls(_environment(path), path)

    def _start(self) -> None:
        with self._env.begin(write=True) as txn:
            seed = txn.get(b"seed", None, self._meta)
            if seed is None or len(seed) != 8:
                seed = os.urandom(8)
                txn.put(b"seed", seed, db=self._meta)
        self._seed = int.from_bytes(seed, "big")

    def close(self) -> None:
        self._env.close()

    def digest(self, body: bytes) -> bytes:
        """Of a part. Runs without the GIL."""
        return xxhash.xxh3_128_digest(body, self._seed)

    def get(self, key: str) -> StoredParts | None:
        """What is known of the version of ``key`` that was last put there from here."""
        with contextlib.suppress(lmdb.Error), self._env.begin() as txn:
            row = self._row(txn, _name(key))
            return row if row is not None and row.key == key else None
        return None

    def find(self, digest: bytes, part_size_bytes: int, uid: int) -> tuple[StoredParts, int] | None:
        """A part of that size, in an object of a file of that user, with that digest: row and number."""
        with contextlib.suppress(lmdb.Error), self._env.begin() as txn:
            hint = txn.get(digest, None, self._digests)
            row = self._row(txn, hint[:DIGEST_BYTES]) if hint is not None else None
            if row is not None and row.uid == uid and row.part_size_bytes == part_size_bytes:
                number = int.from_bytes(hint[DIGEST_BYTES:], "big")
                if row.holds(number, digest, part_size_bytes):
                    return row, number
        return None

    def put(self, row: StoredParts) -> None:
        """The store holds that. What was known of an earlier version at the same key goes."""
        try:
            try:
                self._put(row)
            except lmdb.MapFullError:
                self._clear()
                self._put(row)
        except lmdb.Error as error:
            log.warning("digests of parts not kept", key=row.key, reason=str(error))

    def _put(self, row: StoredParts) -> None:
        name = _name(row.key)
        with self._env.begin(write=True) as txn:
            parts = self._number(txn, b"parts") - self._remove(txn, name) + row.count + _ROW_COST_PARTS
            oldest = txn.cursor(self._ages)
            while parts > MOST_PARTS and oldest.first():
                age, old = oldest.item()
                parts -= self._remove(txn, old)
                txn.delete(age, db=self._ages)
            sequence = self._number(txn, b"next").to_bytes(8, "big")
            txn.put(name, sequence + _encode(row), db=self._rows)
            txn.put(sequence, name, db=self._ages)
            for number in range(1, row.count + 1):
                start = (number - 1) * DIGEST_BYTES
                digest = row.digests[start : start + DIGEST_BYTES]
                txn.put(digest, name + number.to_bytes(4, "big"), db=self._digests)
            self._set_number(txn, b"parts", parts)
            self._set_number(txn, b"next", int.from_bytes(sequence, "big") + 1)

    def forget(self, row: StoredParts) -> None:
        """That version is not in the store any more."""
        with contextlib.suppress(lmdb.Error), self._env.begin(write=True) as txn:
            if self._row(txn, _name(row.key)) == row:
                self._set_number(
                    txn, b"parts", self._number(txn, b"parts") - self._remove(txn, _name(row.key))
                )

    def note_copies(self, store_url: str) -> None:
        """The store at that address has shown that it copies parts as it should."""
        with contextlib.suppress(lmdb.Error), self._env.begin(write=True) as txn:
            txn.put(b"copies", store_url.encode(), db=self._meta)

    def knows_copies(self, store_url: str) -> bool:
        """``note_copies`` was called for it, in this run or an earlier one."""
        with contextlib.suppress(lmdb.Error), self._env.begin() as txn:
            return bool(txn.get(b"copies", b"", self._meta) == store_url.encode())
        return False

    # -- private, inside a transaction ----------------------------------------------------------------

    def _row(self, txn: Any, name: bytes) -> StoredParts | None:
        raw = txn.get(name, None, self._rows)
        if raw is None:
            return None
        try:
            return _decode(raw[8:])
        except msgspec.DecodeError:
            return None

    def _remove(self, txn: Any, name: bytes) -> int:
        """Remove a row with all that leads to it; what it was counted as, 0 if it is not there."""
        raw = txn.get(name, None, self._rows)
        if raw is None:
            return 0
        txn.delete(raw[:8], db=self._ages)
        row = self._row(txn, name)
        txn.delete(name, db=self._rows)
        if row is None:
            return 0
        for start in range(0, len(row.digests), DIGEST_BYTES):
            digest = row.digests[start : start + DIGEST_BYTES]
            if txn.get(digest, b"", self._digests)[:DIGEST_BYTES] == name:
                txn.delete(digest, db=self._digests)
        return row.count + _ROW_COST_PARTS

    def _number(self, txn: Any, name: bytes) -> int:
        return int.from_bytes(txn.get(name, b"", self._meta), "big")

    def _set_number(self, txn: Any, name: bytes, value: int) -> None:
        txn.put(name, max(value, 0).to_bytes(8, "big"), db=self._meta)

    def _clear(self) -> None:
        """No room: begin anew."""
        log.warning("too many digests of parts, begun anew", path=str(self._path))
        with self._env.begin(write=True) as txn:
            for table in (self._rows, self._ages, self._digests):
                txn.drop(table, delete=False)
            self._set_number(txn, b"parts", 0)


def _name(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def _environment(path: Path) -> Any:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    failure: Exception | None = None
    for map_size in _MAP_SIZES_BYTES:
        try:
            env = lmdb.open(
                str(path), map_size=map_size, max_dbs=4, metasync=False, readahead=False, mode=0o600
            )
        except (lmdb.MemoryError, MemoryError) as error:
            failure = error
            continue
        wanted = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
        if (path / "data.mdb").stat().st_size < wanted:
            # Reading a page that is not there would end the process.
            env.close()
            raise EOFError("the file is shorter than it says")
        return env
    raise OSError(errno.ENOMEM, f"cannot map {path}: {failure}")
