"""User metadata of a directory store: in an extended attribute, or in a sidecar file where that fails.

One attribute (``user.tierfs.meta``) holds everything as JSON, so that a change is atomic and ``getfattr``
shows it. File systems without user attributes (or without room for them) get a sidecar
``.tierfs/meta/<digest of key and ETag>.json``; since the ETag is part of its name, metadata never stick to
a file that another tool has put in the place of ours.

What other tools wrote into an attribute is not trusted: what does not decode counts as no metadata.
Raises OSError only; ``local`` translates.
"""

from __future__ import annotations

import errno
import hashlib
import os

import msgspec

ATTRIBUTE = b"user.tierfs.meta"
_NO_ROOM = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.E2BIG, errno.ENOSPC,
            errno.ERANGE}
_ABSENT = {errno.ENODATA, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EACCES}


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """``implicit``: this directory exists only because of the keys below it; it is no marker object."""

    metadata: dict[str, str] = {}
    implicit: bool = False


EMPTY = Record()


class MetadataKeeper:
    """Reads and writes the record of a file or directory given as an open descriptor or a path."""

    def __init__(self, sidecar_dir: bytes, *, use_xattrs: bool = True) -> None:
        self._dir = sidecar_dir
        self._use_xattrs = use_xattrs

    def load(self, target: int | bytes, key: str, etag: str) -> Record:
        if self._use_xattrs:
            try:
                return _decode(os.getxattr(target, ATTRIBUTE))
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
        try:
            with open(self._sidecar(key, etag), "rb") as file:
                return _decode(file.read(65536))
        except (FileNotFoundError, NotADirectoryError):
            return EMPTY

    def save(self, target: int | bytes, key: str, etag: str, record: Record) -> None:
        """Replace the record. For a sidecar the bytes are on disk on return; an attribute needs an fsync."""
        if record == EMPTY:
            self.drop(target, key, etag)
            return
        data = msgspec.json.encode(record)
        if self._use_xattrs:
            try:
                os.setxattr(target, ATTRIBUTE, data)
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
        os.makedirs(self._dir, exist_ok=True)
        path = self._sidecar(key, etag)
        temporary = path + b".%d.new" % os.getpid()
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)

    def drop(self, target: int | bytes | None, key: str, etag: str) -> None:
        """Forget the record; ``target`` None: only the sidecar (the file itself is gone)."""
        if target is not None and self._use_xattrs:
            try:
                os.removexattr(target, ATTRIBUTE)
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
        try:
            os.unlink(self._sidecar(key, etag))
        except (FileNotFoundError, NotADirectoryError):
            return

    def _sidecar(self, key: str, etag: str) -> bytes:
        text = f"{key}\0{etag}".encode("utf-8", "surrogatepass")
        return self._dir + b"/" + hashlib.blake2b(text, digest_size=16).hexdigest().encode() + b".json"


def _decode(data: bytes) -> Record:
    try:
        return msgspec.json.decode(data, type=Record)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return EMPTY
