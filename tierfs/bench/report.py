"""A result as a report: one table of everything, then for each load its distributions and its course."""

from __future__ import annotations

from collections.abc import Sequence

from tierfs.bench.result import GIB, BenchResult, Measurement
from tierfs.bench.workloads import ALL
from tierfs.report import Axis, BarPlot, Bars, LinePlot, Report, Section, Series, tail

MIB = 1024**2
MIN_SLOTS = 5
"""A course of fewer slots of time shows nothing."""
MAX_SERIES = 12
ROLES = ("bench", "engine", "front")
HEAD = ("load", "variant", "MiB/s", "per second", "p50", "p99", "p99.9", "worst", "CPU s per GiB")


def report_of(result: BenchResult, *, plots: bool = True) -> Report:
    """``plots`` False: the tables alone, for a terminal."""
    report = Report(f"tierfs bench: {result.target.name}", facts=facts(result))
    if result.cold:
        report.text.append(f"Cold {'' if result.cold.startswith('does') else 'is what is '}{result.cold}")
    summary = report.section("Results")
    summary.table(HEAD, [_row(found, with_load=True) for found in result.measurements])
    summary.text.append(
        "Times are of single operations (see below); CPU seconds are those of the measuring processes, "
        "system calls included, and of the mount's own processes where it is a tierfs mount."
    )
    if result.loop_cost_ns:
        summary.text.append(
            f"Loops other than fio add {duration(result.loop_cost_ns)} of their own to each operation."
        )
    if plots:
        _cpu(summary, result.measurements)
        for workload in ALL:
            found = [one for one in result.measurements if one.workload == workload.name]
            if found:
                _section(report, workload.name, workload.what, found)
    if result.skipped:
        left_out = report.section("Not measured")
        left_out.table(
            ["load", "variant", "", "why"],
            [
                [one.workload, one.variant or "all of it", "failed" if one.failed else "", _first(one.reason)]
                for one in result.skipped
            ],
        )
    if result.notes:
        report.section("Notes", *result.notes)
    return report


def facts(result: BenchResult) -> list[tuple[str, str]]:
    machine = result.machine
    found = [
        ("target", f"{result.target.name} ({result.target.kind})"),
        ("file system", result.target.file_system),
        *result.target.details.items(),
        ("started", result.started),
        ("took", f"{result.seconds:.0f} s"),
        ("command", result.command),
        (
            "machine",
            f"{machine.processor}, {machine.cores} cores, {machine.memory_bytes / GIB:.0f} GiB, "
            f"Linux {machine.kernel}, {machine.system}, load before {machine.load:.2f}",
        ),
        ("versions", ", ".join(f"{name} {version}" for name, version in result.versions.items())),
        ("options", ", ".join(f"{name} {value}" for name, value in result.options.items())),
    ]
    return [(name, value) for name, value in found if value]


def duration(nanoseconds: float) -> str:
    """``850 ns``, ``12.3 us``, ``4.56 ms``, ``1.20 s``"""
    for limit, unit in ((1e3, "ns"), (1e6, "us"), (1e9, "ms")):
        if nanoseconds < limit:
            return f"{_three(nanoseconds / limit * 1e3)} {unit}"
    return f"{_three(nanoseconds / 1e9)} s"


def _three(value: float) -> str:
    """Three digits that mean something."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _row(found: Measurement, *, with_load: bool) -> list[str]:
    latency = found.latency
    times = ["-"] * 4
    if latency is not None and latency.count:
        times = [duration(latency.quantile_ns(share)) for share in (0.5, 0.99, 0.999)]
        times.append(duration(latency.max_ns))
    spent = [found.cpu_s_per_gib(who) for who in ROLES]
    cost = " + ".join(
        f"{_three(seconds)} {who}" for who, seconds in zip(ROLES, spent, strict=True) if seconds is not None
    )
    variant = f"{found.variant} *" if found.notes else found.variant
    rate = _three(found.bytes_per_s / MIB) if found.bytes else "-"
    row = [variant, rate, _three(found.operations_per_s), *times, cost or "-"]
    return [found.workload, *row] if with_load else row


def _section(report: Report, name: str, what: str, found: Sequence[Measurement]) -> None:
    section = report.section(name, what)
    operations = list(dict.fromkeys(one.operation for one in found if one.operation))
    section.text.append(f"One operation: {'; '.join(operations)}.")
    section.table(HEAD[1:], [_row(one, with_load=False) for one in found])
    notes = {note for one in found for note in one.notes}
    if notes:
        section.text.append(f"* {'; '.join(sorted(notes))}")
    timed = [one for one in found if one.latency is not None and one.latency.count > 1]
    for start in range(0, len(timed), MAX_SERIES):
        _latencies(section, name, timed[start : start + MAX_SERIES])
    course = [one for one in found if one.timeline is not None and len(one.timeline.amounts) >= MIN_SLOTS]
    for start in range(0, len(course), MAX_SERIES):
        _course(section, name, course[start : start + MAX_SERIES])


def _latencies(section: Section, name: str, found: Sequence[Measurement]) -> None:
    curves = []
    for one in found:
        assert one.latency is not None
        curves.append(tail(one.variant, ((middle / 1000, count) for middle, count in one.latency.pairs())))
    section.plot(
        LinePlot(
            f"{name}: how long operations took",
            Axis("microseconds", log=True),
            Axis("share of operations that took at least as long", log=True, high=1.2),
            curves,
            "Further left is better. The median is where a line crosses 0.5, p99 at 0.01, p99.9 at 0.001.",
        )
    )


def _course(section: Section, name: str, found: Sequence[Measurement]) -> None:
    by_bytes = all(one.bytes for one in found)
    lines = []
    for one in found:
        assert one.timeline is not None
        slot_s = one.timeline.slot_s
        # The last slot is not full: it would show as a fall.
        amounts = one.timeline.amounts[:-1]
        scale = slot_s * (MIB if by_bytes else 1)
        lines.append(
            Series(
                one.variant,
                [(slot + 0.5) * slot_s for slot in range(len(amounts))],
                [amount / scale for amount in amounts],
            )
        )
    section.plot(
        LinePlot(
            f"{name}: throughput over time",
            Axis("seconds from the start", low=0),
            Axis("MiB/s" if by_bytes else "operations per second", low=0),
            lines,
        )
    )


def _cpu(section: Section, found: Sequence[Measurement]) -> None:
    """CPU per GiB of whatever moved enough data for clock ticks to count."""
    shown = [one for one in found if one.bytes >= 8 * MIB and one.cpu_s]
    if not shown:
        return
    present = [who for who in ROLES if any(who in one.cpu_s for one in shown)]
    section.plot(
        BarPlot(
            "CPU seconds per GiB",
            [f"{one.workload}: {one.variant}" for one in shown],
            [Bars(who, [one.cpu_s_per_gib(who) for one in shown]) for who in present],
            Axis("CPU seconds per GiB", log=True),
            "bench: the measuring processes with their system calls. Loads of less than 8 MiB are left out, "
            "and so is what kernel threads spend.",
        )
    )


def _first(reason: str) -> str:
    """A traceback's last line, which says most; else all of it."""
    lines = [line for line in reason.strip().splitlines() if line.strip()]
    if not lines:
        return ""
    return lines[-1] if lines[0].startswith("Traceback") else lines[0]
