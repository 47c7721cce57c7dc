"""Stores to run a test against, by name."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping

import pytest

from tests.support import weed
from tierfs.store.base import ObjectStore
from tierfs.store.local import LocalStore
from tierfs.store.retry import RetryingStore
from tierfs.store.s3 import S3Store

MIB = 1024 * 1024
_buckets: list[str] = []


def store_names() -> list[object]:
    """Parameters for a fixture; those that cannot run here are marked to be skipped, with the reason."""
    missing = weed.weed_missing()
    marks = [pytest.mark.skip(reason=missing)] if missing else []
    return ["local", "local-sidecars", "retry-local", pytest.param("weed", marks=marks),
            pytest.param("weed-boto3", marks=marks)]


@contextlib.contextmanager
def open_named_store(name: str) -> Iterator[ObjectStore]:
    """An empty store of that kind."""
    if name.startswith("weed"):
        with _weed_store(use_fast_path=name == "weed") as store:
            yield store
        return
    with tempfile.TemporaryDirectory(prefix="tierfs-store-") as directory:
        store = LocalStore(directory, use_xattrs=name != "local-sidecars")
        wrapped = RetryingStore(store, timeout_s=5) if name.startswith("retry") else store
        try:
            yield wrapped
        finally:
            wrapped.close()


@contextlib.contextmanager
def _weed_store(*, use_fast_path: bool) -> Iterator[ObjectStore]:
    server = weed.shared_weed()
    if not _buckets:  # one for all tests: SeaweedFS makes several volumes for each
        _buckets.append(server.make_bucket())
    with environment(server.environment):
        store = S3Store(_buckets[0], endpoint_url=server.endpoint_url, region="us-east-1", connections=16,
                        use_fast_path=use_fast_path)
        try:
            yield store
        finally:
            empty(store)
            store.close()


def empty(store: ObjectStore, prefix: str = "") -> None:
    """Delete every object and abort every upload."""
    for upload in store.list_unfinished_uploads(prefix):
        store.abort_multipart(upload.key, upload.upload_id)
    while True:
        keys = [info.key for info in store.list_page(prefix, recursive=True).objects]
        if not keys:
            return
        failures = store.delete_many(keys)
        assert not failures, failures


@contextlib.contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Environment variables for the time of a block; None removes one."""
    before = {name: os.environ.get(name) for name in values}

    def apply(wanted: Mapping[str, str | None]) -> None:
        for name, value in wanted.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    apply(values)
    try:
        yield
    finally:
        apply(before)
