"""The FUSE adapter for what pyfuse3 cannot express: fallocate, lseek, copy_file_range, O_TMPFILE, READDIR.

Also for what ``direct`` cannot do at once. A native front sends these requests as the kernel wrote them,
beside those for pyfuse3. Each is decoded here, makes one call into ``ranges``, ``files`` or ``names``, and
its answer is encoded. As in ``ops``, and nowhere else, an exception becomes an errno here; an unexpected one
is EIO and a stack in the log.

Source of the layouts: Linux ``include/uapi/linux/fuse.h``; ``tierfs_native/src/abi.h`` has the same.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Awaitable, Callable

import structlog
import trio

from tierfs.errors import NotSupported
from tierfs.fs import repeats
from tierfs.fs.files import Files
from tierfs.fs.names import Names
from tierfs.fs.ops import FIRST_COOKIE, PREFERRED_IO_BYTES, errno_of
from tierfs.fs.ranges import Ranges
from tierfs.fs.services import Caller, Services
from tierfs.types import Inode

log = structlog.get_logger(__name__)

MAX_TASKS = 500
"""Requests in progress at once; each may wait for the store."""

READDIR = 28
FALLOCATE = 43
LSEEK = 46
COPY_FILE_RANGE = 47
TMPFILE = 51
COPY_FILE_RANGE_64 = 53
UNLINK = 10
RENAME = 12
RELEASE = 18
CREATE = 35
RENAME2 = 45

HEADER = struct.Struct("<IIQQIIIHH")
"""len, opcode, unique, nodeid, uid, gid, pid, total_extlen, padding"""
_READ_IN = struct.Struct("<QQIIQII")
_DIRENT = struct.Struct("<QQII")
_DIRENT_ALIGNMENT = 8
_LISTING_MAX_BYTES = 16 * 1024
"""What the front takes as an answer (``EXTRA_REPLY_MAX_BYTES`` in relay_answer.c)."""
_FALLOCATE_IN = struct.Struct("<QQQII")
_LSEEK_IN = struct.Struct("<QQII")
_LSEEK_OUT = struct.Struct("<Q")
_COPY_IN = struct.Struct("<QQQQQQQ")
_COPY_OUT = struct.Struct("<II")
_COPY_64_OUT = struct.Struct("<Q")
CREATE_IN = struct.Struct("<IIII")
RENAME_IN = struct.Struct("<Q")
RENAME2_IN = struct.Struct("<QII")
ENTRY_OUT = struct.Struct("<QQQQIIQQQqqqIIIIIIIIII")
OPEN_OUT = struct.Struct("<QII")
_COPY_32_MAX_BYTES = 0xFFFF_F000

Answer = Callable[[int, int, bytes], Awaitable[None]]
"""(unique, errno or 0, body)"""


class ExtraRequests:
    """``take`` and ``interrupt`` never wait; ``run`` is a task of the mount. Trio thread only."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._names = Names(services)
        self._files = Files(services, self._names)
        self._ranges = Ranges(services, self._files)
        self._into, self._out = trio.open_memory_channel[tuple[bytes, Answer | None]](math.inf)
        self._tasks: dict[int, trio.lowlevel.Task] = {}
        """By the number of the request."""
        self._interrupted: set[int] = set()
        """Requests that have not begun."""
        self._waiting: set[int] = set()

    def take(self, message: bytes, answer: Answer | None = None) -> None:
        """One request, header and all. There are never more than the kernel has threads that wait.

        ``answer``: where the answer goes, if not where those of ``run`` go.
        """
        self._waiting.add(HEADER.unpack_from(message)[2])
        self._into.send_nowait((message, answer))

    def interrupt(self, unique: int) -> None:
        """Who waits for that request has got a signal."""
        task = self._tasks.get(unique)
        if task is not None:
            self._services.interrupts.interrupt(task)
        elif unique in self._waiting:
            self._interrupted.add(unique)

    async def run(self, answer: Answer) -> None:
        """Serve until cancelled."""
        limiter = trio.CapacityLimiter(MAX_TASKS)
        async with trio.open_nursery() as nursery:
            async for message, other in self._out:
                holder = object()
                await limiter.acquire_on_behalf_of(holder)
                nursery.start_soon(self._serve, message, other or answer, limiter, holder)

    async def _serve(
        self, message: bytes, answer: Answer, limiter: trio.CapacityLimiter, holder: object
    ) -> None:
        _, opcode, unique, nodeid, uid, gid, pid, _, _ = HEADER.unpack_from(message)
        task = self._tasks[unique] = trio.lowlevel.current_task()
        self._waiting.discard(unique)
        if unique in self._interrupted:
            self._interrupted.discard(unique)
            self._services.interrupts.interrupt(task)
        try:
            error, body = await self._answer(
                opcode, nodeid, message[HEADER.size :], Caller(uid=uid, gid=gid, pid=pid)
            )
            await answer(unique, error, body)
        except OSError as failure:
            log.warning("an answer did not reach the front", opcode=opcode, reason=str(failure))
        finally:
            self._services.interrupts.forget(task)
            del self._tasks[unique]
            limiter.release_on_behalf_of(holder)

    async def _answer(self, opcode: int, nodeid: int, body: bytes, caller: Caller) -> tuple[int, bytes]:
        try:
            self._services.settle()
            return 0, await self._dispatch(opcode, nodeid, body, caller)
        except Exception as error:
            return errno_of(error, opcode), b""

    async def _dispatch(self, opcode: int, nodeid: int, body: bytes, caller: Caller) -> bytes:
        if opcode == READDIR:
            _, offset, size, _, _, _, _ = _READ_IN.unpack_from(body)
            return self._list(nodeid, offset, min(size, _LISTING_MAX_BYTES))
        if opcode == FALLOCATE:
            handle, offset, length, mode, _ = _FALLOCATE_IN.unpack_from(body)
            await self._ranges.fallocate(handle, mode, offset, length)
            return b""
        if opcode == LSEEK:
            handle, offset, whence, _ = _LSEEK_IN.unpack_from(body)
            return _LSEEK_OUT.pack(await self._ranges.seek(handle, offset, whence))
        if opcode in (COPY_FILE_RANGE, COPY_FILE_RANGE_64):
            source, source_at, _, target, target_at, length, _ = _COPY_IN.unpack_from(body)
            if opcode == COPY_FILE_RANGE:
                length = min(length, _COPY_32_MAX_BYTES)
            copied = await self._ranges.copy(source, source_at, target, target_at, length)
            return _COPY_OUT.pack(copied, 0) if opcode == COPY_FILE_RANGE else _COPY_64_OUT.pack(copied)
        if opcode == TMPFILE:
            flags, mode, _, _ = CREATE_IN.unpack_from(body)
            handle, inode = await self._files.create_unnamed(nodeid, mode, flags, caller)
            return self._entry(inode) + self._opened(handle)
        if opcode in (CREATE, UNLINK, RENAME, RENAME2):
            return await self._change_name(opcode, nodeid, body, caller)
        raise NotSupported(f"request {opcode} is not known here")

    def _list(self, ino: int, offset: int, size: int) -> bytes:
        """As ``TierfsOperations.readdir``, without attributes."""
        here, parent = self._names.directory_inodes(ino)
        parts: list[bytes] = []
        entries = [(b".", 1 - FIRST_COOKIE, here), (b"..", 0, parent)][offset:]
        position = max(offset - FIRST_COOKIE, 0)
        while True:
            for name, cookie, inode in entries:
                record = _DIRENT.pack(inode.ino, cookie + FIRST_COOKIE, len(name), inode.mode >> 12) + name
                record += bytes(-len(record) % _DIRENT_ALIGNMENT)
                size -= len(record)
                if size < 0:
                    return b"".join(parts)
                parts.append(record)
            entries = self._names.read_directory(ino, position)
            if not entries:
                return b"".join(parts)
            position = entries[-1][1]

    async def _change_name(self, opcode: int, parent: int, body: bytes, caller: Caller) -> bytes:
        """As in ``ops``."""
        repeats.request_number.set(caller.pid)
        is_repeated = repeats.is_repeated(self._services.db)
        if opcode == CREATE:
            flags, mode, name = unpack_create(body)
            if is_repeated:
                inode = await self._names.lookup(parent, name)
                number = await self._files.open(inode.ino, flags & ~os.O_EXCL, caller)
            else:
                number, inode = await self._files.create(parent, name, mode, flags, caller)
            return self._entry(inode) + self._opened(number)
        if not is_repeated and opcode == UNLINK:
            await self._names.unlink(parent, unpack_name(body))
        elif not is_repeated:
            new_parent, name, new_name, flags = unpack_rename(opcode, body)
            await self._names.rename(parent, name, new_parent, new_name, flags)
        return b""

    def _opened(self, number: int) -> bytes:
        return OPEN_OUT.pack(number, self._services.handles.file(number).open_flags, 0)

    def _entry(self, inode: Inode) -> bytes:
        """As ``TierfsOperations._entry``, in the kernel's layout."""
        timeout_s = self._services.attr_timeout_s(inode)
        seconds, nanoseconds = int(timeout_s), int(timeout_s % 1 * 1e9)
        times = [
            divmod(time_ns, 1_000_000_000) for time_ns in (inode.atime_ns, inode.mtime_ns, inode.ctime_ns)
        ]
        return ENTRY_OUT.pack(
            inode.ino, inode.generation, seconds, seconds, nanoseconds, nanoseconds,
            inode.ino, inode.size_bytes, self._services.sectors_of(inode),
            *(time[0] for time in times), *(time[1] for time in times),
            inode.mode, inode.nlink, inode.uid, inode.gid, inode.rdev, PREFERRED_IO_BYTES, 0,
        )  # fmt: skip


def unpack_name(body: bytes) -> bytes:
    """The one name that a request consists of."""
    return body[: body.index(b"\0")]


def unpack_create(body: bytes) -> tuple[int, int, bytes]:
    """(flags, mode, name)"""
    flags, mode, _, _ = CREATE_IN.unpack_from(body)
    return flags, mode, body[CREATE_IN.size : body.index(b"\0", CREATE_IN.size)]


def unpack_rename(opcode: int, body: bytes) -> tuple[int, bytes, bytes, int]:
    """(new parent, old name, new name, flags)"""
    if opcode == RENAME2:
        new_parent, flags, _ = RENAME2_IN.unpack_from(body)
        start = RENAME2_IN.size
    else:
        (new_parent,), flags, start = RENAME_IN.unpack_from(body), 0, RENAME_IN.size
    name, new_name, _ = body[start:].split(b"\0", 2)
    return new_parent, name, new_name, flags
