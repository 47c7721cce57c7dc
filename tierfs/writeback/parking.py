"""Making way where objects stand in each other's.

Two files that need each other's key are parted by *parking* one object under ``.tierfs/parked/``, a copy on
the server; its own move goes on from there. A store of directories has one more way to clash: it cannot
hold ``x`` beside ``x/y``. What is in the way there usually leaves by itself; where it cannot (because it
waits in turn), it is parked as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from tierfs.errors import ObjectNotFound, PreconditionFailed
from tierfs.namespace import publish, records, schema
from tierfs.namespace.db import Database
from tierfs.namespace.transaction import ReadTransaction, WriteTransaction
from tierfs.store.base import ObjectStore
from tierfs.types import ObjectInfo
from tierfs.writeback.content_table import ContentTable
from tierfs.writeback.in_flight import InodesInFlight, KeysInFlight
from tierfs.writeback.upload import Uploader

MOST_PARKED = 100
"""Objects moved out of the way at once; the next attempt takes the next."""


class Parking:
    """Trio thread only."""

    def __init__(
        self,
        db: Database,
        store: ObjectStore,
        contents: ContentTable,
        uploader: Uploader,
        keys: KeysInFlight,
        inodes: InodesInFlight,
        now_ns: Callable[[], int],
    ) -> None:
        self._db = db
        self._store = store
        self._contents = contents
        self._uploader = uploader
        self._keys = keys
        self._inodes = inodes
        self._now_ns = now_ns
        self.is_read: Callable[[int], bool] = lambda ino: False
        """See ``Deletions.is_read``."""
        self.on_parked: Callable[[int], None] = lambda ino: None
        """Called with an inode that was worked on here: it has to be published."""

    async def make_way(self, ino: int) -> None:
        """Park what keeps ``ino`` from its key in a store that cannot hold ``x`` beside ``x/y``.

        The caller is at work on ``ino``, whose own object may be what is in the way.
        """
        with self._db.read() as txn:
            keys = publish.key_of(txn, ino)
            blockers = [blocker for key in keys for blocker in self._blockers(txn, key, ino)]
        for owner, key in blockers[:MOST_PARKED]:
            await (self._park(owner, key) if owner == ino else self.park(owner, key))

    def _blockers(self, txn: ReadTransaction, key: str, ino: int) -> list[tuple[int, str]]:
        """(owner, key) of objects that have no business at or above, or below, ``key`` any more."""
        found: list[tuple[int, str]] = []
        end = len(txn.tables.prefix)
        while (end := key.find("/", end + 1)) > 0:
            owner = publish.owner_of_key(txn, key[:end])
            if owner not in (None, ino) and publish.live_inode_at(txn, key[:end]) != owner:
                found.append((int(owner or 0), key[:end]))
        if not key.endswith("/"):
            for owner, below in publish.owners_below(txn, key + "/", MOST_PARKED):
                if publish.live_inode_at(txn, below) != owner:
                    found.append((owner, below))
        return found

    async def park(self, owner: int, key: str) -> None:
        """Take what ``owner`` has at ``key`` out of the way.

        Does nothing while another task works on ``owner``: whoever needs the key finds out by claiming it.
        """
        if not self._inodes.add(owner):
            return
        try:
            await self._park(owner, key)
        finally:
            self._inodes.discard(owner)
            self.on_parked(owner)

    async def keep_for_readers(self, key: str) -> None:
        """Before ``key`` is overwritten: somebody may still read what is there, of a file without a name."""
        with self._db.read() as txn:
            doomed = publish.doomed_row(txn, key)
            current = publish.object_of(txn, doomed.ino) if doomed is not None and doomed.ino else None
        if doomed is None or current is None or current.key != key or not self.is_read(doomed.ino):
            return
        if not self._inodes.add(doomed.ino):
            return
        try:
            await self._copy_for_readers(doomed.ino, current)
        finally:
            self._inodes.discard(doomed.ino)

    async def _copy_for_readers(self, ino: int, current: schema.ObjectRow) -> None:
        async with self._contents.used(ino) as content, content.lock:
            await self._copy_away(ino, current, lambda txn, info: publish.move_orphan(txn, ino, info))
            self._contents.refresh_ref(content)

    async def _park(self, owner: int, key: str) -> None:
        with self._db.read() as txn:
            inode = records.find_inode(txn, owner)
            current = publish.object_of(txn, owner)
        if inode is None or current is None or key not in dict(current.all_keys()):
            # Claimed, and never acknowledged: there is nothing that the inode could need.
            await self._db.commit(partial(publish.drop_claims, ino=owner, now_ns=self._now_ns()))
            return
        if not inode.is_regular:
            # What these objects say stands in the namespace as well.
            await self._give_up(owner, current)
            return
        async with self._contents.used(owner) as content:
            if content.local:
                # Its bytes are changing here, and what was not fetched of them would come from this object.
                await self._contents.local_copies.make_independent(content)
                await self._give_up(owner, current)
                return
            # Under the lock nobody begins to write, and so to depend on an object that is about to go.
            async with content.lock:
                if not content.local:
                    await self._copy_away(owner, current, partial(self._record_copy, owner, current))
            self._contents.refresh_ref(content)

    async def _copy_away(
        self, owner: int, current: schema.ObjectRow, record: Callable[[WriteTransaction, ObjectInfo], None]
    ) -> None:
        """Copy what ``current`` names to a key of its own, and ``record`` that."""
        key = f"{publish.parked_key(self._db, owner)}-{os.urandom(4).hex()}"
        with self._keys.writing([key]):
            # Doomed until it is recorded: should the process die in between, the copy goes.
            await self._db.commit(partial(publish.doom, key=key, etag="", now_ns=self._now_ns(), ino=owner))
            try:
                info = await self._uploader.copy(current.info, key)
            except (ObjectNotFound, PreconditionFailed):
                return  # it has moved or gone: the next attempt, or who reads it, gets to know
            await self._db.commit(lambda txn: record(txn, info))

    def _record_copy(
        self, owner: int, current: schema.ObjectRow, txn: WriteTransaction, info: ObjectInfo
    ) -> None:
        now_ns = self._now_ns()
        if publish.object_of(txn, owner) != current:
            return
        if publish.set_object(txn, owner, info, [], now_ns):
            publish.mark_dirty(txn, owner, schema.MOVED, now_ns)

    async def _give_up(self, owner: int, current: schema.ObjectRow) -> None:
        def give_up(txn: WriteTransaction) -> None:
            if publish.object_of(txn, owner) == current:
                publish.give_up_object(txn, owner, self._now_ns())

        await self._db.commit(give_up)
