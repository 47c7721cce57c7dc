"""A TCP proxy that adds latency and limits bandwidth, per connection and direction: a near server seems far
away.

``python -m benchmarks.compare.proxy --delay-ms 20 --rate-mib 50 PORT=HOST:PORT ...`` forwards each of these
loopback ports and prints ``ready`` once it listens on all of them. It ends when it is told to (SIGTERM), or
when whoever started it has closed its standard input.

``delay`` is a round trip: half of it is added on each way, and one whole when a connection is made, for the
handshake. ``rate`` is what one connection carries in one direction; like a long line the proxy takes in
what is under way, and then no more, so that a sender is slowed down as it would be. With no rate there is
no such limit but ``LARGEST_FLIGHT_BYTES``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

READ_BYTES = 256 * 1024
LARGEST_FLIGHT_BYTES = 64 * 1024 * 1024
MIB = 1024 * 1024


@dataclass(slots=True)
class Line:
    """One direction of one connection. ``arrival`` is all of its physics, and knows no clock."""

    one_way_delay_s: float
    bytes_per_s: float | None
    _free_at: float = field(default=-math.inf)

    def arrival(self, now: float, size_bytes: int) -> float:
        """When the last of these bytes, handed over now, comes out at the other end."""
        begin = max(now, self._free_at)
        self._free_at = begin + (size_bytes / self.bytes_per_s if self.bytes_per_s else 0.0)
        return self._free_at + self.one_way_delay_s

    @property
    def flight_bytes(self) -> int:
        """What is on the way at most: the line's own content, and two buffers."""
        if not self.bytes_per_s:
            return LARGEST_FLIGHT_BYTES
        return min(LARGEST_FLIGHT_BYTES, int(self.bytes_per_s * self.one_way_delay_s) + 2 * READ_BYTES)


class Flight:
    """Bytes on the way, with the time at which each piece arrives. One sender, one receiver."""

    def __init__(self, largest_bytes: int) -> None:
        self._largest_bytes = largest_bytes
        self._pieces: list[tuple[float, bytes]] = []
        self._bytes = 0
        self._ended = False
        self._changed = trio.Condition()

    async def put(self, arrival: float, data: bytes) -> None:
        """Waits while the line is full. An empty piece ends it."""
        async with self._changed:
            while self._bytes and self._bytes + len(data) > self._largest_bytes:
                await self._changed.wait()
            self._pieces.append((arrival, data))
            self._bytes += len(data)
            self._changed.notify_all()

    async def take(self) -> tuple[float, bytes]:
        """The oldest piece, as soon as there is one; it counts as on the way until :meth:`landed`."""
        async with self._changed:
            while not self._pieces:
                await self._changed.wait()
            return self._pieces.pop(0)

    async def landed(self, size_bytes: int) -> None:
        async with self._changed:
            self._bytes -= size_bytes
            self._changed.notify_all()


async def carry(source: trio.abc.ReceiveStream, sink: trio.abc.SendStream, line: Line) -> None:
    """Carry everything from one stream to the other, late. An end of input is passed on as such; a broken
    connection ends it without a word, as the peer of a broken connection sees nothing more either."""
    flight = Flight(line.flight_bytes)

    async def take_in() -> None:
        while True:
            try:
                data = bytes(await source.receive_some(READ_BYTES))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                data = b""
            await flight.put(line.arrival(trio.current_time(), len(data)), data)
            if not data:
                return

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_in)
        while True:
            arrival, data = await flight.take()
            await trio.sleep_until(arrival)
            try:
                if data:
                    await sink.send_all(data)
                elif isinstance(sink, trio.abc.HalfCloseableStream):
                    await sink.send_eof()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                nursery.cancel_scope.cancel()
            await flight.landed(len(data))
            if not data:
                return


@dataclass(frozen=True, slots=True)
class Forward:
    """One port of ours and where it leads."""

    port: int
    host: str
    target_port: int

    @classmethod
    def parse(cls, text: str) -> Forward:
        """``PORT=HOST:PORT``. Raises ValueError."""
        port, separator, target = text.partition("=")
        host, colon, target_port = target.rpartition(":")
        if not separator or not colon or not host:
            raise ValueError(f"{text!r} is not PORT=HOST:PORT")
        return cls(int(port), host, int(target_port))


@dataclass(frozen=True, slots=True)
class Shape:
    """``delay_s``: a round trip. ``bytes_per_s``: per connection and direction; None: no limit."""

    delay_s: float
    bytes_per_s: float | None

    def line(self) -> Line:
        return Line(self.delay_s / 2, self.bytes_per_s)


async def serve_connection(near: trio.SocketStream, forward: Forward, shape: Shape) -> None:
    """One connection from its first to its last byte."""
    await trio.sleep(shape.delay_s)
    async with near:
        try:
            far = await trio.open_tcp_stream(forward.host, forward.target_port)
        except OSError:
            return
        async with far:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(carry, near, far, shape.line())
                nursery.start_soon(carry, far, near, shape.line())


async def serve(
    forwards: Sequence[Forward],
    shape: Shape,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Forward until cancelled. Raises OSError if a port is taken."""
    async with trio.open_nursery() as nursery:
        for forward in forwards:

            async def handle(stream: trio.SocketStream, forward: Forward = forward) -> None:
                await serve_connection(stream, forward, shape)

            listeners = await trio.open_tcp_listeners(forward.port, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, handle, listeners)
        task_status.started()


async def run(forwards: Sequence[Forward], shape: Shape) -> None:
    """Forward until standard input ends."""
    async with trio.open_nursery() as nursery:
        await nursery.start(serve, forwards, shape)
        print("ready", flush=True)
        await trio.to_thread.run_sync(sys.stdin.buffer.read, abandon_on_cancel=True)
        nursery.cancel_scope.cancel()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare.proxy", description=__doc__)
    parser.add_argument("--delay-ms", type=float, default=0.0, help="a round trip")
    parser.add_argument("--rate-mib", type=float, help="MiB/s of one connection in one direction")
    parser.add_argument("forward", nargs="+", metavar="PORT=HOST:PORT")
    options = parser.parse_args(arguments)
    try:
        forwards = [Forward.parse(text) for text in options.forward]
    except ValueError as error:
        parser.error(str(error))
    rate = options.rate_mib * MIB if options.rate_mib else None
    trio.run(run, forwards, Shape(options.delay_ms / 1000, rate))
    return 0


if __name__ == "__main__":
    sys.exit(main())
