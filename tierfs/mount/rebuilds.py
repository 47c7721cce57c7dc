"""Answers to the control channel about restoring and cloning snapshots.

Everything that can be refused is refused before the job is written down; from then on ``rebuilder`` does
it, and who asked only waits: a command that goes away ends nothing, and the same command again waits for the
rest.
"""

from __future__ import annotations

import time
from contextlib import suppress

import trio

from tierfs.control import protocol as p
from tierfs.control.server import ControlServer, Report
from tierfs.errors import (
    AlreadyExists,
    Busy,
    InvalidArgument,
    NotADirectory,
    NotFound,
    StaleContent,
    TierfsError,
)
from tierfs.mount.parts import Parts
from tierfs.mount.paths import outside_reserved, resolve, text
from tierfs.mount.rebuilder import Running
from tierfs.mount.snapshots import SnapshotHandlers
from tierfs.namespace import jobs, past, records, snapshots, tree
from tierfs.namespace.sameness import Survey
from tierfs.namespace.schema import JobRow, SnapshotRow
from tierfs.namespace.transaction import ReadTransaction
from tierfs.types import Inode

REPORT_S = 0.2
MOST_NAMED = 3
RELEASE_PATIENCE_S = 1.0
RELEASE_LOOK_S = 0.05
UNCHANGEABLE = "below .tierfs nothing can be changed"


class RebuildHandlers:
    """One method per operation; see ``handlers.Handlers``."""

    def __init__(self, parts: Parts, made: SnapshotHandlers) -> None:
        self._parts = parts
        self._made = made

    def register(self, server: ControlServer) -> None:
        server.register("snapshot-restore", self.restore)
        server.register("snapshot-clone", self.clone)

    async def restore(self, request: p.SnapshotRestoreRequest, report: Report) -> p.SnapshotRestoreReply:
        parts = self._parts
        self._made.check_writable()
        path = outside_reserved(request.path, UNCHANGEABLE)
        with parts.db.read() as txn:
            row = snapshots.find(txn, request.name)
        running = parts.rebuilder.find(is_clone=False, path=path, epoch=row.epoch)
        if running is not None:
            return self._restored(request, await self._wait(running, "restore", report), None)
        with parts.db.read() as txn:
            source = self._in_snapshot(txn, row, self._relative(txn, row, path))
        try:
            target = await resolve(parts, path)
        except NotFound:
            # The directory has been removed: what takes its place is complete when it appears.
            clone = await self._make_clone(row, source, path, request.force, report)
            return p.SnapshotRestoreReply(
                path=text(path), name=text(row.name), entries=clone.looked_at, made=clone.made,
                missing=_missing(clone.missing), missing_count=len(clone.missing), elapsed_s=clone.elapsed_s,
            )  # fmt: skip
        if not target.is_dir:
            raise NotADirectory(f"/{text(path)} is a file now: move it away first")
        job = JobRow(0, False, row.epoch, source.ino, target.ino, path, 0)
        with parts.db.read() as txn:
            jobs.check_free(txn)
        await parts.refresher.complete_subtree(target.ino)
        parts.services.settle()
        await self._made.save_open_files()
        if not request.force:
            await self._check_not_written(path)
        found = await self._survey(job, request.force, report)
        if not found.changes:
            return p.SnapshotRestoreReply(
                path=text(path), name=text(row.name), entries=found.entries,
                missing=_missing(found.missing), missing_count=found.missing_count,
            )  # fmt: skip
        backup = await self._backup(path, report) if request.backup else None
        await self._made.save_open_files()
        job = await parts.db.commit(
            lambda txn: jobs.begin_restore(txn, row, source.ino, target.ino, path, time.time_ns()),
            durable=True,
        )
        running = await self._wait(parts.rebuilder.start(job), "restore", report)
        return self._restored(request, running, backup)

    async def clone(self, request: p.SnapshotCloneRequest, report: Report) -> p.SnapshotCloneReply:
        parts = self._parts
        self._made.check_writable()
        path = outside_reserved(request.path, UNCHANGEABLE)
        with parts.db.read() as txn:
            row = snapshots.find(txn, request.name)
            source = self._in_snapshot(txn, row, outside_reserved(request.below, UNCHANGEABLE))
        running = await self._make_clone(row, source, path, request.force, report)
        return p.SnapshotCloneReply(
            path=text(path), name=text(row.name), entries=running.made, missing=_missing(running.missing),
            missing_count=len(running.missing), elapsed_s=running.elapsed_s,
        )  # fmt: skip

    # -- private ---------------------------------------------------------------------------------------

    async def _make_clone(
        self, row: SnapshotRow, source: Inode, path: bytes, force: bool, report: Report
    ) -> Running:
        parts = self._parts
        begun = parts.rebuilder.find(is_clone=True, path=path, epoch=row.epoch)
        if begun is not None and begun.job.source_ino == source.ino:
            return await self._wait(begun, "clone", report)
        above, _, name = path.rpartition(b"/")
        if not name:
            raise AlreadyExists("a clone needs a path that does not exist yet, below the mountpoint")
        parent = await resolve(parts, above)
        if not parent.is_dir:
            raise NotADirectory(f"/{text(above)} is no directory")
        with suppress(NotFound):
            await parts.refresher.lookup(parent.ino, name)
            raise AlreadyExists(f"/{text(path)} exists already")
        with parts.db.read() as txn:
            jobs.check_free(txn)
        found = await self._survey(JobRow(0, True, row.epoch, source.ino, 0, path, 0), force, report)
        job = await parts.db.commit(
            lambda txn: jobs.begin_clone(
                txn, row, source.ino, parent.ino, name, path, parts.rebuilder.defaults, time.time_ns()
            ),
            durable=True,
        )
        running = parts.rebuilder.start(job)
        running.total = found.entries
        return await self._wait(running, "clone", report)

    async def _survey(self, job: JobRow, force: bool, report: Report) -> Survey:
        report(p.Progress(phase="compare", note="comparing"))
        found = await self._parts.rebuilder.survey(job)
        if found.missing_count and not force:
            path, reason = found.missing[0]
            raise StaleContent(
                f"{found.missing_count} entries of the snapshot cannot be had any more, the first is "
                f"{text(path)}: {reason}; --force goes on without them, and leaves alone what has their names"
            )
        return found

    async def _wait(self, running: Running, phase: str, report: Report) -> Running:
        """Until what was asked for can be seen. Raises what it failed with."""
        while not running.visible.is_set():
            done = min(running.looked_at, running.total) if running.total else running.looked_at
            report(p.Progress(phase=phase, done_files=done, total_files=running.total))
            with trio.move_on_after(REPORT_S):
                await running.visible.wait()
        if running.error is not None:
            raise running.error
        return running

    async def _backup(self, path: bytes, report: Report) -> str:
        """Keep what is there now. What is not in the store yet is brought there first."""
        stamp = time.strftime("before-restore-%Y%m%dT%H%M%SZ", time.gmtime())
        with self._parts.db.read() as txn:
            taken = {row.name for row in snapshots.visible(txn)}
        name, number = stamp, 1
        while name.encode() in taken:
            number += 1
            name = f"{stamp}-{number}"
        await self._made.create(p.SnapshotCreateRequest(path=path, name=name.encode()), report)
        return name

    async def _check_not_written(self, path: bytes) -> None:
        """Raises ``Busy``. Of a file that was closed just now the kernel tells a little later."""
        paths = self._written(path)
        with trio.move_on_after(RELEASE_PATIENCE_S):
            while paths:
                await trio.sleep(RELEASE_LOOK_S)
                self._parts.services.settle()
                paths = self._written(path)
        if paths:
            named = ", ".join(sorted(paths)[:MOST_NAMED]) + (", ..." if len(paths) > MOST_NAMED else "")
            raise Busy(
                f"{len(paths)} files are open for writing ({named}): close them, or use --force; what is "
                "written into a file that is replaced is lost"
            )

    def _written(self, path: bytes) -> set[str]:
        """Files at or below ``path`` that are open for writing."""
        paths: set[str] = set()
        for handle in self._parts.services.handles.files():
            if not handle.can_write or handle.content.unlinked:
                continue
            with self._parts.db.read() as txn, suppress(TierfsError):
                found = tree.path_of(txn, handle.content.ino)
                if records.is_below(found, path):
                    paths.add("/" + text(found))
        return paths

    def _relative(self, txn: ReadTransaction, row: SnapshotRow, path: bytes) -> bytes:
        """Where ``path`` is in the snapshot: by where its directory is now, or else was then."""
        tops = [row.path]
        live = records.find_inode(txn, row.root_ino)
        if live is not None and live.nlink:
            tops.insert(0, tree.path_of(txn, live.ino))
        for top in tops:
            if records.is_below(path, top):
                return path[len(top) :].strip(b"/")
        raise InvalidArgument(
            f"/{text(path)} is not in the snapshot {text(row.name)}, which is of /{text(tops[0])}"
        )

    def _in_snapshot(self, txn: ReadTransaction, row: SnapshotRow, below: bytes) -> Inode:
        inode = past.inode(txn, row, row.root_ino)
        for name in filter(None, below.split(b"/")):
            try:
                inode = past.lookup(txn, row, inode.ino, name)
            except NotFound:
                raise NotFound(f"the snapshot {text(row.name)} has no /{text(below)}") from None
        if not inode.is_dir:
            raise NotADirectory(
                f"/{text(below)} is a file in the snapshot {text(row.name)}: copy it from "
                f".tierfs/snapshots/{text(row.name)}/{text(below)}"
            )
        if not inode.listed_until_ns:
            raise StaleContent(
                f"/{text(below)} had not been listed when the snapshot {text(row.name)} was made, so nobody "
                "knows what was in it"
            )
        return inode

    def _restored(
        self, request: p.SnapshotRestoreRequest, running: Running, backup: str | None
    ) -> p.SnapshotRestoreReply:
        return p.SnapshotRestoreReply(
            path=text(running.job.path),
            name=text(request.name),
            backup=backup,
            entries=running.looked_at,
            made=running.made,
            replaced=running.replaced,
            removed=running.removed,
            changed=running.changed,
            atomic=running.batches == 1,
            missing=_missing(running.missing),
            missing_count=len(running.missing),
            elapsed_s=running.elapsed_s,
        )


def _missing(found: list[tuple[bytes, str]]) -> list[p.MissingFile]:
    return [p.MissingFile(path=text(path), reason=reason) for path, reason in found[: p.MAX_FAILURES]]
