"""When which inode is published: announcements, delays, and what is found in the namespace without one.

``note`` says that an inode may need publishing, after a delay (so that write, close, rename costs one
upload); ``dispatch`` starts what is due, one task per inode and so many at once as uploads may be. Of many
that are announced together only some wait in memory; the others, and rows that nobody announced, are found
in the namespace, batch by batch.

Trio thread only. Nothing is awaited between the look at what is running and the start of a task, so two
never work on one inode.

Raises nothing of its own; what ``publish_one`` raises ends the nursery.
"""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable, Collection, Container, Iterable

import trio

from tierfs.config import Settings
from tierfs.namespace import publish
from tierfs.namespace.db import Database
from tierfs.namespace.schema import DirtyRow
from tierfs.writeback.backlog import Backlog
from tierfs.writeback.burst import Burst
from tierfs.writeback.in_flight import InodesInFlight

RETRY_SOON_S = 0.2
RESCAN_S = 10.0
SCAN_BATCH = 1000
MOST_QUEUED = 10_000
"""Of many that are announced together no more wait in memory; the others are found in the namespace."""


class Schedule:
    """See the module docstring."""

    def __init__(
        self,
        db: Database,
        backlog: Backlog,
        running: InodesInFlight,
        failing: Collection[int],
        settings: Settings,
    ) -> None:
        """``failing``: the inodes whose last try failed, as they are at any moment."""
        self._db = db
        self._backlog = backlog
        self._running = running
        self._failing = failing
        self._settings = settings
        self._due: list[tuple[float, int]] = []
        self._due_at: dict[int, float] = {}
        self._again: set[int] = set()
        """Inodes that came to be due while they were being published."""
        self._wake = trio.Event()
        self._looks_at = float("inf")
        """When ``dispatch`` looks at ``_due`` next, if nothing wakes it up before."""
        self._burst = Burst()
        self._left_out_after: int | None = None
        """Inodes behind that number may not be in the queue although they are dirty; None: all are."""
        self.is_awaited: Callable[[int], bool] = lambda ino: False
        """Whether somebody waits for that inode to be published."""
        self.on_changed: Callable[[int], None] = lambda ino: None
        """Called with an inode that was announced, or whose publication has ended."""

    def __contains__(self, ino: int) -> bool:
        return ino in self._due_at

    @property
    def waiting(self) -> Collection[int]:
        """The inodes in the queue."""
        return self._due_at.keys()

    def note(self, ino: int, delay_s: float | None = None) -> None:
        """``ino`` may have to be published, not before ``delay_s`` (default: the upload delay)."""
        self.on_changed(ino)
        now = trio.current_time()
        delay = self._usual_delay_s(ino, now) if delay_s is None else delay_s
        at = now + delay
        known = self._due_at.get(ino)
        if delay_s is not None and known is not None and known <= at:
            return
        self._due_at[ino] = at
        heapq.heappush(self._due, (at, ino))
        if at < self._looks_at:
            self._wake.set()

    def is_burst(self) -> bool:
        """Changes come so fast that what nobody waits for had better wait."""
        return self._burst.lasts(trio.current_time())

    def _usual_delay_s(self, ino: int, now: float) -> float:
        delay = self._settings.upload_delay_s + self._burst.delay_s(now)
        # A close, or a change during the upload, must not put off what a flush has hurried.
        return min(delay, RETRY_SOON_S) if self.is_awaited(ino) else delay

    def note_now(self, ino: int) -> None:
        """``ino`` has to be published soon: somebody waits for it."""
        self.note(ino, 0.0)

    def note_many(self, inos: Iterable[int]) -> None:
        """All of these, which have dirty rows, have to be published; perhaps there are many more to come."""
        for ino in inos:
            if len(self._due_at) - len(self._failing) >= MOST_QUEUED:
                self._left_out_after = 0
                return
            self.note(ino)

    async def note_all(self, delay_s: float, *, but: Container[int] = ()) -> None:
        """Put every inode that has a dirty row into the queue, except ``but``."""
        after = 0
        while True:
            with self._db.read() as txn:
                rows = publish.dirty_entries(txn, after_ino=after, limit=SCAN_BATCH)
            if not rows:
                return
            for row in rows:
                if row.ino not in but:
                    self.note(row.ino, delay_s)
            after = rows[-1].ino
            await trio.lowlevel.checkpoint()

    def note_unless_known(self, ino: int) -> None:
        """Put it into the queue, unless it is there, is being published, or is still being written."""
        if ino not in self._due_at and ino not in self._running and not self._backlog.is_being_written(ino):
            self.note(ino, 0.0)

    def note_ended(self, ino: int) -> None:
        """Its publication has ended, in whichever way, and it is not among the running ones any more."""
        self.on_changed(ino)
        if ino in self._again:
            self._again.discard(ino)
            self.note(ino, 0.0)
        self._wake.set()

    async def dispatch(self, nursery: trio.Nursery, publish_one: Callable[[int], Awaitable[None]]) -> None:
        """Until cancelled: start ``publish_one(ino)`` for what is due; then ``note_ended`` is called."""
        rescan_at = trio.current_time() + RESCAN_S
        while True:
            self._wake = trio.Event()
            # What fails stays in the queue, and keeps nothing out of it.
            if self._left_out_after is not None and len(self._due_at) - len(self._failing) < SCAN_BATCH:
                self._note_left_out(self._left_out_after)
            pause = min(self._start_due(nursery, publish_one), RESCAN_S)
            self._looks_at = trio.current_time() + pause
            with trio.move_on_after(pause):
                await self._wake.wait()
            if trio.current_time() >= rescan_at:
                rescan_at = trio.current_time() + RESCAN_S
                self._note_forgotten()

    def _start_due(self, nursery: trio.Nursery, publish_one: Callable[[int], Awaitable[None]]) -> float:
        """Start what is due while there is room; seconds until there may be more to do."""
        while self._due:
            at, ino = self._due[0]
            if self._due_at.get(ino) != at:
                heapq.heappop(self._due)
                continue
            if len(self._running) >= 2 * self._settings.upload_concurrency:
                return float("inf")
            wait = at - trio.current_time()
            if wait > 0:
                return wait
            heapq.heappop(self._due)
            del self._due_at[ino]
            if self._running.add(ino):
                nursery.start_soon(publish_one, ino)
            else:
                self._again.add(ino)
        return float("inf")

    def _note_forgotten(self) -> None:
        """Rows that nobody announced, one batch: marks made as a side effect of another change."""
        self._note_batch()

    def _note_left_out(self, after: int) -> None:
        rows = self._note_batch(after)
        self._left_out_after = rows[-1].ino if len(rows) == SCAN_BATCH else None

    def _note_batch(self, after: int = 0) -> list[DirtyRow]:
        with self._db.read() as txn:
            rows = publish.dirty_entries(txn, after, SCAN_BATCH)
        for row in rows:
            if not self._backlog.is_kept_for_readers(row):
                self.note_unless_known(row.ino)
        return rows
