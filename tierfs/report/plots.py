"""Plots as SVG, through matplotlib: the only adapter for it.

matplotlib is told colours that mean "the text's", "the grid's", "series 3"; ``_follow_theme`` puts CSS
variables in their place, so that the page's light or dark style colours the drawing. Ids are made unique per
plot, since many SVG drawings share one page.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tierfs.errors import ConfigError
from tierfs.report.model import Axis, BarPlot, LinePlot, Plot, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES = 8.6
LINE_HEIGHT_INCHES = 4.2
BAR_INCHES = 0.22
GROUP_GAP = 0.35
INK, GRID = "#010203", "#010204"
SERIES_COLOURS = 10
_DASHES = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_STYLE = {
    "svg.fonttype": "none",  # text stays text: it can be searched and copied, and no font is drawn out
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.0,
    "path.simplify": True,
}


def why_no_plots() -> str | None:
    """What is missing for plots, and how to get it; None if nothing is."""
    if importlib.util.find_spec("matplotlib") is not None:
        return None
    return "plots need matplotlib: install tierfs with its extra 'report' (pip install 'tierfs[report]')"


def _series_colour(number: int) -> str:
    return f"#0102{16 + number % SERIES_COLOURS:02x}"


def svg(plot: Plot, number: int) -> str:
    """The drawing as an ``<svg>`` element. ``number`` is unique within the page."""
    missing = why_no_plots()
    if missing:
        raise ConfigError(missing)
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {**_STYLE, "svg.hashsalt": f"plot{number}"}
    with mpl.rc_context(style):
        height = LINE_HEIGHT_INCHES if isinstance(plot, LinePlot) else _bars_height(plot)
        figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
        FigureCanvasSVG(figure)
        if isinstance(plot, LinePlot):
            _draw_lines(figure, plot)
        else:
            _draw_bars(figure, plot)
        target = io.StringIO()
        figure.savefig(target, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _follow_theme(target.getvalue(), number)


def _draw_lines(figure: Figure, plot: LinePlot) -> None:
    axes = figure.add_subplot()
    _set_up(axes, plot.title)
    _axis(axes, "x", plot.x)
    _axis(axes, "y", plot.y)
    for index, series in enumerate(plot.series):
        colour = _series_colour(index)
        dash: Any = _DASHES[index // SERIES_COLOURS % len(_DASHES)]
        line: dict[str, Any] = {"color": colour, "linestyle": dash, "label": _label(series.name)}
        xs, ys = _drawable(series, plot)
        if series.style == "points":
            axes.plot(xs, ys, "o", color=colour, label=_label(series.name))
        elif series.style == "steps":
            axes.plot(xs, ys, drawstyle="steps-post", **line)
        else:
            axes.plot(xs, ys, marker="o" if series.style == "line+points" else None, **line)
        if series.low and series.high:
            axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.18, linewidth=0)
    for where, words in plot.marks:
        axes.axvline(where, color=INK, linewidth=0.8, linestyle=(0, (3, 3)))
        axes.annotate(
            _label(words), (where, 1.0), xycoords=("data", "axes fraction"), fontsize=8,
            xytext=(3, -3), textcoords="offset points", verticalalignment="top",
        )  # fmt: skip
    _limit(axes, plot.x, plot.y)
    if len(plot.series) > 1:
        _legend(figure, axes, len(plot.series))


def _drawable(series: Series, plot: LinePlot) -> tuple[list[float], list[float]]:
    """The points that the axes can show."""
    pairs = [
        (x, y)
        for x, y in zip(series.x, series.y, strict=True)
        if (x > 0 or not plot.x.log) and (y > 0 or not plot.y.log)
    ]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _bars_height(plot: BarPlot) -> float:
    count = max(len(plot.categories), 1) * (max(len(plot.bars), 1) + GROUP_GAP * 2)
    return 1.0 + BAR_INCHES * count + (0.25 if len(plot.bars) > 1 else 0)


def _draw_bars(figure: Figure, plot: BarPlot) -> None:
    axes = figure.add_subplot()
    _set_up(axes, plot.title)
    _axis(axes, "x", plot.value)
    group = len(plot.bars) + GROUP_GAP * 2
    for index, bars in enumerate(plot.bars):
        places = [category * group + index for category in range(len(plot.categories))]
        shown = [
            (place, value, number)
            for number, (place, value) in enumerate(zip(places, bars.values, strict=True))
            if value is not None
        ]
        colour = _series_colour(index)
        axes.barh(
            [place for place, _, _ in shown],
            [value for _, value, _ in shown],
            height=0.86,
            color=colour,
            label=_label(bars.name),
        )
        for place, value, number in shown:
            low = bars.low[number] if bars.low else None
            high = bars.high[number] if bars.high else None
            if low is not None and high is not None:
                axes.plot([low, high], [place, place], color=INK, linewidth=1.1, marker="|", markersize=6)
            axes.annotate(
                _short(value), (max(value, high or value), place), fontsize=8, verticalalignment="center",
                xytext=(5, 0), textcoords="offset points",
            )  # fmt: skip
    axes.set_yticks(
        [category * group + (len(plot.bars) - 1) / 2 for category in range(len(plot.categories))],
        [_label(category) for category in plot.categories],
    )
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.12)
    _limit(axes, plot.value, None)
    if plot.value.low is None and not plot.value.log:
        axes.set_xlim(left=0)
    if len(plot.bars) > 1:
        _legend(figure, axes, len(plot.bars))


def _short(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _set_up(axes: Axes, title: str) -> None:
    axes.set_title(_label(title))
    axes.grid(visible=True)
    axes.set_axisbelow(True)


def _axis(axes: Axes, which: str, axis: Axis) -> None:
    scale = "log" if axis.log else "linear"
    if which == "x":
        axes.set_xscale(scale)
        axes.set_xlabel(_label(axis.label))
    else:
        axes.set_yscale(scale)
        axes.set_ylabel(_label(axis.label))
    if axis.log:
        from matplotlib.ticker import FuncFormatter, NullFormatter

        side = axes.xaxis if which == "x" else axes.yaxis
        side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        side.set_minor_formatter(NullFormatter())


def _limit(axes: Axes, x: Axis | None, y: Axis | None) -> None:
    """The ends that were asked for. Last: what is drawn later would not move the other ends any more."""
    if x is not None and x.low is not None:
        axes.set_xlim(left=x.low)
    if x is not None and x.high is not None:
        axes.set_xlim(right=x.high)
    if y is not None and y.low is not None:
        axes.set_ylim(bottom=y.low)
    if y is not None and y.high is not None:
        axes.set_ylim(top=y.high)


def _legend(figure: Figure, axes: Axes, count: int) -> None:
    """Below the drawing: it hides nothing there, however many entries it has."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(count, _columns(labels)))


def _columns(labels: Sequence[str]) -> int:
    longest = max((len(label) for label in labels), default=1)
    return max(1, int(105 / (longest + 7)))


def _label(text: str) -> str:
    """``text`` as it is: a dollar sign would start mathematics, an underscore in front hide the entry."""
    plain = text.replace("$", r"\$")
    return f" {plain}" if plain.startswith("_") else plain


def _follow_theme(drawing: str, number: int) -> str:
    drawing = drawing[drawing.index("<svg") :]
    drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r'\bid="', f'id="plot{number}-', drawing)
    drawing = re.sub(r'href="#', f'href="#plot{number}-', drawing)
    drawing = re.sub(r"url\(#", f"url(#plot{number}-", drawing)
    drawing = drawing.replace(INK, "var(--ink)").replace(GRID, "var(--grid)")
    for index in range(SERIES_COLOURS):
        drawing = drawing.replace(_series_colour(index), f"var(--series-{index})")
    opening, rest = drawing.split(">", 1)  # without a size: as wide as the page; viewBox keeps the shape
    return re.sub(r' (?:width|height)="[^"]*"', "", opening) + ">" + rest
