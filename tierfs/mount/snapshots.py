"""Answers to the control channel about snapshots."""

from __future__ import annotations

import time
from contextlib import suppress

import structlog
import trio

from tierfs.control import protocol as p
from tierfs.control.server import ControlServer, Report
from tierfs.errors import NotADirectory, ReadOnly, StoreError, TierfsError
from tierfs.fs.snapshots import LIST_INO, LIST_NAME
from tierfs.mount.parts import Parts
from tierfs.mount.paths import outside_reserved, resolve, text
from tierfs.namespace import difference, records, schema, snapshots, tree
from tierfs.namespace.schema import JobRow, SnapshotRow

log = structlog.get_logger(__name__)


class SnapshotHandlers:
    """One method per operation; see ``handlers.Handlers``."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def register(self, server: ControlServer) -> None:
        server.register("snapshot-create", self.create)
        server.register("snapshot-list", self.list_all)
        server.register("snapshot-delete", self.delete)
        server.register("snapshot-diff", self.diff)

    async def create(self, request: p.SnapshotCreateRequest, report: Report) -> p.SnapshotCreateReply:
        """Bring what was written to the store, hold requests that change it back, commit one transaction."""
        parts = self._parts
        self.check_writable()
        snapshots.check_name(request.name)
        root = await resolve(
            parts, outside_reserved(request.path, "a snapshot cannot be made of a snapshot")
        )
        if not root.is_dir:
            raise NotADirectory(f"{text(request.path) or '/'} is no directory")
        if request.complete:
            await parts.refresher.complete_subtree(root.ino)
        elif not root.listed_until_ns:
            await parts.refresher.listed(root.ino)
        deadline_s = request.timeout_s if request.timeout_s is not None else float("inf")
        stored: set[int] = set()
        with trio.move_on_after(deadline_s) as scope:
            if request.flush:
                stored = await self._flush(request.path, report)
            async with parts.preserver.standing_still():
                # What open files have not told yet belongs to the moment as well.
                parts.services.settle()
                await self.save_open_files()
                started = time.perf_counter()
                row = await parts.db.commit(
                    lambda txn: snapshots.create(txn, request.name, root.ino, now_ns=time.time_ns()),
                    durable=True,
                )
                elapsed_s = time.perf_counter() - started
                not_in_store = len(set(parts.publisher.backlog.inodes(request.path)[0]) - stored)
        if scope.cancelled_caught:
            raise StoreError(
                f"no snapshot was made: after {deadline_s:g} s not everything was in the store yet"
            )
        log.info("snapshot made", name=text(row.name), path=text(row.path), number=row.epoch)
        return p.SnapshotCreateReply(snapshot=self._info(row), elapsed_s=elapsed_s, not_in_store=not_in_store)

    async def list_all(self, request: p.SnapshotListRequest, report: Report) -> p.SnapshotListReply:
        with self._parts.db.read() as txn:
            rows = snapshots.visible(txn)
            jobs = snapshots.jobs(txn)
            kept = txn.entries(txn.tables.kept)
            sweeping = txn.get(schema.META_SWEEP, None, txn.tables.meta) is not None
        return p.SnapshotListReply(
            snapshots=[self._info(row) for row in rows],
            jobs=[_job_info(job) for job in jobs],
            kept_objects=kept,
            is_sweeping=sweeping,
        )

    async def delete(self, request: p.SnapshotDeleteRequest, report: Report) -> p.SnapshotDeleteReply:
        self.check_writable()
        row = await self._parts.db.commit(lambda txn: snapshots.delete(txn, request.name), durable=True)
        self._parts.kernel.entry_gone(LIST_INO, row.name)
        self._parts.preserver.note_deleted()
        log.info("snapshot deleted", name=text(row.name), number=row.epoch)
        return p.SnapshotDeleteReply(snapshot=self._info(row))

    async def diff(self, request: p.SnapshotDiffRequest, report: Report) -> p.SnapshotDiffReply:
        with self._parts.db.read() as txn:
            old = snapshots.find(txn, request.name)
            new = snapshots.find(txn, request.other) if request.other is not None else None
        await self.save_open_files()
        found: list[p.Difference] = []
        counts = {"added": 0, "removed": 0, "changed": 0}

        def compare() -> None:
            with self._parts.db.snapshot() as txn:
                for change, path, what in difference.between(txn, old, new):
                    counts[change] += 1
                    if len(found) < request.limit:
                        found.append(p.Difference(change=change, path=text(path), what=what))

        await trio.to_thread.run_sync(compare)
        return p.SnapshotDiffReply(differences=found, **counts)

    # -- private ---------------------------------------------------------------------------------------

    def check_writable(self) -> None:
        if self._parts.settings.read_only:
            raise ReadOnly("mounted read-only")

    async def _flush(self, path: bytes, report: Report) -> set[int]:
        """Put everything below ``path`` into the store; returns what of it is open for writing."""
        parts = self._parts
        stored: set[int] = set()

        def progress(files: int, size_bytes: int) -> None:
            report(p.Progress(phase="upload", note=f"{files} files left"))

        parts.services.settle()
        for handle in parts.services.handles.files():
            content = handle.content
            if not handle.can_write or content.unlinked:
                continue
            with parts.db.read() as txn:
                try:
                    below = records.is_below(tree.path_of(txn, content.ino), path)
                except TierfsError:
                    continue
            if below:
                with suppress(StoreError):  # it keeps changing: the snapshot has what was there before
                    await parts.publisher.publish_now(content.ino)
                    stored.add(content.ino)
        if not await parts.publisher.draining.drain(progress, below=path):
            left, _ = parts.publisher.backlog.inodes(path)
            left = [ino for ino in left if ino in parts.publisher.failures]
            if not left:
                return stored  # what is left waits to be deleted, which no snapshot minds
            reasons = [
                f"{failure.path}: {failure.message}"
                for ino, failure in parts.publisher.failures.items()
                if ino in left
            ]
            raise StoreError(
                f"no snapshot was made: {len(left)} files could not be put into the store"
                + (f" ({reasons[0]})" if reasons else "")
            )
        return stored

    async def save_open_files(self) -> None:
        for handle in self._parts.services.handles.files():
            self._parts.contents.passthrough.notice_direct_writes(handle.content)
            await self._parts.contents.size_and_times.save(handle.content)

    def _info(self, row: SnapshotRow) -> p.SnapshotInfo:
        mountpoint = self._parts.settings.mountpoint
        where = b"/".join((schema.RESERVED_NAME, LIST_NAME, row.name))
        return p.SnapshotInfo(
            name=text(row.name),
            path=text(row.path),
            location=f"{mountpoint}/{text(where)}",
            created_ns=row.created_ns,
            number=row.epoch,
            root_ino=row.root_ino,
        )


def _job_info(job: JobRow) -> p.SnapshotJob:
    kind = "clone" if job.is_clone else "restore"
    return p.SnapshotJob(kind=kind, path=text(job.path), started_ns=job.started_ns, number=job.epoch)
