"""Stands between the front of a mount and its engine, and writes down what they say to each other.

``corpus.py`` makes a mount whose ``TIERFS_FRONT_PATH`` names a script that calls this file:

    record.py front LOG REAL_FRONT ARGUMENT... -- ENGINE ARGUMENT...
        becomes the real front, with this file in the place of the engine
    record.py engine LOG ENGINE ARGUMENT...
        starts the real engine, and hands every packet on, in both directions, descriptors included

The log is a sequence of packets: ``HEAD`` (socket, who sent it, size), then the bytes. With
``RECORD_ALL`` in the environment the front answers nothing by itself, so that every request is seen.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

HEAD = struct.Struct("<BBI")
REQUESTS, CHANNEL, REPORT, NAMES = 3, 4, 5, 6
"""Descriptors of an engine, as ``engine.h`` numbers them."""
_PACKET_BYTES = 2 << 20
_BUFFER_BYTES = 4 << 20
_SO_SNDBUFFORCE = 32
_CHANNEL_HEAD = struct.Struct("<HHIQ")
_VIEW = 23
_ANSWERS_AT = _CHANNEL_HEAD.size + 36
"""Where ``answers`` is in the body of TIERFS_VIEW."""


class Packet(NamedTuple):
    socket: int
    from_front: bool
    data: bytes


def read_log(path: Path) -> Iterator[Packet]:
    """The packets of a log, in the order in which they went; one that was being written is left out."""
    with path.open("rb") as log:
        while len(head := log.read(HEAD.size)) == HEAD.size:
            number, from_front, size = HEAD.unpack(head)
            data = log.read(size)
            if len(data) == size:
                yield Packet(number, bool(from_front), data)


def become_front(log: str, front: str, arguments: Sequence[str]) -> None:
    """Run the real front with this file before its engine. Does not return."""
    engine = arguments.index("--") + 1
    recorded = [sys.executable, os.path.abspath(__file__), "engine", log]
    os.execv(front, [front, *arguments[:engine], *recorded, *arguments[engine:]])


class Recorder:
    """The three sockets of one engine."""

    def __init__(self, log: IO[bytes], everything: bool) -> None:
        self._log = log
        self._everything = everything
        self._lock = threading.Lock()
        self._pumps: list[threading.Thread] = []

    def join(self, front: socket.socket, engine: socket.socket, number: int) -> None:
        """Hand on what comes from either end."""
        for source, target, from_front in ((front, engine, True), (engine, front, False)):
            pump = threading.Thread(target=self._pump, args=(source, target, number, from_front), daemon=True)
            pump.start()
            self._pumps.append(pump)

    def finish(self) -> None:
        """Once the engine has ended: what it had said is handed on before its front sees the end."""
        for pump in self._pumps[1::2]:
            pump.join(10)

    def _pump(self, source: socket.socket, target: socket.socket, number: int, from_front: bool) -> None:
        while True:
            try:
                data, rights, _, _ = source.recvmsg(_PACKET_BYTES, socket.CMSG_SPACE(4 * 4))
            except OSError:
                data, rights = b"", []
            if not data:
                with contextlib.suppress(OSError):
                    target.shutdown(socket.SHUT_RDWR)
                return
            if self._everything and number == CHANNEL and _CHANNEL_HEAD.unpack_from(data)[1] == _VIEW:
                data = data[:_ANSWERS_AT] + bytes(4) + data[_ANSWERS_AT + 4 :]
            with self._lock:
                self._log.write(HEAD.pack(number, from_front, len(data)) + data)
            descriptors = [item for _, _, part in rights for item in array.array("i", part)]
            passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            try:
                target.sendmsg([data], passed if descriptors else [])
            except OSError:
                return
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)


def be_engine(log: str, command: Sequence[str]) -> int:
    """Run the real engine behind this process; its exit status."""
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, lambda number, _: os.kill(child, number))
    actions: list[tuple[int, int] | tuple[int, int, int]] = []
    sockets = []
    for number in (REQUESTS, CHANNEL, NAMES):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        front = socket.socket(fileno=fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 64))
        for end in (ours, theirs, front):
            end.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _BUFFER_BYTES)
        high = socket.socket(fileno=fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, 64))
        theirs.close()
        sockets.append((front, ours, high, number))
        actions.append((os.POSIX_SPAWN_DUP2, high.fileno(), number))
    child = os.posix_spawn(command[0], list(command), os.environ, file_actions=actions)
    for number in (REQUESTS, CHANNEL, REPORT, NAMES):
        with contextlib.suppress(OSError):
            os.close(number)
    with open(log, "ab", buffering=0) as file:
        recorder = Recorder(file, bool(os.environ.get("RECORD_ALL")))
        for front, ours, high, number in sockets:
            high.close()
            recorder.join(front, ours, number)
        _, status = os.waitpid(child, 0)
        recorder.finish()
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1


def main(arguments: Sequence[str]) -> int:
    role, log, *rest = arguments
    if role == "front":
        become_front(log, rest[0], rest[1:])
    return be_engine(log, rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
