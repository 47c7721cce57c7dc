"""All of a file copied into an empty one: by the store, so that the bytes do not pass through this node.

That is what cp(1) asks for with ``copy_file_range``. The object of the source is copied to the key of the
target, pinned to the version that the source has. When the store has acknowledged that, one durable commit
makes the target a clean file with that object. Until then it is what it was: empty, dirty, its key claimed as
for an upload, so that a crash leaves nothing that is not known. When the call has returned, the copy is in
the store, and nothing that happens to the source concerns it any more.

Not with the bytes on loan, as restores and clones have them (``namespace.loans``): what keeps an object for
those is what this node does not do, and others may replace it in the bucket at any time. A copy that was
acknowledged, and synced perhaps, would be lost then.

Only where nobody reads or writes the target without passing here: the kernel would go on with the file that
it was given, in which there would be nothing.

Who asked may go away while the store is at work. The request goes on, for nothing else may be sent to that
key meanwhile, and changes nothing here. Trio thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import structlog
import trio

from tierfs.cache import direct_writes
from tierfs.cache.residency import Cache
from tierfs.cache.staging import Staging
from tierfs.errors import NotFound, ObjectNotFound, PreconditionFailed, StoreError, TierfsError
from tierfs.namespace import publish, schema, tree
from tierfs.namespace.db import Database
from tierfs.namespace.transaction import WriteTransaction
from tierfs.types import ContentId, Inode, ObjectInfo, ObjectRef, new_content_id
from tierfs.writeback.claims import KeyClaims
from tierfs.writeback.content import FileContent
from tierfs.writeback.content_table import ContentTable
from tierfs.writeback.in_flight import NotYet
from tierfs.writeback.objects import ObjectWriter
from tierfs.writeback.publisher import Publisher

log = structlog.get_logger(__name__)

MIN_BYTES = 1024 * 1024
"""Of smaller files the bytes cost hardly more than the requests."""
ATTEMPTS = 20
PAUSE_S = 0.1
"""What stands in the way of a key, the deletion of an older object perhaps, mostly ends soon."""
REST_S = 60.0
"""A store that has failed to copy is not asked again for so long: the bytes may well go through here."""


class StoreCopy:
    """One copy that is under way."""

    def __init__(self, target: FileContent, staging: Staging, source: ObjectRef) -> None:
        self.target = target
        self.staging = staging
        self.source = source
        self._generation = staging.generation
        self._decided = trio.Event()
        self._ended = trio.Event()
        self._is_wanted = True
        self._is_done = False

    # for who asked

    async def decided(self) -> None:
        """Wait until it is about to be recorded, or has come to nothing. If cancelled: ``give_up``."""
        await self._decided.wait()

    def give_up(self) -> bool:
        """Nobody waits any more: the target stays what it is. False: too late, ask for the ``outcome``."""
        if not self._decided.is_set():
            self._is_wanted = False
        return not self._is_wanted

    async def outcome(self) -> bool:
        """Whether the target has the bytes now; else nothing has changed."""
        await self._ended.wait()
        return self._is_done

    # for ``StoreCopies``

    @property
    def is_possible(self) -> bool:
        """The target is empty, and nobody reads or writes it without passing here."""
        target, staging = self.target, self.staging
        return (
            self._is_wanted
            and target.local
            and target.staging is staging
            and not (target.sealing or target.unlinked or target.passed_through or target.live)
            and not (target.size_bytes or staging.size_bytes or staging.is_closed)
            and staging.generation == self._generation
        )

    def decide(self) -> bool:
        """It is about to be recorded, unless that is not possible any more."""
        if self.is_possible:
            self._decided.set()
        return self._decided.is_set()

    def note_done(self) -> None:
        self._is_done = True

    def end(self) -> None:
        self._decided.set()
        self._ended.set()


class StoreCopies:
    """See the module docstring."""

    def __init__(
        self,
        db: Database,
        cache: Cache,
        contents: ContentTable,
        writer: ObjectWriter,
        claims: KeyClaims,
        publisher: Publisher,
        now_ns: Callable[[], int],
    ) -> None:
        """``now_ns``: the time that a changed file gets."""
        self._db = db
        self._cache = cache
        self._contents = contents
        self._writer = writer
        self._claims = claims
        self._publisher = publisher
        self._now_ns = now_ns
        self._nursery: trio.Nursery | None = None
        self._rests_until_s = 0.0

    async def run(self) -> None:
        """Until cancelled. Nothing is copied before."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None

    def is_source(self, content: FileContent) -> bool:
        """Whether a copy of all of it is better made by the store: it is clean, and not all of it is here."""
        ref = content.ref
        return (
            not content.local
            and ref is not None
            and bool(ref.etag)
            and ref.size_bytes == content.size_bytes >= MIN_BYTES
            and not self._cache.is_complete(ref.content_id)
        )

    def begin(self, source: FileContent, target: FileContent) -> StoreCopy | None:
        """Have all of ``source`` copied into ``target``; None: that has to be done here."""
        if self._nursery is None or target.staging is None or not self.is_source(source):
            return None
        assert source.ref is not None
        copy = StoreCopy(target, target.staging, source.ref)
        if not copy.is_possible or self._publisher.holds(target.ino):
            return None
        if trio.current_time() < self._rests_until_s:
            return None
        self._nursery.start_soon(self._serve, copy)
        return copy

    async def _serve(self, copy: StoreCopy) -> None:
        key = copy.source.key
        try:
            # Also when who asked closes the file meanwhile.
            async with self._contents.used(copy.target.ino):
                await self._try(copy)
        except (NotYet, NotFound, ObjectNotFound, PreconditionFailed) as error:
            log.debug("a file is not copied by the store", key=key, reason=str(error))
        except TierfsError as error:
            self._rests_until_s = trio.current_time() + REST_S
            log.warning(
                "the store did not copy a file: its bytes go through here", key=key, reason=str(error)
            )
        except Exception:
            log.exception("unexpected exception while the store copied a file", key=key)
        finally:
            copy.end()

    async def _try(self, copy: StoreCopy) -> None:
        """Raises ``NotYet`` if something has been in the way for long."""
        ino = copy.target.ino
        for _ in range(ATTEMPTS):
            if not copy.is_possible:
                return
            if self._publisher.reserve(ino):
                try:
                    await self._copy(copy)
                    return
                except NotYet:
                    pass
                finally:
                    self._publisher.let_go(ino)
            await trio.sleep(PAUSE_S)
        raise NotYet(f"inode {ino}: something else is at work on its object")

    async def _copy(self, copy: StoreCopy) -> None:
        source, ino = copy.source, copy.target.ino
        if await direct_writes.is_open_elsewhere(copy.staging):
            return  # for writing, through a mount that has ended
        async with self._claims.held(ino) as keys:
            with self._db.read() as txn:
                row = publish.dirty_row(txn, ino)
                inode = tree.get(txn, ino)
            if row is None or len(keys) > 1 or not copy.is_possible:
                return  # each name is an object of its own
            now_ns = self._now_ns()
            copied = schema.replace_inode(
                inode,
                content_id=new_content_id(),
                size_bytes=source.size_bytes,
                mtime_ns=now_ns,
                ctime_ns=now_ns,
                flags=inode.flags & ~schema.DATA_LOCAL,
            )
            held = ObjectInfo(source.key, source.size_bytes, source.etag, 0, source.version_id)
            info = await self._writer.copy_object(held, copied, keys[0])
            if info.size_bytes != source.size_bytes:
                raise StoreError(f"{info.key}: a copy of {source.size_bytes} bytes has {info.size_bytes}")
            await self._take_over(copy, copied, info, row.generation)

    async def _take_over(self, copy: StoreCopy, copied: Inode, info: ObjectInfo, generation: int) -> None:
        target, staging = copy.target, copy.staging
        async with target.lock:
            if not copy.decide():
                return
            # Who comes to write waits for the lock, and meets a clean file.
            target.sealing = True
            try:
                record = partial(
                    self._record,
                    copied=copied,
                    old_id=target.content_id,
                    info=info,
                    generation=generation,
                )
                # Else a power cut could bring the empty file back, to replace the object that is there.
                if not await self._db.commit(record, durable=True):
                    return
                if target.staging is not staging or staging.size_bytes:
                    # Nobody should be able to; then the bytes go through here, around what was written.
                    await self._contents.local_copies.keep_local(target, staging)
                    return
                target.content_id, target.size_bytes = copied.content_id, copied.size_bytes
                target.mtime_ns, target.ctime_ns = copied.mtime_ns, copied.ctime_ns
                target.local, target.staging = False, None
                target.ref = ObjectRef(
                    copied.content_id, info.key, info.etag, info.size_bytes, info.version_id
                )
                target.unsaved, target.kept_for_readers = False, None
                copy.note_done()
            finally:
                target.sealing = False
        try:
            await staging.discard()
        except TierfsError as error:
            log.warning("an empty file was not removed from the write tier", reason=str(error))

    def _record(
        self, txn: WriteTransaction, *, copied: Inode, old_id: ContentId, info: ObjectInfo, generation: int
    ) -> bool:
        """False: the file has lost its name, or its bytes are others; then it keeps what it has."""
        inode = tree.get(txn, copied.ino)
        if not inode.nlink or inode.content_id != old_id or not inode.flags & schema.DATA_LOCAL:
            return False
        # Before the inode is changed: snapshots see that its bytes are others.
        publish.set_object(txn, inode.ino, info, [], self._now_ns())
        inode = tree.get(txn, copied.ino)
        schema.put_inode(
            txn,
            schema.replace_inode(
                inode,
                content_id=copied.content_id,
                size_bytes=copied.size_bytes,
                mtime_ns=copied.mtime_ns,
                ctime_ns=max(inode.ctime_ns, copied.ctime_ns),
                flags=inode.flags & ~schema.DATA_LOCAL,
            ),
        )
        # If it has been renamed meanwhile the row stays, and the object follows.
        publish.forget_dirty(txn, inode.ino, generation)
        return True
