"""The one owner of the LMDB environment: reads without locks, writes by group commit on one thread.

All functions that arrive while a commit runs share the next transaction, each in a nested one, so that a
function that raises is undone alone. A reply goes out after the commit of its group: what was acknowledged
is what a reader, in this process or another, sees.

Durability. ``sync=True, metasync=False``: the pages of every commit are on the device before its header is
written, so a power cut can lose the last commits but cannot damage what is there; ``durable=True`` (and
``sync``) also forces the header out. A killed process loses nothing that was acknowledged.

LMDB must never be opened twice in one process; ``open`` takes ``LOCK`` in the directory for the engine and
py-lmdb itself refuses a second environment on the same files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Generic, TypeVar, cast

import lmdb
import outcome
import trio

from tierfs.errors import NamespaceError
from tierfs.namespace import environment, schema
from tierfs.namespace.transaction import TABLES, Tables
from tierfs.namespace.transaction import ReadTransaction as ReadTransaction
from tierfs.namespace.transaction import WriteTransaction as WriteTransaction

T = TypeVar("T")

_GROUP_MAX_JOBS: Final = 512
_GROUP_MAX_NS: Final = 20_000_000
"""A group is closed when its functions have run for so long; the rest goes into the next one."""
_FULL_BYTES: Final = 1024 * 1024


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


class _Job(Generic[T]):
    __slots__ = ("done", "durable", "error", "fn", "result", "task", "token")

    def __init__(self, fn: Callable[[WriteTransaction], T], durable: bool) -> None:
        self.fn = fn
        self.durable = durable
        self.result: T | None = None
        self.error: BaseException | None = None
        self.task: trio.lowlevel.Task | None = None
        self.token: trio.lowlevel.TrioToken | None = None
        self.done: threading.Event | None = None


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
        self.commits = 0
        """Groups committed since the open."""
        self._env = env
        self._lock_fd = lock_fd
        self._reads = _ReadBlock(env, tables)
        self._queue: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._committer: threading.Thread | None = None
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
        lock_fd = None
        if not read_only:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock_fd = environment.lock(directory)
        try:
            env = environment.open_env(path, read_only)
        except BaseException:
            if lock_fd is not None:
                os.close(lock_fd)
            raise
        try:
            tables = Tables()
            for name in TABLES:
                setattr(tables, name, env.open_db(name.encode(), create=not read_only))
            tables.prefix = prefix or ""
            tables.ttl_ns = ttl_ns
            db = cls(env, tables, directory, lock_fd, read_only)
            with db.snapshot() as txn:
                environment.check_meta(txn, path, source, prefix)
            if not read_only:
                db._start(now_ns(), source, prefix)
            return db
        except BaseException as error:
            env.close()
            if lock_fd is not None:
                os.close(lock_fd)
            if isinstance(error, lmdb.Error):
                raise NamespaceError(f"{path}: {error}") from error
            raise

    def _start(self, now_ns: int, source: str | None, prefix: str | None) -> None:
        boot_id = environment.boot_id()

        def note_start(txn: WriteTransaction) -> None:
            meta = txn.tables.meta
            self.clean_close = txn.get(schema.META_CLEAN, b"1", meta) == b"1"
            same_boot = txn.get(schema.META_BOOT_ID, boot_id, meta) == boot_id
            self.unclean_boot = not self.clean_close and not same_boot
            if txn.get(schema.META_FORMAT, None, meta) is None:
                environment.initialise(txn, now_ns)
            for key, text in ((schema.META_SOURCE, source), (schema.META_PREFIX, prefix)):
                if text is not None:
                    txn.put(key, text.encode(), db=meta)
            txn.put(schema.META_BOOT_ID, boot_id, db=meta)
            txn.put(schema.META_CLEAN, b"0", db=meta)

        self.check_readers()
        self._committer = threading.Thread(target=self._commit_loop, name="namespace-commit", daemon=True)
        self._committer.start()
        self.commit_now(note_start, durable=True)

    def check_readers(self) -> int:
        """Free the slots of readers that were killed, for LMDB has a fixed number; returns how many were."""
        freed: int = self._env.reader_check()
        return freed

    def close(self) -> None:
        """Commit what is queued, note the clean end, close. Nobody may read or commit any more."""
        if self._closed:
            return
        if self._committer is not None:
            self.commit_now(_note_clean_close, durable=True)
            self._closed = True
            self._queue.put(None)
            self._committer.join()
        self._closed = True
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

    def size_bytes(self) -> int:
        """Bytes that the database occupies, free pages included."""
        return int(self._env.info()["last_pgno"] + 1) * int(self._env.stat()["psize"])

    # -- writing --------------------------------------------------------------------------------------

    async def commit(self, fn: Callable[[WriteTransaction], T], *, durable: bool = False) -> T:
        """Run ``fn`` in the next transaction and return its result once that is committed.

        Not cancellable once queued: a caller never has to ask whether its change happened. ``durable``:
        also wait until a power cut cannot undo it. Raises what ``fn`` raised (then nothing was written),
        or ``NamespaceError`` with the errno of a commit that failed (then neither was anything).
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        job = _Job(fn, durable)
        job.task = trio.lowlevel.current_task()
        job.token = trio.lowlevel.current_trio_token()
        self._enqueue(job)
        return cast(T, await trio.lowlevel.wait_task_rescheduled(_not_cancellable))

    def commit_now(self, fn: Callable[[WriteTransaction], T], *, durable: bool = False) -> T:
        """The same for start-up, tools and worker threads: blocks. Never on a running trio thread."""
        job = _Job(fn, durable)
        job.done = threading.Event()
        self._enqueue(job)
        job.done.wait()
        if job.error is not None:
            raise job.error
        return cast(T, job.result)

    async def sync(self) -> None:
        """Everything committed so far survives a power cut."""
        await self.commit(_nothing, durable=True)

    def _enqueue(self, job: _Job[Any]) -> None:
        if self._closed or self._committer is None:
            raise NamespaceError("the namespace is closed or was opened read-only")
        self._queue.put(job)

    def _commit_loop(self) -> None:
        waiting: deque[_Job[Any]] = deque()
        while True:
            if not waiting:
                job = self._queue.get()
                if job is None:
                    return
                waiting.append(job)
            with contextlib.suppress(queue.Empty):
                while len(waiting) < _GROUP_MAX_JOBS:
                    job = self._queue.get_nowait()
                    if job is None:
                        self._queue.put(None)
                        break
                    waiting.append(job)
            _deliver(self._commit_group(waiting))

    def _commit_group(self, waiting: deque[_Job[Any]]) -> list[_Job[Any]]:
        """Run jobs from the left of ``waiting`` in one transaction; returns those, with their results."""
        group: list[_Job[Any]] = []
        raw: lmdb.Transaction[bytes] | None = None
        try:
            raw = self._env.begin(write=True)
            if len(waiting) == 1:
                group.append(job := waiting.popleft())
                if not _run(job, raw, self.tables):
                    raw.abort()
                    return group
            else:
                until_ns = time.monotonic_ns() + _GROUP_MAX_NS
                while waiting and (not group or time.monotonic_ns() < until_ns):
                    group.append(job := waiting.popleft())
                    child = self._env.begin(write=True, parent=raw)
                    if _run(job, child, self.tables):
                        child.commit()
                    else:
                        child.abort()
            raw.commit()
            self.commits += 1
            if any(job.durable for job in group):
                self._env.sync(True)
        except Exception as error:  # the committer must outlive everything: callers wait for it
            if raw is not None:
                with contextlib.suppress(lmdb.Error):
                    raw.abort()
            if not group:
                group.append(waiting.popleft())
            failure = _commit_failure(error, self.directory)
            for job in group:
                job.error = job.error or failure
        return group


def _run(job: _Job[Any], raw: lmdb.Transaction[bytes], tables: Tables) -> bool:
    try:
        job.result = job.fn(WriteTransaction(raw, tables))
    except BaseException as error:  # handed to the caller, who waits for exactly this
        job.error = error
        return False
    return True


def _deliver(group: list[_Job[Any]]) -> None:
    """Wake whoever waits for these jobs; tasks with one message per trio run."""
    by_token: dict[trio.lowlevel.TrioToken, list[_Job[Any]]] = {}
    for job in group:
        if job.done is not None:
            job.done.set()
        elif job.token is not None:
            by_token.setdefault(job.token, []).append(job)
    for token, jobs in by_token.items():
        # A run that has ended has nobody waiting.
        with contextlib.suppress(trio.RunFinishedError):
            token.run_sync_soon(_reschedule, jobs)


def _reschedule(jobs: list[_Job[Any]]) -> None:
    for job in jobs:
        if job.task is not None:
            answer: outcome.Outcome[Any]
            answer = outcome.Value(job.result) if job.error is None else outcome.Error(job.error)
            trio.lowlevel.reschedule(job.task, answer)


def _not_cancellable(_: object) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.FAILED


def _nothing(_: WriteTransaction) -> None:
    return None


def _commit_failure(error: Exception, directory: Path) -> NamespaceError:
    """LMDB reports a write that was cut short by a full disk as EIO: say what it was."""
    failure = NamespaceError(f"namespace commit failed: {error}")
    code = getattr(error, "code", 0)
    if isinstance(error, lmdb.MapFullError) or (code == errno.EIO and _is_full(directory)):
        failure.errno = errno.ENOSPC
    elif isinstance(code, int) and code > 0:
        failure.errno = code
    failure.__cause__ = error
    return failure


def _is_full(directory: Path) -> bool:
    try:
        space = os.statvfs(directory)
    except OSError:
        return False
    return space.f_bavail * space.f_frsize < _FULL_BYTES


def _note_clean_close(txn: WriteTransaction) -> None:
    txn.put(schema.META_CLEAN, b"1", db=txn.tables.meta)
