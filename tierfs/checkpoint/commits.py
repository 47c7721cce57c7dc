"""The engine's part of a commit: wait until every shard is in the store, then write the manifest.

Owns the requests that are not finished (``pending``), and the directories that are being written, of which
the publisher asks ``is_held``: uploads of a working directory wait for its final name, since an object that
was put under another one would have to be copied on the server, and a directory of which nothing is in the
store can be renamed without asking it. Not for longer than ``HOLD_LIMIT_S``, and not when somebody waits for
the backlog.

A commit goes on from its record after a crash at any point. What it writes depends on the state only: object
rows that the publisher has committed after the store acknowledged, and the checksums of the local bytes. The
rows are looked at again after the sums are made and right before the manifest is put; if anything has changed
in between, all of it is done again.

Trio thread only. Raises what is said at each method; in the background nothing: a failure is kept, shown, and
tried again.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
import structlog
import trio

from tierfs.checkpoint.pending import Held, Pending, PendingFile, PendingFiles
from tierfs.checkpoint.shards import Lost, Ready, files_below, inode_of, ranks_of, ready_file
from tierfs.checkpoint.writing import ManifestWriter
from tierfs.errors import InvalidArgument, NoAttribute, NotFound, ReadOnly, TierfsError
from tierfs.namespace import records
from tierfs.namespace.db import Database
from tierfs.namespace.refresh import Refresher
from tierfs.namespace.transaction import ReadTransaction
from tierfs.store.keys import encode_path
from tierfs.types import ROOT_INO, ContentId
from tierfs.writeback.publisher import Publisher

log = structlog.get_logger(__name__)

HOLD_LIMIT_S = 3600.0
LOOK_S = 1.0
"""How often is looked without having been told."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
MAX_REMEMBERED = 1000


class _Ask(msgspec.Struct, kw_only=True):
    """What a process writes into ``user.tierfs.checkpoint`` (``working.WorkingDirectory``).

    ``name``: of the directory while it is written, its bytes in hexadecimal.
    """

    action: str
    id: str
    name: str = ""
    step: int | None = None
    world_size: int = 1
    node: int = 0
    nodes: int = 1


class _Progress:
    """One commit under way. ``ready``: files from the front that are in the store; sums by content.

    ``is_hurried``: the publisher has been told that the directory has its name.
    """

    def __init__(self, pending: Pending) -> None:
        self.pending = pending
        self.is_hurried = not pending.working_name
        self.ready = 0
        self.sums: dict[ContentId, str] = {}
        self.message = ""


class Commits:
    """See the module docstring."""

    def __init__(
        self,
        db: Database,
        writer: ManifestWriter,
        refresher: Refresher,
        publisher: Publisher,
        files: PendingFiles,
        now_ns: Callable[[], int],
        *,
        read_only: bool = False,
    ) -> None:
        self._db = db
        self.writer = writer
        self._refresher = refresher
        self._publisher = publisher
        self._files = files
        self._now_ns = now_ns
        self._read_only = read_only
        self._under_way: dict[str, _Progress] = {}
        self._held: dict[int, Held] = {}
        self._failed: dict[int, str] = {}
        self._nursery: trio.Nursery | None = None
        self._changed = trio.Event()
        self._putting = trio.Lock()
        """Held while a manifest is put or removed: one that is late must not undo what came after it."""

    # requests

    async def take_attribute(self, ino: int, value: bytes) -> None:
        """``user.tierfs.checkpoint`` was set on a directory. Durable when this returns.

        Raises ``InvalidArgument``, ``NotADirectory``, ``ReadOnly``.
        """
        try:
            ask = msgspec.json.decode(value, type=_Ask)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"user.tierfs.checkpoint: {error}") from None
        if ask.action == "saving":
            try:
                working_name = encode_path(bytes.fromhex(ask.name))
            except ValueError:
                raise InvalidArgument("user.tierfs.checkpoint: name is hexadecimal") from None
            if not working_name:
                raise InvalidArgument("user.tierfs.checkpoint: name is empty")
            await self._hold(ino, working_name)
        elif ask.action == "commit":
            await self.commit(ino, ask.id, ask.step, ask.world_size, node=ask.node, nodes=ask.nodes)
        else:
            raise InvalidArgument(f"user.tierfs.checkpoint: action {ask.action!r}")

    async def _hold(self, ino: int, working_name: str) -> None:
        if self._read_only:
            raise ReadOnly("mounted read-only")
        with self._db.read() as txn:
            records.get_directory(txn, ino)
        record = Held(ino=ino, working_name=working_name, since_ns=self._now_ns())
        await trio.to_thread.run_sync(self._files.put, record)
        self._held[ino] = record

    async def commit(
        self,
        ino: int,
        save_id: str = "",
        step: int | None = None,
        world_size: int = 1,
        *,
        node: int = 0,
        nodes: int = 1,
    ) -> Pending:
        """Ask for the manifest of the files that are now in directory ``ino``. Durable when this returns.

        Raises ``InvalidArgument``, ``NotADirectory``, ``NotFound``, ``ReadOnly``, ``StoreError``.
        """
        if self._read_only:
            raise ReadOnly("mounted read-only: no manifest can be written")
        save_id = save_id or secrets.token_hex(16)
        if not (len(save_id) == 32 and save_id.isalnum() and save_id.isascii()) or not 0 <= node < nodes:
            raise InvalidArgument("user.tierfs.checkpoint: id is 32 letters and digits, node less than nodes")
        with self._db.read() as txn:
            records.get_directory(txn, ino)
            self.writer.key_of(records.path_of(txn, ino))
        held = self._held.get(ino)
        if held is None:
            await self._refresher.complete_subtree(ino)
        with self._db.read() as txn:
            records.get_directory(txn, ino)
            files = files_below(txn, ino)
            ranks = ranks_of(txn, ino)
        pending = Pending(
            save_id=save_id, ino=ino, working_name=held.working_name if held is not None else "", step=step,
            created_ns=self._now_ns(), world_size=world_size, node=node, nodes=nodes,
            files=tuple(PendingFile(file=file, rank=ranks.get(file)) for file in files),
        )  # fmt: skip
        await trio.to_thread.run_sync(self._files.put, pending)
        for other in [known.pending for known in self._under_way.values() if known.pending.ino == ino]:
            await self._forget(other)  # asked for again: this one knows more
        self._failed.pop(ino, None)
        self._begin(pending)
        return pending

    async def remove(self, path: bytes) -> bool:
        """No manifest of the checkpoint at ``path`` exists, or will, when this returns.

        False: there was none. Raises ``ReadOnly``, ``StoreError``.
        """
        if self._read_only:
            raise ReadOnly("mounted read-only")
        found = False
        for progress in list(self._under_way.values()):
            if self._path_of(progress.pending.ino) == path:
                await self._forget(progress.pending)
                found = True
        async with self._putting:
            if not await self.writer.exists(path):
                return found
            await self.writer.delete(path)
        return True

    # what others ask

    def is_held(self, ino: int) -> bool:
        """Whether an inode lies in a directory that is being written; see ``Publisher.holds``."""
        if not self._held:
            return False
        with self._db.read() as txn:
            while ino != ROOT_INO:
                above = records.first_name(txn, ino)
                if above is None:
                    return False
                held = self._held.get(ino)
                if held is not None and held.is_named(encode_path(above[1])):
                    return self._now_ns() - held.since_ns < HOLD_LIMIT_S * 1e9
                ino = above[0]
        return False

    async def state_of(self, ino: int) -> dict[str, Any]:
        """See ``checkpoint.state``. Raises ``NoAttribute``, ``StoreError``."""
        for progress in self._under_way.values():
            if progress.pending.ino == ino:
                total = len(progress.pending.files)
                told = {"state": "local", "files": total, "left": total - progress.ready}
                return {**told, "message": progress.message} if progress.message else told
        if ino in self._failed:
            return {"state": "failed", "message": self._failed[ino]}
        path = self._path_of(ino)
        if path is None:
            raise NoAttribute("user.tierfs.checkpoint")
        held = self._held.get(ino)
        if held is not None and held.is_named(encode_path(path.rpartition(b"/")[2])):
            return {"state": "saving"}
        with contextlib.suppress(InvalidArgument):
            if await self.writer.exists(path):
                return {"state": "in the store"}
        raise NoAttribute("user.tierfs.checkpoint")

    async def attribute_of(self, ino: int) -> bytes:
        """``user.tierfs.checkpoint``, read."""
        return json.dumps(await self.state_of(ino)).encode()

    def pending(self) -> list[tuple[bytes, Pending, int, str]]:
        """(path, request, files that are in the store, what went wrong last) of every commit under way."""
        found = []
        for progress in self._under_way.values():
            path = self._path_of(progress.pending.ino)
            if path is not None:
                found.append((path, progress.pending, progress.ready, progress.message))
        return found

    def is_pending(self, save_id: str) -> bool:
        return save_id in self._under_way

    def failure_of(self, ino: int) -> str | None:
        """Why the manifest of that directory will not be written; None: no such thing."""
        return self._failed.get(ino)

    async def wait_for_change(self, limit_s: float = LOOK_S) -> None:
        """Until a commit has ended, or come further; or ``limit_s``."""
        with trio.move_on_after(limit_s):
            await self._changed.wait()

    async def finish(self) -> None:
        """Wait until there is nothing left to do that can be done now: at the end of a mount."""
        while any(self._can_be_written(known) for known in self._under_way.values()):
            await self.wait_for_change(0.1)

    def _can_be_written(self, progress: _Progress) -> bool:
        try:
            return not progress.message and self._look(progress) is not None
        except Lost:
            return False

    # the work

    def load(self) -> None:
        """Take in what an earlier run has left; before the mount is up. Blocks."""
        if self._read_only:
            return
        pending, held = self._files.load()
        self._held.update({record.ino: record for record in held})
        for record in pending:
            self._begin(record)

    async def run(self) -> None:
        """Work until cancelled."""
        if self._read_only:
            return
        async with trio.open_nursery() as self._nursery:
            for progress in self._under_way.values():
                self._nursery.start_soon(self._complete, progress)
            while True:
                await self._forget_held()
                await trio.sleep(10 * LOOK_S)

    def _begin(self, pending: Pending) -> None:
        progress = self._under_way[pending.save_id] = _Progress(pending)
        if self._nursery is not None:
            self._nursery.start_soon(self._complete, progress)

    async def _complete(self, progress: _Progress) -> None:
        pause_s = FIRST_PAUSE_S
        pending = progress.pending
        while pending.save_id in self._under_way:
            event = self._publisher.draining.progress
            try:
                ready = self._look(progress)
                if ready is not None:
                    if await self._write(progress, ready):
                        await self._forget(pending)
                        return
                    continue
            except Lost as error:
                log.warning("a checkpoint gets no manifest", save_id=pending.save_id, reason=str(error))
                self._note_failed(pending.ino, str(error))
                await self._forget(pending)
                return
            except TierfsError as error:
                if progress.message != str(error):
                    log.warning("manifest not written yet, will be tried again", reason=str(error))
                progress.message = str(error)
                self._tell()
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            except Exception:
                log.exception("unexpected exception while a manifest was written", save_id=pending.save_id)
                progress.message = "unexpected exception, see the log"
                await trio.sleep(LONGEST_PAUSE_S)
                continue
            with trio.move_on_after(LOOK_S):
                await event.wait()

    def _look(self, progress: _Progress, *, whole: bool = False) -> list[Ready] | None:
        """All files, if all are in the store; None: not yet. Raises ``Lost``."""
        pending = progress.pending
        with self._db.read() as txn:
            directory = records.find_inode(txn, pending.ino)
            if directory is None or not directory.nlink or not directory.is_dir:
                raise Lost("the directory of the checkpoint was removed before it was in the store")
            if not self._is_published(pending):
                return None
            path = records.path_of(txn, pending.ino)
            if not progress.is_hurried:
                progress.is_hurried = True
                for wanted in pending.files:
                    self._publisher.schedule.note_now(inode_of(txn, pending.ino, wanted))
            if not whole and not self._advance(txn, progress, path):
                return None
            ready = [ready_file(txn, pending.ino, path, wanted) for wanted in pending.files]
        complete = [found for found in ready if found is not None]
        return complete if len(complete) == len(ready) else None

    def _advance(self, txn: ReadTransaction, progress: _Progress, path: bytes) -> bool:
        """Whether all files are in the store, going on from where it was not so the last time."""
        before, files = progress.ready, progress.pending.files
        while progress.ready < len(files):
            if ready_file(txn, progress.pending.ino, path, files[progress.ready]) is None:
                break
            progress.ready += 1
        if progress.ready != before:
            self._tell()
        if progress.ready < len(files):
            return False
        progress.ready = len(files)
        return True

    def _is_published(self, pending: Pending) -> bool:
        with self._db.read() as txn:
            above = records.first_name(txn, pending.ino)
        return above is not None and pending.is_published_as(encode_path(above[1]))

    async def _write(self, progress: _Progress, ready: list[Ready]) -> bool:
        """Put the manifest. False: something has changed, or another node is not ready; look again."""
        pending = progress.pending
        shards = await self.writer.shards(ready, progress.sums)
        path = self._path_of(pending.ino)
        if path is None:
            return False
        others = await self.writer.parts(pending, path)
        if isinstance(others, int):
            progress.message = f"waits for the shards of node {others}"
            self._tell()
            await trio.sleep(LOOK_S)
            return False
        async with self._putting:
            if pending.save_id not in self._under_way:
                return False
            if self._path_of(pending.ino) != path or self._look(progress, whole=True) != ready:
                progress.ready = 0
                return False
            await self.writer.put(pending, path, [*shards, *others])
        return True

    # bookkeeping

    async def _forget(self, pending: Pending) -> None:
        self._under_way.pop(pending.save_id, None)
        await trio.to_thread.run_sync(self._files.remove, pending)
        self._tell()

    async def _forget_held(self) -> None:
        """Directories that have their final name, or are gone, or took too long."""
        for ino, held in list(self._held.items()):
            with self._db.read() as txn:
                above = records.first_name(txn, ino) if records.find_inode(txn, ino) is not None else None
            is_waiting = any(known.pending.ino == ino for known in self._under_way.values())
            named = above is not None and held.is_named(encode_path(above[1]))
            is_late = self._now_ns() - held.since_ns > HOLD_LIMIT_S * 1e9
            if not is_waiting and (not named or is_late):
                del self._held[ino]
                await trio.to_thread.run_sync(self._files.remove, held)

    def _note_failed(self, ino: int, message: str) -> None:
        if len(self._failed) >= MAX_REMEMBERED:
            del self._failed[next(iter(self._failed))]
        self._failed[ino] = message

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _path_of(self, ino: int) -> bytes | None:
        with self._db.read() as txn:
            try:
                return records.path_of(txn, ino)
            except NotFound:
                return None
