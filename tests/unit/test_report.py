"""The report library: pages that need nothing else, and the same tables as text."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tierfs.errors import ConfigError
from tierfs.report import (
    Axis,
    BarPlot,
    Bars,
    LinePlot,
    Report,
    Section,
    Series,
    Table,
    cdf,
    print_text,
    render_html,
    render_text,
    tail,
    write_html,
)
from tierfs.report import html as html_module

NASTY = '<b>$x$ & "quotes" _it\'s</b>'


def some_report() -> Report:
    report = Report(f"Title {NASTY}", facts=[("machine", NASTY), ("cores", "2")], text=[NASTY])
    first = report.section("First", NASTY)
    first.table(["what", "MiB/s", "note"], [["a", "1,024", NASTY], ["bb", "-", ""]], "Caption")
    first.plot(
        LinePlot(
            f"Latency {NASTY}",
            Axis("us", log=True),
            Axis("share"),
            [cdf("a", [(1.0, 3), (10.0, 1)]), cdf(f"_{NASTY}", [(2.0, 1), (20.0, 1)])],
            caption=NASTY,
            marks=[(5.0, NASTY)],
        )
    )
    second = report.section("Second")
    second.plot(
        BarPlot(
            "Bars",
            ["x", NASTY],
            [Bars("bench", [1.0, None]), Bars("engine", [2.0, 3.0], low=[1.5, None], high=[2.5, None])],
            Axis("s per GiB", low=0),
        )
    )
    return report


def drawings(page: str) -> list[str]:
    return re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)


def test_the_page_needs_no_network_no_script_and_no_other_file() -> None:
    page = render_html(some_report())
    assert "<script" not in page
    assert not re.search(r"@import|src=", page)
    # References lead into the page itself; namespaces and the document type of SVG are names, not addresses.
    for reference in re.findall(r'href="([^"]*)"', page):
        assert reference.startswith(("#", "data:")), reference
    assert not re.search(r"url\((?!#)", page)


def test_text_is_escaped_everywhere() -> None:
    page = render_html(some_report())
    assert "<b>" not in page
    assert page.count("&lt;b&gt;") >= 8


def test_drawings_are_well_formed_and_have_their_own_ids() -> None:
    found = drawings(render_html(some_report()))
    assert len(found) == 2
    seen: set[str] = set()
    for drawing in found:
        root = ElementTree.fromstring(drawing)
        ids = [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
        assert not seen & set(ids)
        seen |= set(ids)
        for target in re.findall(r'(?:href="|url\()#([^")]+)', drawing):
            assert target in ids
    assert "$x$" in found[0], "a dollar sign starts no formula"
    assert "it's" in found[0], "an underscore hides no entry of the legend"


def test_colours_follow_the_theme_of_the_page() -> None:
    page = render_html(some_report())
    colours = set(re.findall(r"#[0-9a-f]{6}\b", "".join(drawings(page))))
    assert not {colour for colour in colours if colour.startswith("#0102")}, "placeholders are replaced"
    assert "var(--series-0)" in page
    assert "var(--ink)" in page
    assert "prefers-color-scheme: dark" in page


def test_values_that_a_log_axis_cannot_show_are_left_out() -> None:
    report = Report("log")
    report.section("s").plot(
        LinePlot("p", Axis("x", log=True), Axis("y", log=True), [Series("a", [0, 1, 10], [5, 0, 7])])
    )
    assert drawings(render_html(report))


def test_an_empty_plot_is_drawn_empty() -> None:
    report = Report("empty")
    section = report.section("s")
    section.plot(LinePlot("p", Axis("x", log=True), Axis("y"), [cdf("nothing", [])]))
    section.plot(BarPlot("b", [], [], Axis("v")))
    assert len(drawings(render_html(report))) == 2


def test_a_distribution_rises_to_one() -> None:
    series = cdf("d", [(10.0, 1), (1.0, 2), (5.0, 1)])
    assert list(series.x) == [1.0, 5.0, 10.0]
    assert list(series.y) == [0.5, 0.75, 1.0]


def test_numbers_are_set_to_the_right() -> None:
    table = Table(["name", "value", "empty"], [["1a", "12", "-"], ["x", "≥3.4 s", "-"]])
    assert table.numeric() == [False, True, False]
    section = Section("s", content=[table])
    text = render_text(Report("r", sections=[section]))
    assert "  name   value  empty" in text
    assert "  1a        12  -" in text


def test_text_has_facts_tables_and_no_colours() -> None:
    target = io.StringIO()
    print_text(some_report(), target)
    assert NASTY in target.getvalue()
    assert "\x1b" not in target.getvalue()
    assert "1,024" in render_text(some_report())


def test_without_matplotlib_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html_module, "why_no_plots", lambda: "plots need matplotlib")
    target = tmp_path / "report.html"
    with pytest.raises(ConfigError, match="matplotlib"):
        write_html(some_report(), target)
    assert list(tmp_path.iterdir()) == []
    write_html(Report("tables only"), target)
    assert "tables only" in target.read_text()


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        write_html(Report("r"), tmp_path / "nowhere" / "report.html")
    target = tmp_path / "directory"
    target.mkdir()
    with pytest.raises(ConfigError, match="directory"):
        write_html(Report("r"), target)
    assert [path.name for path in tmp_path.iterdir()] == ["directory"]


def test_a_tail_falls_from_one_and_shows_the_rare() -> None:
    series = tail("t", [(10.0, 1), (1.0, 998), (5.0, 1)])
    assert list(zip(series.x, series.y, strict=True)) == [
        (1.0, 1.0),
        (1.0, 0.002),
        (5.0, 0.002),
        (5.0, 0.001),
        (10.0, 0.001),
        (10.0, 0.0),
    ]
    assert tail("nothing", []).x == []
