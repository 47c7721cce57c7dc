"""How a clean content becomes local: before its first byte changes it has a staging file, under a new id.

Owns the step from *clean* to *local* of a ``FileContent``, under its ``lock``: the staging file is made or
converted from the clean copy (durably, with where its absent blocks come from), then one commit gives the
inode the new content id and a dirty row, then the content says so. A crash in between leaves a staging file
that the namespace does not refer to, and that the next start discards. The way back is in ``objects``.

Bytes on loan (``namespace.loans``) are not written over: whoever moves the lender's object knows of no
staging file that would still read from it. So the loan is settled first, or everything is fetched.

Trio thread only. No await between the return of that commit and the assignment of ``staging``,
``content_id``, ``local`` and ``ref``: given up there, the namespace would speak of a staging file of which
the content does not know.

Raises what ``Cache.convert``, ``Cache.create_staging``, ``Staging.fill`` and ``Database.commit`` raise;
then the content is as it was.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio

from tierfs.cache.residency import Cache
from tierfs.cache.staging import Staging
from tierfs.errors import TierfsError
from tierfs.namespace import loans, publish, schema, tree
from tierfs.namespace.db import Database
from tierfs.namespace.transaction import WriteTransaction
from tierfs.types import NO_CONTENT, ContentId, new_content_id
from tierfs.writeback.content import FileContent


class LocalCopies:
    """See the module docstring. ``now_ns``: the time of a dirty row."""

    def __init__(self, db: Database, cache: Cache, now_ns: Callable[[], int]) -> None:
        self._db = db
        self._cache = cache
        self._now_ns = now_ns
        self.settle_loan: Callable[[int], Awaitable[None]] = _leave
        """Awaited with an inode whose bytes are on loan (``namespace.loans``) before they change: gets it an
        object of its own, if the store can be reached."""

    async def make_writable(self, content: FileContent) -> Staging:
        """The local copy, made first if need be; its bytes are what they were."""
        if content.staging is None or content.sealing:
            await self.begin(content, keep=True)
        staging = content.staging
        assert staging is not None
        return staging

    async def begin(self, content: FileContent, *, keep: bool) -> None:
        """Make ``content`` local. With ``keep`` the bytes it has now stay readable in the new copy."""
        if keep and content.ref is not None and self._is_on_loan(content.ino):
            with suppress(TierfsError):
                await self.settle_loan(content.ino)
        async with content.lock:
            if content.staging is not None:
                return
            if content.local:
                # Made here and never written: the id is in the namespace, the file is not there yet.
                content.staging = await self._cache.create_staging(content.content_id)
                return
            old_ref, old_id = content.ref, content.content_id
            new_id = new_content_id()
            # Who reads the tier's file directly has to see the change there.
            keep = keep or content.passed_through > 0
            if keep and old_ref is not None and content.size_bytes:
                staging = await self._cache.convert(old_ref, new_id)
            else:
                staging = await self._cache.create_staging(new_id)
            try:
                if staging.base is not None and self._is_on_loan(content.ino):
                    # Nobody tells who changes bytes when the object that lends them moves.
                    await staging.fill()
                    await staging.sync()
                await self._db.commit(lambda txn: self._record_local(txn, content, new_id))
            except BaseException:
                with trio.CancelScope(shield=True):
                    await staging.discard()
                raise
            content.staging, content.content_id = staging, new_id
            content.local, content.ref = True, None
            if old_id != NO_CONTENT and not (keep and old_ref is not None):
                await self._cache.forget(old_id)

    def _is_on_loan(self, ino: int) -> bool:
        with self._db.read() as txn:
            return loans.loan_of(txn, ino) is not None

    def _record_local(self, txn: WriteTransaction, content: FileContent, new_id: ContentId) -> None:
        now_ns = self._now_ns()
        inode = tree.get(txn, content.ino)
        schema.put_inode(
            txn, schema.replace_inode(inode, content_id=new_id, flags=inode.flags | schema.DATA_LOCAL)
        )
        if not content.unlinked:
            publish.mark_dirty(txn, content.ino, "content", now_ns)

    async def keep_local(self, content: FileContent, staging: Staging) -> None:
        """Under the lock: ``staging`` was to become a clean copy, and has been changed in between."""
        content.local, content.staging, content.ref = True, staging, None
        await self._db.commit(lambda txn: self._record_local(txn, content, content.content_id))

    async def make_independent(self, content: FileContent) -> None:
        """Bring all bytes of a local content here, durably: it needs no object of the store any more.

        Before the object that absent blocks would come from is overwritten or given up. Raises what
        ``Staging.fill`` raises.
        """
        staging = content.staging
        if staging is not None and staging.base is not None:
            await staging.fill()
            await staging.sync()


async def _leave(ino: int) -> None:
    await trio.lowlevel.checkpoint()
