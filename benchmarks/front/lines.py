"""The lines of the table: what is measured, what is wanted of it, and whether that was reached.

A line has a value per round for the mount and, if it is a comparison, one for the plain directory right
beside it; a ratio is the median over the rounds (``benchmarks.samples.Metric``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.samples import Metric, show

MOUNT, PLAIN, NULL = "mount", "plain", "null"
"""``NULL``: a FUSE daemon that does nothing; see ``benchmarks.front.null``."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """``value``: of the ratio to the plain directory, or, with ``absolute``, of the mount's own median.

    ``at_most``: no more than that instead of no less. ``why``: where an absolute figure comes from.
    """

    value: float
    absolute: bool = False
    at_most: bool = False
    why: str = ""

    def text(self, unit: str) -> str:
        sign = "<=" if self.at_most else ">="
        return f"{sign} {show(self.value)} {unit if self.absolute else 'x plain'}"


@dataclass(slots=True)
class Line:
    """``section``: the heading under which it stands. ``note``: what has to be known to read it."""

    section: str
    metric: Metric
    wanted: Wanted | None = None
    note: str = ""

    @property
    def reached(self) -> float | None:
        """What is compared with ``wanted``; without it the ratio, if there is one."""
        if self.wanted is not None and self.wanted.absolute:
            return self.metric.median(MOUNT)
        return self.metric.ratio(MOUNT, PLAIN)

    @property
    def verdict(self) -> str:
        """``met``, ``MISSED``, ``not measured``, or nothing where nothing is wanted."""
        if self.wanted is None:
            return ""
        reached = self.reached
        if reached is None:
            return "not measured"
        enough = reached <= self.wanted.value if self.wanted.at_most else reached >= self.wanted.value
        return "met" if enough else "MISSED"

    def cells(self) -> list[str]:
        """As ``HEAD`` says."""
        ratio = self.metric.ratio(MOUNT, PLAIN)
        return [
            self.metric.name,
            self.metric.unit,
            _with_spread(self.metric, MOUNT),
            _with_spread(self.metric, PLAIN),
            f"{ratio:.2f}" if ratio is not None else "-",
            self.wanted.text(self.metric.unit) if self.wanted is not None else "",
            self.verdict,
            *self._limit_cells(),
        ]

    def _limit_cells(self) -> list[str]:
        """What a daemon that does nothing reaches, and the mount's share of that."""
        limit, share = self.metric.ratio(NULL, PLAIN), self.metric.ratio(MOUNT, NULL)
        if limit is None or share is None:
            return ["", ""]
        if self.wanted is not None and self.wanted.absolute:
            return [f"{show(self.metric.median(NULL) or 0.0)} {self.metric.unit}", f"{share:.2f}"]
        return [f"{limit:.2f} x plain", f"{share:.2f}"]

    def as_json(self) -> dict[str, Any]:
        return {
            "section": self.section,
            "name": self.metric.name,
            **self.metric.as_json(MOUNT),
            "reached": self.reached,
            "wanted": self.wanted.text(self.metric.unit) if self.wanted is not None else None,
            "verdict": self.verdict,
            "note": self.note,
        }


HEAD = ["", "unit", "mount [min-max]", "plain [min-max]", "x plain", "wanted", "", "null daemon", "x null"]


def _with_spread(metric: Metric, target: str) -> str:
    median, spread = metric.median(target), metric.spread(target)
    if median is None or spread is None:
        return "-"
    return f"{show(median)} [{show(spread[0])}-{show(spread[1])}]"


@dataclass(slots=True)
class Lines:
    """All lines in the order in which they were first named."""

    every: list[Line] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """What could not be measured, and why."""

    def line(
        self,
        section: str,
        name: str,
        unit: str,
        wanted: Wanted | None = None,
        *,
        higher_is_better: bool = True,
        note: str = "",
    ) -> Metric:
        """The metric of that line, made at its first use."""
        for line in self.every:
            if line.section == section and line.metric.name == name:
                return line.metric
        self.every.append(Line(section, Metric(name, unit, higher_is_better), wanted, note))
        return self.every[-1].metric

    def sections(self) -> Iterator[tuple[str, list[Line]]]:
        for section in dict.fromkeys(line.section for line in self.every):
            yield section, [line for line in self.every if line.section == section]

    def missed(self) -> list[Line]:
        return [line for line in self.every if line.verdict in ("MISSED", "not measured")]


def alternate(number: int, metric: Metric, steps: Mapping[str, Callable[[], float]]) -> None:
    """One round: every target once, in an order that turns around from round to round."""
    names = list(steps)
    for name in reversed(names) if number % 2 else names:
        metric.add(name, steps[name]())
