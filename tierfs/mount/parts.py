"""Build the parts of an engine, in the order of the floors, and close them in the opposite one."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
import trio

from tierfs import exporter
from tierfs.cache.residency import Cache
from tierfs.checkpoint.commits import Commits
from tierfs.checkpoint.pending import PendingFiles
from tierfs.checkpoint.writing import ManifestWriter
from tierfs.config import Settings
from tierfs.errors import TransientStoreError
from tierfs.fs.handles import HandleTable
from tierfs.fs.interrupt import InterruptWatch
from tierfs.fs.kernel import KernelCaches
from tierfs.fs.ops import send_notice
from tierfs.fs.remote import RemoteChanges
from tierfs.fs.services import Services
from tierfs.fs.snapshots import Snapshots
from tierfs.metrics import Metrics
from tierfs.mount.rebuilder import Rebuilder, settle_loan
from tierfs.namespace import publish, records, schema, tree
from tierfs.namespace.db import Database
from tierfs.namespace.refresh import Refresher
from tierfs.namespace.transaction import WriteTransaction
from tierfs.prefetch.neighbours import following_in
from tierfs.prefetch.readahead import ReadAheadTable
from tierfs.store.base import ObjectStore
from tierfs.store.open import open_replica, open_store
from tierfs.store.retry import RetryingStore
from tierfs.types import ROOT_INO
from tierfs.writeback.claims import KeyClaims
from tierfs.writeback.content_table import ContentTable
from tierfs.writeback.copying import StoreCopies
from tierfs.writeback.deletions import Deletions
from tierfs.writeback.equal_parts import EqualParts
from tierfs.writeback.in_flight import InodesInFlight, KeysInFlight
from tierfs.writeback.objects import ObjectWriter
from tierfs.writeback.parking import Parking
from tierfs.writeback.part_index import PartIndex
from tierfs.writeback.preserve import Preserver
from tierfs.writeback.publisher import Publisher
from tierfs.writeback.replica.replicator import Replicator
from tierfs.writeback.stages import Stages
from tierfs.writeback.syncing import BackgroundSync
from tierfs.writeback.unfinished import UnfinishedUploads
from tierfs.writeback.upload import Uploader

log = structlog.get_logger(__name__)

CHECK_READERS_S = 60.0
"""Processes that read in batches may be killed at any rate, and LMDB has 512 slots for readers."""
PRETENDED_STORE_BYTES = 1 << 50
"""What ``df`` shows for a store without a limit: 1 PiB, as other object store mounts do."""
_CLOCK_REALTIME_COARSE = 5
"""Source: Linux ``include/uapi/linux/time.h``; Python has no name for it."""


def stamp_ns() -> int:
    """Now, for the times of files: by the clock with which the kernel stamps what it changes itself.

    ``utime(path, NULL)`` arrives with such a time. By a finer clock a file touched after its creation would
    be older than that.
    """
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


@dataclass(slots=True, eq=False)
class Parts:
    """Everything that ``engine``, ``recovery`` and ``handlers`` work with."""

    settings: Settings
    metrics: Metrics
    store: RetryingStore
    prefix: str
    db: Database
    cache: Cache
    refresher: Refresher
    contents: ContentTable
    publisher: Publisher
    writer: ObjectWriter
    commits: Commits
    deletions: Deletions
    uploader: Uploader
    preserver: Preserver
    unfinished: UnfinishedUploads
    readahead: ReadAheadTable
    kernel: KernelCaches
    remote: RemoteChanges
    rebuilder: Rebuilder
    services: Services
    stages: Stages
    background_sync: BackgroundSync
    started_ns: int
    replicator: Replicator | None = None

    def note_touched(self, inos: Sequence[int]) -> None:
        """The front has read these files from the tiers."""
        with self.db.read() as txn:
            for ino in inos:
                inode = records.find_inode(txn, ino)
                if inode is not None and inode.is_regular and inode.size_bytes:
                    self.cache.touch(inode.content_id, inode.size_bytes)

    def nobody_reads(self) -> None:
        """The mount is gone: what was kept for open files without a name can go."""
        self.deletions.is_read = lambda ino: False

    def start(self, nursery: trio.Nursery) -> None:
        """Start the background tasks that belong to no other part."""
        nursery.start_soon(self.commits.run)
        if not self.settings.read_only:
            nursery.start_soon(self.background_sync.run)
            for ino in self.publisher.backlog.inodes()[0]:
                self.background_sync.note(ino)  # an earlier run may not have come to it
        nursery.start_soon(self.readahead.run)
        if not self.settings.read_only:
            nursery.start_soon(self.preserver.run)
            nursery.start_soon(self.rebuilder.run)
            nursery.start_soon(self.services.copies.run)
        nursery.start_soon(self.remote.run)
        nursery.start_soon(self.services.interrupts.run)
        if self.replicator is not None:
            nursery.start_soon(self.replicator.run)
        nursery.start_soon(self._check_readers)

    async def _check_readers(self) -> None:
        while True:
            await trio.sleep(CHECK_READERS_S)
            self.db.check_readers()

    async def serve_metrics(
        self, address: str, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """The Prometheus endpoint."""
        await exporter.serve(
            address,
            self.metrics,
            labels={"mountpoint": self.settings.mountpoint},
            task_status=task_status,
        )


async def open_parts(
    settings: Settings,
    stack: AsyncExitStack,
    *,
    wrap: Callable[[ObjectStore], ObjectStore] | None = None,
    is_reattached: bool = False,
) -> Parts:
    """Open store, namespace and cache. Raises a ``TierfsError`` with the reason if one of them cannot be.

    ``is_reattached``: applications use the mount already, so that a store that does not answer now is waited
    for. ``wrap`` may put something between the store and its retries (tests inject faults there).
    """
    now_ns: Callable[[], int] = time.time_ns
    metrics = Metrics()
    store, prefix = await trio.to_thread.run_sync(lambda: open_store(settings, metrics=metrics, wrap=wrap))
    stack.callback(store.close)
    try:
        await trio.to_thread.run_sync(store.check)
    except TransientStoreError as error:
        if not is_reattached:
            raise
        log.warning("the store does not answer yet", reason=str(error))
    state_dir = Path(settings.state_dir)
    db = await trio.to_thread.run_sync(
        lambda: Database.open(
            state_dir, now_ns=now_ns, source=settings.source, prefix=prefix, ttl_ns=int(settings.ttl_s * 1e9)
        )
    )
    stack.callback(db.close)
    await own_root(db, settings)
    cache = await stack.enter_async_context(Cache.open(settings, store, metrics, settings.mount_id))
    kernel = KernelCaches(send_notice)
    contents = ContentTable(db, cache, stamp_ns)
    remote = RemoteChanges(db, contents, kernel)
    refresher = Refresher(db, store, settings, prefix, now_ns, remote.report)
    unfinished = UnfinishedUploads(state_dir / "uploads", store)
    part_index = await trio.to_thread.run_sync(PartIndex.open, state_dir / "parts.lmdb")
    stack.callback(part_index.close)
    with db.read() as txn:
        probe_key = f"{prefix}{publish.RESERVED_PREFIX}probe-{publish.file_system_id(txn)}"
    equal_parts = EqualParts(
        store, part_index, unfinished, probe_key, part_size_bytes=settings.part_size_bytes
    )
    uploader = Uploader(
        store,
        unfinished,
        equal_parts,
        metrics,
        concurrency=settings.upload_concurrency,
        memory_bytes=settings.memory_budget_bytes // 2,
    )
    keys, inodes = KeysInFlight(), InodesInFlight()
    preserver = Preserver(db, uploader, now_ns)
    deletions = Deletions(db, store, preserver, keys, now_ns)
    parking = Parking(db, store, contents, uploader, keys, inodes, now_ns)
    claims = KeyClaims(db, parking, preserver, keys, now_ns)
    writer = ObjectWriter(
        db,
        store,
        cache,
        contents,
        uploader,
        equal_parts,
        claims,
        now_ns,
        on_renamed=lambda parent, old, new: kernel.entry_gone(parent, old),
    )
    writer.on_loan_ended = preserver.note_deleted
    publisher = Publisher(db, contents, writer, parking, deletions, inodes, settings, now_ns)
    deletions.on_progress = publisher.draining.note_progress
    deletions.on_needed = parking.on_parked = publisher.schedule.note_now
    preserver.on_doomed = publisher.note_deletion
    cache.set_drain(publisher.draining.make_room, publisher.draining.ease)
    commits = Commits(
        db,
        ManifestWriter(store, cache, prefix),
        refresher,
        publisher,
        PendingFiles(state_dir / "checkpoints"),
        now_ns,
        read_only=settings.read_only,
    )
    await trio.to_thread.run_sync(commits.load)
    publisher.holds = commits.is_held
    readahead = ReadAheadTable(cache, settings, following=following_in(db), metrics=metrics)
    handles, interrupts = HandleTable(), InterruptWatch()
    background_sync = BackgroundSync(db, cache, contents, publisher.schedule.is_burst)
    services = Services(
        settings=settings,
        db=db,
        cache=cache,
        refresher=refresher,
        contents=contents,
        publisher=publisher,
        commits=commits,
        readahead=readahead,
        handles=handles,
        kernel=kernel,
        interrupts=interrupts,
        snapshots=Snapshots(db, cache, settings, readahead, interrupts, handles.new_number),
        background_sync=background_sync,
        copies=StoreCopies(db, cache, contents, writer, claims, publisher, stamp_ns),
        now_ns=stamp_ns,
        store_space=_space_of(settings),
    )
    rebuilder = Rebuilder(db, publisher, contents, remote, kernel, settings, now_ns)
    publisher.draining.announces = rebuilder.is_announcing
    contents.local_copies.settle_loan = partial(settle_loan, db, publisher, now_ns)
    deletions.is_read, parking.is_read = services.is_read, services.is_read_from_store
    remote.keep = services.keep_orphan
    return Parts(
        settings=settings,
        metrics=metrics,
        store=store,
        prefix=prefix,
        db=db,
        cache=cache,
        refresher=refresher,
        contents=contents,
        publisher=publisher,
        writer=writer,
        commits=commits,
        deletions=deletions,
        uploader=uploader,
        preserver=preserver,
        unfinished=unfinished,
        readahead=readahead,
        kernel=kernel,
        remote=remote,
        rebuilder=rebuilder,
        services=services,
        stages=Stages(cache, contents, writer),
        background_sync=background_sync,
        started_ns=now_ns(),
        replicator=await _open_replicator(settings, stack, db, contents, publisher),
    )


async def _open_replicator(
    settings: Settings, stack: AsyncExitStack, db: Database, contents: ContentTable, publisher: Publisher
) -> Replicator | None:
    """A replica that does not answer is waited for in the background; one that cannot be is an error."""
    if settings.replica is None or settings.read_only:
        return None
    store, place = await trio.to_thread.run_sync(lambda: open_replica(settings))
    stack.callback(store.close)
    unfinished = UnfinishedUploads(Path(settings.state_dir) / "replica-uploads", store)
    uploader = Uploader(
        store,
        unfinished,
        concurrency=settings.upload_concurrency,
        memory_bytes=settings.memory_budget_bytes // 4,
    )
    replicator = Replicator(
        db,
        contents,
        store,
        place,
        uploader,
        unfinished,
        settings.source,
        time.time_ns,
        part_size_bytes=settings.part_size_bytes,
    )
    publisher.schedule.on_changed = replicator.note
    publisher.on_deletion = replicator.note_deletion
    return replicator


async def own_root(db: Database, settings: Settings) -> None:
    """The root of a new namespace belongs to whom the mount says, with the mode of a directory without one.

    Once somebody has changed it through the mount it stays as it is.
    """

    def own(txn: WriteTransaction) -> None:
        root = tree.get(txn, ROOT_INO)
        if not root.flags & schema.META_KNOWN:
            mode = stat.S_IFDIR | settings.dir_mode
            schema.put_inode(txn, schema.replace_inode(root, mode=mode, uid=settings.uid, gid=settings.gid))

    await db.commit(own)


def _space_of(settings: Settings) -> Callable[[], tuple[int, int]]:
    """How ``df`` learns total and free bytes: of the directory's file system, or of a limitless bucket."""
    if not settings.source.startswith("s3://"):
        directory = settings.source.removeprefix("file://")

        def of_directory() -> tuple[int, int]:
            space = os.statvfs(directory)
            return space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize

        return of_directory
    return lambda: (PRETENDED_STORE_BYTES, PRETENDED_STORE_BYTES)
