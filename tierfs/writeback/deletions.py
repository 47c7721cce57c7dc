"""Delete the objects that no name maps to any more.

A key is deleted only if at that moment no inode owns it, and no file lives under its name: then the
publisher will overwrite it, or it already holds the new object; and only while no request is writing it
(the upload of a file that has been unlinked meanwhile): what that leaves behind goes later. The rows of a
renamed directory (a whole prefix) go when nothing below it is owned any more; what others put there
meanwhile stays. What somebody still reads, although its file has been removed, waits for the last close.

A row that knows the ETag of its object takes that version only. If another node has put something else there
meanwhile, that one stays, and the next listing shows it as any new file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import structlog
import trio

from tierfs.errors import StoreError
from tierfs.namespace import publish, schema
from tierfs.namespace.db import Database
from tierfs.namespace.transaction import ReadTransaction, WriteTransaction
from tierfs.store.base import ListPage, ObjectStore
from tierfs.writeback.in_flight import KeysInFlight
from tierfs.writeback.preserve import Preserver

log = structlog.get_logger(__name__)

BATCH_KEYS = 1000
PAUSE_AFTER_ERROR_S = 5.0
RETRY_SOON_S = 0.2


class Deletions:
    """One task. Trio thread only."""

    def __init__(
        self,
        db: Database,
        store: ObjectStore,
        preserver: Preserver,
        keys: KeysInFlight,
        now_ns: Callable[[], int],
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._db = db
        self._store = store
        self._preserver = preserver
        self._keys = keys
        self._now_ns = now_ns
        self._wake_at = float("inf")
        self._event = trio.Event()
        self.on_progress = on_progress
        self.is_read: Callable[[int], bool] = lambda ino: False
        """Whether somebody still reads from the object of that inode, which has no name any more."""
        self.on_needed: Callable[[int], None] = lambda ino: None
        """Called with an inode that has to be published before a key can go."""
        self.failing = False
        self.waiting = False
        """The last sweep left rows."""
        self._held = 0
        self.sweeps = 0
        self.attempts = 0
        """Sweeps that have ended, those that failed too."""
        self.is_sweeping = False
        self.stalled = False
        """The last sweep left rows, could do nothing about any, and nothing else is at work on them."""
        self.deleted_count = 0

    def note(self, delay_s: float) -> None:
        """There may be something to delete, not before ``delay_s``."""
        self._held = 0  # the next pass says anew
        wake_at = trio.current_time() + delay_s
        if wake_at < self._wake_at:
            self._wake_at = wake_at
            self._event.set()

    def pending(self) -> int:
        """Rows that still wait, but for those that wait for a reader."""
        with self._db.read() as txn:
            return max(0, publish.doomed_count(txn) - self._held)

    async def run(self) -> None:
        """Work until cancelled."""
        self.note(0.0)
        while True:
            pause = self._wake_at - trio.current_time()
            if pause > 0:
                self._event = trio.Event()
                with trio.move_on_after(pause):
                    await self._event.wait()
                continue
            self._wake_at = float("inf")
            self.is_sweeping = True
            try:
                left = await self._sweep()
            except StoreError as error:
                if not self.failing:
                    log.warning("objects not deleted yet, will be tried again", reason=str(error))
                self.failing, left = True, True
            else:
                self.failing = False
            self.waiting = left
            self.attempts += 1
            self.is_sweeping = False
            self.on_progress()
            if left:
                self.note(PAUSE_AFTER_ERROR_S)

    async def _sweep(self) -> bool:
        """One pass over all rows. True when rows were left that have to wait."""
        cursor: bytes | None = None
        left = moved = busy = False
        held = 0
        while True:
            with self._db.read() as txn:
                rows, cursor = publish.doomed_entries(txn, cursor, BATCH_KEYS)
                unneeded = [r for r in rows if not r.prefix and not publish.is_key_needed(txn, r.key)]
            kept = {row.key for row in unneeded if row.ino and self.is_read(row.ino)}
            keys = [row.key for row in unneeded if row.key not in kept]
            held += len(kept)
            with self._keys.deleting(keys) as free:
                busy = busy or len(free) < len(keys)
                gone = [row for row in rows if row.key in free and not row.prefix]
                if gone:
                    async with self._preserver.changing():
                        await self._preserver.keep([(row.key, row.ino) for row in gone])
                        await self._delete(self._still_unneeded(gone))
            needed = [row for row in rows if not row.prefix and row.key not in free | kept]
            if needed:
                await self._hurry(needed)
                left = True
            for row in rows:
                if row.prefix and not await self._finish_prefix(row):
                    left = True
            moved = moved or bool(gone)
            if cursor is None:
                self.sweeps += 1
                self._held = held
                self.stalled = left and not moved and not busy
                return left

    def _still_unneeded(self, rows: Sequence[schema.DoomedRow]) -> list[schema.DoomedRow]:
        """Copies for snapshots take their time."""
        with self._db.read() as txn:
            return [row for row in rows if not publish.is_key_needed(txn, row.key)]

    async def _delete(self, rows: Sequence[schema.DoomedRow]) -> None:
        if not rows:
            return
        keys = [row.key for row in rows]
        etags = {row.key: row.etag for row in rows if row.etag}  # empty: any version of ours may be there
        # A power cut must not bring back a name, or a copy that is still to be made, whose object has gone.
        await self._db.sync()
        answer = await trio.to_thread.run_sync(self._store.delete_many, keys, etags, abandon_on_cancel=True)
        replaced = {failure.key for failure in answer if failure.replaced}
        failures = [failure for failure in answer if not failure.replaced]
        failed = {failure.key for failure in failures}
        for key in sorted(replaced):
            log.info("removed here, but others have replaced it: their object stays", key=key)
        await self._forget([row for row in rows if row.key not in failed], replaced)
        self.deleted_count += len(keys) - len(failed) - len(replaced)
        if failures:
            raise StoreError(f"{failures[0].key}: not deleted: {failures[0].message}")

    async def _forget(self, rows: Sequence[schema.DoomedRow], replaced: Collection[str] = ()) -> None:
        """The objects are gone, or others' by now (``replaced``): drop the rows that are done with."""

        def forget(txn: WriteTransaction) -> None:
            for row in rows:
                if row.prefix or row.key not in replaced:
                    publish.note_deleted(txn, row)
                if not _is_owned(txn, row):
                    publish.forget_doomed(txn, row)

        await self._db.commit(forget)

    async def _hurry(self, rows: Sequence[schema.DoomedRow]) -> None:
        """Whoever lives at, or still owns, these keys has to be published: make sure that it will be."""

        def mark(txn: WriteTransaction) -> list[int]:
            marked: list[int] = []
            for row in rows:
                ino = publish.owner_of_key(txn, row.key) or publish.live_inode_at(txn, row.key)
                if ino is not None and not publish.is_dirty(txn, ino):
                    publish.mark_dirty(txn, ino, schema.MOVED, self._now_ns())
                    marked.append(ino)
            return marked

        for ino in await self._db.commit(mark):
            self.on_needed(ino)

    async def _finish_prefix(self, row: schema.DoomedRow) -> bool:
        """A renamed directory's old prefix: done when everything below has moved away."""
        with self._db.read() as txn:
            if publish.is_prefix_needed(txn, row.key):
                return False
        found = await self._markers_below(row.key)
        with self._db.read() as txn:
            markers = [key for key in found if not publish.is_key_needed(txn, key)]
        with self._keys.deleting(markers) as free:
            if free:
                await trio.to_thread.run_sync(self._store.delete_many, sorted(free))
        await self._forget([row])
        return True

    async def _markers_below(self, prefix: str) -> list[str]:
        """Directory markers that others left below the old prefix, and the prefix's own."""
        markers: list[str] = []
        token: str | None = None
        while True:
            found = await trio.to_thread.run_sync(partial(self._page, prefix, token), abandon_on_cancel=True)
            markers += [i.key for i in found.objects if i.key.endswith("/") and i.size_bytes == 0]
            token = found.next_token
            if token is None:
                return markers

    def _page(self, prefix: str, token: str | None) -> ListPage:
        return self._store.list_page(prefix, recursive=True, token=token)


class Sweeps:
    """Tells one that waits for the deletions whether they can do any more, when all is published."""

    def __init__(self, deletions: Deletions) -> None:
        self._deletions = deletions
        self._began: tuple[int, int] | None = None

    def can_do_no_more(self) -> bool:
        """Only a sweep that began after the first call says whether the rest can go."""
        deletions = self._deletions
        if self._began is None:
            self._began = (deletions.sweeps, deletions.attempts + 1 + deletions.is_sweeping)
            deletions.note(0.0)
        sweeps, told_at = self._began
        if deletions.stalled and deletions.sweeps > sweeps + 1:
            return True
        if deletions.failing and deletions.attempts >= told_at:
            return True
        if deletions.stalled:
            deletions.note(RETRY_SOON_S)
        return False


def _is_owned(txn: ReadTransaction, row: schema.DoomedRow) -> bool:
    return not row.prefix and publish.owner_of_key(txn, row.key) is not None
