"""Medians, spread, and ratios of what ran side by side."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """Of repeated values. ``low`` and ``high`` are the smallest and the largest, not an interval of trust."""

    median: float
    low: float
    high: float
    count: int

    @property
    def relative_spread(self) -> float:
        """(high - low) / median; 0 if the median is 0."""
        return (self.high - self.low) / self.median if self.median else 0.0


def summarize(values: Sequence[float]) -> Summary | None:
    """None of no values."""
    if not values:
        return None
    return Summary(statistics.median(values), min(values), max(values), len(values))


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value such that at least ``share`` of all are at most it (nearest rank).

    ``share`` is from 0 to 1. Raises ValueError of no values.
    """
    if not values:
        raise ValueError("a quantile of nothing")
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share {share} is not between 0 and 1")
    ordered = sorted(values)
    return ordered[rank(len(ordered), share) - 1]


def rank(count: int, share: float) -> int:
    """Which of ``count`` ordered values, from 1, is the ``share`` quantile by nearest rank."""
    # 0.999 * 1000 is a little above 999 in floating point, and must not become the 1000th.
    return max(1, math.ceil(share * count - 1e-9 * count))


def ratios(
    mine: Sequence[float], reference: Sequence[float], *, higher_is_better: bool = True
) -> list[float]:
    """How many times as good each of ``mine`` is as the one of ``reference`` in the same round.

    Values of one index were taken right after each other, so that a machine that slows down in between does
    not show as a difference. Rounds that one of the two lacks, or in which one is 0, are left out.
    """
    pairs = [(a, b) for a, b in zip(mine, reference, strict=False) if a > 0 and b > 0]
    return [a / b if higher_is_better else b / a for a, b in pairs]


def ratio(
    mine: Sequence[float], reference: Sequence[float], *, higher_is_better: bool = True
) -> Summary | None:
    """Median and spread of the ratios of rounds; never the ratio of medians. None without a common round."""
    return summarize(ratios(mine, reference, higher_is_better=higher_is_better))


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive values; of ratios it is the only mean that does not depend on which side is divided."""
    if not values or min(values) <= 0:
        raise ValueError("a geometric mean needs positive values")
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))
