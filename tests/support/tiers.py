"""What tests of the cache share: settings, a store that notes each range, and the truth about a directory."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from tests.support.memory_store import MemoryStore
from tierfs.cache import upkeep
from tierfs.cache.residency import Cache
from tierfs.cache.tier import Tier
from tierfs.config import Settings, TierSetting
from tierfs.metrics import Metrics
from tierfs.types import ContentId, ObjectRef, content_id_of_object

KIB = 1024
MIB = 1024 * 1024
BLOCK = 128 * KIB
EXTENT = 8 * MIB


class RangeStore(MemoryStore):
    """Notes every GET; ``gate`` (if set) is waited for in each one; ``running_most`` were under way at once."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[str, int, int]] = []
        self.gate: threading.Event | None = None
        self.transform: Callable[[str, bytes], bytes] = lambda key, body: body
        self.running = 0
        self.running_most = 0
        self._count_lock = threading.Lock()

    def add(self, key: str, body: bytes) -> ObjectRef:
        """Put an object without counting it."""
        info = self.set(key, body)
        content_id = content_id_of_object(key, info.etag, info.size_bytes, None)
        return ObjectRef(content_id, key, info.etag, info.size_bytes)

    def get_range(self, key: str, offset_bytes: int, length_bytes: int, *, if_match: str | None = None,
                  version_id: str | None = None) -> bytes:
        with self._count_lock:
            self.ranges.append((key, offset_bytes, length_bytes))
            self.running += 1
            self.running_most = max(self.running_most, self.running)
        try:
            if self.gate is not None:
                self.gate.wait(30)
            body = super().get_range(key, offset_bytes, length_bytes, if_match=if_match, version_id=version_id)
            return self.transform(key, body)
        finally:
            with self._count_lock:
                self.running -= 1

    def fetched_bytes(self) -> int:
        """Bytes asked for since the last call."""
        ranges, self.ranges = self.ranges, []
        return sum(length for _, _, length in ranges)


class Clock:
    """A clock that only moves when told."""

    def __init__(self) -> None:
        self.ns = 1_700_000_000 * 10**9

    def __call__(self) -> int:
        return self.ns

    def advance(self, seconds: float) -> None:
        self.ns += int(seconds * 1e9)


def nvme(path: Path, capacity_bytes: int, name: str = "nvme") -> TierSetting:
    return TierSetting(name=name, path=str(path), capacity_bytes=capacity_bytes, volatile=False)


def ram(path: Path, capacity_bytes: int) -> TierSetting:
    """A RAM tier in a directory of the test's own."""
    return TierSetting(name="ram", path=str(path), capacity_bytes=capacity_bytes, volatile=True)


def settings_for(state: Path, *tiers: TierSetting, memory_budget_bytes: int = 64 * MIB,
                 fetch_concurrency: int = 8, dirty_limit_bytes: int = 0) -> Settings:
    return Settings(source="memory://test", mountpoint="/nowhere", state_dir=str(state), tiers=tiers,
                    memory_budget_bytes=memory_budget_bytes, fetch_concurrency=fetch_concurrency,
                    dirty_limit_bytes=dirty_limit_bytes)


@asynccontextmanager
async def opened_cache(store: MemoryStore, settings: Settings, *, now_ns: Callable[[], int] | None = None,
                       keep_volatile: bool = True) -> AsyncIterator[Cache]:
    clock = now_ns if now_ns is not None else Clock()
    async with Cache.open(settings, store, Metrics(), "0123456789abcdef", now_ns=clock,
                          keep_volatile=keep_volatile) as cache:
        yield cache


@asynccontextmanager
async def opened_tier(setting: TierSetting, *, now_ns: Callable[[], int] | None = None,
                      boot_id: bytes = b"boot", clean: bool = True, upkeep_runs: bool = True,
                      ) -> AsyncIterator[Tier]:
    """One tier with its background tasks; ``clean`` False closes it as ``kill -9`` would."""
    assert setting.path is not None
    clock = now_ns if now_ns is not None else Clock()
    tier = Tier.open_directory(setting, Path(setting.path), now_ns=clock, boot_id=boot_id)
    try:
        async with trio.open_nursery() as nursery:
            tier.evictor.start(nursery)
            await upkeep.look_at_device(tier)
            if upkeep_runs:
                nursery.start_soon(upkeep.run, tier)
            else:
                tier.walked.set()
            yield tier
            nursery.cancel_scope.cancel()
    finally:
        if clean:
            tier.close_files(clean=True)
        else:
            crash(tier)


def crash(tier: Tier) -> None:
    """Let go of a tier as the end of the process would: nothing more is written."""
    tier.files.close()
    tier.index.abandon()
    os.close(tier.lock_fd)


def body_of(size_bytes: int, seed: int = 0) -> bytes:
    """Bytes that tell where they belong."""
    return random.Random(f"{size_bytes}/{seed}").randbytes(size_bytes)


def object_file(root: Path, content_id: ContentId) -> Path:
    name = content_id.hex()
    return root / "objects" / name[:2] / name


def device_bytes(root: Path) -> int:
    """What the file data of a tier takes on its device, by the file system's own account."""
    return sum(os.stat(path).st_blocks * 512 for folder in ("objects", "segments", "dirty")
               for path in (root / folder).rglob("*") if path.is_file())


async def settled(cache: Cache) -> None:
    """Wait until nothing is being removed, or copied between tiers."""
    while any(tier.is_active for tier in cache.tiers):
        await trio.sleep(0.001)


async def read_all(cache: Cache, ref: ObjectRef, step: int = 128 * KIB) -> bytes:
    """All of an object in steps, without waiting where that can be."""
    pieces = []
    for offset in range(0, ref.size_bytes, step):
        data = cache.read_nowait(ref, offset, step)
        pieces.append(await cache.read(ref, offset, step) if data is None else data)
    return b"".join(pieces)
