"""What a listing of the bucket changed under the kernel's eyes.

``refresher`` reports names that mean something else now, or nothing. The kernel is told, and the inode
behind the old name goes: at once if nobody has it open, else when its last user leaves. With a native front
files are open that are not open here; there the inode, and what the tiers have of it, stays until the kernel
forgets it, or the front says that the kernel has never heard of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import structlog
import trio

from tierfs.errors import NotFound
from tierfs.fs.kernel import KernelCaches
from tierfs.namespace import tree
from tierfs.namespace.db import Database
from tierfs.namespace.listing import Invalidation
from tierfs.namespace.transaction import WriteTransaction
from tierfs.writeback.content_table import ContentTable

log = structlog.get_logger(__name__)


class RemoteChanges:
    """``report`` may be called from inside a request; ``run`` is a task of the mount."""

    def __init__(self, db: Database, contents: ContentTable, kernel: KernelCaches) -> None:
        self._db = db
        self._contents = contents
        self._kernel = kernel
        self._gone: set[int] = set()
        self.keep: Callable[[int], bool] = lambda ino: False
        """(inode without a name): whether it stays, for a reader whom the engine does not know."""
        self._wake = trio.Event()

    def report(self, changes: Sequence[Invalidation]) -> None:
        """Names that changed in the bucket. Never blocks."""
        for change in changes:
            self._kernel.entry_gone(change.parent_ino, change.name)
            if change.old_ino:
                self._gone.add(change.old_ino)
        if self._gone:
            self._wake.set()

    async def settle(self, changes: Sequence[Invalidation]) -> None:
        """The same for names that the engine itself has changed, many at a time: they are dropped at once."""
        # First, so that no FORGET can come before it is known what that is for.
        idle = [ino for ino in {change.old_ino for change in changes} - {0} if await self._give_up(ino)]
        for change in changes:
            self._kernel.entry_gone(change.parent_ino, change.name)
        if idle:
            await self._db.commit(partial(_reap_all, inos=idle))

    async def run(self) -> None:
        """Drop inodes without a name until cancelled."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            gone, self._gone = self._gone, set()
            for ino in gone:
                try:
                    await self._drop(ino)
                except Exception:
                    log.exception("unexpected exception while dropping an inode", ino=ino)

    async def _drop(self, ino: int) -> None:
        if await self._give_up(ino):
            await self._db.commit(partial(tree.reap, ino=ino))

    async def _give_up(self, ino: int) -> bool:
        """Drop the bytes of an inode without a name. True: nobody uses it, it can be reaped."""
        with self._db.read() as txn:
            try:
                inode = tree.get(txn, ino)
            except NotFound:
                return False
        if inode.nlink and not inode.is_dir:
            return False
        if inode.is_regular and self.keep(ino):
            # If the kernel has never heard of it there will be no FORGET; then the front tells so.
            self._kernel.inode_changed(ino, attributes_only=True)
            return False
        await self._contents.drop_unlinked(inode)
        return self._contents.peek(ino) is None


def _reap_all(txn: WriteTransaction, inos: Sequence[int]) -> None:
    for ino in inos:
        tree.reap(txn, ino)
