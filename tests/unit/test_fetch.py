"""Fetching: single flight, order, limits, and how failures look."""

from __future__ import annotations

import threading
import tracemalloc

import pytest
import trio

from tests.support.tiers import BLOCK, EXTENT, KIB, MIB, RangeStore, body_of, nvme, opened_cache, settings_for
from tierfs.cache.residency import Cache
from tierfs.errors import (
    ObjectNotFound,
    PreconditionFailed,
    ShortBody,
    StaleContent,
    StoreAccessDenied,
    StoreUnavailable,
)
from tierfs.types import ObjectRef


@pytest.fixture
def store():
    return RangeStore()


async def wait_for(condition) -> None:
    with trio.fail_after(60):
        while not condition():
            await trio.sleep(0.001)


async def test_readers_of_one_block_share_one_request(tmp_path, store):
    ref = store.add("k", body_of(10 * MIB))
    store.gate = threading.Event()
    found: list[bytes] = []

    async def read(cache: Cache, start: int, length: int) -> None:
        found.append(await cache.read(ref, start, length))

    async with opened_cache(store, settings_for(tmp_path, nvme(tmp_path / "t", 64 * MIB))) as cache:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, cache, 3 * BLOCK, BLOCK)
            await wait_for(lambda: store.running == 1)
            for _ in range(10):
                nursery.start_soon(read, cache, 3 * BLOCK, BLOCK)
                nursery.start_soon(read, cache, 3 * BLOCK + 7, 9)
                nursery.start_soon(cache.prefetch, ref, 2 * BLOCK, 3 * BLOCK)
            await wait_for(lambda: store.running == 3)
            store.gate.set()
    assert sorted(store.ranges) == [("k", n * BLOCK, BLOCK) for n in (2, 3, 4)]
    assert set(found) == {body_of(10 * MIB)[3 * BLOCK : 4 * BLOCK], body_of(10 * MIB)[3 * BLOCK + 7 : 3 * BLOCK + 16]}


async def test_each_block_is_fetched_once_whatever_the_mix(tmp_path, store):
    body = body_of(20 * MIB + 5)
    ref = store.add("k", body)
    async with opened_cache(store, settings_for(tmp_path, nvme(tmp_path / "t", 64 * MIB))) as cache:

        async def read(start: int) -> None:
            for offset in range(start, len(body), 1_000_003):
                assert await cache.read(ref, offset, 70 * KIB) == body[offset : offset + 70 * KIB]

        async with trio.open_nursery() as nursery:
            for start in range(0, MIB, 200_000):
                nursery.start_soon(read, start)
            nursery.start_soon(cache.prefetch, ref, 0, len(body))
            nursery.start_soon(cache.prefetch, ref, 5 * MIB, 9 * MIB)
        assert store.fetched_bytes() == len(body)
        assert await cache.prefetch(ref, 0, len(body)) == 0


async def test_a_cancelled_reader_leaves_the_fetch_to_the_others(tmp_path, store):
    ref = store.add("k", body_of(MIB))
    store.gate = threading.Event()
    async with opened_cache(store, settings_for(tmp_path, nvme(tmp_path / "t", 64 * MIB))) as cache:
        with trio.move_on_after(0.02) as scope:
            await cache.read(ref, 0, 10)
        assert scope.cancelled_caught
        store.gate.set()
        assert await cache.read(ref, 0, MIB) == body_of(MIB)
        assert len(store.ranges) == 1


async def test_demand_goes_before_prefetch(tmp_path, store):
    ahead, asked = store.add("ahead", body_of(40 * MIB)), store.add("asked", body_of(BLOCK))
    store.gate = threading.Event()
    settings = settings_for(tmp_path, nvme(tmp_path / "t", 128 * MIB), fetch_concurrency=4)
    async with opened_cache(store, settings) as cache, trio.open_nursery() as nursery:
        nursery.start_soon(cache.prefetch, ahead, 0, 40 * MIB)
        # Prefetch leaves a connection free for whoever waits.
        await wait_for(lambda: store.running == 3)
        nursery.start_soon(cache.read, asked, 0, BLOCK)
        await wait_for(lambda: store.running == 4)
        assert store.ranges[-1][0] == "asked"
        # A block that is queued behind others moves to the front when somebody waits for it.
        nursery.start_soon(cache.read, ahead, 39 * MIB, 10)
        await wait_for(lambda: cache._fetcher._demand)
        store.gate.set()
        await wait_for(lambda: len(store.ranges) > 5)
        last = max(offset for key, offset, _ in store.ranges[:6] if key == "ahead")
        assert last >= 32 * MIB


async def test_connections_and_memory_are_bounded(tmp_path, store):
    ref = store.add("k", bytes(100 * MIB))
    settings = settings_for(tmp_path, nvme(tmp_path / "t", 256 * MIB), fetch_concurrency=5,
                            memory_budget_bytes=40 * MIB)
    most = 0
    async with opened_cache(store, settings) as cache, trio.open_nursery() as nursery:

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, cache.buffer_bytes)
                await trio.sleep(0)

        nursery.start_soon(watch)
        assert await cache.prefetch(ref, 0, 100 * MIB) == 100 * MIB
        nursery.cancel_scope.cancel()
    assert store.running_most <= 5
    assert 0 < most <= 20 * MIB


async def test_a_long_prefetch_takes_no_more_memory_than_its_budget(tmp_path, store):
    ref = store.add("k", bytes(96 * MIB))
    settings = settings_for(tmp_path, nvme(tmp_path / "t", 256 * MIB), fetch_concurrency=16,
                            memory_budget_bytes=32 * MIB)
    async with opened_cache(store, settings) as cache:
        tracemalloc.start()
        try:
            await cache.prefetch(ref, 0, 96 * MIB)
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert most < 24 * MIB


async def test_a_long_range_is_cut_into_requests_that_run_together(tmp_path, store):
    ref = store.add("k", bytes(32 * MIB))
    store.gate = threading.Event()
    settings = settings_for(tmp_path, nvme(tmp_path / "t", 256 * MIB), fetch_concurrency=8,
                            memory_budget_bytes=256 * MIB)
    async with opened_cache(store, settings) as cache, trio.open_nursery() as nursery:
        nursery.start_soon(cache.prefetch, ref, 0, 8 * MIB)
        await wait_for(lambda: store.running == 2)
        store.gate.set()
    assert sorted(store.ranges) == [("k", n * 4 * MIB, 4 * MIB) for n in range(2)]


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (ObjectNotFound("k"), StaleContent),
        (PreconditionFailed("k"), StaleContent),
        (StoreAccessDenied("k"), StoreAccessDenied),
        (StoreUnavailable("k"), StoreUnavailable),
        (RuntimeError("a mistake"), RuntimeError),
    ],
)
@pytest.mark.parametrize("with_tier", [True, False])
async def test_what_a_reader_sees_of_a_failure(tmp_path, store, raised, seen, with_tier):
    ref = store.add("k", body_of(MIB))

    def fail(operation: str, key: str) -> None:
        raise raised

    tiers = (nvme(tmp_path / "t", 64 * MIB),) if with_tier else ()
    async with opened_cache(store, settings_for(tmp_path, *tiers)) as cache:
        store.fail = fail
        with pytest.raises(seen):
            await cache.read(ref, 0, 10)
        with pytest.raises(seen):
            await cache.prefetch(ref, 0, MIB)
        store.fail = None
        assert cache.resident_bytes(ref) == {}
        assert sum(tier.used_bytes for tier in cache.status()) == 0
        assert await cache.read(ref, 0, MIB) == body_of(MIB)


async def test_a_replaced_object_is_stale_never_a_mixture(tmp_path, store):
    old = body_of(20 * MIB, 1)
    ref = store.add("k", old)
    async with opened_cache(store, settings_for(tmp_path, nvme(tmp_path / "t", 64 * MIB))) as cache:
        assert await cache.read(ref, 0, BLOCK) == old[:BLOCK]
        store.set("k", body_of(20 * MIB, 2))
        assert await cache.read(ref, 0, BLOCK) == old[:BLOCK]
        with pytest.raises(StaleContent):
            await cache.read(ref, 0, 2 * BLOCK)
        store.remove("k")
        with pytest.raises(StaleContent):
            await cache.read(ref, EXTENT, 1)


@pytest.mark.parametrize("with_tier", [True, False])
@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b"", lambda b: b + b"x"])
async def test_a_body_of_the_wrong_length_enters_nothing(tmp_path, store, with_tier, change):
    ref = store.add("k", body_of(MIB))
    tiers = (nvme(tmp_path / "t", 64 * MIB),) if with_tier else ()
    async with opened_cache(store, settings_for(tmp_path, *tiers)) as cache:
        store.transform = lambda key, body: change(body)
        with pytest.raises(ShortBody):
            await cache.read(ref, 0, MIB)
        with pytest.raises(ShortBody):
            await cache.prefetch(ref, 0, MIB)
        assert cache.resident_bytes(ref) == {}
        assert cache.buffer_bytes == 0
        for tier in cache.tiers:
            await tier.evictor.settled()
        assert list((tmp_path / "t").rglob("objects/??/*")) == []
        store.transform = lambda key, body: body
        assert await cache.read(ref, 0, MIB) == body_of(MIB)


@pytest.mark.parametrize("request_bytes", [4 * KIB, 128 * KIB])
async def test_without_tiers_little_more_is_fetched_than_asked(tmp_path, store, request_bytes):
    body = body_of(16 * MIB)
    ref = store.add("k", body)
    asked = 0
    async with opened_cache(store, settings_for(tmp_path)) as cache:
        for number in range(200):
            offset = number * 7919 * 4096 % (len(body) - request_bytes)
            assert cache.read_nowait(ref, offset, request_bytes) is None
            assert await cache.read(ref, offset, request_bytes) == body[offset : offset + request_bytes]
            asked += request_bytes
        assert store.fetched_bytes() <= 1.1 * asked
        assert cache.buffer_bytes == 0


async def test_without_tiers_read_ahead_waits_in_memory(tmp_path, store):
    body = body_of(16 * MIB)
    ref = store.add("k", body)
    settings = settings_for(tmp_path, memory_budget_bytes=16 * MIB)
    async with opened_cache(store, settings) as cache:
        assert await cache.prefetch(ref, 0, 2 * MIB) == 2 * MIB
        for offset in range(0, 2 * MIB, 128 * KIB):
            assert cache.read_nowait(ref, offset, 128 * KIB) == body[offset : offset + 128 * KIB]
        assert store.fetched_bytes() == 2 * MIB
        # More than the buffer can hold is not fetched in vain.
        assert await cache.prefetch(ref, 0, 16 * MIB) <= 8 * MIB
        assert cache.buffer_bytes <= 8 * MIB
        assert await cache.read(ref, 0, len(body)) == body


async def test_same_range_at_the_same_time_is_one_request_without_tiers(tmp_path, store):
    ref = store.add("k", body_of(MIB))
    store.gate = threading.Event()
    async with opened_cache(store, settings_for(tmp_path)) as cache, trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(cache.read, ref, 4096, 4096)
        await wait_for(lambda: store.running == 1)
        store.gate.set()
    assert store.ranges == [("k", 4096, 4096)]


async def test_a_small_object_takes_one_request(tmp_path, store):
    refs = [store.add(f"k{n}", body_of(900 * KIB, n)) for n in range(3)]
    async with opened_cache(store, settings_for(tmp_path, nvme(tmp_path / "t", 64 * MIB))) as cache:
        for ref in refs:
            for offset in range(0, ref.size_bytes, 128 * KIB):
                await cache.read(ref, offset, 128 * KIB)
        assert len(store.ranges) == 3
        # One that is not read from its start is not presumed to be read whole.
        other = store.add("other", body_of(900 * KIB, 9))
        await cache.read(other, 300 * KIB, 10)
        assert store.ranges[-1] == ("other", 2 * BLOCK, BLOCK)


async def test_the_cache_can_be_closed_while_requests_hang(tmp_path, store):
    ref = store.add("k", body_of(MIB))
    store.gate = threading.Event()

    async def read(cache: Cache) -> None:
        await cache.read(ref, 0, 10)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            async with opened_cache(store, settings_for(tmp_path, nvme(tmp_path / "t", 64 * MIB))) as cache:
                nursery.start_soon(read, cache)
                await wait_for(lambda: store.running == 1)
                nursery.cancel_scope.cancel()
    store.gate.set()
    await wait_for(lambda: store.running == 0)
    async with opened_cache(store, settings_for(tmp_path, nvme(tmp_path / "t", 64 * MIB))) as cache:
        assert await cache.read(ref, 0, MIB) == body_of(MIB)


async def test_an_empty_content_needs_nothing(tmp_path, store):
    ref = ObjectRef(store.add("k", b"").content_id, "k", "etag", 0)
    async with opened_cache(store, settings_for(tmp_path, nvme(tmp_path / "t", 64 * MIB))) as cache:
        assert cache.read_nowait(ref, 0, 10) == b""
        assert await cache.read(ref, 5, 10) == b""
        assert await cache.prefetch(ref, 0, 10) == 0
        await cache.pin(ref)
    assert store.ranges == []
