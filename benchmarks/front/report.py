"""The table and the plots of a run, as text and as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.front.costs import PROCESSES, Cost
from benchmarks.front.entries import Size
from benchmarks.front.lines import HEAD, MOUNT, PLAIN, Lines
from benchmarks.front.transport import DEVICE, RING
from benchmarks.samples import Metric, show
from tierfs.bench.histogram import Histogram
from tierfs.report import Axis, BarPlot, Bars, LinePlot, Report, Series, tail

MEANING = (
    "mount: through the native front, data in the tier. plain: the same bytes in a directory of the same "
    "disk, opened directly. Both are measured right after each other in every round, in an order that "
    "turns around; a figure is the median of the rounds with the smallest and the largest, and 'x plain' the "
    "median of the ratios of the rounds, above 1 where the mount is better. dropped: the kernel has "
    "forgotten data, dentries and inodes of everybody. hot: all was read once since. Loops are of Python, "
    "except where fio is named; both sides pay for that alike. null daemon: the same through a FUSE daemon "
    "in C that answers everything at once, from memory, with zeros for bytes (benchmarks/front/null.py): no "
    "file system that the kernel asks can do better on this machine; 'x null' is the mount's share of that."
)


@dataclass(slots=True)
class Findings:
    """Everything that a run found."""

    lines: Lines = field(default_factory=Lines)
    latencies: list[tuple[str, Histogram]] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    transport: list[Metric] = field(default_factory=list)
    sizes: list[Size] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """What cannot be measured here, and why."""


def report_of(found: Findings, facts: Sequence[tuple[str, str]]) -> Report:
    report = Report("The native front against a plain directory", list(facts), [MEANING])
    _table(report, found.lines)
    _ratios(report, found.lines)
    _latencies(report, found.latencies)
    _costs(report, found.costs)
    _sizes(report, found.sizes)
    _transport(report, found.transport)
    missing = [*found.lines.failures, *found.skipped]
    if missing:
        report.section("Not measured", *missing)
    return report


def _table(report: Report, lines: Lines) -> None:
    for name, those in lines.sections():
        notes = dict.fromkeys(f"{line.metric.name}: {line.note}." for line in those if line.note)
        section = report.section(name, *notes)
        section.table(HEAD, [line.cells() for line in those])


def _ratios(report: Report, lines: Lines) -> None:
    compared = [line for line in lines.every if line.metric.ratio(MOUNT, PLAIN) is not None]
    if not compared:
        return
    wanted = [
        line.wanted.value if line.wanted is not None and not line.wanted.absolute else None
        for line in compared
    ]
    report.section("Ratios").plot(
        BarPlot(
            "Mount to plain directory: above 1 the mount is better",
            [f"{line.metric.name}" for line in compared],
            [
                Bars("reached", [line.metric.ratio(MOUNT, PLAIN) for line in compared]),
                Bars("wanted", wanted),
            ],
            Axis("times as good as the plain directory", low=0.0),
        )
    )


def _latencies(report: Report, latencies: Sequence[tuple[str, Histogram]]) -> None:
    series = [
        tail(name, [(middle / 1000, count) for middle, count in histogram.pairs()])
        for name, histogram in latencies
    ]
    if series:
        report.section("Latency of hits while misses hang").plot(
            LinePlot(
                "Open, read and close a local file",
                Axis("us", log=True),
                Axis("share of files that took longer", log=True),
                series,
            )
        )


def _costs(report: Report, costs: Sequence[Cost]) -> None:
    if not costs:
        return
    names = list(dict.fromkeys(cost.operation for cost in costs))
    by_key = {(cost.operation, cost.target, cost.processes): cost for cost in costs}
    section = report.section(
        "Cost of an operation",
        "Processor time per operation with one process: of the loop, system calls included, and of front and "
        "engine. A system call that waits for a daemon costs nothing while it waits, so that the time that "
        "passes is shown as well.",
    )
    ones = [(name, by_key[name, PLAIN, 1], by_key[name, MOUNT, 1]) for name in names]
    section.table(
        ["us", "plain: loop", "mount: loop", "mount: front and engine", "plain: passes", "mount: passes"],
        [
            [
                name,
                show(plain.loop_us),
                show(mount.loop_us),
                show(mount.daemons_us),
                show(1e6 / plain.per_s),
                show(1e6 / mount.per_s),
            ]
            for name, plain, mount in ones
        ],
    )
    section.plot(
        BarPlot(
            "Processor time of an operation, one process",
            names,
            [
                Bars("plain: loop", [plain.loop_us for _, plain, _ in ones]),
                Bars("mount: loop", [mount.loop_us for _, _, mount in ones]),
                Bars("mount: front and engine", [mount.daemons_us for _, _, mount in ones]),
            ],
            Axis("us per operation", log=True),
        )
    )
    section = report.section("One to four processes")
    rows = [
        [f"{name}, {target}", *(show(by_key[name, target, n].per_s) for n in PROCESSES)]
        for name in names
        for target in (PLAIN, MOUNT)
    ]
    section.table(["operations per second", *(str(n) for n in PROCESSES)], rows)
    for name in names:
        section.plot(
            LinePlot(
                name,
                Axis("processes", low=0.5, high=PROCESSES[-1] + 0.5),
                Axis("operations per second", low=0.0),
                [
                    Series(
                        target,
                        PROCESSES,
                        [by_key[name, target, n].per_s for n in PROCESSES],
                        style="line+points",
                    )
                    for target in (PLAIN, MOUNT)
                ],
            )
        )


def _sizes(report: Report, sizes: Sequence[Size]) -> None:
    if not sizes:
        return
    section = report.section(
        "Entries in the namespace",
        "Files without bytes in directories of a thousand, written into the database before the mount. "
        "Names are asked for at random, each for the first time.",
    )
    section.table(
        ["entries", "database MiB", "mount ready s", "stat 1/s", "list and stat 1/s", "create 1/s"],
        [
            [
                f"{size.entries:,}",
                show(size.database_bytes / 1048576),
                show(size.ready_s),
                show(size.stat_per_s),
                show(size.list_per_s),
                show(size.create_per_s),
            ]
            for size in sizes
        ],
    )
    if len(sizes) < 2:
        return
    counts = [size.entries for size in sizes]
    section.plot(
        LinePlot(
            "Operations per second, one process",
            Axis("entries in the namespace", log=True),
            Axis("operations per second", log=True),
            [
                Series("stat of a name", counts, [size.stat_per_s for size in sizes], style="line+points"),
                Series(
                    "list and stat an entry", counts, [size.list_per_s for size in sizes], style="line+points"
                ),
                Series("create", counts, [size.create_per_s for size in sizes], style="line+points"),
            ],
        )
    )


def _transport(report: Report, metrics: Sequence[Metric]) -> None:
    if not metrics:
        return
    section = report.section(
        "Requests through io_uring",
        "Two mounts that differ in --fuse-uring alone. What the lines mean: benchmarks/front/transport.py.",
    )
    rows = []
    for metric in metrics:
        ratio, ring, device = metric.ratio(RING, DEVICE), metric.median(RING), metric.median(DEVICE)
        rows.append(
            [
                metric.name.strip(),
                metric.unit,
                *(show(value) if value is not None else "-" for value in (ring, device)),
                f"{ratio:.2f}" if ratio is not None else "-",
            ]
        )
    section.table(["", "unit", RING, DEVICE, "times as good"], rows)
