"""The index of one tier: which blocks of which content its files hold.

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
import os
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

from tierfs.cache import record
from tierfs.cache.index_batch import KEY_BYTES, Batch, Change, apply, keys_of, merge
from tierfs.cache.index_opening import IndexDamaged, mark_damaged, open_environment, open_tables
from tierfs.cache.record import Extent
from tierfs.errors import CacheError
from tierfs.log import get_logger
from tierfs.types import ContentId

_log = get_logger(__name__)


class IndexWriteFailed(CacheError):
    """A batch could not be committed. It is kept. ``errno`` is ENOSPC if the disk is full, else EIO."""


class Walked(NamedTuple):
    """What a record says that the walk found."""

    content_id: ContentId
    extent_no: int
    nbytes: int
    segment: int
    place_bytes: int


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
        environment = open_environment(path, sync=sync)
        try:
            index = cls(environment, path, open_tables(environment, path))
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
            mark_damaged(self.path)

    def extents_of(self, content_id: ContentId) -> list[int]:
        """Numbers of the extents that have a record, in order."""
        found: set[int] = set()
        changes = [batch[content_id] for batch in (self._committing, self._pending) if content_id in batch]
        if not any(change.dropped for change in changes):
            try:
                with self._env.begin(db=self._extent_table) as txn:
                    found.update(int.from_bytes(key[16:], "big") for key in keys_of(txn, content_id))
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
                for key in keys_of(txn, content_id):
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
                return next(keys_of(txn, content_id), None) is not None
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

    def _change(self, content_id: ContentId) -> Change:
        change = self._pending.get(content_id)
        if change is None:
            change = self._pending[content_id] = Change()
        return change

    # committing

    def take_batch(self) -> Batch:
        """Trio thread: what ``commit_batch`` is to write. A batch that failed is merged in first."""
        if self._committing:
            merged = self._committing
            for content_id, change in self._pending.items():
                merge(merged, content_id, change)
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
                    delta += apply(txn, self._extent_table, self._pin_table, content_id, change)
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


def _walk(cursor: Any, after: bytes, limit: int, found: list[Walked]) -> bytes | None:
    """Append up to ``limit`` records from key ``after``; returns the key of the next, if there is one."""
    if not cursor.set_range(after):
        return None
    content_id = b""
    for key, value in cursor:
        if len(found) >= limit:
            return bytes(key)
        if len(key) != KEY_BYTES:
            continue
        name = bytes(key)
        if name[:16] != content_id:
            content_id = name[:16]
        number = int.from_bytes(name[16:], "big")
        found.append(Walked(ContentId(content_id), number, record.allocated_in(value, number),
                            *record.place_in(value)))
    return None
