"""Opening and closing all tiers of a mount, and telling the metrics of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio

from tierfs.cache import device
from tierfs.cache.health import OK
from tierfs.cache.index_opening import IndexDamaged
from tierfs.cache.tier import Tier
from tierfs.config import Settings, TierSetting
from tierfs.errors import FormatError, TierFailed
from tierfs.log import get_logger
from tierfs.metrics import Metrics

_log = get_logger(__name__)

RAM_DIRECTORY = Path("/dev/shm")


def tier_root(setting: TierSetting, mount_id: str) -> Path:
    """Where that tier is."""
    if setting.path is not None:
        return Path(setting.path)
    return RAM_DIRECTORY / f"tierfs-{os.geteuid()}-{mount_id}-{setting.name}"


async def open_tiers(settings: Settings, mount_id: str, now_ns: Callable[[], int]) -> tuple[list[Tier], Tier]:
    """(tiers for reading, fast to slow; the write tier). See ``Cache.open`` for errors.

    The write tier is the first that survives a reboot; without any it is a directory of the mount's state,
    in which nothing is kept that the store has.
    """
    opened: list[Tier] = []
    write_tier: Tier | None = None
    try:
        for setting in settings.tiers:
            may_fail = setting.volatile or write_tier is not None
            tier = await _open_one(setting, tier_root(setting, mount_id), now_ns, may_fail=may_fail)
            if tier is not None:
                opened.append(tier)
                if not setting.volatile and write_tier is None:
                    write_tier = tier
        if write_tier is None:
            root = Path(settings.state_dir) / "staging"
            setting = TierSetting(name="staging", path=str(root), capacity_bytes=1 << 62, volatile=False)
            write_tier = await _open_one(setting, root, now_ns, may_fail=False, keeps_clean=False)
            assert write_tier is not None
    except BaseException:
        with trio.CancelScope(shield=True):
            await close_tiers(opened, keep_volatile=True)
        raise
    return opened, write_tier


async def _open_one(setting: TierSetting, root: Path, now_ns: Callable[[], int], *, may_fail: bool,
                    keeps_clean: bool = True) -> Tier | None:
    def open_it() -> Tier:
        return Tier.open_directory(setting, root, now_ns=now_ns, keeps_clean=keeps_clean)

    try:
        return await trio.to_thread.run_sync(open_it)
    except FormatError:
        raise
    except (OSError, IndexDamaged) as error:
        reason = f"{error.strerror}: {root}" if isinstance(error, OSError) else str(error)
        if isinstance(error, device.TierInUse) or not may_fail:
            raise TierFailed(f"tier {setting.name}: {reason}") from error
        _log.error("tier cannot be used; going on without it", tier=setting.name, path=str(root),
                   reason=reason)
        return None


async def close_tiers(tiers: list[Tier], *, keep_volatile: bool) -> None:
    for tier in tiers:
        await trio.to_thread.run_sync(_close_one, tier, keep_volatile)


def _close_one(tier: Tier, keep_volatile: bool) -> None:
    tier.close_files(clean=True)
    if tier.setting.volatile and not keep_volatile and tier.setting.path is None:
        shutil.rmtree(tier.root, ignore_errors=True)


_GAUGES: tuple[tuple[str, str, Callable[[Tier], float]], ...] = (
    ("tierfs_tier_capacity_bytes", "Bytes the tier may use.", lambda t: t.ledger.capacity_bytes),
    ("tierfs_tier_used_bytes", "Bytes of file data on its device.", lambda t: t.ledger.data_bytes),
    ("tierfs_tier_overhead_bytes", "Bytes of its index and directories.", lambda t: t.ledger.overhead_bytes),
    ("tierfs_tier_dirty_bytes", "Bytes not known to be in the store.", lambda t: t.ledger.dirty_bytes),
    ("tierfs_tier_pinned_bytes", "Bytes kept until unpinned.", lambda t: t.ledger.policy.pinned_bytes),
    ("tierfs_tier_hits_total", "Reads answered by the tier.", lambda t: t.hits),
    ("tierfs_tier_hit_bytes_total", "Bytes answered by the tier.", lambda t: t.hit_bytes),
    ("tierfs_tier_misses_total", "Reads that had to go to the store.", lambda t: t.misses),
    ("tierfs_tier_evicted_bytes_total", "Bytes given up to make room.", lambda t: t.evictor.evicted_bytes),
    ("tierfs_tier_damaged_blocks_total", "Blocks with a wrong checksum; fetched again.",
     lambda t: t.damaged_blocks),
    ("tierfs_tier_bypassed", "1 while the tier takes no new data.", lambda t: t.health.state != OK),
)


def register_gauges(metrics: Metrics, tiers: list[Tier]) -> None:
    """Figures of each tier, read from the truth when somebody asks."""
    for tier in tiers:
        for name, text, value_of in _GAUGES:
            metrics.gauge(name, text, partial(value_of, tier), tier=tier.name)
