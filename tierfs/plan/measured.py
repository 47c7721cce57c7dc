"""``measured.json``: what the model predicted for small jobs, and what real mounts then did.

Written by ``python -m benchmarks.planned --write``, never by hand.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

import msgspec

FILE = "measured.json"


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one job. ``measured``: the median of the rounds, which lie from ``low`` to ``high``."""

    job: str
    figure: str
    unit: str
    predicted: float
    measured: float
    low: float
    high: float

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured; of shares the difference; None where nothing was measured."""
        if self.unit == "share":
            return self.predicted - self.measured
        return (self.predicted - self.measured) / self.measured if self.measured else None

    @property
    def shown_error(self) -> str:
        if self.error is None:
            return "-"
        return f"{100 * self.error:+.0f} {'points' if self.unit == 'share' else '%'}"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One run of that benchmark. ``rates``: what the model was told, measured just before."""

    date: str
    machine: str
    processor: str = ""
    command: str
    rounds: int
    jobs: dict[str, str]
    """Name of a job -> what it was."""
    rates: dict[str, float]
    compared: list[Compared]
    per_core: dict[str, float] = {}
    """What a mount does with one core of its own, from the CPU seconds that its processes took: not the rate
    of a disk or a network, and hardly of what else the machine did at that time.
    """

    def worst(self) -> Compared | None:
        """The time that is furthest off."""
        known = [found for found in self.compared if found.error is not None and found.unit != "share"]
        return max(known, key=lambda found: abs(found.error or 0.0), default=None)

    def mean_error(self, *, shares: bool) -> float:
        """Mean of the absolute errors: of shares as a difference, or of everything else, relative."""
        errors = [
            abs(found.error)
            for found in self.compared
            if found.error is not None and (found.unit == "share") == shares
        ]
        return sum(errors) / len(errors) if errors else 0.0


@cache
def load_check() -> Check | None:
    """None if that file is missing."""
    try:
        data = resources.files(__package__).joinpath(FILE).read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.json.decode(data, type=Check)
