"""Writes that the kernel passes through to a staging file: counted here, and slowed near the dirty limit.

Nobody asks before such a write. A file is passed through only while the write tier is far from its limit
(``DirtyFiles.takes_direct_writes``); this task looks at the files that are open like this and notes what
they take on the device. Once there is more than the limit allows, it tells the front to *hold* writers: the
kernel asks for ``security.capability`` before it writes, unless it remembers that there is none, and it
forgets that whenever it gets attributes. So a stat(2) of each file, in a worker, makes its next writer ask;
the front hands the question to the engine, and it is answered when something has drained.

What this cannot do is to fail a write: where nothing drains, who has such a file open writes on until the
file system is full.

Trio thread only.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import trio

from tierfs.cache import direct_writes
from tierfs.cache.residency import Cache
from tierfs.errors import NotFound
from tierfs.namespace import tree
from tierfs.namespace.db import Database
from tierfs.writeback.content_table import ContentTable

_LOOK_S = 0.1
_LOOK_WHILE_HELD_S = 0.03
_STAT_THREADS = 2


class DirectWriteThrottle:
    """See the module docstring. ``hold(yes)`` tells the front."""

    def __init__(self, db: Database, cache: Cache, contents: ContentTable, mountpoint: str,
                 hold: Callable[[bool], None]) -> None:
        self._db = db
        self._cache = cache
        self._contents = contents
        self._mountpoint = os.fsencode(mountpoint)
        self._hold = hold
        self._limiter = trio.CapacityLimiter(_STAT_THREADS)
        self._asking: set[int] = set()
        self.is_holding = False
        self.held_count = 0
        """Writes that have been held so far."""

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._contents.passthrough.direct_writes_began.wait()
                inos = self._measure()
                await self._cache.make_room_for_dirty()
                self._cache.look_at_spares()
                self._set_holding(bool(inos) and self._cache.dirty_over_limit)
                if self.is_holding:
                    for ino in inos - self._asking:
                        self._asking.add(ino)
                        nursery.start_soon(self._let_writers_ask, ino)
                await trio.sleep(_LOOK_WHILE_HELD_S if self.is_holding else _LOOK_S)

    def _measure(self) -> set[int]:
        contents = self._contents.passthrough.written_directly()
        for content in contents:
            if content.staging is not None:
                direct_writes.measure(content.staging)
        return {content.ino for content in contents}

    def _set_holding(self, wanted: bool) -> None:
        if wanted != self.is_holding:
            self._hold(wanted)
            self.is_holding = wanted

    async def _let_writers_ask(self, ino: int) -> None:
        """The kernel gets attributes. A worker does that: the answer comes from this thread."""
        try:
            with self._db.read() as txn:
                path = self._mountpoint + b"/" + tree.path_of(txn, ino)
            await trio.to_thread.run_sync(_stat, path, limiter=self._limiter, abandon_on_cancel=True)
        except NotFound:
            return  # it has no name
        finally:
            self._asking.discard(ino)

    async def wait_for_room(self, ino: int) -> None:
        """Somebody is about to write; returns when that may go on."""
        content = self._contents.peek(ino)
        if not self.is_holding or content is None or not content.passed_through:
            return
        self.held_count += 1
        await self._cache.wait_below_dirty_limit()


def _stat(path: bytes) -> None:
    try:
        os.lstat(path)
    except OSError:
        return  # gone, or unmounted: nobody is slowed by that
