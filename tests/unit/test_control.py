"""The control socket: requests, progress, bad messages, clients that leave."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from tierfs.control import protocol as p
from tierfs.control.client import ControlClient, EngineGone, EngineSilent
from tierfs.control.server import ControlServer, Report
from tierfs.errors import ControlError, NotFound


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ControlServer]:
    control = ControlServer(tmp_path / "run" / "c.sock", owner_uid=os.getuid())
    async with trio.open_nursery() as nursery:
        await nursery.start(control.serve)
        yield control
        nursery.cancel_scope.cancel()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "c.sock"


async def in_thread(function: Callable[[], Any]) -> Any:
    with trio.fail_after(30):
        return await trio.to_thread.run_sync(function, abandon_on_cancel=True)


def call(path: Path, operation: str, request: Any = None, on_progress: Any = None, **more: Any) -> Any:
    with ControlClient(path, **more) as client:
        return client.call(operation, request, on_progress)


async def test_ping_is_built_in_and_the_socket_is_private(server: ControlServer, path: Path) -> None:
    reply = await in_thread(partial(call, path, "ping"))
    assert (reply.pid, reply.protocol) == (os.getpid(), p.PROTOCOL)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


async def test_a_request_reaches_its_handler_with_bytes_intact(server: ControlServer, path: Path) -> None:
    async def evict(request: p.EvictRequest, report: Report) -> p.PathsReply:
        assert request.paths == [b"a", b"\xff\xfe"]
        assert request.tier == "ram"
        return p.PathsReply(files=2, bytes=7, failed=[p.Failure(path="a", message="dirty")])

    server.register("evict", evict)
    reply = await in_thread(
        partial(call, path, "evict", p.EvictRequest(paths=[b"a", b"\xff\xfe"], tier="ram"))
    )
    assert reply == p.PathsReply(files=2, bytes=7, failed=[p.Failure(path="a", message="dirty")])


async def test_progress_comes_before_the_reply_and_the_latest_wins(server: ControlServer, path: Path) -> None:
    seen: list[p.Progress] = []
    first_seen = trio.Event()
    token = trio.lowlevel.current_trio_token()

    async def drain(request: p.DrainRequest, report: Report) -> p.DrainReply:
        for n in range(1, 1001):
            report(p.Progress(phase="upload", done_files=n, total_files=1000))
        await first_seen.wait()
        return p.DrainReply(remaining_files=0, remaining_bytes=0)

    def on_progress(progress: p.Progress) -> None:
        seen.append(progress)
        token.run_sync_soon(first_seen.set)

    server.register("drain", drain)
    await in_thread(partial(call, path, "drain", None, on_progress))
    assert [progress.done_files for progress in seen] == [1000]


async def test_an_error_of_ours_arrives_as_the_same_class(server: ControlServer, path: Path) -> None:
    async def flush(request: p.FlushRequest, report: Report) -> p.FlushReply:
        raise NotFound("no such file: x")

    server.register("flush", flush)
    with pytest.raises(NotFound, match="no such file: x"):
        await in_thread(partial(call, path, "flush"))


async def test_an_unexpected_exception_is_logged_and_does_not_end_the_server(
    server: ControlServer, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def flush(request: p.FlushRequest, report: Report) -> p.FlushReply:
        raise ZeroDivisionError("secret detail")

    server.register("flush", flush)
    with pytest.raises(ControlError, match="internal error") as caught:
        await in_thread(partial(call, path, "flush"))
    assert "secret detail" not in str(caught.value)
    assert any(record.exc_info for record in caplog.records)
    assert await in_thread(partial(call, path, "ping"))


async def test_what_is_not_registered_or_unknown_or_malformed_is_answered(
    server: ControlServer, path: Path
) -> None:
    def several() -> list[str]:
        messages = []
        with ControlClient(path) as client:  # one connection serves on after each of them
            for raw in (
                b'{"protocol":1,"operation":"status"}',
                b'{"protocol":1,"operation":"explode"}',
                b'{"protocol":1,"operation":"flush","arguments":{"timeout_s":"soon"}}',
                b'{"protocol":99,"operation":"ping"}',
            ):
                client._socket.sendall(p.HEADER.pack(len(raw)) + raw)
                answer = client._receive()
                assert answer.problem is not None
                messages.append(answer.problem.message)
            client.call("ping")
        return messages

    async def flush(request: p.FlushRequest, report: Report) -> p.FlushReply:
        raise AssertionError("never called")

    server.register("flush", flush)
    not_offered, unknown, malformed, version = await in_thread(several)
    assert "does not offer status" in not_offered
    assert "explode" in unknown
    assert "timeout_s" in malformed
    assert "protocol 99" in version
    assert "same version" in version


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", 0xFFFFFFFF),
        struct.pack(">I", 5) + b"{{{{{",
        struct.pack(">I", 4) + b"null",
        struct.pack(">I", 0),
        struct.pack(">I", 100_000) + b"[" * 100_000,
        struct.pack(">I", 3) + b"\xff\xff\xff",
    ],
)
async def test_rubbish_gets_a_clear_error_and_the_server_lives(
    server: ControlServer, path: Path, data: bytes
) -> None:
    def send() -> str:
        with ControlClient(path) as client:
            client._socket.sendall(data)
            answer = client._receive()
            assert answer.problem is not None
            assert client._socket.recv(1) == b""
            return answer.problem.message

    assert "request" in await in_thread(send)
    assert await in_thread(partial(call, path, "ping"))


async def test_a_client_that_stops_in_the_middle_harms_nobody(server: ControlServer, path: Path) -> None:
    def leave() -> None:
        for data in (b"", b"\0", struct.pack(">I", 50), struct.pack(">I", 50) + b"{"):
            with ControlClient(path) as client:
                client._socket.sendall(data)

    await in_thread(leave)
    assert await in_thread(partial(call, path, "ping"))


async def test_a_handler_is_cancelled_when_its_client_leaves(server: ControlServer, path: Path) -> None:
    started, ended = trio.Event(), trio.Event()

    async def flush(request: p.FlushRequest, report: Report) -> p.FlushReply:
        started.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.set()
        raise AssertionError

    server.register("flush", flush)
    stream = await trio.open_unix_socket(path)
    body = b'{"protocol":1,"operation":"flush"}'
    await stream.send_all(p.HEADER.pack(len(body)) + body)
    with trio.fail_after(30):
        await started.wait()
        await stream.aclose()
        await ended.wait()
    assert await in_thread(partial(call, path, "ping"))


async def test_two_clients_are_served_at_once(server: ControlServer, path: Path) -> None:
    release = trio.Event()

    async def flush(request: p.FlushRequest, report: Report) -> p.FlushReply:
        await release.wait()
        return p.FlushReply(flushed_files=1, flushed_bytes=1, remaining_files=0, remaining_bytes=0)

    server.register("flush", flush)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(in_thread, partial(call, path, "flush"))
        assert await in_thread(partial(call, path, "ping"))
        release.set()


async def test_a_silent_engine_is_told_from_a_gone_one(server: ControlServer, path: Path) -> None:
    async def status(request: p.StatusRequest, report: Report) -> p.StatusReply:
        await trio.sleep_forever()
        raise AssertionError

    server.register("status", status)
    with pytest.raises(EngineSilent):
        await in_thread(partial(call, path, "status", timeout_s=0.05))
    with pytest.raises(EngineGone):
        await in_thread(partial(call, path.with_name("none.sock"), "status"))


async def test_strangers_are_refused(tmp_path: Path) -> None:
    control = ControlServer(tmp_path / "c.sock", owner_uid=os.getuid())
    control._allowed = {2**31 - 1}
    async with trio.open_nursery() as nursery:
        await nursery.start(control.serve)
        with pytest.raises(ControlError, match="only the owner"):
            await in_thread(partial(call, tmp_path / "c.sock", "ping"))
        nursery.cancel_scope.cancel()


async def test_a_socket_left_behind_is_replaced_and_gone_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    control = ControlServer(path, owner_uid=os.getuid())
    async with trio.open_nursery() as nursery:
        await nursery.start(control.serve)
        assert await in_thread(partial(call, path, "ping"))
        nursery.cancel_scope.cancel()
    assert not path.exists()


async def test_a_name_outside_the_protocol_cannot_be_registered(tmp_path: Path) -> None:
    async def handler(request: Any, report: Report) -> None:
        return None

    with pytest.raises(ValueError, match="explode"):
        ControlServer(tmp_path / "c.sock", owner_uid=0).register("explode", handler)


def test_the_client_needs_no_trio() -> None:
    import subprocess
    import sys

    code = (
        "import sys, tierfs.control.client, tierfs.control.registry\n"
        "print('trio' in sys.modules, 'structlog' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
