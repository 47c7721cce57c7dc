"""What holds the GPUs up, and what helps: found by simulating the same job with more of one thing.

Each candidate is doubled alone; the one that gains most is the first bottleneck. It is then raised until the
goal is reached or more of it gains nothing, and what holds the job up after that is looked for in the same
way. Where two things are short at once, doubling one of them gains nothing: then all are doubled, and
those that turn out not to be needed are taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from tierfs.plan import saves
from tierfs.plan.forecast import SetupForecast, read, together
from tierfs.plan.scenario import Scenario
from tierfs.plan.setups import TIERFS

LEAST_LOSS = 0.003
"""Of GPU time; what loses less is not looked at."""
LEAST_RELIEF = 0.1
"""Part of what is lost that a change has to bring back; less is noise, or not worth a purchase."""
FACTORS = (2, 4, 8, 16)
ROUNDS = 2
_WHOLE = frozenset({"workers", "ram_bytes", "nvme_bytes", "fetch_concurrency", "upload_concurrency"})


@dataclass(frozen=True, slots=True)
class Candidate:
    """One thing to have more of, and what it is good for: reading, writing a save, uploading it.

    ``lower``: less of it is better. ``choice``: no amount, another value instead.
    """

    field: str
    words: str
    reads: bool = False
    writes: bool = False
    uploads: bool = False
    lower: bool = False
    choice: str = ""


CANDIDATES = (
    Candidate("store_read_rate", "read rate of the store", reads=True),
    Candidate("store_write_rate", "write rate of the store", uploads=True),
    Candidate("store_stream_rate", "rate of one connection to the store", reads=True, uploads=True),
    Candidate("store_latency_s", "latency of the store", reads=True, lower=True),
    Candidate("network_rate", "network of a node", reads=True, uploads=True),
    Candidate("mount_rate", "what one mount can move from and to the store", reads=True, uploads=True),
    Candidate("mount_write_rate", "what one mount can write", writes=True),
    Candidate("fetch_concurrency", "connections of a mount for reading", reads=True),
    Candidate("upload_concurrency", "connections of a mount for uploading", uploads=True),
    Candidate("workers", "loader processes per GPU", reads=True),
    Candidate("nvme_bytes", "NVMe per node", reads=True),
    Candidate("ram_bytes", "RAM for cached data per node", reads=True),
    Candidate("nvme_read_rate", "read rate of the NVMe", reads=True),
    Candidate("nvme_write_rate", "write rate of the NVMe", writes=True),
    Candidate("partition", "each node reads its own part in every epoch", reads=True, choice="fixed"),
)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One change and what it does. ``value`` in the unit of the field of the scenario."""

    field: str
    words: str
    factor: float
    """1 for a choice."""
    value: float | int | str
    utilisation: float
    gpus_gained: float
    """So many GPUs more compute, on average."""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """A bottleneck. ``tried``: each change alone, best first. ``relief``: the first one (or several, which
    are needed together) raised step by step.
    """

    utilisation_before: float
    tried: list[Change]
    bottleneck: list[str]
    """Words; empty: nothing of what was tried holds the GPUs up."""
    relief: list[Change]


class Relief(msgspec.Struct, frozen=True, kw_only=True):
    goal: float
    reached: bool
    rounds: list[Round]


class _Simulated:
    """A forecast of which only the half that a change touches is simulated again."""

    def __init__(self, scenario: Scenario, known: SetupForecast) -> None:
        self.scenario = scenario
        self.known = known

    def changed(self, scenario: Scenario, candidates: Sequence[Candidate]) -> _Simulated:
        saving, reading = self.known.saving, self.known.reading
        if any(candidate.writes or candidate.uploads for candidate in candidates):
            saving = saves.simulate(scenario, TIERFS)
        if any(candidate.reads for candidate in candidates):
            reading = read(scenario, TIERFS, saving)
        return _Simulated(scenario, together(scenario, TIERFS, reading, saving))

    @property
    def utilisation(self) -> float:
        return self.known.utilisation


def find_relief(
    scenario: Scenario, known: SetupForecast, *, goal: float, told: Callable[[str], None] = lambda _: None
) -> Relief:
    """``known``: the forecast of ``tierfs`` for that scenario. ``goal``: the utilisation that is wanted.

    Where it is reached as things are, the first bottleneck is named all the same, if it costs anything.
    """
    now = _Simulated(scenario, known)
    rounds: list[Round] = []
    while len(rounds) < ROUNDS and now.utilisation < (goal if rounds else 1 - LEAST_LOSS):
        found, now = _one_round(now, goal, told)
        rounds.append(found)
        if not found.bottleneck:
            break
    return Relief(goal=goal, reached=now.utilisation >= goal, rounds=rounds)


def _one_round(now: _Simulated, goal: float, told: Callable[[str], None]) -> tuple[Round, _Simulated]:
    before = now.utilisation
    candidates = [candidate for candidate in CANDIDATES if _matters(candidate, now)]
    tried: list[tuple[Candidate, _Simulated]] = []
    for candidate in candidates:
        told(candidate.words)
        scenario = _more(now.scenario, candidate, 2)
        if scenario is not None:
            tried.append((candidate, now.changed(scenario, [candidate])))
    tried.sort(key=lambda pair: -pair[1].utilisation)
    shown = [_change(candidate, each, now, 2) for candidate, each in tried]
    if tried and _relieves(tried[0][1].utilisation, before):
        together_needed = [tried[0][0]]
    else:
        together_needed = _needed_together(now, [candidate for candidate, _ in tried])
    steps, best = _raise(now, together_needed, goal, told)
    found = Round(
        utilisation_before=before,
        tried=shown,
        bottleneck=[candidate.words for candidate in together_needed],
        relief=steps,
    )
    return found, best


def _raise(
    now: _Simulated, candidates: Sequence[Candidate], goal: float, told: Callable[[str], None]
) -> tuple[list[Change], _Simulated]:
    """Double these again and again, while that helps."""
    best, steps = now, []
    for factor in FACTORS if candidates else ():
        told(f"{' and '.join(candidate.words for candidate in candidates)} x {factor}")
        scenario = now.scenario
        for candidate in candidates:
            scenario = _more(scenario, candidate, factor) or scenario
        each = now.changed(scenario, candidates)
        if not _relieves(each.utilisation, best.utilisation):
            break
        best = each
        steps += [_change(candidate, each, now, factor) for candidate in candidates]
        if best.utilisation >= goal or any(candidate.choice for candidate in candidates):
            break
    return steps, best


def _relieves(after: float, before: float) -> bool:
    return after - before >= LEAST_RELIEF * (1 - before)


def _needed_together(now: _Simulated, candidates: list[Candidate]) -> list[Candidate]:
    """Those that gain something only when all of them are doubled; empty if all together gain nothing."""

    def doubled(chosen: Sequence[Candidate]) -> float:
        scenario = now.scenario
        for candidate in chosen:
            scenario = _more(scenario, candidate, 2) or scenario
        return now.changed(scenario, chosen).utilisation

    if len(candidates) < 2:
        return []
    wanted = doubled(candidates)
    if not _relieves(wanted, now.utilisation):
        return []
    needed = list(candidates)
    for candidate in candidates:
        without = [other for other in needed if other is not candidate]
        if without and doubled(without) > wanted - LEAST_RELIEF * (wanted - now.utilisation):
            needed = without
    return needed


def _matters(candidate: Candidate, now: _Simulated) -> bool:
    """Whether it can help at all: there is a stall of that kind, worth something."""
    waits = any(epoch.utilisation < 1 - LEAST_LOSS for epoch in now.known.reading.epochs)
    saving = now.known.saving
    blocked = saving.piled_up_stall_s > LEAST_LOSS * now.scenario.save_interval_s
    piles_up = blocked and not saving.keeps_up
    return (candidate.reads and waits) or (candidate.writes and blocked) or (candidate.uploads and piles_up)


def _more(scenario: Scenario, candidate: Candidate, factor: float) -> Scenario | None:
    """The scenario with so many times as much; None if it has that, or has nothing to multiply."""
    if candidate.choice:
        if getattr(scenario, candidate.field) == candidate.choice or scenario.nodes < 2:
            return None
        return msgspec.structs.replace(scenario, **{candidate.field: candidate.choice})
    value = getattr(scenario, candidate.field)
    if not value:
        return None
    changed = value / factor if candidate.lower else value * factor
    changes = {candidate.field: int(changed) if candidate.field in _WHOLE else changed}
    if candidate.field == "store_latency_s":
        changes["store_latency_p99_s"] = scenario.store_latency_p99_s / factor
    return msgspec.structs.replace(scenario, **changes)


def _change(candidate: Candidate, after: _Simulated, before: _Simulated, factor: float) -> Change:
    return Change(
        field=candidate.field,
        words=candidate.words,
        factor=1 if candidate.choice else 1 / factor if candidate.lower else factor,
        value=getattr(after.scenario, candidate.field),
        utilisation=after.utilisation,
        gpus_gained=(after.utilisation - before.utilisation) * after.scenario.gpus,
    )
