"""Every ``FileContent`` in use, by inode: who comes first makes it, who leaves last closes its files.

Owns the table, and what happens to bytes when the last user has left: those of an inode without a name go.
What one can do with a content in use is in the collaborators that hang here: ``local_copies`` (make it
local), ``changes`` (write, truncate), ``passthrough`` (opens that do not pass here) and ``size_and_times``
(record them).

Trio thread only. While the staging file of an inode is being opened or closed, whoever wants the content
waits (``_changing``), so that there is one ``FileContent`` and one ``Staging`` for each inode. No await
between the last use given back and the content leaving the table.

Raises ``NotFound`` for an inode that is gone, and what ``Cache.open_staging`` and ``Staging.discard`` raise.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import trio

from tierfs.cache.residency import Cache
from tierfs.cache.staging import Staging
from tierfs.errors import NotFound
from tierfs.namespace import publish, schema, tree
from tierfs.namespace.db import Database
from tierfs.types import NO_CONTENT, ContentId, Inode, ObjectRef
from tierfs.writeback.changes import Changes
from tierfs.writeback.content import FileContent
from tierfs.writeback.local_copy import LocalCopies
from tierfs.writeback.passthrough import Passthrough
from tierfs.writeback.size_and_times import SizeAndTimes


class ContentTable:
    """See the module docstring. ``now_ns``: the time that a changed file gets."""

    def __init__(self, db: Database, cache: Cache, now_ns: Callable[[], int]) -> None:
        self._db = db
        self._cache = cache
        self.local_copies = LocalCopies(db, cache, now_ns)
        self.passthrough = Passthrough(cache, self.local_copies)
        self.changes = Changes(self.local_copies, self.passthrough, now_ns)
        self.size_and_times = SizeAndTimes(db, cache)
        self._contents: dict[int, FileContent] = {}
        self._changing: dict[int, trio.Event] = {}
        """Inodes whose staging file is being opened or closed right now."""
        self.before_look: Callable[[], None] = _nothing
        """Takes in what happened on another thread; called before anybody looks for contents in use."""
        self.on_idle: Callable[[int], Awaitable[None]] = _idle
        """Awaited with an inode without a name whose last user has left."""

    def __len__(self) -> int:
        return len(self._contents)

    def peek(self, ino: int) -> FileContent | None:
        """The content in use for that inode, or None. Does not count as a use."""
        self.before_look()
        return self._contents.get(ino)

    def overlay(self, inode: Inode) -> Inode:
        """``inode`` with the size and times that have not reached the namespace yet."""
        content = self.peek(inode.ino)
        if content is not None and content.passed_through:
            self.passthrough.notice_direct_writes(content)
        if content is None or not content.unsaved:
            return inode
        # A rename or chmod may be newer than the last write.
        return schema.replace_inode(
            inode,
            size_bytes=content.size_bytes,
            mtime_ns=content.mtime_ns,
            ctime_ns=max(inode.ctime_ns, content.ctime_ns),
        )

    async def acquire(self, ino: int) -> FileContent:
        """The content of that regular file, one use counted; ``release`` it. Raises ``NotFound``."""
        self.before_look()
        while (event := self._changing.get(ino)) is not None:
            await event.wait()
        content = self._contents.get(ino)
        if content is None:
            content = await self._open(ino)
        content.users += 1
        return content

    def acquire_new(self, inode: Inode) -> FileContent:
        """``acquire`` for a regular file that has just been made: empty.

        Whoever looks through the namespace may have found it before, between the commit and this call.
        """
        content = self._contents.get(inode.ino)
        if content is None:
            content = self._contents[inode.ino] = _content_of(inode, None)
        content.users += 1
        return content

    @asynccontextmanager
    async def used(self, ino: int) -> AsyncIterator[FileContent]:
        """``acquire``, and ``release`` in the end."""
        content = await self.acquire(ino)
        try:
            yield content
        finally:
            await self.release(content)

    async def _open(self, ino: int) -> FileContent:
        with self._db.read() as txn:
            inode = tree.get(txn, ino)
            ref = None if inode.flags & schema.DATA_LOCAL else publish.ref_of(txn, inode)
        content = _content_of(inode, ref)
        if not content.local:
            self._contents[ino] = content
            return content
        with self._changing_now(ino):
            content.staging = await self._cache.open_staging(content.content_id)
            if content.staging is not None and content.staging.size_bytes != content.size_bytes:
                # The file on disk is the truth: the record is only written at flush, fsync and close.
                content.size_bytes = content.staging.size_bytes
                content.unsaved = True
            # Not ours if ``acquire_new`` was called meanwhile.
            return self._contents.setdefault(ino, content)

    @contextmanager
    def _changing_now(self, ino: int) -> Iterator[None]:
        event = self._changing[ino] = trio.Event()
        try:
            yield
        finally:
            del self._changing[ino]
            event.set()

    def refresh_ref(self, content: FileContent) -> bool:
        """The object of a clean content got another key or ETag by our own doing (a move, a change of mode).

        True if ``content`` names another version now. The bytes are the same.
        """
        with self._db.read() as txn:
            try:
                inode = tree.get(txn, content.ino)
            except NotFound:
                return False
            ref = publish.ref_of(txn, inode)
        if content.local or ref is None or ref == content.ref or ref.content_id != content.content_id:
            return False
        content.ref = ref
        return True

    async def release(self, content: FileContent) -> None:
        """Give back one use; the last one closes files, and drops the bytes of an unlinked inode."""
        content.users -= 1
        if content.users:
            return
        self.passthrough.end_passing(content)
        if self._contents.get(content.ino) is content:
            del self._contents[content.ino]
        staging, content.staging = content.staging, None
        if staging is not None and not content.unlinked and staging.close_now():
            return
        with self._changing_now(content.ino):
            if content.unlinked and not content.linkable:
                await self._drop(content.content_id, staging)
            elif staging is not None:
                await staging.close()
        if content.unlinked:
            await self.on_idle(content.ino)

    async def _drop(
        self, content_id: ContentId, staging: Staging | None, *, is_reaped: bool = False
    ) -> None:
        if staging is not None:
            if not is_reaped:
                # A power cut that brought the name back would find its bytes gone, fsynced or not.
                await self._db.sync()
            await staging.discard()
        elif content_id != NO_CONTENT:
            await self._cache.forget(content_id)

    async def drop_unlinked(self, inode: Inode, *, is_reaped: bool = False) -> None:
        """The last name of ``inode`` is gone: its bytes go now, or when the last user leaves.

        ``is_reaped``: the inode itself has gone, durably.
        """
        if not inode.is_regular:
            return
        self.before_look()
        while (event := self._changing.get(inode.ino)) is not None:
            await event.wait()
        content = self._contents.get(inode.ino)
        if content is not None:
            content.unlinked = True
        elif inode.flags & schema.DATA_LOCAL:
            # Who opens it meanwhile has to wait, and finds that its bytes are gone.
            with self._changing_now(inode.ino):
                staging = await self._cache.open_staging(inode.content_id)
                if staging is not None:
                    await self._drop(inode.content_id, staging, is_reaped=is_reaped)
        else:
            await self._drop(inode.content_id, None)


def _content_of(inode: Inode, ref: ObjectRef | None) -> FileContent:
    return FileContent(
        ino=inode.ino,
        content_id=inode.content_id,
        size_bytes=inode.size_bytes,
        mtime_ns=inode.mtime_ns,
        ctime_ns=inode.ctime_ns,
        local=bool(inode.flags & schema.DATA_LOCAL),
        ref=ref,
    )


def _nothing() -> None:
    return None


async def _idle(ino: int) -> None:
    await trio.lowlevel.checkpoint()
