"""How commands print: sizes, times, tables on standard output; messages and progress on standard error."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierfs.control.protocol import Failure, Progress

PLAIN_INTERVAL_S = 5.0
"""How often progress is a line of text where there is no terminal."""


def say(text: str) -> None:
    """A message for people: standard error, so that standard output is only what was asked for."""
    print(f"tierfs: {text}", file=sys.stderr, flush=True)


def show_json(value: Any) -> None:
    """Print a struct of the protocol, or what is made of dicts and lists."""
    import msgspec

    print(json.dumps(msgspec.to_builtins(value), indent=2))


def size(size_bytes: float) -> str:
    """``4.0 GiB``"""
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        size_bytes /= 1024
        if size_bytes < 1024 or unit == "PiB":
            break
    return f"{size_bytes:.1f} {unit}"


def duration(seconds: float) -> str:
    """``1 h 2 min``, ``3 min 4 s``, ``5.0 s``"""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def list_failures(failed: Sequence[Failure], total: int | None = None) -> None:
    """Name what failed, on standard error."""
    for failure in failed:
        say(f"{printable(failure.path)}: {failure.message}")
    more = (total or 0) - len(failed)
    if more > 0:
        say(f"... and {more} more")


def printable(text: str) -> str:
    """``text`` without control characters or stray bytes: names come from the bucket."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii")
        for char in text
    )


@contextmanager
def progress(title: str, *, quiet: bool = False) -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal, a line now and then elsewhere, nothing if ``quiet``."""
    if quiet:
        yield lambda state: None
    elif sys.stderr.isatty():
        with _bar(title) as update:
            yield update
    else:
        yield _Lines(title).update


def summary(state: Progress) -> str:
    """``3 of 10 files, 1.0 MiB of 4.0 MiB, 1 failed``"""
    parts = []
    if state.total_files or state.done_files:
        total = f" of {state.total_files}" if state.total_files else ""
        parts.append(f"{state.done_files}{total} files")
    if state.total_bytes or state.done_bytes:
        total = f" of {size(state.total_bytes)}" if state.total_bytes else ""
        parts.append(f"{size(state.done_bytes)}{total}")
    if state.failed_files:
        parts.append(f"{state.failed_files} failed")
    if state.note:
        parts.append(printable(state.note))
    return ", ".join(parts)


class _Lines:
    def __init__(self, title: str) -> None:
        self._title = title
        self._next_s = time.monotonic() + 1.0

    def update(self, state: Progress) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + PLAIN_INTERVAL_S
            say(f"{self._title}: {summary(state)}")


@contextmanager
def _bar(title: str) -> Iterator[Callable[[Progress], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = [
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[summary]}", markup=False),
        TimeElapsedColumn(),
    ]
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None, summary="")

        def update(state: Progress) -> None:
            by_bytes = state.total_bytes > 0
            total = state.total_bytes if by_bytes else state.total_files
            done = state.done_bytes if by_bytes else state.done_files
            bar.update(task, total=total or None, completed=done, summary=summary(state))

        yield update


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns on standard output: text to the left, and what starts with a digit to the right."""
    if not rows:
        return
    grid = [list(head), *[[printable(cell) for cell in row] for row in rows]]
    widths = [max(len(row[column]) for row in grid) for column in range(len(head))]
    right = [all(row[column][:1].isdigit() for row in grid[1:]) for column in range(len(head))]
    for row in grid:
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        print("  ".join(cells).rstrip())
