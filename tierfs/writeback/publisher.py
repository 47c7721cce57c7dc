"""Make the bucket hold what the namespace says: uploads, moves, attribute changes and deletions.

One task per inode at a time, ``upload_concurrency`` tasks at once. ``note`` says that an inode may need
publishing, after a delay (so that write, close, rename costs one upload); everything else is found out
from the rows at that moment. A failure is kept in ``failures`` and tried again with a growing pause; it
never stops the others.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

import structlog
import trio

from tierfs.config import Settings
from tierfs.errors import NotFound, StoreError, StoreUnsupported, TierfsError
from tierfs.namespace import publish, schema, tree
from tierfs.namespace.db import Database
from tierfs.namespace.transaction import WriteTransaction
from tierfs.writeback.backlog import Awaited, Backlog, Totals
from tierfs.writeback.content_table import ContentTable
from tierfs.writeback.deletions import Deletions, Sweeps
from tierfs.writeback.in_flight import InodesInFlight, NotYet
from tierfs.writeback.objects import ObjectWriter
from tierfs.writeback.parking import Parking
from tierfs.writeback.upload import ContentChanged

log = structlog.get_logger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
RETRY_SOON_S = 0.2
RESCAN_S = 10.0
HELD_LOOK_S = 5.0
BLOCKED_ATTEMPTS = 50
SCAN_BATCH = 1000
LOOK_S = 0.5
LOOK_SHARE = 10.0
"""Who waits for the backlog walks it this seldom: not more often, and for a tenth of the time at most."""
MOST_QUEUED = 10_000
"""Of many that are announced together no more wait in memory; the others are found in the namespace."""
_published_here: ContextVar[int | None] = ContextVar("published_here", default=None)
"""The inode that this task publishes."""
BURST_WINDOW_S = 0.25
BURST_PER_S = 600
"""Announcements; making and closing one file are two of them."""
BURST_DELAY_S = 5.0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an inode is not in the store yet, and how often that was tried."""

    path: str
    message: str
    attempts: int


class Burst:
    """Tells whether changes come so fast that uploads had better wait until that is over.

    An upload costs several times what making a small file costs, of the same processors; and many a file that
    is made in a burst does not live for long.
    """

    def __init__(self) -> None:
        self._since = 0.0
        self._count = 0
        self._until = 0.0

    def delay_s(self, now: float) -> float:
        """A change is announced at ``now``; how much longer than usual its upload had better wait."""
        self._count += 1
        if now - self._since >= BURST_WINDOW_S:
            if self._count > BURST_PER_S * (now - self._since):
                self._until = now + 2 * BURST_WINDOW_S
            self._since, self._count = now, 0
        return BURST_DELAY_S if self.lasts(now) else 0.0

    def lasts(self, now: float) -> bool:
        """Whether one is under way at ``now``, as far as announcements have told."""
        return now < self._until


class Publisher:
    """See the module docstring. Trio thread only."""

    def __init__(
        self,
        db: Database,
        contents: ContentTable,
        writer: ObjectWriter,
        parking: Parking,
        deletions: Deletions,
        inodes: InodesInFlight,
        settings: Settings,
        now_ns: Callable[[], int],
    ) -> None:
        self._db = db
        self._contents = contents
        self._writer = writer
        self._parking = parking
        self._deletions = deletions
        self._settings = settings
        self._now_ns = now_ns
        self._due: list[tuple[float, int]] = []
        self._due_at: dict[int, float] = {}
        self._running = inodes
        self._again: set[int] = set()
        self._starving: set[int] = set()
        """Inodes that are being published, and wait for room in the write tier."""
        self._blocked_attempts: dict[int, int] = {}
        self._make_way: set[int] = set()
        self._wake = trio.Event()
        self._looks_at = float("inf")
        """When ``_dispatch`` looks at ``_due`` next, if nothing wakes it up before."""
        self._progress = trio.Event()
        self._burst = Burst()
        self._backlog = Backlog(db, contents)
        self._awaited: list[Awaited] = []
        """One for each ``settle`` that waits."""
        self.on_changed: Callable[[int], None] = lambda ino: None
        """Called with an inode that was announced, or whose publication has ended."""
        self.on_deletion: Callable[[], None] = lambda: None
        self._left_out_after: int | None = None
        """Inodes behind that number may not be in the queue although they are dirty; None: all are."""
        self.announces: Callable[[], bool] = lambda: False
        """Whether something is still being announced, inode by inode, that a drain has to wait for."""
        self._hurried_by = 0
        """How many wait for the backlog, so that nothing is held back."""
        self.holds: Callable[[int], bool] = lambda ino: False
        """Whether an inode had better wait: it is in a directory that is being written, under another name
        than it will have. Given by ``checkpoint``."""
        self.failures: dict[int, Failure] = {}
        self.published_count = 0

    @property
    def conflicts(self) -> int:
        """Files that were moved aside because another node had written their object."""
        return self._writer.conflicts

    def note(self, ino: int, delay_s: float | None = None) -> None:
        """``ino`` may have to be published, not before ``delay_s`` (default: the upload delay)."""
        self.on_changed(ino)
        now = trio.current_time()
        delay = self._usual_delay_s(ino, now) if delay_s is None else delay_s
        at = now + delay
        known = self._due_at.get(ino)
        if known is not None and (known <= at if delay_s is not None else False):
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
        is_awaited = any(ino in awaited.sizes for awaited in self._awaited)
        return min(delay, RETRY_SOON_S) if is_awaited else delay

    def note_now(self, ino: int) -> None:
        """``ino`` has to be published soon: somebody waits for it."""
        self.note(ino, 0.0)

    def note_many(self, inos: Iterable[int]) -> None:
        """All of these, which have dirty rows, have to be published; perhaps there are many more to come."""
        for ino in inos:
            if len(self._due_at) - len(self.failures) >= MOST_QUEUED:
                self._left_out_after = 0
                return
            self.note(ino)

    def note_deletion(self) -> None:
        """A key has been doomed; it goes after the upload delay."""
        self._deletions.note(self._settings.upload_delay_s)
        self.on_deletion()

    async def run(self) -> None:
        """Work until cancelled. Rows that an earlier run left behind come first."""
        if self._settings.read_only:
            return
        await self._note_all(0.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._deletions.run)
            await self._dispatch(nursery)

    async def _dispatch(self, nursery: trio.Nursery) -> None:
        rescan_at = trio.current_time() + RESCAN_S
        while True:
            self._wake = trio.Event()
            # What fails stays in the queue, and keeps nothing out of it.
            if self._left_out_after is not None and len(self._due_at) - len(self.failures) < SCAN_BATCH:
                self._note_left_out(self._left_out_after)
            pause = min(self._start_due(nursery), RESCAN_S)
            self._looks_at = trio.current_time() + pause
            with trio.move_on_after(pause):
                await self._wake.wait()
            if trio.current_time() >= rescan_at:
                rescan_at = trio.current_time() + RESCAN_S
                self._note_forgotten()

    def _start_due(self, nursery: trio.Nursery) -> float:
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
                nursery.start_soon(self._publish_in_background, ino)
            else:
                self._again.add(ino)
        return float("inf")

    def _note_forgotten(self) -> None:
        """Rows that nobody announced, one batch: marks made as a side effect of another change."""
        with self._db.read() as txn:
            rows = publish.dirty_entries(txn, limit=SCAN_BATCH)
        for row in rows:
            if not self._backlog.is_kept_for_readers(row):
                self._note_unless_known(row.ino)

    def _note_left_out(self, after: int) -> None:
        with self._db.read() as txn:
            rows = publish.dirty_entries(txn, after, SCAN_BATCH)
        self._left_out_after = rows[-1].ino if len(rows) == SCAN_BATCH else None
        for row in rows:
            if not self._backlog.is_kept_for_readers(row):
                self._note_unless_known(row.ino)

    def _note_unless_known(self, ino: int) -> None:
        if ino not in self._due_at and ino not in self._running and not self._backlog.is_being_written(ino):
            self.note(ino, 0.0)

    async def _note_all(self, delay_s: float) -> None:
        """Put every inode that has a dirty row into the queue."""
        after = 0
        while True:
            with self._db.read() as txn:
                rows = publish.dirty_entries(txn, after_ino=after, limit=SCAN_BATCH)
            if not rows:
                return
            for row in rows:
                self.note(row.ino, delay_s)
            after = rows[-1].ino
            await trio.lowlevel.checkpoint()

    async def _publish_in_background(self, ino: int) -> None:
        try:
            await self._publish(ino, force=False)
        except ContentChanged:
            self.note(ino)
        except NotYet:
            # At no fixed time: two that stand in each other's way must not always meet.
            self.note(ino, RETRY_SOON_S * random.uniform(0.5, 1.5))
        except StoreUnsupported as error:
            self._blocked(ino, error)
        except TierfsError as error:
            self._failed(ino, error)
        except Exception:
            log.exception("unexpected exception while publishing", ino=ino)
            self._failed(ino, TierfsError("unexpected exception, see the log"))
        finally:
            self._finished(ino)

    def _blocked(self, ino: int, error: StoreUnsupported) -> None:
        """A store of directories cannot hold ``x`` beside ``x/y``: what was there has to go first."""
        attempts = self._blocked_attempts.get(ino, 0) + 1
        if attempts > BLOCKED_ATTEMPTS:
            self._blocked_attempts.pop(ino, None)
            self._failed(ino, error)
            return
        self._blocked_attempts[ino] = attempts
        self._make_way.update({ino} if attempts > 1 else ())
        self._deletions.note(0.0)
        self.note(ino, RETRY_SOON_S)

    def _finished(self, ino: int) -> None:
        self._running.discard(ino)
        for awaited in self._awaited:
            awaited.ended.add(ino)
        self.on_changed(ino)
        if ino in self._again:
            self._again.discard(ino)
            self.note(ino, 0.0)
        if self._deletions.waiting:
            self._deletions.note(0.0)
        self._wake.set()
        self.note_progress()

    def is_publishing(self, ino: int) -> bool:
        """Its object may be getting another key or ETag right now, or soon."""
        return ino in self._running or ino in self._due_at

    @property
    def progress(self) -> trio.Event:
        """Set when the backlog has shrunk the next time."""
        return self._progress

    def note_progress(self) -> None:
        """Wake whoever waits for the backlog to shrink."""
        self._progress.set()
        self._progress = trio.Event()

    def _failed(self, ino: int, error: TierfsError) -> None:
        known = self.failures.get(ino)
        attempts = known.attempts + 1 if known else 1
        with self._db.read() as txn:
            try:
                path = tree.path_of(txn, ino).decode("utf-8", "backslashreplace")
            except NotFound:
                self.failures.pop(ino, None)
                return
        if known is None or known.message != str(error):
            log.warning("not in the store yet, will be tried again", path=path, reason=str(error))
        self.failures[ino] = Failure(path, str(error), attempts)
        self.note(ino, min(FIRST_PAUSE_S * 2 ** (attempts - 1), LONGEST_PAUSE_S))

    async def publish_now(self, ino: int) -> None:
        """Publish that inode before returning (``fsync=remote``, write-through).

        Raises ``StoreError``. Returns at once when there is nothing to do.
        """
        while not self._running.add(ino):
            await self._progress.wait()
        try:
            for _ in range(3):
                try:
                    await self._publish(ino, force=True)
                    return
                except (ContentChanged, NotYet):
                    await trio.sleep(RETRY_SOON_S)
            raise StoreError("the file kept changing while it was uploaded")
        finally:
            self._finished(ino)

    async def _publish(self, ino: int, *, force: bool) -> None:
        token = _published_here.set(ino)
        try:
            await self._publish_row(ino, force=force)
        finally:
            _published_here.reset(token)

    async def _publish_row(self, ino: int, *, force: bool) -> None:
        with self._db.read() as txn:
            row = publish.dirty_row(txn, ino)
            if row is None:
                self.failures.pop(ino, None)
                return
            try:
                inode = tree.get(txn, ino)
            except NotFound:
                inode = None
        if inode is None or inode.nlink == 0:
            await self._db.commit(lambda txn: publish.forget_dirty(txn, ino, row.generation))
            return
        if not force and not self._hurried_by and self.holds(ino):
            self.note(ino, HELD_LOOK_S)
            return
        if ino in self._make_way:
            self._make_way.discard(ino)
            await self._parking.make_way(ino)
            self._deletions.note(0.0)
        if inode.is_dir:
            await self._publish_directory(ino)
        else:
            is_busy = self._backlog.is_being_written(ino) or self._backlog.is_kept_for_readers(row)
            if is_busy and inode.flags & schema.DATA_LOCAL and not force:
                return
            await self._writer.publish_file(ino, force=force)
            with self._db.read() as txn:
                if publish.doomed_count(txn):
                    self._deletions.note(0.0)
        self.failures.pop(ino, None)
        self._blocked_attempts.pop(ino, None)
        self.published_count += 1
        for awaited in self._awaited:
            awaited.published.add(ino)

    async def _publish_directory(self, ino: int) -> None:
        cursor = None
        while True:
            with self._db.read() as txn:
                batch, cursor = publish.next_moved_children(txn, ino, cursor, SCAN_BATCH)
            if batch:
                await self._db.commit(partial(_mark_moved, inos=batch, now_ns=self._now_ns()))
                for child in batch:
                    self.note(child, 0.0)
            if cursor is None:
                break
        await self._writer.publish_marker(ino)
        self._deletions.note(0.0)

    async def drain(self, progress: Callable[[int, int], None] | None = None, *, below: bytes = b"") -> bool:
        """Publish everything (below a path) without delay; True when nothing is left.

        ``progress(files, bytes)`` is called with what is left. Returns False when everything that is
        left has failed at least once since the call: the caller says so and may wait again. Files that
        are open for writing are not waited for.
        """
        return await self.settle(Awaited(below=below), progress)

    async def settle(self, awaited: Awaited, progress: Callable[[int, int], None] | None = None) -> bool:
        """``drain`` for what ``awaited`` says; that tells what is left, when this is cancelled too."""
        awaited.failed.clear()
        awaited.attempts = {ino: failure.attempts for ino, failure in self.failures.items()}
        self._hurried_by += 1
        self._awaited.append(awaited)
        try:
            return await self._settle(awaited, progress)
        finally:
            self._awaited.remove(awaited)
            self._hurried_by -= 1

    async def _settle(self, awaited: Awaited, progress: Callable[[int, int], None] | None) -> bool:
        def hurry(ino: int, is_new: bool) -> None:
            if is_new:
                self.note(ino, 0.0)
            self._note_unless_known(ino)

        self._deletions.note(0.0)
        sweeps = Sweeps(self._deletions)
        look_at = 0.0
        while True:
            if self.announces() and (awaited.later or not awaited.has_looked):
                await trio.sleep(RETRY_SOON_S)
                continue
            event = self._progress
            for ino in self._backlog.take_in(awaited, self._attempts_of):
                self._note_unless_known(ino)
            began_at = trio.current_time()
            if not awaited.sizes or began_at >= look_at:
                await self._backlog.look(awaited, hurry)
                look_at = trio.current_time() + max(LOOK_S, LOOK_SHARE * (trio.current_time() - began_at))
            if progress is not None:
                progress(awaited.left_files, awaited.left_bytes)
            if not awaited.sizes and (awaited.below or not self._deletions.pending()):
                return True
            if awaited.sizes:
                if len(awaited.failed) == len(awaited.sizes):
                    return False
            elif sweeps.can_do_no_more():
                return False
            with trio.move_on_after(LOOK_S):
                await event.wait()

    def _attempts_of(self, ino: int) -> int:
        known = self.failures.get(ino)
        return known.attempts if known else 0

    def totals(self) -> Totals:
        """How much is not in the store yet."""
        return self._backlog.totals()

    def backlog(self, below: bytes = b"") -> tuple[list[int], int]:
        """Inodes that are not in the store yet, and the bytes of file data among them."""
        return self._backlog.inodes(below)

    def still_open(self, awaited: Awaited) -> tuple[int, int]:
        """(files, bytes) that ``settle`` did not wait for, because they were open for writing."""
        return self._backlog.still_open(awaited)

    async def make_room(self) -> bool:
        """Called by a writer that found the write tier full of dirty data.

        Hurries the backlog and waits until something was published. False: nothing can be published.
        That writer may be an upload, which brings here what its file lacks: it does not wait for itself.
        """
        before = self.published_count
        starving = _published_here.get()
        self._hurried_by += 1
        if starving is not None:
            self._starving.add(starving)
            self.note_progress()
        try:
            await self._note_all(0.0)
            while self.published_count == before:
                nobody_works = len(self._running) <= len(self._starving)
                if nobody_works and all(ino in self.failures for ino in self._due_at):
                    return False
                event = self._progress
                with trio.move_on_after(1.0):
                    await event.wait()
            return True
        finally:
            self._hurried_by -= 1
            if starving is not None:
                self._starving.discard(starving)


def _mark_moved(txn: WriteTransaction, inos: list[int], now_ns: int) -> None:
    for ino in inos:
        publish.mark_dirty(txn, ino, schema.MOVED, now_ns)
