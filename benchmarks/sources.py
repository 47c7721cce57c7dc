"""Where the data of a benchmark are: an S3 server of our own, a bucket that was given, or a directory.

A source answers three questions: what to mount, how to fill it, and how fast it is by itself. The last in two
ways: ``direct`` requests (plain HTTP on signed URLs, or preads of the files) are the most that the store
gives to anybody on this machine; the ``client`` is the store client of tierfs without a mount around it.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import shutil
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from benchmarks.loops import Task, Timed, buffer
from benchmarks.servers import ServerFailed, credentials, find_binary, make_bucket, seaweedfs
from tierfs.config import Settings
from tierfs.store.base import ObjectStore
from tierfs.store.open import open_store

Range = tuple[str, int, int]
"""Key relative to the source, offset, length."""

FILL_THREADS = 8
URL_LIFETIME_S = 3600
PART_BYTES = 32 * 1024 * 1024


class SourceFailed(Exception):
    """The server did not start or the bucket cannot be used; the message says why."""


class Source(Protocol):
    """See the module docstring."""

    @property
    def url(self) -> str:
        """SOURCE for ``tierfs mount``."""
        ...

    @property
    def description(self) -> str: ...

    @property
    def server_pid(self) -> int | None:
        """The server's process, if it is one of ours on this machine."""
        ...

    def direct(self, ranges: Sequence[Range]) -> Task:
        """Read these ranges one after the other, without any of our code."""
        ...


def fill(source: Source, objects: Mapping[str, bytes | memoryview]) -> int:
    """Put all these objects, some at a time; returns how many."""
    store, prefix = _client(source)
    try:
        with ThreadPoolExecutor(FILL_THREADS) as pool:
            for _ in pool.map(lambda item: _put(store, prefix + item[0], item[1]), objects.items()):
                pass
    finally:
        store.close()
    return len(objects)


def _put(store: ObjectStore, key: str, body: bytes | memoryview) -> None:
    if len(body) <= PART_BYTES:
        store.put(key, body)
        return
    upload_id = store.start_multipart(key)
    parts = [
        store.upload_part(key, upload_id, number, memoryview(body)[offset : offset + PART_BYTES])
        for number, offset in enumerate(range(0, len(body), PART_BYTES), 1)
    ]
    store.complete_multipart(key, upload_id, parts)


def empty(source: Source) -> None:
    """Delete everything below the source."""
    store, prefix = _client(source)
    try:
        token = None
        while True:
            page = store.list_page(prefix, recursive=True, token=token)
            store.delete_many([found.key for found in page.objects])
            token = page.next_token
            if token is None:
                return
    finally:
        store.close()


def client(source: Source, ranges: Sequence[Range], threads: int) -> Task:
    """Read these ranges through the store client of tierfs, from that many threads."""

    def prepare() -> Timed:
        store, prefix = _client(source)
        pool = ThreadPoolExecutor(threads)
        # Connections and threads are made before the clock starts, as a mount has them.
        for _ in pool.map(lambda _: _get(store, prefix, ranges[0]), range(threads)):
            pass

        def timed() -> int:
            return sum(pool.map(lambda wanted: _get(store, prefix, wanted), ranges))

        return timed

    return prepare


def _get(store: ObjectStore, prefix: str, wanted: Range) -> int:
    key, offset, length = wanted
    return len(store.get_range(prefix + key, offset, length))


def _client(source: Source) -> tuple[ObjectStore, str]:
    return open_store(Settings(source=source.url, mountpoint="/", state_dir="/"))


class DirectorySource:
    """A directory as store."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.url = f"file://{directory}"
        self.description = f"directory {directory}"
        self.server_pid = None

    def direct(self, ranges: Sequence[Range]) -> Task:
        def prepare() -> Timed:
            memory = buffer()

            def timed() -> int:
                total = 0
                for key, offset, length in ranges:
                    fd = os.open(self.directory / key, os.O_RDONLY)
                    while length and (count := os.preadv(fd, [memory[:length]], offset)):
                        total, offset, length = total + count, offset + count, length - count
                    os.close(fd)
                return total

            return timed

        return prepare


class S3Source:
    """A bucket, or a prefix in one. Credentials and endpoint come from the environment, as for a mount."""

    def __init__(self, url: str, description: str, server_pid: int | None = None) -> None:
        self.url = url
        self.description = description
        self.server_pid = server_pid
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        self._bucket = bucket
        self._prefix = prefix + "/" if prefix else ""

    def direct(self, ranges: Sequence[Range]) -> Task:
        urls = self._sign([key for key, _, _ in ranges])
        requests = [(url, offset, length) for url, (_, offset, length) in zip(urls, ranges, strict=True)]

        def prepare() -> Timed:
            memory = buffer()
            place = urllib.parse.urlsplit(requests[0][0])
            make = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
            connection = make(place.netloc)
            connection.connect()

            def timed() -> int:
                total = 0
                for url, offset, length in requests:
                    target = url.split(place.netloc, 1)[1]
                    connection.request(
                        "GET", target, headers={"Range": f"bytes={offset}-{offset + length - 1}"}
                    )
                    answer = connection.getresponse()
                    if answer.status != 206:
                        raise SourceFailed(f"GET of a range answered {answer.status}")
                    while count := answer.readinto(memory):
                        total += count
                return total

            return timed

        return prepare

    def _sign(self, keys: Sequence[str]) -> list[str]:
        import boto3
        from botocore.config import Config

        s3 = boto3.session.Session().client("s3", config=Config(signature_version="s3v4"))
        parameters = [{"Bucket": self._bucket, "Key": self._prefix + key} for key in keys]
        urls = [s3.generate_presigned_url("get_object", each, URL_LIFETIME_S) for each in parameters]
        s3.close()
        return urls


@contextlib.contextmanager
def open_source(given: str | None, work_dir: Path) -> Iterator[Source]:
    """The source that was asked for, with a fresh place in it that is emptied at the end.

    None: a SeaweedFS server of our own if its binary ``weed`` is found, else a directory.
    """
    name = f"tierfs-benchmark-{secrets.token_hex(4)}"
    if given is None:
        binary = find_binary("weed")
        if binary is not None:
            with contextlib.ExitStack() as stack:
                try:
                    server = stack.enter_context(seaweedfs(binary, work_dir / "weed"))
                except ServerFailed as error:
                    raise SourceFailed(str(error)) from None
                stack.enter_context(environment(credentials(server.endpoint_url)))
                make_bucket(server.endpoint_url, name)
                yield S3Source(f"s3://{name}", "SeaweedFS on loopback, S3 protocol", server.pid)
            return
        given = str(work_dir / "store")
        os.mkdir(given)
    source: Source
    if given.startswith("s3://"):
        source = S3Source(f"{given.rstrip('/')}/{name}", given)
        try:
            yield source
        finally:
            empty(source)
        return
    directory = Path(given.removeprefix("file://")).absolute() / name
    directory.mkdir(parents=True)
    try:
        yield DirectorySource(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """These variables, until the context ends."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
