"""What a report is made of: plain values, in the order in which they are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Style = Literal["line", "steps", "points", "line+points"]


@dataclass(frozen=True, slots=True)
class Table:
    """Cells are text as it is shown. A column of numbers (or ``-`` in their place) is set to the right."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def numeric(self) -> list[bool]:
        """For each column, whether it holds numbers."""
        columns = range(len(self.head))
        return [
            any(row[column][:1].isdigit() for row in self.rows)
            and all(_is_number_or_nothing(row[column]) for row in self.rows)
            for column in columns
        ]


def _is_number_or_nothing(cell: str) -> bool:
    return cell in ("", "-") or cell.lstrip("+-<>~≥≤")[:1].isdigit()


@dataclass(frozen=True, slots=True)
class Axis:
    """``label`` names quantity and unit. ``low`` and ``high``: the ends, where not the data's own.

    On a log axis, values of zero and less are not drawn.
    """

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """Points in drawing order. ``low`` and ``high``, both or none: a band, one value per point."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: Style = "line"
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class LinePlot:
    """Lines, steps or points over two axes. ``marks``: vertical lines, each with its words."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    caption: str = ""
    marks: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True, slots=True)
class Bars:
    """One bar per category; None: not measured. ``low`` and ``high``: the ends of the spread, if known."""

    name: str
    values: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


@dataclass(frozen=True, slots=True)
class BarPlot:
    """Horizontal bars, grouped by category, the first category on top."""

    title: str
    categories: Sequence[str]
    bars: Sequence[Bars]
    value: Axis
    caption: str = ""


Plot = LinePlot | BarPlot


@dataclass(slots=True)
class Section:
    """A heading, paragraphs, then tables and plots in the order in which they were added."""

    heading: str
    text: list[str] = field(default_factory=list)
    content: list[Table | Plot] = field(default_factory=list)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> None:
        self.content.append(Table(head, rows, caption))

    def plot(self, plot: Plot) -> None:
        self.content.append(plot)


@dataclass(slots=True)
class Report:
    """``facts``: name and value, such as machine, command, versions, date."""

    title: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)

    def section(self, heading: str, *text: str) -> Section:
        """Add a section and return it."""
        section = Section(heading, list(text))
        self.sections.append(section)
        return section

    def has_plots(self) -> bool:
        return any(not isinstance(part, Table) for section in self.sections for part in section.content)


def cdf(name: str, pairs: Iterable[tuple[float, float]]) -> Series:
    """A distribution as steps: ``pairs`` of a value and how often it was seen, in any order.

    y is the share of all that is at most x. No pairs: a series without points.
    """
    ordered = sorted(pairs)
    total = sum(count for _, count in ordered)
    seen = 0.0
    xs: list[float] = []
    ys: list[float] = []
    for value, count in ordered:
        seen += count
        xs.append(value)
        ys.append(seen / total)
    return Series(name, xs, ys, style="steps")


def tail(name: str, pairs: Iterable[tuple[float, float]]) -> Series:
    """The same upside down, for a log axis on which 0.001 is p99.9: y is the share that is at least x."""
    ordered = sorted(pairs)
    left = total = sum(count for _, count in ordered)
    xs: list[float] = []
    ys: list[float] = []
    for value, count in ordered:
        # Both ends of the step: drawn as a plain line, whichever way steps go elsewhere.
        xs += [value, value]
        ys.append(left / total)
        left -= count
        ys.append(max(left, 0.0) / total)
    return Series(name, xs, ys)
