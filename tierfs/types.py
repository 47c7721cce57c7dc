"""Frozen value types that several floors share. No behaviour beyond construction and conversion."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NewType

import msgspec

ContentId = NewType("ContentId", bytes)
"""16 bytes that name one immutable content, in the namespace and in every tier."""

ROOT_INO = 1
NO_CONTENT = ContentId(bytes(16))
"""The content of an empty file, and of everything that is not a regular file."""

BLOCK_SIZE_BYTES = 128 * 1024
"""Unit of presence and of checksums in a tier: the size of one FUSE read (kernel read-ahead default)."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What the store says about one object.

    ``metadata`` is None where the store did not tell (listings carry none).
    ``mtime_ns`` is the store's own Last-Modified; ``etag`` is without quotes.
    """

    key: str
    size_bytes: int
    etag: str
    mtime_ns: int
    version_id: str | None = None
    metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """One immutable version of a file's content: where it is in the store, and its name in the tiers."""

    content_id: ContentId
    key: str
    etag: str
    size_bytes: int
    version_id: str | None = None


class Inode(msgspec.Struct, frozen=True, gc=False):
    """One inode record. Times are nanoseconds since the epoch; ``mode`` includes the file type.

    ``content_id`` names the content of a regular file (``NO_CONTENT`` if it never had any).
    ``valid_until_ns``: until when what the bucket said about this inode may be believed (wall clock);
    ``listed_until_ns``: for a directory, until when its listing is complete and may be believed
    (0: never listed). ``flags``: see ``namespace.schema``.
    """

    ino: int
    mode: int
    uid: int
    gid: int
    nlink: int
    rdev: int
    size_bytes: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    generation: int
    flags: int
    content_id: ContentId
    valid_until_ns: int
    listed_until_ns: int

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_regular(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_symlink(self) -> bool:
        return stat.S_ISLNK(self.mode)


def content_id_of_object(key: str, etag: str, size_bytes: int, version_id: str | None) -> ContentId:
    """The content id of an object version that others wrote: a digest of its identity.

    BLAKE2b, not xxHash: keys and ETags come from whoever may write to the bucket, and two identities
    with one id would serve one file's bytes as another's.
    """
    text = "\0".join((key, etag, str(size_bytes), version_id or ""))
    return ContentId(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest())


def new_content_id() -> ContentId:
    """A fresh content id for bytes written here."""
    return ContentId(os.urandom(16))
