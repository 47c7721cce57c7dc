"""Requests of one mount to the store, in simulated time: so many at once, readers before read-ahead.

The rules are those of ``cache.fetch.Fetcher``: a number of connections, of which read-ahead gets three
quarters; what a reader waits for goes first, also if it was read-ahead until then.
"""

from __future__ import annotations

from collections import deque

from simpy import Environment, Event

from tierfs.plan.queueing import Route

PREFETCH_SHARE = 0.75


class Fetch:
    """One request. ``done`` happens when its bytes are here."""

    __slots__ = ("demand", "done", "nbytes", "started")

    def __init__(self, done: Event, nbytes: int, demand: bool) -> None:
        self.done = done
        self.nbytes = nbytes
        self.demand = demand
        self.started = False


class FetchQueue:
    """See the module docstring."""

    def __init__(self, environment: Environment, route: Route, connections: int) -> None:
        self._environment = environment
        self._route = route
        self._connections = connections
        self._for_prefetch = max(1, int(connections * PREFETCH_SHARE))
        self._demand: deque[Fetch] = deque()
        self._prefetch: deque[Fetch] = deque()
        self._active = 0
        self._active_prefetch = 0

    def request(self, nbytes: int, *, demand: bool) -> Fetch:
        fetch = Fetch(Event(self._environment), nbytes, demand)
        (self._demand if demand else self._prefetch).append(fetch)
        self._pump()
        return fetch

    def promote(self, fetch: Fetch) -> None:
        """A reader waits for it."""
        if not fetch.demand and not fetch.started:
            fetch.demand = True
            self._prefetch.remove(fetch)
            self._demand.append(fetch)
            self._pump()

    def _pump(self) -> None:
        while self._active < self._connections:
            if self._demand:
                fetch = self._demand.popleft()
            elif self._prefetch and self._active_prefetch < self._for_prefetch:
                fetch = self._prefetch.popleft()
            else:
                return
            self._start(fetch)

    def _start(self, fetch: Fetch) -> None:
        fetch.started = True
        was_prefetch = not fetch.demand
        self._active += 1
        self._active_prefetch += was_prefetch
        now_s = self._environment.now
        arrival = self._environment.timeout(self._route.arrival_s(now_s, fetch.nbytes) - now_s)

        def arrived(_: Event) -> None:
            self._active -= 1
            self._active_prefetch -= was_prefetch
            fetch.done.succeed()
            self._pump()

        assert arrival.callbacks is not None
        arrival.callbacks.append(arrived)
