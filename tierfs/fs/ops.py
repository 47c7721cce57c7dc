"""The FUSE adapter, and the only module here that knows pyfuse3.

Each method decodes one request, makes one call into ``names``, ``files`` or ``attributes``, and encodes the
answer. This is the one place where an exception becomes an errno: a ``TierfsError`` the one it carries,
an ``OSError`` of the local disk its own, anything else EIO for this request and a stack in the log. The
mount lives on.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec, TypeVar

import pyfuse3
import structlog
from pyfuse3 import EntryAttributes, FileHandleT, FileInfo, FUSEError, InodeT, RequestContext

from tierfs.errors import TierfsError
from tierfs.fs import repeats
from tierfs.fs.attributes import BLOCK_SIZE_BYTES, AttributeChange, Attributes
from tierfs.fs.files import Files
from tierfs.fs.handles import FOPEN_KEEP_CACHE, FOPEN_MAY_PASS, FOPEN_TELL_CLOSE, DirectoryHandle
from tierfs.fs.kernel import EntryGone, Notice
from tierfs.fs.names import Names
from tierfs.fs.services import Caller, Services
from tierfs.types import Inode

log = structlog.get_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
PREFERRED_IO_BYTES = 128 * 1024
FIRST_COOKIE = 2
"""Cookies 1 and 2 stand for ``.`` and ``..``; the namespace's own are shifted by that."""


def answers(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Turn exceptions of one request into the errno that the application sees."""

    @functools.wraps(function)
    async def request(*args: P.args, **kwargs: P.kwargs) -> T:
        operations: Any = args[0]
        operations.services.settle()
        try:
            return await function(*args, **kwargs)
        except FUSEError:
            raise
        except Exception as error:
            raise FUSEError(errno_of(error, function.__name__)) from None

    return request


def errno_of(error: Exception, request: str | int) -> int:
    """What the application sees of an exception; what nobody expected goes to the log, with its stack."""
    if isinstance(error, TierfsError):
        return error.errno
    if isinstance(error, OSError):
        log.error("local I/O error", request=request, exc_info=error)
        return error.errno or errno.EIO
    log.error("unexpected exception", request=request, exc_info=error)
    return errno.EIO


class TierfsOperations(pyfuse3.Operations):
    """pyfuse3's interface on top of the file system. Every method runs in a task of its own."""

    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self, services: Services) -> None:
        super().__init__()
        self._services = self.services = services
        self._names = Names(services)
        self._files = Files(services, self._names)
        self._attributes = Attributes(services)

    # names

    @answers
    async def lookup(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> EntryAttributes:
        return self._entry(await self._names.lookup(parent_inode, name))

    @answers
    async def mknod(
        self, parent_inode: InodeT, name: bytes, mode: int, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        if self._is_repeated(ctx):
            return self._entry(await self._names.lookup(parent_inode, name))
        return self._entry(await self._names.create(parent_inode, name, mode, _caller(ctx), rdev=rdev))

    @answers
    async def mkdir(
        self, parent_inode: InodeT, name: bytes, mode: int, ctx: RequestContext
    ) -> EntryAttributes:
        if self._is_repeated(ctx):
            return self._entry(await self._names.lookup(parent_inode, name))
        return self._entry(await self._names.create(parent_inode, name, mode, _caller(ctx)))

    @answers
    async def symlink(
        self, parent_inode: InodeT, name: bytes, target: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        if self._is_repeated(ctx):
            return self._entry(await self._names.lookup(parent_inode, name))
        mode = 0o120777
        return self._entry(await self._names.create(parent_inode, name, mode, _caller(ctx), target=target))

    @answers
    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        if self._is_repeated(ctx):
            return self._entry(await self._names.lookup(new_parent_inode, new_name))
        return self._entry(await self._names.link(inode, new_parent_inode, new_name))

    @answers
    async def unlink(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        if not self._is_repeated(ctx):
            await self._names.unlink(parent_inode, name)

    @answers
    async def rmdir(self, parent_inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        if not self._is_repeated(ctx):
            await self._names.rmdir(parent_inode, name)

    @answers
    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: bytes,
        parent_inode_new: InodeT,
        name_new: bytes,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        if not self._is_repeated(ctx):
            await self._names.rename(parent_inode_old, name_old, parent_inode_new, name_new, flags)

    @answers
    async def readlink(self, inode: InodeT, ctx: RequestContext) -> bytes:
        return await self._names.readlink(inode)

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        self._services.settle()
        if not self._services.orphans:
            return
        try:
            await self._names.forget([ino for ino, _ in inode_list])
        except Exception:
            log.exception("unexpected exception", request="forget")

    # directories

    @answers
    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        await self._names.open_directory(inode)
        return FileHandleT(self._services.handles.add_directory(DirectoryHandle(inode)))

    @answers
    async def readdir(self, fh: FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        ino = self._services.handles.directory(fh).ino
        if start_id < FIRST_COOKIE:
            here, parent = self._names.directory_inodes(ino)
            dots = ((b".", 1, here), (b"..", FIRST_COOKIE, parent))
            for name, cookie, inode in dots[start_id:]:
                if not pyfuse3.readdir_reply(token, name, self._entry(inode), cookie):
                    return
        position = max(start_id - FIRST_COOKIE, 0)
        while entries := self._names.read_directory(ino, position):
            for name, position, inode in entries:
                if not pyfuse3.readdir_reply(token, name, self._entry(inode), position + FIRST_COOKIE):
                    return

    @answers
    async def releasedir(self, fh: FileHandleT) -> None:
        self._services.handles.remove_directory(fh)

    @answers
    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        await self._files.sync_directory()

    # attributes

    @answers
    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        return self._entry(self._attributes.get(inode))

    @answers
    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        change = AttributeChange(
            mode=attr.st_mode if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size_bytes=attr.st_size if fields.update_size else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
        )
        return self._entry(await self._attributes.set(inode, change, _caller(ctx)))

    @answers
    async def getxattr(self, inode: InodeT, name: bytes, ctx: RequestContext) -> bytes:
        return await self._attributes.get_xattr(inode, name)

    @answers
    async def setxattr(self, inode: InodeT, name: bytes, value: bytes, ctx: RequestContext) -> None:
        await self._attributes.set_xattr(inode, name, value)

    @answers
    async def removexattr(self, inode: InodeT, name: bytes, ctx: RequestContext) -> None:
        if not self._is_repeated(ctx):
            await self._attributes.remove_xattr(inode, name)

    @answers
    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> list[bytes]:
        return self._attributes.list_xattrs(inode, _caller(ctx))

    @answers
    async def statfs(self, ctx: RequestContext) -> pyfuse3.StatvfsData:
        space = self._attributes.space()
        answer = pyfuse3.StatvfsData()
        answer.f_bsize = answer.f_frsize = BLOCK_SIZE_BYTES
        answer.f_blocks = space.total_blocks
        answer.f_bfree = answer.f_bavail = space.free_blocks
        answer.f_files = space.total_inodes
        answer.f_ffree = answer.f_favail = space.free_inodes
        answer.f_namemax = 255
        return answer

    # files

    @answers
    async def open(self, inode: InodeT, flags: int, ctx: RequestContext) -> FileInfo:
        number = await self._files.open(inode, flags, _caller(ctx))
        return self._file_info(number)

    @answers
    async def create(
        self, parent_inode: InodeT, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        if self._is_repeated(ctx):
            inode = await self._names.lookup(parent_inode, name)
            number = await self._files.open(inode.ino, flags & ~os.O_EXCL, _caller(ctx))
        else:
            number, inode = await self._files.create(parent_inode, name, mode, flags, _caller(ctx))
        return self._file_info(number), self._entry(inode)

    @answers
    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        return await self._files.read(fh, off, size)

    @answers
    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        return await self._files.write(fh, off, buf)

    @answers
    async def flush(self, fh: FileHandleT) -> None:
        await self._files.flush(fh)

    @answers
    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        await self._files.fsync(fh)

    @answers
    async def release(self, fh: FileHandleT) -> None:
        await self._files.release(fh)

    def _is_repeated(self, ctx: RequestContext) -> bool:
        """Whether an engine before this one has done what is asked for. A native front numbers requests."""
        if self._services.lend is None:
            return False
        repeats.request_number.set(ctx.pid)
        return repeats.is_repeated(self._services.db)

    def _file_info(self, number: int) -> FileInfo:
        if self._services.snapshots.has_open(number):
            return FileInfo(fh=FileHandleT(number), keep_cache=True)  # what it holds never changes
        flags = self._services.handles.file(number).open_flags
        return FileInfo(
            fh=FileHandleT(number),
            keep_cache=bool(flags & FOPEN_KEEP_CACHE),
            nonseekable=bool(flags & FOPEN_MAY_PASS),
            direct_io=bool(flags & FOPEN_TELL_CLOSE),
        )

    def _entry(self, inode: Inode) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino = InodeT(inode.ino)
        entry.generation = inode.generation
        entry.entry_timeout = entry.attr_timeout = self._services.attr_timeout_s(inode)
        entry.st_mode = inode.mode
        entry.st_nlink = inode.nlink
        entry.st_uid = inode.uid
        entry.st_gid = inode.gid
        entry.st_rdev = inode.rdev
        entry.st_size = inode.size_bytes
        entry.st_blksize = PREFERRED_IO_BYTES
        entry.st_blocks = self._services.sectors_of(inode)
        entry.st_atime_ns = inode.atime_ns
        entry.st_mtime_ns = inode.mtime_ns
        entry.st_ctime_ns = inode.ctime_ns
        return entry


def send_notice(notice: Notice) -> None:
    """Pass one notice to the kernel. Blocks; called from the worker thread of ``KernelCaches``."""
    if isinstance(notice, EntryGone):
        pyfuse3.invalidate_entry(InodeT(notice.parent_ino), notice.name)
    else:
        pyfuse3.invalidate_inode(InodeT(notice.ino), notice.attributes_only)


def _caller(ctx: RequestContext) -> Caller:
    return Caller(uid=ctx.uid, gid=ctx.gid, pid=ctx.pid)
