"""A run as a report: tables for a terminal, and the same with plots for a browser."""

from __future__ import annotations

from benchmarks.compare.measures import Metric
from benchmarks.compare.peers import PLAIN, TIERFS
from benchmarks.compare.result import Behind, Cell, CompareResult, Network, behind, best_peer, cell
from benchmarks.samples import show
from tierfs.bench.statistics import Summary
from tierfs.report import Axis, BarPlot, Bars, Report, Section

MIB = 1024 * 1024
HOW_TO_READ = (
    "Each cell is the median over the rounds, with the smallest and the largest value in brackets; then how "
    "many times as good as the plain directory (x plain) and as tierfs (x tierfs) it is. Ratios are formed "
    "between values of one round, and are the medians of these; above 1 is better, also where less is better."
)
ABOUT_BEHIND = (
    "Every measurement in which a peer did more than 5 % better than tierfs with the native front, the worst "
    "first. 'all pairs': in every single round; else in the median only. CPU: seconds of the daemons for the "
    "same work, of those that are large enough to be told apart."
)
ABOUT_CPU = (
    "Seconds of all processes of a peer, its metadata server included, per GiB moved or per 1,000 "
    "operations; medians. The store's own CPU is not in it, and neither is the kernel's work for the reader."
)


def report(result: CompareResult) -> Report:
    made = Report(
        "tierfs and its peers", facts=_facts(result), text=[HOW_TO_READ, result.cold, *result.notes]
    )
    _overview(made.section("At a glance"), result)
    for network in result.networks:
        _figures(made.section(f"Figures, {network.name} store", network.described()), result, network)
    _behind(made.section("Where tierfs is behind"), behind(result))
    _cpu(made, result)
    _memory(made.section("Memory"), result)
    _left_out(made.section("Left out, and failed"), result)
    _options(made.section("Versions and options"), result)
    return made


def _facts(result: CompareResult) -> list[tuple[str, str]]:
    about = result.machine
    rounds = ", ".join(f"{network.rounds} {network.name}" for network in result.networks)
    return [
        ("date", result.started),
        (
            "machine",
            f"{about.processor}, {about.cores} cores, {about.memory_bytes / 1024**3:.0f} GiB, "
            f"Linux {about.kernel}",
        ),
        ("load", f"{about.load:.2f} before, {result.load_after:.2f} after (of the last minute)"),
        ("store", f"{result.server} on this machine"),
        ("data", result.scale),
        ("rounds", f"{rounds}; {result.seconds:.0f} s in all"),
        ("command", result.command),
    ]


def _overview(section: Section, result: CompareResult) -> None:
    """tierfs between the limit and the best of the others, metric by metric."""
    rows = []
    for network in result.networks:
        for metric in result.metrics(network.name):
            own = cell(result, network.name, metric, TIERFS)
            plain = cell(result, network.name, metric, PLAIN)
            best = best_peer(result, network.name, metric)
            rows.append(
                [
                    network.name, metric.title, metric.unit,
                    show(plain.summary.median) if plain else "-",
                    with_spread(own.summary) if own else "-",
                    _times(own.to_plain) if own else "-",
                    f"{best[0]} {show(best[1].summary.median)}" if best else "-",
                    _times(_inverse(best[1].to_tierfs)) if best else "-",
                ]
            )  # fmt: skip
    head = ["store", "what", "unit", "plain", TIERFS, "x plain", "best peer", "x best peer"]
    section.table(head, rows)


def _inverse(summary: Summary | None) -> Summary | None:
    """Of ratios: how many times as good tierfs is."""
    if summary is None:
        return None
    return Summary(1 / summary.median, 1 / summary.high, 1 / summary.low, summary.count)


def _figures(section: Section, result: CompareResult, network: Network) -> None:
    for metric in result.metrics(network.name):
        rows = []
        for peer in result.running():
            found = cell(result, network.name, metric, peer)
            rows.append([peer, *_row(metric, found)])
        better = "more is better" if metric.higher_is_better else "less is better"
        section.table(
            ["", f"{metric.unit}", "x plain", "x tierfs", "p50 us", "p99 us"], rows,
            caption=f"{metric.title} ({metric.unit}, {better})",
        )  # fmt: skip
    for metric in result.metrics(network.name):
        section.plot(_bars(result, network, metric))


def _row(metric: Metric, found: Cell | None) -> list[str]:
    if found is None:
        return ["-"] * 5
    return [
        with_spread(found.summary),
        _times(found.to_plain),
        _times(found.to_tierfs),
        show(found.p50_us) if found.p50_us and metric.per == "1,000" else "-",
        show(found.p99_us) if found.p99_us and metric.per == "1,000" else "-",
    ]


def with_spread(summary: Summary) -> str:
    return f"{show(summary.median)} [{show(summary.low)}-{show(summary.high)}]"


def _times(summary: Summary | None) -> str:
    return f"{summary.median:.2f}" if summary else "-"


def _bars(result: CompareResult, network: Network, metric: Metric) -> BarPlot:
    names = [peer for peer in result.running() if result.of(network.name, metric.key, peer)]
    cells = [cell(result, network.name, metric, peer) for peer in names]
    bars = Bars(
        metric.unit,
        [found.summary.median if found else None for found in cells],
        [found.summary.low if found else None for found in cells],
        [found.summary.high if found else None for found in cells],
    )
    better = "more is better" if metric.higher_is_better else "less is better"
    return BarPlot(f"{metric.title}, {network.name} store", names, [bars], Axis(f"{metric.unit} ({better})"))


def _behind(section: Section, found: list[Behind]) -> None:
    if not found:
        section.text.append("Nowhere in this run, by more than 5 %.")
        return
    section.text.append(ABOUT_BEHIND)
    rows = [
        [
            each.network, each.metric.title, each.of or each.metric.unit, each.peer, f"{each.factor:.2f}",
            show(each.tierfs), show(each.theirs), "all pairs" if each.certain else "median",
        ]
        for each in found
    ]  # fmt: skip
    section.table(["store", "what", "of", "peer", "times better", TIERFS, "peer's", "holds in"], rows)


def _cpu(made: Report, result: CompareResult) -> None:
    section = made.section("CPU of the daemons", ABOUT_CPU)
    for network in result.networks:
        metrics = result.metrics(network.name)
        rows = []
        for peer in result.running():
            if peer == PLAIN:
                continue
            row = [peer]
            for metric in metrics:
                found = cell(result, network.name, metric, peer)
                row.append(f"{found.daemon_cpu:.2f}" if found and found.daemon_cpu is not None else "-")
            rows.append(row)
        head = ["", *(f"{metric.key}/{metric.per}" for metric in metrics)]
        section.table(head, rows, caption=f"CPU seconds, {network.name} store")
        if used := _proxy_share(result, network):
            section.text.append(used)


def _proxy_share(result: CompareResult, network: Network) -> str:
    """Whether the proxy was the limit of what came through it."""
    busiest = max(
        (
            value.cpu_s.get("proxy", 0.0) / value.done.seconds
            for value in result.values
            if value.network == network.name and value.done.seconds > 0.2
        ),
        default=0.0,
    )
    if busiest <= 0:
        return ""
    return f"The proxy of the {network.name} store used at most {busiest:.2f} cores during a measurement."


def _memory(section: Section, result: CompareResult) -> None:
    rows = []
    for about in result.peers:
        if about.left_out or about.name == PLAIN:
            continue
        values = [value.resident_bytes for value in result.values if value.peer == about.name]
        largest = f"{max(values, default=0) / MIB:,.0f}"
        rows.append([about.name, largest, f"{about.peak_bytes / MIB:,.0f}"])
    section.table(
        ["", "after a measurement, at most", "peak"],
        rows,
        caption="Resident memory of all its processes, MiB",
    )


def _left_out(section: Section, result: CompareResult) -> None:
    left_out = [[about.name, "not run", about.left_out] for about in result.peers if about.left_out]
    failed = [
        [
            each.peer,
            f"{each.what}, {each.network}, round {each.round % 100 + 1}",
            each.reason.strip().splitlines()[0],
        ]
        for each in result.failures
    ]
    if left_out or failed:
        section.table(["", "what", "why"], left_out + failed)
    else:
        section.text.append("Nothing.")


def _options(section: Section, result: CompareResult) -> None:
    rows = [[about.name, about.version, about.command] for about in result.peers if not about.left_out]
    rows.append([result.server, "the store", result.server_command])
    section.table(["", "version", "command (near store)"], rows)
