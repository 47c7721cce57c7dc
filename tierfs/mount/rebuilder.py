"""Runs restores and clones of snapshots: batch by batch, each a transaction, with everybody else in between.

What has been begun stands in the namespace (``namespace.jobs``) and goes on by itself, whoever asked for it:
also at the next mount, from where the tree says that it is (``namespace.rebuild``). A restore that changes
little is one transaction: a survey on a snapshot of the database finds the directories in which something
differs, and those alone are gone through.

Trio thread only; surveys run in a worker thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import structlog
import trio

from tierfs.config import Settings
from tierfs.errors import NotFound, TierfsError
from tierfs.fs.kernel import KernelCaches
from tierfs.fs.remote import RemoteChanges
from tierfs.namespace import jobs, loans, publish, rebuild, records, schema, snapshots
from tierfs.namespace.db import Database
from tierfs.namespace.listing import Defaults
from tierfs.namespace.rebuild import Directory, Frame, Plan, Removal, Step
from tierfs.namespace.sameness import Survey, survey
from tierfs.namespace.schema import JobRow
from tierfs.namespace.transaction import WriteTransaction
from tierfs.writeback.content_table import ContentTable
from tierfs.writeback.publisher import Publisher

log = structlog.get_logger(__name__)

ATOMIC_CHANGES = 1000
"""A restore that changes no more than that is one transaction."""
LOOKS = 2000
CHANGES = 300
"""Of one batch: a few ten milliseconds, for which other changes wait."""
ANNOUNCED = 1000
FORGOTTEN = 1000
NO_LIMIT = 1 << 60


@dataclass(slots=True, eq=False)
class Running:
    """One job. The counts are of this run; ``missing``: paths that could not be had, and why."""

    job: JobRow
    total: int = 0
    looked_at: int = 0
    made: int = 0
    replaced: int = 0
    removed: int = 0
    changed: int = 0
    batches: int = 0
    missing: list[tuple[bytes, str]] = field(default_factory=list)
    error: TierfsError | None = None
    is_announcing: bool = False
    visible: trio.Event = field(default_factory=trio.Event)
    """What was asked for can be seen, or has failed."""
    ended: trio.Event = field(default_factory=trio.Event)
    started_s: float = field(default_factory=time.perf_counter)
    elapsed_s: float = 0.0

    def note_visible(self) -> None:
        if not self.visible.is_set():
            self.elapsed_s = time.perf_counter() - self.started_s
            self.visible.set()

    def count(self, step: Step) -> None:
        self.looked_at += step.looked_at
        self.made += step.made
        self.replaced += step.replaced
        self.removed += step.removed
        self.changed += step.changed
        self.batches += 1
        self.missing += step.missing[: max(0, 100 - len(self.missing))]


class Rebuilder:
    """See the module docstring."""

    def __init__(
        self,
        db: Database,
        publisher: Publisher,
        contents: ContentTable,
        remote: RemoteChanges,
        kernel: KernelCaches,
        settings: Settings,
        now_ns: Callable[[], int],
    ) -> None:
        self._db = db
        self._publisher = publisher
        self._contents = contents
        self._remote = remote
        self._kernel = kernel
        self.defaults = Defaults(
            uid=settings.uid, gid=settings.gid, file_mode=settings.file_mode, dir_mode=settings.dir_mode
        )
        self._now_ns = now_ns
        self._into, self._out = trio.open_memory_channel[Running](math.inf)
        self._running: dict[int, Running] = {}
        with db.read() as txn:
            left = snapshots.jobs(txn) if not settings.read_only else []
        for job in left:
            log.info("going on with what was interrupted", clone=job.is_clone, path=_text(job.path))
            self.start(job)

    def start(self, job: JobRow) -> Running:
        """Run a job that has been committed."""
        running = Running(job, is_announcing=job.phase == schema.JOB_ANNOUNCES)
        self._running[job.number] = running
        self._into.send_nowait(running)
        return running

    def find(self, *, is_clone: bool, path: bytes, epoch: int) -> Running | None:
        """The job that is at work on that already."""
        for running in self._running.values():
            job = running.job
            is_it = (job.is_clone, job.path, job.epoch) == (is_clone, path, epoch)
            if is_it and not running.visible.is_set():
                return running
        return None

    def is_announcing(self) -> bool:
        """Whether files of a clone that has its name are still being given to the publisher."""
        return any(running.is_announcing for running in self._running.values())

    async def survey(self, job: JobRow) -> Survey:
        """What the job would change now. Blocks nobody."""
        ino = 0 if job.is_clone else job.target_ino
        return await trio.to_thread.run_sync(self._survey, job.epoch, job.source_ino, ino)

    def _survey(self, epoch: int, source_ino: int, ino: int) -> Survey:
        with self._db.snapshot() as txn:
            row = snapshots.find_kept(txn, epoch)
            if row is None:
                raise NotFound(f"snapshot {epoch} is gone")
            return survey(txn, row, source_ino, ino, self.defaults, ATOMIC_CHANGES)

    async def finish(self) -> None:
        """Wait until nothing is under way."""
        while self._running:
            await next(iter(self._running.values())).ended.wait()

    async def run(self) -> None:
        """Work until cancelled."""
        async with trio.open_nursery() as nursery:
            async for running in self._out:
                nursery.start_soon(self._run, running)

    async def _run(self, running: Running) -> None:
        try:
            await self._work(running)
            await self._finish(running)
        except TierfsError as error:
            log.warning("ended before it was done", path=_text(running.job.path), reason=str(error))
            running.error = running.error or error
        except Exception:
            log.exception("a restore or clone failed; it will be tried again at the next mount")
            running.error = TierfsError("unexpected exception, see the log")
        finally:
            running.is_announcing = False
            running.note_visible()
            self._running.pop(running.job.number, None)
            running.ended.set()

    async def _work(self, running: Running) -> None:
        try:
            if running.job.phase == schema.JOB_BUILDS:
                await (self._clone(running) if running.job.is_clone else self._restore(running))
        except TierfsError as error:
            running.error = error
            if running.job.is_clone:
                discards = partial(jobs.with_phase, job=running.job, phase=schema.JOB_DISCARDS)
                running.job = await self._db.commit(discards)
        if running.job.phase == schema.JOB_ANNOUNCES:
            running.note_visible()
            await self._announce(running)
        elif running.job.phase == schema.JOB_DISCARDS:
            await self._steps(running, (Removal(0, b"", running.job.target_ino),))

    async def _finish(self, running: Running) -> None:
        """What a power cut must not take back: else it would be done again, over what came later."""
        ends = partial(jobs.end, job=running.job, limit=FORGOTTEN)
        while not await self._db.commit(ends, durable=True):
            pass
        log.info(
            "snapshot cloned" if running.job.is_clone else "snapshot restored",
            path=_text(running.job.path), entries=running.looked_at, made=running.made,
            replaced=running.replaced, removed=running.removed, changed=running.changed,
            failed=str(running.error or ""),
        )  # fmt: skip

    async def _restore(self, running: Running) -> None:
        job = running.job
        found = await self.survey(job)
        running.total = found.entries
        if found.directories is not None:
            frames: Sequence[Frame] = [
                Directory(path, old_ino, ino, descends=False) for path, old_ino, ino in found.directories
            ]
            step = await self._step(running, frames, looks=NO_LIMIT, changes=NO_LIMIT)
            assert not step.frames
            running.looked_at = found.entries
            return
        await self._steps(running, (Directory(b"", job.source_ino, job.target_ino),))

    async def _clone(self, running: Running) -> None:
        job = running.job
        await self._steps(running, (Directory(b"", job.source_ino, job.target_ino),))
        attach = partial(jobs.attach, job=job, now_ns=self._now_ns())
        running.is_announcing = True
        try:
            running.job = await self._db.commit(attach, durable=True)
        except TierfsError:
            running.is_announcing = False
            raise
        self._kernel.entry_gone(job.parent_ino, job.name)
        self._kernel.inode_changed(job.parent_ino, attributes_only=True)
        await self._kernel.passed_on()

    async def _announce(self, running: Running) -> None:
        after: int | None = 0
        while after is not None:
            announce = partial(
                jobs.announce, job=running.job, after=after, limit=ANNOUNCED, now_ns=self._now_ns()
            )
            announced = await self._db.commit(announce)
            self._publisher.schedule.note_many(announced.dirty)
            after = announced.after

    async def _steps(self, running: Running, frames: Sequence[Frame]) -> None:
        while frames:
            step = await self._step(running, frames, looks=LOOKS, changes=CHANGES)
            frames = step.frames

    async def _step(self, running: Running, frames: Sequence[Frame], *, looks: int, changes: int) -> Step:
        job = running.job
        with self._db.read() as txn:
            row = snapshots.find_kept(txn, job.epoch)
        if row is None:
            raise NotFound(f"snapshot {job.epoch} is gone")
        plan = Plan(row, job.number, job.is_clone, self.defaults, self._now_ns())
        step = await self._db.commit(
            partial(rebuild.step, plan=plan, frames=frames, looks=looks, changes=changes)
        )
        running.count(step)
        if not job.is_clone:
            await self._tell(step)
        return step

    async def _tell(self, step: Step) -> None:
        """After the commit: the kernel, open files, the publisher."""
        for ino in {change.parent_ino for change in step.invalidations} | set(step.touched):
            self._kernel.inode_changed(ino, attributes_only=True)
        for ino in step.touched:
            self._retell(ino)
        self._publisher.schedule.note_many(step.dirty)
        if step.removed or step.replaced:
            self._publisher.note_deletion()
        await self._remote.settle(step.invalidations)
        await self._kernel.passed_on()

    def _retell(self, ino: int) -> None:
        content = self._contents.peek(ino)
        if content is None or content.unsaved:
            return
        with self._db.read() as txn:
            inode = records.find_inode(txn, ino)
        if inode is not None:
            content.mtime_ns, content.ctime_ns = inode.mtime_ns, inode.ctime_ns


async def settle_loan(db: Database, publisher: Publisher, now_ns: Callable[[], int], ino: int) -> None:
    """Give a file with bytes on loan an object of its own now. Raises ``StoreError``."""

    def mark(txn: WriteTransaction) -> None:
        inode = records.find_inode(txn, ino)
        if inode is not None and inode.nlink and loans.loan_of(txn, ino) and not publish.is_dirty(txn, ino):
            publish.mark_dirty(txn, ino, schema.CREATED, now_ns())

    await db.commit(mark)
    await publisher.publish_now(ino)


def _text(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")
