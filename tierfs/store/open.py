"""From the SOURCE of a mount to a store that retries.

``open_store`` connects to nothing: a store that cannot be reached shows in ``check()``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import msgspec

from tierfs.config import Settings
from tierfs.errors import ConfigError
from tierfs.metrics import Metrics
from tierfs.store.base import ObjectStore
from tierfs.store.faulty import FAULTS_ENVIRONMENT, FaultyStore, FileFaults
from tierfs.store.local import LocalStore
from tierfs.store.retry import RetryingStore

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}|arn:[A-Za-z0-9:/._-]+")


def open_store(
    settings: Settings,
    *,
    metrics: Metrics | None = None,
    wrap: Callable[[ObjectStore], ObjectStore] | None = None,
) -> tuple[RetryingStore, str]:
    """The store of ``settings.source`` and the key prefix of the mount (``""`` or ending in ``/``).

    Keys given to the store include the prefix. ``wrap`` may put something between the store and its
    retries (tests inject faults there). Raises ConfigError, naming SOURCE.
    """
    store, prefix = _open_plain(settings, metrics)
    faults_file = os.environ.get(FAULTS_ENVIRONMENT)
    if faults_file:
        store = FaultyStore(store, FileFaults(faults_file))
    if wrap is not None:
        store = wrap(store)
    return RetryingStore(store, timeout_s=settings.store_timeout_s, metrics=metrics), prefix


def open_replica(
    settings: Settings, metrics: Metrics | None = None, *, make: bool = True
) -> tuple[RetryingStore, str]:
    """The store of ``settings.replica`` and its key prefix, like ``open_store``.

    With ``make`` a directory that is not there yet is made, for its owner alone. Raises ConfigError, naming
    the replica.
    """
    assert settings.replica is not None
    if make and settings.replica.startswith("/"):
        try:
            os.makedirs(settings.replica, mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"replica: {settings.replica} cannot be made: {error.strerror}") from None
    meant = msgspec.structs.replace(
        settings,
        source=settings.replica,
        endpoint_url=settings.replica_endpoint_url or settings.endpoint_url,
    )
    try:
        store, prefix = _open_plain(meant, metrics)
    except ConfigError as error:
        raise ConfigError(f"replica: {str(error).removeprefix('SOURCE: ')}") from None
    return RetryingStore(store, timeout_s=settings.store_timeout_s, metrics=metrics), prefix


def parse_s3_source(source: str) -> tuple[str, str]:
    """Bucket and key prefix of ``s3://bucket[/prefix]``; the prefix is ``""`` or ends in ``/``.

    The prefix is taken as it is written: nothing is decoded, since ``%``, ``?`` and ``#`` may be in a key.
    """
    bucket, _, prefix = source.removeprefix("s3://").partition("/")
    if "@" in bucket:
        raise ConfigError("SOURCE: credentials do not belong into it; use a profile or the environment")
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(f"SOURCE: {source!r} does not name a bucket; write s3://bucket or s3://bucket/prefix")
    prefix = prefix.rstrip("/")
    if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
        raise ConfigError(f"SOURCE: the prefix in {source!r} has an empty, '.' or '..' part")
    return bucket, prefix + "/" if prefix else ""


def _open_plain(settings: Settings, metrics: Metrics | None) -> tuple[ObjectStore, str]:
    source = settings.source
    if not source:
        raise ConfigError("SOURCE: missing; write s3://bucket[/prefix] or a directory")
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", source)
    if scheme is None:
        return _open_directory(source, metrics), ""
    if scheme[1] == "file":
        # What follows is a path as it is: nothing in it is percent-decoded.
        directory = source.removeprefix("file://").removeprefix("localhost")
        if not directory.startswith("/"):
            raise ConfigError(f"SOURCE: {source!r} must look like file:///directory")
        return _open_directory(directory, metrics), ""
    if scheme[1] != "s3":
        # Without the rest of it: there may be a password inside.
        raise ConfigError(
            f"SOURCE: {scheme[1]}:// is not supported; write s3://bucket[/prefix] or a directory")
    bucket, prefix = parse_s3_source(source)
    # boto3 takes 0.3 s to import, which a directory store does not need.
    from tierfs.store.s3 import S3Store

    return S3Store(
        bucket, prefix=prefix, endpoint_url=settings.endpoint_url, region=settings.region,
        profile=settings.profile, connections=settings.fetch_concurrency + settings.upload_concurrency + 8,
        metrics=metrics,
    ), prefix


def _open_directory(path: str, metrics: Metrics | None) -> LocalStore:
    if not os.path.isdir(path):
        problem = "is not a directory" if os.path.lexists(path) else "does not exist"
        raise ConfigError(f"SOURCE: {path!r} {problem}")
    if not os.access(path, os.R_OK | os.X_OK):
        raise ConfigError(f"SOURCE: {path!r} may not be read by this user")
    return LocalStore(path, metrics=metrics)
