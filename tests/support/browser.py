"""A page in a real browser: headless Chromium, without network, and what it says and shows."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 90.0
NAMES = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True, slots=True)
class Shown:
    """``console``: what the page wrote to the console, errors of loading included. ``pixels``: by RGB."""

    console: list[str]
    pixels: Counter[tuple[int, int, int]]

    def count(self, colour: str) -> int:
        """How many pixels have exactly this colour, as ``#rrggbb``."""
        red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
        return self.pixels[red, green, blue]


def browser() -> str | None:
    """Where the browser is, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def show(page: Path, scratch: Path, *, dark: bool = False, height: int = 3000) -> Shown:
    """Open ``page`` and take a picture of it. ``scratch``: an empty directory for the browser's own files."""
    from PIL import Image

    program = browser()
    assert program is not None
    picture = scratch / "picture.png"
    arguments = [
        program,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={scratch / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND",  # there is no network
        "--no-first-run",
        "--disable-component-update",
        "--disable-background-networking",
        "--enable-logging=stderr",
        f"--window-size=1000,{height}",
        f"--screenshot={picture}",
        *(["--force-dark-mode"] if dark else []),
        page.as_uri(),
    ]
    done = subprocess.run(
        arguments, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, check=False, text=True
    )
    assert done.returncode == 0, done.stderr
    assert picture.exists(), done.stderr
    console = [line for line in done.stderr.splitlines() if re.search(r":CONSOLE[(:]", line)]
    with Image.open(picture) as image:
        colours = image.convert("RGB").getcolors(maxcolors=image.width * image.height)
    pixels: Counter[tuple[int, int, int]] = Counter()
    for count, colour in colours or []:
        assert isinstance(colour, tuple)
        pixels[colour[0], colour[1], colour[2]] = count
    return Shown(console, pixels)
