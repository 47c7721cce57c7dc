"""Empty dirty files made in advance, so that the thread that commits can give one to whoever creates a file.

A new file that is passed through needs its staging file before its create is answered, and that answer waits
for nobody but the commit. Few are kept until somebody found none: without one, each write asks the engine,
which takes longer than making a file in advance, many at a time. They are named like dirty contents, so that
one that was given away is found after a crash; the others belong to no inode, and are removed then.

``take`` and ``give_back`` may be called from any thread, all else from the trio thread.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from dataclasses import dataclass

import trio

from tierfs.cache import device
from tierfs.cache.dirty import DirtyFiles, create_file
from tierfs.errors import CacheError
from tierfs.types import ContentId, new_content_id

_FIRST_KEPT = 32
_MOST_KEPT = 256
_PAUSE_S = 0.02
_NAMES_PAUSE_S = 1.0
"""Between two syncs of the directory: where thousands of files are created, nobody waits for their names."""


@dataclass(frozen=True, slots=True)
class Spare:
    """One of them. The descriptor belongs to whoever has taken it; it cannot be used to write."""

    content_id: ContentId
    descriptor: int
    identity: tuple[int, int]
    """(device, inode)"""
    batch: int
    """Those with the same number were made together."""


class Spares:
    """See the module docstring."""

    def __init__(self, dirty: DirtyFiles) -> None:
        self._dirty = dirty
        self._ready: deque[Spare] = deque()
        self._kept = _FIRST_KEPT
        self._usable = False
        self._wanted = trio.Event()
        self._batches = 0
        self._named_batches = 0
        """Of these the names are durable."""
        self._unnamed = trio.Event()

    def is_named(self, spare: Spare) -> bool:
        """Its name is durable, so that a sync of its bytes is enough."""
        return spare.batch <= self._named_batches

    def take(self) -> Spare | None:
        """None: there is none, or nobody should write without asking now."""
        if not self._usable:
            return None
        try:
            return self._ready.popleft()
        except IndexError:
            self._kept = min(2 * self._kept, _MOST_KEPT)
            return None

    def give_back(self, spare: Spare) -> None:
        """It was not needed."""
        self._ready.append(spare)

    def look(self) -> None:
        """One may have been taken, and dirty contents may have grown."""
        self._usable = self._dirty.takes_direct_writes
        if len(self._ready) < self._kept // 2:
            self._wanted.set()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Make them, until cancelled. Started: the first file that is created can have one."""
        self.look()
        await self._refill()
        await self._sync_names()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_names)
            task_status.started()
            while True:
                await trio.sleep(_PAUSE_S)
                self.look()
                await self._wanted.wait()
                self._wanted = trio.Event()
                await self._refill()

    async def _keep_names(self) -> None:
        while True:
            await self._unnamed.wait()
            self._unnamed = trio.Event()
            if self._named_batches < self._batches:
                await self._sync_names()
                await trio.sleep(_NAMES_PAUSE_S)

    async def _sync_names(self) -> None:
        made = self._batches
        with contextlib.suppress(CacheError):  # then the first sync of each sees to its name
            await self._dirty.call(device.sync_directory, self._dirty.directory)
            self._named_batches = made

    async def _refill(self) -> None:
        if not self._usable or len(self._ready) >= self._kept // 2:
            return
        with contextlib.suppress(CacheError):  # the tier's health knows; creates do without
            batch = self._batches + 1
            self._ready += await self._dirty.call(_make, self._dirty, self._kept - len(self._ready), batch)
            self._batches = batch
            self._unnamed.set()

    def close(self) -> None:
        """The last call: what nobody has taken goes."""
        self._usable = False
        while self._ready:
            spare = self._ready.popleft()
            os.close(spare.descriptor)
            device.unlink_if_there(self._dirty.path_of(spare.content_id))


def _make(dirty: DirtyFiles, count: int, batch: int) -> list[Spare]:
    """Worker thread. Raises ``OSError``."""
    made = []
    for _ in range(count):
        content_id = new_content_id()
        path = dirty.path_of(content_id)
        os.close(create_file(path))
        descriptor = device.open_to_lend(path)
        made.append(Spare(content_id, descriptor, device.identity(descriptor), batch))
    return made
