"""Turn tiers as written into tiers with a directory and a capacity, from what the file systems have free."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from tierfs.config.schema import Settings, TierSetting
from tierfs.config.values import TierText
from tierfs.errors import ConfigError
from tierfs.mountpoint import canonical

RAM_DIRECTORY = "/dev/shm"
SHARE_OF_FREE = 0.8
"""How much of the free space a tier takes whose size nobody said."""
RESERVE_BYTES = 1024**3
"""What such a tier leaves free at least, if the file system is not smaller than four times that."""
MIN_TIER_BYTES = 64 * 1024**2
_DECISIONS = "capacity.json"


def place_tiers(written: Sequence[TierText], state_dir: str) -> tuple[TierSetting, ...]:
    """The tiers of a mount, fast to slow as written; one NVMe tier in the state directory if none is.

    ``none`` alone means no tier at all: every read goes to the store.
    """
    if any(tier.size_bytes == 0 for tier in written):
        if len(written) > 1:
            raise ConfigError("tier: none goes with no other tier")
        return ()
    if not written:
        written = [TierText(os.path.join(state_dir, "tier"), None)]
    remembered = _remembered(state_dir)
    tiers: list[TierSetting] = []
    for tier in written:
        if tier.path is None:
            capacity_bytes = tier.size_bytes or 0
            _check_ram(capacity_bytes)
            name = _unused_name("ram", tiers)
            tiers.append(TierSetting(name=name, path=None, capacity_bytes=capacity_bytes, volatile=True))
            continue
        path = canonical(tier.path)
        capacity_bytes = tier.size_bytes or _capacity_from_free(path, remembered.get(path, 0))
        name = _unused_name("nvme", tiers)
        tiers.append(TierSetting(name=name, path=path, capacity_bytes=capacity_bytes, volatile=False))
    return tuple(tiers)


def remember_capacities(settings: Settings) -> None:
    """Write down what was decided, so that a tier that is full of our data does not shrink at the next mount.

    Best effort: without the file the next mount sizes the tiers from what is free then.
    """
    decided = {tier.path: tier.capacity_bytes for tier in settings.tiers if tier.path is not None}
    path = os.path.join(settings.state_dir, _DECISIONS)
    try:
        with open(path + ".new", "w", encoding="utf-8", opener=_private) as file:
            json.dump(decided, file)
        os.replace(path + ".new", path)
    except OSError:
        pass


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _remembered(state_dir: str) -> dict[str, int]:
    try:
        with open(os.path.join(state_dir, _DECISIONS), encoding="utf-8") as file:
            table = json.load(file)
    except (OSError, ValueError):
        return {}
    if not isinstance(table, dict):
        return {}
    return {path: size for path, size in table.items() if isinstance(size, int) and size > 0}


def _unused_name(kind: str, tiers: Sequence[TierSetting]) -> str:
    same = sum(1 for tier in tiers if tier.name.rstrip("0123456789") == kind)
    return kind if same == 0 else f"{kind}{same + 1}"


def _existing_parent(path: str) -> str:
    while not os.path.isdir(path) and path != "/":
        path = os.path.dirname(path)
    return path


def _capacity_from_free(path: str, remembered_bytes: int) -> int:
    try:
        info = os.statvfs(_existing_parent(path))
    except OSError as error:
        raise ConfigError(f"tier: cannot tell how much is free at {path}: {error.strerror}") from error
    total_bytes = info.f_blocks * info.f_frsize
    free_bytes = info.f_bavail * info.f_frsize
    reserve_bytes = min(RESERVE_BYTES, total_bytes // 4)
    fresh_bytes = int(min(free_bytes * SHARE_OF_FREE, free_bytes - reserve_bytes))
    # What was decided before includes what the tier holds by now; never more than the disk could take.
    capacity_bytes = max(fresh_bytes, min(remembered_bytes, total_bytes - reserve_bytes))
    if capacity_bytes < MIN_TIER_BYTES:
        raise ConfigError(
            f"tier: only {free_bytes // 1024**2} MiB are free at {path}; "
            f"free some, or name another directory with --tier DIR:SIZE"
        )
    return capacity_bytes


def _check_ram(capacity_bytes: int) -> None:
    try:
        info = os.statvfs(RAM_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"tier: ram needs {RAM_DIRECTORY}: {error.strerror}") from error
    total_bytes = info.f_blocks * info.f_frsize
    if capacity_bytes > total_bytes > 0:
        raise ConfigError(
            f"tier: ram is given {capacity_bytes // 1024**2} MiB, but {RAM_DIRECTORY} holds only "
            f"{total_bytes // 1024**2} MiB; enlarge it (in a container: --shm-size) or ask for less"
        )
