"""Runs speculative fetches: a bounded number of tasks and bytes, and nothing waits in line.

A hint that does not fit is refused at once; whoever gave it asks again when the reader has moved on, and then
knows better what to ask for. Demand reads never pass through here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

import trio

from tierfs.errors import TierfsError
from tierfs.log import get_logger
from tierfs.metrics import Metrics
from tierfs.prefetch.pattern import Range
from tierfs.types import ContentId, ObjectRef

log = get_logger(__name__)

READ_AHEAD_REQUESTED_BYTES = "tierfs_read_ahead_requested_bytes_total"
READ_AHEAD_FETCHED_BYTES = "tierfs_read_ahead_fetched_bytes_total"
READ_AHEAD_DROPPED_BYTES = "tierfs_read_ahead_dropped_bytes_total"
READ_AHEAD_FAILURES = "tierfs_read_ahead_failures_total"


class LocalBytes(Protocol):
    """What is asked of the cache: ``cache.residency.Cache``, or a simulated one."""

    def is_complete(self, content_id: ContentId) -> bool: ...

    async def prefetch(self, ref: ObjectRef, offset_bytes: int, length_bytes: int) -> int: ...


Spawn = Callable[[Callable[[], Awaitable[None]]], object]
"""Runs an async function beside everything else, as ``trio.Nursery.start_soon`` does."""


class PrefetchRunner:
    """See the module docstring. Trio thread only.

    Beyond its first piece a content may use at most half of ``budget_bytes``, and less when others are
    being fetched too, so that there is room for newcomers.
    """

    def __init__(
        self, cache: LocalBytes, *, task_limit: int, budget_bytes: int, metrics: Metrics | None = None
    ) -> None:
        self._cache = cache
        self._task_limit = task_limit
        self._budget_bytes = budget_bytes
        self._spawn: Spawn | None = None
        self._in_flight: dict[ContentId, list[Range]] = {}
        self._tasks = 0
        self._bytes = 0
        counter = (metrics or Metrics()).counter
        self._requested = counter(READ_AHEAD_REQUESTED_BYTES, "Bytes that read-ahead asked to be local.")
        self._fetched = counter(READ_AHEAD_FETCHED_BYTES, "Bytes that read-ahead fetched from the store.")
        self._dropped = counter(READ_AHEAD_DROPPED_BYTES, "Bytes that read-ahead could not start at once.")
        self._failures = counter(READ_AHEAD_FAILURES, "Read-ahead requests that failed.")

    @property
    def in_flight_bytes(self) -> int:
        return self._bytes

    @property
    def in_flight_tasks(self) -> int:
        return self._tasks

    async def run(self) -> None:
        """Own the tasks, until cancelled. Hints given while this does not run are refused."""
        async with trio.open_nursery() as nursery:
            self.start(nursery.start_soon)
            try:
                await trio.sleep_forever()
            finally:
                self._spawn = None

    def start(self, spawn: Spawn) -> None:
        """What runs the tasks, for those who have no trio: a simulation in its own time."""
        self._spawn = spawn

    def hint(self, ref: ObjectRef, wanted: Range) -> bool:
        """Start fetching that range now; False if that cannot be done. Never waits, never raises."""
        spawn = self._spawn
        mine = self._in_flight.get(ref.content_id)
        if spawn is None or self._tasks >= self._task_limit or not self._fits(mine, wanted):
            self._dropped.add(wanted.length_bytes)
            return False
        self._requested.add(wanted.length_bytes)
        self._tasks += 1
        self._bytes += wanted.length_bytes
        if mine is None:
            self._in_flight[ref.content_id] = [wanted]
        else:
            mine.append(wanted)
        spawn(partial(self._fetch, ref, wanted))
        return True

    def is_fetching(self, content_id: ContentId, offset: int, length: int) -> bool:
        """Whether any of those bytes are on their way because of a hint."""
        mine = self._in_flight.get(content_id)
        return mine is not None and any(
            found.offset_bytes < offset + length and offset < found.end_bytes for found in mine
        )

    def _fits(self, mine: list[Range] | None, wanted: Range) -> bool:
        if mine is None:
            return self._bytes + wanted.length_bytes <= self._budget_bytes or not self._bytes
        share = self._budget_bytes // (len(self._in_flight) + 1)
        taken = sum(found.length_bytes for found in mine)
        return (
            taken + wanted.length_bytes <= share and self._bytes + wanted.length_bytes <= self._budget_bytes
        )

    async def _fetch(self, ref: ObjectRef, wanted: Range) -> None:
        try:
            self._fetched.add(await self._cache.prefetch(ref, wanted.offset_bytes, wanted.length_bytes))
        except TierfsError as error:
            self._failures.add()
            log.debug("read-ahead failed", key=ref.key, offset_bytes=wanted.offset_bytes, error=str(error))
        except Exception:
            self._failures.add()
            log.exception("read-ahead failed unexpectedly", key=ref.key)
        finally:
            self._tasks -= 1
            self._bytes -= wanted.length_bytes
            mine = self._in_flight[ref.content_id]
            mine.remove(wanted)
            if not mine:
                del self._in_flight[ref.content_id]
