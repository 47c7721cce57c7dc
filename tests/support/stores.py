"""Stores to run a test against, by name."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.support import weed
from tests.support.fake_s3 import BUCKET, FakeS3, fake_s3
from tierfs.store.base import (
    UNCONDITIONAL,
    Buffer,
    Condition,
    DeleteFailure,
    ListPage,
    ObjectStore,
    Part,
    UnfinishedUpload,
)
from tierfs.store.body import WholeBodies
from tierfs.store.local import LocalStore
from tierfs.store.retry import RetryingStore
from tierfs.store.s3 import S3Store
from tierfs.store.wrapper import StoreWrapper
from tierfs.types import ObjectInfo

MIB = 1024 * 1024
_shared: dict[str, ObjectStore] = {}
_at_exit = contextlib.ExitStack()
atexit.register(_at_exit.close)


def store_names() -> list[object]:
    """Parameters for a fixture; those that cannot run here are marked to be skipped, with the reason."""
    missing = weed.weed_missing()
    marks = [pytest.mark.skip(reason=missing)] if missing else []
    return ["local", "local-sidecars", "retry-local", "fake", "fake-boto3", pytest.param("weed", marks=marks)]


@contextlib.contextmanager
def open_named_store(name: str) -> Iterator[ObjectStore]:
    """An empty store of that kind. Making an S3 client takes 0.1 s, so S3 tests share one, by prefix."""
    if name.startswith(("fake", "weed")):
        view = PrefixedStore(_shared_store(name), f"t-{secrets.token_hex(4)}/")
        try:
            yield view
        finally:
            empty(view)
        return
    with tempfile.TemporaryDirectory(prefix="tierfs-store-") as directory:
        store = LocalStore(directory, use_xattrs=name != "local-sidecars")
        wrapped = RetryingStore(store, timeout_s=5) if name.startswith("retry") else store
        try:
            yield wrapped
        finally:
            wrapped.close()


def _shared_store(name: str) -> ObjectStore:
    if name not in _shared:
        if name == "weed":
            server = weed.shared_weed()
            bucket = server.make_bucket()
            with environment(server.environment):
                store = S3Store(bucket, endpoint_url=server.endpoint_url, region="us-east-1", connections=16)
                store.check()
            _at_exit.callback(store.close)
        else:
            fake = _at_exit.enter_context(fake_s3())
            store = _at_exit.enter_context(fake_store(fake, use_fast_path=name == "fake"))
        _shared[name] = store
    return _shared[name]


@contextlib.contextmanager
def fake_store(server: FakeS3, **options: Any) -> Iterator[S3Store]:
    """The bucket of a fake server as a store; ``options`` are those of ``S3Store``."""
    store = S3Store(BUCKET, endpoint_url=server.endpoint_url, region="us-east-1",
                    **{"connections": 16, "connect_timeout_s": 2.0, "read_timeout_s": 5.0, **options})
    with environment(server.environment):
        store.check()  # credentials are looked up at the first request
    try:
        yield store
    finally:
        store.close()


class PrefixedStore(StoreWrapper, WholeBodies):
    """What lies below a prefix of another store, as a store of its own."""

    def __init__(self, inner: ObjectStore, prefix: str) -> None:
        super().__init__(inner)
        self._prefix = prefix

    def __repr__(self) -> str:
        return f"PrefixedStore({self.inner!r}, {self._prefix!r})"

    def check(self) -> None:
        self.inner.check()

    def list_page(
        self, prefix: str, *, recursive: bool = False, token: str | None = None, limit: int = 1000
    ) -> ListPage:
        page = self.inner.list_page(self._prefix + prefix, recursive=recursive, token=token, limit=limit)
        return ListPage([self._inside(info) for info in page.objects],
                        [name.removeprefix(self._prefix) for name in page.prefixes], page.next_token)

    def head(self, key: str) -> ObjectInfo:
        return self._inside(self.inner.head(self._prefix + key))

    def get_range(self, key: str, offset_bytes: int, length_bytes: int, *,
                  if_match: str | None = None, version_id: str | None = None) -> bytes:
        return self.inner.get_range(self._prefix + key, offset_bytes, length_bytes, if_match=if_match,
                                    version_id=version_id)

    def put(self, key: str, body: Buffer, *, metadata: Mapping[str, str] | None = None,
            condition: Condition = UNCONDITIONAL) -> ObjectInfo:
        return self._inside(self.inner.put(self._prefix + key, body, metadata=metadata, condition=condition))

    def copy(self, source: ObjectInfo, target_key: str, *, metadata: Mapping[str, str] | None = None,
             condition: Condition = UNCONDITIONAL) -> ObjectInfo:
        return self._inside(self.inner.copy(self._outside(source), self._prefix + target_key,
                                            metadata=metadata, condition=condition))

    def delete(self, key: str, *, if_match: str | None = None) -> None:
        self.inner.delete(self._prefix + key, if_match=if_match)

    def delete_many(self, keys: Sequence[str], etags: Mapping[str, str] | None = None
                    ) -> Sequence[DeleteFailure]:
        outside = {self._prefix + key: etag for key, etag in (etags or {}).items()}
        failures = self.inner.delete_many([self._prefix + key for key in keys], outside)
        return [replace(failure, key=failure.key.removeprefix(self._prefix)) for failure in failures]

    def start_multipart(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        return self.inner.start_multipart(self._prefix + key, metadata=metadata)

    def upload_part(self, key: str, upload_id: str, number: int, body: Buffer) -> Part:
        return self.inner.upload_part(self._prefix + key, upload_id, number, body)

    def copy_part(self, key: str, upload_id: str, number: int, source: ObjectInfo,
                  offset_bytes: int, length_bytes: int) -> Part:
        return self.inner.copy_part(self._prefix + key, upload_id, number, self._outside(source),
                                    offset_bytes, length_bytes)

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[Part], *,
                           condition: Condition = UNCONDITIONAL) -> ObjectInfo:
        return self._inside(self.inner.complete_multipart(self._prefix + key, upload_id, parts,
                                                          condition=condition))

    def abort_multipart(self, key: str, upload_id: str) -> None:
        self.inner.abort_multipart(self._prefix + key, upload_id)

    def list_unfinished_uploads(self, prefix: str) -> Sequence[UnfinishedUpload]:
        return [UnfinishedUpload(upload.key.removeprefix(self._prefix), upload.upload_id, upload.started_ns)
                for upload in self.inner.list_unfinished_uploads(self._prefix + prefix)]

    def _inside(self, info: ObjectInfo) -> ObjectInfo:
        return replace(info, key=info.key.removeprefix(self._prefix))

    def _outside(self, info: ObjectInfo) -> ObjectInfo:
        return replace(info, key=self._prefix + info.key)


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
