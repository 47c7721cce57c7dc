"""Latencies of many operations: percentiles without keeping each of them, merged over processes.

Buckets are as wide as their value divided by 64 to 128, so a percentile is off by less than 0.8 % (half a
bucket). Below 128 ns each nanosecond is a bucket of its own. A bucket is known by its lower end, so that
merging is adding counts, and the JSON can be read without knowing the rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from tierfs.bench.statistics import rank

EXACT_BITS = 7


def bucket_of(value_ns: int) -> int:
    """The lower end of the bucket that holds ``value_ns``."""
    shift = value_ns.bit_length() - EXACT_BITS
    return value_ns if shift <= 0 else value_ns >> shift << shift


def width_of(bucket_ns: int) -> int:
    """How many nanoseconds the bucket with this lower end spans."""
    return 1 << max(bucket_ns.bit_length() - EXACT_BITS, 0)


class Histogram(msgspec.Struct, kw_only=True):
    """``buckets``: the lower end of each bucket in nanoseconds, as text in JSON, and how many fell into it.

    ``sum_ns`` is exact, and so are ``min_ns`` and ``max_ns`` (both 0 while there is nothing).
    """

    count: int = 0
    sum_ns: int = 0
    min_ns: int = 0
    max_ns: int = 0
    buckets: dict[int, int] = {}

    @classmethod
    def of(cls, values_ns: Iterable[int]) -> Histogram:
        histogram = cls()
        for value in values_ns:
            histogram.add(value)
        return histogram

    @classmethod
    def of_counts(cls, counts: Mapping[int, int]) -> Histogram:
        """From values in nanoseconds and how often each was seen."""
        histogram = cls()
        for value, count in counts.items():
            histogram.add(value, count)
        return histogram

    @classmethod
    def merged(cls, histograms: Iterable[Histogram]) -> Histogram:
        total = cls()
        for histogram in histograms:
            total.merge(histogram)
        return total

    def add(self, value_ns: int, count: int = 1) -> None:
        """Negative values count as 0: a clock was set back."""
        if count <= 0:
            return
        value_ns = max(value_ns, 0)
        self.min_ns = min(self.min_ns, value_ns) if self.count else value_ns
        self.max_ns = max(self.max_ns, value_ns)
        self.count += count
        self.sum_ns += value_ns * count
        bucket = bucket_of(value_ns)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + count

    def merge(self, other: Histogram) -> None:
        """Take in what ``other`` counted."""
        if not other.count:
            return
        self.min_ns = min(self.min_ns, other.min_ns) if self.count else other.min_ns
        self.max_ns = max(self.max_ns, other.max_ns)
        self.count += other.count
        self.sum_ns += other.sum_ns
        for bucket, count in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count

    @property
    def mean_ns(self) -> float:
        return self.sum_ns / self.count if self.count else 0.0

    def quantile_ns(self, share: float) -> float:
        """The middle of the bucket with the value of that rank; 0 of nothing. ``share`` from 0 to 1."""
        if not self.count:
            return 0.0
        wanted = rank(self.count, share)
        seen = 0
        for middle_ns, count in self.pairs():
            seen += count
            if seen >= wanted:
                return middle_ns
        return float(self.max_ns)

    def pairs(self) -> Iterator[tuple[float, int]]:
        """The middle of each bucket, within the smallest and largest value, and its count; ascending."""
        for bucket in sorted(self.buckets):
            middle = bucket + (width_of(bucket) - 1) / 2
            yield min(max(middle, self.min_ns), self.max_ns), self.buckets[bucket]
