"""The one owner of the LMDB environment: reads without locks, writes by group commit on one thread.

All functions that arrive while a commit runs share the next transaction, each in a nested one, so that a
function that raises is undone alone. A reply goes out after the commit of its group: what was acknowledged
is what a reader, in this process or another, sees. Changes that another process asks for, many in a row, are
taken and answered by the commit thread itself (``Source``), so that no second thread has to wake up.

Durability. A killed process loses nothing that was acknowledged. What a power cut leaves is told by
``durability``: the state of one moment. A commit returns when a power cut cannot undo it any more, nor what
was committed before; but a group of *lazy* changes, of those that applications make to names, only becomes so
within ``_LAZY_S``, unless somebody asks for it before (``durable=True``, ``sync``): see fsync(2).

LMDB must never be opened twice in one process; ``open`` takes ``LOCK`` in the directory for the engine and
py-lmdb itself refuses a second environment on the same files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Generic, Protocol, TypeVar, cast

import lmdb
import outcome
import trio

from tierfs.errors import DamagedRecord, NamespaceError, TierfsError
from tierfs.namespace import environment, schema
from tierfs.namespace.durability import Checkpoints
from tierfs.namespace.transaction import HISTORY_TABLES, TABLES, Tables
from tierfs.namespace.transaction import ReadTransaction as ReadTransaction
from tierfs.namespace.transaction import WriteTransaction as WriteTransaction

T = TypeVar("T")

_GROUP_MAX_JOBS: Final = 512
_GROUP_MAX_NS: Final = 20_000_000
"""A group is closed when its functions have run for so long; the rest goes into the next one."""
_FULL_BYTES: Final = 1024 * 1024
_UNHURRIED_MS: Final = 5
"""For how long a change that nobody waits for may wait for others to share their transaction."""
_LAZY_S: Final = 0.05
"""For how long a power cut may undo a change that did not wait for the device."""
_AWAKE, _UNTIL_HURRIED, _UNTIL_ANY = range(3)


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


class Change(Generic[T]):
    """Something to be done in the next transaction; afterwards ``error``, or ``result``."""

    __slots__ = ("durable", "error", "result")

    checks_first = False
    """``run`` raises a ``TierfsError`` before it writes, or not at all: no nested transaction is needed."""
    lazy = False
    """A power cut may undo it for a moment longer: see the module docstring."""

    def __init__(self, durable: bool = False) -> None:
        self.durable = durable
        self.result: T | None = None
        self.error: BaseException | None = None

    def run(self, txn: WriteTransaction) -> T:
        """Do it. May be called again, in another transaction, when the first one came to nothing."""
        raise NotImplementedError


class Source(Protocol):
    """Changes that arrive on a descriptor. Both methods run on the commit thread, and raise nothing."""

    descriptor: int

    def take(self) -> Sequence[Change[Any]]:
        """What has arrived. Never waits."""
        ...

    def finish(self, changes: Sequence[Change[Any]]) -> None:
        """These have been committed, or have failed: answer them."""
        ...


class _Job(Change[T]):
    __slots__ = ("done", "fn", "lazy", "task", "token")

    def __init__(self, fn: Callable[[WriteTransaction], T], durable: bool, lazy: bool = False) -> None:
        super().__init__(durable)
        self.fn = fn
        self.lazy = lazy
        self.task: trio.lowlevel.Task | None = None
        self.token: trio.lowlevel.TrioToken | None = None
        self.done: threading.Event | None = None

    def run(self, txn: WriteTransaction) -> T:
        return self.fn(txn)


class _UnhurriedJob(_Job[T]):
    __slots__ = ()
    checks_first = True


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
        self._queue: deque[_Job[Any]] = deque()
        self._hurry = False
        """Somebody waits for a change that is in the queue."""
        self._source: Source | None = None
        self._sleeps = _AWAKE
        """For what the commit thread waits, or is about to; then ``_wake`` has to be written to."""
        self._wake = -1
        self._ends = False
        self._committer: threading.Thread | None = None
        self._checkpoints: Checkpoints | None = None
        self._undurable = threading.Event()
        """Something has been committed that a power cut may undo."""
        self._ended = threading.Event()
        self._awaiting: deque[_Job[Any]] = deque()
        """They wait until a power cut cannot undo what has been committed."""
        self._syncer: threading.Thread | None = None
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
                db._checkpoints = checkpoints
                db._start(boot_id, now_ns(), source, prefix)
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

    def _start(self, boot_id: bytes, now_ns: int, source: str | None, prefix: str | None) -> None:
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
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._committer = threading.Thread(target=self._commit_loop, name="namespace-commit", daemon=True)
        self._committer.start()
        self._syncer = threading.Thread(target=self._sync_loop, name="namespace-sync", daemon=True)
        self._syncer.start()
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
            self._ends = True
            os.eventfd_write(self._wake, 1)
            self._committer.join()
        if self._syncer is not None:
            self._ended.set()
            self._undurable.set()
            self._syncer.join()
        if self._wake >= 0:
            os.close(self._wake)
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
        job = _UnhurriedJob(fn, durable, lazy) if unhurried else _Job(fn, durable, lazy and not durable)
        job.task = trio.lowlevel.current_task()
        job.token = trio.lowlevel.current_trio_token()
        self._enqueue(job, hurried=not unhurried)
        return cast(T, await trio.lowlevel.wait_task_rescheduled(_not_cancellable))

    def commit_now(
        self, fn: Callable[[WriteTransaction], T], *, durable: bool = False, lazy: bool = False
    ) -> T:
        """The same for start-up, tools and worker threads: blocks. Never on a running trio thread."""
        job = _Job(fn, durable, lazy and not durable)
        job.done = threading.Event()
        self._enqueue(job)
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
        if self._closed or self._syncer is None:
            raise NamespaceError("the namespace is closed or was opened read-only")
        job = _Job(_nothing, True)
        job.task = trio.lowlevel.current_task()
        job.token = trio.lowlevel.current_trio_token()
        self._awaiting.append(job)
        self._undurable.set()
        await trio.lowlevel.wait_task_rescheduled(_not_cancellable)

    def serve(self, source: Source) -> None:
        """From now on changes come from there as well. Once, from the trio thread."""
        self._source = source
        os.eventfd_write(self._wake, 1)

    def _enqueue(self, job: _Job[Any], *, hurried: bool = True) -> None:
        if self._closed or self._committer is None:
            raise NamespaceError("the namespace is closed or was opened read-only")
        self._queue.append(job)
        if hurried:
            self._hurry = True
        # The commit thread looks at the queue again after it has set this.
        if self._sleeps == _UNTIL_ANY or (hurried and self._sleeps == _UNTIL_HURRIED):
            os.eventfd_write(self._wake, 1)

    def _commit_loop(self) -> None:
        waiting: deque[Change[Any]] = deque()
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        source: Source | None = None
        while True:
            if source is None and self._source is not None:
                source = self._source
                poller.register(source.descriptor, select.POLLIN | select.POLLRDHUP)
            taken = source.take() if source is not None else ()
            if not (taken or waiting or self._hurry):
                if self._queue:
                    self._sleep(poller, _UNTIL_HURRIED, _UNHURRIED_MS)
                elif self._ends:
                    return
                else:
                    self._sleep(poller, _UNTIL_ANY, -1)
                    continue
                taken = source.take() if source is not None else ()
            self._hurry = False
            while self._queue and len(waiting) < _GROUP_MAX_JOBS:
                waiting.append(self._queue.popleft())
            if self._queue:
                self._hurry = True
            # In this order: what the source sent may be about what this process has queued before.
            waiting.extend(taken)
            if waiting:
                self._deliver(self._commit_group(waiting))

    def _sync_loop(self) -> None:
        """Make durable, a little later, what nobody waits for."""
        checkpoints = cast(Checkpoints, self._checkpoints)
        while True:
            self._undurable.wait()
            if self._ended.wait(_LAZY_S):
                return
            self._undurable.clear()
            # Who comes while the device works may have committed too late for that.
            awaiting = [self._awaiting.popleft() for _ in range(len(self._awaiting))]
            try:
                checkpoints.take()
            except NamespaceError as error:  # said in the log; all that comes later is refused
                for job in awaiting:
                    job.error = error
            self._wake_tasks(awaiting)

    def _sleep(self, poller: select.poll, until: int, timeout_ms: int) -> None:
        """Until somebody has something to commit, or the time is over."""
        self._sleeps = until
        if not self._hurry and not self._ends and (until == _UNTIL_HURRIED or not self._queue):
            for descriptor, events in poller.poll(timeout_ms):
                if descriptor == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                elif events & ~select.POLLIN:
                    # The other end is closed: what is left is taken without being woken for it.
                    poller.unregister(descriptor)
        self._sleeps = _AWAKE

    def _commit_group(self, waiting: deque[Change[Any]]) -> list[Change[Any]]:
        """Run changes from the left of ``waiting`` in one transaction; returns those, with their results."""
        group: list[Change[Any]] = []
        raw: lmdb.Transaction[bytes] | None = None
        checkpoints = cast(Checkpoints, self._checkpoints)
        try:
            checkpoints.check()
            raw = self._env.begin(write=True)
            if len(waiting) == 1:
                group.append(job := waiting.popleft())
                if not _run(job, WriteTransaction(raw, self.tables)):
                    raw.abort()
                    return group
            elif not self._run_all(waiting, group, raw):
                # One has failed in the middle: each gets a transaction of its own now.
                raw.abort()
                waiting.extendleft(reversed(group))
                group.clear()
                raw = self._env.begin(write=True)
                self._run_all(waiting, group, raw, nested=True)
            raw.commit()
            self.commits += 1
            if all(job.lazy for job in group):
                self._undurable.set()
            else:
                checkpoints.take()
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

    def _run_all(
        self,
        waiting: deque[Change[Any]],
        group: list[Change[Any]],
        raw: lmdb.Transaction[bytes],
        *,
        nested: bool = False,
    ) -> bool:
        """Move changes from ``waiting`` to ``group`` and run them; False: nothing of it may be committed."""
        until_ns = time.monotonic_ns() + _GROUP_MAX_NS
        txn = WriteTransaction(raw, self.tables)
        while waiting and (not group or time.monotonic_ns() < until_ns):
            group.append(job := waiting.popleft())
            if job.checks_first and not nested:
                job.error = None
                if not _run(job, txn) and not _failed_clean(job):
                    return False
                continue
            child = self._env.begin(write=True, parent=raw)
            job.error = None
            if _run(job, WriteTransaction(child, self.tables)):
                child.commit()
                txn.forget_frontier()  # it may have made a snapshot
            else:
                child.abort()
        return True

    def _deliver(self, group: list[Change[Any]]) -> None:
        """Wake or answer whoever waits for these changes; tasks with one message per trio run."""
        tasks: list[_Job[Any]] = []
        others: list[Change[Any]] = []
        for job in group:
            if not isinstance(job, _Job):
                others.append(job)
            elif job.done is not None:
                job.done.set()
            else:
                tasks.append(job)
        if others and self._source is not None:
            self._source.finish(others)
        if tasks:
            self._wake_tasks(tasks)

    def _wake_tasks(self, tasks: Sequence[_Job[Any]]) -> None:
        by_token: dict[trio.lowlevel.TrioToken, list[_Job[Any]]] = {}
        for job in tasks:
            if job.token is not None:
                by_token.setdefault(job.token, []).append(job)
        for token, jobs in by_token.items():
            # A run that has ended has nobody waiting.
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(_reschedule, jobs)


def _run(job: Change[Any], txn: WriteTransaction) -> bool:
    try:
        job.result = job.run(txn)
    except BaseException as error:  # handed to the caller, who waits for exactly this
        job.error = error
        return False
    return True


def _failed_clean(job: Change[Any]) -> bool:
    """The change was refused before anything was written."""
    error = job.error
    return isinstance(error, TierfsError) and type(error) not in (DamagedRecord, NamespaceError)


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
