"""An answer in words, tables and plots: a ``report.Report``, which prints itself or becomes a page."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tierfs.cache.blocks import EXTENT_SIZE_BYTES
from tierfs.cache.policy import PROBATION_SHARE
from tierfs.plan import setups
from tierfs.plan.answer import Answer
from tierfs.plan.forecast import SetupForecast
from tierfs.plan.measured import Check
from tierfs.plan.relief import Change, Relief
from tierfs.plan.scenario import GIB, KIB, MIB, TIB, Scenario, option
from tierfs.report import Axis, BarPlot, Bars, LinePlot, Report, Section, Series

_TITLES = {setups.NFS: "NFS", setups.STORE: "object store alone", setups.TIERFS: "tierfs"}
_NOTABLE = 0.005


def report(answer: Answer, *, command: str = "") -> Report:
    """``command``: how it was asked for."""
    scenario = answer.scenario
    checkpoint = (
        f", a checkpoint of {size(scenario.checkpoint_bytes)} every {seconds(scenario.save_interval_s)}"
        if scenario.checkpoint_bytes
        else ", no checkpoints"
    )
    job = f"{scenario.gpus} GPUs on {answer.nodes} {'node' if answer.nodes == 1 else 'nodes'}"
    found = Report(
        "Will it be enough?",
        facts=[
            ("job", f"{job}, {size(scenario.dataset_bytes)} of data{checkpoint}"),
            ("needs", f"{size(scenario.demand_rate)}/s for each node while no GPU waits, "
                      f"{size(scenario.demand_rate * answer.nodes)}/s together"),
            *([("command", command)] if command else []),
        ],
        text=[_verdict(answer), *_losses(answer), *_cautions(answer.scenario)],
    )  # fmt: skip
    _setups(answer, found.section("Three set-ups"))
    _relief(answer, found.section("What holds the GPUs up, with tierfs"))
    if answer.curve:
        _curve(answer, found.section("From 8 to 1,024 GPUs", _WHAT_GROWS))
    _inputs(answer, found.section("What this is based on", _ASSUMED))
    _check(answer.check, found.section("How far the model is off"))
    return found


_WHAT_GROWS = (
    "Nodes are added; data set, checkpoint and what all nodes share (store, NFS server) stay what they are. "
    "Part of the time that GPUs compute, saves included, over all epochs."
)
_ASSUMED = (
    "'assumed' is a guess about hardware that nobody has measured here: give the value, or take it from a "
    "report of 'tierfs bench' (--bench)."
)


def _verdict(answer: Answer) -> str:
    parts = [f"{_TITLES[found.setup]} {percent(found.utilisation)}" for found in answer.setups]
    return f"GPUs compute so much of the time: {', '.join(parts)}."


def _losses(answer: Answer) -> list[str]:
    """Where tierfs is not the best of the three, plainly."""
    mine = answer.of(setups.TIERFS)
    lines = []
    measures: list[tuple[str, Callable[[SetupForecast], float], float]] = [
        ("time that GPUs compute", lambda one: -one.utilisation, _NOTABLE),
        ("stall of a step in the last epoch", lambda one: one.reading.epochs[-1].stall_s, 0.005),
        ("stall of a step while a save drains", lambda one: one.reading.stall_while_draining_s, 0.005),
        ("stall of a save", lambda one: one.saving.piled_up_stall_s, 0.05),
        ("recovery on other nodes", lambda one: one.saving.restore_new_s, 0.05),
        ("training lost with a node", lambda one: one.saving.lost_new_s, 0.05),
    ]
    for words, measure, least in measures:
        for other in answer.setups:
            difference = measure(mine) - measure(other)
            if other is not mine and difference > least and difference > 0.005 * abs(measure(other)):
                lines.append(f"tierfs is behind {_TITLES[other.setup]} in: {words}.")
    return lines


def _cautions(scenario: Scenario) -> list[str]:
    """What the model does not see in this job."""
    passing_bytes = PROBATION_SHARE * sum(scenario.tier_sizes)
    read_bytes = scenario.gpus_of_node * scenario.workers * EXTENT_SIZE_BYTES
    if scenario.tier_sizes and scenario.content_bytes > EXTENT_SIZE_BYTES and read_bytes > passing_bytes:
        return [
            f"Caution: {scenario.gpus_of_node * scenario.workers} readers of large files go through "
            f"{size(read_bytes)} at a time, and tiers of this size let {size(passing_bytes)} pass: what is "
            "read ahead would push itself out and be fetched twice, which the model does not see."
        ]
    return []


def _setups(answer: Answer, section: Section) -> None:
    found = answer.setups
    epochs = answer.scenario.epochs
    rows: list[list[str]] = []

    def row(name: str, show: Callable[[SetupForecast], str]) -> None:
        rows.append([name, *(show(each) for each in found)])

    row("GPUs compute, all epochs", lambda one: percent(one.utilisation))
    row("first epoch", lambda one: percent(one.first_utilisation))
    if epochs > 1:
        row("last epoch", lambda one: percent(one.last_utilisation))
    epoch_s = answer.scenario.dataset_bytes / (answer.scenario.demand_rate * answer.nodes)
    row("the last epoch takes", lambda one: seconds(epoch_s / one.last_utilisation))
    for number in _shown_epochs(epochs):
        row(f"hit rate, epoch {number}", lambda one, at=number: percent(one.reading.epochs[at - 1].hit_rate))  # type: ignore[misc]
    for number in sorted({1, min(2, epochs), epochs}):
        row(f"stall of a step, epoch {number}",
            lambda one, at=number: seconds(one.reading.epochs[at - 1].stall_s))  # type: ignore[misc]  # fmt: skip
    if answer.scenario.checkpoint_bytes:
        row("stall of a step while a save drains", lambda one: seconds(one.reading.stall_while_draining_s))
        row("stall of a save", lambda one: seconds(one.saving.stall_s))
        if any(not one.saving.keeps_up for one in found):
            row("stall of a save once they have piled up", lambda one: seconds(one.saving.piled_up_stall_s))
            row("... after so many saves", lambda one: str(one.saving.piled_up_after or "-"))
        row("until the store has all of it", lambda one: seconds(one.saving.stall_s + one.saving.drain_s))
        row("reading it back, same nodes", lambda one: seconds(one.saving.restore_same_s))
        row("reading it back, other nodes", lambda one: seconds(one.saving.restore_new_s))
        row("training lost on average, job crashed", lambda one: seconds(one.saving.lost_same_s))
        row("training lost on average, node lost", lambda one: seconds(one.saving.lost_new_s))
    section.table(["", *(_TITLES[one.setup] for one in found)], rows)
    if epochs > 1:
        numbers = [float(epoch.number) for epoch in found[0].reading.epochs]
        series = [
            Series(
                _TITLES[one.setup],
                numbers,
                [100 * epoch.hit_rate for epoch in one.reading.epochs],
                "line+points",
            )
            for one in found
        ]
        section.plot(LinePlot("Hit rate of each epoch", Axis("epoch"), Axis("%", low=0, high=100), series))
    if answer.scenario.checkpoint_bytes:
        words = [
            "stall of a save",
            "until the store has all of it",
            "read back, same nodes",
            "read back, other nodes",
        ]
        bars = [
            Bars(
                _TITLES[one.setup],
                [
                    one.saving.piled_up_stall_s,
                    one.saving.stall_s + one.saving.drain_s,
                    one.saving.restore_same_s,
                    one.saving.restore_new_s,
                ],
            )
            for one in found
        ]
        section.plot(BarPlot("One checkpoint", words, bars, Axis("s")))


def _shown_epochs(epochs: int) -> list[int]:
    if epochs <= 6:
        return list(range(1, epochs + 1))
    return sorted({1, 2, 3, epochs // 2, epochs})


def _relief(answer: Answer, section: Section) -> None:
    relief = answer.relief
    section.text += [*_relief_words(answer, relief)]
    if not relief.rounds:
        return
    first = relief.rounds[0]
    before = first.utilisation_before
    rows = [_change_row(change, before) for change in first.tried]
    head = ["one change", "value", "GPUs compute", "gain", "GPUs"]
    if rows:
        section.table(head, rows, "Each change alone")
        section.plot(
            BarPlot(
                "What one change gains",
                [change.words for change in first.tried],
                [Bars("gain", [max(0.0, 100 * (change.utilisation - before)) for change in first.tried])],
                Axis("percentage points of GPU time"),
            )
        )  # fmt: skip
    steps = [_change_row(change, each.utilisation_before) for each in relief.rounds for change in each.relief]
    if steps:
        section.table(head, steps, "Step by step")


def _relief_words(answer: Answer, relief: Relief) -> list[str]:
    known = answer.of(setups.TIERFS)
    if not relief.rounds:
        return [f"Nothing: they compute {percent(known.utilisation)} of the time."]
    lines = []
    if known.utilisation >= relief.goal:
        lines.append(f"The goal of {percent(relief.goal)} is reached as it is.")
    for number, each in enumerate(relief.rounds):
        name = "The first bottleneck" if not number else "The next one"
        if not each.bottleneck:
            lines.append(
                f"{name}: at {percent(each.utilisation_before)} no change that was tried gains anything."
            )
            continue
        words = " together with ".join(each.bottleneck)
        gained = f"{name}: {words}."
        if each.relief:
            last = each.relief[-1]
            before, after = percent(each.utilisation_before), percent(last.utilisation)
            gained += f" {_amount(last, len(each.bottleneck))}: {before} becomes {after}, "
            gained += f"as good as {last.gpus_gained:.1f} more GPUs."
        lines.append(gained)
    if known.utilisation < relief.goal:
        reached = "reached" if relief.reached else "not reached"
        lines.append(f"The goal of {percent(relief.goal)} is {reached} with that.")
    return lines


def _amount(change: Change, together: int) -> str:
    if together > 1:
        return f"With each of them {change.factor:g} times"
    if isinstance(change.value, str):
        return f"With {option(change.field)} {change.value}"
    return f"With {value(change.field, change.value)} ({change.factor:g} times)"


def _change_row(change: Change, before: float) -> list[str]:
    times = "" if isinstance(change.value, str) else f" x {change.factor:g}"
    gain = 100 * (change.utilisation - before)
    return [
        change.words + times,
        value(change.field, change.value),
        percent(change.utilisation),
        f"{gain:+.1f}" if abs(gain) >= 0.05 else "0.0",
        f"{change.gpus_gained:+.1f}" if abs(gain) >= 0.05 else "0.0",
    ]


def _curve(answer: Answer, section: Section) -> None:
    rows, series = [], []
    for point in answer.curve:
        cells = [
            percent(point.utilisation[setup]) if setup in point.utilisation else "-"
            for setup in setups.SETUPS
        ]
        rows.append([str(point.gpus), str(point.nodes), *cells])
    section.table(["GPUs", "nodes", *(_TITLES[setup] for setup in setups.SETUPS)], rows)
    for setup in setups.SETUPS:
        points = [point for point in answer.curve if setup in point.utilisation]
        gpus = [float(point.gpus) for point in points]
        values = [100 * point.utilisation[setup] for point in points]
        series.append(Series(_TITLES[setup], gpus, values, "line+points"))
    section.plot(
        LinePlot(
            "GPUs compute", Axis("GPUs", log=True), Axis("% of the time", low=0, high=102), series,
            marks=[(float(answer.scenario.gpus), "this job")],
        )
    )  # fmt: skip


def _inputs(answer: Answer, section: Section) -> None:
    rows = [
        [option(field), value(field, content), answer.sources.get(field, "assumed")]
        for field, content in msgspec.structs.asdict(answer.scenario).items()
    ]
    section.table(["option", "value", "source"], rows)


def _check(check: Check | None, section: Section) -> None:
    if check is None:
        section.text.append("It has not been compared with a real mount.")
        return
    worst = check.worst()
    section.text.append(
        f"Compared with real mounts on {check.date} ({check.machine}; {check.command}; median of "
        f"{check.rounds} rounds): on average, shares are "
        f"{100 * check.mean_error(shares=True):.0f} points off and times "
        f"{100 * check.mean_error(shares=False):.0f} %"
        + (f", at most {100 * (worst.error or 0):+.0f} % ({worst.job}: {worst.figure})." if worst else ".")
        + " Small jobs on one node, with rates measured just before; this says nothing about the assumptions "
        "above, and little about a thousand GPUs."
    )
    section.text += [f"{name}: {what}" for name, what in check.jobs.items()]
    rows = [
        [found.job, found.figure, shown(found.predicted, found.unit), shown(found.measured, found.unit),
         f"{shown(found.low, found.unit)} to {shown(found.high, found.unit)}",
         found.shown_error]
        for found in check.compared
    ]  # fmt: skip
    section.table(["job", "figure", "predicted", "measured", "rounds", "error"], rows)


def shown(number: float, unit: str) -> str:
    return percent(number) if unit == "share" else seconds(number) if unit == "s" else f"{number:.3g} {unit}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def seconds(duration_s: float) -> str:
    """``12.3 s``, ``123 ms``, ``4.2 min``, ``1.5 h``"""
    if duration_s < 0.00005:
        return "0 s"
    if duration_s < 1:
        return f"{1000 * duration_s:.3g} ms"
    if duration_s < 120:
        return f"{duration_s:.3g} s"
    amount, unit = duration_s / 60, "min"
    if duration_s >= 48 * 3600:
        amount, unit = duration_s / 86400, "days"
    elif duration_s >= 7200:
        amount, unit = duration_s / 3600, "h"
    return f"{amount:.1f}".removesuffix(".0") + f" {unit}"


def size(nbytes: float) -> str:
    """``4.0 GiB``, without a fraction where there is none."""
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if nbytes >= factor:
            number = nbytes / factor
            return f"{number:.0f} {unit}" if number == int(number) else f"{number:.1f} {unit}"
    return f"{nbytes:.0f} B"


def value(field: str, content: float | str) -> str:
    """A value of the scenario, with its unit."""
    if isinstance(content, str):
        return content
    if field.endswith("_rate"):
        return f"{size(content)}/s"
    if field.endswith("_bytes"):
        return size(content)
    if field.endswith("_s") and field != "samples_per_s":
        return seconds(content)
    return f"{content:g}"
