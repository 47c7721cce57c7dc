"""How the demo talks: one console, one style of progress bar, one way to be stopped."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

OUT = Console(highlight=False, width=None if sys.stdout.isatty() else 100)


def say(text: str) -> None:
    OUT.print(text)


def progress() -> Progress:
    """A bar in bytes. Where the output is not a terminal, only its last state is printed."""
    return Progress(
        TextColumn("{task.description:<34}"),
        BarColumn(bar_width=24),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        console=OUT,
    )


def stop_on_signals() -> None:
    """SIGTERM and SIGINT end the program like an error does: through every ``finally``.

    SIGINT too, because a shell starts what it puts in the background with SIGINT ignored. A second signal
    does not disturb what the first has begun.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        for other in (signal.SIGTERM, signal.SIGINT):
            signal.signal(other, lambda number, frame: None)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
