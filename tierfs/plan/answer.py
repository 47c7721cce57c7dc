"""The whole answer to one question, as ``--json`` prints it. Fields are only ever added, with a default."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from tierfs.plan import setups
from tierfs.plan.forecast import CurvePoint, SetupForecast, compare, curve
from tierfs.plan.measured import Check, load_check
from tierfs.plan.relief import Relief, find_relief
from tierfs.plan.scenario import Scenario

FORMAT = "tierfs-plan"
VERSION = 1


class Answer(msgspec.Struct, kw_only=True):
    """See the module docstring. ``sources``: where each value of the scenario comes from."""

    format: str = FORMAT
    version: int = VERSION
    scenario: Scenario
    nodes: int
    sources: dict[str, str]
    setups: list[SetupForecast]
    relief: Relief
    curve: list[CurvePoint]
    check: Check | None
    """How the model did against real mounts; None if nobody has tried."""

    def of(self, setup: str) -> SetupForecast:
        return next(found for found in self.setups if found.setup == setup)


def answer(
    scenario: Scenario,
    *,
    sources: Mapping[str, str],
    goal: float,
    with_curve: bool = True,
    told: Callable[[str], None] = lambda _: None,
) -> Answer:
    """Simulate it all: some seconds. ``told`` hears what is being simulated."""
    found = compare(scenario, told)
    mine = next(each for each in found if each.setup == setups.TIERFS)
    return Answer(
        scenario=scenario,
        nodes=scenario.nodes,
        sources=dict(sources),
        setups=found,
        relief=find_relief(scenario, mine, goal=goal, told=told),
        curve=curve(scenario, told=told) if with_curve else [],
        check=load_check(),
    )
