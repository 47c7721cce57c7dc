"""Requests about open files: open, create, read, write, flush, fsync, release.

The path of a read is meant to be read as one line: ``ops.read`` -> ``Files.read`` -> ``FileContent`` ->
``Cache`` or ``Staging`` -> store.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

import structlog
import trio

from tierfs.errors import InvalidArgument, IsADirectory, NotFound, ReadOnly, StaleContent, TierfsError
from tierfs.fs import placed
from tierfs.fs.handles import FileHandle
from tierfs.fs.names import Names, is_write, new_file_mode
from tierfs.fs.placed import FRONT_HANDLE as FRONT_HANDLE
from tierfs.fs.placed import TAKES_PLACES
from tierfs.fs.services import Caller, Services
from tierfs.fs.snapshots import is_snapshot
from tierfs.namespace import tree
from tierfs.namespace.transaction import WriteTransaction
from tierfs.types import Inode
from tierfs.writeback.content import FileContent, check_size
from tierfs.writeback.syncing import make_durable

log = structlog.get_logger(__name__)

MOVE_ATTEMPTS = 20
MOVE_PAUSE_S = 0.1

OPEN_PASSED = 1 << 30
"""In the flags of an open, from a native front: others have the file open and passed through, and so will
this open be (``TIERFS_OPEN_PASSED``)."""


class Files:
    """See the module docstring."""

    def __init__(self, services: Services, names: Names) -> None:
        self._services = services
        self._names = names
        self._cache = services.cache
        self._contents = services.contents
        self._snapshots = services.snapshots
        self._closed: list[tuple[FileContent, bool]] = []
        """Of handles that are gone, one entry for each, and whether they could write; not saved yet."""
        self._is_saving = False

    async def open(self, ino: int, flags: int, caller: Caller) -> int:
        """Open an existing file; returns the handle number.

        Raises ``StaleContent`` when the inode is gone, so that the kernel looks the name up again.
        """
        if is_snapshot(ino):
            return self._services.snapshots.open(ino, flags)
        with self._services.db.read() as txn:
            try:
                inode = tree.get(txn, ino)
            except NotFound:
                raise StaleContent(f"inode {ino} is gone") from None
        if inode.is_dir:
            raise IsADirectory(f"inode {ino} is a directory")
        if is_write(flags) and self._services.settings.read_only:
            raise ReadOnly("mounted read-only")
        try:
            content = await self._contents.acquire(ino)
        except NotFound:
            raise StaleContent(f"inode {ino} is gone") from None
        # Its last name may have gone, and its bytes with it, while this waited.
        if content.local and content.staging is None and content.size_bytes and self._is_nameless(ino):
            await self._contents.release(content)
            raise StaleContent(f"inode {ino} has lost its name and its bytes since it was looked up")
        number = self._add(content, flags, caller)
        handle = self._services.handles.file(number)
        try:
            if handle.passed_through and handle.can_write:
                await self._contents.passthrough.begin_direct_write(content)
            if flags & os.O_TRUNC:
                await self._truncate(content, inode, caller)
        except BaseException:
            await self.release(number)
            raise
        if not handle.passed_through:
            await self._lend(handle)
        self._note_unread(number, handle)
        return number

    def _note_unread(self, number: int, handle: FileHandle) -> None:
        if self._services.lend is None or handle.can_write or handle.passed_through:
            return
        if self._services.copies.is_source(handle.content):
            self._services.expected_copies.note_open(number)

    def _is_nameless(self, ino: int) -> bool:
        with self._services.db.read() as txn:
            try:
                return not tree.get(txn, ino).nlink
            except NotFound:
                return True

    async def _lend(self, handle: FileHandle) -> None:
        """Let the front pass this open through to the tier's file, if there is one that holds all bytes."""
        content, lend = handle.content, self._services.lend
        if lend is None:
            return
        if content.local:
            await self._lend_dirty(handle, lend)
            return
        if content.writers or handle.can_write:
            return
        descriptor = self._contents.passthrough.lend(content)
        if descriptor is None:
            return
        try:
            handle.passed_through = lend(content.ino, descriptor)
        finally:
            os.close(descriptor)
        self._count_passed(handle)

    async def _lend_dirty(self, handle: FileHandle, lend: Callable[[int, int], bool]) -> None:
        content = handle.content
        begins_to_write = handle.can_write and not content.passed_through
        if begins_to_write and handle.uid != 0 and self._has_privileges(content.ino):
            return
        if begins_to_write and not content.size_bytes and self._services.expected_copies.is_likely:
            return
        try:
            descriptor = await self._contents.passthrough.lend_dirty(content, writes=handle.can_write)
        except TierfsError:
            return  # the first write tells
        if descriptor is None:
            return
        try:
            handle.passed_through = lend(content.ino, descriptor)
        finally:
            os.close(descriptor)
        self._count_passed(handle)

    def _count_passed(self, handle: FileHandle) -> None:
        if handle.passed_through:
            self._contents.passthrough.count_passed(handle.content, writes=handle.can_write)

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, caller: Caller
    ) -> tuple[int, Inode]:
        """open(O_CREAT) of a name that the kernel did not find."""
        inode = await self._names.create(parent, name, new_file_mode(mode), caller)
        content = await self._contents.acquire(inode.ino)
        return await self._add_new(content, flags, caller), inode

    async def create_unnamed(self, parent: int, mode: int, flags: int, caller: Caller) -> tuple[int, Inode]:
        """open(O_TMPFILE): a file without a name, which ``Names.link`` may give it."""
        inode = await self._names.create_unnamed(parent, new_file_mode(mode), caller)
        content = await self._contents.acquire(inode.ino)
        content.unlinked = content.linkable = True
        return await self._add_new(content, flags, caller), inode

    async def _add_new(self, content: FileContent, flags: int, caller: Caller) -> int:
        number = self._add(content, flags, caller)
        try:
            await self._lend(self._services.handles.file(number))
        except BaseException:
            await self.release(number)
            raise
        return number

    def _add(self, content: FileContent, flags: int, caller: Caller) -> int:
        handle = FileHandle(content, flags & ~OPEN_PASSED, caller.uid, bool(flags & OPEN_PASSED))
        content.writers += handle.can_write
        if handle.can_write:
            content.kept_for_readers = None
        self._count_passed(handle)
        return self._services.handles.add_file(handle)

    async def read(self, number: int, offset: int, length: int) -> bytes:
        """Up to ``length`` bytes; fewer only at the end of the file."""
        if self._snapshots.has_open(number):
            return await self._snapshots.read(number, offset, length)
        if number & FRONT_HANDLE:
            return await self._read_for_front(number & ~FRONT_HANDLE, offset, length)
        takes_places = bool(number & TAKES_PLACES)
        number &= ~TAKES_PLACES
        content = self._services.handles.file(number).content
        self._services.expected_copies.note_used(number)
        data = None
        if not content.under_way.touch(offset, offset + length):
            data = self._place(content, offset, length) if takes_places else None
            if data is None:
                data = content.read_nowait(self._cache, offset, length)
        self._services.readahead.observe(content.ino, content.ref, offset, length)
        if data is not None:
            return data
        return await self._read_guarded(content, offset, length, takes_places)

    def _place(self, content: FileContent, offset: int, length: int) -> bytes | None:
        """An answer that says where the bytes are."""
        mark = self._services.place_mark
        place = content.place(self._cache, offset, length) if mark else None
        return placed.pack(mark, place) if place is not None else None

    async def _read_for_front(self, ino: int, offset: int, length: int) -> bytes:
        """A read of a file that a native front has opened by itself, and has not all of in the tiers."""
        async with self._contents.used(ino) as content:
            self._services.readahead.observe(ino, content.ref, offset, length)
            return await self._read_guarded(content, offset, length)

    async def _read_guarded(
        self, content: FileContent, offset: int, length: int, takes_places: bool = False
    ) -> bytes:
        """Read, waiting if need be, until a signal."""
        try:
            return await self._services.interrupts.guard(
                self.read_waiting, content, offset, length, takes_places
            )
        except StaleContent:
            await self._learn_what_is_there_now(content.ino)
            raise

    async def read_waiting(
        self, content: FileContent, offset: int, length: int, takes_places: bool = False
    ) -> bytes:
        """Read; a version that is gone because we moved or re-labelled the object is read where it is now.

        ``takes_places``: the answer may say where the bytes are instead.
        """
        await content.under_way.wait(offset, offset + length)
        for _ in range(MOVE_ATTEMPTS):
            try:
                if takes_places:
                    await content.bring(self._cache, offset, length)
                    data = self._place(content, offset, length)
                    if data is not None:
                        return data
                return await content.read(self._cache, offset, length)
            except StaleContent:
                if not self._contents.refresh_ref(content):
                    if not self._services.publisher.is_publishing(content.ino):
                        raise
                    await trio.sleep(MOVE_PAUSE_S)
        return await content.read(self._cache, offset, length)

    async def _learn_what_is_there_now(self, ino: int) -> None:
        """The object was replaced: the next open must not meet the old inode again."""
        try:
            await self._services.interrupts.guard(self._services.refresher.revalidate, ino)
        except TierfsError:
            return  # it has no name any more, or the store cannot say: the reader gets ESTALE all the same

    async def write(self, number: int, offset: int, data: bytes) -> int:
        """Returns the number of bytes written: all of them, or an exception."""
        handle = self._services.handles.file(number)
        if not handle.can_write:
            raise InvalidArgument("the handle was opened for reading")
        content = handle.content
        with content.under_way.begun(offset, offset + len(data)):
            if handle.uid != 0:
                await self.drop_privileges(content.ino)
            return await self._contents.changes.write(content, offset, data)

    async def drop_privileges(self, ino: int) -> None:
        """A write by anyone but root clears set-user-ID and set-group-ID (POSIX write(2)).

        The kernel leaves that to the file system (FUSE_HANDLE_KILLPRIV).
        """
        with self._services.db.read() as txn:
            inode = tree.get(txn, ino)
        mode = mode_without_privileges(inode.mode)
        if mode == inode.mode:
            return
        now_ns = self._services.now_ns()

        def change(txn: WriteTransaction) -> None:
            tree.set_attributes(txn, ino, mode=mode, now_ns=now_ns)

        await self._services.db.commit(change)
        self._services.kernel.inode_changed(ino, attributes_only=True)

    def _has_privileges(self, ino: int) -> bool:
        with self._services.db.read() as txn:
            mode = tree.get(txn, ino).mode
        return mode_without_privileges(mode) != mode

    async def _drop_privileges_late(self, content: FileContent) -> None:
        """A write that did not pass here clears them at ``close``: until then nobody can execute the file."""
        self._contents.passthrough.notice_direct_writes(content)
        if content.written_directly and self._has_privileges(content.ino):
            await self.drop_privileges(content.ino)

    async def _truncate(self, content: FileContent, inode: Inode, caller: Caller) -> None:
        await self._contents.changes.truncate(content, 0)
        # Also of a file that was empty: open(O_TRUNC) sets the times, as on ext4.
        self._contents.changes.touch(content, content.size_bytes)
        if caller.uid != 0 and mode_without_privileges(inode.mode) != inode.mode:
            await self.drop_privileges(inode.ino)
        await self._contents.size_and_times.save(content)

    async def flush(self, number: int) -> None:
        """close(2) of one descriptor.

        With write-back nothing is waited for: size and times are laid over the record until RELEASE has
        committed them, and should the engine die in between, the staging file tells. With write-through the
        upload happens here, and its error is the answer of close(2).
        """
        if self._snapshots.has_open(number):
            return
        handle = self._services.handles.file(number)
        if handle.passed_through and handle.can_write:
            await self._contents.passthrough.pull(handle.content, always=True)
            self._contents.passthrough.notice_direct_writes(handle.content)
            check_size(handle.content.size_bytes)  # nobody could refuse the write itself
        if handle.passed_through and handle.can_write and handle.uid != 0:
            await self._drop_privileges_late(handle.content)
        if not handle.can_write or not self._services.settings.write_through:
            return
        content = handle.content
        self._contents.passthrough.notice_direct_writes(content)
        await self._contents.size_and_times.save(content)
        if content.local and not content.unlinked:
            await self._services.publisher.publish_now(content.ino)

    async def fsync(self, number: int) -> None:
        """Bytes, size and name survive a crash of the daemon and a power cut when this returns.

        With ``fsync=remote`` they are in the store as well.
        """
        if number & FRONT_HANDLE or self._snapshots.has_open(number):
            await self._services.db.sync()
            return
        handle = self._services.handles.file(number)
        content = handle.content
        await self._contents.passthrough.pull(content, always=content.writers > 0)
        self._contents.passthrough.notice_direct_writes(content)
        check_size(content.size_bytes)
        await make_durable(self._contents, content)
        if self._services.settings.fsync == "remote" and content.local and not content.unlinked:
            await self._services.publisher.publish_now(content.ino)

    async def sync_directory(self) -> None:
        """fsync(2) of a directory: every name so far is durable."""
        await self._services.db.sync()

    async def release(self, number: int) -> None:
        """The last descriptor of this open file is gone."""
        if self._snapshots.has_open(number):
            self._snapshots.release(number)
            return
        handle = self._services.handles.remove_file(number)
        self._services.expected_copies.note_used(number)
        content = handle.content
        if content.live is not None and handle.can_write:
            try:
                await self._contents.passthrough.pull(content, always=True)
            except TierfsError as error:
                log.error("bytes written into a file in memory are lost", ino=content.ino, reason=str(error))
        self._close(handle)
        await self.save_closed()

    def release_now(self, number: int) -> bool:
        """``release``, but for ``save_closed``, which has to be called. False: this one has to wait."""
        handle = self._services.handles.find_file(number)
        if handle is None:
            return not self._snapshots.has_open(number)  # else an earlier engine's
        if handle.content.live is not None and handle.can_write:
            return False
        self._services.expected_copies.note_used(number)
        self._close(self._services.handles.remove_file(number))
        return True

    def _close(self, handle: FileHandle) -> None:
        content = handle.content
        self._contents.passthrough.notice_direct_writes(content)
        content.passed_through -= handle.passed_through
        if not content.passed_through:
            self._contents.passthrough.end_passing(content)
            if content.kept_for_readers is not None:
                content.kept_for_readers = None
                self._services.publisher.schedule.note(content.ino)
        content.writers -= handle.can_write
        self._closed.append((content, handle.can_write))

    async def save_closed(self) -> None:
        """Record what was written into files that were closed: close(2) has returned long ago; nobody waits.

        One call at a time does the work, for all that have gathered meanwhile.
        """
        if self._is_saving:
            return
        self._is_saving = True
        try:
            while self._closed:
                closed, self._closed = self._closed, []
                try:
                    written = [content for content, wrote in closed if wrote]
                    await self._contents.size_and_times.save_together(written)
                except TierfsError as error:
                    log.error(
                        "files that were closed cannot be recorded", files=len(closed), reason=str(error)
                    )
                    # The others stay in use, so that everybody goes on seeing what was written.
                    closed = [(content, wrote) for content, wrote in closed if not content.unsaved]
                for content, wrote in closed:
                    if wrote and content.local and not content.unlinked:
                        self._services.publisher.schedule.note(content.ino)
                        if not content.writers:
                            self._services.background_sync.note(content.ino)
                    try:
                        await self._forget_open(content)
                    except TierfsError as error:
                        log.warning("a file was not closed in good order", ino=content.ino, reason=str(error))
        finally:
            self._is_saving = False

    async def _forget_open(self, content: FileContent) -> None:
        if content.users == 1:
            self._services.readahead.forget(content.ino)
        await self._contents.release(content)
        if content.unlinked:
            self._services.publisher.note_deletion()


def mode_without_privileges(mode: int) -> int:
    """``mode`` after a write or chown: no set-user-ID; no set-group-ID where it means privilege.

    Source: Linux ``chown_common`` (all but directories) and ``setattr_should_drop_sgid`` (set-group-ID
    without group execute was mandatory locking).
    """
    if stat.S_ISDIR(mode):
        return mode
    mode &= ~stat.S_ISUID
    if mode & stat.S_IXGRP:
        mode &= ~stat.S_ISGID
    return mode
