"""A change of the namespace on its way into a transaction, and who waits for it.

``Change`` is what the commit thread runs. A ``Job`` is one that this process asks for, as a function of the
transaction: a task waits for it (``wake`` brings the answer back into its trio run), or a thread. A
``Source`` hands over changes of another process, many at a time.

Threads: ``run`` and the methods of a ``Source`` are called on the commit thread, and never wait. ``result``
and ``error`` are written there, before whoever waits is woken, and read afterwards.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import outcome
import trio

from tierfs.namespace.transaction import WriteTransaction

T = TypeVar("T")


class Change(Generic[T]):
    """Something to be done in the next transaction; afterwards ``error``, or ``result``."""

    __slots__ = ("durable", "error", "result")

    checks_first = False
    """``run`` raises a ``TierfsError`` before it writes, or not at all: no nested transaction is needed."""
    lazy = False
    """A power cut may undo it for a moment longer: see ``lazy_sync``."""

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


class Job(Change[T]):
    """``fn(txn)``, for a task (``wait``) or for a thread (``done``)."""

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

    def expect(self) -> None:
        """The running task is about to ``wait`` for it. Before the job is handed over."""
        self.task = trio.lowlevel.current_task()
        self.token = trio.lowlevel.current_trio_token()

    async def wait(self) -> T:
        """Until it is done. Not cancellable: nobody has to ask whether it happened. Raises ``error``."""
        return cast(T, await trio.lowlevel.wait_task_rescheduled(_not_cancellable))


class UnhurriedJob(Job[T]):
    """One that may wait some milliseconds for others to share the transaction with."""

    __slots__ = ()
    checks_first = True


def wake(tasks: Sequence[Job[Any]]) -> None:
    """Answer the tasks that wait for these, with one message per trio run. Any thread."""
    by_token: dict[trio.lowlevel.TrioToken, list[Job[Any]]] = {}
    for job in tasks:
        if job.token is not None:
            by_token.setdefault(job.token, []).append(job)
    for token, jobs in by_token.items():
        # A run that has ended has nobody waiting.
        with contextlib.suppress(trio.RunFinishedError):
            token.run_sync_soon(_reschedule, jobs)


def _reschedule(jobs: list[Job[Any]]) -> None:
    for job in jobs:
        if job.task is not None:
            answer: outcome.Outcome[Any]
            answer = outcome.Value(job.result) if job.error is None else outcome.Error(job.error)
            trio.lowlevel.reschedule(job.task, answer)


def _not_cancellable(_: object) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.FAILED
