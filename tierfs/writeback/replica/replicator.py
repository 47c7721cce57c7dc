"""Copies what is not in the store yet to the replica, and removes it there once it is.

State-based, like the publisher: ``note`` says that something about an inode may have changed; what is to be
done is found out from its rows at that moment. A file is copied when nobody has it open for writing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import structlog
import trio

from tierfs.errors import FormatError, NotFound, StoreError, TierFailed, TierfsError
from tierfs.namespace import publish, schema, tree
from tierfs.namespace.db import Database
from tierfs.namespace.metadata import metadata_of
from tierfs.store.base import UNCONDITIONAL
from tierfs.store.retry import RetryingStore
from tierfs.types import Inode
from tierfs.writeback.content import FileContent
from tierfs.writeback.content_table import ContentTable
from tierfs.writeback.equal_parts import plain_plan
from tierfs.writeback.replica import record as records
from tierfs.writeback.replica.record import FORMAT, ReplicaRecord
from tierfs.writeback.unfinished import UnfinishedUploads
from tierfs.writeback.upload import ContentChanged, Uploader

log = structlog.get_logger(__name__)

COPIES_AT_A_TIME = 4
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
SETTLE_S = 0.1
"""Before a copy: a save often sets times and renames right after the close."""
LOOK_AT_ALL_S = 1.0
"""How often, at most, everything that is held is compared with the namespace."""
SAME_TICK_NS = 20_000_000
"""Files are stamped by a clock that ticks every 1 to 10 ms: a change within one tick shows in no mtime."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the replica should hold of one file."""

    inode: Inode
    key: str
    replaces: str | None
    metadata: dict[str, str]

    def names_as(self, held: ReplicaRecord) -> bool:
        return (held.key, held.replaces, held.metadata) == (self.key, self.replaces, self.metadata)

    def has_bytes_of(self, held: ReplicaRecord) -> bool:
        inode = self.inode
        return (held.content, held.size_bytes, held.mtime_ns) == (
            inode.content_id.hex(),
            inode.size_bytes,
            inode.mtime_ns,
        )


class Replicator:
    """Trio thread only; store calls run in worker threads."""

    def __init__(
        self,
        db: Database,
        contents: ContentTable,
        store: RetryingStore,
        place: str,
        uploader: Uploader,
        unfinished: UnfinishedUploads,
        source: str,
        now_ns: Callable[[], int],
        *,
        part_size_bytes: int,
    ) -> None:
        with db.read() as txn:
            self._file_system = publish.file_system_id(txn)
        self._db = db
        self._contents = contents
        self._store = store
        self._place = place
        self._uploader = uploader
        self._unfinished = unfinished
        self._source = source
        self._now_ns = now_ns
        self._part_size_bytes = part_size_bytes
        self._held: dict[int, ReplicaRecord] = {}
        self._generations: dict[int, int] = {}
        """Of the staging file when it was copied, if that was in this process."""
        self._due: dict[int, float] = {}
        self._running: set[int] = set()
        self._wake = trio.Event()
        self._progress = trio.Event()
        self._looks_at_all = False
        self.failures: dict[int, str] = {}
        self._attempts: dict[int, int] = {}
        self.failing: str | None = None
        """Why the replica cannot be read at all."""

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def held_files(self) -> int:
        """Files that a loss of this node would not lose, although they are not in the store."""
        return len(self._held)

    @property
    def held_bytes(self) -> int:
        return sum(held.size_bytes for held in self._held.values())

    def waiting(self) -> tuple[int, int]:
        """Files, and their bytes, that are neither in the store nor, as they are now, in the replica."""
        files = size_bytes = 0
        with self._db.read() as txn:
            for row in publish.iter_dirty(txn):
                if row.ino in self._held and row.ino not in self._due and row.ino not in self._running:
                    continue
                try:
                    inode = tree.get(txn, row.ino)
                except NotFound:
                    continue
                if inode.is_regular and inode.flags & schema.DATA_LOCAL:
                    files, size_bytes = files + 1, size_bytes + inode.size_bytes
        return files, size_bytes

    async def settle(self) -> None:
        """Wait until the replica holds what it should, and no more. Not for what fails."""
        if self.failing is not None:
            return
        self._looks_at_all = bool(self._held)
        self._wake.set()
        while self._looks_at_all or self._running or self._due.keys() - self.failures.keys():
            event = self._progress
            with trio.move_on_after(LOOK_AT_ALL_S):
                await event.wait()

    def note(self, ino: int) -> None:
        """Something about that inode may have changed."""
        if ino not in self._due:
            self._due[ino] = trio.current_time() + SETTLE_S
            self._wake.set()

    def note_deletion(self) -> None:
        """A name has gone; which one does not matter."""
        if self._held and not self._looks_at_all:
            self._looks_at_all = True
            self._wake.set()

    def stop_retrying(self) -> None:
        """The mount ends: what does not work now fails at once."""
        self._store.stop_retrying()

    async def run(self) -> None:
        """Work until cancelled."""
        await self._load()
        with self._db.read() as txn:
            for row in publish.iter_dirty(txn):
                self.note(row.ino)
        for ino in self._held:
            self.note(ino)
        async with trio.open_nursery() as nursery:
            looked_at = trio.current_time()
            while True:
                self._wake = trio.Event()
                if self._looks_at_all and trio.current_time() >= looked_at + LOOK_AT_ALL_S:
                    self._looks_at_all, looked_at = False, trio.current_time()
                    for ino in self._held:
                        self._due.setdefault(ino, 0.0)
                pause = self._start_due(nursery)
                if self._looks_at_all:
                    pause = min(pause, LOOK_AT_ALL_S)
                with trio.move_on_after(pause):
                    await self._wake.wait()

    async def _load(self) -> None:
        """Read what an earlier run has left. Waits for the replica as long as it does not answer."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self._uploader.call(self._load_now)
            except StoreError as error:
                if self.failing is None:
                    log.warning("the replica cannot be read", replica=self.url, reason=str(error))
                self.failing = str(error)
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                self.failing = None
                return

    def _load_now(self) -> None:
        """Worker thread; nothing else uses what it fills meanwhile. Raises ``StoreError``."""
        self._unfinished.abort_all()
        held: dict[int, ReplicaRecord] = {}
        keys: list[str] = []
        token = None
        while True:
            page = self._store.list_page(
                records.directory_of(self._place, self._file_system), recursive=True, token=token
            )
            for info in page.objects:
                keys.append(info.key)
                if not records.is_record(info.key):
                    continue
                try:
                    found = records.read(self._store, info, self._place)
                except FormatError as error:
                    log.warning("a record in the replica is ignored", reason=str(error))
                else:
                    held[found.ino] = found
            token = page.next_token
            if token is None:
                break
        named = {each.data_key for each in held.values()}
        self._store.delete_many([key for key in keys if key.endswith(".data") and key not in named])
        self._held = held

    def _start_due(self, nursery: trio.Nursery) -> float:
        """Start what is due while there is room; seconds until there may be more to do."""
        now, soonest = trio.current_time(), float("inf")
        for ino, at in list(self._due.items()):
            if len(self._running) >= COPIES_AT_A_TIME:
                return float("inf")
            if ino in self._running:
                continue
            if at > now:
                soonest = min(soonest, at - now)
                continue
            del self._due[ino]
            self._running.add(ino)
            nursery.start_soon(self._look, ino)
        return soonest

    async def _look(self, ino: int) -> None:
        try:
            await self._bring_up_to_date(ino)
            self.failures.pop(ino, None)
            self._attempts.pop(ino, None)
        except ContentChanged:
            self._due[ino] = trio.current_time() + FIRST_PAUSE_S
        except TierfsError as error:
            self._failed(ino, str(error))
        except Exception:
            log.exception("unexpected exception while replicating", ino=ino)
            self._failed(ino, "unexpected exception, see the log")
        finally:
            self._running.discard(ino)
            self._wake.set()
            self._progress.set()
            self._progress = trio.Event()

    def _failed(self, ino: int, message: str) -> None:
        if self.failures.get(ino) != message:
            log.warning("not in the replica yet, will be tried again", ino=ino, reason=message)
        self.failures[ino] = message
        attempts = self._attempts[ino] = self._attempts.get(ino, 0) + 1
        self._due[ino] = trio.current_time() + min(FIRST_PAUSE_S * 2 ** (attempts - 1), LONGEST_PAUSE_S)

    def _wanted(self, ino: int) -> _Wanted | None:
        """None: the store has all its bytes, or it has no name any more, or it is no file."""
        with self._db.read() as txn:
            if publish.dirty_row(txn, ino) is None:
                return None
            try:
                inode = tree.get(txn, ino)
                keys = publish.key_of(txn, ino)
            except NotFound:
                return None
            if not (inode.is_regular and inode.nlink and inode.flags & schema.DATA_LOCAL and keys):
                return None
            replaces = publish.expected_etag(txn, ino, keys[0])
        inode = self._contents.overlay(inode)
        return _Wanted(inode, keys[0], replaces, metadata_of(inode))

    def _is_current(self, held: ReplicaRecord, wanted: _Wanted) -> bool:
        if not wanted.has_bytes_of(held):
            return False
        content = self._contents.peek(wanted.inode.ino)
        staging = content.staging if content is not None else None
        generation = self._generations.get(held.ino)
        if staging is not None and generation is not None and staging.generation != generation:
            return False
        return generation is not None or held.copied_ns - held.mtime_ns > SAME_TICK_NS

    async def _bring_up_to_date(self, ino: int) -> None:
        wanted, held = self._wanted(ino), self._held.get(ino)
        if wanted is None:
            if held is not None:
                await self._drop(held)
            elif self._is_directory(ino):
                # Perhaps moved: what lies below it has other keys now.
                self._looks_at_all = True
            return
        if held is None or not self._is_current(held, wanted):
            await self._copy(wanted, held)
        elif not wanted.names_as(held):
            await self._put(
                _replace(held, key=wanted.key, replaces=wanted.replaces, metadata=wanted.metadata)
            )

    def _is_directory(self, ino: int) -> bool:
        with self._db.read() as txn:
            try:
                return tree.get(txn, ino).is_dir
            except NotFound:
                return False

    async def _copy(self, wanted: _Wanted, held: ReplicaRecord | None) -> None:
        ino = wanted.inode.ino
        async with self._contents.used(ino) as content:
            if content.writers or not content.local:
                return  # its close, or the end of its upload, is noted
            await self._contents.passthrough.pull(content)
            self._contents.passthrough.notice_direct_writes(content)
            staging = content.staging
            if staging is None and content.size_bytes:
                raise TierFailed(f"{wanted.key}: its {content.size_bytes} bytes are not here any more")
            generation = staging.generation if staging is not None else 0
            fresh = self._wanted(ino)
            if fresh is None:
                return
            made = await self._send(fresh, content, generation)
        await self._put(made)
        self._generations[ino] = generation
        if held is not None and held.data_key and held.data_key != made.data_key:
            await self._uploader.call(partial(self._store.delete, held.data_key))

    async def _send(self, wanted: _Wanted, content: FileContent, generation: int) -> ReplicaRecord:
        """The bytes into the replica, and the record of them, which is not there yet."""
        inode, staging = wanted.inode, content.staging
        size_bytes = inode.size_bytes
        key = records.data_key(self._place, self._file_system, inode.ino, os.urandom(8).hex())
        plan = plain_plan(key, size_bytes, self._part_size_bytes)
        part_bytes = plan.part_size_bytes
        digests: dict[int, str] = {}
        made = ReplicaRecord(
            format=FORMAT, file_system=self._file_system, source=self._source, ino=inode.ino,
            key=wanted.key, replaces=wanted.replaces, content=inode.content_id.hex(),
            size_bytes=size_bytes, mtime_ns=inode.mtime_ns, copied_ns=self._now_ns(),
            metadata=wanted.metadata, data_key="", data_etag="", part_bytes=part_bytes, digests=[],
        )  # fmt: skip
        if staging is None or not size_bytes:
            return made

        def unchanged() -> bool:
            self._contents.passthrough.notice_direct_writes(content)
            return content.staging is staging and staging.generation == generation

        async def read(offset: int, length: int) -> bytes:
            body = await staging.read(offset, length)
            for start in range(0, len(body), part_bytes):
                part = memoryview(body)[start : start + part_bytes]
                digests[offset + start] = await trio.to_thread.run_sync(records.digest, part)
            return body

        info = await self._uploader.upload(plan, read, unchanged, {}, UNCONDITIONAL)
        ordered = [digests[offset] for offset in sorted(digests)]
        return _replace(made, data_key=key, data_etag=info.etag, digests=ordered)

    async def _put(self, made: ReplicaRecord) -> None:
        key = records.record_key(self._place, self._file_system, made.ino)
        await self._uploader.call(partial(self._store.put, key, records.encode(made)))
        self._held[made.ino] = made

    async def _drop(self, held: ReplicaRecord) -> None:
        key = records.record_key(self._place, self._file_system, held.ino)
        await self._uploader.call(partial(self._store.delete, key))
        self._held.pop(held.ino, None)
        self._generations.pop(held.ino, None)
        if held.data_key:
            await self._uploader.call(partial(self._store.delete, held.data_key))


def _replace(record: ReplicaRecord, **changes: object) -> ReplicaRecord:
    return msgspec.structs.replace(record, **changes)
