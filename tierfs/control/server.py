"""The engine's side of the control socket.

One task per connection; one request at a time on each. A handler is cancelled when its client goes away.
Nothing that a client sends ends the server: a malformed or oversized message is answered with a problem and
the connection is closed, a handler's unexpected exception is logged with its stack and answered as
"internal error".
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import trio

from tierfs import __version__
from tierfs.control import protocol
from tierfs.errors import ControlError, TierfsError
from tierfs.log import get_logger

log = get_logger(__name__)

Report = Callable[[protocol.Progress], None]
Handler = Callable[[Any, Report], Awaitable[Any]]

MAX_CONNECTIONS = 64
REQUEST_TIMEOUT_S = 30.0
"""How long a message may take from its first byte to its last. An idle connection may stay."""
REPORT_INTERVAL_S = 0.1
PEEK_INTERVAL_S = 0.2
_CREDENTIALS = struct.Struct("3i")


class _Malformed(Exception):
    """The message cannot be answered and followed by another one."""


class ControlServer:
    """Serves requests on a unix socket until cancelled."""

    def __init__(self, socket_path: Path, *, owner_uid: int) -> None:
        self._path = socket_path
        self._allowed = {owner_uid, 0}
        self._handlers: dict[str, Handler] = {}
        self._connections = 0
        self.register("ping", _ping)

    def register(self, operation: str, handler: Handler) -> None:
        """Answer ``operation`` with what ``handler(request, report)`` returns; see ``protocol``."""
        if operation not in protocol.OPERATIONS:
            raise ValueError(f"{operation} is not an operation of the protocol")
        self._handlers[operation] = handler

    async def serve(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen; ``task_status.started()`` once clients can connect. The socket file goes at the end."""
        listener = self._listen()
        identity = os.stat(self._path)
        try:
            async with trio.open_nursery() as nursery:
                task_status.started()
                while True:
                    try:
                        connection, _ = await listener.accept()
                    except OSError as error:
                        # Out of descriptors, or the client is gone already: not a reason to stop.
                        log.warning("control socket: accept failed", error=str(error))
                        await trio.sleep(0.1)
                        continue
                    nursery.start_soon(self._serve_connection, trio.SocketStream(connection))
        finally:
            listener.close()
            self._unlink(identity)

    def _listen(self) -> trio.socket.SocketType:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if stat.S_ISSOCK(os.lstat(self._path).st_mode):
                os.unlink(self._path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ControlError(f"{self._path}: cannot listen: {error.strerror}") from error
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        old_mask = os.umask(0o177)
        try:
            raw.bind(os.fsencode(self._path))
            raw.listen(MAX_CONNECTIONS)
        except OSError as error:
            raw.close()
            raise ControlError(f"{self._path}: cannot listen: {error.strerror or error}") from error
        finally:
            os.umask(old_mask)
        raw.setblocking(False)
        return trio.socket.from_stdlib_socket(raw)

    def _unlink(self, identity: os.stat_result) -> None:
        """Remove the socket file unless another engine has put its own there."""
        try:
            now = os.lstat(self._path)
            if (now.st_dev, now.st_ino) == (identity.st_dev, identity.st_ino):
                os.unlink(self._path)
        except OSError:
            pass

    async def _serve_connection(self, stream: trio.SocketStream) -> None:
        self._connections += 1
        try:
            async with stream:
                try:
                    self._admit(stream)
                    while (message := await _receive(stream)) is not None:
                        await self._answer(stream, message)
                except _Malformed as error:
                    await _send_problem(stream, ControlError(str(error)))
                except TierfsError as error:
                    await _send_problem(stream, error)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client is gone
        except Exception:
            log.exception("control connection failed")
        finally:
            self._connections -= 1

    def _admit(self, stream: trio.SocketStream) -> None:
        data = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _gid = _CREDENTIALS.unpack(data)
        if uid not in self._allowed:
            log.warning("control connection refused", pid=pid, uid=uid)
            raise ControlError("only the owner of the mount and root may control it")
        if self._connections > MAX_CONNECTIONS:
            raise ControlError(f"there are already {MAX_CONNECTIONS} control connections")

    async def _answer(self, stream: trio.SocketStream, message: bytes) -> None:
        try:
            request = msgspec.json.decode(message, type=protocol.Request)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _Malformed(f"malformed request: {error}") from None
        try:
            if request.protocol != protocol.PROTOCOL:
                raise ControlError(
                    f"the command speaks protocol {request.protocol}, the engine (tierfs {__version__}) "
                    f"protocol {protocol.PROTOCOL}: use the same version of both"
                )
            if request.operation not in protocol.OPERATIONS:
                raise ControlError(f"unknown operation {request.operation!r}")
            handler = self._handlers.get(request.operation)
            if handler is None:
                raise ControlError(f"this engine does not offer {request.operation}")
            kind, _ = protocol.OPERATIONS[request.operation]
            try:
                arguments = msgspec.json.decode(request.arguments, type=kind)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ControlError(f"{request.operation}: malformed arguments: {error}") from None
            reply = await _run(stream, handler, arguments)
        except TierfsError as error:
            await _send_problem(stream, error)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise
        except Exception:
            log.exception("control request failed", operation=request.operation)
            await _send_problem(stream, ControlError("internal error; the engine's log has the details"))
        else:
            await _send_reply(stream, reply)


async def _ping(_request: protocol.PingRequest, _report: Report) -> protocol.PingReply:
    return protocol.PingReply(version=__version__, pid=os.getpid(), protocol=protocol.PROTOCOL)


async def _run(stream: trio.SocketStream, handler: Handler, arguments: object) -> object:
    """Run the handler; meanwhile send its progress, and cancel it when the client goes away.

    Sends happen in this task only and are never cancelled half-way: messages must not interleave.
    """
    outcome: list[object] = []
    failure: list[Exception] = []
    latest: list[protocol.Progress] = []
    work_scope, watch_scope = trio.CancelScope(), trio.CancelScope()
    finished = trio.Event()
    wake = trio.Event()

    def report(progress: protocol.Progress) -> None:
        latest[:] = [progress]
        wake.set()

    async def work() -> None:
        with work_scope:
            try:
                outcome.append(await handler(arguments, report))
            except Exception as error:
                failure.append(error)
        watch_scope.cancel()
        finished.set()
        wake.set()

    async def watch() -> None:
        with watch_scope:
            try:
                # A peek: what the client may have sent of its next request must stay in the socket.
                while await stream.socket.recv(1, socket.MSG_PEEK):  # noqa: ASYNC110 - no event tells
                    await trio.sleep(PEEK_INTERVAL_S)
            except OSError:
                pass
            work_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(work)
        nursery.start_soon(watch)
        while True:
            await wake.wait()
            wake = trio.Event()
            if finished.is_set():
                break
            if latest:
                try:
                    await _send(stream, protocol.Answer(progress=latest.pop()))
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    work_scope.cancel()
            with trio.move_on_after(REPORT_INTERVAL_S):
                await finished.wait()
            if latest or finished.is_set():
                wake.set()
    if failure:
        raise failure[0]
    if not outcome:
        raise trio.BrokenResourceError("the client went away")
    return outcome[0]


async def _receive(stream: trio.SocketStream) -> bytes | None:
    """The next message; None when the client closed between two messages."""
    header = await _receive_exactly(stream, protocol.HEADER.size, may_end=True)
    if header is None:
        return None
    (length,) = protocol.HEADER.unpack(header)
    if length > protocol.MAX_REQUEST_BYTES:
        raise _Malformed(f"a request of {length} bytes; {protocol.MAX_REQUEST_BYTES} is the most")
    with trio.move_on_after(REQUEST_TIMEOUT_S):
        return await _receive_exactly(stream, length, may_end=False)
    raise _Malformed("the request did not arrive in time")


async def _receive_exactly(stream: trio.SocketStream, length: int, *, may_end: bool) -> bytes | None:
    data = bytearray()
    while len(data) < length:
        chunk = await stream.receive_some(min(length - len(data), 65536))
        if not chunk:
            if may_end and not data:
                return None
            raise _Malformed("the request ends in the middle")
        data += chunk
    return bytes(data)


async def _send(stream: trio.SocketStream, answer: protocol.Answer) -> None:
    body = msgspec.json.encode(answer)
    await stream.send_all(protocol.HEADER.pack(len(body)) + body)


async def _send_reply(stream: trio.SocketStream, reply: object) -> None:
    body = msgspec.json.encode(reply)
    if len(body) > protocol.MAX_REPLY_BYTES:
        await _send_problem(stream, ControlError(f"the reply has {len(body)} bytes, which is too long"))
        return
    await _send(stream, protocol.Answer(reply=msgspec.Raw(body)))


async def _send_problem(stream: trio.SocketStream, error: TierfsError) -> None:
    problem = protocol.Problem(error=type(error).__name__, errno=error.errno, message=str(error))
    await _send(stream, protocol.Answer(problem=problem))
