"""Who may write which key, and making way where files stand in each other's.

An object that another, renamed inode still needs as its source is not overwritten: that inode goes first. Two
that need each other's key are parted by *parking* one object under ``.tierfs/parked/``, a copy on the server.
A store of directories has one more way to clash: it cannot hold ``x`` beside ``x/y``. What is in the way
there usually leaves by itself; where it cannot (because it waits in turn), it is parked as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from tierfs.errors import ObjectNotFound, PreconditionFailed, TierfsError
from tierfs.namespace import publish, records, schema
from tierfs.namespace.db import Database
from tierfs.namespace.transaction import ReadTransaction, WriteTransaction
from tierfs.store.base import ObjectStore
from tierfs.types import ObjectInfo
from tierfs.writeback.content import ContentTable
from tierfs.writeback.upload import Uploader

MOST_PARKED = 100
"""Objects moved out of the way at once; the next attempt takes the next."""


class NotYet(TierfsError):
    """Another inode has to be published first; try again soon."""


class KeyClaims:
    """Trio thread only."""

    def __init__(
        self,
        db: Database,
        store: ObjectStore,
        contents: ContentTable,
        uploader: Uploader,
        now_ns: Callable[[], int],
        is_deleting: Callable[[str], bool],
    ) -> None:
        self._db = db
        self._store = store
        self._contents = contents
        self._uploader = uploader
        self._now_ns = now_ns
        self._is_deleting = is_deleting
        self.on_parked: Callable[[int], None] = lambda ino: None
        """Called with an inode whose object was parked: it has to be published."""

    async def make_free(self, key: str, ino: int) -> None:
        """Before a further name of ``ino`` is written to ``key``.

        Raises ``NotYet`` while another inode owns it that can go by itself, or while what was there is being
        deleted.
        """
        if self._is_deleting(key):
            raise NotYet(f"{key}: the object that was there is being deleted")
        with self._db.read() as txn:
            owner = publish.owner_of_key(txn, key)
            if owner is None or owner == ino:
                return
            cycle = self._waits_for(txn, owner, ino)
        if not cycle:
            raise NotYet(f"{key}: still the source of a file that is being moved")
        await self._park(owner, key)
        with self._db.read() as txn:
            # Parking gives up silently when the owner has moved on by itself: only the row says who owns it.
            owner = publish.owner_of_key(txn, key)
        if self._is_deleting(key) or owner not in (None, ino):
            raise NotYet(f"{key}: still the source of a file that is being moved")

    async def claim(self, key: str, ino: int) -> None:
        """Own ``key`` before writing to it. Raises ``NotYet`` while somebody else has to go first."""
        if self._is_deleting(key):
            raise NotYet(f"{key}: the object that was there is being deleted")
        with self._db.read() as txn:
            owner = publish.owner_of_key(txn, key)
            row = publish.dirty_row(txn, ino)
            if owner == ino and row is not None and row.claim in ("", key):
                return
            cycle = owner is not None and self._waits_for(txn, owner, ino)
        if cycle and owner is not None:
            await self._park(owner, key)
        if not await self._db.commit(lambda txn: publish.claim_key(txn, ino, key, self._now_ns())):
            raise NotYet(f"{key}: still the source of a file that is being moved")

    def _waits_for(self, txn: ReadTransaction, ino: int, target: int) -> bool:
        """Whether publishing ``ino`` needs, directly or through others, a key that ``target`` owns."""
        seen: set[int] = set()
        waiting = [ino]
        while waiting:
            ino = waiting.pop()
            if ino in seen or records.find_inode(txn, ino) is None:
                continue
            seen.add(ino)
            owners = {publish.owner_of_key(txn, key) for key in publish.key_of(txn, ino)} - {None, ino}
            if target in owners:
                return True
            waiting += [owner for owner in owners if owner is not None]
        return False

    async def make_way(self, ino: int) -> None:
        """Park what keeps ``ino`` from its key in a store that cannot hold ``x`` beside ``x/y``."""
        with self._db.read() as txn:
            keys = publish.key_of(txn, ino)
            blockers = [blocker for key in keys for blocker in self._blockers(txn, key, ino)]
        for owner, key in blockers[:MOST_PARKED]:
            await self._park(owner, key)

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

    async def _park(self, owner: int, key: str) -> None:
        """Take the object that ``owner`` has at ``key`` out of the way; its own move goes on from there."""
        with self._db.read() as txn:
            inode = records.find_inode(txn, owner)
            current = publish.object_of(txn, owner)
        if current is None or key not in dict(current.all_keys()):
            return
        info: ObjectInfo | None = None
        if inode is not None and inode.flags & schema.DATA_LOCAL:
            # Its bytes are changing here, and what has not been fetched of them would come from this object.
            content = await self._contents.acquire(owner)
            try:
                await self._contents.make_independent(content)
            finally:
                await self._contents.release(content)
        elif inode is not None and not inode.is_dir:
            parked_key = f"{publish.parked_key(self._db, owner)}-{os.urandom(4).hex()}"
            try:
                info = await self._uploader.call(partial(self._store.copy, current.info, parked_key))
            except (ObjectNotFound, PreconditionFailed):
                return  # it has moved, or somebody else's object is there: the next attempt sees
        await self._db.commit(partial(self._record_parked, owner=owner, current=current, info=info))
        self.on_parked(owner)

    def _record_parked(
        self, txn: WriteTransaction, *, owner: int, current: schema.ObjectRow, info: ObjectInfo | None
    ) -> None:
        now_ns = self._now_ns()
        if publish.object_of(txn, owner) != current:
            if info is not None:
                publish.doom(txn, info.key, info.etag, now_ns, ino=owner)
            return
        if info is not None:
            publish.set_object(txn, owner, info, [], now_ns)
        for key, etag in current.all_keys():
            if info is None:
                publish.disown(txn, owner, key)
            if publish.owner_of_key(txn, key) is None:
                publish.doom(txn, key, etag, now_ns, ino=owner)
        if records.find_inode(txn, owner) is not None:
            publish.mark_dirty(txn, owner, schema.MOVED, now_ns)
