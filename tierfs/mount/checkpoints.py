"""Answers to the control channel about checkpoints: what ``tierfs checkpoint`` asks of a mount."""

from __future__ import annotations

from collections.abc import AsyncIterator

import structlog
import trio

from tierfs.checkpoint.catalog import Catalog, Found
from tierfs.checkpoint.manifest import Manifest, Shard
from tierfs.checkpoint.pending import Pending
from tierfs.checkpoint.restore import Restorer
from tierfs.control import protocol as p
from tierfs.control.server import ControlServer, Report
from tierfs.errors import CheckpointError, TierfsError
from tierfs.mount.parts import Parts
from tierfs.mount.paths import resolve, text
from tierfs.namespace import records
from tierfs.prefetch.job import PrefetchJob, PrefetchTarget
from tierfs.store.keys import decode_key
from tierfs.writeback.backlog import Awaited

log = structlog.get_logger(__name__)

PROGRESS_INTERVAL_S = 0.2


class CheckpointHandlers:
    """One method per operation. Each runs in a task of the control server and may be cancelled."""

    def __init__(self, parts: Parts, nursery: trio.Nursery) -> None:
        self._parts = parts
        self._nursery = nursery
        self._catalog = Catalog(parts.store, parts.prefix, parts.commits.writer.fetch)
        self._restorer = Restorer(parts.db, parts.refresher)

    def register(self, server: ControlServer) -> None:
        server.register("checkpoint-commit", self.commit)
        server.register("checkpoint-list", self.list_all)
        server.register("checkpoint-verify", self.verify)
        server.register("checkpoint-restore", self.restore)
        server.register("checkpoint-remove", self.remove)

    async def commit(self, request: p.CheckpointCommitRequest, report: Report) -> p.CheckpointCommitReply:
        commits = self._parts.commits
        inode = await resolve(self._parts, request.path)
        pending = await commits.commit(inode.ino, step=request.step)
        if request.wait:
            limit_s = float("inf") if request.timeout_s is None else request.timeout_s
            with trio.move_on_after(limit_s):
                await self._hurry(request.path, pending, report)
        message = commits.failure_of(inode.ino)
        if message is not None:
            raise CheckpointError(f"{text(request.path)}: {message}")
        for path, found, ready, said in commits.pending():
            if found.save_id == pending.save_id:
                return p.CheckpointCommitReply(checkpoint=_local(path, found, ready, said))
        known = await self._catalog.load(request.path)
        return p.CheckpointCommitReply(checkpoint=_stored(Found(request.path, known)))

    async def _hurry(self, path: bytes, pending: Pending, report: Report) -> None:
        """Until the manifest is written; uploads of the directory do not wait for anything."""
        publisher, commits = self._parts.publisher, self._parts.commits
        awaited = Awaited(below=path)

        def progress(files: int, size_bytes: int) -> None:
            done_bytes = awaited.found_bytes - size_bytes
            report(p.Progress(phase="upload", done_bytes=done_bytes, total_bytes=awaited.found_bytes))

        while commits.is_pending(pending.save_id):
            await publisher.draining.settle(awaited, progress)
            if commits.is_pending(pending.save_id):
                await commits.wait_for_change()

    async def list_all(self, request: p.CheckpointListRequest, report: Report) -> p.CheckpointListReply:
        found = {known.path: _stored(known) for known in await self._catalog.find(request.path)}
        for path, pending, ready, message in self._parts.commits.pending():
            if records.is_below(path, request.path):
                found[path] = _local(path, pending, ready, message)
        return p.CheckpointListReply(checkpoints=[found[path] for path in sorted(found)])

    async def verify(self, request: p.CheckpointVerifyRequest, report: Report) -> p.CheckpointVerifyReply:
        known = await self._catalog.load(request.path)
        state = p.Progress(phase="verify", total_files=len(known.shards))
        if request.full:
            state.total_bytes = known.size_bytes
        checked_bytes = 0

        def on_shard(shard: Shard, size_bytes: int) -> None:
            nonlocal checked_bytes
            checked_bytes += size_bytes
            state.done_bytes = checked_bytes
            state.done_files += not size_bytes
            report(state)

        damage = await self._catalog.verify(known, full=request.full, on_shard=on_shard)
        return p.CheckpointVerifyReply(
            path=text(request.path),
            shards=len(known.shards),
            bytes=known.size_bytes,
            checked_bytes=checked_bytes,
            damaged_shards=len(damage),
            damaged=[p.Failure(path=found.file, message=found.message) for found in damage[: p.MAX_FAILURES]],
        )

    async def restore(self, request: p.CheckpointRestoreRequest, report: Report) -> p.CheckpointRestoreReply:
        known = await self._catalog.load(request.path)
        await self._restorer.adopt(request.path, known)
        reply = p.CheckpointRestoreReply(
            path=text(request.path),
            shards=len(known.shards),
            bytes=known.size_bytes,
            sums={shard.file: shard.xxh3_128 for shard in known.shards},
        )
        if request.wait:
            await self._fetch(request.path, known, report, reply)
        else:
            reply.started = True
            self._nursery.start_soon(self._fetch_in_background, request.path, known, reply)
        return reply

    async def _fetch_in_background(
        self, path: bytes, known: Manifest, reply: p.CheckpointRestoreReply
    ) -> None:
        try:
            await self._fetch(path, known, lambda progress: None, reply)
        except TierfsError as error:
            log.warning("restore failed", checkpoint=text(path), reason=str(error))
        except Exception:
            log.exception("unexpected exception", request="checkpoint-restore")
        else:
            log.info("restore done", checkpoint=text(path), cached_bytes=reply.cached_bytes,
                     failed_shards=reply.failed_shards)  # fmt: skip

    async def _fetch(
        self, path: bytes, known: Manifest, report: Report, reply: p.CheckpointRestoreReply
    ) -> None:
        job = PrefetchJob(self._parts.cache, parallel_files=self._parts.settings.fetch_concurrency)

        async def targets() -> AsyncIterator[PrefetchTarget]:
            for shard in known.shards:
                try:
                    yield await self._restorer.target(path, shard)
                except CheckpointError as error:
                    name = path + b"/" + (decode_key(shard.file) or b"")
                    job.fail(name, str(error), shard.size_bytes)

        async def tell() -> None:
            while True:
                state = job.progress
                report(
                    p.Progress(
                        phase="restore",
                        done_bytes=state.cached_bytes,
                        total_bytes=known.size_bytes,
                        done_files=state.cached_files,
                        total_files=len(known.shards),
                        failed_files=state.failed_files,
                    )
                )
                await trio.sleep(PROGRESS_INTERVAL_S)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(tell)
            state = await job.run(targets())
            nursery.cancel_scope.cancel()
        reply.cached_bytes, reply.failed_bytes = state.cached_bytes, state.failed_bytes
        reply.evicted_bytes, reply.skipped_bytes = state.evicted_bytes, state.skipped_bytes
        reply.failed_shards = state.failed_files
        reply.failed = [p.Failure(path=text(found.path), message=found.message) for found in state.failures]

    async def remove(self, request: p.CheckpointRemoveRequest, report: Report) -> p.CheckpointRemoveReply:
        had_manifest = await self._parts.commits.remove(request.path)
        return p.CheckpointRemoveReply(path=text(request.path), had_manifest=had_manifest)


def _local(path: bytes, pending: Pending, ready: int, message: str) -> p.CheckpointEntry:
    return p.CheckpointEntry(
        path=text(path), state="local", step=pending.step, created_ns=pending.created_ns,
        ranks=pending.world_size, shards=len(pending.files), left=len(pending.files) - ready, message=message,
    )  # fmt: skip


def _stored(found: Found) -> p.CheckpointEntry:
    known = found.manifest
    entry = p.CheckpointEntry(path=text(found.path), state="damaged" if found.damage else "in the store")
    if found.damage:
        first = found.damage[0]
        more = f" (and {len(found.damage) - 1} more)" if len(found.damage) > 1 else ""
        entry.message = f"{first.file}: {first.message}{more}" if first.file else first.message
    if known is not None:
        entry.step, entry.created_ns, entry.ranks = known.step, known.created_ns, known.world_size
        entry.shards, entry.bytes = len(known.shards), known.size_bytes
    return entry
