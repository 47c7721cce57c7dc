"""Requests about ranges of files: fallocate, lseek with SEEK_DATA and SEEK_HOLE, copy_file_range.

What pyfuse3 cannot express; see ``extra``. The kernel has checked that the handle fits, limits of the process
and that ranges of one file do not overlap, and it holds the lock of the inode that is changed.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from tierfs.cache import ranges
from tierfs.cache.staging import Staging
from tierfs.errors import Interrupted, InvalidArgument, NoSuchRange, NotSupported, TierfsError
from tierfs.fs.files import FRONT_HANDLE, Files
from tierfs.fs.handles import FileHandle
from tierfs.fs.services import Services
from tierfs.writeback.content import FileContent, check_size

KEEP_SIZE = 1
PUNCH_HOLE = 2
ZERO_RANGE = 16
"""Source: Linux ``include/uapi/linux/falloc.h``."""

COPY_LIMIT_S = 1.0
"""After so long a copy answers with what it has done: the kernel keeps others from writing meanwhile."""
READ_BYTES = 4 * 1024 * 1024
DISK_COPY_BYTES = 32 * 1024 * 1024


class Ranges:
    """See the module docstring."""

    def __init__(self, services: Services, files: Files) -> None:
        self._services = services
        self._contents = services.contents
        self._files = files

    async def fallocate(self, number: int, mode: int, offset: int, length: int) -> None:
        """fallocate(2): allocate, punch a hole, or make zeros.

        Raises ``NotSupported`` for other modes, ``TierFull``, ``ObjectTooLarge``, and what reading raises if
        a block changes in part that is not here.
        """
        if mode not in (0, KEEP_SIZE, PUNCH_HOLE | KEEP_SIZE, ZERO_RANGE, ZERO_RANGE | KEEP_SIZE):
            raise NotSupported(f"fallocate mode {mode:#x}")
        check_size(offset + length)
        handle = self._for_writing(number)
        content = handle.content
        if mode & PUNCH_HOLE and offset >= content.size_bytes:
            return
        staging = await self._begin_change(handle)
        change = ranges.punch if mode & PUNCH_HOLE else ranges.zero if mode & ZERO_RANGE else ranges.allocate
        generation = staging.generation
        done = False
        try:
            # For an allocation nobody waits for the store, but perhaps for room.
            await self._services.interrupts.guard(
                change, staging, offset, length, bool(mode & KEEP_SIZE)
            )
            done = True
        finally:
            if done or staging.generation != generation:
                await self._contents.passthrough.push(content, offset, offset + length)
                self._contents.changes.touch(content, staging.size_bytes)

    async def seek(self, number: int, offset: int, whence: int) -> int:
        """lseek(2) with SEEK_DATA or SEEK_HOLE. Raises ``NoSuchRange`` at and behind the end.

        What the store holds has no holes; a file that is being written has those of its local copy.
        """
        if whence not in (os.SEEK_DATA, os.SEEK_HOLE):
            raise InvalidArgument(f"seek from {whence}")
        if self._services.snapshots.has_open(number):
            size_bytes = self._services.snapshots.size_bytes(number)
            if offset >= size_bytes:
                raise NoSuchRange(f"nothing at or behind {offset}")
            return offset if whence == os.SEEK_DATA else size_bytes
        async with self._reading(number) as content:
            return await self._seek(content, offset, whence)

    async def _seek(self, content: FileContent, offset: int, whence: int) -> int:
        await self._contents.passthrough.pull(content)
        while offset < content.size_bytes:
            staging = content.staging
            if staging is None:
                return offset if whence == os.SEEK_DATA else content.size_bytes
            try:
                found = await ranges.seek(staging, offset, data=whence == os.SEEK_DATA)
            except TierfsError:
                if content.staging is staging:
                    raise
                continue  # it became a clean copy meanwhile
            if found is None:
                break
            return found
        raise NoSuchRange(f"nothing at or behind {offset}")

    async def copy(self, source_no: int, source_at: int, target_no: int, target_at: int, length: int) -> int:
        """copy_file_range(2) inside the engine: bytes pass neither through the kernel's cache nor the caller.

        Returns how many bytes were copied, perhaps fewer than asked for; 0: the source ends before. Raises
        what reading and writing raise, unless some bytes have been copied.
        """
        if self._services.snapshots.has_open(source_no):
            raise NotSupported("read and write what is in a snapshot")
        self._services.expected_copies.note_used(source_no)
        async with self._reading(source_no) as source:
            return await self._copy(source, source_at, target_no, target_at, length)

    async def _copy(
        self, source: FileContent, source_at: int, target_no: int, target_at: int, length: int
    ) -> int:
        handle = self._for_writing(target_no)
        target = handle.content
        await self._contents.passthrough.pull(source)
        length = min(length, source.size_bytes - source_at)
        if length <= 0:
            return 0
        check_size(target_at + length)
        await self._begin_change(handle)
        is_whole = not source_at and not target_at and length == source.size_bytes
        if is_whole and await self._copy_in_store(source, target):
            return length
        deadline_s = trio.current_time() + COPY_LIMIT_S
        copied = 0
        try:
            while copied < length:
                some = await self._services.interrupts.guard(
                    self._copy_some, source, source_at + copied, target, target_at + copied, length - copied
                )
                copied += some
                if not some or trio.current_time() > deadline_s:
                    break
        except TierfsError:
            if not copied:
                raise
        return copied

    async def _copy_in_store(self, source: FileContent, target: FileContent) -> bool:
        """All of it, without the bytes passing here. False: that has to be done here."""
        copy = self._services.copies.begin(source, target)
        if copy is None:
            return False
        try:
            await self._services.interrupts.guard(copy.decided)
        except Interrupted:
            if copy.give_up():
                raise
        return await copy.outcome()

    async def _copy_some(
        self, source: FileContent, source_at: int, target: FileContent, target_at: int, length: int
    ) -> int:
        staging = target.staging
        if staging is not None:
            some = min(length, DISK_COPY_BYTES)
            copied = await self._copy_on_disk(source, source_at, staging, target_at, some)
            if copied:
                await self._contents.passthrough.push(target, target_at, target_at + copied)
                self._contents.changes.touch(target, staging.size_bytes)
                return copied
        data = await self._files.read_waiting(source, source_at, min(length, READ_BYTES))
        if data:
            await self._contents.changes.write(target, target_at, data)
            await self._contents.passthrough.push(target, target_at, target_at + len(data))
        return len(data)

    async def _copy_on_disk(
        self, source: FileContent, source_at: int, target: Staging, target_at: int, length: int
    ) -> int:
        """By the local file system, which may share the blocks; 0: it cannot."""
        staging = source.staging
        if staging is not None:
            try:
                return await ranges.copy(staging, source_at, target, target_at, length)
            except TierfsError:
                if source.staging is staging:
                    raise
                return 0  # it became a clean copy meanwhile
        if source.ref is None or not source.size_bytes:
            return 0
        with self._services.cache.whole_file(source.ref) as descriptor:
            if descriptor is None:
                return 0
            length = min(length, source.ref.size_bytes - source_at)
            return await ranges.copy_from_file(descriptor, source_at, target, target_at, length)

    @asynccontextmanager
    async def _reading(self, number: int) -> AsyncIterator[FileContent]:
        """The content of an open file, kept meanwhile also if only the front has it open."""
        if number & FRONT_HANDLE:
            async with self._contents.used(number & ~FRONT_HANDLE) as content:
                yield content
        else:
            yield self._services.handles.file(number).content

    def _for_writing(self, number: int) -> FileHandle:
        handle = self._services.handles.file(number)
        if not handle.can_write:
            raise InvalidArgument("the handle was opened for reading")
        self._contents.passthrough.notice_direct_writes(handle.content)
        return handle

    async def _begin_change(self, handle: FileHandle) -> Staging:
        """As before a write. Not interruptible: half of it would lose what is there."""
        if handle.uid != 0:
            await self._files.drop_privileges(handle.content.ino)
        await self._contents.passthrough.pull(handle.content)
        return await self._contents.local_copies.make_writable(handle.content)
