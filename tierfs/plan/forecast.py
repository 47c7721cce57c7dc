"""The forecast: three set-ups side by side, and how each of them grows from 8 to 1,024 GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from tierfs.plan import saves, setups
from tierfs.plan.epochs import EpochResult, read_epochs
from tierfs.plan.saves import Saving
from tierfs.plan.scenario import Scenario

CURVE_GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
_CONTENDED = 0.8
"""Part of what a mount can move from which on an upload beside the reads is simulated."""


class Epoch(msgspec.Struct, frozen=True, kw_only=True):
    """One epoch. ``stall_s``: what a step waits for data; of epochs without a window interpolated by hit
    rate.
    """

    number: int
    hit_rate: float
    """Bytes that were local, by bytes read."""
    stall_s: float
    utilisation: float
    """Part of the time that GPUs compute, saves left aside."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """How a set-up feeds the GPUs."""

    epochs: list[Epoch]
    stall_while_draining_s: float
    """Of a step in the last epoch, while a checkpoint is uploaded."""


class SetupForecast(msgspec.Struct, frozen=True, kw_only=True):
    """What one set-up does. ``utilisation``: part of the time that GPUs compute, saves included."""

    setup: str
    reading: Reading
    saving: Saving
    first_utilisation: float
    """In the first epoch."""
    last_utilisation: float
    """In the last epoch."""
    utilisation: float
    """In all epochs together."""


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """``utilisation``, of all epochs and of the first, by set-up."""

    gpus: int
    nodes: int
    first_utilisation: dict[str, float]
    utilisation: dict[str, float]


def forecast(scenario: Scenario, setup: str, *, windows: set[int] | None = None) -> SetupForecast:
    """Simulate one set-up. ``windows``: see ``read_epochs``."""
    saving = saves.simulate(scenario, setup)
    return together(scenario, setup, read(scenario, setup, saving, windows=windows), saving)


def read(scenario: Scenario, setup: str, saving: Saving, *, windows: set[int] | None = None) -> Reading:
    """The reading half of a forecast."""
    keep, build = partial(setups.keep, scenario, setup), partial(setups.build, scenario, setup)
    results = read_epochs(scenario, keep, build, windows=windows)
    epochs = [
        Epoch(
            number=result.number,
            hit_rate=result.hit_rate,
            stall_s=stall_s,
            utilisation=scenario.step_s / (scenario.step_s + stall_s),
        )
        for result, stall_s in zip(results, _interpolated(results), strict=True)
    ]
    return Reading(
        epochs=epochs, stall_while_draining_s=_stall_while_draining(scenario, setup, epochs[-1], saving)
    )


def together(scenario: Scenario, setup: str, reading: Reading, saving: Saving) -> SetupForecast:
    """Both halves."""
    more_s = reading.stall_while_draining_s - reading.epochs[-1].stall_s
    each = [_with_saves(scenario, epoch.stall_s, epoch.stall_s + more_s, saving) for epoch in reading.epochs]
    return SetupForecast(
        setup=setup,
        reading=reading,
        saving=saving,
        first_utilisation=each[0],
        last_utilisation=each[-1],
        # Every epoch computes the same; the time that it takes is what differs.
        utilisation=len(each) / sum(1 / one for one in each),
    )


def compare(scenario: Scenario, told: Callable[[str], None] = lambda _: None) -> list[SetupForecast]:
    """All three set-ups. ``told`` hears what is simulated now."""
    found = []
    for setup in setups.SETUPS:
        told(setup)
        found.append(forecast(scenario, setup))
    return found


def curve(
    scenario: Scenario, gpus: Sequence[int] = CURVE_GPUS, told: Callable[[str], None] = lambda _: None
) -> list[CurvePoint]:
    """The same job on more and more nodes; what all nodes share stays what it is.

    Of a save of more bytes than fit into one node's tier nothing can be said: such points have no tierfs.
    """
    points = []
    for count in gpus:
        told(f"{count} GPUs")
        grown = msgspec.structs.replace(scenario, gpus=count)
        found = {
            setup: forecast(grown, setup, windows={1, scenario.epochs})
            for setup in setups.SETUPS
            if setup != setups.TIERFS or saves.fits(grown)
        }
        points.append(
            CurvePoint(
                gpus=count,
                nodes=grown.nodes,
                first_utilisation={setup: each.first_utilisation for setup, each in found.items()},
                utilisation={setup: each.utilisation for setup, each in found.items()},
            )
        )
    return points


def _with_saves(scenario: Scenario, stall_s: float, draining_stall_s: float, saving: Saving) -> float:
    """Part of the time that GPUs compute: between two saves, and the save."""
    between_s = scenario.save_interval_s
    draining_s = min(saving.drain_s, between_s)
    calm = scenario.step_s / (scenario.step_s + stall_s)
    disturbed = scenario.step_s / (scenario.step_s + draining_stall_s)
    computed_s = (between_s - draining_s) * calm + draining_s * disturbed
    return computed_s / (between_s + saving.piled_up_stall_s)


def _stall_while_draining(scenario: Scenario, setup: str, last: Epoch, saving: Saving) -> float:
    """Uploads take a part of what a mount can move; where that matters, reads are simulated with the rest."""
    if setup != setups.TIERFS or not saving.drain_s:
        return last.stall_s
    upload_rate = scenario.node_checkpoint_bytes / saving.drain_s
    missed_rate = scenario.demand_rate * (1 - last.hit_rate)
    if upload_rate + missed_rate < _CONTENDED * scenario.mount_rate:
        return last.stall_s
    # Both get what they ask for up to one half, as two queues of equal right do.
    left = max(scenario.mount_rate / 2, scenario.mount_rate - upload_rate)
    slower = msgspec.structs.replace(scenario, mount_rate=left)
    keep = partial(setups.keep, slower, setup)
    build = partial(setups.build, slower, setup)
    stall_s = read_epochs(slower, keep, build, windows={scenario.epochs})[-1].stall_s
    return max(last.stall_s, stall_s or 0.0)


def _interpolated(results: Sequence[EpochResult]) -> list[float]:
    """A stall for every epoch: without a window, between the windows with the nearest hit rates."""
    known = sorted((result.hit_rate, result.stall_s) for result in results if result.stall_s is not None)
    stalls = []
    for result in results:
        if result.stall_s is not None:
            stalls.append(result.stall_s)
            continue
        below = max((pair for pair in known if pair[0] <= result.hit_rate), default=known[0])
        above = min((pair for pair in known if pair[0] >= result.hit_rate), default=known[-1])
        span = above[0] - below[0]
        share = (result.hit_rate - below[0]) / span if span > 0 else 0.0
        stalls.append(below[1] + share * (above[1] - below[1]))
    return stalls
