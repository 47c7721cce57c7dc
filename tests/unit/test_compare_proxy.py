"""The proxy that makes a near server a far one, on a clock that jumps, and once with real sockets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import trio
import trio.testing

from benchmarks.compare.proxy import MIB, READ_BYTES, Flight, Forward, Line, Shape, carry, serve_connection
from benchmarks.servers import free_ports

ROOT = Path(__file__).parents[2]


def test_a_line_adds_its_delay_to_every_piece() -> None:
    line = Line(0.010, None)
    assert line.arrival(5.0, 1000) == pytest.approx(5.010)
    assert line.arrival(5.0, 1000) == pytest.approx(5.010)


def test_a_line_carries_one_piece_after_the_other_at_its_rate() -> None:
    line = Line(0.010, 1000.0)
    assert line.arrival(5.0, 500) == pytest.approx(5.510)
    assert line.arrival(5.1, 500) == pytest.approx(6.010)  # begins when the first one is through
    assert line.arrival(9.0, 500) == pytest.approx(9.510)  # an idle line saves nothing up


def test_a_line_holds_what_is_under_way_and_little_more() -> None:
    assert Line(0.010, None).flight_bytes == 64 * MIB
    assert Line(0.010, 50 * MIB).flight_bytes == MIB // 2 + 2 * READ_BYTES


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("1=localhost:2", Forward(1, "localhost", 2)), ("70=127.0.0.1:80", Forward(70, "127.0.0.1", 80))],
)
def test_a_forward_is_parsed(text: str, wanted: Forward) -> None:
    assert Forward.parse(text) == wanted


@pytest.mark.parametrize("text", ["80", "80=host", "host:80", "x=host:80", "80=:80", ""])
def test_a_wrong_forward_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not PORT|invalid literal"):
        Forward.parse(text)


async def test_bytes_come_late_by_the_delay_and_the_rate(autojump_clock: trio.testing.MockClock) -> None:
    body = os.urandom(3 * MIB)
    application, near = trio.testing.memory_stream_pair()
    far, server = trio.testing.memory_stream_pair()
    received = bytearray()
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(carry, near, far, Line(0.5, 1.0 * MIB))

        async def send() -> None:
            await application.send_all(body)
            await application.send_eof()

        nursery.start_soon(send)
        first_after = 0.0
        while data := await server.receive_some(MIB):
            first_after = first_after or trio.current_time() - began
            received += data
    assert bytes(received) == body
    assert first_after > 0.5
    assert trio.current_time() - began == pytest.approx(3.5)


async def test_without_a_rate_only_the_delay_counts(autojump_clock: trio.testing.MockClock) -> None:
    application, near = trio.testing.memory_stream_pair()
    far, server = trio.testing.memory_stream_pair()
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(carry, near, far, Line(0.25, None))
        await application.send_all(b"question")
        assert await server.receive_some(100) == b"question"
        assert trio.current_time() - began == pytest.approx(0.25)
        await application.send_eof()
        assert await server.receive_some(100) == b""
        assert trio.current_time() - began == pytest.approx(0.5)


async def test_a_full_line_slows_its_sender_down(autojump_clock: trio.testing.MockClock) -> None:
    flight = Flight(largest_bytes=10)
    began = trio.current_time()

    async def take_late() -> None:
        await trio.sleep(3)
        _, data = await flight.take()
        await flight.landed(len(data))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_late)
        await flight.put(0.0, b"x" * 8)
        assert trio.current_time() == began
        await flight.put(0.0, b"y" * 8)  # waits for the first to land
        assert trio.current_time() - began == pytest.approx(3)


async def test_who_no_longer_listens_ends_the_connection(autojump_clock: trio.testing.MockClock) -> None:
    application, near = trio.testing.memory_stream_pair()
    far, server = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(carry, near, far, Line(0.1, None))
        await server.aclose()
        await application.send_all(b"nobody reads this")
    # The task has ended, though the application has never closed its side.


async def test_a_connection_costs_a_round_trip_before_its_first_byte(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    application, near = trio.testing.memory_stream_pair()
    far, server = trio.testing.memory_stream_pair()
    opened: list[float] = []

    async def open_tcp_stream(host: str, port: int) -> object:
        opened.append(trio.current_time() - began)
        return far

    monkeypatch.setattr(trio, "open_tcp_stream", open_tcp_stream)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_connection, near, Forward(1, "there", 2), Shape(0.2, None))
        await application.send_all(b"GET")
        assert await server.receive_some(10) == b"GET"
        await server.send_all(b"200")
        assert await application.receive_some(10) == b"200"
        assert opened == [pytest.approx(0.2)]
        assert trio.current_time() - began == pytest.approx(0.4)
        await application.aclose()
        await server.aclose()


async def test_a_server_that_refuses_closes_the_connection(nursery: trio.Nursery) -> None:
    """Real sockets: nobody listens at the target."""
    (nobody,) = free_ports(1)
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]

    async def handle(stream: trio.SocketStream) -> None:
        await serve_connection(stream, Forward(0, "127.0.0.1", nobody), Shape(0.0, None))

    nursery.start_soon(trio.serve_listeners, handle, listeners)
    with trio.fail_after(60):
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        async with stream:
            assert await stream.receive_some(1) == b""
    nursery.cancel_scope.cancel()


async def test_the_program_forwards_and_ends_with_its_starter(nursery: trio.Nursery) -> None:
    """The whole of it as a process: what goes in comes back, both directions end, and it leaves when told to."""
    echo = await trio.open_tcp_listeners(0, host="127.0.0.1")
    target = echo[0].socket.getsockname()[1]

    async def answer(stream: trio.SocketStream) -> None:
        async for data in stream:
            await stream.send_all(data)
        await stream.send_eof()

    nursery.start_soon(trio.serve_listeners, answer, echo)
    (port,) = free_ports(1)
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "benchmarks.compare.proxy", "--delay-ms", "2", "--rate-mib", "500",
         f"{port}=127.0.0.1:{target}"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with trio.fail_after(60):
            said = b""
            while not said.endswith(b"\n"):
                said += await process.stdout.receive_some(100)
            assert said == b"ready\n"
            body = os.urandom(2 * MIB + 17)
            assert await echoed(port, body) == body
            await process.stdin.aclose()
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            await process.stdin.aclose()
            await process.stdout.aclose()
    nursery.cancel_scope.cancel()


async def echoed(port: int, body: bytes) -> bytes:
    """Send and receive at the same time, over one connection."""
    received = bytearray()
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:

        async def send() -> None:
            await stream.send_all(body)
            await stream.send_eof()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            async for data in stream:
                received += data
    return bytes(received)
