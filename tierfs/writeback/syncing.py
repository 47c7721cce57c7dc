"""From memory to the disk, asked for or not: the stage between a write and its upload.

Bytes are in memory when write(2) returns: in the page cache of the write tier, which takes them as fast as
memory does and which no death of a process empties. An fsync brings them to the disk, and so does an upload
before anybody sees its object. What waits for its upload for long (the store is down, there is much before
it, a checkpoint is not whole yet) would be lost in a power cut for as long. So a file that has been closed is
synced here a little later, whatever the store does.

Trio thread only.
"""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import structlog
import trio

from tierfs.cache.residency import Cache
from tierfs.errors import NotFound, TierfsError
from tierfs.namespace import records, schema
from tierfs.namespace.db import Database
from tierfs.writeback.content import FileContent
from tierfs.writeback.content_table import ContentTable

log = structlog.get_logger(__name__)

SYNC_AFTER_S: Final = 2.0
"""After the last close: what is removed, written again or uploaded by then needs no sync of its own."""
RETRY_S: Final = 30.0
BURST_PAUSE_S: Final = 0.5
LOOKS: Final = 20
LOOK_PAUSE_S: Final = 0.05
AT_ONCE: Final = 4
"""Files; their commits share syncs of the namespace."""


class BackgroundSync:
    """See the module docstring. ``is_burst``: changes come so fast that this had better wait."""

    def __init__(
        self, db: Database, cache: Cache, contents: ContentTable, is_burst: Callable[[], bool]
    ) -> None:
        self._db = db
        self._cache = cache
        self._contents = contents
        self._is_burst = is_burst
        self._due: list[tuple[float, int, int]] = []
        """A heap of (when, inode, how often to look again should it be open)."""
        self._known: set[int] = set()
        self._wanted = trio.Event()
        self._hurry = trio.Event()
        self._free = trio.Semaphore(AT_ONCE)

    def note(self, ino: int, delay_s: float = SYNC_AFTER_S) -> None:
        """Nobody writes that file any more, for now."""
        if ino not in self._known:
            self._known.add(ino)
            heapq.heappush(self._due, (trio.current_time() + delay_s, ino, 0))
            self._wanted.set()
            if self._due[0][1] == ino:
                self._hurry.set()

    def hurry(self, ino: int) -> None:
        """It has replaced another file, which a power cut would not bring back: sync it at once, once closed.

        Programs that save into a new file and rename it over the old one, without fsync, rely on that: ext4
        does the same (``auto_da_alloc``, ext4(5)).
        """
        heapq.heappush(self._due, (trio.current_time(), ino, LOOKS))
        self._wanted.set()
        self._hurry.set()

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._wanted.wait()
                self._wanted = trio.Event()
                while self._due:
                    self._hurry = trio.Event()
                    # Or until something is due before that.
                    with trio.move_on_at(self._due[0][0]):
                        await self._hurry.wait()
                    if self._is_burst():
                        await trio.sleep(BURST_PAUSE_S)
                    else:
                        await self._start_one(nursery)

    async def _start_one(self, nursery: trio.Nursery) -> None:
        await self._free.acquire()
        _, ino, looks = heapq.heappop(self._due)
        self._known.discard(ino)
        content = self._contents.peek(ino)
        is_open = content is not None and content.writers > 0
        if self._needs_sync(ino) and not is_open:
            nursery.start_soon(self._sync_and_free, ino)
            return
        self._free.release()
        if is_open and looks:
            # The kernel tells of a close a little later than of the rename that came after it.
            heapq.heappush(self._due, (trio.current_time() + LOOK_PAUSE_S, ino, looks - 1))

    async def _sync_and_free(self, ino: int) -> None:
        try:
            await self._sync(ino)
        finally:
            self._free.release()

    def _needs_sync(self, ino: int) -> bool:
        content = self._contents.peek(ino)
        if content is not None and content.live is not None and content.live.is_behind:
            return True
        with self._db.read() as txn:
            inode = records.find_inode(txn, ino)
        return (
            inode is not None
            and inode.is_regular
            and bool(inode.flags & schema.DATA_LOCAL)
            and self._cache.is_unsynced(inode.content_id)
        )

    async def _sync(self, ino: int) -> None:
        try:
            async with self._contents.used(ino) as content:
                if content.writers or content.unlinked:
                    return  # there will be another close, or none that matters
                await self._contents.passthrough.pull(content)
                # Under the lock it does not become a clean copy, nor another content.
                async with content.lock:
                    staging = content.staging
                    if staging is None or not staging.is_unsynced:
                        return
                    await make_durable(self._contents, content)
        except NotFound:
            return
        except TierfsError as error:
            log.warning("a closed file is not on the disk yet", ino=ino, reason=str(error))
            self.note(ino, RETRY_S)


async def make_durable(contents: ContentTable, content: FileContent) -> None:
    """Bytes, size and name survive a power cut when this returns. Raises what ``Staging.sync`` raises.

    The disk gets bytes and names at once: before this returns neither is promised. The size is that of the
    staging file, which ``recovery`` believes, so a file that has grown needs no commit of its own: the names
    that were committed before are mostly durable already. Of one that has not, fdatasync leaves the time out.
    """
    failures: list[TierfsError] = []

    async def catch(work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except TierfsError as error:
            failures.append(error)

    async with trio.open_nursery() as nursery:
        if content.staging is not None:
            nursery.start_soon(catch, content.staging.sync)
        nursery.start_soon(catch, partial(contents.size_and_times.save_durably, content))
    if failures:
        raise failures[0]
