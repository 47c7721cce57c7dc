"""A report as text: facts, paragraphs and tables; a plot is left out, its title named."""

from __future__ import annotations

import io
import sys
import textwrap
from typing import TextIO

from tierfs.report.model import Report, Table

WIDTH = 110


def print_text(report: Report, file: TextIO | None = None) -> None:
    """On ``file`` (standard output), as wide as the tables need; a terminal gets bold headings."""
    from rich.console import Console

    target = file or sys.stdout
    console = Console(file=target, soft_wrap=True, highlight=False, markup=False, emoji=False)
    _print(report, console)


def render_text(report: Report) -> str:
    """The same as one string without colours."""
    from rich.console import Console

    target = io.StringIO()
    _print(
        report, Console(file=target, soft_wrap=True, highlight=False, markup=False, emoji=False, width=400)
    )
    return "\n".join(line.rstrip() for line in target.getvalue().splitlines()) + "\n"


def _print(report: Report, console: object) -> None:
    from rich.console import Console

    assert isinstance(console, Console)
    console.print(report.title, style="bold")
    width = max((len(name) for name, _ in report.facts), default=0)
    for name, value in report.facts:
        console.print(f"  {name.ljust(width)}  {value}")
    _paragraphs(report.text, console)
    for section in report.sections:
        console.print()
        console.print(section.heading, style="bold")
        _paragraphs(section.text, console)
        for content in section.content:
            if isinstance(content, Table):
                _table(content, console)


def _paragraphs(texts: list[str], console: object) -> None:
    from rich.console import Console

    assert isinstance(console, Console)
    for text in texts:
        for line in textwrap.wrap(text, WIDTH):
            console.print(line)


def _table(table: Table, console: object) -> None:
    from rich.console import Console

    assert isinstance(console, Console)
    numeric = table.numeric()
    grid = [list(table.head), *[list(row) for row in table.rows]]
    widths = [max(len(row[column]) for row in grid) for column in range(len(table.head))]
    if table.caption:
        console.print(table.caption, style="italic")
    for number, row in enumerate(grid):
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        console.print(("  " + "  ".join(cells)).rstrip(), style=None if number else "underline")
