"""An explicit prefetch: make these files local, and account for every byte of them.

At any moment, and for good at the end::

    total == cached + failed + evicted + skipped + pending        (pending is 0 at the end)

*cached*: local now, found so by asking the cache when everything else was over, not by having fetched it
once. *failed*: of files that could not be fetched. *evicted*: fetched, and gone again. *skipped*: not tried,
because no tier can take it beside what this job has cached already, or because the job was cancelled. A file
that counts as cached is complete in some tier, so it reads with the network off; of one that was evicted
in part the rest still counts as cached.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field

import trio

from tierfs.cache.residency import Cache
from tierfs.errors import TierfsError
from tierfs.log import get_logger
from tierfs.types import ContentId, ObjectRef

log = get_logger(__name__)

CHUNK_BYTES = 64 * 1024 * 1024
"""Asked of the cache at once; it fetches the parts of it in parallel."""
MAX_FAILURES = 100
_CACHED = struct.Struct("<16sQ")
_BETWEEN_CHECKPOINTS = 500


@dataclass(frozen=True, slots=True)
class PrefetchTarget:
    """One regular file. ``ref`` None: its bytes were written here and are local by nature."""

    path: bytes
    size_bytes: int
    ref: ObjectRef | None


@dataclass(frozen=True, slots=True)
class PrefetchFailure:
    path: bytes
    message: str


@dataclass(slots=True)
class PrefetchProgress:
    """The account of a job; see the module docstring. Files are counted under the fate of their last byte."""

    total_files: int = 0
    total_bytes: int = 0
    cached_files: int = 0
    cached_bytes: int = 0
    failed_files: int = 0
    failed_bytes: int = 0
    evicted_files: int = 0
    evicted_bytes: int = 0
    skipped_files: int = 0
    skipped_bytes: int = 0
    failures: list[PrefetchFailure] = field(default_factory=list)
    """The first ``MAX_FAILURES`` of them."""

    @property
    def pending_bytes(self) -> int:
        done = self.cached_bytes + self.failed_bytes + self.evicted_bytes + self.skipped_bytes
        return self.total_bytes - done


class PrefetchJob:
    """See the module docstring. Trio thread only; one ``run`` per job."""

    def __init__(self, cache: Cache, *, parallel_files: int) -> None:
        self._cache = cache
        self._parallel_files = max(1, parallel_files)
        self._scope = trio.CancelScope()
        self._finished = trio.Event()
        self._cached = bytearray()
        self._claimed_bytes = 0
        self._found_bytes = 0
        self.progress = PrefetchProgress()

    @property
    def finished(self) -> bool:
        return self._finished.is_set()

    def cancel(self) -> None:
        """Start nothing more; what has not been fetched counts as skipped."""
        self._scope.cancel()

    async def wait(self) -> PrefetchProgress:
        """Until the account is final."""
        await self._finished.wait()
        return self.progress

    def fail(self, path: bytes, message: str, size_bytes: int = 0) -> None:
        """Count something that never became a target: a path that does not exist, a directory not listed."""
        progress = self.progress
        progress.total_files += 1
        progress.total_bytes += size_bytes
        self._fail(path, message, size_bytes)

    async def run(self, targets: AsyncIterable[PrefetchTarget]) -> PrefetchProgress:
        """Fetch all targets; never raises because of one.

        What the iterable raises is raised, after what it had given before has been fetched.
        """
        broken: Exception | None = None
        try:
            with self._scope:
                send, receive = trio.open_memory_channel[PrefetchTarget](self._parallel_files)
                async with trio.open_nursery() as nursery:
                    for _ in range(self._parallel_files):
                        nursery.start_soon(self._work, receive.clone())
                    receive.close()
                    try:
                        await self._feed(send, targets)
                    except Exception as error:
                        broken = error
            await self._verify()
        finally:
            self._skip_the_rest()
            self._finished.set()
        if broken is not None:
            raise broken
        return self.progress

    async def _feed(
        self, send: trio.MemorySendChannel[PrefetchTarget], targets: AsyncIterable[PrefetchTarget]
    ) -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(send)
            if isinstance(targets, AsyncGenerator):
                await stack.enter_async_context(aclosing(targets))
            async for target in targets:
                self.progress.total_files += 1
                self.progress.total_bytes += target.size_bytes
                await send.send(target)

    async def _work(self, receive: trio.MemoryReceiveChannel[PrefetchTarget]) -> None:
        async with receive:
            async for target in receive:
                await self._prefetch(target)

    async def _prefetch(self, target: PrefetchTarget) -> None:
        ref, size = target.ref, target.size_bytes
        if ref is None or size == 0:
            self.progress.cached_files += 1
            self.progress.cached_bytes += size
            return
        if self._cache.is_complete(ref.content_id):
            self._claimed_bytes += size
            self._found_bytes += size
        else:
            if self._claimed_bytes + size > self._capacity_bytes():
                self.progress.skipped_files += 1
                self.progress.skipped_bytes += size
                return
            self._claimed_bytes += size
            try:
                await self._fetch(ref, size)
            except TierfsError as error:
                self._claimed_bytes -= size
                self._fail(target.path, str(error), size)
                return
            except Exception as error:
                log.exception("prefetch failed unexpectedly", key=ref.key)
                self._claimed_bytes -= size
                self._fail(target.path, f"internal error: {error!r}", size)
                return
        # Until ``_verify`` looks again this is what we know.
        self.progress.cached_files += 1
        self.progress.cached_bytes += size
        self._cached += _CACHED.pack(ref.content_id, size)

    async def _fetch(self, ref: ObjectRef, size_bytes: int) -> None:
        for offset in range(0, size_bytes, CHUNK_BYTES):
            await self._cache.prefetch(ref, offset, min(CHUNK_BYTES, size_bytes - offset))

    def _capacity_bytes(self) -> int:
        """What all usable tiers could hold of this job's files: all but dirty data and pins of others.

        What is pinned may be among the files that were found local already; they are not subtracted twice.
        """
        tiers = [tier for tier in self._cache.status() if tier.state == "ok"]
        pinned = sum(tier.pinned_bytes for tier in tiers)
        room = sum(tier.capacity_bytes - tier.dirty_bytes - tier.overhead_bytes for tier in tiers)
        return room - max(0, pinned - self._found_bytes)

    def _fail(self, path: bytes, message: str, size_bytes: int) -> None:
        self.progress.failed_files += 1
        self.progress.failed_bytes += size_bytes
        if len(self.progress.failures) < MAX_FAILURES:
            self.progress.failures.append(PrefetchFailure(path, message))

    async def _verify(self) -> None:
        """Move what is not local any more from cached to evicted."""
        progress = self.progress
        for number, (content_id, size) in enumerate(_CACHED.iter_unpack(self._cached)):
            if number % _BETWEEN_CHECKPOINTS == 0:
                await trio.lowlevel.checkpoint()
            found = ContentId(content_id)
            if self._cache.is_complete(found):
                continue
            left = min(size, max(self._cache.resident_bytes(found).values(), default=0))
            progress.cached_files -= 1
            progress.cached_bytes -= size - left
            progress.evicted_files += 1
            progress.evicted_bytes += size - left

    def _skip_the_rest(self) -> None:
        progress = self.progress
        done = progress.cached_files + progress.failed_files + progress.evicted_files + progress.skipped_files
        progress.skipped_files += progress.total_files - done
        progress.skipped_bytes += progress.pending_bytes
