"""Make the bucket hold what the namespace says: uploads, moves, attribute changes and deletions.

Publishes one inode as its rows say at that moment, by ``objects``; ``schedule`` says which and when,
``draining`` is for those who wait until nothing is left. A failure is kept in ``failures`` and tried again
with a growing pause; it never stops the others.

Trio thread only. One task per inode at a time (``InodesInFlight``), ``upload_concurrency`` of them at once.
Rows may change while a task waits: what it commits compares the generation that it has read.

Raises ``StoreError`` from ``publish_now``; in the background nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import structlog
import trio

from tierfs.config import Settings
from tierfs.errors import NotFound, StoreError, StoreUnsupported, TierfsError
from tierfs.namespace import publish, schema, tree
from tierfs.namespace.db import Database
from tierfs.namespace.transaction import WriteTransaction
from tierfs.writeback.backlog import Backlog, Failure
from tierfs.writeback.content_table import ContentTable
from tierfs.writeback.deletions import Deletions
from tierfs.writeback.draining import Draining
from tierfs.writeback.in_flight import InodesInFlight, NotYet, published_here
from tierfs.writeback.objects import ObjectWriter
from tierfs.writeback.parking import Parking
from tierfs.writeback.schedule import RETRY_SOON_S, SCAN_BATCH, Schedule
from tierfs.writeback.upload import ContentChanged

log = structlog.get_logger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
HELD_LOOK_S = 5.0
BLOCKED_ATTEMPTS = 50


class Publisher:
    """See the module docstring."""

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
        self._writer = writer
        self._parking = parking
        self._deletions = deletions
        self._settings = settings
        self._now_ns = now_ns
        self._running = inodes
        self._blocked_attempts: dict[int, int] = {}
        self._make_way: set[int] = set()
        self.failures: dict[int, Failure] = {}
        self.backlog = Backlog(db, contents)
        self.schedule = Schedule(db, self.backlog, inodes, self.failures, settings)
        self.draining = Draining(self.backlog, self.schedule, deletions, inodes, self.failures)
        self.schedule.is_awaited = self.draining.is_awaited
        self.on_deletion: Callable[[], None] = lambda: None
        self.holds: Callable[[int], bool] = lambda ino: False
        """Whether an inode had better wait: it is in a directory that is being written, under another name
        than it will have. Given by ``checkpoint``."""

    @property
    def conflicts(self) -> int:
        """Files that were moved aside because another node had written their object."""
        return self._writer.conflicts

    def note_deletion(self) -> None:
        """A key has been doomed; it goes after the upload delay."""
        self._deletions.note(self._settings.upload_delay_s)
        self.on_deletion()

    async def run(self) -> None:
        """Work until cancelled. Rows that an earlier run left behind come first."""
        if self._settings.read_only:
            return
        await self.schedule.note_all(0.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._deletions.run)
            await self.schedule.dispatch(nursery, self._publish_in_background)

    async def _publish_in_background(self, ino: int) -> None:
        try:
            await self._publish(ino, force=False)
        except ContentChanged:
            self.schedule.note(ino)
        except NotYet:
            # At no fixed time: two that stand in each other's way must not always meet.
            self.schedule.note(ino, RETRY_SOON_S * random.uniform(0.5, 1.5))
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
        self.schedule.note(ino, RETRY_SOON_S)

    def _finished(self, ino: int) -> None:
        self._running.discard(ino)
        self.draining.note_ended(ino)
        self.schedule.note_ended(ino)
        if self._deletions.waiting:
            self._deletions.note(0.0)
        self.draining.note_progress()

    def is_publishing(self, ino: int) -> bool:
        """Its object may be getting another key or ETag right now, or soon."""
        return ino in self._running or ino in self.schedule

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
        self.schedule.note(ino, min(FIRST_PAUSE_S * 2 ** (attempts - 1), LONGEST_PAUSE_S))

    async def publish_now(self, ino: int) -> None:
        """Publish that inode before returning (``fsync=remote``, write-through).

        Raises ``StoreError``. Returns at once when there is nothing to do.
        """
        while not self._running.add(ino):
            await self.draining.progress.wait()
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

    def reserve(self, ino: int) -> bool:
        """Somebody else sees to the object of ``ino``, until ``let_go``. False: not now."""
        return self._running.add(ino)

    def let_go(self, ino: int) -> None:
        """The end of ``reserve``."""
        self._finished(ino)

    async def _publish(self, ino: int, *, force: bool) -> None:
        token = published_here.set(ino)
        try:
            await self._publish_row(ino, force=force)
        finally:
            published_here.reset(token)

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
        if not force and not self.draining.is_hurried and self.holds(ino):
            self.schedule.note(ino, HELD_LOOK_S)
            return
        if ino in self._make_way:
            self._make_way.discard(ino)
            await self._parking.make_way(ino)
            self._deletions.note(0.0)
        if inode.is_dir:
            await self._publish_directory(ino)
        else:
            is_busy = self.backlog.is_being_written(ino) or self.backlog.is_kept_for_readers(row)
            if is_busy and inode.flags & schema.DATA_LOCAL and not force:
                return
            await self._writer.publish_file(ino, force=force)
            with self._db.read() as txn:
                if publish.doomed_count(txn):
                    self._deletions.note(0.0)
        self.failures.pop(ino, None)
        self._blocked_attempts.pop(ino, None)
        self.draining.note_published(ino)

    async def _publish_directory(self, ino: int) -> None:
        cursor = None
        while True:
            with self._db.read() as txn:
                batch, cursor = publish.next_moved_children(txn, ino, cursor, SCAN_BATCH)
            if batch:
                await self._db.commit(partial(_mark_moved, inos=batch, now_ns=self._now_ns()))
                for child in batch:
                    self.schedule.note(child, 0.0)
            if cursor is None:
                break
        await self._writer.publish_marker(ino)
        self._deletions.note(0.0)


def _mark_moved(txn: WriteTransaction, inos: list[int], now_ns: int) -> None:
    for ino in inos:
        publish.mark_dirty(txn, ino, schema.MOVED, now_ns)
