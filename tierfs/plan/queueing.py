"""Servers with a rate and a queue, and how long a transfer through several of them takes. Pure.

A server (a link, a disk, the front end of a store) gives its whole rate to one transfer after the other, in
the order in which they came. Requests are small beside a second of any rate here, so that the sum is the same
as if they shared it, and one transfer costs one event.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

_Z_99 = 2.3263478740408408
"""99 % of a normal distribution is below this many standard deviations."""


class Server:
    """First come, first served at ``bytes_per_s``. ``math.inf`` serves at once."""

    __slots__ = ("busy_s", "bytes_per_s", "free_at_s", "name", "served_bytes")

    def __init__(self, name: str, bytes_per_s: float) -> None:
        self.name = name
        self.bytes_per_s = bytes_per_s
        self.free_at_s = 0.0
        self.busy_s = 0.0
        self.served_bytes = 0.0

    def reserve(self, now_s: float, nbytes: float) -> float:
        """Queue that many bytes at ``now_s``; returns when the last of them is through."""
        service_s = nbytes / self.bytes_per_s
        self.free_at_s = max(now_s, self.free_at_s) + service_s
        self.busy_s += service_s
        self.served_bytes += nbytes
        return self.free_at_s


class Latency:
    """Time to the first byte: log-normal with that median and 99th percentile (the same: constant).

    ``more_s`` is added to each.
    """

    __slots__ = ("_median_s", "_more_s", "_random", "_sigma")

    def __init__(self, median_s: float, p99_s: float, source: random.Random, *, more_s: float = 0.0) -> None:
        self._median_s = median_s
        self._more_s = more_s
        self._sigma = math.log(p99_s / median_s) / _Z_99 if median_s > 0 and p99_s > median_s else 0.0
        self._random = source

    def draw_s(self) -> float:
        if not self._sigma:
            return self._median_s + self._more_s
        return self._median_s * math.exp(self._random.gauss(0.0, self._sigma)) + self._more_s


class Route:
    """A way for bytes: a latency, then the slowest of the servers on it, but no faster than one stream is."""

    __slots__ = ("_latency", "_servers", "_stream_bytes_per_s")

    def __init__(
        self, servers: Sequence[Server], latency: Latency | None = None, stream_bytes_per_s: float = math.inf
    ) -> None:
        self._servers = tuple(servers)
        self._latency = latency
        self._stream_bytes_per_s = stream_bytes_per_s

    def arrival_s(self, now_s: float, nbytes: float, *, continued: bool = False) -> float:
        """When the last byte of a request made at ``now_s`` is there. ``continued``: no new request."""
        through_s = now_s + nbytes / self._stream_bytes_per_s
        for server in self._servers:
            through_s = max(through_s, server.reserve(now_s, nbytes))
        return through_s if continued or self._latency is None else through_s + self._latency.draw_s()
