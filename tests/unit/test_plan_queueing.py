"""The planner's servers, latencies and connections against what queueing theory and arithmetic say."""

from __future__ import annotations

import random
import statistics

import pytest
from simpy import Environment

from tierfs.plan.fetching import Fetch, FetchQueue
from tierfs.plan.queueing import Latency, Route, Server

SERVICE_S = 0.01


def waits(utilisation: float, arrivals: int, seed: int) -> tuple[list[float], Server, float]:
    """Poisson arrivals of equal requests at one server: (waits, server, time of the last arrival)."""
    server = Server("link", 1000.0)
    chance = random.Random(seed)
    now, found = 0.0, []
    for _ in range(arrivals):
        now += chance.expovariate(utilisation / SERVICE_S)
        found.append(server.reserve(now, 1000.0 * SERVICE_S) - SERVICE_S - now)
    return found, server, now


@pytest.mark.parametrize("utilisation", [0.3, 0.6, 0.8])
def test_mean_wait_of_m_d_1(utilisation: float) -> None:
    """Pollaczek and Khinchine: rho / (2 mu (1 - rho)); within four standard errors of batch means."""
    found, _, _ = waits(utilisation, 120_000, seed=1)
    batches = [statistics.fmean(found[start : start + 6000]) for start in range(0, len(found), 6000)]
    expected = utilisation * SERVICE_S / (2 * (1 - utilisation))
    error = statistics.stdev(batches) / len(batches) ** 0.5
    assert abs(statistics.fmean(batches) - expected) < 4 * error
    assert error < 0.05 * expected, "the bound above would let anything pass"


def test_utilisation_law() -> None:
    """Busy part of the time = arrival rate x service time."""
    _, server, end_s = waits(0.6, 50_000, seed=2)
    assert server.busy_s / end_s == pytest.approx(0.6, rel=0.02)
    assert server.served_bytes == pytest.approx(50_000 * 10.0)


def test_a_server_serves_in_turn_and_never_before_it_is_asked() -> None:
    server = Server("disk", 100.0)
    assert server.reserve(0.0, 50) == 0.5
    assert server.reserve(0.1, 50) == 1.0
    assert server.reserve(9.0, 100) == 10.0


def test_a_route_is_as_fast_as_its_slowest_part_and_pays_the_latency_once() -> None:
    wait = Latency(0.2, 0.2, random.Random(1))
    slow = Server("store", 100.0)
    assert Route([Server("network", 1000.0), slow], wait).arrival_s(0.0, 50) == pytest.approx(0.7)
    assert Route([Server("network", 1000.0)], wait, 25.0).arrival_s(0.0, 50) == pytest.approx(2.2)
    assert Route([Server("network", 1000.0)], wait, 25.0).arrival_s(0.0, 50, continued=True) == 2.0
    assert slow.busy_s == 0.5


def test_latency_has_the_median_and_the_percentile_that_were_asked_for() -> None:
    drawn = sorted(
        Latency(0.03, 0.12, chance).draw_s() for chance in [random.Random(3)] for _ in range(20_000)
    )
    assert drawn[10_000] == pytest.approx(0.03, rel=0.03)
    assert drawn[19_800] == pytest.approx(0.12, rel=0.08)


def test_connections_bound_what_is_under_way() -> None:
    """Ten requests of one second over four connections take three seconds."""
    environment = Environment()
    queue = FetchQueue(environment, Route([], Latency(1.0, 1.0, random.Random(1))), 4)
    for _ in range(10):
        queue.request(1, demand=True)
    environment.run()
    assert environment.now == 3.0


def test_readers_go_before_read_ahead_and_one_connection_in_four_is_theirs() -> None:
    environment = Environment()
    queue = FetchQueue(environment, Route([], Latency(1.0, 1.0, random.Random(1))), 4)
    finished: list[tuple[str, float]] = []

    def note(name: str, fetch: Fetch) -> None:
        assert fetch.done.callbacks is not None
        fetch.done.callbacks.append(lambda _: finished.append((name, environment.now)))

    ahead = [queue.request(1, demand=False) for _ in range(5)]
    for number, fetch in enumerate(ahead):
        note(f"ahead{number}", fetch)
    note("reader", queue.request(1, demand=True))
    queue.promote(ahead[4])
    environment.run()
    times = dict(finished)
    assert times["reader"] == 1.0
    assert [times[f"ahead{number}"] for number in range(4)] == [1.0, 1.0, 1.0, 2.0]
    assert next(name for name, at in finished if at == 2.0) == "ahead4", "who is waited for overtakes"
