"""Requests about names: look-up, creation, removal, rename, links, directories.

Whatever the bucket may know better is asked first (``refresher``), then the change is one commit. The
commit function is where a race between two requests is decided.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

import structlog
import trio

from tierfs.errors import InvalidArgument, NotFound, NotPermitted, ReadOnly, TierfsError
from tierfs.fs import repeats
from tierfs.fs.services import Caller, Services
from tierfs.fs.snapshots import is_snapshot
from tierfs.namespace import tree
from tierfs.namespace.rename import RenameResult
from tierfs.namespace.transaction import WriteTransaction
from tierfs.types import NO_CONTENT, ROOT_INO, Inode, new_content_id

log = structlog.get_logger(__name__)

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
RESERVED_NAME = b".tierfs"
DIRECTORY_PAGE = 256
FORGET_BATCH = 512


class Names:
    """See the module docstring."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._db = services.db
        self._refresher = services.refresher
        self._snapshots = services.snapshots
        self._forgotten: list[int] = []
        """Inodes that nobody can reach, to be reaped."""
        self._forgotten_in_use: set[int] = set()
        """The same, but their content is still in use here."""
        services.contents.on_idle = self._forget_idle
        self._is_reaping = False

    async def lookup(self, parent: int, name: bytes) -> Inode:
        """The inode of that name. Raises ``NotFound``, or ``StoreError`` if nobody can say."""
        if self._snapshots.is_name(parent, name):
            return self._snapshots.lookup(parent, name)
        found = self._refresher.lookup_local(parent, name)
        if found is not None:
            return self._services.view(found)
        found = await self._services.interrupts.guard(self._refresher.lookup, parent, name)
        return self._services.view_now(found)

    async def create(
        self,
        parent: int,
        name: bytes,
        mode: int,
        caller: Caller,
        *,
        rdev: int = 0,
        target: bytes | None = None,
    ) -> Inode:
        """Make a file, directory, symbolic link or special file. Raises ``AlreadyExists``."""
        self.check_writable(parent, name)
        now_ns = self._services.now_ns()
        # The staging file of a regular file appears with its first byte; until then the id means "empty".
        content_id = new_content_id() if stat.S_ISREG(mode) else NO_CONTENT

        def make(txn: WriteTransaction) -> Inode:
            return tree.create(
                txn,
                parent,
                name,
                mode=mode,
                uid=caller.uid,
                gid=caller.gid,
                rdev=rdev,
                target=target,
                content_id=content_id,
                now_ns=now_ns,
            )

        inode = await repeats.commit(self._db, make)
        self._services.publisher.schedule.note(inode.ino)
        return inode

    async def create_unnamed(self, parent: int, mode: int, caller: Caller) -> Inode:
        """Make a regular file that no directory has; ``parent`` says whose group it gets."""
        if self._services.settings.read_only or is_snapshot(parent):
            raise ReadOnly("mounted read-only, or in a snapshot")
        now_ns = self._services.now_ns()

        def make(txn: WriteTransaction) -> Inode:
            return tree.create_unnamed(
                txn,
                parent,
                mode=mode,
                uid=caller.uid,
                gid=caller.gid,
                content_id=new_content_id(),
                now_ns=now_ns,
            )

        inode = await self._db.commit(make, lazy=True)
        self._services.orphans.add(inode.ino)
        return inode

    async def link(self, ino: int, parent: int, name: bytes) -> Inode:
        """Another name for a file, or the first one for an unnamed one."""
        self.check_writable(parent, name)
        if is_snapshot(ino):
            raise NotPermitted("a file in a snapshot cannot get a name outside of it")
        now_ns = self._services.now_ns()
        inode = await repeats.commit(self._db, lambda txn: tree.link(txn, ino, parent, name, now_ns=now_ns))
        self._services.orphans.discard(ino)
        content = self._services.contents.peek(ino)
        if content is not None:
            content.unlinked = content.linkable = False
        self._services.publisher.schedule.note(ino)
        return self._services.view_now(inode)

    async def unlink(self, parent: int, name: bytes) -> None:
        """Remove a name; the inode lives on while it has others, or is open."""
        self.check_writable(parent, name)
        now_ns = self._services.now_ns()
        inode = await repeats.commit(self._db, lambda txn: tree.unlink(txn, parent, name, now_ns=now_ns))
        self._services.publisher.schedule.note(parent)
        await self._name_removed(inode)

    async def rmdir(self, parent: int, name: bytes) -> None:
        """Remove an empty directory; empty means that nothing is in the bucket below it either."""
        self.check_writable(parent, name)
        with self._db.read() as txn:
            inode = tree.lookup(txn, parent, name)
        if inode.is_dir:
            await self._refresher.listed(inode.ino)
        now_ns = self._services.now_ns()
        inode = await repeats.commit(self._db, lambda txn: tree.rmdir(txn, parent, name, now_ns=now_ns))
        self._services.orphans.add(inode.ino)
        self._services.publisher.schedule.note(parent)
        self._services.publisher.note_deletion()

    async def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int) -> None:
        """rename(2) with ``RENAME_NOREPLACE`` and ``RENAME_EXCHANGE``."""
        if flags & ~(RENAME_NOREPLACE | RENAME_EXCHANGE) or flags == RENAME_NOREPLACE | RENAME_EXCHANGE:
            raise InvalidArgument(f"rename flags {flags:#x} are not supported")
        self.check_writable(parent, name)
        self.check_writable(new_parent, new_name)
        await self._complete_before_rename(parent, name, new_parent, new_name, flags)
        now_ns = self._services.now_ns()
        result = await repeats.commit(
            self._db,
            lambda txn: tree.rename(
                txn,
                parent,
                name,
                new_parent,
                new_name,
                now_ns=now_ns,
                noreplace=bool(flags & RENAME_NOREPLACE),
                exchange=bool(flags & RENAME_EXCHANGE),
            ),
        )
        self.note_renamed(result, parent)
        if result.replaced is not None:
            await self._name_removed(result.replaced)

    def note_renamed(self, result: RenameResult, parent: int) -> None:
        """After the commit."""
        for ino in (*result.moved, parent):
            self._services.publisher.schedule.note(ino)
        if result.replaced is not None:
            for ino in result.moved:
                self._services.background_sync.hurry(ino)

    async def _complete_before_rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> None:
        """A directory that moves takes everything below it along, so all of that must be known here."""
        with self._db.read() as txn:
            source = tree.lookup(txn, parent, name)
            try:
                target = tree.lookup(txn, new_parent, new_name)
            except NotFound:
                target = None
        if source.is_dir:
            await self._refresher.complete_subtree(source.ino)
        if target is not None and target.is_dir:
            if flags & RENAME_EXCHANGE:
                await self._refresher.complete_subtree(target.ino)
            else:
                await self._refresher.listed(target.ino)

    async def _name_removed(self, inode: Inode) -> None:
        if self.note_removed(inode):
            await self._services.contents.drop_unlinked(inode)

    def note_removed(self, inode: Inode) -> bool:
        """After the commit. True: ``contents.drop_unlinked`` is still to be called."""
        self._services.publisher.note_deletion()
        if inode.nlink > 0 and not inode.is_dir:
            self._services.publisher.schedule.note(inode.ino)
            return False
        self._services.orphans.add(inode.ino)
        # A native front has files open that are not open here: their bytes go when the kernel forgets them.
        return self._services.lend is None or self._services.contents.peek(inode.ino) is not None

    async def readlink(self, ino: int) -> bytes:
        if is_snapshot(ino):
            return self._snapshots.readlink(ino)
        with self._db.read() as txn:
            return tree.readlink(txn, ino)

    async def open_directory(self, ino: int) -> None:
        """Make sure that the listing of the directory is complete and fresh."""
        if is_snapshot(ino):
            self._snapshots.open_directory(ino)
            return
        if not self._refresher.is_listed(ino):
            await self._services.interrupts.guard(self._refresher.listed, ino)

    def read_directory(self, ino: int, after_cookie: int) -> list[tuple[bytes, int, Inode]]:
        """The next entries after ``after_cookie``, with the cookie of each; empty at the end."""
        if is_snapshot(ino):
            return self._snapshots.read_directory(ino, after_cookie)
        with self._db.read() as txn:
            entries = tree.readdir(txn, ino, after_cookie, DIRECTORY_PAGE)
        view = self._services.view
        return [(name, cookie, view(inode)) for name, cookie, inode in entries]

    def directory_inodes(self, ino: int) -> tuple[Inode, Inode]:
        """The inodes of ``.`` and ``..``."""
        if is_snapshot(ino):
            return self._snapshots.directory_inodes(ino)
        with self._db.read() as txn:
            here = tree.get(txn, ino)
            if ino == ROOT_INO:
                return here, here
            names = tree.names_of(txn, ino)
            parent = tree.get(txn, names[0][0]) if names else here
        return here, parent

    async def forget(self, inos: Iterable[int]) -> None:
        """The kernel dropped these inodes: if they have no name either, nothing can reach them any more.

        Nobody waits for that, so one call at a time does the work, for all that have gathered meanwhile.
        """
        services = self._services
        for ino in inos:
            if ino not in services.orphans:
                continue
            if services.contents.peek(ino) is None:
                services.orphans.discard(ino)
                self._forgotten.append(ino)
            else:
                self._forgotten_in_use.add(ino)  # its upload is still under way, or its last close
        if self._is_reaping:
            return
        self._is_reaping = True
        try:
            while self._forgotten:
                await self._reap_forgotten()
        finally:
            self._is_reaping = False

    async def _forget_idle(self, ino: int) -> None:
        """Its last user has left: if the kernel had forgotten it before, it can go now."""
        if ino in self._forgotten_in_use:
            self._forgotten_in_use.discard(ino)
            await self.forget([ino])

    async def _reap_forgotten(self) -> None:
        batch, self._forgotten = self._forgotten[:FORGET_BATCH], self._forgotten[FORGET_BATCH:]

        def reap(txn: WriteTransaction) -> list[Inode]:
            return [inode for ino in batch if (inode := tree.reap(txn, ino)) is not None]

        inodes = await self._db.commit(reap, hurried=False, lazy=True)
        if self._services.lend is not None:
            await self._db.settled()
            async with trio.open_nursery() as nursery:
                for inode in inodes:
                    nursery.start_soon(self._drop, inode)
        self._services.publisher.note_deletion()

    async def _drop(self, inode: Inode) -> None:
        try:
            await self._services.contents.drop_unlinked(inode, is_reaped=True)
        except TierfsError as error:
            log.warning("bytes without a name were not dropped", ino=inode.ino, reason=str(error))

    def check_writable(self, parent: int, name: bytes) -> None:
        """Raises ``ReadOnly``, ``NotPermitted``."""
        if self._services.settings.read_only:
            raise ReadOnly("mounted read-only")
        if is_snapshot(parent):
            raise ReadOnly("a snapshot cannot be changed")
        if parent == ROOT_INO and name == RESERVED_NAME:
            raise NotPermitted("the name .tierfs is reserved at the root of the mount")


def new_file_mode(mode: int) -> int:
    """The mode of a file made by open(O_CREAT): a regular file whatever type bits came along."""
    return stat.S_IFREG | stat.S_IMODE(mode)


def is_write(flags: int) -> bool:
    """Whether open flags ask for writing."""
    return flags & os.O_ACCMODE != os.O_RDONLY
