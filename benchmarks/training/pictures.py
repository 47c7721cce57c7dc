"""A run as a report, in text and with plots."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.samples import show
from benchmarks.training.plan import Load
from benchmarks.training.result import MOUNT, PLAIN, TARGETS, TrainingResult
from tierfs.bench.statistics import Summary, summarize
from tierfs.report import Axis, BarPlot, Bars, Report, Section

BEHIND = 1.05
HOW_TO_READ = (
    "Medians over the rounds, with the smallest and the largest value; the ratio is formed pair by pair, and "
    "above 1 the mount is better. Every run begins cold: a new and empty mount, a directory that the kernel "
    "has forgotten."
)


def report(result: TrainingResult, wanted: Sequence[Load]) -> Report:
    made = Report("Training libraries on tierfs and on a directory", facts=_facts(result), text=[HOW_TO_READ])
    for load in wanted:
        _figures(made.section(load.title, *([load.about] if load.about else [])), result, load)
    _behind(made.section("Where the mount is behind the directory"), result, wanted)
    if result.failures:
        rows = [[each.load, each.target, each.reason.splitlines()[0]] for each in result.failures]
        made.section("Failed").table(["load", "target", "why"], rows)
    return made


def _facts(result: TrainingResult) -> list[tuple[str, str]]:
    about = result.machine
    memory = f"{about.memory_bytes / 1024**3:.0f} GiB"
    return [
        ("date", result.started),
        ("machine", f"{about.processor}, {about.cores} cores, {memory}, Linux {about.kernel}"),
        ("load", f"{about.load:.2f} before, {result.load_after:.2f} after (of the last minute)"),
        ("store", result.store),
        ("mount", result.mount),
        ("packages", ", ".join(f"{name} {version}" for name, version in result.packages.items())),
        ("rounds", f"{result.rounds}, in {result.seconds:.0f} s"),
        ("command", result.command),
    ]


def _figures(section: Section, result: TrainingResult, load: Load) -> None:
    rows = []
    for figure in load.figures:
        times = result.times(load, figure)
        values = [_shown(result.summary(load, figure, target)) for target in TARGETS]
        rows.append([figure.title, figure.unit, *values, f"{times.median:.2f}" if times else "-"])
    section.table(["", "unit", PLAIN, MOUNT, "mount x plain"], rows)
    if used := summarize(result.daemon_s.get(load.name, [])):
        section.text.append(f"CPU of the mount's processes: {used.median:.1f} s per run.")
    for unit in dict.fromkeys(figure.unit for figure in load.figures):
        figures = [figure for figure in load.figures if figure.unit == unit]
        bars = []
        for target in TARGETS:
            found = [result.summary(load, figure, target) for figure in figures]
            bars.append(Bars(target, [each.median if each else None for each in found]))
        section.plot(BarPlot(f"{load.title}, {unit}", [each.title for each in figures], bars, Axis(unit)))


def _behind(section: Section, result: TrainingResult, wanted: Sequence[Load]) -> None:
    rows = []
    for load in wanted:
        for figure in load.figures:
            times = result.times(load, figure)
            if times and times.median < 1 / BEHIND:
                rows.append((times.median, [load.title, figure.title, f"{times.median:.2f}"]))
    if rows:
        section.table(["load", "what", "mount x plain"], [row for _, row in sorted(rows)])
    else:
        section.text.append("Nowhere in this run, by more than 5 %.")


def _shown(found: Summary | None) -> str:
    return f"{show(found.median)} [{show(found.low)}-{show(found.high)}]" if found else "-"
