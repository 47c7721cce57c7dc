"""Delete the objects that no name maps to any more.

A key is deleted only if at that moment no inode owns it, and no file lives under its name: then the
publisher will overwrite it, or it already holds the new object. The rows of a renamed directory (a whole
prefix) go when nothing below it is owned any more; what others put there meanwhile stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog
import trio

from tierfs.errors import StoreError
from tierfs.namespace import publish, schema
from tierfs.namespace.db import Database
from tierfs.namespace.transaction import WriteTransaction
from tierfs.store.base import ObjectStore

log = structlog.get_logger(__name__)

BATCH_KEYS = 1000
PAUSE_AFTER_ERROR_S = 5.0


class Deletions:
    """One task. Trio thread only."""

    def __init__(
        self,
        db: Database,
        store: ObjectStore,
        now_ns: Callable[[], int],
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._db = db
        self._store = store
        self._now_ns = now_ns
        self._wake_at = float("inf")
        self._event = trio.Event()
        self.on_progress = on_progress
        self.failing = False
        self.deleted_count = 0

    def note(self, delay_s: float) -> None:
        """There may be something to delete, not before ``delay_s``."""
        self._wake_at = min(self._wake_at, trio.current_time() + delay_s)
        self._event.set()

    def pending(self) -> int:
        """Rows that still wait."""
        with self._db.read() as txn:
            return publish.doomed_count(txn)

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
            try:
                left = await self._sweep()
            except StoreError as error:
                if not self.failing:
                    log.warning("objects not deleted yet, will be tried again", reason=str(error))
                self.failing, left = True, True
            else:
                self.failing = False
            self.on_progress()
            if left:
                self.note(PAUSE_AFTER_ERROR_S)

    async def _sweep(self) -> bool:
        """One pass over all rows. True when rows were left that have to wait."""
        cursor: bytes | None = None
        left = False
        while True:
            with self._db.read() as txn:
                rows, cursor = publish.doomed_entries(txn, cursor, BATCH_KEYS)
                free = [row for row in rows if not row.prefix and not publish.is_key_needed(txn, row.key)]
                waiting = [row for row in rows if not row.prefix and publish.owner_of_key(txn, row.key)]
            left = left or bool(waiting)
            if free:
                await self._delete(free)
            replaced = [row for row in rows if not row.prefix and row not in free and row not in waiting]
            if replaced:
                await self._forget(replaced)
            for row in rows:
                if row.prefix and not await self._finish_prefix(row):
                    left = True
            if cursor is None:
                return left

    async def _delete(self, rows: Sequence[schema.DoomedRow]) -> None:
        keys = [row.key for row in rows]
        failures = await trio.to_thread.run_sync(self._store.delete_many, keys)
        failed = {failure.key for failure in failures}
        await self._forget([row for row in rows if row.key not in failed])
        self.deleted_count += len(keys) - len(failed)
        if failures:
            raise StoreError(f"{failures[0].key}: not deleted: {failures[0].message}")

    async def _forget(self, rows: Sequence[schema.DoomedRow]) -> None:
        def forget(txn: WriteTransaction) -> None:
            for row in rows:
                publish.forget_doomed(txn, row)

        await self._db.commit(forget)

    async def _finish_prefix(self, row: schema.DoomedRow) -> bool:
        """A renamed directory's old prefix: done when everything below has moved away."""
        with self._db.read() as txn:
            if publish.is_prefix_needed(txn, row.key):
                return False
        markers = await self._markers_below(row.key)
        if markers:
            await trio.to_thread.run_sync(self._store.delete_many, markers)
        await self._forget([row])
        return True

    async def _markers_below(self, prefix: str) -> list[str]:
        """Directory markers that others left below the old prefix, and the prefix's own."""
        markers: list[str] = []
        token: str | None = None
        while True:

            def page(token: str | None = token) -> object:
                return self._store.list_page(prefix, recursive=True, token=token)

            found = await trio.to_thread.run_sync(page)
            markers += [
                info.key
                for info in found.objects  # type: ignore[attr-defined]
                if info.key.endswith("/") and info.size_bytes == 0
            ]
            token = found.next_token  # type: ignore[attr-defined]
            if token is None:
                return markers
