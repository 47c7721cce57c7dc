"""The caller's side of the control socket: plain blocking sockets, no trio."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from tierfs import errors
from tierfs.control import protocol
from tierfs.errors import ControlError, TierfsError

CONNECT_TIMEOUT_S = 5.0


class EngineGone(ControlError):
    """Nobody listens on the socket, or the connection broke."""


class EngineSilent(ControlError):
    """The engine did not answer in time."""


class ControlClient:
    """One connection to an engine. A context manager; not to be shared between threads."""

    def __init__(self, socket_path: str | Path, *, timeout_s: float | None = None) -> None:
        """Connect. ``timeout_s``: how long the engine may be silent within a request; None: for ever."""
        self._timeout_s = timeout_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(CONNECT_TIMEOUT_S)
        try:
            self._socket.connect(str(socket_path))
        except TimeoutError:
            self._socket.close()
            raise EngineSilent(f"{socket_path}: the engine does not accept connections") from None
        except OSError as error:
            self._socket.close()
            raise EngineGone(f"{socket_path}: no engine answers ({error.strerror or error})") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def call(
        self,
        operation: str,
        request: msgspec.Struct | None = None,
        on_progress: Callable[[protocol.Progress], None] | None = None,
    ) -> Any:
        """Send a request and wait for its reply, a struct of ``protocol.OPERATIONS``.

        Raises what the engine answered (a class of ``tierfs.errors``), ``EngineGone`` or ``EngineSilent``.
        """
        request_type, reply_type = protocol.OPERATIONS[operation]
        arguments = msgspec.json.encode(request_type() if request is None else request)
        message = msgspec.json.encode(
            protocol.Request(
                protocol=protocol.PROTOCOL, operation=operation, arguments=msgspec.Raw(arguments)
            )
        )
        if len(message) > protocol.MAX_REQUEST_BYTES:
            raise ControlError(f"{operation}: the request has {len(message)} bytes; send it in parts")
        self._socket.settimeout(self._timeout_s)
        try:
            try:
                self._socket.sendall(protocol.HEADER.pack(len(message)) + message)
            except BrokenPipeError:
                pass  # refused before it was read: the reason is there to be received
            while True:
                answer = self._receive()
                if answer.progress is not None:
                    if on_progress is not None:
                        on_progress(answer.progress)
                elif answer.problem is not None:
                    raise _error_of(answer.problem)
                elif bytes(answer.reply):
                    return msgspec.json.decode(answer.reply, type=reply_type)
                else:
                    raise ControlError("the engine sent an empty answer")
        except TimeoutError:
            raise EngineSilent(f"the engine did not answer within {self._timeout_s:g} s") from None
        except msgspec.DecodeError as error:
            raise ControlError(f"the engine's answer cannot be read: {error}") from error
        except OSError as error:
            raise EngineGone(f"the connection to the engine broke ({error.strerror or error})") from error

    def _receive(self) -> protocol.Answer:
        (length,) = protocol.HEADER.unpack(self._receive_exactly(protocol.HEADER.size))
        if length > protocol.MAX_REPLY_BYTES + 1024:
            raise ControlError(f"the engine sent a message of {length} bytes")
        return msgspec.json.decode(self._receive_exactly(length), type=protocol.Answer)

    def _receive_exactly(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            chunk = self._socket.recv(min(length - len(data), 1024 * 1024))
            if not chunk:
                raise EngineGone("the engine closed the connection")
            data += chunk
        return bytes(data)


def _error_of(problem: protocol.Problem) -> TierfsError:
    """The error that the engine raised, as the same class where this version knows it."""
    kind = getattr(errors, problem.error, ControlError)
    if not (isinstance(kind, type) and issubclass(kind, TierfsError)):
        kind = ControlError
    error: TierfsError = kind(problem.message)
    error.errno = problem.errno
    return error
