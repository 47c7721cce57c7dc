"""Repeated measurements of several targets: medians, spread, and ratios of what ran side by side."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Metric:
    """One quantity, measured for several targets in rounds. ``higher_is_better`` decides what a ratio means.

    A round is one value per target, taken right after each other; ratios are formed within rounds, so that
    a machine that slows down meanwhile does not show as a difference between targets.
    """

    name: str
    unit: str
    higher_is_better: bool = True
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, target: str, value: float) -> None:
        """The value of the target's next round."""
        self.values.setdefault(target, []).append(value)

    def median(self, target: str) -> float | None:
        found = self.values.get(target)
        return statistics.median(found) if found else None

    def spread(self, target: str) -> tuple[float, float] | None:
        """Smallest and largest value."""
        found = self.values.get(target)
        return (min(found), max(found)) if found else None

    def ratio(self, target: str, reference: str) -> float | None:
        """How many times as good ``target`` is as ``reference``: median over the rounds that have both."""
        pairs = zip(self.values.get(target, ()), self.values.get(reference, ()), strict=False)
        ratios = [mine / other for mine, other in pairs if mine and other]
        if not ratios:
            return None
        return statistics.median(ratios if self.higher_is_better else [1 / ratio for ratio in ratios])

    def as_json(self, target: str) -> dict[str, Any]:
        return {
            "unit": self.unit,
            "higher_is_better": self.higher_is_better,
            "values": self.values,
            "medians": {name: self.median(name) for name in self.values},
            "ratios": {name: self.ratio(target, name) for name in self.values if name != target},
        }


def show(value: float) -> str:
    """Three digits that mean something."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table(metrics: Iterable[Metric], target: str, references: Sequence[str]) -> str:
    """One line per metric: the target with its spread; for each reference the ratio to it, and its median."""
    header = ["", "unit", f"{target} [min-max]", *(f"x {name} (its median)" for name in references)]
    rows = [header]
    for metric in metrics:
        median, spread = metric.median(target), metric.spread(target)
        row = [metric.name, metric.unit]
        row.append(
            f"{show(median)} [{show(spread[0])}-{show(spread[1])}]" if median is not None and spread else "-"
        )
        for name in references:
            ratio, other = metric.ratio(target, name), metric.median(name)
            row.append(f"{ratio:.2f} ({show(other)})" if ratio is not None and other is not None else "")
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * max(len(line) for line in lines))
    return "\n".join(lines)
