"""GETs by threads in C: what they do with what a server may answer, and the cache around them."""

from __future__ import annotations

import itertools
import os
import random
import select
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

import tierfs_native
from tests.support.tiers import MIB, RangeStore, body_of, nvme, opened_cache, settings_for
from tierfs.cache import record
from tierfs.cache.residency import Cache
from tierfs.errors import StaleContent
from tierfs.store.counting import RequestMeter
from tierfs.store.prepared import PreparedGet
from tierfs.types import BLOCK_SIZE_BYTES

pytestmark = pytest.mark.skipif(
    tierfs_native.transfer() is None and not os.environ.get("TIERFS_NEED_NATIVE"),
    reason="the native parts are not built",
)
BODY = random.Random(7).randbytes(3 * BLOCK_SIZE_BYTES + 1234)
LIMIT_S = 60.0
Answer = Callable[[bytes, socket.socket], bool]
"""Answers a request on its connection; False: the connection ends."""


def head_of(start: int, length: int, *, etag: str = "v1", more: str = "") -> bytes:
    lines = (
        "HTTP/1.1 206 Partial Content",
        f"Content-Range: bytes {start}-{start + length - 1}/{len(BODY)}",
        f"Content-Length: {length}",
        f'ETag: "{etag}"',
    )
    return ("\r\n".join(lines) + f"\r\n{more}\r\n").encode()


class Server:
    """Answers requests of the form ``START LENGTH``, as its ``answer`` says; counts connections."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.answer: Answer = self.rightly
        self.connections = 0
        self.requests = 0
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        with self._lock:
            for connection in self._open:
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(LIMIT_S)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with self._lock:
                self.connections += 1
                self._open.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        asked = b""
        with connection:
            while True:
                try:
                    found = connection.recv(4096)
                    asked += found
                    while b"\r\n\r\n" in asked:
                        request, asked = asked.split(b"\r\n\r\n", 1)
                        with self._lock:
                            self.requests += 1
                        if not self.answer(request, connection):
                            found = b""
                except OSError:
                    found = b""
                if not found:
                    with self._lock:
                        self._open.remove(connection)
                    return

    @staticmethod
    def rightly(request: bytes, connection: socket.socket) -> bool:
        start, length = map(int, request.split())
        connection.sendall(head_of(start, length) + BODY[start : start + length])
        return True


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


@pytest.fixture
def getter(server: Server) -> Iterator[Any]:
    native = tierfs_native.transfer()
    assert native is not None
    found = native.Getter("127.0.0.1", str(server.port), 4, 10_000, 10_000)
    yield found
    found.close()


def submit(
    getter: Any, path: Path, start: int, length: int, *, wants_body: bool = True, create: bool = True
) -> int:
    request = f"{start} {length}\r\n\r\n".encode()
    number: int = getter.submit(request, b"v1", start, length, str(path), create, 4096 + start, wants_body)
    return number


def ended(getter: Any, count: int) -> dict[int, tuple[int, bytes, bytes | None]]:
    found: dict[int, tuple[int, bytes, bytes | None]] = {}
    while len(found) < count:
        assert select.select([getter], [], [], LIMIT_S)[0]
        found |= {number: tuple(rest) for number, *rest in getter.take()}
    return found


def error_of(getter: Any, path: Path) -> int:
    submit(getter, path, 0, 1000)
    ((error, _, _),) = ended(getter, 1).values()
    return error


@pytest.mark.parametrize("wants_body", [True, False])
def test_bytes_checksums_and_file(getter: Any, server: Server, tmp_path: Path, wants_body: bool) -> None:
    path = tmp_path / "segment"
    ranges = [(0, 1), (0, len(BODY)), (5000, BLOCK_SIZE_BYTES), (77, 2 * BLOCK_SIZE_BYTES + 1)]
    for start, length in ranges:
        number = submit(getter, path, start, length, wants_body=wants_body)
        part = BODY[start : start + length]
        assert ended(getter, 1) == {number: (0, record.checksums(part), part if wants_body else None)}
        assert path.read_bytes()[4096 + start :][:length] == part
    assert path.stat().st_mode & 0o777 == 0o600
    assert server.requests == len(ranges)


def test_many_at_once_and_connections_that_are_kept(getter: Any, server: Server, tmp_path: Path) -> None:
    wanted = {}
    for number in range(200):
        start = number * 1900
        wanted[submit(getter, tmp_path / "segment", start, 1899)] = BODY[start : start + 1899]
    found = ended(getter, len(wanted))
    assert {number: body for number, (_, _, body) in found.items()} == wanted
    assert all(error == 0 for error, _, _ in found.values())
    assert server.connections <= 4


def test_a_connection_that_was_closed_meanwhile_is_made_anew(
    getter: Any, server: Server, tmp_path: Path
) -> None:
    answers = iter([True, False, True])

    def once(request: bytes, connection: socket.socket) -> bool:
        stays = next(answers)
        if stays:
            Server.rightly(request, connection)
        return stays

    server.answer = once
    for _ in range(2):
        number = submit(getter, tmp_path / "segment", 0, 1000)
        assert ended(getter, 1)[number][0] == 0
    assert server.requests == 3
    assert server.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        head_of(0, 1000, etag="v2") + BODY[:1000],
        head_of(0, 999) + BODY[:999],
        head_of(1, 1000) + BODY[1:1001],
        head_of(0, 1000, more="Transfer-Encoding: chunked\r\n") + BODY[:1000],
        head_of(0, 1000) + BODY[:1000] + b"more than was asked for",
        b"x" * 10_000,
    ],
)
def test_what_is_not_understood_is_an_error_and_the_next_one_works(
    getter: Any, server: Server, tmp_path: Path, answer: bytes
) -> None:
    def wrongly(_: bytes, connection: socket.socket) -> bool:
        connection.sendall(answer)
        return True

    server.answer = wrongly
    assert error_of(getter, tmp_path / "segment") != 0
    server.answer = server.rightly
    assert error_of(getter, tmp_path / "segment") == 0


@pytest.mark.parametrize("part", [0, 10, -1])
def test_an_answer_that_breaks_off(getter: Any, server: Server, tmp_path: Path, part: int) -> None:
    def partly(_: bytes, connection: socket.socket) -> bool:
        connection.sendall((head_of(0, 1000) + BODY[:1000])[:part])
        return False

    server.answer = partly
    assert error_of(getter, tmp_path / "segment") != 0


def test_files_that_cannot_be_written(getter: Any, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/full")
    assert error_of(getter, tmp_path / "link") == 40  # ELOOP
    assert error_of(getter, tmp_path / "no" / "segment") == 2
    number = submit(getter, tmp_path / "segment", 0, 1000, create=False)
    assert ended(getter, 1)[number][0] == 2
    assert error_of(getter, Path("/dev/full")) == 28


def test_silence_and_the_end(server: Server, tmp_path: Path) -> None:
    native = tierfs_native.transfer()
    assert native is not None
    asked = threading.Event()

    def never(_: bytes, __: socket.socket) -> bool:
        asked.set()
        return True

    server.answer = never
    impatient = native.Getter("127.0.0.1", str(server.port), 1, 10_000, 50)
    assert error_of(impatient, tmp_path / "segment") == 110
    impatient.close()
    asked.clear()
    patient = native.Getter("127.0.0.1", str(server.port), 1, 10_000, 3_600_000)
    for _ in range(3):
        submit(patient, tmp_path / "segment", 0, 1000)
    assert asked.wait(LIMIT_S)
    patient.close()  # without waiting for an hour
    with pytest.raises(ValueError, match="closed"):
        patient.take()


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    native = tierfs_native.transfer()
    assert native is not None
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    lonely = native.Getter("127.0.0.1", str(port), 1, 10_000, 10_000)
    assert error_of(lonely, tmp_path / "segment") == 111
    lonely.close()


def test_arguments_that_cannot_be(getter: Any, tmp_path: Path) -> None:
    native = tierfs_native.transfer()
    assert native is not None
    with pytest.raises(ValueError, match="length"):
        submit(getter, tmp_path / "segment", 0, 0)
    with pytest.raises(OSError, match="Invalid"):
        native.Getter("127.0.0.1", "1", 0, 1, 1)


class PreparingStore(RangeStore):
    """Its objects are pieces of ``BODY``, named by where they begin; the server has them too."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server = server
        self.meter = RequestMeter()

    def prepare_get(
        self, key: str, offset_bytes: int, length_bytes: int, *, etag: str | None, version_id: str | None
    ) -> PreparedGet:
        assert etag is not None

        def answer(request: bytes, connection: socket.socket) -> bool:
            name, start, length = request.split()
            at = int(name) + int(start)
            head = head_of(int(start), int(length), etag=etag).replace(str(len(BODY)).encode(), b"*")
            connection.sendall(head + BODY[at : at + int(length)])
            return True

        if self._server.answer == self._server.rightly:
            self._server.answer = answer
        message = f"{key} {offset_bytes} {length_bytes}\r\n\r\n".encode()
        return PreparedGet("127.0.0.1", self._server.port, message, 10.0, 10.0, self.meter)


async def test_the_cache_reads_through_it(server: Server, tmp_path: Path) -> None:
    store = PreparingStore(server)
    small = store.add("5000", BODY[5000:25000])
    async with opened_cache(store, settings_for(tmp_path, nvme(tmp_path / "t", 64 * MIB))) as cache:
        assert await cache.read(small, 100, 300) == BODY[5100:5400]
        assert cache.read_nowait(small, 0, 20000) == BODY[5000:25000]
    assert store.meter.counts.by_operation == {"get": 1}
    assert store.meter.counts.bytes_read == 20000
    assert store.ranges == []


async def test_what_goes_wrong_is_left_to_the_store(server: Server, tmp_path: Path) -> None:
    store = PreparingStore(server)
    ref = store.add("k", body_of(2 * MIB))
    server.answer = lambda _, connection: connection.sendall(b"HTTP/1.1 503 Slow Down\r\n\r\n") is None
    async with opened_cache(store, settings_for(tmp_path, nvme(tmp_path / "t", 64 * MIB))) as cache:
        assert await cache.read(ref, 0, 2 * MIB) == body_of(2 * MIB)
    assert store.meter.counts.by_operation == {"get": 1}
    assert store.meter.counts.bytes_read == 0
    assert store.fetched_bytes() == 2 * MIB


@pytest.mark.parametrize("size", [20_000, 300_000])
async def test_who_waits_when_the_cache_is_closed_is_told(server: Server, tmp_path: Path, size: int) -> None:
    store = PreparingStore(server)
    ref = store.add("0", BODY[:size])
    asked = threading.Event()

    def never(_: bytes, __: socket.socket) -> bool:
        asked.set()
        return True

    server.answer = never
    failed: list[str] = []

    async def read(cache: Cache) -> None:
        with pytest.raises(StaleContent) as caught:
            await cache.read(ref, 0, size)
        failed.append(str(caught.value))

    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            async with opened_cache(store, settings_for(tmp_path, nvme(tmp_path / "t", 64 * MIB))) as cache:
                nursery.start_soon(read, cache)
                while not asked.is_set():
                    await trio.sleep(0.001)
    assert "closed" in failed[0]


async def test_many_readers_and_a_server_that_fails_now_and_then(server: Server, tmp_path: Path) -> None:
    store = PreparingStore(server)
    refs = [store.add(str(number * 1000), BODY[number * 1000 :][: 10_000 + number]) for number in range(60)]
    turn = itertools.count()

    def sometimes(request: bytes, connection: socket.socket) -> bool:
        if next(turn) % 7 == 3:
            return False
        name, start, length = map(int, request.split())
        etag = next(ref.etag for ref in refs if ref.key == str(name))
        head = head_of(start, length, etag=etag).replace(str(len(BODY)).encode(), b"*")
        connection.sendall(head + BODY[name + start :][:length])
        return True

    server.answer = sometimes
    async with opened_cache(store, settings_for(tmp_path, nvme(tmp_path / "t", 64 * MIB))) as cache:

        async def read(number: int) -> None:
            size = refs[number].size_bytes
            assert await cache.read(refs[number], 0, size) == BODY[number * 1000 :][:size]

        async with trio.open_nursery() as nursery:
            for number in range(len(refs)):
                nursery.start_soon(read, number)
                nursery.start_soon(cache.prefetch, refs[number], 0, 1000)
        assert all(cache.is_complete(ref.content_id) for ref in refs)
    assert cache.buffer_bytes == 0
