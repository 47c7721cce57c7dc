"""Who waits for the backlog to shrink: a drain, a flush, a writer that finds the write tier full.

While anybody does, nothing is held back (``is_hurried``), and what a flush waits for is published soon
whatever happens to it meanwhile (``is_awaited``). Progress is one event for all who wait (``progress``),
set whenever a publication or a sweep of deletions has ended.

Trio thread only. Who waits takes the event before looking at the backlog, so that what ends in between is
not missed. All of the backlog is walked seldom; what has ended is looked at by itself.

Raises nothing of its own: what could not be published is in ``failures``, and the answer says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import trio

from tierfs.writeback.backlog import Awaited, Backlog, Failure
from tierfs.writeback.deletions import Deletions, Sweeps
from tierfs.writeback.in_flight import InodesInFlight, published_here
from tierfs.writeback.schedule import RETRY_SOON_S, Schedule

LOOK_S = 0.5
LOOK_SHARE = 10.0
"""Who waits for the backlog walks it this seldom: not more often, and for a tenth of the time at most."""


class Draining:
    """See the module docstring."""

    def __init__(
        self,
        backlog: Backlog,
        schedule: Schedule,
        deletions: Deletions,
        running: InodesInFlight,
        failures: Mapping[int, Failure],
    ) -> None:
        self._backlog = backlog
        self._schedule = schedule
        self._deletions = deletions
        self._running = running
        self._failures = failures
        self._awaited: list[Awaited] = []
        """One for each ``settle`` that waits."""
        self._hurried_by = 0
        """How many wait for the backlog, so that nothing is held back."""
        self._starving: set[int] = set()
        """Inodes that are being published, and wait for room in the write tier."""
        self._published_count = 0
        self._progress = trio.Event()
        self.announces: Callable[[], bool] = lambda: False
        """Whether something is still being announced, inode by inode, that a drain has to wait for."""

    @property
    def is_hurried(self) -> bool:
        """Whether anybody waits."""
        return self._hurried_by > 0

    def is_awaited(self, ino: int) -> bool:
        """Whether somebody waits for that inode."""
        return any(ino in awaited.sizes for awaited in self._awaited)

    def note_published(self, ino: int) -> None:
        """It is in the store; ``note_ended`` follows."""
        self._published_count += 1
        for awaited in self._awaited:
            awaited.published.add(ino)

    def note_ended(self, ino: int) -> None:
        """Its publication has ended, in whichever way; ``note_progress`` follows."""
        for awaited in self._awaited:
            awaited.ended.add(ino)

    @property
    def progress(self) -> trio.Event:
        """Set when the backlog has shrunk the next time."""
        return self._progress

    def note_progress(self) -> None:
        """Wake whoever waits for the backlog to shrink."""
        self._progress.set()
        self._progress = trio.Event()

    async def drain(self, progress: Callable[[int, int], None] | None = None, *, below: bytes = b"") -> bool:
        """Publish everything (below a path) without delay; True when nothing is left.

        ``progress(files, bytes)`` is called with what is left. Returns False when everything that is
        left has failed at least once since the call: the caller says so and may wait again. Files that
        are open for writing are not waited for.
        """
        return await self.settle(Awaited(below=below), progress)

    async def settle(self, awaited: Awaited, progress: Callable[[int, int], None] | None = None) -> bool:
        """``drain`` for what ``awaited`` says; that tells what is left, when this is cancelled too."""
        awaited.failed.clear()
        awaited.attempts = {ino: failure.attempts for ino, failure in self._failures.items()}
        self._hurried_by += 1
        self._awaited.append(awaited)
        try:
            return await self._settle(awaited, progress)
        finally:
            self._awaited.remove(awaited)
            self._hurried_by -= 1

    async def _settle(self, awaited: Awaited, progress: Callable[[int, int], None] | None) -> bool:
        def hurry(ino: int, is_new: bool) -> None:
            if is_new:
                self._schedule.note(ino, 0.0)
            self._schedule.note_unless_known(ino)

        self._deletions.note(0.0)
        sweeps = Sweeps(self._deletions)
        look_at = 0.0
        while True:
            if self.announces() and (awaited.later or not awaited.has_looked):
                await trio.sleep(RETRY_SOON_S)
                continue
            event = self._progress
            for ino in self._backlog.take_in(awaited, self._attempts_of):
                self._schedule.note_unless_known(ino)
            began_at = trio.current_time()
            if not awaited.sizes or began_at >= look_at:
                await self._backlog.look(awaited, hurry)
                look_at = trio.current_time() + max(LOOK_S, LOOK_SHARE * (trio.current_time() - began_at))
            if progress is not None:
                progress(awaited.left_files, awaited.left_bytes)
            if not awaited.sizes and (awaited.below or not self._deletions.pending()):
                return True
            if awaited.sizes:
                if len(awaited.failed) == len(awaited.sizes):
                    return False
            elif sweeps.can_do_no_more():
                return False
            with trio.move_on_after(LOOK_S):
                await event.wait()

    def _attempts_of(self, ino: int) -> int:
        known = self._failures.get(ino)
        return known.attempts if known else 0

    async def make_room(self) -> bool:
        """Called by a writer that found the write tier full of dirty data.

        Hurries the backlog and waits until something was published. False: nothing can be published.
        That writer may be an upload, which brings here what its file lacks: it does not wait for itself.
        """
        return await self._drain_some(is_patient=True)

    async def ease(self) -> bool:
        """The same for a writer that has room, and is to go no faster than the store takes it.

        What has failed is tried again in its own time, and not waited for: each attempt may take as long as
        requests are repeated, and something is nearly always being tried.
        """
        return await self._drain_some(is_patient=False)

    def _may_be_published(self, is_patient: bool) -> bool:
        """Whether anything is worth waiting for."""
        if any(ino not in self._failures for ino in self._schedule.waiting):
            return True
        if is_patient:
            return len(self._running) > len(self._starving)
        return any(ino not in self._failures and ino not in self._starving for ino in self._running)

    async def _drain_some(self, *, is_patient: bool) -> bool:
        before = self._published_count
        starving = published_here.get()
        self._hurried_by += 1
        if starving is not None:
            self._starving.add(starving)
            self.note_progress()
        try:
            await self._schedule.note_all(0.0, but=() if is_patient else self._failures)
            while self._published_count == before:
                if not self._may_be_published(is_patient):
                    return False
                event = self._progress
                with trio.move_on_after(1.0):
                    await event.wait()
            return True
        finally:
            self._hurried_by -= 1
            if starving is not None:
                self._starving.discard(starving)
