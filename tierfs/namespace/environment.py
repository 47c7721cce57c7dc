"""Opening and making the files of the namespace: lock, map size, format, what a new one holds."""

from __future__ import annotations

import ctypes
import fcntl
import os
import uuid
from pathlib import Path
from typing import Any, Final

import lmdb

from tierfs.boot import boot_id as boot_id
from tierfs.errors import ConfigError, FormatError, NamespaceError
from tierfs.namespace import durability, records, schema
from tierfs.namespace.transaction import HISTORY_TABLES, TABLES, ReadTransaction, WriteTransaction

_MAP_SIZES_BYTES: Final = tuple(gib * 1024**3 for gib in (1024, 256, 64, 16, 4, 1))
_MAX_READERS: Final = 512
_READERS_BYTES: Final = 128 * _MAX_READERS
_KEEP_SIZE: Final = 1
"""FALLOC_FL_KEEP_SIZE"""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate64.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def lock(directory: Path) -> int:
    """Take the state directory for this process; returns the descriptor that holds the lock."""
    path = directory / "LOCK"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        os.close(fd)
        raise NamespaceError(f"{directory} is in use by process {owner or 'unknown'}") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def open_env(path: Path, read_only: bool) -> lmdb.Environment:
    """Open with the largest map that the address space limit admits; it is sparse and never resized."""
    failure: Exception | None = None
    if not read_only:
        _allocate(path)
    for map_size in _MAP_SIZES_BYTES:
        try:
            return lmdb.open(
                str(path),
                map_size=map_size,
                max_dbs=len(TABLES) + len(HISTORY_TABLES) + 3,
                max_readers=_MAX_READERS,
                sync=False,  # see ``durability``
                readahead=False,
                mode=0o700,
                readonly=read_only,
                create=not read_only,
                max_spare_txns=4,
            )
        except (lmdb.MemoryError, MemoryError) as error:
            failure = error
        except lmdb.Error as error:
            raise NamespaceError(f"cannot open {path}: {error}") from error
    raise NamespaceError(f"cannot map {path}: {failure}")


def restore(path: Path, boot_id: bytes, lock_fd: int | None) -> None:
    """After a power cut: see ``durability``. ``lock_fd`` None: the caller has not locked the directory.

    Raises ``NamespaceError``.
    """
    try:
        if not durability.needs_restore(path, boot_id):
            return
        if lock_fd is not None:
            durability.restore(path, boot_id)
            return
        own = lock(path.parent)  # whoever has it locked has restored it, and is about to say so
        try:
            durability.restore(path, boot_id)
        finally:
            os.close(own)
    except OSError as error:
        raise NamespaceError(f"{path} has to be brought back to a state that is whole: {error}") from error


def open_history(env: lmdb.Environment, name: str, read_only: bool) -> Any:
    """A table that only snapshots need; None if it is not there and cannot be made."""
    try:
        return env.open_db(name.encode(), create=not read_only)
    except (lmdb.NotFoundError, lmdb.ReadonlyError):
        if not read_only:
            raise
        return None


def _allocate(path: Path) -> None:
    """Give the mapped table of readers its blocks: a store into a hole of it on a full disk is SIGBUS.

    Before LMDB opens it: to close a descriptor of it later would give up LMDB's locks.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(path / "lock.mdb", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # Not posix_fallocate, which would write into the table where the file system cannot do it.
        _libc.fallocate64(fd, _KEEP_SIZE, 0, _READERS_BYTES)
    finally:
        os.close(fd)


def check_format(env: lmdb.Environment, path: Path) -> None:
    """Refuse what another version made, before anything is written. Raises ``FormatError``."""
    try:
        meta = env.open_db(b"meta", create=False)
    except lmdb.NotFoundError:
        return
    with env.begin() as txn:
        raw = txn.get(schema.META_FORMAT, db=meta)
    if raw is None:
        return
    version = schema.unpack_u64(raw)[0]
    if not schema.OLDEST_FORMAT <= version <= schema.FORMAT_VERSION:
        older = "an older" if version < schema.OLDEST_FORMAT else "a newer"
        raise FormatError(
            f"{path} has format {version}, this version of tierfs reads {schema.FORMAT_VERSION}: "
            f"use {older} tierfs, or another --state-dir"
        )


def check_meta(txn: ReadTransaction, path: Path, source: str | None, prefix: str | None) -> None:
    """Refuse what belongs to another source; learn the prefix if not given."""
    meta = txn.tables.meta
    for key, text, what in (
        (schema.META_SOURCE, source, "source"),
        (schema.META_PREFIX, prefix, "prefix"),
    ):
        known = txn.get(key, None, meta)
        if known is not None and text is not None and known != text.encode():
            raise ConfigError(
                f"{path} belongs to {what} {known.decode(errors='replace')!r}, not to {text!r}: "
                "use another --state-dir"
            )
    known = txn.get(schema.META_PREFIX, None, meta)
    if prefix is None and known is not None:
        txn.tables.prefix = known.decode()


def initialise(txn: WriteTransaction, now_ns: int) -> None:
    """What a new database holds."""
    # The root is made here rather than in ``tree`` so that no reader ever meets a database without one.
    meta = txn.tables.meta
    generation = int.from_bytes(os.urandom(3), "big") + 1
    txn.put(schema.META_NEXT_ID, schema.pack_u64(schema.FIRST_FREE_ID), db=meta)
    txn.put(schema.META_EPOCH, schema.pack_u64(0), db=meta)
    txn.put(schema.META_UUID, uuid.uuid4().bytes, db=meta)
    txn.put(schema.META_GENERATION, schema.pack_u64(generation), db=meta)
    records.make_root(txn, now_ns)


def sync_names(path: Path) -> None:
    """The files of a new database survive a power cut by name, not only by content."""
    for directory in (path, path.parent, path.parent.parent):
        try:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except PermissionError:
            continue  # a directory above ours that we may only pass through: it has been there before
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
