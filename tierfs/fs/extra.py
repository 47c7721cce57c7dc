"""The FUSE adapter for what pyfuse3 cannot express: fallocate, lseek, copy_file_range, O_TMPFILE.

A native front sends these requests as the kernel wrote them, beside those for pyfuse3. Each is decoded here,
makes one call into ``ranges`` or ``files``, and its answer is encoded. As in ``ops``, and nowhere else, an
exception becomes an errno here; an unexpected one is EIO and a stack in the log.

Source of the layouts: Linux ``include/uapi/linux/fuse.h``; ``tierfs_native/src/abi.h`` has the same.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Awaitable, Callable

import structlog
import trio

from tierfs.errors import NotSupported
from tierfs.fs.files import Files
from tierfs.fs.names import Names
from tierfs.fs.ops import PREFERRED_IO_BYTES, errno_of
from tierfs.fs.ranges import Ranges
from tierfs.fs.services import Caller, Services
from tierfs.types import Inode

log = structlog.get_logger(__name__)

MAX_TASKS = 500
"""Requests in progress at once; each may wait for the store."""

FALLOCATE = 43
LSEEK = 46
COPY_FILE_RANGE = 47
TMPFILE = 51
COPY_FILE_RANGE_64 = 53

_HEADER = struct.Struct("<IIQQIIIHH")
"""len, opcode, unique, nodeid, uid, gid, pid, total_extlen, padding"""
_FALLOCATE_IN = struct.Struct("<QQQII")
_LSEEK_IN = struct.Struct("<QQII")
_LSEEK_OUT = struct.Struct("<Q")
_COPY_IN = struct.Struct("<QQQQQQQ")
_COPY_OUT = struct.Struct("<II")
_COPY_64_OUT = struct.Struct("<Q")
_CREATE_IN = struct.Struct("<IIII")
_ENTRY_OUT = struct.Struct("<QQQQIIQQQqqqIIIIIIIIII")
_OPEN_OUT = struct.Struct("<QII")
_COPY_32_MAX_BYTES = 0xFFFF_F000
FOPEN_KEEP_CACHE = 1 << 1

Answer = Callable[[int, int, bytes], Awaitable[None]]
"""(unique, errno or 0, body)"""


class ExtraRequests:
    """``take`` and ``interrupt`` never wait; ``run`` is a task of the mount. Trio thread only."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._files = Files(services, Names(services))
        self._ranges = Ranges(services, self._files)
        self._into, self._out = trio.open_memory_channel[bytes](math.inf)
        self._tasks: dict[int, trio.lowlevel.Task] = {}
        """By the number of the request."""
        self._interrupted: set[int] = set()
        """Requests that have not begun."""
        self._waiting: set[int] = set()

    def take(self, message: bytes) -> None:
        """One request, header and all. There are never more than the kernel has threads that wait."""
        self._waiting.add(_HEADER.unpack_from(message)[2])
        self._into.send_nowait(message)

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
            async for message in self._out:
                holder = object()
                await limiter.acquire_on_behalf_of(holder)
                nursery.start_soon(self._serve, message, answer, limiter, holder)

    async def _serve(
        self, message: bytes, answer: Answer, limiter: trio.CapacityLimiter, holder: object
    ) -> None:
        _, opcode, unique, nodeid, uid, gid, pid, _, _ = _HEADER.unpack_from(message)
        task = self._tasks[unique] = trio.lowlevel.current_task()
        self._waiting.discard(unique)
        if unique in self._interrupted:
            self._interrupted.discard(unique)
            self._services.interrupts.interrupt(task)
        try:
            error, body = await self._answer(
                opcode, nodeid, message[_HEADER.size :], Caller(uid=uid, gid=gid, pid=pid)
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
            return 0, await self._dispatch(opcode, nodeid, body, caller)
        except Exception as error:
            return errno_of(error, opcode), b""

    async def _dispatch(self, opcode: int, nodeid: int, body: bytes, caller: Caller) -> bytes:
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
            flags, mode, _, _ = _CREATE_IN.unpack_from(body)
            handle, inode = await self._files.create_unnamed(nodeid, mode, flags, caller)
            return self._entry(inode) + _OPEN_OUT.pack(handle, FOPEN_KEEP_CACHE, 0)
        raise NotSupported(f"request {opcode} is not known here")

    def _entry(self, inode: Inode) -> bytes:
        """As ``TierfsOperations._entry``, in the kernel's layout."""
        timeout_s = self._services.attr_timeout_s(inode)
        seconds, nanoseconds = int(timeout_s), int(timeout_s % 1 * 1e9)
        times = [
            divmod(time_ns, 1_000_000_000) for time_ns in (inode.atime_ns, inode.mtime_ns, inode.ctime_ns)
        ]
        return _ENTRY_OUT.pack(
            inode.ino, inode.generation, seconds, seconds, nanoseconds, nanoseconds,
            inode.ino, inode.size_bytes, self._services.sectors_of(inode),
            *(time[0] for time in times), *(time[1] for time in times),
            inode.mode, inode.nlink, inode.uid, inode.gid, inode.rdev, PREFERRED_IO_BYTES, 0,
        )  # fmt: skip
