"""What a power cut leaves of the namespace, where most commits do not wait for the device.

A commit is visible, to this process and to others, once its pages and LMDB's header are in the page cache;
then it survives every process. LMDB runs with ``sync=False``: nothing orders what reaches the device by
itself, and after a power cut its header may speak of pages that never got there. So that header is not
believed then. ``Checkpoints`` keeps another one, in a file of its own:

1. *pin*: a read transaction is opened at the newest commit. While it lives, LMDB writes into no page that
   this state of the tree consists of.
2. *sync*: all pages written so far are synced, those of the pinned state among them.
3. *note*: the header of that state is written into one of two slots of the file ``durable``, and synced.
4. Only now the pin of the state noted before goes, and LMDB may use its pages again.

So at every moment the newest valid slot speaks of a state whose pages are all on the device, and whose pages
nobody changes. The order of commits is kept: what a power cut leaves is the state of one moment.

A slot names the boot in which it was written. Within one boot the page cache tells the truth, and LMDB's
header is newer than the slot; ``restore``, before LMDB opens the files, writes the slot's header into both of
LMDB's headers if the boot is another one. An engine that was killed took its pin with it, so the first thing
that the next one does, before it writes anything, is such a checkpoint.

Should the device refuse to sync, nobody knows which pages it has: everything is refused from then on, and the
slot is made one of no boot, so that the next start goes back to it.

Source of the layout of a header: ``MDB_meta`` and ``mdb_env_write_meta`` in LMDB 0.9. ``Checkpoints.start``
compares before it relies on that.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import lmdb
import structlog
import xxhash

from tierfs.errors import NamespaceError

log = structlog.get_logger(__name__)

FILE_NAME: Final = "durable"
_DATA_NAME: Final = "data.mdb"
_SLOT_BYTES: Final = 4096
_MARK: Final = b"tierfsDH"
_RECORD: Final = struct.Struct("<8sQQI16s136s")
"""Mark, serial number, LMDB's transaction number, page size, digest of the boot, LMDB's header."""
_DIGEST_BYTES: Final = 16
_NO_BOOT: Final = bytes(16)
_META: Final = struct.Struct("<II Q Q I 92x Q Q")
"""Magic, version, address, map size, page size (first in the first table), last page, transaction."""
_META_MAGIC: Final = 0xBEEFC0DE
_META_AT: Final = 16
"""Of the header in its page, behind LMDB's header of the page."""


@dataclass(frozen=True, slots=True)
class _Slot:
    number: int
    serial: int
    txn_id: int
    page_bytes: int
    boot: bytes
    meta: bytes

    def pack(self) -> bytes:
        fields = _RECORD.pack(_MARK, self.serial, self.txn_id, self.page_bytes, self.boot, self.meta)
        return fields + xxhash.xxh3_128_digest(fields)


def _read_slots(descriptor: int) -> list[_Slot]:
    """The valid ones, the newest first."""
    found = []
    for number in range(2):
        raw = os.pread(descriptor, _RECORD.size + _DIGEST_BYTES, number * _SLOT_BYTES)
        fields = raw[: _RECORD.size]
        if len(fields) < _RECORD.size or xxhash.xxh3_128_digest(fields) != raw[_RECORD.size :]:
            continue
        mark, serial, txn_id, page_bytes, boot, meta = _RECORD.unpack(fields)
        if mark == _MARK:
            found.append(_Slot(number, serial, txn_id, page_bytes, boot, meta))
    return sorted(found, key=lambda slot: slot.serial, reverse=True)


def _boot_digest(boot_id: bytes) -> bytes:
    return xxhash.xxh3_128_digest(boot_id)


def needs_restore(path: Path, boot_id: bytes) -> bool:
    """Whether the header of ``path/data.mdb`` is not to be believed. Raises ``OSError``."""
    try:
        descriptor = os.open(path / FILE_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False  # made by a version that synced every commit, or not used yet
    try:
        slots = _read_slots(descriptor)
        if not slots or slots[0].boot == _boot_digest(boot_id):
            return False
        return _headers(path, slots[0].page_bytes) != [slots[0].meta] * 2
    finally:
        os.close(descriptor)


def _headers(path: Path, page_bytes: int) -> list[bytes]:
    """LMDB's two."""
    descriptor = os.open(path / _DATA_NAME, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return [os.pread(descriptor, _META.size, page_bytes * page + _META_AT) for page in range(2)]
    finally:
        os.close(descriptor)


def restore(path: Path, boot_id: bytes) -> None:
    """Go back to the state that was noted last, if the boot was another one.

    The caller holds the lock of the directory, and nobody has the files open. Doing it twice does no harm.
    Raises ``OSError``.
    """
    if not needs_restore(path, boot_id):
        return
    with contextlib.ExitStack() as stack:
        noted = os.open(path / FILE_NAME, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, noted)
        slot = _read_slots(noted)[0]
        data = os.open(path / _DATA_NAME, os.O_RDWR | os.O_CLOEXEC)
        stack.callback(os.close, data)
        for page in range(2):
            os.pwrite(data, slot.meta, slot.page_bytes * page + _META_AT)
        os.fdatasync(data)
    log.info("the namespace is as it was last made durable", transaction=slot.txn_id)


class Checkpoints:
    """See the module docstring. ``take`` may be called from any thread that is in no transaction."""

    def __init__(self, env: lmdb.Environment, path: Path, boot_id: bytes) -> None:
        self._env = env
        self._lock = threading.Lock()
        self._boot = _boot_digest(boot_id)
        self._page_bytes = int(env.stat()["psize"])
        self._pin: lmdb.Transaction[bytes] | None = None
        self._noted: _Slot | None = None
        """What the file says; None: nothing yet."""
        self._failure: NamespaceError | None = None
        self._data = os.open(path / _DATA_NAME, os.O_RDONLY | os.O_CLOEXEC)
        self._file = os.open(path / FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        slots = _read_slots(self._file)
        self._serial = slots[0].serial if slots else 0
        self._next_slot = 1 - slots[0].number if slots else 0

    @classmethod
    def start(cls, env: lmdb.Environment, path: Path, boot_id: bytes) -> Checkpoints:
        """Take the first one, before anything is written. Raises ``NamespaceError``, ``OSError``."""
        checkpoints = cls(env, path, boot_id)
        try:
            os.ftruncate(checkpoints._file, 2 * _SLOT_BYTES)
            checkpoints.take()
            # Its name as well, before anything relies on it.
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except BaseException:
            checkpoints.close()
            raise
        return checkpoints

    def check(self) -> None:
        """Raises ``NamespaceError`` if nothing may be written any more."""
        if self._failure is not None:
            raise self._failure

    def take(self) -> None:
        """All that has been committed survives a power cut when this returns.

        Raises ``NamespaceError`` when it cannot be made durable; then nothing can any more.
        """
        with self._lock:
            self.check()
            pin, meta = self._pin_newest()
            txn_id = int(pin.id())
            if self._noted is not None and self._noted.txn_id == txn_id:
                pin.abort()
                return
            try:
                self._env.sync(True)
                self._note(txn_id, meta)
            except Exception as error:  # lmdb.Error, OSError: whatever it is, the device may lack pages
                pin.abort()
                raise self._fail(error) from error
            if self._pin is not None:
                self._pin.abort()
            self._pin = pin

    def _pin_newest(self) -> tuple[lmdb.Transaction[bytes], bytes]:
        """A transaction at the newest commit, and LMDB's header of it."""
        # Nobody commits while this thread could.
        writer = self._env.begin(write=True)
        try:
            pin = self._env.begin()
            at = (int(pin.id()) & 1) * self._page_bytes + _META_AT
            meta = os.pread(self._data, _META.size, at)
        finally:
            writer.abort()
        magic, _, _, _, page_bytes, _, txn_id = _META.unpack(meta)
        if (magic, page_bytes, txn_id) != (_META_MAGIC, self._page_bytes, int(pin.id())):
            pin.abort()
            raise NamespaceError(
                "this version of LMDB lays its header out in a way that tierfs does not know"
            )
        return pin, meta

    def _note(self, txn_id: int, meta: bytes) -> None:
        slot = _Slot(self._next_slot, self._serial + 1, txn_id, self._page_bytes, self._boot, meta)
        os.pwrite(self._file, slot.pack(), slot.number * _SLOT_BYTES)
        os.fdatasync(self._file)
        self._noted = slot
        self._serial = slot.serial
        self._next_slot = 1 - slot.number

    def _fail(self, error: Exception) -> NamespaceError:
        failure = NamespaceError(
            f"the namespace cannot be made durable, and is not changed any more: {error}"
        )
        failure.errno = getattr(error, "errno", None) or failure.errno
        self._failure = failure
        log.error("the namespace cannot be made durable, and is not changed any more", reason=str(error))
        noted = self._noted
        if noted is not None:
            distrusted = _Slot(
                noted.number, noted.serial + 2, noted.txn_id, noted.page_bytes, _NO_BOOT, noted.meta
            )
            with contextlib.suppress(OSError):
                os.pwrite(self._file, distrusted.pack(), noted.number * _SLOT_BYTES)
        return failure

    def close(self) -> None:
        """Give the pin back. What has been committed since the last ``take`` is not durable."""
        if self._pin is not None:
            self._pin.abort()
            self._pin = None
        os.close(self._file)
        os.close(self._data)
