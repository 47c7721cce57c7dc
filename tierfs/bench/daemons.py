"""CPU seconds of processes that are not ours: the engine and the front of a mount."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float | None:
    """User and system time of all threads of a process, ended ones too; None if it is gone.

    In steps of a clock tick (10 ms).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat.rpartition(b")")[2].split()  # the name before may hold blanks and parentheses
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What each spent in between; without those that were not there the whole time, or are others now."""
    return {
        who: round(after[who] - before[who], 3)
        for who in before
        if who in after and after[who] >= before[who]
    }
