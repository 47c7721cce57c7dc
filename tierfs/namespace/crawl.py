"""Whole subtrees: listed, or asked for their metadata, with several requests at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import trio

from tierfs.errors import NotFound, TierfsError
from tierfs.namespace.db import Database
from tierfs.namespace.lister import ListerCounts
from tierfs.namespace.transaction import ReadTransaction
from tierfs.namespace.walk import count_below, unlearned_below, unlisted_below

T = TypeVar("T")
Ask = Callable[[int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class ImportResult:
    """What an import found: entries and directories known now, and what that cost."""

    entries: int
    directories: int
    requests: int
    hidden_keys: int


class Crawler:
    """Trio thread only. ``listed`` and ``learn`` ask about one inode, as ``refresh.Refresher`` does."""

    def __init__(
        self, db: Database, listed: Ask, learn: Ask, counts: ListerCounts, now_ns: Callable[[], int]
    ) -> None:
        self._db = db
        self._listed = listed
        self._learn = learn
        self._counts = counts
        self._now_ns = now_ns

    async def complete(self, ino: int, jobs: int) -> None:
        """List what is not listed at or below a directory, but for directories that are only here."""
        waiting = await self._unlisted(ino, True)
        if waiting:
            await self._list_below(waiting, jobs, None, skip_own=True)

    async def import_below(
        self, ino: int, jobs: int, progress: Callable[[int, int], None] | None, *, metadata: bool
    ) -> ImportResult:
        """See ``Refresher.import_prefix``."""
        requests, hidden = self._counts.requests, self._counts.hidden_keys
        await self._list_below(await self._unlisted(ino, False), jobs, progress, skip_own=False)
        if metadata:
            await self._learn_below(ino, jobs)
        entries, directories = await self._in_snapshot(lambda txn: count_below(txn, ino))
        return ImportResult(
            entries, directories, self._counts.requests - requests, self._counts.hidden_keys - hidden
        )

    async def _list_below(
        self,
        waiting: list[int],
        jobs: int,
        progress: Callable[[int, int], None] | None,
        *,
        skip_own: bool,
    ) -> None:
        """List these directories and what is below them; where one LIST brings a subtree, that is all."""
        busy = directories = 0
        entries_before = self._counts.entries
        failures: list[TierfsError] = []
        changed = trio.Event()

        async def work() -> None:
            nonlocal busy, changed, directories
            while not failures:
                if not waiting:
                    if not busy:
                        return
                    await changed.wait()
                    continue
                ino = waiting.pop()
                busy += 1
                try:
                    await self._listed(ino)
                    waiting.extend(below for below in await self._unlisted(ino, skip_own) if below != ino)
                except NotFound:
                    pass  # removed meanwhile
                except TierfsError as error:
                    failures.append(error)
                finally:
                    busy -= 1
                    changed.set()
                    changed = trio.Event()
                directories += 1
                if progress is not None:
                    progress(self._counts.entries - entries_before, directories)

        async with trio.open_nursery() as nursery:
            for _ in range(max(1, jobs)):
                nursery.start_soon(work)
        if failures:
            raise failures[0]

    async def _learn_below(self, ino: int, jobs: int) -> None:
        """HEAD for every object of which only a listing is known."""
        waiting = await self._in_snapshot(lambda txn: unlearned_below(txn, ino))
        failures: list[TierfsError] = []

        async def work() -> None:
            while waiting and not failures:
                try:
                    await self._learn(waiting.pop())
                except NotFound:
                    pass  # removed meanwhile
                except TierfsError as error:
                    failures.append(error)

        async with trio.open_nursery() as nursery:
            for _ in range(max(1, jobs)):
                nursery.start_soon(work)
        if failures:
            raise failures[0]

    async def _unlisted(self, ino: int, skip_own: bool) -> list[int]:
        now_ns = self._now_ns()
        return await self._in_snapshot(lambda txn: unlisted_below(txn, ino, now_ns, skip_own=skip_own))

    async def _in_snapshot(self, look: Callable[[ReadTransaction], T]) -> T:
        def read() -> T:
            with self._db.snapshot() as txn:
                return look(txn)

        return await trio.to_thread.run_sync(read)
