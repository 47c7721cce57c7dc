"""How much is measured: sizes, counts and times, all bounded."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tierfs.errors import ConfigError

KIB, MIB, GIB = 1024, 1024**2, 1024**3
MIN_SIZE_BYTES = 8 * MIB
QUICK_SIZE_BYTES, FULL_SIZE_BYTES = 512 * MIB, 4 * GIB
QUICK_LIMIT_S, FULL_LIMIT_S = 45.0, 540.0
"""Removing what was made comes on top."""
LARGE_SHARE, SMALL_SHARE, SAVED_SHARE = 0.5, 0.2, 0.25
"""What of the size goes into large files, small files, and a checkpoint. The rest: what is rounded up."""


@dataclass(frozen=True, slots=True)
class Scale:
    """``size_bytes``: everything that lies in the target at one time. ``limit_s``: when the last loop ends.

    ``workers``: numbers of processes that are tried, ascending. ``variant_s``: how long one loop runs.
    """

    quick: bool
    size_bytes: int
    limit_s: float
    variant_s: float
    workers: tuple[int, ...]
    large_count: int
    small_low_bytes: int
    small_high_bytes: int
    small_max_count: int
    pulses: int

    @property
    def most(self) -> int:
        """The largest number of workers."""
        return self.workers[-1]

    @property
    def large_file_bytes(self) -> int:
        """A multiple of 1 MiB."""
        return max(int(self.size_bytes * LARGE_SHARE) // self.large_count // MIB, 1) * MIB

    @property
    def small_count(self) -> int:
        mean = (self.small_low_bytes + self.small_high_bytes) // 2
        return max(min(int(self.size_bytes * SMALL_SHARE) // mean, self.small_max_count), 1)

    @property
    def shard_bytes(self) -> int:
        """What each of ``most`` writers saves in a checkpoint; a multiple of 64 KiB."""
        return max(int(self.size_bytes * SAVED_SHARE) // self.most // (64 * KIB), 1) * 64 * KIB


def choose(
    *,
    quick: bool,
    size_bytes: int | None = None,
    limit_s: float | None = None,
    each_s: float | None = None,
    workers: int | None = None,
) -> Scale:
    """The scale that was asked for. ``workers``: the largest number of processes. Raises ConfigError."""
    size = size_bytes if size_bytes is not None else QUICK_SIZE_BYTES if quick else FULL_SIZE_BYTES
    if size < MIN_SIZE_BYTES:
        raise ConfigError(f"--size: {size} bytes are too few to measure; at least {MIN_SIZE_BYTES // MIB}M")
    if limit_s is not None and limit_s < 1:
        raise ConfigError("--time: at least 1 s")
    if each_s is not None and not 0 < each_s <= 600:
        raise ConfigError("--each: more than 0 s, and 10 min at most")
    if workers is not None and not 1 <= workers <= 256:
        raise ConfigError("--workers: between 1 and 256")
    limit = limit_s if limit_s is not None else QUICK_LIMIT_S if quick else FULL_LIMIT_S
    most = workers if workers is not None else min(max(2 * len(os.sched_getaffinity(0)), 4), 16)
    return Scale(
        quick=quick,
        size_bytes=size,
        limit_s=limit,
        variant_s=each_s if each_s is not None else min(1.2 if quick else 5.0, max(limit / 40, 0.1)),
        workers=_steps(most, quick),
        large_count=max(most, 4),
        small_low_bytes=4 * KIB,
        small_high_bytes=100 * KIB,
        small_max_count=1500 if quick else 20_000,
        pulses=1 if quick else 3,
    )


def _steps(most: int, quick: bool) -> tuple[int, ...]:
    """1, 2, 4... up to ``most``; with ``quick`` only the first and the last."""
    steps = [1]
    while steps[-1] * 2 < most and not quick:
        steps.append(steps[-1] * 2)
    return tuple(steps if steps[-1] == most else [*steps, most])
