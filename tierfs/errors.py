"""Every exception that tierfs raises on purpose, in one tree, each with its errno.

::

    TierfsError                      EIO
    ├── ConfigError                  EINVAL     a setting, an option, a SOURCE
    ├── FormatError                  EIO        on-disk format newer than, or unknown to, this version
    ├── NamespaceError               EIO
    │   ├── NotFound                 ENOENT
    │   ├── AlreadyExists            EEXIST
    │   ├── NotADirectory            ENOTDIR
    │   ├── IsADirectory             EISDIR
    │   ├── DirectoryNotEmpty        ENOTEMPTY
    │   ├── NameTooLong              ENAMETOOLONG
    │   ├── InvalidArgument          EINVAL
    │   ├── NotPermitted             EPERM
    │   ├── NotSupported             EOPNOTSUPP
    │   ├── NoAttribute              ENODATA
    │   ├── NoSuchRange              ENXIO      no data, and no hole, behind that offset
    │   ├── TooManyLinks             EMLINK
    │   ├── ReadOnly                 EROFS
    │   ├── Busy                     EBUSY      something that is under way, or open, is in the way
    │   └── DamagedRecord            EIO        a record that does not decode
    ├── StoreError                   EIO
    │   ├── ObjectNotFound           ENOENT
    │   ├── StoreAccessDenied        EACCES
    │   ├── PreconditionFailed       ESTALE     If-Match / If-None-Match did not hold
    │   ├── ObjectTooLarge           EFBIG
    │   ├── StoreUnsupported         EOPNOTSUPP the store lacks this operation
    │   ├── StoreConfigError         EINVAL     no such bucket, malformed request
    │   └── TransientStoreError      EIO        worth another try
    │       ├── StoreUnavailable     EIO        5xx, reset, refused, malformed answer
    │       ├── StoreThrottled       EIO        503 SlowDown, 429
    │       ├── StoreTimeout         ETIMEDOUT
    │       ├── ShortBody            EIO        fewer bytes than promised
    │       ├── CredentialsExpired   EIO
    │       └── ClockSkewed          EIO
    ├── CacheError                   EIO
    │   ├── TierFull                 ENOSPC     nothing left to evict
    │   ├── TierFailed               EIO        the tier's file system returned an error
    │   └── BlockDamaged             EIO        checksum mismatch
    ├── CheckpointError              EIO        a checkpoint cannot be saved, found or restored
    │   └── ManifestDamaged          EIO        a manifest that cannot be read or is not trusted
    ├── StaleContent                 ESTALE     the pinned version of a file is gone from the store
    ├── Interrupted                  EINTR      the caller got a signal while it waited
    ├── ControlError                 EIO        the control channel: no mount, refused, malformed
    ├── MountError                   EIO        mounting, unmounting, mountpoint state
    └── BenchFailed                  EIO        a measurement could not be made

Only ``fs.ops`` turns an errno into a FUSE answer. A transient store error that outlives its retries is
raised as it is: the application sees EIO or ETIMEDOUT, never ENOENT.
"""

from __future__ import annotations

import errno as _errno


class TierfsError(Exception):
    """Root of the tree. ``errno`` is what a system call answers when nobody handles the error."""

    errno: int = _errno.EIO


class ConfigError(TierfsError):
    """A setting is missing, unknown or out of range. The message names the setting."""

    errno = _errno.EINVAL


class FormatError(TierfsError):
    """An on-disk format that this version cannot read. The message names the path and both versions."""


class NamespaceError(TierfsError):
    """Something about names and inodes."""


class NotFound(NamespaceError):
    errno = _errno.ENOENT


class AlreadyExists(NamespaceError):
    errno = _errno.EEXIST


class NotADirectory(NamespaceError):
    errno = _errno.ENOTDIR


class IsADirectory(NamespaceError):
    errno = _errno.EISDIR


class DirectoryNotEmpty(NamespaceError):
    errno = _errno.ENOTEMPTY


class NameTooLong(NamespaceError):
    errno = _errno.ENAMETOOLONG


class InvalidArgument(NamespaceError):
    errno = _errno.EINVAL


class NotPermitted(NamespaceError):
    errno = _errno.EPERM


class NotSupported(NamespaceError):
    errno = _errno.EOPNOTSUPP


class NoSuchRange(NamespaceError):
    errno = _errno.ENXIO


class NoAttribute(NamespaceError):
    errno = _errno.ENODATA


class TooManyLinks(NamespaceError):
    errno = _errno.EMLINK


class ReadOnly(NamespaceError):
    errno = _errno.EROFS


class Busy(NamespaceError):
    """Something that is under way, or open, is in the way. The message says what."""

    errno = _errno.EBUSY


class DamagedRecord(NamespaceError):
    """A namespace record that does not decode. The message names table and key."""


class StoreError(TierfsError):
    """The object store answered with an error, or not at all. The message names the key."""


class ObjectNotFound(StoreError):
    errno = _errno.ENOENT


class StoreAccessDenied(StoreError):
    errno = _errno.EACCES


class PreconditionFailed(StoreError):
    """If-Match or If-None-Match did not hold: the object is another version than expected."""

    errno = _errno.ESTALE


class ObjectTooLarge(StoreError):
    errno = _errno.EFBIG


class StoreUnsupported(StoreError):
    errno = _errno.EOPNOTSUPP


class StoreConfigError(StoreError):
    """The request can never succeed as configured: no such bucket, bad region, malformed request."""

    errno = _errno.EINVAL


class TransientStoreError(StoreError):
    """Worth another try; ``store.retry`` tries again, nobody else needs to."""

    retry_after_s: float | None = None


class StoreUnavailable(TransientStoreError):
    pass


class StoreThrottled(TransientStoreError):
    pass


class StoreTimeout(TransientStoreError):
    errno = _errno.ETIMEDOUT


class ShortBody(TransientStoreError):
    pass


class CredentialsExpired(TransientStoreError):
    pass


class ClockSkewed(TransientStoreError):
    pass


class CacheError(TierfsError):
    """Something about the local copies."""


class TierFull(CacheError):
    errno = _errno.ENOSPC


class TierFailed(CacheError):
    pass


class BlockDamaged(CacheError):
    pass


class CheckpointError(TierfsError):
    """A checkpoint cannot be saved, found or restored. The message says which, and why."""


class ManifestDamaged(CheckpointError):
    """A manifest that cannot be read, is of a newer format, or says what it may not. It is named."""


class StaleContent(TierfsError):
    """The version of the file that this handle reads can no longer be had."""

    errno = _errno.ESTALE


class Interrupted(TierfsError):
    errno = _errno.EINTR


class ControlError(TierfsError):
    """The control channel: no such mount, not allowed, malformed request or answer."""


class MountError(TierfsError):
    """Mounting or unmounting cannot go on. The message says why and what to do."""


class BenchFailed(TierfsError):
    """A measurement could not be made. The message says which, and why."""
