"""Lazy durability: what nobody waits for is made durable a moment later, on a thread of its own.

Commits of *lazy* changes, of those that applications make to names, do not wait for the device. ``note``
says that there is such a commit; within ``_LAZY_S`` a checkpoint (``durability``) makes it survive a power
cut, with all that was committed before. Whoever needs it durable but is in no hurry waits for just that
(``await_next``).

Threads: ``note`` and ``await_next`` may be called from any thread; ``end`` from the one that closes the
namespace, after the commit thread has ended. The thread here takes checkpoints, and blocks for as long as
the device takes.

Raises nothing: a checkpoint that fails is said in the log, is the answer of those who wait for it, and
every commit that comes later is refused (``Checkpoints.check``).
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Final

from tierfs.errors import NamespaceError
from tierfs.namespace.change import Job, wake
from tierfs.namespace.durability import Checkpoints

_LAZY_S: Final = 0.05
"""For how long a power cut may undo a change that did not wait for the device."""


class LazySync:
    """See the module docstring."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._undurable = threading.Event()
        """Something has been committed that a power cut may undo."""
        self._ended = threading.Event()
        self._awaiting: deque[Job[Any]] = deque()
        """They wait until a power cut cannot undo what has been committed."""
        self._thread = threading.Thread(target=self._sync_loop, name="namespace-sync", daemon=True)

    def start(self) -> None:
        """Once, before anything is committed."""
        self._thread.start()

    def note(self) -> None:
        """Something has been committed that a power cut may undo."""
        self._undurable.set()

    def await_next(self, job: Job[Any]) -> None:
        """That job is done with the next checkpoint that is begun from now on."""
        self._awaiting.append(job)
        self._undurable.set()

    def end(self) -> None:
        """Blocks until a checkpoint that is under way has been taken. Takes no other."""
        self._ended.set()
        self._undurable.set()
        self._thread.join()

    def _sync_loop(self) -> None:
        """Make durable, a little later, what nobody waits for."""
        while True:
            self._undurable.wait()
            if self._ended.wait(_LAZY_S):
                return
            self._undurable.clear()
            # Who comes while the device works may have committed too late for that.
            awaiting = [self._awaiting.popleft() for _ in range(len(self._awaiting))]
            try:
                self._checkpoints.take()
            except NamespaceError as error:  # said in the log; all that comes later is refused
                for job in awaiting:
                    job.error = error
            wake(awaiting)
