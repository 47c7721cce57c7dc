"""The cache as a whole: right bytes from wherever they are, restarts, small and failing tiers, moves, pins."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest
import trio

from tests.support.tiers import (
    BLOCK,
    EXTENT,
    KIB,
    MIB,
    Clock,
    RangeStore,
    body_of,
    device_bytes,
    nvme,
    object_file,
    opened_cache,
    ram,
    read_all,
    settings_for,
    settled,
)
from tierfs.cache import device, upkeep
from tierfs.cache.opening import tier_root
from tierfs.cache.residency import Cache
from tierfs.config import TierSetting
from tierfs.errors import FormatError, InvalidArgument, TierFailed, TierFull
from tierfs.metrics import Metrics
from tierfs.types import ObjectRef


@pytest.fixture
def store():
    return RangeStore()


@pytest.mark.parametrize("blocks", range(1, 7))
@pytest.mark.parametrize("extra", [-1, 0, 1, 976])
@pytest.mark.parametrize("unit", [BLOCK, MIB, EXTENT])
async def test_no_length_loses_its_tail(tmp_path, store, unit, blocks, extra):
    size = unit * blocks + extra
    body = body_of(size)
    ref = store.add("k", body)
    async with opened_cache(store, settings_for(tmp_path, nvme(tmp_path / "t", 64 * MIB))) as cache:
        assert await cache.read(ref, max(0, size - 1000), 2000) == body[-1000:]
        assert await cache.read(ref, 0, size + BLOCK) == body
        assert cache.read_nowait(ref, 0, size + BLOCK) == body
        assert await cache.read(ref, size, 1) == b""
        assert cache.is_complete(ref.content_id)
        assert cache.resident_bytes(ref) == {"nvme": size}
    assert store.fetched_bytes() == size


@pytest.mark.parametrize("kind", ["none", "one", "two", "tiny", "tiny ram"])
@pytest.mark.parametrize("seed", range(3))
async def test_random_reads_prefetches_and_evictions(tmp_path, store, kind, seed):
    tiers = {
        "none": (),
        "one": (nvme(tmp_path / "n", 40 * MIB),),
        "two": (ram(tmp_path / "r", 9 * MIB), nvme(tmp_path / "n", 30 * MIB)),
        "tiny": (nvme(tmp_path / "n", 400 * KIB),),
        "tiny ram": (ram(tmp_path / "r", 700 * KIB), nvme(tmp_path / "n", 2 * MIB)),
    }[kind]
    dice = random.Random(seed)
    bodies = {}
    for number in range(12):
        body = body_of(dice.choice([1, 5000, 200_000, MIB, 9 * MIB + 1, 18 * MIB]), number)
        bodies[store.add(f"k{number}", body)] = body
    refs = list(bodies)
    settings = settings_for(tmp_path, *tiers, memory_budget_bytes=32 * MIB)
    async with opened_cache(store, settings) as cache:

        async def work(seed: int) -> None:
            dice = random.Random(seed)
            for _ in range(60):
                ref = dice.choice(refs)
                body = bodies[ref]
                start = dice.randrange(ref.size_bytes)
                length = dice.choice([1, 4096, 100_000, 400_000, 3 * MIB])
                action = dice.random()
                if action < 0.7:
                    data = cache.read_nowait(ref, start, length)
                    if data is None:
                        data = await cache.read(ref, start, length)
                    assert data == body[start : start + length]
                elif action < 0.85:
                    await cache.prefetch(ref, start, length)
                elif action < 0.93:
                    await cache.evict(ref.content_id)
                else:
                    await cache.forget(ref.content_id)

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(work, seed * 100 + number)
        await settled(cache)
        for tier in cache.status():
            assert tier.used_bytes + tier.overhead_bytes <= tier.capacity_bytes + BLOCK or tier.name == "staging"
            assert abs(tier.used_bytes - device_bytes(Path(tier.path))) <= BLOCK
        assert sum(tier.damaged_blocks for tier in cache.tiers) == 0


@pytest.mark.parametrize("clean", [True, False])
async def test_restart_keeps_the_cache(tmp_path, store, clean):
    refs = [store.add(f"k{n}", body_of(300_000, n)) for n in range(20)]
    settings = settings_for(tmp_path, nvme(tmp_path / "t", 64 * MIB))
    if clean:
        async with opened_cache(store, settings) as cache:
            for ref in refs:
                await read_all(cache, ref)
    else:
        script = (
            "import os, sys, trio\n"
            "from pathlib import Path\n"
            "from tests.support.tiers import *\n"
            "async def main():\n"
            "    store = RangeStore()\n"
            "    refs = [store.add(f'k{n}', body_of(300_000, n)) for n in range(20)]\n"
            "    base = Path(sys.argv[1])\n"
            "    async with opened_cache(store, settings_for(base, nvme(base / 't', 64 * MIB))) as cache:\n"
            "        for ref in refs:\n"
            "            await cache.read(ref, 0, 300_000)\n"
            "        await cache.tiers[0].commit()\n"
            "        print('ready', flush=True)\n"
            "        await trio.sleep_forever()\n"
            "trio.run(main)\n"
        )
        with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            process.send_signal(signal.SIGKILL)
    store.ranges.clear()
    async with opened_cache(store, settings) as cache:
        for number, ref in enumerate(refs):
            assert cache.is_complete(ref.content_id)
            assert await read_all(cache, ref) == body_of(300_000, number)
        assert store.ranges == []
        (tier,) = cache.status()
        assert abs(tier.used_bytes - device_bytes(tmp_path / "t")) <= BLOCK


async def test_a_damaged_block_is_fetched_again(tmp_path, store):
    body = body_of(2 * MIB)
    ref = store.add("k", body)
    async with opened_cache(store, settings_for(tmp_path, nvme(tmp_path / "t", 64 * MIB))) as cache:
        await read_all(cache, ref)
        store.ranges.clear()
        with object_file(tmp_path / "t", ref.content_id).open("r+b") as file:
            file.seek(3 * BLOCK + 5)
            file.write(b"rot")
        assert await cache.read(ref, 2 * BLOCK, 3 * BLOCK) == body[2 * BLOCK : 5 * BLOCK]
        assert store.ranges == [("k", 3 * BLOCK, BLOCK)]
        assert cache.is_complete(ref.content_id)
        assert await cache.read(ref, 0, 2 * MIB) == body


async def test_a_tier_smaller_than_one_file(tmp_path, store):
    body = body_of(40 * MIB)
    ref = store.add("k", body)
    async with opened_cache(store, settings_for(tmp_path, nvme(tmp_path / "t", 20 * MIB))) as cache:
        for _ in range(2):
            assert await read_all(cache, ref, MIB) == body
            await settled(cache)
            (tier,) = cache.status()
            assert tier.used_bytes + tier.overhead_bytes <= 20 * MIB
            assert device_bytes(tmp_path / "t") <= 20 * MIB + BLOCK
        # The second pass found something of what the first left.
        assert store.fetched_bytes() < 80 * MIB


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("size", "count"), [(100 * KIB, 240), (6 * MIB, 40)])
async def test_epochs_over_more_data_than_the_tier_holds_still_hit(tmp_path, store, shuffled, size, count):
    """Data = 1.2 x cache: near cache / data, not the 0 % of LRU."""
    refs = [store.add(f"k{n}", bytes([n % 251]) * size) for n in range(count)]
    capacity = int(count * size / 1.2) + 128 * KIB
    rates = []
    async with opened_cache(store, settings_for(tmp_path, ram(tmp_path / "t", capacity))) as cache:
        for epoch in range(3):
            order = random.Random(epoch).sample(refs, count) if shuffled else refs
            for ref in order:
                if cache.read_nowait(ref, 0, size) is None:
                    await cache.read(ref, 0, size)
            rates.append(1 - store.fetched_bytes() / (count * size))
    assert rates[0] == 0
    assert min(rates[1:]) >= 0.7, rates


async def test_a_ram_tier_is_dropped_on_a_clean_exit_unless_asked(store, tmp_path):
    setting = TierSetting(name="ram", path=None, capacity_bytes=8 * MIB, volatile=True)
    root = tier_root(setting, "0123456789abcdef")
    ref = store.add("k", body_of(MIB))
    try:
        async with opened_cache(store, settings_for(tmp_path, setting), keep_volatile=True) as cache:
            await read_all(cache, ref)
            assert os.stat(root).st_mode & 0o777 == 0o700
        assert root.is_dir()
        async with opened_cache(store, settings_for(tmp_path, setting), keep_volatile=False) as cache:
            assert await read_all(cache, ref) == body_of(MIB)
            assert len(store.ranges) == 1
        assert not root.exists()
    finally:
        subprocess.run(["rm", "-rf", str(root)], check=True)


async def test_many_contents_read_once_cost_no_descriptors(tmp_path, store):
    refs = [store.add(f"k{n}", b"%d" % n) for n in range(4000)]
    settings = settings_for(tmp_path, nvme(tmp_path / "t", 64 * MIB))
    async with opened_cache(store, settings) as cache:
        before = len(os.listdir("/proc/self/fd"))
        for number, ref in enumerate(refs):
            assert await cache.read(ref, 0, 4096) == b"%d" % number
        for number, ref in enumerate(refs):
            data = cache.read_nowait(ref, 0, 4096)
            assert (await cache.read(ref, 0, 4096) if data is None else data) == b"%d" % number
        assert len(os.listdir("/proc/self/fd")) - before <= 520
        other = store.add("other", b"x" * 100_000)
        with trio.fail_after(60):
            assert await cache.read(other, 0, 100_000) == b"x" * 100_000


# several tiers


async def test_tiers_fill_fast_to_slow_and_nothing_is_evicted_before_all_are_full(tmp_path, store):
    refs = [store.add(f"k{n}", body_of(MIB, n)) for n in range(20)]
    tiers = (ram(tmp_path / "r", 8 * MIB), nvme(tmp_path / "n", 20 * MIB))
    async with opened_cache(store, settings_for(tmp_path, *tiers)) as cache:
        for ref in refs:
            await read_all(cache, ref)
        assert sum(cache.resident_bytes(ref).get("ram", 0) for ref in refs) >= 7 * MIB
        assert all(cache.is_complete(ref.content_id) for ref in refs)
        assert sum(tier.evictor.evicted_bytes for tier in cache.tiers) == 0
        store.ranges.clear()
        for ref in refs:
            await read_all(cache, ref)
        assert store.ranges == []


async def test_what_is_used_again_is_promoted_and_what_that_displaces_is_kept_below(tmp_path, store):
    capacity = 8 * MIB
    tiers = (ram(tmp_path / "r", capacity), nvme(tmp_path / "n", 64 * MIB))
    old = [store.add(f"old{n}", body_of(MIB, n)) for n in range(8)]
    hot = [store.add(f"hot{n}", body_of(MIB, n + 50)) for n in range(6)]
    async with opened_cache(store, settings_for(tmp_path, *tiers)) as cache:
        for ref in old:
            await read_all(cache, ref)
        for ref in hot:
            await read_all(cache, ref)
        assert all("ram" not in cache.resident_bytes(ref) for ref in hot[2:])
        for _ in range(12):
            for ref in hot:
                await read_all(cache, ref)
                await trio.sleep(0.002)
        await settled(cache)
        assert sum(cache.resident_bytes(ref).get("ram", 0) for ref in hot) >= 4 * MIB
        # Demoted, not lost.
        assert all(cache.is_complete(ref.content_id) for ref in old)
        store.ranges.clear()
        for number, ref in enumerate(old):
            assert await read_all(cache, ref) == body_of(MIB, number)
        assert store.ranges == []


async def test_closing_does_not_wait_for_room_below(tmp_path, store, monkeypatch):
    """A unit on its way from one tier to the next when the cache is closed."""
    tiers = (ram(tmp_path / "r", 8 * MIB), nvme(tmp_path / "n", 8 * MIB))
    with trio.fail_after(60):
        async with opened_cache(store, settings_for(tmp_path, *tiers)) as cache:
            for number in range(6):
                await cache.read(store.add(f"k{number}", body_of(MIB, number)), 0, MIB)
            upper, lower = cache.tiers
            asked = trio.Event()

            async def never(nbytes: int = 0) -> bool:
                asked.set()
                await trio.sleep_forever()
                return False

            monkeypatch.setattr(lower.evictor, "make_room", never)
            upper.evictor.evict(upper.presence.idle_units(store_ref(store, "k0").content_id))
            await asked.wait()
    assert not object_file(tmp_path / "r", store_ref(store, "k0").content_id).exists()


def store_ref(store: RangeStore, key: str) -> ObjectRef:
    return store.add(key, store.body(key))


async def test_reads_go_on_when_a_tier_cannot_be_opened(tmp_path, store):
    (tmp_path / "file").write_bytes(b"")
    tiers = (ram(tmp_path / "file" / "r", MIB), nvme(tmp_path / "n", 8 * MIB))
    async with opened_cache(store, settings_for(tmp_path, *tiers)) as cache:
        assert [tier.name for tier in cache.status()] == ["nvme"]
        ref = store.add("k", body_of(MIB))
        assert await read_all(cache, ref) == body_of(MIB)


async def test_a_write_tier_that_cannot_be_opened_is_an_error(tmp_path, store):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TierFailed, match="nvme"):
        async with opened_cache(store, settings_for(tmp_path, nvme(tmp_path / "file" / "n", 8 * MIB))):
            pass
    (tmp_path / "n" / "index.lmdb").mkdir(parents=True)
    async with opened_cache(store, settings_for(tmp_path, nvme(tmp_path / "n", 8 * MIB))):
        with pytest.raises(TierFailed, match="another mount"):
            async with opened_cache(store, settings_for(tmp_path, nvme(tmp_path / "n", 8 * MIB))):
                pass


async def test_a_tier_of_a_newer_version_is_refused(tmp_path, store):
    async with opened_cache(store, settings_for(tmp_path, nvme(tmp_path / "n", 8 * MIB))):
        pass
    with lmdb.open(str(tmp_path / "n" / "index.lmdb"), max_dbs=8) as env:
        with env.begin(write=True, db=env.open_db(b"meta")) as txn:
            txn.put(b"format", b"tierfs tier index 2")
    with pytest.raises(FormatError, match=str(tmp_path / "n")):
        async with opened_cache(store, settings_for(tmp_path, nvme(tmp_path / "n", 8 * MIB))):
            pass


async def test_an_exception_of_the_user_comes_out_as_it_is(tmp_path, store):
    with pytest.raises(KeyError, match="mine"):
        async with opened_cache(store, settings_for(tmp_path, nvme(tmp_path / "n", 8 * MIB))):
            raise KeyError("mine")


# pins, eviction, forgetting


async def test_a_pin_brings_everything_and_keeps_it(tmp_path, store):
    model = store.add("model", body_of(20 * MIB))
    others = [store.add(f"k{n}", body_of(4 * MIB, n)) for n in range(20)]
    tiers = (ram(tmp_path / "r", 24 * MIB), nvme(tmp_path / "n", 48 * MIB))
    async with opened_cache(store, settings_for(tmp_path, *tiers)) as cache:
        await cache.read(model, 5 * MIB, 100)
        await cache.pin(model, "ram")
        assert cache.resident_bytes(model)["ram"] == 20 * MIB
        assert {tier.name: tier.pinned_bytes for tier in cache.status()} == {"ram": 20 * MIB, "nvme": 0}
        for ref in others:
            await read_all(cache, ref, MIB)
        assert cache.resident_bytes(model)["ram"] == 20 * MIB
        assert await cache.evict(model.content_id) == 0
    async with opened_cache(store, settings_for(tmp_path, *tiers)) as cache:
        store.ranges.clear()
        assert await read_all(cache, model, MIB) == body_of(20 * MIB)
        assert store.ranges == []
        await cache.unpin(model.content_id)
        await cache.evict(model.content_id)
        await settled(cache)
        assert cache.resident_bytes(model) == {}
        assert {tier.pinned_bytes for tier in cache.status()} == {0}


async def test_a_pin_copies_from_the_tier_that_has_it(tmp_path, store):
    tiers = (ram(tmp_path / "r", 4 * MIB), nvme(tmp_path / "n", 48 * MIB))
    filler = store.add("filler", body_of(4 * MIB - 300 * KIB, 1))
    model = store.add("model", body_of(3 * MIB))
    async with opened_cache(store, settings_for(tmp_path, *tiers)) as cache:
        await read_all(cache, filler, MIB)
        await cache.prefetch(model, 0, 3 * MIB)
        assert set(cache.resident_bytes(model)) == {"nvme"}
        store.ranges.clear()
        await cache.pin(model, "ram")
        assert cache.resident_bytes(model)["ram"] == 3 * MIB
        assert store.ranges == []


async def test_what_cannot_be_pinned_says_so(tmp_path, store):
    model = store.add("model", body_of(20 * MIB))
    tiers = (ram(tmp_path / "r", 4 * MIB), nvme(tmp_path / "n", 16 * MIB))
    async with opened_cache(store, settings_for(tmp_path, *tiers)) as cache:
        with pytest.raises(TierFull):
            await cache.pin(model)
        with pytest.raises(TierFull):
            await cache.pin(model, "ram")
        with pytest.raises(InvalidArgument, match="gold"):
            await cache.pin(model, "gold")
        assert {tier.pinned_bytes for tier in cache.status()} == {0}
        assert all(not tier.presence.pins for tier in cache.tiers)


async def test_evict_says_what_it_freed(tmp_path, store):
    ref = store.add("k", body_of(9 * MIB))
    async with opened_cache(store, settings_for(tmp_path, nvme(tmp_path / "n", 16 * MIB))) as cache:
        await read_all(cache, ref, MIB)
        assert await cache.evict(ref.content_id) == 9 * MIB
        assert await cache.evict(ref.content_id) == 0
        assert cache.resident_bytes(ref) == {}
        assert device_bytes(tmp_path / "n") == 0
        assert not cache.is_complete(ref.content_id)
        assert await read_all(cache, ref, MIB) == body_of(9 * MIB)


async def test_forget_frees_pinned_bytes_too(tmp_path, store):
    ref = store.add("k", body_of(9 * MIB))
    async with opened_cache(store, settings_for(tmp_path, nvme(tmp_path / "n", 16 * MIB))) as cache:
        await cache.pin(ref)
        await cache.forget(ref.content_id)
        await settled(cache)
        (tier,) = cache.status()
        assert (tier.used_bytes, tier.pinned_bytes) == (0, 0)
        assert device_bytes(tmp_path / "n") == 0
    async with opened_cache(store, settings_for(tmp_path, nvme(tmp_path / "n", 16 * MIB))) as cache:
        assert cache.tiers[0].presence.pins == set()


# a disk that others use, a disk that fails


async def test_a_disk_that_somebody_else_fills_means_evict_then_bypass(tmp_path, store, monkeypatch, caplog):
    root = tmp_path / "n"
    limit = 6 * MIB
    real = os.pwrite

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if device_bytes(root) + len(data) > limit:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    clock = Clock()
    refs = [store.add(f"k{n}", body_of(MIB, n)) for n in range(40)]
    async with opened_cache(store, settings_for(tmp_path, nvme(root, 64 * MIB)), now_ns=clock) as cache:
        for number, ref in enumerate(refs[:20]):
            assert await read_all(cache, ref) == body_of(MIB, number)
            assert cache.is_complete(ref.content_id)
        limit = 0
        for number, ref in enumerate(refs[20:]):
            assert await read_all(cache, ref) == body_of(MIB, number + 20)
        (tier,) = cache.status()
        assert tier.state == "full"
        assert sum("tier is bypassed" in line for line in caplog.messages) == 1
        limit = 64 * MIB
        clock.advance(60)
        ref = store.add("later", body_of(MIB, 99))
        assert await read_all(cache, ref) == body_of(MIB, 99)
        assert cache.is_complete(ref.content_id)
        assert cache.status()[0].state == "ok"


@pytest.mark.parametrize("operation", ["pwrite", "pread"])
async def test_a_failing_disk_is_bypassed_and_tried_again(tmp_path, store, monkeypatch, caplog, operation):
    clock = Clock()
    refs = [store.add(f"k{n}", body_of(MIB, n)) for n in range(10)]
    async with opened_cache(store, settings_for(tmp_path, nvme(tmp_path / "n", 64 * MIB)), now_ns=clock) as cache:
        for ref in refs[:3]:
            await read_all(cache, ref)

        def fail(fd: int, *args: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, operation, fail)
            patch.setattr(os, "preadv", fail)
            for number, ref in enumerate(refs):
                assert await read_all(cache, ref, MIB) == body_of(MIB, number)
            assert cache.status()[0].state == "failing"
        assert sum("tier is bypassed" in line for line in caplog.messages) == 1
        clock.advance(60)
        other = store.add("other", body_of(MIB, 77))
        assert await read_all(cache, other) == body_of(MIB, 77)
        assert cache.status()[0].state == "ok"
        store.ranges.clear()
        assert await read_all(cache, refs[0]) == body_of(MIB, 0)
        assert store.ranges == []


async def test_free_space_of_the_file_system_counts(tmp_path, store, monkeypatch):
    free = [1000 * MIB]
    monkeypatch.setattr(device, "free_bytes", lambda root: (free[0], 64 * MIB))
    refs = [store.add(f"k{n}", body_of(MIB, n)) for n in range(20)]
    async with opened_cache(store, settings_for(tmp_path, nvme(tmp_path / "n", 64 * MIB))) as cache:
        for ref in refs[:10]:
            await read_all(cache, ref)
        free[0] = 0
        await upkeep.look_at_device(cache.tiers[0])
        for ref in refs[10:]:
            await read_all(cache, ref)
        await settled(cache)
        # One MiB (1/64 of the device) is given back to the others.
        assert device_bytes(tmp_path / "n") <= 9 * MIB + BLOCK


# figures


async def test_figures_of_a_tier(tmp_path, store):
    metrics = Metrics()
    ref = store.add("k", body_of(MIB))
    async with Cache.open(settings_for(tmp_path, nvme(tmp_path / "n", 16 * MIB)), store, metrics, "id") as cache:
        await read_all(cache, ref)
        await read_all(cache, ref)
        gauges = {(gauge.name, gauge.labels): gauge.read() for gauge in metrics.gauges()}
        label = (("tier", "nvme"),)
        assert gauges["tierfs_tier_used_bytes", label] == MIB == cache.status()[0].used_bytes
        assert gauges["tierfs_tier_capacity_bytes", label] == 16 * MIB
        assert gauges["tierfs_tier_hits_total", label] >= 8
        assert gauges["tierfs_tier_misses_total", label] == 1
        counters = {counter.name: counter.value for counter in metrics.counters()}
        assert counters["tierfs_fetched_bytes_total"] == MIB
        assert counters["tierfs_fetch_requests_total"] == 1


async def test_with_no_tier_the_status_shows_the_staging_area(tmp_path, store):
    async with opened_cache(store, settings_for(tmp_path)) as cache:
        (tier,) = cache.status()
        assert (tier.name, tier.path, tier.used_bytes) == ("staging", str(tmp_path / "staging"), 0)
        assert tier.capacity_bytes < 1 << 60
