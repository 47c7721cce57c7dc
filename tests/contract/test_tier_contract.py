"""One suite against every kind of tier: whatever the tier does, readers get the right bytes and the cap holds."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
    opened_cache,
    ram,
    read_all,
    settings_for,
    settled,
)
from tierfs.cache import device
from tierfs.config import TierSetting

KINDS = ["directory", "ram", "tmpfs", "tiny", "zero", "no holes", "read only", "fails to write", "fails to read", "full",
         "flaky"]


@dataclass
class Kind:
    name: str
    setting: TierSetting
    keeps: bool
    """What was read once is local afterwards."""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kind]:
    name = request.param
    setting = nvme(tmp_path / "t", 64 * MIB)
    keeps = name in ("directory", "ram", "tmpfs", "no holes")
    shared = Path("/dev/shm") / f"tierfs-test-{os.getpid()}"
    if name == "ram":
        setting = ram(tmp_path / "t", 64 * MIB)
    elif name == "tmpfs":
        # Non-volatile by its setting, but where RWF_NOWAIT is not known.
        setting = nvme(shared, 64 * MIB)
    elif name == "tiny":
        setting = nvme(tmp_path / "t", 700 * KIB)
    elif name == "zero":
        setting = nvme(tmp_path / "t", 0)
    elif name == "no holes":
        monkeypatch.setattr(device, "punch", lambda fd, offset, length: False)
    elif name == "read only":
        break_call(monkeypatch, "pwrite", errno.EROFS, 1.0)
    elif name == "fails to write":
        break_call(monkeypatch, "pwrite", errno.EIO, 1.0)
    elif name == "fails to read":
        break_call(monkeypatch, "pread", errno.EIO, 1.0)
        break_call(monkeypatch, "preadv", errno.EIO, 1.0)
    elif name == "full":
        break_call(monkeypatch, "pwrite", errno.ENOSPC, 1.0)
    elif name == "flaky":
        for call in ("pwrite", "pread", "preadv"):
            break_call(monkeypatch, call, errno.EIO, 0.1)
    yield Kind(name, setting, keeps)
    if shared.exists():
        for path in sorted(shared.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        shared.rmdir()


def break_call(monkeypatch: pytest.MonkeyPatch, name: str, code: int, share: float) -> None:
    real = getattr(os, name)
    dice = random.Random(name)

    def call(*args: object) -> object:
        if dice.random() < share:
            raise OSError(code, os.strerror(code))
        return real(*args)

    monkeypatch.setattr(os, name, call)


@pytest.fixture
def store() -> RangeStore:
    return RangeStore()


@pytest.mark.parametrize("size", [1, BLOCK, MIB + 1, EXTENT + 3 * BLOCK + 1])
async def test_a_reader_gets_the_right_bytes(kind, store, tmp_path, size):
    body = body_of(size)
    ref = store.add("k", body)
    clock = Clock()
    async with opened_cache(store, settings_for(tmp_path, kind.setting), now_ns=clock) as cache:
        for step in (size, 128 * KIB, 100_000):
            assert await read_all(cache, ref, step) == body
            clock.advance(31)
        if kind.keeps:
            assert store.fetched_bytes() == size
            assert cache.is_complete(ref.content_id)


async def test_a_crowd_of_readers(kind, store, tmp_path):
    bodies = {}
    for number in range(10):
        body = body_of([3000, 200_000, MIB, 9 * MIB][number % 4], number)
        bodies[store.add(f"k{number}", body)] = body
    refs = list(bodies)
    async with opened_cache(store, settings_for(tmp_path, kind.setting)) as cache:

        async def work(seed: int) -> None:
            dice = random.Random(seed)
            for _ in range(25):
                ref = dice.choice(refs)
                start = dice.randrange(ref.size_bytes)
                length = dice.choice([100, 5000, 300_000])
                if dice.random() < 0.2:
                    await cache.prefetch(ref, start, 2 * MIB)
                data = cache.read_nowait(ref, start, length)
                if data is None:
                    data = await cache.read(ref, start, length)
                assert data == bodies[ref][start : start + length]

        async with trio.open_nursery() as nursery:
            for seed in range(6):
                nursery.start_soon(work, seed)
        await settled(cache)
        for tier in cache.status():
            assert 0 <= tier.used_bytes <= tier.capacity_bytes + BLOCK
            assert tier.clean_bytes >= 0
            assert tier.pinned_bytes == 0
            assert tier.state in ("ok", "full", "failing")
            assert bool(tier.reason) == (tier.state != "ok")
            if tier.capacity_bytes >= 700 * KIB:
                assert device_bytes(Path(tier.path)) <= tier.capacity_bytes + BLOCK


async def test_evicting_and_forgetting_never_hurt(kind, store, tmp_path):
    body = body_of(2 * MIB)
    ref = store.add("k", body)
    async with opened_cache(store, settings_for(tmp_path, kind.setting)) as cache:
        for action in (cache.evict, cache.forget, cache.unpin):
            assert await read_all(cache, ref, MIB) == body
            await action(ref.content_id)
            assert await read_all(cache, ref, MIB) == body


async def test_a_restart_never_hurts(kind, store, tmp_path):
    body = body_of(3 * MIB)
    ref = store.add("k", body)
    for _ in range(3):
        async with opened_cache(store, settings_for(tmp_path, kind.setting)) as cache:
            assert await read_all(cache, ref, MIB) == body
    if kind.keeps:
        assert store.fetched_bytes() == len(body)
