"""The report in a real browser: nothing on the console, and the plots are there to be seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.browser import browser, show
from tierfs.report import Axis, BarPlot, Bars, LinePlot, Report, Series, tail, write_html
from tierfs.report.html import _DARK, _LIGHT

pytestmark = pytest.mark.skipif(browser() is None, reason="no chromium here; tests/run.sh installs it")

CURVES = 6
SOME_PIXELS = 150
"""A line across a plot is several hundred pixels long; its edges are of mixed colours."""


def write_report(path: Path) -> None:
    """Lines in the first colours, bars in more of them: each colour can come from its own part only."""
    report = Report("A report", facts=[("machine", "2 cores")])
    section = report.section("First", "Text.")
    section.table(["what", "MiB/s"], [["a", "1"], ["b", "2"]])
    section.plot(
        LinePlot(
            "Latency",
            Axis("us", log=True),
            Axis("share", log=True),
            [tail(f"curve {n}", [(10.0 ** (n + k / 9), 1) for k in range(10)]) for n in range(CURVES)],
        )
    )
    bars = [Bars(f"bar {n}", [None if n < CURVES else float(n)]) for n in range(CURVES + 2)]
    section.plot(BarPlot("CPU", ["load"], bars, Axis("s per GiB", low=0)))
    report.section("Second").plot(
        LinePlot("Course", Axis("s"), Axis("MiB/s", low=0), [Series("x", [0, 9], [1, 9])])
    )
    write_html(report, path)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_plots_are_drawn_and_the_console_is_silent(tmp_path: Path, dark: bool) -> None:
    page = tmp_path / "report.html"
    write_report(page)
    shown = show(page, tmp_path, dark=dark)
    assert shown.console == []
    colours, others = (_DARK, _LIGHT) if dark else (_LIGHT, _DARK)
    for number in range(CURVES + 2):
        assert shown.count(colours[number]) > SOME_PIXELS, f"series {number} cannot be seen"
        assert shown.count(others[number]) == 0
    assert all(shown.count(colour) == 0 for colour in colours[CURVES + 2 :]), "colours of nothing"
    ground = "#15181d" if dark else "#ffffff"
    assert shown.count(ground) > 1000 * 3000 / 2


def test_what_goes_wrong_in_a_page_would_be_noticed(tmp_path: Path) -> None:
    page = tmp_path / "broken.html"
    page.write_text(
        '<html><link rel="icon" href="data:,"><body><img src="https://example.org/x.png">'
        "<script>nothing.here()</script></body></html>"
    )
    shown = show(page, tmp_path, height=200)
    assert any("nothing is not defined" in line for line in shown.console)
    assert shown.count(_LIGHT[0]) == 0
