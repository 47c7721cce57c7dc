"""The bytes of one inode: clean in the cache, or local in a staging file. See the package docstring.

A ``FileContent`` exists while somebody uses the inode: an open handle or the publisher. It moves between
two states only under its ``lock``:

* *clean*: ``ref`` names an object version; reads go to the cache.
* *local*: ``staging`` holds bytes that the store does not have; reads and writes go there.

``writers`` counts handles open for writing and truncations under way. The publisher turns a local content
clean only while there are none; it announces that by ``sealing``, so that a writer who comes in between waits
for the lock instead of writing into a file that is about to become immutable.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

import trio

from tierfs.cache.live import LiveFile
from tierfs.cache.reading import Place
from tierfs.cache.residency import Cache
from tierfs.cache.staging import Staging
from tierfs.errors import NotFound, ObjectTooLarge, TierFailed, TierfsError
from tierfs.namespace import loans, publish, records, schema, tree
from tierfs.namespace.db import Database
from tierfs.namespace.transaction import WriteTransaction
from tierfs.store.base import MAX_OBJECT_BYTES
from tierfs.types import NO_CONTENT, ContentId, Inode, ObjectRef, new_content_id
from tierfs.writeback.under_way import WritesUnderWay

NO_FILE = (0, 0)


@dataclass(slots=True, eq=False)
class FileContent:
    """See the module docstring. Sizes in bytes, times in nanoseconds."""

    ino: int
    content_id: ContentId
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    local: bool
    ref: ObjectRef | None = None
    staging: Staging | None = None
    users: int = 0
    writers: int = 0
    passed_through: int = 0
    """Opens whose reads and writes go to the file in the tier: while there are any it stays the same file."""
    lent: ContentId | None = None
    """The content whose file in the tier may not go, because it is passed through."""
    written_directly: bool = False
    """Bytes have been changed through such an open since the last ``chmod``."""
    live: LiveFile | None = None
    """Where such opens write, if that is not the staging file."""
    passed_file: tuple[int, int] | None = None
    """(device, inode) of the file that was lent last."""
    unlinked: bool = False
    linkable: bool = False
    """``unlinked`` because it has not got a name yet: its bytes are kept until the inode is forgotten."""
    kept_for_readers: int | None = None
    """The generation of the dirty row that is in the store; its staging file stays for who has it open."""
    unsaved: bool = False
    """Size or times here are newer than in the namespace."""
    sealing: bool = False
    lock: trio.Lock = field(default_factory=trio.Lock)
    under_way: WritesUnderWay = field(default_factory=WritesUnderWay)

    def read_nowait(self, cache: Cache, offset: int, length: int) -> bytes | None:
        """The bytes if they can be had without waiting, else None. Never blocks."""
        length = min(length, self.size_bytes - offset)
        if length <= 0:
            return b""
        if self.staging is not None:
            return self.staging.read_nowait(offset, length)
        if self.ref is not None:
            return cache.read_nowait(self.ref, offset, length)
        return None

    def place(self, cache: Cache, offset: int, length: int) -> Place | None:
        """Where clean bytes can be read; see ``Cache.place``."""
        if self.staging is not None or self.ref is None:
            return None
        return cache.place(self.ref, offset, min(length, self.size_bytes - offset))

    async def bring(self, cache: Cache, offset: int, length: int) -> None:
        """Wait until clean bytes have been fetched."""
        length = min(length, self.size_bytes - offset)
        if self.staging is None and self.ref is not None and length > 0:
            await cache.bring(self.ref, offset, length)

    async def read(self, cache: Cache, offset: int, length: int) -> bytes:
        """Up to ``length`` bytes; fewer only at the end of the file."""
        while (clipped := min(length, self.size_bytes - offset)) > 0:
            staging = self.staging
            if staging is None:
                break
            try:
                return await staging.read(offset, clipped)
            except TierFailed:
                if self.staging is staging:
                    raise
                # It became a clean copy, or was replaced, while this read was on its way.
        if clipped <= 0:
            return b""
        if self.ref is not None:
            return await cache.read(self.ref, offset, clipped)
        raise TierFailed(f"inode {self.ino}: its {self.size_bytes} bytes are neither here nor in the store")


class ContentTable:
    """Every ``FileContent`` in use, by inode. Trio thread only."""

    def __init__(self, db: Database, cache: Cache, now_ns: Callable[[], int]) -> None:
        self._db = db
        self._cache = cache
        self._now_ns = now_ns
        self._contents: dict[int, FileContent] = {}
        self._direct: set[FileContent] = set()
        self.direct_writes_began = trio.Event()
        """Set while ``written_directly`` may name some."""
        self._changing: dict[int, trio.Event] = {}
        """Inodes whose staging file is being opened or closed right now."""
        self.before_look: Callable[[], None] = _nothing
        """Takes in what happened on another thread; called before anybody looks for contents in use."""
        self.settle_loan: Callable[[int], Awaitable[None]] = _idle
        """Awaited with an inode whose bytes are on loan (``namespace.loans``) before they change: gets it an
        object of its own, if the store can be reached."""
        self.on_idle: Callable[[int], Awaitable[None]] = _idle
        """Awaited with an inode without a name whose last user has left."""

    def __len__(self) -> int:
        return len(self._contents)

    def peek(self, ino: int) -> FileContent | None:
        """The content in use for that inode, or None. Does not count as a use."""
        self.before_look()
        return self._contents.get(ino)

    def overlay(self, inode: Inode) -> Inode:
        """``inode`` with the size and times that have not reached the namespace yet."""
        content = self.peek(inode.ino)
        if content is not None and content.passed_through:
            self.notice_direct_writes(content)
        if content is None or not content.unsaved:
            return inode
        # A rename or chmod may be newer than the last write.
        return schema.replace_inode(
            inode,
            size_bytes=content.size_bytes,
            mtime_ns=content.mtime_ns,
            ctime_ns=max(inode.ctime_ns, content.ctime_ns),
        )

    async def acquire(self, ino: int) -> FileContent:
        """The content of that regular file, one use counted; ``release`` it. Raises ``NotFound``."""
        self.before_look()
        while (event := self._changing.get(ino)) is not None:
            await event.wait()
        content = self._contents.get(ino)
        if content is None:
            content = await self._open(ino)
        content.users += 1
        return content

    def acquire_new(self, inode: Inode) -> FileContent:
        """``acquire`` for a regular file that has just been made: empty.

        Whoever looks through the namespace may have found it before, between the commit and this call.
        """
        content = self._contents.get(inode.ino)
        if content is None:
            content = self._contents[inode.ino] = _content_of(inode, None)
        content.users += 1
        return content

    @asynccontextmanager
    async def used(self, ino: int) -> AsyncIterator[FileContent]:
        """``acquire``, and ``release`` in the end."""
        content = await self.acquire(ino)
        try:
            yield content
        finally:
            await self.release(content)

    async def _open(self, ino: int) -> FileContent:
        with self._db.read() as txn:
            inode = tree.get(txn, ino)
            ref = None if inode.flags & schema.DATA_LOCAL else publish.ref_of(txn, inode)
        content = _content_of(inode, ref)
        if not content.local:
            self._contents[ino] = content
            return content
        with self._changing_now(ino):
            content.staging = await self._cache.open_staging(content.content_id)
            if content.staging is not None and content.staging.size_bytes != content.size_bytes:
                # The file on disk is the truth: the record is only written at flush, fsync and close.
                content.size_bytes = content.staging.size_bytes
                content.unsaved = True
            # Not ours if ``acquire_new`` was called meanwhile.
            return self._contents.setdefault(ino, content)

    @contextmanager
    def _changing_now(self, ino: int) -> Iterator[None]:
        event = self._changing[ino] = trio.Event()
        try:
            yield
        finally:
            del self._changing[ino]
            event.set()

    def refresh_ref(self, content: FileContent) -> bool:
        """The object of a clean content got another key or ETag by our own doing (a move, a change of mode).

        True if ``content`` names another version now. The bytes are the same.
        """
        with self._db.read() as txn:
            try:
                inode = tree.get(txn, content.ino)
            except NotFound:
                return False
            ref = publish.ref_of(txn, inode)
        if content.local or ref is None or ref == content.ref or ref.content_id != content.content_id:
            return False
        content.ref = ref
        return True

    async def release(self, content: FileContent) -> None:
        """Give back one use; the last one closes files, and drops the bytes of an unlinked inode."""
        content.users -= 1
        if content.users:
            return
        self.end_passing(content)
        if self._contents.get(content.ino) is content:
            del self._contents[content.ino]
        staging, content.staging = content.staging, None
        if staging is not None and not content.unlinked and staging.close_now():
            return
        with self._changing_now(content.ino):
            if content.unlinked and not content.linkable:
                await self._drop(content, staging)
            elif staging is not None:
                await staging.close()
        if content.unlinked:
            await self.on_idle(content.ino)

    async def _drop(self, content: FileContent, staging: Staging | None) -> None:
        if staging is not None:
            # A power cut that brought the name back would find its bytes gone, fsynced or not.
            await self._db.sync()
            await staging.discard()
        elif content.content_id != NO_CONTENT:
            await self._cache.forget(content.content_id)

    async def drop_unlinked(self, inode: Inode, *, is_reaped: bool = False) -> None:
        """The last name of ``inode`` is gone: its bytes go now, or when the last user leaves.

        ``is_reaped``: the inode itself has gone, durably.
        """
        if not inode.is_regular:
            return
        self.before_look()
        while (event := self._changing.get(inode.ino)) is not None:
            await event.wait()
        content = self._contents.get(inode.ino)
        if content is not None:
            content.unlinked = True
        elif inode.flags & schema.DATA_LOCAL:
            # Who opens it meanwhile has to wait, and finds that its bytes are gone.
            with self._changing_now(inode.ino):
                staging = await self._cache.open_staging(inode.content_id)
                if staging is not None:
                    if not is_reaped:
                        await self._db.sync()
                    await staging.discard()
        elif inode.content_id != NO_CONTENT:
            await self._cache.forget(inode.content_id)

    async def write(self, content: FileContent, offset: int, data: bytes) -> int:
        """Write into the local copy, making one first if need be. Returns the bytes written.

        Raises ``ObjectTooLarge`` for what no object could hold.
        """
        check_size(offset + len(data))
        staging = await self.make_writable(content)
        if not staging.write_nowait(offset, data):
            await staging.write(offset, data)
        self.touch(content, staging.size_bytes)
        return len(data)

    async def make_writable(self, content: FileContent) -> Staging:
        """The local copy, made first if need be; its bytes are what they were."""
        if content.staging is None or content.sealing:
            await self._begin_write(content, keep=True)
        staging = content.staging
        assert staging is not None
        return staging

    async def truncate(self, content: FileContent, size_bytes: int) -> None:
        """Set the size; what is cut off is gone, what is added reads as zeros. Same size: nothing happens."""
        check_size(size_bytes)
        self.notice_direct_writes(content)
        if size_bytes == content.size_bytes:
            return
        # truncate(2) has no handle, and what it waits for must not become a clean copy meanwhile.
        content.writers += 1
        try:
            await self.pull(content)
            if content.staging is None or content.sealing:
                await self._begin_write(content, keep=size_bytes > 0)
            await self._take_live(content)
            staging = content.staging
            assert staging is not None
            if staging.size_bytes != size_bytes:
                await staging.truncate(size_bytes)
                await self.push(content, 0, 0)
            self.touch(content, staging.size_bytes)
        finally:
            content.writers -= 1

    def touch(self, content: FileContent, size_bytes: int) -> None:
        """The bytes have changed just now."""
        content.size_bytes = size_bytes
        content.mtime_ns = content.ctime_ns = self._now_ns()
        content.unsaved = True
        content.kept_for_readers = None

    async def _begin_write(self, content: FileContent, *, keep: bool) -> None:
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

    async def begin_direct_write(self, content: FileContent) -> None:
        """Somebody is about to write into the tier's file of a content that is passed through.

        Raises ``TierFailed`` if that file is not the one that applications have.
        """
        if content.staging is None or content.sealing:
            await self._begin_write(content, keep=True)
        await self._take_live(content)
        if content.live is not None:
            return
        await self.make_independent(content)
        staging = content.staging
        if staging is None:
            return
        if content.passed_file not in (None, staging.identity):
            raise TierFailed(f"inode {content.ino}: the file that applications have is gone from the tier")
        staging.begin_direct_writes(content.mtime_ns)
        self.notice_direct_writes(content)

    async def _take_live(self, content: FileContent) -> None:
        """Before bytes of a local content change: what is lent from a RAM tier becomes a live file."""
        if not content.passed_through or content.passed_file is None:
            return
        async with content.lock:
            staging = content.staging
            if content.live is not None or staging is None or content.passed_file == staging.identity:
                return
            lent = content.lent
            if staging.base is not None:
                lent = staging.base.content_id  # also if an earlier engine has lent it
            if lent is not None:
                content.live = await self._cache.take_live(lent, content.passed_file, content.ino)
            if content.live is not None:
                with suppress(OSError):
                    content.live.set_mtime(content.mtime_ns)

    async def pull(self, content: FileContent, *, always: bool = False) -> None:
        """Bring what was written into a live file to where it lasts.

        ``always``: also stores into a mapping, which nobody sees. Raises what ``Staging.write`` raises.
        """
        self.notice_direct_writes(content)
        live, staging = content.live, content.staging
        if live is not None and staging is not None and (live.is_behind or always):
            await live.pull(staging)

    async def push(self, content: FileContent, offset: int, end: int) -> None:
        """What the engine has changed in the staging file is seen by who has the live file open."""
        if content.live is not None and content.staging is not None:
            await content.live.push(content.staging, offset, end)

    def drop_live(self, content: FileContent) -> None:
        """Nobody has it open any more, and all of it has been pulled."""
        if content.live is not None:
            content.live.remove()
            content.live = content.passed_file = None

    def notice_direct_writes(self, content: FileContent) -> None:
        """Take in what was written without passing here. Blocks for as long as fstat(2) takes."""
        staging = content.staging
        if staging is None or not content.passed_through:
            return
        if content.live is not None:
            change = content.live.notice()
            size_bytes, mtime_ns = change or (0, None)
        else:
            mtime_ns = staging.notice_direct_writes(content.mtime_ns)
            size_bytes = staging.size_bytes
        if mtime_ns is not None:
            content.written_directly = True
            content.kept_for_readers = None
            content.size_bytes = size_bytes
            content.mtime_ns = content.ctime_ns = mtime_ns
            content.unsaved = True

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

    async def lend_dirty(self, content: FileContent, *, writes: bool) -> int | None:
        """A descriptor of the staging file, if it can be read (``writes``: and written) without passing here.

        The caller closes it. With ``writes`` it is counted in ``content.writers``, so that the file does not
        become a clean copy meanwhile. For a reader nothing is waited for.
        """
        if content.sealing or content.live is not None or not self._cache.keeps_what_was_written:
            return None
        if not content.passed_through:
            if writes and not self._cache.takes_direct_writes:
                return None
            if not writes and (content.staging is None or content.writers or not content.size_bytes):
                return None
        staging = content.staging or await self.make_writable(content)
        descriptor = staging.lend(content.mtime_ns)
        if descriptor is not None:
            content.passed_file = staging.identity
        return descriptor

    def written_directly(self) -> list[FileContent]:
        """Contents into whose staging files somebody may be writing without passing here."""
        found = [content for content in self._direct if content.passed_through and content.writers]
        self._direct = set(found)
        if not found:
            self.direct_writes_began = trio.Event()
        return found

    def ahead_of_staging(self) -> list[FileContent]:
        """Contents whose newest bytes are in a live file alone."""
        return [content for content in self._direct if content.live is not None and content.live.is_behind]

    def count_passed(self, content: FileContent, *, writes: bool) -> None:
        """One more open passes through."""
        content.passed_through += 1
        if writes:
            self.note_direct_writer(content)

    def note_direct_writer(self, content: FileContent) -> None:
        """An open for writing passes through; it is counted in ``passed_through`` and ``writers``."""
        self._direct.add(content)
        self.direct_writes_began.set()

    def lend(self, content: FileContent) -> int | None:
        """A descriptor of a file that holds all bytes, and does until the last user of ``content`` is gone.

        None if there is no such file. The caller closes it. Blocks for as long as open(2) takes.
        """
        if content.local or content.ref is None or not content.size_bytes or content.live is not None:
            return None
        # While it is passed through the kernel takes no other file.
        known = content.passed_file if content.passed_through else None
        descriptor = self._cache.lend(content.ref, again=content.lent is not None, identity=known)
        if descriptor is not None:
            content.lent = content.content_id
            info = os.stat(descriptor)
            content.passed_file = info.st_dev, info.st_ino
        return descriptor

    def end_passing(self, content: FileContent) -> None:
        """The last open that passed through is over."""
        self.drop_live(content)
        if content.lent is not None:
            self._cache.give_back(content.lent)
        content.lent = content.passed_file = None

    async def keep_passed(self, content: FileContent) -> None:
        """Keep the file that applications have in its place: what is known of it is out of date.

        An upload has turned the staging file into a clean copy, or it was lent by an engine that is dead.
        """
        if content.lent is not None:
            self._cache.give_back(content.lent)
            content.lent = None
        if not content.passed_through:
            return
        found: tuple[int, int] | None
        if content.live is not None:
            found = content.live.identity
        elif content.staging is not None:
            found = content.staging.identity
            base = content.staging.base
            if base is not None and content.passed_file not in (None, found):
                content.lent = base.content_id
                if await self._cache.hold(base, content.passed_file) is None:
                    content.lent = None
        elif content.ref is not None:
            content.lent = content.content_id
            found = await self._cache.hold(content.ref, content.passed_file)
            if found is None:
                content.lent = None
        else:
            found = None
        if content.passed_file is None:
            content.passed_file = found or NO_FILE

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
        try:
            await self._db.commit(state.record, durable=durable, lazy=True)
        except NotFound:
            if not content.unlinked:
                raise
        # Only now: until the commit is visible everybody has to see the values laid over the record.
        if state == _State.of(content):
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

        def record(txn: WriteTransaction) -> None:
            for _, state in states.values():
                with suppress(NotFound):
                    state.record(txn)

        await self._db.commit(record, hurried=False, lazy=True)
        for content, state in states.values():
            if state == _State.of(content):
                content.unsaved = False


@dataclass(frozen=True, slots=True)
class _State:
    """Of a content, what is recorded of it."""

    ino: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, content: FileContent) -> _State:
        return cls(content.ino, content.size_bytes, content.mtime_ns, content.ctime_ns)

    def record(self, txn: WriteTransaction) -> None:
        """Raises ``NotFound``."""
        inode = tree.get(txn, self.ino)
        newest = max(inode.ctime_ns, self.ctime_ns)
        schema.put_inode(
            txn,
            schema.replace_inode(inode, size_bytes=self.size_bytes, mtime_ns=self.mtime_ns, ctime_ns=newest),
        )


def _content_of(inode: Inode, ref: ObjectRef | None) -> FileContent:
    return FileContent(
        ino=inode.ino,
        content_id=inode.content_id,
        size_bytes=inode.size_bytes,
        mtime_ns=inode.mtime_ns,
        ctime_ns=inode.ctime_ns,
        local=bool(inode.flags & schema.DATA_LOCAL),
        ref=ref,
    )


def _nothing() -> None:
    return None


async def _idle(ino: int) -> None:
    await trio.lowlevel.checkpoint()


def check_size(size_bytes: int) -> None:
    """Raises ``ObjectTooLarge``."""
    if size_bytes > MAX_OBJECT_BYTES:
        raise ObjectTooLarge(f"{size_bytes} bytes are more than an object can hold ({MAX_OBJECT_BYTES})")
