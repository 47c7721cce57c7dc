"""A report as one HTML file: no script, no network, light and dark."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path

from tierfs.errors import ConfigError
from tierfs.report.model import Report, Table
from tierfs.report.plots import svg, why_no_plots

# Ten colours that can be told apart, also by most who see fewer of them; the second set for dark grounds.
_LIGHT = (
    "#0b62a8",
    "#c8500a",
    "#1d7d3c",
    "#8c3fa0",
    "#b3261e",
    "#00797f",
    "#8a6d00",
    "#5b5fc7",
    "#a03468",
    "#5a5a5a",
)
_DARK = (
    "#6cb4f5",
    "#ff9d5c",
    "#69cf8a",
    "#d59be8",
    "#ff8f86",
    "#52d0d6",
    "#e0c04a",
    "#a8abff",
    "#f490bd",
    "#b8b8b8",
)

_CSS = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1c1f24; --soft: #59616c; --grid: #dde1e6;
  --stripe: #f5f7f9; LIGHT }
@media (prefers-color-scheme: dark) { :root { --ground: #15181d; --ink: #e4e7eb; --soft: #9aa4b1;
  --grid: #323841; --stripe: #1c2027; DARK } }
body { background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 0 auto;
  max-width: 62rem; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 1rem; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
p { max-width: 46rem; } figcaption, caption { color: var(--soft); font-size: .87rem; text-align: left; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .9rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .7rem; text-align: left; border-bottom: 1px solid var(--grid); white-space: nowrap; }
thead th { border-bottom: 2px solid var(--soft); } tbody tr:nth-child(even) { background: var(--stripe); }
.number { text-align: right; }
figure { margin: 1.5rem 0; } figure svg { width: 100%; height: auto; font-family: system-ui, sans-serif; }
nav { font-size: .9rem; } nav a { color: inherit; margin-right: 1rem; }
@media print { body { max-width: none; } }
"""


def render_html(report: Report) -> str:
    """The whole page. Raises ConfigError if it has plots and matplotlib is missing."""
    missing = why_no_plots()
    if missing and report.has_plots():
        raise ConfigError(missing)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',  # or a browser asks the server, or the disk, for one
        f"<title>{escape(report.title)}</title><style>{_css()}</style></head><body>",
        f"<h1>{escape(report.title)}</h1>",
    ]
    if report.facts:
        facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in report.facts)
        parts.append(f"<dl>{facts}</dl>")
    parts += [f"<p>{escape(text)}</p>" for text in report.text]
    if len(report.sections) > 2:
        links = "".join(
            f'<a href="#section-{number}">{escape(section.heading)}</a>'
            for number, section in enumerate(report.sections)
        )
        parts.append(f"<nav>{links}</nav>")
    plots = 0
    for number, section in enumerate(report.sections):
        parts.append(f'<section id="section-{number}"><h2>{escape(section.heading)}</h2>')
        parts += [f"<p>{escape(text)}</p>" for text in section.text]
        for content in section.content:
            if isinstance(content, Table):
                parts.append(_table(content))
                continue
            drawing = svg(content, plots)
            plots += 1
            label = escape(content.title, quote=True)
            caption = f"<figcaption>{escape(content.caption)}</figcaption>" if content.caption else ""
            parts.append(f'<figure role="img" aria-label="{label}">{drawing}{caption}</figure>')
        parts.append("</section>")
    parts.append("</body></html>")
    return "\n".join(parts) + "\n"


def write_html(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the page; what was at ``path`` is replaced when all of it is written. Raises ConfigError."""
    page = render_html(report)
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.write_text(page, encoding="utf-8")
        draft.replace(target)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {target}: {error.strerror}") from error


def _table(table: Table) -> str:
    numeric = table.numeric()

    def row(cells: list[str], tag: str) -> str:
        inner = "".join(
            f"<{tag}{' class=number' if is_number else ''}>{escape(cell)}</{tag}>"
            for cell, is_number in zip(cells, numeric, strict=True)
        )
        return f"<tr>{inner}</tr>"

    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    body = "".join(row(list(cells), "td") for cells in table.rows)
    return (
        f'<div class="wide"><table>{caption}<thead>{row(list(table.head), "th")}</thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _css() -> str:
    def variables(colours: tuple[str, ...]) -> str:
        return " ".join(f"--series-{number}: {colour};" for number, colour in enumerate(colours))

    return _CSS.replace("LIGHT", variables(_LIGHT)).replace("DARK", variables(_DARK))
