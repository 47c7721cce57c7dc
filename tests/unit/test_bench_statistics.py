"""Statistics and latencies of ``tierfs bench``, against what can be worked out by hand."""

from __future__ import annotations

import math
import random

import pytest

from tierfs.bench.histogram import Histogram, bucket_of, width_of
from tierfs.bench.statistics import geometric_mean, quantile, ratio, ratios, summarize


def test_summary_has_median_smallest_and_largest() -> None:
    summary = summarize([5.0, 1.0, 3.0, 100.0])
    assert summary is not None
    assert (summary.median, summary.low, summary.high, summary.count) == (4.0, 1.0, 100.0, 4)
    assert summary.relative_spread == 99 / 4
    assert summarize([]) is None


def test_ratio_is_the_median_of_rounds_and_not_of_medians() -> None:
    mine, other = [100.0, 50.0, 10.0], [200.0, 50.0, 40.0]
    found = ratio(mine, other)
    assert found is not None
    assert (found.median, found.low, found.high) == (0.5, 0.25, 1.0)
    slower = ratio([2.0], [1.0], higher_is_better=False)
    assert slower is not None
    assert slower.median == 0.5


def test_rounds_that_one_side_lacks_are_left_out() -> None:
    assert ratios([4.0, 6.0, 8.0], [2.0, 0.0]) == [2.0]
    assert ratio([1.0], []) is None


@pytest.mark.parametrize("count", [1, 2, 3, 10, 999, 1000, 1001])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 0.99, 0.999, 1.0])
def test_quantile_is_the_smallest_value_that_covers_the_share(count: int, share: float) -> None:
    values = [float(number) for number in range(1, count + 1)]
    random.Random(count).shuffle(values)
    found = quantile(values, share)
    # Of 1..n the value k covers k/n. Exact integers: thousandths.
    assert found * 1000 >= round(share * 1000) * count
    assert found == 1.0 or (found - 1) * 1000 < round(share * 1000) * count


def test_quantile_refuses_nothing_and_nonsense() -> None:
    with pytest.raises(ValueError, match="nothing"):
        quantile([], 0.5)
    with pytest.raises(ValueError, match=r"1\.5"):
        quantile([1.0], 1.5)


def test_geometric_mean_does_not_depend_on_the_side() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([0.5, 0.125]) == pytest.approx(0.25)
    with pytest.raises(ValueError, match="positive"):
        geometric_mean([1.0, 0.0])


def test_each_value_falls_into_the_bucket_that_spans_it() -> None:
    for value in [0, 1, 127, 128, 129, 255, 256, 257, 1000, 123_456_789, 2**40 - 1, 2**40]:
        bucket = bucket_of(value)
        assert bucket <= value < bucket + width_of(bucket)
        assert width_of(bucket) <= max(1, bucket / 64)
        assert bucket_of(bucket) == bucket
        assert bucket_of(bucket + width_of(bucket)) == bucket + width_of(bucket), "buckets touch"


def test_percentiles_of_an_exponential_distribution() -> None:
    """The q quantile of rate 1 is -ln(1 - q): the values are taken there, so that nothing is random."""
    count = 20_000
    values = [round(-math.log(1 - (number + 0.5) / count) * 1e6) for number in range(count)]
    histogram = Histogram.of(values)
    for share in (0.5, 0.9, 0.99, 0.999):
        assert histogram.quantile_ns(share) == pytest.approx(-math.log(1 - share) * 1e6, rel=0.02)
    assert histogram.mean_ns == pytest.approx(1e6, rel=0.01)
    assert histogram.count == count
    assert (histogram.min_ns, histogram.max_ns) == (min(values), max(values))


def test_merging_is_the_same_as_counting_together() -> None:
    numbers = random.Random(7)
    values = [numbers.randrange(1, 10**9) for _ in range(3000)]
    merged = Histogram.merged(Histogram.of(values[start::3]) for start in range(3))
    assert merged == Histogram.of(values)
    merged.merge(Histogram())
    assert merged == Histogram.of(values)


def test_the_tail_is_one_value_in_a_thousand() -> None:
    histogram = Histogram.of_counts({1000: 999, 5_000_000: 1})
    assert histogram.quantile_ns(0.999) == pytest.approx(1000, rel=0.01)
    assert histogram.quantile_ns(1.0) == 5_000_000
    histogram.add(5_000_000)
    assert histogram.quantile_ns(0.999) == 5_000_000, "clipped to the largest that was seen"


def test_a_histogram_of_nothing_and_a_clock_that_went_back() -> None:
    empty = Histogram()
    assert empty.quantile_ns(0.5) == 0.0
    assert empty.mean_ns == 0.0
    assert list(empty.pairs()) == []
    empty.add(-5)
    assert (empty.count, empty.min_ns, empty.buckets) == (1, 0, {0: 1})
