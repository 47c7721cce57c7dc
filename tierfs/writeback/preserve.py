"""Keep, for snapshots, the objects that are about to be overwritten or deleted.

Whoever is about to write or delete keys says so (``changing``) and gives them to ``keep`` before the request:
what a snapshot reads at such a key, and nowhere else, is copied on the server to ``.tierfs/snapshots/``
first. The row of the copy is committed before the copy begins, without an ETag, and gets that afterwards: so
a crash leaves neither a copy that nobody knows nor a row that promises one.

A snapshot must not be made while such a request is under way: what it had looked at would not be the truth
any more. So ``standing_still`` waits until those that have begun have recorded their outcome, and holds
others back meanwhile. For the same reason a sweep takes the rows of copies away only then.

Trio thread only.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import structlog
import trio

from tierfs.errors import ObjectNotFound, PreconditionFailed, StoreError
from tierfs.namespace import past, publish, records, schema, snapshots, sweep
from tierfs.namespace.db import Database
from tierfs.namespace.schema import KeptRow
from tierfs.namespace.transaction import ReadTransaction, WriteTransaction
from tierfs.types import ObjectInfo
from tierfs.writeback.upload import Uploader

log = structlog.get_logger(__name__)

PREFIX = ".tierfs/snapshots/"
PARALLEL_COPIES = 16
FIRST_PATIENCE_S = 10.0
LONGEST_PATIENCE_S = 600.0
PAUSE_S = 1.0
SWEEP_ROWS = 500
SWEEP_RETRY_S = 5.0
SWEEP_LOOK_S = 10.0


class Preserver:
    """See the module docstring."""

    def __init__(self, db: Database, uploader: Uploader, now_ns: Callable[[], int]) -> None:
        self._db = db
        self._uploader = uploader
        self._now_ns = now_ns
        self._changing = 0
        self._still = False
        self._turn = trio.Event()
        self._sweep = trio.Event()
        self.on_doomed: Callable[[], None] = lambda: None
        """Called when copies have been given up, to be deleted."""
        self.copied_count = 0

    # -- who may when ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """From before ``keep`` until the outcome of the request has been committed. Not nested."""
        while self._still:
            await self._turn.wait()
        self._changing += 1
        try:
            yield
        finally:
            self._changing -= 1
            self._tell()

    @asynccontextmanager
    async def standing_still(self) -> AsyncIterator[None]:
        """Nothing in the bucket is being changed, and nothing begins to be. To be left soon.

        A request that waits for room in a tier may wait for others that are held back here: so they are let
        go on after a while, and it is tried again with more patience.
        """
        patience_s = FIRST_PATIENCE_S
        while not await self._stop(patience_s):
            await trio.sleep(PAUSE_S)
            patience_s = min(2 * patience_s, LONGEST_PATIENCE_S)
        try:
            yield
        finally:
            self._still = False
            self._tell()

    async def _stop(self, patience_s: float) -> bool:
        while self._still:
            await self._turn.wait()
        self._still = True
        try:
            with trio.move_on_after(patience_s):
                while self._changing:
                    await self._turn.wait()
        except BaseException:
            self._still = False
            self._tell()
            raise
        if not self._changing:
            return True
        self._still = False
        self._tell()
        return False

    def _tell(self) -> None:
        self._turn.set()
        self._turn = trio.Event()

    # -- copies ----------------------------------------------------------------------------------------

    async def keep(self, keys: Iterable[tuple[str, int]]) -> None:
        """Each key with the inode (0: none) that is at work on it, or had it last. Raises ``StoreError``."""
        with self._db.read() as txn:
            if not snapshots.any_left(txn):
                return
            wanted = [needed for key, ino in keys for needed in self._needed(txn, key, ino)]
        waiting = iter(wanted)
        failures: list[StoreError] = []

        async def copy_some() -> None:
            for needed in waiting:
                try:
                    await self._copy(needed)
                except StoreError as error:
                    failures.append(error)
                    return

        async with trio.open_nursery() as nursery:
            for _ in range(min(len(wanted), PARALLEL_COPIES)):
                nursery.start_soon(copy_some)
        if failures:
            raise failures[0]

    def _needed(self, txn: ReadTransaction, key: str, ino: int) -> list[KeptRow]:
        """The versions of that object of which there must be a copy, and is none."""
        found: dict[str, KeptRow] = {}
        doomed = publish.doomed_row(txn, key)
        inos = {ino, doomed.ino if doomed is not None else 0, publish.owner_of_key(txn, key) or 0}
        inos.update(past.inos_with_key(txn, key))
        for row in snapshots.every(txn):
            for other in inos - {0}:
                held = past.needs(txn, row, other, key)
                if held is None or held.etag in found:
                    continue
                if other == ino and self._only_moves(txn, row, ino):
                    continue
                kept = past.kept_copy(txn, key, held.etag)
                if kept is None:
                    kept_key = f"{txn.tables.prefix}{PREFIX}{os.urandom(16).hex()}"
                    found[held.etag] = KeptRow(
                        key, held.etag, other, held.size_bytes, kept_key, "", held.version_id
                    )
                elif not kept.kept_etag:
                    found[held.etag] = kept
        return list(found.values())

    def _only_moves(self, txn: ReadTransaction, row: schema.SnapshotRow, ino: int) -> bool:
        """The same bytes are about to be somewhere else, and the snapshot will find them there."""
        inode = records.find_inode(txn, ino)
        return inode is not None and inode.nlink > 0 and past.follows_moves(txn, row, ino)

    async def _copy(self, kept: KeptRow) -> None:
        await self._db.commit(partial(_put_kept, kept=kept))
        source = ObjectInfo(kept.key, kept.size_bytes, kept.etag, 0, kept.version_id)
        try:
            info = await self._uploader.copy(source, kept.kept_key)
        except (ObjectNotFound, PreconditionFailed):
            # Others have put something else there, or it went earlier: there is nothing left to keep.
            log.warning("an object that a snapshot needs is gone from the store", key=kept.key)
            await self._db.commit(partial(_drop_kept, kept=kept, now_ns=self._now_ns()))
            return
        done = msgspec.structs.replace(kept, kept_etag=info.etag, version_id=info.version_id)
        # A power cut must not take the row back once the object itself has been overwritten.
        await self._db.commit(partial(_put_kept, kept=done), durable=True)
        self.copied_count += 1

    # -- sweeping --------------------------------------------------------------------------------------

    def note_deleted(self) -> None:
        """A snapshot has gone, or one that was deleted may go now."""
        self._sweep.set()

    async def run(self) -> None:
        """Take away what no snapshot needs, until cancelled. What an earlier run left comes first."""
        while True:
            self._sweep = trio.Event()
            try:
                await self._sweep_all()
            except Exception:
                log.exception("old records of snapshots were not taken away; will be tried again")
                await trio.sleep(SWEEP_RETRY_S)
                continue
            # Also the last file that had its bytes in a deleted snapshot may have let it go.
            with trio.move_on_after(SWEEP_LOOK_S):
                await self._sweep.wait()

    async def _sweep_all(self) -> None:
        with self._db.read() as txn:
            place = sweep.begin(txn)
        if place is None:
            return
        while place is not None:
            step = partial(sweep.step, place=place, limit=SWEEP_ROWS, now_ns=self._now_ns())
            if place.concerns_copies:
                async with self.standing_still():
                    place = await self._db.commit(step)
            else:
                place = await self._db.commit(step)
        self.on_doomed()


def _put_kept(txn: WriteTransaction, kept: KeptRow) -> None:
    txn.put(schema.kept_table_key(kept.key, kept.etag), schema.encode_row(kept), db=txn.tables.kept)


def _drop_kept(txn: WriteTransaction, kept: KeptRow, now_ns: int) -> None:
    txn.delete(schema.kept_table_key(kept.key, kept.etag), txn.tables.kept)
    publish.doom(txn, kept.kept_key, "", now_ns)
