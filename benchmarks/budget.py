"""Where the processor time of a measured step goes, and what that allows at best.

On a machine on which server, daemon and readers share the cores, a rate ends where the cores do. The sum of
what all of them spend per unit of work says what the cores would allow if they never waited, and so whether
a wanted rate could be reached at all. Not counted: what the kernel does outside of these processes.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from tierfs.bench.daemons import cpu_s

SERVER, READER = "server", "reader"


@dataclass(slots=True)
class Budget:
    """Processor seconds per unit of work of one line of the table.

    ``spent``: for each target, by process, one value per round; ``rates``: units per second, likewise.
    """

    name: str
    unit: str
    spent: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    rates: dict[str, list[float]] = field(default_factory=dict)

    def add(self, target: str, seconds: Mapping[str, float], amount: float, rate: float) -> None:
        """One round of a target: what each process spent on ``amount`` units."""
        of_target = self.spent.setdefault(target, {})
        for who, spent_s in seconds.items():
            of_target.setdefault(who, []).append(spent_s / amount)
        self.rates.setdefault(target, []).append(rate)

    def per_unit_s(self, target: str) -> dict[str, float]:
        """The median of each process."""
        return {who: statistics.median(values) for who, values in self.spent.get(target, {}).items()}

    def most(self, target: str, cores: int) -> float:
        """Units per second if that many cores never waited."""
        total_s = sum(self.per_unit_s(target).values())
        return cores / total_s if total_s else float("inf")

    def lines(self, target: str, reference: str, goal: float, cores: int) -> list[str]:
        """The sums, and whether ``goal`` times the reference's rate lies within what the cores allow."""
        if not self.rates.get(target) or not self.rates.get(reference):
            return []
        lines = [f"{self.name}: processor time, ms per {self.unit}"]
        for each in (target, reference):
            parts = self.per_unit_s(each)
            total = sum(parts.values())
            text = " + ".join(f"{who} {seconds * 1000:.2f}" for who, seconds in parts.items())
            lines.append(f"  {each:<8}{text} = {total * 1000:.2f}")
        rate = statistics.median(self.rates[reference])
        most = self.most(target, cores)
        lines.append(
            f"  {cores} cores that never wait: {most:,.0f} {self.unit} a second, "
            f"{most / rate:.2f} x {reference}"
        )
        parts = self.per_unit_s(target)
        others_s = sum(seconds for who, seconds in parts.items() if who in (SERVER, READER))
        left_s = cores / (goal * rate) - others_s
        lines.append(
            f"  {goal:.2f} x {reference} leaves {max(0.0, left_s) * 1000:.2f} to tierfs, "
            "beside server and reader"
        )
        return lines

    def as_json(self) -> dict[str, object]:
        return {"unit": self.unit, "cpu_s_per_unit": self.spent, "rates": self.rates}


@contextmanager
def spending(pids: Mapping[str, int]) -> Iterator[dict[str, float]]:
    """Fills what it gives, at its end, with the processor seconds of these processes.

    ``READER`` is added: children of this process that have ended meanwhile.
    """
    spent: dict[str, float] = {}
    before = {who: cpu_s(pid) for who, pid in pids.items()}
    children = _children_s()
    yield spent
    for who, pid in pids.items():
        then, now = before[who], cpu_s(pid)
        if then is not None and now is not None:
            spent[who] = now - then
    spent[READER] = _children_s() - children


def _children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system
