"""Reports of figures: one self-contained HTML file, or text for a terminal.

Owns: how a report looks. What is in it, and in which words, is its caller's. A report is a plain value
(``model``); ``html`` and ``text`` turn it into a file or into lines, with the same tables in both.

The HTML file needs no network, no script and no other file: plots are SVG inside it, their text is text, and
their colours follow the reader's light or dark setting. matplotlib draws them; it is the optional extra
``report``. ``why_no_plots()`` says what is missing, for a command to ask before it measures for an hour.

Called from any thread, one report at a time. Imports matplotlib and rich when they are used, not before.

Raises: ``ConfigError`` where matplotlib is missing and a report has plots, or where the file cannot be
written.

    report = Report("Disk", facts=[("machine", "2 cores")])
    section = report.section("Reads", "Cold means: not in the page cache.")
    section.table(["what", "MiB/s"], [["sequential", "731"]])
    section.plot(LinePlot("Latency", Axis("us", log=True), Axis("share of reads"), [cdf("4 KiB", pairs)]))
    write_html(report, "report.html")
"""

from __future__ import annotations

from tierfs.report.html import render_html, write_html
from tierfs.report.model import (
    Axis,
    BarPlot,
    Bars,
    LinePlot,
    Plot,
    Report,
    Section,
    Series,
    Table,
    cdf,
    tail,
)
from tierfs.report.plots import why_no_plots
from tierfs.report.text import print_text, render_text

__all__ = [
    "Axis",
    "BarPlot",
    "Bars",
    "LinePlot",
    "Plot",
    "Report",
    "Section",
    "Series",
    "Table",
    "cdf",
    "print_text",
    "render_html",
    "render_text",
    "tail",
    "why_no_plots",
    "write_html",
]
