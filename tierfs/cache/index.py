"""The index of one tier: which blocks of which content its files hold. The only lmdb adapter here.

Owns ``TIER/index.lmdb``. Tables: ``extent`` (content id, extent number big endian -> ``record``), ``pin``
(content id -> nothing), ``meta`` (format, bytes in use, boot id, clean flag, epoch).

Threads. ``get``, ``put``, ``remove``, ``drop`` and the walk are for the trio thread: reads of LMDB take
microseconds, changes go into a batch in memory that reads see at once. ``commit_batch`` writes the batch in
one transaction and blocks: a worker thread, one at a time (``Tier`` sees to it). ``open`` and ``close``
block too.

What is committed is true, whatever happens later, because of two rules that ``Tier`` keeps:
a hole is punched only after the record without those blocks is committed, and a file is created only when
the committed index has no record of that content. A file that is missing makes its records void.

Durability: every commit is synced, without the meta page (``metasync=False``): a power cut may undo the
last commits and never tears one. A record from before a power cut may speak of data that never reached the
device; the epoch, raised at the first open after an unclean reboot, marks those records for
verification by checksum.

Raises: ``FormatError`` for an index of another program or a newer version, ``IndexDamaged`` for one that
cannot be read, ``OSError`` or ``IndexWriteFailed`` from a commit (the batch is kept and can be tried again).
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

from tierfs.cache import record
from tierfs.cache.record import Extent
from tierfs.errors import CacheError, FormatError
from tierfs.log import get_logger
from tierfs.types import ContentId

FORMAT = 1
_FORMAT_MARK = b"tierfs tier index "
_MAP_SIZES = (1 << 40, 1 << 36, 1 << 32, 1 << 29)
"""Address space to ask for, in bytes; the first that the process limits allow."""
_KEY_BYTES = 20
_DAMAGE_MARK = "damaged"
_log = get_logger(__name__)


class IndexDamaged(CacheError):
    """The index cannot be read. It is moved aside and the tier starts with no clean content."""


class IndexWriteFailed(CacheError):
    """A batch could not be committed. It is kept. ``errno`` is ENOSPC if the disk is full, else EIO."""


@dataclass(slots=True)
class _Change:
    """What happened to one content since the last commit: all gone first (or not), then these extents."""

    dropped: bool = False
    extents: dict[int, bytes | None] = field(default_factory=dict)
    pin: bool | None = None


class Walked(NamedTuple):
    """What a record says that the walk found."""

    content_id: ContentId
    extent_no: int
    nbytes: int
    segment: int
    place_bytes: int


Batch = dict[ContentId, _Change]


class TierIndex:
    """See the module docstring."""

    def __init__(self, environment: Any, path: Path, tables: tuple[Any, Any, Any]) -> None:
        self._env = environment
        self.path = path
        self._extent_table, self._pin_table, self._meta_table = tables
        self._pending: Batch = {}
        self._committing: Batch = {}
        self.epoch = 0
        self.damaged = False
        """A read failed: see ``_unreadable``."""
        self.records_read = 0
        """Records decoded or walked since the open."""
        self._used_bytes = 0

    @classmethod
    def open(cls, path: Path, boot_id: bytes, *, sync: bool = True) -> TierIndex:
        """Open or create. Costs the same whatever the index holds. ``sync`` False: for a RAM tier."""
        path.mkdir(mode=0o700, exist_ok=True)
        _refuse_truncated(path)
        environment = _environment(path, sync)
        try:
            index = cls(environment, path, _tables(environment, path))
            index._start(boot_id)
        except lmdb.Error as error:
            environment.close()
            raise IndexDamaged(f"{path}: {error}") from error
        except BaseException:
            environment.close()
            raise
        return index

    def _start(self, boot_id: bytes) -> None:
        with self._env.begin(write=True) as txn:
            table = self._meta_table
            self.epoch = int.from_bytes(txn.get(b"epoch", b"", db=table)[:4], "little")
            self._used_bytes = int.from_bytes(txn.get(b"used", b"", db=table)[:8], "little")
            known_boot = txn.get(b"boot", None, db=table)
            clean = txn.get(b"clean", b"0", db=table) == b"1"
            self.was_clean = known_boot is None or clean
            if known_boot is not None and known_boot != boot_id and not clean:
                self.epoch = (self.epoch + 1) & 0xFFFFFFFF
                txn.put(b"epoch", self.epoch.to_bytes(4, "little"), db=table)
            txn.put(b"boot", boot_id, db=table)
            txn.put(b"clean", b"0", db=table)

    def close(self, *, clean: bool) -> None:
        """Blocking. Commits what is pending; ``clean``: the data of all records is on the device."""
        try:
            if self._pending or self._committing:
                self.commit_batch(self.take_batch())
            if clean:
                with self._env.begin(write=True) as txn:
                    txn.put(b"clean", b"1", db=self._meta_table)
                self._env.sync(True)
        except (lmdb.Error, IndexWriteFailed):
            # The tier is opened as after a crash; nothing in it is believed wrongly.
            return
        finally:
            self._env.close()

    def abandon(self) -> None:
        """Let go without committing what is pending, as the end of the process would."""
        self._env.close()

    # reading: trio thread

    @property
    def used_bytes(self) -> int:
        """Bytes on the device by the committed records."""
        return self._used_bytes

    @property
    def file_bytes(self) -> int:
        """What the index itself takes on the device."""
        try:
            return os.stat(self.path / "data.mdb").st_blocks * 512
        except OSError:
            return 0

    def get(self, content_id: ContentId, extent_no: int) -> Extent | None:
        """A new ``Extent`` from the record, or None. A record that does not decode counts as absent."""
        value = self._value(content_id, extent_no)
        if value is None:
            return None
        self.records_read += 1
        try:
            return record.decode(value, extent_no, self.epoch)
        except record.BadRecord:
            self.remove(content_id, extent_no)
            return None

    def identity(self, content_id: ContentId, extent_no: int) -> tuple[str, str | None, str] | None:
        """(etag, version id, key) of the object that the content is a copy of."""
        value = self._value(content_id, extent_no)
        return None if value is None else record.identity_in(value)

    def _value(self, content_id: ContentId, extent_no: int) -> bytes | None:
        for batch in (self._pending, self._committing):
            change = batch.get(content_id)
            if change is not None:
                if extent_no in change.extents:
                    return change.extents[extent_no]
                if change.dropped:
                    return None
        found: bytes | None = None
        try:
            with self._env.begin(db=self._extent_table) as txn:
                found = txn.get(content_id + extent_no.to_bytes(4, "big"))
        except lmdb.Error as error:
            self._unreadable(error)
        return found

    def _unreadable(self, error: lmdb.Error) -> None:
        """From now on the index knows nothing and takes nothing; the next open moves it aside."""
        if not self.damaged:
            self.damaged = True
            _log.error("tier index cannot be read; the tier is not used any more", path=str(self.path),
                       reason=str(error))
            try:
                (self.path / _DAMAGE_MARK).touch(mode=0o600)
            except OSError:
                pass

    def extents_of(self, content_id: ContentId) -> list[int]:
        """Numbers of the extents that have a record, in order."""
        found: set[int] = set()
        changes = [batch[content_id] for batch in (self._committing, self._pending) if content_id in batch]
        if not any(change.dropped for change in changes):
            try:
                with self._env.begin(db=self._extent_table) as txn:
                    found.update(int.from_bytes(key[16:], "big") for key in _keys_of(txn, content_id))
            except lmdb.Error as error:
                self._unreadable(error)
        for change in changes:
            if change.dropped:
                found.clear()
            for number, value in change.extents.items():
                if value is None:
                    found.discard(number)
                else:
                    found.add(number)
        return sorted(found)

    def any_extent(self, content_id: ContentId) -> int | None:
        """The number of some extent of that content that has a record, None if none has."""
        gone: set[int] = set()
        for batch in (self._pending, self._committing):
            change = batch.get(content_id)
            if change is None:
                continue
            for number, value in change.extents.items():
                if value is None:
                    gone.add(number)
                elif number not in gone:
                    return number
            if change.dropped:
                return None
        try:
            with self._env.begin(db=self._extent_table) as txn:
                for key in _keys_of(txn, content_id):
                    number = int.from_bytes(key[16:], "big")
                    if number not in gone:
                        return number
        except lmdb.Error as error:
            self._unreadable(error)
        return None

    def is_changed(self, content_id: ContentId) -> bool:
        """There are changes to that content's records that are not committed yet."""
        return content_id in self._pending or content_id in self._committing

    def committed_has(self, content_id: ContentId) -> bool:
        """The committed index (not the batch) has a record: a new file of that name must wait."""
        try:
            with self._env.begin(db=self._extent_table) as txn:
                return next(_keys_of(txn, content_id), None) is not None
        except lmdb.Error as error:
            self._unreadable(error)
            return True

    def pins(self) -> set[ContentId]:
        """Every pinned content; few, so read at once."""
        with self._env.begin(db=self._pin_table) as txn:
            return {ContentId(bytes(key)) for key in txn.cursor().iternext(keys=True, values=False)}

    def walk(self, after: bytes, limit: int) -> tuple[list[Walked], bytes | None]:
        """Committed records behind key ``after``, and where to go on (None: that was all).

        Blocks for about a microsecond per record.
        """
        found: list[Walked] = []
        following = None
        try:
            with self._env.begin(db=self._extent_table, buffers=True) as txn:
                following = _walk(txn.cursor(), after, limit, found)
        except lmdb.Error as error:
            self._unreadable(error)
        self.records_read += len(found)
        return found, following

    # changing: trio thread

    @property
    def has_pending(self) -> bool:
        """Something waits for a commit, or for another try at one."""
        return bool(self._pending or self._committing)

    def put(self, content_id: ContentId, extent_no: int, extent: Extent, identity: bytes) -> None:
        """Into the batch. An extent with nothing present is removed."""
        value = record.encode(extent, self.epoch, identity) if extent.present else None
        self._change(content_id).extents[extent_no] = value

    def keep_identity(self, content_id: ContentId, extent_no: int) -> bytes:
        """The identity bytes of the record as it is now, to write it again."""
        found = self.identity(content_id, extent_no)
        if found is None:
            return b""
        etag, version, key = found
        return "\0".join((etag, version or "", key)).encode("utf-8", "surrogatepass")

    def remove(self, content_id: ContentId, extent_no: int) -> None:
        self._change(content_id).extents[extent_no] = None

    def drop(self, content_id: ContentId) -> None:
        """Every record of that content, and its pin, go."""
        change = self._change(content_id)
        change.dropped = True
        change.extents.clear()
        change.pin = False

    def set_pin(self, content_id: ContentId, pinned: bool) -> None:
        self._change(content_id).pin = pinned

    def _change(self, content_id: ContentId) -> _Change:
        change = self._pending.get(content_id)
        if change is None:
            change = self._pending[content_id] = _Change()
        return change

    # committing

    def take_batch(self) -> Batch:
        """Trio thread: what ``commit_batch`` is to write. A batch that failed is merged in first."""
        if self._committing:
            merged = self._committing
            for content_id, change in self._pending.items():
                _merge(merged, content_id, change)
            self._committing = merged
        else:
            self._committing = self._pending
        self._pending = {}
        return self._committing

    def commit_batch(self, batch: Batch) -> None:
        """Worker thread. Raises ``IndexWriteFailed``; then the batch is part of the next ``take_batch``."""
        try:
            with self._env.begin(write=True) as txn:
                delta = 0
                for content_id, change in batch.items():
                    delta += self._apply(txn, content_id, change)
                used = max(0, self._used_bytes + delta)
                txn.put(b"used", used.to_bytes(8, "little"), db=self._meta_table)
        except (lmdb.Error, OSError) as error:
            failure = IndexWriteFailed(f"{self.path}: {error}")
            if isinstance(error, lmdb.MapFullError) or os.strerror(errno.ENOSPC) in str(error):
                failure.errno = errno.ENOSPC
            raise failure from error
        self._used_bytes = used

    def batch_done(self) -> None:
        """Trio thread, after ``commit_batch`` returned."""
        self._committing = {}

    def _apply(self, txn: Any, content_id: ContentId, change: _Change) -> int:
        table, delta = self._extent_table, 0
        if change.dropped:
            for key in list(_keys_of(txn, content_id, table)):
                old = txn.pop(key, db=table)
                delta -= record.allocated_in(old, int.from_bytes(key[16:], "big"))
        for number, value in change.extents.items():
            key = content_id + number.to_bytes(4, "big")
            if value is None:
                old = txn.pop(key, db=table)
            else:
                old = txn.get(key, db=table)
                txn.put(key, value, db=table)
                delta += record.allocated_in(value, number)
            if old is not None:
                delta -= record.allocated_in(old, number)
        if change.pin is True:
            txn.put(content_id, b"", db=self._pin_table)
        elif change.pin is False:
            txn.delete(content_id, db=self._pin_table)
        return delta


def _walk(cursor: Any, after: bytes, limit: int, found: list[Walked]) -> bytes | None:
    """Append up to ``limit`` records from key ``after``; returns the key of the next, if there is one."""
    if not cursor.set_range(after):
        return None
    content_id = b""
    for key, value in cursor:
        if len(found) >= limit:
            return bytes(key)
        if len(key) != _KEY_BYTES:
            continue
        name = bytes(key)
        if name[:16] != content_id:
            content_id = name[:16]
        number = int.from_bytes(name[16:], "big")
        found.append(Walked(ContentId(content_id), number, record.allocated_in(value, number),
                            *record.place_in(value)))
    return None


def _merge(batch: Batch, content_id: ContentId, change: _Change) -> None:
    old = batch.get(content_id)
    if old is None or change.dropped:
        if old is not None and change.pin is None:
            change.pin = old.pin
        batch[content_id] = change
        return
    old.extents.update(change.extents)
    if change.pin is not None:
        old.pin = change.pin


def _keys_of(txn: Any, content_id: ContentId, table: Any = None) -> Iterator[bytes]:
    cursor = txn.cursor(db=table) if table is not None else txn.cursor()
    if cursor.set_range(content_id):
        for key in cursor.iternext(keys=True, values=False):
            if bytes(key[:16]) != content_id:
                return
            if len(key) == _KEY_BYTES:
                yield bytes(key)


def _environment(path: Path, sync: bool) -> Any:
    failure: Exception | None = None
    for map_size in _MAP_SIZES:
        try:
            return lmdb.open(str(path), map_size=map_size, max_dbs=8, max_readers=512, mode=0o600,
                             metasync=False, sync=sync, readahead=False, subdir=True)
        except lmdb.MemoryError as error:
            failure = error
        except lmdb.Error as error:
            if "Cannot allocate memory" not in str(error):
                raise IndexDamaged(f"{path}: {error}") from error
            failure = error
    raise IndexDamaged(f"{path}: {failure}")


def _tables(environment: Any, path: Path) -> tuple[Any, Any, Any]:
    with environment.begin() as txn:
        entries = txn.stat()["entries"]
    if entries:
        try:
            meta = environment.open_db(b"meta", create=False)
        except lmdb.Error as error:
            raise FormatError(f"{path} is an LMDB data base, but not the index of a tierfs tier") from error
        with environment.begin(db=meta) as txn:
            mark = txn.get(b"format", b"")
        if not mark.startswith(_FORMAT_MARK) or not mark[len(_FORMAT_MARK) :].isdigit():
            raise FormatError(f"{path} is an LMDB data base, but not the index of a tierfs tier")
        if int(mark[len(_FORMAT_MARK) :]) != FORMAT:
            found = int(mark[len(_FORMAT_MARK) :])
            raise FormatError(f"{path} has format {found}; this version of tierfs reads format {FORMAT}."
                              " Use a newer version, or remove the directory (it is a cache)")
    meta = environment.open_db(b"meta")
    tables = (environment.open_db(b"extent"), environment.open_db(b"pin"), meta)
    if not entries:
        with environment.begin(write=True, db=meta) as txn:
            txn.put(b"format", _FORMAT_MARK + str(FORMAT).encode())
    return tables


def _refuse_truncated(path: Path) -> None:
    """A file shorter than its last page would be a SIGBUS at some later read: look before mapping it."""
    if (path / _DAMAGE_MARK).exists():
        raise IndexDamaged(f"{path}: could not be read when it was used last")
    data = path / "data.mdb"
    try:
        size = data.stat().st_size
    except FileNotFoundError:
        return
    if size == 0:
        return
    try:
        with data.open("rb") as file:
            head = file.read(2 * mmap.PAGESIZE)
    except OSError as error:
        raise IndexDamaged(f"{data}: {error}") from error
    pages = [_last_page(head[start : start + mmap.PAGESIZE]) for start in (0, mmap.PAGESIZE)]
    known = [page for page in pages if page is not None]
    if not known or (max(known) + 1) * mmap.PAGESIZE > size:
        raise IndexDamaged(f"{data}: shorter than its own page count")


def _last_page(page: bytes) -> int | None:
    """The last page number that a meta page of LMDB names; None if it is not one.

    Source: liblmdb's mdb.c, MDB_page header (16 bytes), then MDB_meta: magic, version, address, map size,
    two MDB_db of 48 bytes, mm_last_pg.
    """
    if len(page) < 152 or page[16:20] != b"\xde\xc0\xef\xbe":
        return None
    return int.from_bytes(page[136:144], "little")
