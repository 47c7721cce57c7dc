"""Messages between the engine and the native front, beside the FUSE requests.

One ``SOCK_SEQPACKET`` packet each: a header and a body, little endian, both ends on one machine and of one
version. ``tierfs_native/src/channel.h`` is the other end and has the same numbers and layouts.

Trio thread only. ``send`` never waits: a full socket is an error of the front, which always reads.
"""

from __future__ import annotations

import array
import enum
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import trio

from tierfs.errors import MountError

VERSION = 1
MAX_BYTES = 65536
_HEADER = struct.Struct("<HHIQ")
_HELLO = struct.Struct("<II")
_PLACE_MARK_BYTES = 16
_HANDLE = struct.Struct("<QQIIII")
_VIEW_SETTINGS = struct.Struct("<QQIIIIIIIIII")
_COUNTS = struct.Struct("<QQQQQQQIIIIIIQQ")
_PASSED_FILE = struct.Struct("<QQQ")
_ERROR = struct.Struct("<i")


@enum.unique
class Kind(enum.IntEnum):
    """What a message says; see ``channel.h``."""

    HELLO = 1
    HANDLES = 2
    HELLO_END = 3
    MOUNTED = 4
    UNMOUNTED = 5
    GONE = 6
    TOUCHED = 8
    COUNTS = 7
    EXTRA = 9
    EXTRA_INTERRUPT = 10
    PASSED = 13
    UNKNOWN = 26
    MOUNT = 16
    ATTACH = 17
    UNMOUNT = 18
    READY = 19
    STOPPING = 20
    BACKING = 21
    COUNT = 22
    VIEW = 23
    EXTRA_REPLY = 24
    HOLD = 25


HELLO_REATTACHED = 1
HELLO_UNTOLD = 2
OPEN_MODES = ("ask", "auto", "none")
"""In the order of ``enum tierfs_open_mode``."""
HANDLE_DIRECTORY = 1
HANDLE_PASSTHROUGH = 2
HANDLE_FRONT = 4


@dataclass(frozen=True, slots=True)
class Message:
    kind: int
    value: int
    body: bytes


@dataclass(frozen=True, slots=True)
class OpenHandle:
    """A file or directory that an application has open since an earlier engine."""

    number: int
    ino: int
    flags: int
    uid: int
    is_directory: bool
    passthrough: bool
    is_fronts: bool
    """Opened by the front itself: there is nothing to restore, but the inode is in use."""


@dataclass(frozen=True, slots=True)
class FrontCounts:
    """What the front has done since it was started."""

    answered: int
    relayed: int
    repeated: int
    passthrough_opens: int
    notifications: int
    notifications_refused: int
    opened_here: int
    """Files that are open now, and that no engine knows to be."""
    passthrough_errno: int
    """Why the kernel refuses passthrough; 0: it does not."""
    pending: int
    no_open: int
    """1: the kernel opens files without asking."""
    ring: int
    """1: requests come through io_uring."""
    ring_errno: int
    """Why they do not, if they should; 0: it was not tried, or it works."""
    ring_depth: int
    ring_requests: int
    """How many came so."""
    placed: int
    """Reads for which an engine said where the bytes are, and that the front then took from there."""


class Channel:
    """The engine's end. ``receive`` is for one task; ``send`` for any."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)

    async def receive(self) -> Message | None:
        """The next message; None: the front is gone. Raises ``MountError`` for another version."""
        while True:
            try:
                packet = self._socket.recv(_HEADER.size + MAX_BYTES)
                break
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._socket)
            except ConnectionResetError:
                return None
        if not packet:
            return None
        if len(packet) < _HEADER.size:
            raise MountError("the front sent half a message: it is of another version")
        version, kind, size, value = _HEADER.unpack_from(packet)
        if version != VERSION or size != len(packet) - _HEADER.size:
            raise MountError(f"the front speaks version {version} of the channel, this engine {VERSION}")
        return Message(kind, value, packet[_HEADER.size :])

    def send(self, kind: Kind, value: int = 0, body: bytes = b"", descriptor: int | None = None) -> None:
        """Raises ``OSError`` if the front is gone."""
        packet = _HEADER.pack(VERSION, kind, len(body), value) + body
        rights = []
        if descriptor is not None:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        self._socket.sendmsg([packet], rights, socket.MSG_NOSIGNAL)

    async def send_waiting(self, kind: Kind, value: int, body: bytes) -> None:
        """Like ``send``, for what must not be lost because the front is slow."""
        while True:
            try:
                self.send(kind, value, body)
                return
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._socket)

    def close(self) -> None:
        self._socket.close()


def unpack_hello(body: bytes) -> tuple[int, int, bytes]:
    """(pid of the front, how many engines it has started, mark of answers that name places)

    The mark is empty if the front is older and takes no such answers.
    """
    front_pid, engine_starts = _HELLO.unpack_from(body)
    return front_pid, engine_starts, body[_HELLO.size :][:_PLACE_MARK_BYTES]


def unpack_handles(body: bytes) -> Iterator[OpenHandle]:
    for number, ino, flags, uid, kind, _ in _HANDLE.iter_unpack(body):
        is_directory = bool(kind & HANDLE_DIRECTORY)
        passthrough, is_fronts = bool(kind & HANDLE_PASSTHROUGH), bool(kind & HANDLE_FRONT)
        yield OpenHandle(number, ino, flags, uid, is_directory, passthrough, is_fronts)


def unpack_passed(body: bytes) -> Iterator[tuple[int, tuple[int, int]]]:
    """(inode, (device, inode) of the file that its opens are passed through to)."""
    for ino, device, file_ino in _PASSED_FILE.iter_unpack(body):
        yield ino, (device, file_ino)


def unpack_counts(body: bytes) -> FrontCounts:
    # A front that is older than this engine counts less.
    return FrontCounts(*_COUNTS.unpack(body[: _COUNTS.size].ljust(_COUNTS.size, b"\0")))


def pack_extra_reply(error: int, body: bytes) -> bytes:
    """``error``: 0 or an errno, then with an empty body."""
    return _ERROR.pack(-error) + body


def pack_view_settings(
    *,
    ttl_ns: int,
    negative_ttl_ns: int,
    uid: int,
    gid: int,
    file_mode: int,
    dir_mode: int,
    read_only: bool,
    answers: bool,
    open_mode: str,
    close_waits: bool,
    through_ring: bool,
) -> bytes:
    """``answers`` False: the front hands every request on; ``close_waits``: those that close(2) sends too."""
    return _VIEW_SETTINGS.pack(
        ttl_ns,
        negative_ttl_ns,
        uid,
        gid,
        file_mode,
        dir_mode,
        int(read_only),
        int(answers),
        OPEN_MODES.index(open_mode),
        int(through_ring),
        int(close_waits),
        0,
    )
