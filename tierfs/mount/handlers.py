"""Answers to the control channel: what ``tierfs status``, ``flush``, ``prefetch``... ask of a mount."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

import structlog
import trio

from tierfs import __version__
from tierfs.control import protocol as p
from tierfs.control.server import ControlServer, Report
from tierfs.errors import NotSupported, TierfsError
from tierfs.mount import transport
from tierfs.mount.gauges import resident_set_bytes
from tierfs.mount.parts import Parts
from tierfs.mount.paths import resolve, text
from tierfs.namespace import publish, schema, tree
from tierfs.prefetch.job import PrefetchJob, PrefetchTarget
from tierfs.types import Inode, ObjectRef
from tierfs.writeback.backlog import Awaited

if TYPE_CHECKING:
    from tierfs.mount.engine import Engine

log = structlog.get_logger(__name__)

PAGE = 1000
ANSWER_TIME_S = 0.05
"""For the answer to leave before the process does."""
EXIT_UPGRADE = 75
"""What the front takes as no failure (``TIERFS_EXIT_UPGRADE`` in front_supervisor.h)."""
PROGRESS_INTERVAL_S = 0.2
Act = Callable[[Inode, ObjectRef | None], Awaitable[int]]
Walk = AsyncIterator[tuple[bytes, Inode, ObjectRef | None]]


class Handlers:
    """One method per operation. Each runs in a task of the control server and may be cancelled."""

    def __init__(self, parts: Parts, engine: Engine, nursery: trio.Nursery) -> None:
        self._parts = parts
        self._engine = engine
        self._nursery = nursery

    def register(self, server: ControlServer) -> None:
        server.register("status", self.status)
        server.register("flush", self.flush)
        server.register("import", self.import_prefix)
        server.register("prefetch", self.prefetch)
        server.register("pin", self.pin)
        server.register("unpin", self.unpin)
        server.register("evict", self.evict)
        server.register("drain", self.drain)
        server.register("unmount", self.unmount)
        server.register("upgrade", self.upgrade)

    async def status(self, request: p.StatusRequest, report: Report) -> p.StatusReply:
        parts, settings = self._parts, self._parts.settings
        counts = parts.store.counts
        files = parts.cache.files_in_tiers()
        with parts.db.read() as txn:
            inodes = tree.inode_count(txn)
        front = await self._front()
        parts.services.settle()
        return p.StatusReply(
            version=__version__,
            uptime_s=(time.time_ns() - parts.started_ns) / 1e9,
            source=settings.source,
            mountpoint=settings.mountpoint,
            mount_id=settings.mount_id,
            state_dir=settings.state_dir,
            read_only=settings.read_only,
            engine=p.EngineStatus(
                pid=os.getpid(),
                started_ns=parts.started_ns,
                rss_bytes=resident_set_bytes(),
                buffer_bytes=parts.cache.buffer_bytes,
                buffer_budget_bytes=settings.memory_budget_bytes,
            ),
            front=front,
            tiers=[
                p.TierStatus(
                    name=tier.name,
                    path=tier.path,
                    capacity_bytes=tier.capacity_bytes,
                    used_bytes=tier.used_bytes,
                    dirty_bytes=tier.dirty_bytes,
                    pinned_bytes=tier.pinned_bytes,
                    files=files[tier.name],
                    hits=tier.hits,
                    misses=tier.misses,
                    state=tier.state,
                    volatile=tier.volatile,
                )
                for tier in parts.cache.status()
            ],
            backlog=self._backlog(),
            stages=self._stages(),
            store=p.StoreStatus(
                url=parts.store.url,
                state="failing" if parts.publisher.failures or parts.deletions.failing else "ok",
                requests=dict(counts.by_operation),
                bytes_read=counts.bytes_read,
                bytes_written=counts.bytes_written,
            ),
            replica=self._replica(),
            open_handles=parts.services.handles.files_open + front.opened_here,
            open_directories=parts.services.handles.directories_open,
            inodes=inodes,
            hidden_keys=parts.refresher.counts.hidden_keys + parts.refresher.counts.shadowed_keys,
        )

    async def _front(self) -> p.FrontStatus:
        front = self._engine.front
        processes = front.processes
        status = p.FrontStatus(
            kind=front.kind, why=front.why, pid=processes["pid"], engine_starts=processes["engine_starts"]
        )
        counts = await front.counts()
        if counts is not None:
            status.answered = counts.answered
            status.relayed = counts.relayed
            status.repeated = counts.repeated
            status.passthrough_opens = counts.passthrough_opens
            status.opened_here = counts.opened_here
            status.passthrough_errno = counts.passthrough_errno
            status.no_open = bool(counts.no_open)
            status.transport = transport.kind_of(counts)
            status.transport_why = transport.why(self._parts.settings, counts)
            status.ring_requests = counts.ring_requests
            status.placed = counts.placed
        return status

    def _backlog(self) -> p.Backlog:
        waiting = self._parts.publisher.backlog.totals()
        with self._parts.db.read() as txn:
            deletes = publish.doomed_count(txn)
        oldest_s = (time.time_ns() - waiting.oldest_ns) / 1e9 if waiting.oldest_ns else 0.0
        return p.Backlog(
            files=waiting.files,
            bytes=waiting.bytes,
            oldest_s=max(oldest_s, 0.0),
            deletes=deletes,
            failed=self._failures(),
            conflicts=self._parts.publisher.conflicts,
            sent_bytes=self._parts.uploader.bytes_sent,
            copied_bytes=self._parts.uploader.bytes_copied,
        )

    def _stages(self) -> p.Stages:
        stages, writer = self._parts.stages, self._parts.writer
        memory, disk, uploading = stages.memory(), stages.disk(), stages.uploading()
        return p.Stages(
            memory=p.StageStatus(files=memory.files, bytes=memory.size_bytes),
            disk=p.StageStatus(files=disk.files, bytes=disk.size_bytes),
            uploading=p.StageStatus(files=uploading.files, bytes=uploading.size_bytes),
            store=p.StageStatus(files=writer.uploaded_files, bytes=writer.uploaded_bytes),
        )

    def _replica(self) -> p.ReplicaStatus | None:
        replicator = self._parts.replicator
        if replicator is None:
            return None
        waiting_files, waiting_bytes = replicator.waiting()
        why = replicator.failing or next(iter(replicator.failures.values()), "")
        return p.ReplicaStatus(
            url=replicator.url,
            state="failing" if why else "ok",
            why=why,
            held_files=replicator.held_files,
            held_bytes=replicator.held_bytes,
            waiting_files=waiting_files,
            waiting_bytes=waiting_bytes,
        )

    def _failures(self) -> list[p.Failure]:
        failures = list(self._parts.publisher.failures.values())[: p.MAX_FAILURES]
        return [p.Failure(path=failure.path, message=failure.message) for failure in failures]

    async def flush(self, request: p.FlushRequest, report: Report) -> p.FlushReply:
        publisher = self._parts.publisher
        awaited = Awaited(below=request.path, later=False)
        is_complete = await self._settle(awaited, request.timeout_s, report)
        open_files, open_bytes = publisher.backlog.still_open(awaited)
        remaining_files = awaited.left_files + open_files
        return p.FlushReply(
            flushed_files=awaited.found_files - awaited.left_files,
            flushed_bytes=awaited.found_bytes - awaited.left_bytes,
            remaining_files=remaining_files,
            remaining_bytes=awaited.left_bytes + open_bytes,
            open_files=open_files,
            remaining_deletes=0 if is_complete or request.path else self._parts.deletions.pending(),
            failed=self._failures() if awaited.left_files else [],
        )

    async def drain(self, request: p.DrainRequest, report: Report) -> p.DrainReply:
        await self._settle(Awaited(), request.timeout_s, report)
        left = self._parts.publisher.backlog.totals()
        return p.DrainReply(
            remaining_files=left.files,
            remaining_bytes=left.bytes,
            failed=self._failures() if left.files else [],
        )

    async def _settle(self, awaited: Awaited, timeout_s: float | None, report: Report) -> bool:
        """``Draining.settle`` with a limit; False also when the time was up."""

        def progress(files: int, size_bytes: int) -> None:
            report(
                p.Progress(
                    phase="upload",
                    done_files=awaited.found_files - files,
                    total_files=awaited.found_files,
                    done_bytes=awaited.found_bytes - size_bytes,
                    total_bytes=awaited.found_bytes,
                )
            )

        with trio.move_on_after(timeout_s if timeout_s is not None else float("inf")):
            return await self._parts.publisher.draining.settle(awaited, progress)
        return False

    async def unmount(self, request: p.UnmountRequest, report: Report) -> p.UnmountReply:
        left = self._parts.publisher.backlog.totals()
        if request.mode == "force":
            self._engine.stop(request.grace_s)
        else:
            self._engine.set_grace(request.grace_s)
        return p.UnmountReply(pid=os.getpid(), remaining_files=left.files, remaining_bytes=left.bytes)

    async def upgrade(self, request: p.UpgradeRequest, report: Report) -> p.UpgradeReply:
        if self._engine.front.kind != "native":
            raise NotSupported("only a mount with the native front outlives its engine: unmount, mount again")
        self._nursery.start_soon(self._make_room)
        return p.UpgradeReply(pid=os.getpid(), version=__version__)

    async def _make_room(self) -> None:
        """End this process; the front starts another. What is not committed by now is repeated there."""
        await trio.sleep(ANSWER_TIME_S)
        for handle in self._parts.services.handles.files():
            await self._parts.contents.size_and_times.save(handle.content)
        await self._parts.db.sync()
        log.info("makes room for a new engine")
        os._exit(EXIT_UPGRADE)

    async def import_prefix(self, request: p.ImportRequest, report: Report) -> p.ImportReply:
        started = time.monotonic()

        def progress(entries: int, directories: int) -> None:
            report(p.Progress(phase="list", done_files=entries, note=f"{directories} directories"))

        result = await self._parts.refresher.import_prefix(
            request.prefix, request.jobs, progress, metadata=request.metadata
        )
        return p.ImportReply(
            entries=result.entries,
            directories=result.directories,
            requests=result.requests,
            hidden_keys=result.hidden_keys,
            elapsed_s=time.monotonic() - started,
        )

    async def prefetch(self, request: p.PrefetchRequest, report: Report) -> p.PrefetchReply:
        if not request.wait:
            self._nursery.start_soon(self._prefetch_in_background, request.paths)
            return p.PrefetchReply(
                total_files=0,
                total_bytes=0,
                cached_bytes=0,
                failed_bytes=0,
                evicted_bytes=0,
                skipped_bytes=0,
                started=True,
            )
        return await self._prefetch(request.paths, report)

    async def _prefetch_in_background(self, paths: list[bytes]) -> None:
        try:
            reply = await self._prefetch(paths, lambda progress: None)
        except TierfsError as error:
            log.warning("prefetch failed", reason=str(error))
        except Exception:
            log.exception("unexpected exception", request="prefetch")
        else:
            log.info(
                "prefetch done",
                files=reply.total_files,
                cached_bytes=reply.cached_bytes,
                failed_files=reply.failed_files,
            )

    async def _prefetch(self, paths: list[bytes], report: Report) -> p.PrefetchReply:
        job = PrefetchJob(self._parts.cache, parallel_files=self._parts.settings.fetch_concurrency)

        async def targets() -> AsyncIterator[PrefetchTarget]:
            for path in paths:
                try:
                    async for found, inode, ref in self._walk(path, await resolve(self._parts, path)):
                        yield PrefetchTarget(found, inode.size_bytes, ref)
                except TierfsError as error:
                    job.fail(path, str(error) or "no such file")

        async def tell(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            task_status.started()
            while True:
                state = job.progress
                report(
                    p.Progress(
                        phase="prefetch",
                        done_bytes=state.cached_bytes,
                        total_bytes=state.total_bytes,
                        done_files=state.cached_files,
                        total_files=state.total_files,
                        failed_files=state.failed_files,
                    )
                )
                await trio.sleep(PROGRESS_INTERVAL_S)

        async with trio.open_nursery() as nursery:
            await nursery.start(tell)
            state = await job.run(targets())
            nursery.cancel_scope.cancel()
        return p.PrefetchReply(
            total_files=state.total_files,
            total_bytes=state.total_bytes,
            cached_bytes=state.cached_bytes,
            failed_bytes=state.failed_bytes,
            evicted_bytes=state.evicted_bytes,
            skipped_bytes=state.skipped_bytes,
            failed_files=state.failed_files,
            failed=[p.Failure(path=text(found.path), message=found.message) for found in state.failures],
        )

    async def pin(self, request: p.PinRequest, report: Report) -> p.PathsReply:
        async def pin(inode: Inode, ref: ObjectRef | None) -> int:
            if ref is None:
                raise TierfsError("not in the store yet: it is local anyway, pin it after the upload")
            await self._parts.cache.pin(ref, request.tier)
            return ref.size_bytes

        return await self._each(request.paths, pin)

    async def unpin(self, request: p.UnpinRequest, report: Report) -> p.PathsReply:
        async def unpin(inode: Inode, ref: ObjectRef | None) -> int:
            await self._parts.cache.unpin(inode.content_id)
            return inode.size_bytes

        return await self._each(request.paths, unpin)

    async def evict(self, request: p.EvictRequest, report: Report) -> p.PathsReply:
        async def evict(inode: Inode, ref: ObjectRef | None) -> int:
            if ref is None and inode.size_bytes:
                raise TierfsError("not in the store yet")
            content = self._parts.contents.peek(inode.ino)
            if content is not None and content.sealing:
                async with content.lock:  # its upload is over, and its bytes become a clean copy just now
                    pass
            return await self._parts.cache.evict(inode.content_id)

        return await self._each(request.paths, evict)

    async def _each(self, paths: list[bytes], act: Act) -> p.PathsReply:
        files, failed = await self._files_below(paths)
        done = size_bytes = 0
        for path, inode, ref in files:
            try:
                size_bytes += await act(inode, ref)
                done += 1
            except TierfsError as error:
                failed.append(p.Failure(path=text(path), message=str(error)))
        return p.PathsReply(files=done, bytes=size_bytes, failed=failed[: p.MAX_FAILURES])

    async def _files_below(
        self, paths: list[bytes]
    ) -> tuple[list[tuple[bytes, Inode, ObjectRef | None]], list[p.Failure]]:
        """Every regular file at or below ``paths``; what does not exist is a failure."""
        found: list[tuple[bytes, Inode, ObjectRef | None]] = []
        failed: list[p.Failure] = []
        for path in paths:
            try:
                inode = await resolve(self._parts, path)
                found.extend([entry async for entry in self._walk(path, inode)])
            except TierfsError as error:
                failed.append(p.Failure(path=text(path), message=str(error) or "no such file"))
        return found, failed

    async def _walk(self, path: bytes, inode: Inode) -> Walk:
        pending = [(path, inode)]
        while pending:
            path, inode = pending.pop()
            if inode.is_regular:
                inode = self._parts.contents.overlay(inode)
                with self._parts.db.read() as txn:
                    local = inode.flags & schema.DATA_LOCAL
                    ref = None if local else publish.ref_of(txn, inode)
                yield path, inode, ref
            elif inode.is_dir:
                await self._parts.refresher.listed(inode.ino)
                cookie = 0
                while True:
                    with self._parts.db.read() as txn:
                        entries = tree.readdir(txn, inode.ino, cookie, PAGE)
                    if not entries:
                        break
                    pending += [(path + b"/" + name if path else name, child) for name, _, child in entries]
                    cookie = entries[-1][1]
