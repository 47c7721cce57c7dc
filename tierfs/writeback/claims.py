"""Who may write which key.

Before an inode is written, it *claims* the keys of all its names: in the namespace, so that after a crash
what may lie there is known, and in memory, so that no other request writes or deletes there meanwhile. An
object that another, renamed inode still needs as its source is not overwritten: that inode goes first. Two
that need each other's key are parted by ``parking``. What a snapshot needs of what lies there is copied away
first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from tierfs.namespace import publish, records
from tierfs.namespace.db import Database
from tierfs.namespace.transaction import ReadTransaction
from tierfs.writeback.in_flight import KeysInFlight, NotYet
from tierfs.writeback.parking import MOST_PARKED, Parking
from tierfs.writeback.preserve import Preserver


class KeyClaims:
    """Trio thread only."""

    def __init__(
        self,
        db: Database,
        parking: Parking,
        preserver: Preserver,
        in_flight: KeysInFlight,
        now_ns: Callable[[], int],
    ) -> None:
        self._db = db
        self._parking = parking
        self._preserver = preserver
        self._in_flight = in_flight
        self._now_ns = now_ns

    @asynccontextmanager
    async def held(self, ino: int) -> AsyncIterator[list[str]]:
        """The keys of all names of ``ino``, which may be written until the context ends.

        Raises ``NotYet`` while somebody else has to go first, ``NotFound`` if the inode is gone.
        """
        async with self._preserver.changing():
            with self._db.read() as txn:
                keys = publish.key_of(txn, ino)
            if not keys:
                raise NotYet(f"inode {ino} has no name")
            with self._in_flight.writing(keys):
                await self._claim(ino, keys)
                yield keys

    async def _claim(self, ino: int, keys: list[str]) -> None:
        with self._db.read() as txn:
            blocking = [
                (owner, key)
                for key in keys
                if (owner := publish.owner_of_key(txn, key)) is not None
                and owner != ino
                and self._waits_for(txn, owner, ino)
            ]
        for owner, key in blocking[:MOST_PARKED]:
            await self._parking.park(owner, key)
        for key in keys:
            await self._parking.keep_for_readers(key)
        await self._preserver.keep([(key, ino) for key in keys])
        claim = partial(publish.claim_keys, ino=ino, keys=keys, now_ns=self._now_ns())
        if not await self._db.commit(claim):
            raise NotYet(f"{keys[0]}: renamed meanwhile, or still the source of a file that is being moved")

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
