"""Read-ahead for the file system: watches every read and has fetched what will be asked for next.

Called for each read request, so the usual case (a stream in the middle of its window) is a few dictionary
look-ups. State is kept for files that were read lately, a few hundred bytes each, whatever the number of
open handles.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from tierfs.config import Settings
from tierfs.metrics import Metrics
from tierfs.prefetch.pattern import PatternDetector, Range
from tierfs.prefetch.runner import LocalBytes, PrefetchRunner
from tierfs.prefetch.succession import Neighbours, SuccessionDetector, Successor
from tierfs.types import ContentId, ObjectRef

MAX_FILES = 4096
WHOLE_FILE_BYTES = 4 * 1024 * 1024
"""A file of at most this size that is read from its start is fetched as a whole."""
WINDOW_SHARE = 1 / 40
"""Largest window as part of all tiers: half of what passes through a tier without being kept."""
NEXT_FILE_PIECE_BYTES = 2 * 1024 * 1024


@dataclass(slots=True, eq=False)
class _File:
    content_id: ContentId
    detector: PatternDetector
    successor: Successor | None = None
    """A large file that is expected to be read after this one."""
    successor_ahead: int = 0
    """How much of it has been asked for."""


class ReadAheadTable:
    """What is known about the files being read, by inode. Trio thread only."""

    def __init__(
        self,
        cache: LocalBytes,
        settings: Settings,
        *,
        following: Neighbours | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """``following``: who comes after whom in a directory; None: no read-ahead past the end of a file."""
        self._cache = cache
        self._limit_bytes = _limit_bytes(settings)
        self._keeps_whole_files = bool(settings.tiers)
        self._files: OrderedDict[int, _File] = OrderedDict()
        self._runner = PrefetchRunner(
            cache,
            task_limit=2 * settings.fetch_concurrency,
            budget_bytes=max(min(settings.memory_budget_bytes // 2, 4 * self._limit_bytes), 1),
            metrics=metrics,
        )
        self._succession: SuccessionDetector | None = None
        if following is not None and self._keeps_whole_files:
            self._succession = SuccessionDetector(following, self._limit_bytes)

    @property
    def runner(self) -> PrefetchRunner:
        return self._runner

    async def run(self) -> None:
        """Own the fetches, until cancelled. Without it nothing is read ahead."""
        await self._runner.run()

    def observe(self, ino: int, ref: ObjectRef | None, offset: int, length: int) -> None:
        """Note a read request and start what follows from it. ``ref`` None: the bytes are local by nature.

        Call it before waiting for the bytes of this request, so that both are fetched together. Never raises.
        """
        if ref is None or not self._limit_bytes:
            return
        file = self._files.get(ino)
        if file is None or file.content_id != ref.content_id:
            file = self._opened(ino, ref, offset, length)
        waiting = self._runner.is_fetching(ref.content_id, offset, length)
        ranges = file.detector.observe(offset, length, waiting=waiting)
        if ranges and not self._cache.is_complete(ref.content_id):
            self._fetch(ref, file.detector, ranges)
        if file.successor is not None:
            self._reach_over(file, offset)

    def forget(self, ino: int) -> None:
        """Nobody has the file open any more."""
        self._files.pop(ino, None)

    def _opened(self, ino: int, ref: ObjectRef, offset: int, length: int) -> _File:
        """First read of a file since it was opened, or since its content changed."""
        file = self._files[ino] = _File(ref.content_id, PatternDetector(ref.size_bytes, self._limit_bytes))
        if len(self._files) > MAX_FILES:
            self._files.popitem(last=False)
        if offset == 0 and self._keeps_whole_files:
            local = self._cache.is_complete(ref.content_id)
            if not local and length < ref.size_bytes <= WHOLE_FILE_BYTES:
                self._runner.hint(ref, Range(0, ref.size_bytes))
            if self._succession is not None:
                self._follow(file, self._succession.opened(ino, local=local))
        return file

    def _fetch(self, ref: ObjectRef, detector: PatternDetector, ranges: list[Range]) -> None:
        for wanted in ranges:
            if not self._runner.hint(ref, wanted):
                detector.dropped(wanted)
                return

    def _follow(self, file: _File, successors: list[Successor]) -> None:
        """Fetch small files that are expected next; a large one only as far as this one's window reaches."""
        for successor in successors:
            ref = successor.ref
            if self._cache.is_complete(ref.content_id) or self._runner.is_fetching(
                ref.content_id, 0, ref.size_bytes
            ):
                continue
            if ref.size_bytes > WHOLE_FILE_BYTES:
                file.successor = successor
                return
            if not self._runner.hint(ref, Range(0, ref.size_bytes)):
                return

    def _reach_over(self, file: _File, offset: int) -> None:
        """All of this file has been asked for: spend the rest of the window on the beginning of the next."""
        successor = file.successor
        assert successor is not None
        until = min(file.detector.spare_bytes(offset), successor.ref.size_bytes)
        while file.successor_ahead < until:
            start = file.successor_ahead
            end = min(start + NEXT_FILE_PIECE_BYTES, successor.ref.size_bytes)
            if end > until or not self._runner.hint(successor.ref, Range(start, end - start)):
                return
            file.successor_ahead = end


def _limit_bytes(settings: Settings) -> int:
    """The read-ahead window that fits the tiers: what is read ahead must not push out what was read ahead."""
    capacity = sum(tier.capacity_bytes for tier in settings.tiers)
    if not capacity:
        return settings.read_ahead_bytes
    return min(settings.read_ahead_bytes, int(capacity * WINDOW_SHARE))
