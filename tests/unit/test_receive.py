"""Bodies into files: every source, every way, and what can go wrong on either end."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

import tierfs_native
from tierfs.cache import receive as receiving
from tierfs.cache import record
from tierfs.errors import PreconditionFailed, ShortBody, StoreError, StoreTimeout, StoreUnavailable
from tierfs.store.body import BytesBody, FileBody
from tierfs.types import BLOCK_SIZE_BYTES

BODY = random.Random(5).randbytes(3 * BLOCK_SIZE_BYTES + 1234)
NEEDS_NATIVE = pytest.mark.skipif(
    tierfs_native.transfer() is None and not os.environ.get("TIERFS_NEED_NATIVE"),
    reason="the native parts are not built")


@dataclass
class SocketBody:
    """A body on a socket, of which ``head`` has been read already."""

    number: int
    length_bytes: int
    head: bytes = b""
    timeout_s: float = 10.0
    ends: int = 0

    def readinto(self, buffer: memoryview) -> int:
        raise AssertionError("the descriptor is there")

    def descriptor(self) -> SocketBody:
        return self

    def finished(self) -> None:
        self.ends += 1

    def failed(self, error_no: int, received_bytes: int) -> StoreError:
        kinds: dict[int, Callable[[str], StoreError]] = {110: StoreTimeout, 0: ShortBody}
        return kinds.get(error_no, StoreUnavailable)(f"{error_no} after {received_bytes}")


@pytest.fixture
def target() -> Iterator[int]:
    descriptor = os.memfd_create("target")
    yield descriptor
    os.close(descriptor)


@pytest.fixture(params=["native", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(receiving, "_native", None)
    elif receiving._native is None:
        pytest.fail("the native parts are not built")
    return str(request.param)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with ours, theirs:
        ours.settimeout(10)  # which makes the descriptor non-blocking, as botocore's are
        yield ours, theirs


def placed(target: int, offset: int, length: int) -> bytes:
    return os.pread(target, length + 1, offset)


@pytest.mark.parametrize("length", [1, BLOCK_SIZE_BYTES - 1, BLOCK_SIZE_BYTES, BLOCK_SIZE_BYTES + 1, len(BODY)])
def test_bytes_and_files(way: str, target: int, length: int) -> None:
    source = os.memfd_create("source")
    try:
        os.pwrite(source, b"before" + BODY, 0)
        os.lseek(source, 6, os.SEEK_SET)
        for body in (BytesBody(BODY[:length]), FileBody("k", source, length)):
            assert receiving.receive(body, target, 5000) == (record.checksums(BODY[:length]), None)
            assert placed(target, 5000, length) == BODY[:length]
    finally:
        os.close(source)


def test_a_file_that_ends_early_is_another_version(way: str, target: int) -> None:
    source = os.memfd_create("source")
    try:
        os.pwrite(source, BODY, 0)
        with pytest.raises(PreconditionFailed, match="1 bytes too early"):
            receiving.receive(FileBody("k", source, len(BODY) + 1), target, 0)
    finally:
        os.close(source)


@pytest.mark.parametrize("way", ["native", "python"], indirect=True)
def test_a_target_that_is_full_is_told_and_no_error_of_the_store(way: str) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        sums, error = receiving.receive(BytesBody(BODY), full, 0)
        assert sums == b""
        assert isinstance(error, OSError)
        assert error.errno == 28
        source = os.memfd_create("source")
        os.pwrite(source, BODY, 0)
        _, error = receiving.receive(FileBody("k", source, len(BODY)), full, 0)
        os.close(source)
        assert isinstance(error, OSError)
        assert error.errno == 28
    finally:
        os.close(full)


@NEEDS_NATIVE
@pytest.mark.parametrize("head_bytes", [0, 1, 5000, BLOCK_SIZE_BYTES + 7, len(BODY)])
def test_from_a_socket(target: int, pair: tuple[socket.socket, socket.socket], head_bytes: int) -> None:
    ours, theirs = pair
    rest = BODY[head_bytes:]
    sender = threading.Thread(target=lambda: [theirs.sendall(rest[at : at + 7001]) for at in range(0, len(rest), 7001)])
    sender.start()
    body = SocketBody(ours.fileno(), len(BODY), BODY[:head_bytes])
    assert receiving.receive(body, target, 77) == (record.checksums(BODY), None)
    sender.join()
    assert body.ends == 1
    assert placed(target, 77, len(BODY)) == BODY
    # What follows on the connection is not touched, and one byte is enough to wake its reader.
    theirs.sendall(b"n")
    assert ours.recv(10) == b"n"


@NEEDS_NATIVE
def test_a_body_that_ends_early(target: int, pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.sendall(BODY[:-1])
    theirs.shutdown(socket.SHUT_WR)
    body = SocketBody(ours.fileno(), len(BODY))
    with pytest.raises(ShortBody, match=f"0 after {len(BODY) - 1}"):
        receiving.receive(body, target, 0)
    assert body.ends == 0


@NEEDS_NATIVE
def test_a_body_that_stops_coming(target: int, pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.sendall(BODY[:1000])
    with pytest.raises(StoreTimeout):
        receiving.receive(SocketBody(ours.fileno(), len(BODY), timeout_s=0.05), target, 0)


@NEEDS_NATIVE
def test_a_connection_that_breaks(target: int, pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # close() resets
    theirs.close()
    with pytest.raises(StoreUnavailable):
        receiving.receive(SocketBody(ours.fileno(), len(BODY)), target, 0)


@NEEDS_NATIVE
def test_lengths_that_cannot_be(target: int) -> None:
    native = tierfs_native.transfer()
    assert native is not None
    for length, head in ((0, b""), (3, b"four"), (2**64 - 1, b"")):
        with pytest.raises((ValueError, OverflowError)):
            native.receive(0, target, 0, length, head, 10)
