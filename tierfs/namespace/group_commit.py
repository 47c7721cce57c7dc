"""Group commit: changes that arrive together share one LMDB transaction, on one thread.

All that arrive while a commit runs share the next transaction, each in a nested one, so that a function
that raises is undone alone. Whoever waits is answered after the commit of its group: what was acknowledged
is what a reader, in this process or another, sees. Changes that another process asks for, many in a row,
are taken and answered by the commit thread itself (``Source``), so that no second thread has to wake up.

A group in which all are *lazy* is left to ``lazy_sync``; after any other one a checkpoint is taken before
anybody is answered, which also makes durable what was committed before.

Threads: ``enqueue`` and ``serve`` may be called from any thread; all else happens on the commit thread,
which outlives every error: those who wait for the group get it. Between the look into the queue and
``poll`` it sets ``_sleeps``, and looks once more: whoever enqueues reads that after the append, so nobody
is overlooked.

Raises (to those who wait) what their function raised, or ``NamespaceError`` with the errno of a commit that
failed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Final

import lmdb

from tierfs.errors import DamagedRecord, NamespaceError, TierfsError
from tierfs.namespace.change import Change, Job, Source, wake
from tierfs.namespace.durability import Checkpoints
from tierfs.namespace.lazy_sync import LazySync
from tierfs.namespace.transaction import Tables, WriteTransaction

_GROUP_MAX_JOBS: Final = 512
_GROUP_MAX_NS: Final = 20_000_000
"""A group is closed when its functions have run for so long; the rest goes into the next one."""
_FULL_BYTES: Final = 1024 * 1024
_UNHURRIED_MS: Final = 5
"""For how long a change that nobody waits for may wait for others to share their transaction."""
_AWAKE, _UNTIL_HURRIED, _UNTIL_ANY = range(3)


class GroupCommit:
    """See the module docstring."""

    def __init__(
        self,
        env: lmdb.Environment,
        tables: Tables,
        directory: Path,
        checkpoints: Checkpoints,
        lazy_sync: LazySync,
    ) -> None:
        """``directory``: of the database; a full file system there explains a commit that fails."""
        self._env = env
        self._tables = tables
        self._directory = directory
        self._checkpoints = checkpoints
        self._lazy_sync = lazy_sync
        self._queue: deque[Job[Any]] = deque()
        self._hurry = False
        """Somebody waits for a change that is in the queue."""
        self._source: Source | None = None
        self._sleeps = _AWAKE
        """For what the commit thread waits, or is about to; then ``_wake`` has to be written to."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ends = False
        self.commits = 0
        """Groups committed so far."""
        self._thread = threading.Thread(target=self._commit_loop, name="namespace-commit", daemon=True)

    def start(self) -> None:
        """Once."""
        self._thread.start()

    def enqueue(self, job: Job[Any], *, hurried: bool = True) -> None:
        """Any thread. Not ``hurried``: it waits some milliseconds for others to share the transaction."""
        self._queue.append(job)
        if hurried:
            self._hurry = True
        # The commit thread looks at the queue again after it has set this.
        if self._sleeps == _UNTIL_ANY or (hurried and self._sleeps == _UNTIL_HURRIED):
            os.eventfd_write(self._wake, 1)

    def serve(self, source: Source) -> None:
        """From now on changes come from there as well. Once, from the trio thread."""
        self._source = source
        os.eventfd_write(self._wake, 1)

    def end(self) -> None:
        """Blocks until everything in the queue has been committed and the thread has ended."""
        self._ends = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()

    def close(self) -> None:
        """After ``end``, and after all who might still enqueue."""
        os.close(self._wake)

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
        try:
            self._checkpoints.check()
            raw = self._env.begin(write=True)
            if len(waiting) == 1:
                group.append(job := waiting.popleft())
                if not _run(job, WriteTransaction(raw, self._tables)):
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
                self._lazy_sync.note()
            else:
                self._checkpoints.take()
        except Exception as error:  # the committer must outlive everything: callers wait for it
            if raw is not None:
                with contextlib.suppress(lmdb.Error):
                    raw.abort()
            if not group:
                group.append(waiting.popleft())
            failure = _commit_failure(error, self._directory)
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
        txn = WriteTransaction(raw, self._tables)
        while waiting and (not group or time.monotonic_ns() < until_ns):
            group.append(job := waiting.popleft())
            if job.checks_first and not nested:
                job.error = None
                if not _run(job, txn) and not _failed_clean(job):
                    return False
                continue
            child = self._env.begin(write=True, parent=raw)
            job.error = None
            if _run(job, WriteTransaction(child, self._tables)):
                child.commit()
                txn.forget_frontier()  # it may have made a snapshot
            else:
                child.abort()
        return True

    def _deliver(self, group: list[Change[Any]]) -> None:
        """Wake or answer whoever waits for these changes; tasks with one message per trio run."""
        tasks: list[Job[Any]] = []
        others: list[Change[Any]] = []
        for job in group:
            if not isinstance(job, Job):
                others.append(job)
            elif job.done is not None:
                job.done.set()
            else:
                tasks.append(job)
        if others and self._source is not None:
            self._source.finish(others)
        if tasks:
            wake(tasks)


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
