"""Counters and gauges that any floor may bump, without a lock and without a library.

Names are constants of the module that counts; every name carries its unit and is part of the public
interface once released (see README, "Metrics"). ``exporter`` renders them for Prometheus.

Called from the trio thread and from worker threads. ``Counter.add`` from two threads at once can in
theory lose an increment under a free-threaded interpreter; under the GIL it is one bytecode-level
read-modify-write that may lose an increment too, so counters that must be exact (bytes in a tier) are
derived from the truth at collection time through ``Metrics.gauge`` callbacks instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Counter:
    """A number that only grows. ``value`` is in the unit that the name ends in."""

    name: str
    help: str
    labels: Labels = ()
    value: int = 0

    def add(self, amount: int = 1) -> None:
        self.value += amount


@dataclass(slots=True)
class Gauge:
    """A number read from the truth when somebody asks."""

    name: str
    help: str
    read: Callable[[], float]
    labels: Labels = ()


@dataclass(slots=True)
class Metrics:
    """All counters and gauges of one mount."""

    _counters: dict[tuple[str, Labels], Counter] = field(default_factory=dict)
    _gauges: dict[tuple[str, Labels], Gauge] = field(default_factory=dict)

    def counter(self, name: str, help: str, **labels: str) -> Counter:
        """The counter of that name and labels; made on first use."""
        key = (name, tuple(sorted(labels.items())))
        found = self._counters.get(key)
        if found is None:
            found = self._counters[key] = Counter(name, help, key[1])
        return found

    def gauge(self, name: str, help: str, read: Callable[[], float], **labels: str) -> None:
        """Register (or replace) a gauge whose value ``read`` returns at collection time."""
        key = (name, tuple(sorted(labels.items())))
        self._gauges[key] = Gauge(name, help, read, key[1])

    def counters(self) -> Iterator[Counter]:
        return iter(list(self._counters.values()))

    def gauges(self) -> Iterator[Gauge]:
        return iter(list(self._gauges.values()))
