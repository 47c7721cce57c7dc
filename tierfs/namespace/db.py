"""The one owner of the LMDB environment: open and close, reads without locks, writes by ``group_commit``.

All functions that arrive while a commit runs share the next transaction. A reply goes out after the commit
of its group: what was acknowledged is what a reader, in this process or another, sees.

Durability. A killed process loses nothing that was acknowledged. What a power cut leaves is told by
``durability``: the state of one moment. A commit returns when a power cut cannot undo it any more, nor what
was committed before; but a group of *lazy* changes, of those that applications make to names, only becomes
so a moment later (``lazy_sync``), unless somebody asks for it before (``durable=True``, ``sync``): see
fsync(2).

Threads: ``read`` and everything async belong to the trio thread, and no await comes inside ``with
db.read()``; ``snapshot`` and ``commit_now`` are for all others.

LMDB must never be opened twice in one process; ``open`` takes ``LOCK`` in the directory for the engine and
py-lmdb itself refuses a second environment on the same files.

Raises ``NamespaceError`` once closed, or for a change of what was opened read-only; see ``open`` and
``commit``.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TypeVar, cast

import lmdb
import trio

from tierfs.errors import NamespaceError
from tierfs.namespace import environment, schema
from tierfs.namespace.change import Job, Source, UnhurriedJob
from tierfs.namespace.durability import Checkpoints
from tierfs.namespace.group_commit import GroupCommit
from tierfs.namespace.lazy_sync import LazySync
from tierfs.namespace.transaction import HISTORY_TABLES, TABLES, Tables
from tierfs.namespace.transaction import ReadTransaction as ReadTransaction
from tierfs.namespace.transaction import WriteTransaction as WriteTransaction

T = TypeVar("T")


class _ReadBlock:
    """``with db.read()``: nested blocks share the outer one's snapshot."""

    __slots__ = ("_begin", "_depth", "_tables", "_thread", "_txn")

    def __init__(self, env: lmdb.Environment, tables: Tables) -> None:
        self._begin = env.begin
        self._tables = tables
        self._depth = 0
        self._thread = 0
        self._txn: ReadTransaction | None = None

    def __enter__(self) -> ReadTransaction:
        txn = self._txn
        if txn is None:
            # py-lmdb keeps finished read transactions and renews them: 0.1 us.
            txn = self._txn = ReadTransaction(self._begin(), self._tables)
            self._thread = threading.get_ident()
        elif self._thread != threading.get_ident():
            raise RuntimeError("db.read() belongs to the trio thread; use db.snapshot() in other threads")
        self._depth += 1
        return txn

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            txn = cast(ReadTransaction, self._txn)
            self._txn = None
            txn.raw.abort()


class Database:
    """See the module docstring. Made by ``open``; closed once, after the last reader."""

    def __init__(
        self, env: lmdb.Environment, tables: Tables, directory: Path, lock_fd: int | None, read_only: bool
    ) -> None:
        self.directory = directory
        self.tables = tables
        self.read_only = read_only
        self.unclean_boot = False
        """The machine went down since the last open without a clean close."""
        self.clean_close = True
        """The last user of this database closed it (False: it was killed)."""
        self._env = env
        self._lock_fd = lock_fd
        self._reads = _ReadBlock(env, tables)
        self._checkpoints: Checkpoints | None = None
        self._committer: GroupCommit | None = None
        self._lazy_sync: LazySync | None = None
        self._closed = False

    # -- opening and closing --------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        now_ns: Callable[[], int] = time.time_ns,
        source: str | None = None,
        prefix: str | None = None,
        ttl_ns: int = 60 * 10**9,
        read_only: bool = False,
    ) -> Database:
        """Open or make ``directory/namespace.lmdb``; the root inode (root:root, 0755) exists afterwards.

        ``source`` and ``prefix`` are kept at the first open and compared at every later one that gives
        them: the state of one bucket must not be applied to another. ``read_only`` takes no lock, writes
        nothing and can run beside a live engine.

        Raises ``FormatError`` (made by a newer version), ``ConfigError`` (made for another source),
        ``NamespaceError`` (in use, or unreadable).
        """
        path = directory / "namespace.lmdb"
        is_new = not path.exists()
        lock_fd = None
        if not read_only:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock_fd = environment.lock(directory)
        boot_id = environment.boot_id()
        try:
            environment.restore(path, boot_id, lock_fd)
            env = environment.open_env(path, read_only)
        except BaseException:
            if lock_fd is not None:
                os.close(lock_fd)
            raise
        checkpoints = None
        try:
            environment.check_format(env, path)
            if not read_only:
                checkpoints = Checkpoints.start(env, path, boot_id)
            tables = Tables()
            for name in TABLES:
                setattr(tables, name, env.open_db(name.encode(), create=not read_only))
            for name in HISTORY_TABLES:
                setattr(tables, name, environment.open_history(env, name, read_only))
            tables.prefix = prefix or ""
            tables.ttl_ns = ttl_ns
            db = cls(env, tables, directory, lock_fd, read_only)
            with db.snapshot() as txn:
                environment.check_meta(txn, path, source, prefix)
            if checkpoints is not None:
                db._start(checkpoints, boot_id, now_ns(), source, prefix)
                if is_new:
                    environment.sync_names(path)
            return db
        except BaseException as error:
            if checkpoints is not None:
                checkpoints.close()
            env.close()
            if lock_fd is not None:
                os.close(lock_fd)
            if isinstance(error, (lmdb.Error, OSError)):
                raise NamespaceError(f"{path}: {error}") from error
            raise

    def _start(
        self, checkpoints: Checkpoints, boot_id: bytes, now_ns: int, source: str | None, prefix: str | None
    ) -> None:
        def note_start(txn: WriteTransaction) -> None:
            meta = txn.tables.meta
            self.clean_close = txn.get(schema.META_CLEAN, b"1", meta) == b"1"
            same_boot = txn.get(schema.META_BOOT_ID, boot_id, meta) == boot_id
            self.unclean_boot = not self.clean_close and not same_boot
            if txn.get(schema.META_FORMAT, None, meta) is None:
                environment.initialise(txn, now_ns)
            # Durable before anything is committed that is not: an older tierfs must not open it any more.
            txn.put(schema.META_FORMAT, schema.pack_u64(schema.FORMAT_VERSION), db=meta)
            for key, text in ((schema.META_SOURCE, source), (schema.META_PREFIX, prefix)):
                if text is not None:
                    txn.put(key, text.encode(), db=meta)
            txn.put(schema.META_BOOT_ID, boot_id, db=meta)
            txn.put(schema.META_CLEAN, b"0", db=meta)

        self.check_readers()
        self._checkpoints = checkpoints
        self._lazy_sync = LazySync(checkpoints)
        self._committer = GroupCommit(self._env, self.tables, self.directory, checkpoints, self._lazy_sync)
        self._committer.start()
        self._lazy_sync.start()
        self.commit_now(note_start, durable=True)

    def check_readers(self) -> int:
        """Free the slots of readers that were killed, for LMDB has a fixed number; returns how many were."""
        freed: int = self._env.reader_check()
        return freed

    def close(self) -> None:
        """Commit what is queued, note the clean end, close. Nobody may read or commit any more."""
        if self._closed:
            return
        try:
            if self._committer is not None:
                self.commit_now(_note_clean_close, durable=True)
        finally:
            self._end()

    def _end(self) -> None:
        self._closed = True
        if self._committer is not None:
            self._committer.end()
        if self._lazy_sync is not None:
            self._lazy_sync.end()
        if self._committer is not None:
            self._committer.close()
        if self._checkpoints is not None:
            self._checkpoints.close()
        self._env.close()
        if self._lock_fd is not None:
            os.close(self._lock_fd)

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- reading --------------------------------------------------------------------------------------

    def read(self) -> _ReadBlock:
        """``with db.read() as txn``: the committed state, on the trio thread, with no await inside."""
        return self._reads

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[ReadTransaction]:
        """``with db.snapshot() as txn``: the same for any other thread, and for long reads."""
        raw = self._env.begin()
        try:
            yield ReadTransaction(raw, self.tables)
        finally:
            raw.abort()

    @property
    def commits(self) -> int:
        """Groups committed since the open."""
        return 0 if self._committer is None else self._committer.commits

    def size_bytes(self) -> int:
        """Bytes that the database occupies, free pages included."""
        return int(self._env.info()["last_pgno"] + 1) * int(self._env.stat()["psize"])

    # -- writing --------------------------------------------------------------------------------------

    async def commit(
        self,
        fn: Callable[[WriteTransaction], T],
        *,
        durable: bool = False,
        hurried: bool = True,
        lazy: bool = False,
    ) -> T:
        """Run ``fn`` in the next transaction and return its result once that is committed.

        Not cancellable once queued: a caller never has to ask whether its change happened. A power cut cannot
        undo it then, unless it is ``lazy``. ``durable``: everybody has to hear if that cannot be had. Not
        ``hurried``: wait some milliseconds for others to share the transaction with; ``fn`` checks before it
        writes. Raises what ``fn`` raised (then nothing was written), or ``NamespaceError`` with the errno of
        a commit that failed (then neither was anything), or whose pages the device has refused.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        unhurried = not (hurried or durable)
        job = UnhurriedJob(fn, durable, lazy) if unhurried else Job(fn, durable, lazy and not durable)
        job.expect()
        self._open_committer().enqueue(job, hurried=not unhurried)
        return await job.wait()

    def commit_now(
        self, fn: Callable[[WriteTransaction], T], *, durable: bool = False, lazy: bool = False
    ) -> T:
        """The same for start-up, tools and worker threads: blocks. Never on a running trio thread."""
        job = Job(fn, durable, lazy and not durable)
        job.done = threading.Event()
        self._open_committer().enqueue(job)
        job.done.wait()
        if job.error is not None:
            raise job.error
        return cast(T, job.result)

    async def sync(self) -> None:
        """Everything committed so far survives a power cut."""
        await self.commit(_nothing, durable=True)

    async def settled(self) -> None:
        """The same, in no hurry: it will be so soon anyway. Not cancellable. Raises ``NamespaceError``."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._closed or self._lazy_sync is None:
            raise _cannot_change()
        job = Job(_nothing, True)
        job.expect()
        self._lazy_sync.await_next(job)
        await job.wait()

    def serve(self, source: Source) -> None:
        """From now on changes come from there as well. Once, from the trio thread."""
        self._open_committer().serve(source)

    def _open_committer(self) -> GroupCommit:
        if self._closed or self._committer is None:
            raise _cannot_change()
        return self._committer


def _cannot_change() -> NamespaceError:
    return NamespaceError("the namespace is closed or was opened read-only")


def _nothing(_: WriteTransaction) -> None:
    return None


def _note_clean_close(txn: WriteTransaction) -> None:
    txn.put(schema.META_CLEAN, b"1", db=txn.tables.meta)
