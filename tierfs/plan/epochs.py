"""Reading for some epochs: hit rate of each, and how long a step waits for data.

Every visit of every epoch passes through what the nodes keep, so that hit rates follow from the whole
history. Time is simulated only in a window in the middle of some epochs, with real rates, sizes and
latencies: what happens before and after it is done in the order of reading, without time (as sampled
simulation of processors does).

Two nodes stand for all, with their share of what all nodes use together. Where a node would make more
requests in a window than can be simulated in a moment, a step is cut into several shorter ones, and then a
node has fewer GPUs, and so much less of everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from simpy import Environment

from tierfs.plan.loader import Pace, Training
from tierfs.plan.node import PIECE_BYTES, Node
from tierfs.plan.scenario import Scenario
from tierfs.plan.tiers import Kept
from tierfs.plan.trace import DataSet, interleaved

SIMULATED_NODES = 2
WINDOW_READS = 2500
"""About how many reads of one node are simulated in one window."""
WARM_UP_ROUNDS, MEASURED_ROUNDS = 3, 6
"""In a round every loader process makes a batch."""
MOST_CUTS = 4
"""A node is made smaller before a step is cut into more than that."""
ALL_STEPS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class EpochResult:
    """``stall_s`` per step; None: no window in this epoch."""

    number: int
    hit_rate: float
    stall_s: float | None


@dataclass(frozen=True, slots=True)
class Scale:
    """How a window is cut to size."""

    share: float
    """Part of a node's GPUs that is simulated, and of everything that it has."""
    cuts: int
    """Steps that one step is cut into."""
    warm_up_steps: int
    measured_steps: int

    @classmethod
    def of(cls, scenario: Scenario) -> Scale:
        # A starved GPU gets a batch from each of its loaders in one burst: only whole rounds can be averaged.
        steps = (WARM_UP_ROUNDS + MEASURED_ROUNDS) * scenario.workers
        reads = scenario.demand_rate * scenario.step_s / min(PIECE_BYTES, scenario.content_bytes)
        share = 1.0
        while reads * share * steps > MOST_CUTS * WINDOW_READS and share * scenario.gpus_of_node > 1:
            share = max(share / 2, 1 / scenario.gpus_of_node)
        gpus = max(1, round(scenario.gpus_of_node * share))
        share = gpus / scenario.gpus_of_node
        cuts = max(1, math.ceil(reads * share * steps / WINDOW_READS))
        return cls(share, cuts, WARM_UP_ROUNDS * scenario.workers, MEASURED_ROUNDS * scenario.workers)

    @classmethod
    def whole(cls) -> Scale:
        """All of an epoch, for a data set that is small enough."""
        return cls(1.0, 1, 0, ALL_STEPS)

    @property
    def steps(self) -> int:
        return self.warm_up_steps + self.measured_steps


Build = Callable[[Environment, DataSet, list[Kept], float], list[Node]]
"""Makes the nodes of one window: (environment, data, what each keeps, share of a node)."""


def read_epochs(
    scenario: Scenario,
    keep: Callable[[DataSet], Kept],
    build: Build,
    *,
    windows: set[int] | None = None,
    scale: Scale | None = None,
) -> list[EpochResult]:
    """All epochs. ``keep``: what a new node has; ``windows``: epochs with a window (None: first, second and
    last).
    """
    scale = scale or Scale.of(scenario)
    window_bytes = scenario.demand_rate * scenario.step_s / scale.cuts * scale.steps
    data = DataSet(scenario, window_bytes)
    kept = [keep(data) for _ in range(min(SIMULATED_NODES, scenario.nodes))]
    if windows is None:
        windows = {1, 2, scenario.epochs}
    results = []
    for number in range(1, scenario.epochs + 1):
        before = [(each.hit_bytes, each.missed_bytes) for each in kept]
        orders = [data.order(node, number) for node in range(len(kept))]
        stall_s = None
        if number in windows:
            stall_s = _epoch_with_window(scenario, data, scale, kept, orders, build)
        else:
            for each, order in zip(kept, orders, strict=True):
                _pass(scenario, data, each, order)
        hits = sum(each.hit_bytes - old for each, (old, _) in zip(kept, before, strict=True))
        misses = sum(each.missed_bytes - old for each, (_, old) in zip(kept, before, strict=True))
        results.append(EpochResult(number, hits / (hits + misses), stall_s))
    return results


def _pass(scenario: Scenario, data: DataSet, kept: Kept, order: list[int]) -> None:
    for unit, size_bytes in interleaved(data, order, scenario.gpus_of_node * scenario.workers):
        kept.read(unit, size_bytes)


def _epoch_with_window(
    scenario: Scenario, data: DataSet, scale: Scale, kept: list[Kept], orders: list[list[int]], build: Build
) -> float:
    """Mean stall of a step."""
    window = (
        scenario.demand_rate * scenario.step_s / scale.cuts * scale.steps * scale.share / data.content_bytes
    )
    first = max(0, int((data.node_contents - window) / 2))
    for each, order in zip(kept, orders, strict=True):
        _pass(scenario, data, each, order[:first])
    environment = Environment()
    nodes = build(environment, data, kept, scale.share)
    rest = [order[first:] for order in orders]
    pace = Pace(
        gpus=round(scenario.gpus_of_node * scale.share),
        workers=scenario.workers,
        prefetch_batches=scenario.prefetch_batches * scale.cuts,
        batch_bytes=scenario.samples_per_s * scenario.step_s * scenario.sample_bytes / scale.cuts,
        step_s=scenario.step_s / scale.cuts,
    )
    training = Training(environment, pace, nodes, [iter(order) for order in rest], data.content_bytes)
    complete = training.run(scale.steps)
    for node, order in zip(nodes, rest, strict=True):
        for unit, size_bytes in interleaved(data, order, scenario.gpus_of_node * scenario.workers):
            if unit not in node.visited:
                node.kept.read(unit, size_bytes)
    # An epoch that is shorter than a window is measured as it is, its beginning included.
    if complete:
        return training.steady_stall_s(scale.warm_up_steps) * scale.cuts
    return sum(training.stalls_s) / max(1, len(training.stalls_s)) * scale.cuts
