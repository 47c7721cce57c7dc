"""Size and times of an open file, on their way into the namespace.

Writes change them in ``FileContent`` alone (``unsaved``); whoever asks meanwhile sees them laid over the
record (``ContentTable.overlay``). Close, fsync and an upload bring them into the inode's record, which a
close of many files does in one commit.

Trio thread only. What was recorded is compared with what is there after the commit, and only then
``unsaved`` ends: a write during the commit is saved by the next one, and until the commit is visible
everybody has to see the values that are laid over.

Raises ``NotFound`` for an inode that is gone though it had a name, ``NamespaceError`` from the commit.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from tierfs.cache.residency import Cache
from tierfs.errors import NotFound
from tierfs.namespace import records, schema, tree
from tierfs.namespace.db import Database
from tierfs.namespace.transaction import WriteTransaction
from tierfs.types import ContentId
from tierfs.writeback.content import FileContent


@dataclass(frozen=True, slots=True)
class _State:
    """Of a content, what is recorded of it."""

    ino: int
    content_id: ContentId
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, content: FileContent) -> _State:
        return cls(content.ino, content.content_id, content.size_bytes, content.mtime_ns, content.ctime_ns)

    def record(self, txn: WriteTransaction) -> bool:
        """False: other bytes have taken the place of these meanwhile (``copying``). Raises ``NotFound``."""
        inode = tree.get(txn, self.ino)
        if inode.content_id != self.content_id:
            return False
        newest = max(inode.ctime_ns, self.ctime_ns)
        schema.put_inode(
            txn,
            schema.replace_inode(inode, size_bytes=self.size_bytes, mtime_ns=self.mtime_ns, ctime_ns=newest),
        )
        return True


class SizeAndTimes:
    """See the module docstring."""

    def __init__(self, db: Database, cache: Cache) -> None:
        self._db = db
        self._cache = cache

    def note_mtime(self, content: FileContent, mtime_ns: int) -> None:
        """The namespace is about to record it: see ``Cache.note_mtime``."""
        if content.live is not None:
            with suppress(OSError):
                content.live.set_mtime(mtime_ns)
        if content.local:
            self._cache.note_mtime(content.content_id, mtime_ns)

    async def save(self, content: FileContent, *, durable: bool = False) -> None:
        """Bring size and times into the namespace (flush, close, fsync). See ``Database.commit``."""
        if not content.unsaved:
            if durable:
                await self._db.sync()
            return
        state = _State.of(content)
        self.note_mtime(content, state.mtime_ns)
        is_recorded = True
        try:
            is_recorded = await self._db.commit(state.record, durable=durable, lazy=True)
        except NotFound:
            if not content.unlinked:
                raise
        # Only now: until the commit is visible everybody has to see the values laid over the record.
        if is_recorded and state == _State.of(content):
            content.unsaved = False

    async def save_durably(self, content: FileContent) -> None:
        """What the namespace knows survives a power cut, and the time of a file of the same size as well."""
        with self._db.read() as txn:
            inode = records.find_inode(txn, content.ino)
        if inode is None or inode.size_bytes != content.size_bytes:
            await self._db.sync()
        else:
            await self.save(content, durable=True)

    async def save_together(self, contents: Iterable[FileContent]) -> None:
        """``save`` in no hurry, in one commit, for files that are closed. Who has no inode is left out."""
        states: dict[int, tuple[FileContent, _State]] = {}
        for content in contents:
            if content.unsaved and content.ino not in states:
                states[content.ino] = content, _State.of(content)
                self.note_mtime(content, content.mtime_ns)
        if not states:
            return

        def record(txn: WriteTransaction) -> set[int]:
            replaced: set[int] = set()
            for _, state in states.values():
                with suppress(NotFound):
                    if not state.record(txn):
                        replaced.add(state.ino)
            return replaced

        replaced = await self._db.commit(record, hurried=False, lazy=True)
        for content, state in states.values():
            if state == _State.of(content) and state.ino not in replaced:
                content.unsaved = False
