"""Opening the file of a tier's index: whose it is, in which format, and whether it may be mapped at all.

Everything here blocks. ``open_environment`` makes what is not there yet. A file that is shorter than its
own page count is refused before it is mapped, for a read of it would end the process. One that could not be
read when it was used last is marked (``mark_damaged``), and refused as well.

Raises ``FormatError`` for an index of another program or a newer version, ``IndexDamaged`` for one that
cannot be read.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import lmdb

from tierfs.errors import CacheError, FormatError

FORMAT = 1
_FORMAT_MARK = b"tierfs tier index "
_MAP_SIZES = (1 << 40, 1 << 36, 1 << 32, 1 << 29)
"""Address space to ask for, in bytes; the first that the process limits allow."""
_DAMAGE_MARK = "damaged"


class IndexDamaged(CacheError):
    """The index cannot be read. It is moved aside and the tier starts with no clean content."""


def open_environment(path: Path, *, sync: bool) -> Any:
    """The LMDB environment in the directory ``path``, made if need be. ``sync`` False: for a RAM tier."""
    path.mkdir(mode=0o700, exist_ok=True)
    _refuse_truncated(path)
    return _environment(path, sync)


def open_tables(environment: Any, path: Path) -> tuple[Any, Any, Any]:
    """(extents, pins, meta), made if there is nothing in it. May raise ``lmdb.Error``."""
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
            raise FormatError(
                f"{path} has format {found}; this version of tierfs reads format {FORMAT}."
                " Use a newer version, or remove the directory (it is a cache)"
            )
    meta = environment.open_db(b"meta")
    tables = (environment.open_db(b"extent"), environment.open_db(b"pin"), meta)
    if not entries:
        with environment.begin(write=True, db=meta) as txn:
            txn.put(b"format", _FORMAT_MARK + str(FORMAT).encode())
    return tables


def mark_damaged(path: Path) -> None:
    """The next open refuses it."""
    try:
        (path / _DAMAGE_MARK).touch(mode=0o600)
    except OSError:
        pass


def _environment(path: Path, sync: bool) -> Any:
    failure: Exception | None = None
    for map_size in _MAP_SIZES:
        try:
            return lmdb.open(
                str(path),
                map_size=map_size,
                max_dbs=8,
                max_readers=512,
                mode=0o600,
                metasync=False,
                sync=sync,
                readahead=False,
                subdir=True,
            )
        except lmdb.MemoryError as error:
            failure = error
        except lmdb.Error as error:
            if "Cannot allocate memory" not in str(error):
                raise IndexDamaged(f"{path}: {error}") from error
            failure = error
    raise IndexDamaged(f"{path}: {failure}")


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
