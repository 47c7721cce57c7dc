"""Fetching: single flight per block, demand before prefetch, bounded requests and memory.

Trio thread only; the request, the checksums and the write into the tier happen in one worker thread: of a
short range from one buffer, which readers get as well; of a long one while it comes in, and readers find it
in the tier. A fetch is a run of blocks inside one extent. It belongs to nobody: waiters come and go
(and may be cancelled), it goes on, and the bytes are kept.

Between looking whether a block is in flight and registering a new fetch for it there is no await.

A fetch fails with ``StaleContent`` if that version of the object is gone, or with the ``StoreError`` of the
store (which has tried again as often as it is told to). Trouble with a tier never fails it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import trio

from tierfs.cache import blocks, record
from tierfs.cache.blocks import EXTENT_BLOCKS, EXTENT_SIZE_BYTES
from tierfs.cache.fill import Fill
from tierfs.cache.getting import Got, NativeGets
from tierfs.cache.health import is_no_space
from tierfs.cache.memory import ByteBudget, TransitBuffer
from tierfs.cache.receive import receive
from tierfs.cache.segments import PACKED_BYTES
from tierfs.cache.tier import Tier
from tierfs.errors import ObjectNotFound, PreconditionFailed, ShortBody, StaleContent, TierfsError
from tierfs.log import get_logger
from tierfs.metrics import Metrics
from tierfs.store.base import ObjectStore
from tierfs.store.body import Body
from tierfs.store.prepared import way_of
from tierfs.types import BLOCK_SIZE_BYTES, ContentId, ObjectRef

_log = get_logger(__name__)

SMALLEST_PIECE_BYTES = 4 * 1024 * 1024
"""A long range is cut into requests of at least this and at most one extent."""
STREAMED_BYTES = 1024 * 1024
"""From this length on a body goes into the tier's file as it comes in, and is never in memory as a whole."""
_PREFETCH_SHARE = 0.75
"""How much of the connections and of the memory prefetch may use."""

TierOrder = Callable[[ObjectRef, int, int], Iterable[Tier]]
"""(ref, extent number, bytes) -> the tiers to try, best first."""


class Fetch:
    """One request under way. Who wants its bytes counts itself in ``readers`` before it is done."""

    __slots__ = ("blocks", "body", "demand", "done", "error", "length_bytes", "offset_bytes", "readers",
                 "ref", "started", "stored")

    def __init__(self, ref: ObjectRef, offset_bytes: int, length_bytes: int, *, demand: bool,
                 aligned: bool) -> None:
        self.ref = ref
        self.offset_bytes = offset_bytes
        self.length_bytes = length_bytes
        self.demand = demand
        self.readers = 0
        self.started = False
        self.done = trio.Event()
        self.body: bytes | None = None
        self.error: BaseException | None = None
        self.stored = False
        first = offset_bytes // BLOCK_SIZE_BYTES
        self.blocks = range(first, first + blocks.block_count(length_bytes)) if aligned else range(0)

    async def wait(self) -> None:
        """Until the bytes are local. Raises what the fetch failed with."""
        await self.done.wait()
        if self.error is not None:
            raise self.error

    async def read(self) -> bytes | None:
        """The bytes of the whole fetch, for a reader that is counted; None: they are in a tier only."""
        await self.wait()
        return self.body


class Fetcher:
    """See the module docstring."""

    def __init__(self, store: ObjectStore, metrics: Metrics, tiers_for: TierOrder, *, concurrency: int,
                 memory_budget_bytes: int) -> None:
        self._store = store
        self._tiers_for = tiers_for
        self._slots = concurrency
        self._prefetch_slots = max(1, int(concurrency * _PREFETCH_SHARE))
        self._threads = trio.CapacityLimiter(concurrency)
        self._native = NativeGets(way_of(store), threads=concurrency)
        self.budget = ByteBudget(max(BLOCK_SIZE_BYTES, memory_budget_bytes // 2))
        self.transit = TransitBuffer(memory_budget_bytes // 2)
        self._demand: deque[Fetch] = deque()
        self._prefetch: deque[Fetch] = deque()
        self._in_flight: dict[tuple[ContentId, int], Fetch] = {}
        self._exact: dict[tuple[ContentId, int, int], Fetch] = {}
        self._active = 0
        self._active_prefetch = 0
        self._nursery: trio.Nursery | None = None
        self._closed = False
        self._fetched = metrics.counter("tierfs_fetched_bytes_total", "Bytes read from the store.")
        self._requests = metrics.counter("tierfs_fetch_requests_total", "Requests that read object data.")
        self._failures = metrics.counter("tierfs_fetch_failures_total", "Such requests that failed.")
        metrics.gauge("tierfs_fetch_memory_bytes", "Bytes of file data in flight.",
                      lambda: self.budget.used_bytes)
        metrics.gauge("tierfs_transit_memory_bytes", "Bytes of file data that no tier took.",
                      lambda: self.transit.used_bytes)
        metrics.gauge("tierfs_fetches_active", "Requests for object data under way.", lambda: self._active)

    def start(self, nursery: trio.Nursery) -> None:
        """Where the fetches run."""
        self._nursery = nursery
        self._native.start(nursery)

    async def close(self) -> None:
        """When this returns, C writes into no tier any more, and everybody who waits has been told."""
        self._closed = True
        for fetch in (*self._demand, *self._prefetch):
            fetch.error = _closing(fetch)
            self._forget(fetch)
            fetch.done.set()
        self._demand.clear()
        self._prefetch.clear()
        await self._native.close()

    @property
    def concurrency(self) -> int:
        return self._slots

    def in_flight(self, content_id: ContentId, block_no: int) -> Fetch | None:
        """The fetch that will bring that block."""
        return self._in_flight.get((content_id, block_no))

    def piece_bytes(self, length_bytes: int) -> int:
        """The request size for a range of that length: enough pieces to use the connections."""
        share = -(-length_bytes // max(1, self._slots // 2) // BLOCK_SIZE_BYTES) * BLOCK_SIZE_BYTES
        return max(SMALLEST_PIECE_BYTES, min(EXTENT_SIZE_BYTES, share))

    def request(self, ref: ObjectRef, extent_no: int, mask: int, *, demand: bool,
                piece_bytes: int = EXTENT_SIZE_BYTES) -> list[Fetch]:
        """New fetches for those blocks of that extent, none of which is in flight."""
        found = []
        most = max(1, piece_bytes // BLOCK_SIZE_BYTES)
        for start, count in blocks.runs(mask):
            for first in range(start, start + count, most):
                offset = (extent_no * EXTENT_BLOCKS + first) * BLOCK_SIZE_BYTES
                stop = offset + min(most, start + count - first) * BLOCK_SIZE_BYTES
                length = min(stop, ref.size_bytes) - offset
                fetch = Fetch(ref, offset, length, demand=demand, aligned=True)
                for number in fetch.blocks:
                    self._in_flight[(ref.content_id, number)] = fetch
                found.append(fetch)
        self._enqueue(found, demand)
        return found

    def request_exact(self, ref: ObjectRef, offset_bytes: int, length_bytes: int) -> Fetch:
        """A fetch of just that range, for one reader (and whoever asks for the same at the same time)."""
        key = (ref.content_id, offset_bytes, length_bytes)
        fetch = self._exact.get(key)
        if fetch is None:
            fetch = self._exact[key] = Fetch(ref, offset_bytes, length_bytes, demand=True, aligned=False)
            self._enqueue([fetch], True)
        return fetch

    def promote(self, fetch: Fetch) -> None:
        """A reader waits for it."""
        if not fetch.demand and not fetch.started:
            fetch.demand = True
            self._prefetch.remove(fetch)
            self._demand.append(fetch)
            self._pump()

    def _enqueue(self, fetches: list[Fetch], demand: bool) -> None:
        (self._demand if demand else self._prefetch).extend(fetches)
        self._pump()

    def _pump(self) -> None:
        """Start what may start."""
        assert self._nursery is not None
        while self._active < self._slots and not self._closed:
            if self._demand:
                fetch, queue = self._demand[0], self._demand
            elif self._prefetch and self._active_prefetch < self._prefetch_slots:
                fetch, queue = self._prefetch[0], self._prefetch
                room = self.budget.limit_bytes * _PREFETCH_SHARE - self.budget.used_bytes
                if self._active and fetch.length_bytes > room:
                    return
            else:
                return
            if not self.budget.try_acquire(fetch.length_bytes):
                return
            queue.popleft()
            fetch.started = True
            self._active += 1
            self._active_prefetch += not fetch.demand
            if not self._begin_small(fetch):
                self._nursery.start_soon(self._run, fetch, not fetch.demand, False)

    def _begin_small(self, fetch: Fetch) -> bool:
        """All of a small content, without a task; False: that cannot be."""
        ref = fetch.ref
        if fetch.length_bytes != ref.size_bytes or ref.size_bytes > PACKED_BYTES or not fetch.blocks:
            return False
        request = self._native.prepare(ref, 0, fetch.length_bytes)
        tier = next(iter(self._tiers_for(ref, 0, fetch.length_bytes)), None) if request is not None else None
        fill = tier.reserve_nowait(ref, len(fetch.blocks)) if tier is not None else None
        if request is None or tier is None or fill is None:
            return False
        # Who demands it counts itself as a reader only after this.
        ended = partial(self._small_ended, fetch, tier, fill, not fetch.demand)
        if not self._native.begin(request, ref.etag, 0, fetch.length_bytes, fill, ended,
                                  wants_body=fetch.demand):
            tier.abandon(fill)
            return False
        self._requests.add()
        return True

    def _small_ended(self, fetch: Fetch, tier: Tier, fill: Fill, was_prefetch: bool, got: Got | None) -> None:
        if got is None:
            # Its room is given back: what is tried next finds its own.
            tier.abandon(fill)
            if self._closed:
                fetch.error = _closing(fetch)
            else:
                assert self._nursery is not None
                self._nursery.start_soon(self._run, fetch, was_prefetch, True)
                return
        else:
            fetch.body, sums = got
            self._fetched.add(fetch.length_bytes)
            try:
                fetch.stored = tier.complete(fill, sums)
            except Exception as error:
                _log.exception("a fetch failed unexpectedly", key=fetch.ref.key, offset=fetch.offset_bytes)
                self._failures.add()
                fetch.error = error
        self._end(fetch, was_prefetch)

    async def _run(self, fetch: Fetch, was_prefetch: bool, was_tried: bool) -> None:
        """``was_tried``: by threads in C, in vain."""
        ended = False
        try:
            await self._bring(fetch, was_tried)
            ended = True
        except (ObjectNotFound, PreconditionFailed) as error:
            self._failures.add()
            ref = fetch.ref
            fetch.error = StaleContent(f"{ref.key}: this version ({ref.etag}) is gone from the store")
            fetch.error.__cause__ = error
        except TierfsError as error:
            self._failures.add()
            fetch.error = error
        except Exception as error:
            _log.exception("a fetch failed unexpectedly", key=fetch.ref.key, offset=fetch.offset_bytes)
            self._failures.add()
            fetch.error = error
        finally:
            if not ended and fetch.error is None:
                fetch.error = _closing(fetch)
            self._end(fetch, was_prefetch)

    def _forget(self, fetch: Fetch) -> None:
        """Nobody finds it any more."""
        for number in fetch.blocks:
            del self._in_flight[(fetch.ref.content_id, number)]
        if not fetch.blocks:
            del self._exact[(fetch.ref.content_id, fetch.offset_bytes, fetch.length_bytes)]

    def _end(self, fetch: Fetch, was_prefetch: bool) -> None:
        self._forget(fetch)
        self._active -= 1
        self._active_prefetch -= was_prefetch
        self.budget.release(fetch.length_bytes)
        if not fetch.readers:
            # Whoever holds the object for other reasons must not hold the bytes.
            fetch.body = None
        fetch.done.set()
        self._pump()

    async def _bring(self, fetch: Fetch, was_tried: bool) -> None:
        placed: tuple[Tier, Fill] | None = None
        if fetch.blocks:
            placed = await self._reserve(fetch)
        tier, fill = placed if placed is not None else (None, None)
        self._requests.add()
        stored = False
        try:
            body, sums, error = await self._get(fetch, fill, in_c=not was_tried)
            if tier is not None and fill is not None:
                if error is not None and body is not None:
                    error = await self._write_again(tier, fill, body, error)
                if error is None:
                    stored = True
                    fetch.stored = tier.complete(fill, sums)
        finally:
            if tier is not None and fill is not None and not stored:
                tier.abandon(fill)
        self._fetched.add(fetch.length_bytes)
        if fetch.blocks and not fetch.stored and body is not None and not (fill is not None and fill.dead):
            self.transit.add(fetch.ref.content_id, fetch.blocks.start, body)
        fetch.body = body

    async def _reserve(self, fetch: Fetch) -> tuple[Tier, Fill] | None:
        extent_no, first = divmod(fetch.blocks.start, EXTENT_BLOCKS)
        for tier in self._tiers_for(fetch.ref, extent_no, fetch.length_bytes):
            fill = await tier.reserve(fetch.ref, extent_no, first, len(fetch.blocks))
            if fill is not None:
                return tier, fill
        return None

    async def _get(self, fetch: Fetch, fill: Fill | None, *, in_c: bool
                   ) -> tuple[bytes | None, bytes, OSError | None]:
        """(body, checksums, what went wrong with the tier). No body: the tier has it."""
        if fill is not None and in_c:
            wants_body = fetch.length_bytes < STREAMED_BYTES and fetch.readers > 0
            found = await self._native.get(fetch.ref, fetch.offset_bytes, fetch.length_bytes, fill,
                                           wants_body=wants_body)
            if found is not None:
                return *found, None
        return await trio.to_thread.run_sync(self._get_and_store, fetch, fill, limiter=self._threads,
                                             abandon_on_cancel=True)

    def _get_and_store(self, fetch: Fetch, fill: Fill | None) -> tuple[bytes | None, bytes, OSError | None]:
        """Worker thread: (body, checksums, what went wrong with the tier). No body: the tier has it."""
        ref = fetch.ref
        if fill is not None and fetch.length_bytes >= STREAMED_BYTES:
            sums, error = self._stream(fetch, fill)
            if error is None:
                return None, sums, None
        body = self._store.get_range(ref.key, fetch.offset_bytes, fetch.length_bytes, if_match=ref.etag,
                                     version_id=ref.version_id)
        _require_length(fetch, len(body))
        if fill is None:
            return body, b"", None
        sums = record.checksums(body)
        try:
            fill.write(body)
        except OSError as error:
            return body, sums, error
        return body, sums, None

    def _stream(self, fetch: Fetch, fill: Fill) -> tuple[bytes, OSError | None]:
        """Worker thread: the body into the file as it comes in; (checksums, trouble with the file)."""
        ref = fetch.ref

        def take(body: Body) -> tuple[bytes, OSError | None]:
            _require_length(fetch, body.length_bytes)
            return receive(body, target, fill.target_bytes)

        try:
            with fill.open() as target:
                return self._store.stream(ref.key, fetch.offset_bytes, fetch.length_bytes, take,
                                          if_match=ref.etag, version_id=ref.version_id)
        except OSError as error:
            return b"", error

    async def _write_again(self, tier: Tier, fill: Fill, body: bytes, error: OSError) -> OSError | None:
        """What can be done about a failed write: one more try after making room. None if it worked."""
        if isinstance(error, FileNotFoundError) and not fill.create:
            if not fill.dead:
                tier.file_vanished(fill.content_id)
            return error
        if is_no_space(error) and not fill.dead:
            # Somebody else filled the disk: give up as much of ours again, and try once.
            tier.evictor.release(fill.nbytes + EXTENT_SIZE_BYTES)
            await tier.evictor.settled()
            try:
                await trio.to_thread.run_sync(fill.write, body, limiter=tier.io)
                return None
            except OSError as again:
                error = again
        tier.health.failed(error)
        return error


def _closing(fetch: Fetch) -> StaleContent:
    return StaleContent(f"{fetch.ref.key}: not fetched, the cache is being closed")


def _require_length(fetch: Fetch, length_bytes: int) -> None:
    if length_bytes != fetch.length_bytes:
        raise ShortBody(
            f"{fetch.ref.key}: {length_bytes} bytes at {fetch.offset_bytes}, not {fetch.length_bytes}")
