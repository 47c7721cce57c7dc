"""The numbers of a run, and what follows from them. As JSON it is public like that of ``tierfs bench``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from benchmarks.compare.measures import METRICS, Done, Metric
from benchmarks.compare.peers import PLAIN, TIERFS
from tierfs.bench.result import Machine
from tierfs.bench.statistics import Summary, ratio, summarize

FORMAT = "tierfs-compare"
VERSION = 1
GIB = 1024**3
BEHIND = 1.05
"""By how much a peer has to be better for tierfs to be called behind."""


class Value(msgspec.Struct, kw_only=True):
    """One metric of one peer in one round.

    ``cpu_s``: CPU seconds by role: ``daemon`` (all its processes), ``metadata`` (a server of its own),
    ``server`` (the store), ``proxy``, ``machine`` (all together). ``resident_bytes``: after it.
    """

    network: str
    metric: str
    peer: str
    round: int
    value: float
    done: Done
    cpu_s: dict[str, float] = {}
    resident_bytes: int = 0

    @property
    def daemon_s(self) -> float:
        return self.cpu_s.get("daemon", 0.0) + self.cpu_s.get("metadata", 0.0)


class Failure(msgspec.Struct, kw_only=True):
    network: str
    peer: str
    what: str
    round: int
    reason: str


class PeerAbout(msgspec.Struct, kw_only=True):
    """``peak_bytes``: resident at most, the sum of its processes. ``left_out``: why it did not run at all."""

    name: str
    version: str = ""
    command: str = ""
    left_out: str = ""
    peak_bytes: int = 0


class Network(msgspec.Struct, kw_only=True):
    """``delay_ms`` and ``rate_mib``: what the proxy adds, per connection; both 0: there is none."""

    name: str
    delay_ms: float = 0.0
    rate_mib: float = 0.0
    rounds: int = 0

    def described(self) -> str:
        if not self.delay_ms and not self.rate_mib:
            return "loopback, unshaped"
        rate = f", {self.rate_mib:g} MiB/s per connection" if self.rate_mib else ""
        return f"through a proxy: {self.delay_ms:g} ms per round trip{rate}"


class CompareResult(msgspec.Struct, kw_only=True):
    format: str = FORMAT
    version: int = VERSION
    started: str
    seconds: float = 0.0
    command: str
    machine: Machine
    load_after: float = 0.0
    server: str
    server_command: str
    scale: str
    cold: str = ""
    networks: list[Network] = []
    peers: list[PeerAbout] = []
    values: list[Value] = []
    failures: list[Failure] = []
    notes: list[str] = []

    def running(self) -> list[str]:
        """Names of the peers that were measured, in the order of the report."""
        return [peer.name for peer in self.peers if not peer.left_out]

    def of(self, network: str, metric: str, peer: str) -> list[Value]:
        return [
            value
            for value in self.values
            if value.network == network and value.metric == metric and value.peer == peer
        ]

    def metrics(self, network: str) -> list[Metric]:
        """Those that anybody has a value of."""
        found = {value.metric for value in self.values if value.network == network}
        return [metric for metric in METRICS if metric.key in found]


@dataclass(frozen=True, slots=True)
class Cell:
    """One peer in one metric: its values, and how many times as good as two others it is, pair by pair."""

    summary: Summary
    to_plain: Summary | None
    to_tierfs: Summary | None
    daemon_cpu: float | None
    """CPU seconds of its daemons per unit of the metric; the median."""
    p50_us: float
    p99_us: float


def cell(result: CompareResult, network: str, metric: Metric, peer: str) -> Cell | None:
    """None if it was not measured."""
    values = result.of(network, metric.key, peer)
    summary = summarize([value.value for value in values])
    if summary is None:
        return None
    cpu = summarize([each for value in values if (each := daemon_cpu(metric, value)) is not None])
    return Cell(
        summary,
        pairwise(values, result.of(network, metric.key, PLAIN), metric),
        pairwise(values, result.of(network, metric.key, TIERFS), metric),
        cpu.median if cpu else None,
        statistics.median(value.done.p50_us for value in values),
        statistics.median(value.done.p99_us for value in values),
    )


def pairwise(mine: Iterable[Value], others: Iterable[Value], metric: Metric) -> Summary | None:
    """Ratios of the rounds that both have: how many times as good ``mine`` is."""
    by_round = {value.round: value.value for value in others}
    pairs = [(value.value, by_round[value.round]) for value in mine if value.round in by_round]
    return ratio([a for a, _ in pairs], [b for _, b in pairs], higher_is_better=metric.higher_is_better)


def daemon_cpu(metric: Metric, value: Value) -> float | None:
    """CPU seconds of a peer's daemons per GiB, per 1,000 operations, or in all. None if nothing was moved."""
    if metric.per == "GiB":
        return value.daemon_s * GIB / value.done.bytes if value.done.bytes else None
    if metric.per == "1,000":
        return value.daemon_s * 1000 / value.done.operations if value.done.operations else None
    return value.daemon_s


@dataclass(frozen=True, slots=True)
class Behind:
    """Where a peer is better than tierfs. ``factor``: how many times; ``certain``: in every pair of runs."""

    network: str
    metric: Metric
    peer: str
    factor: float
    certain: bool
    tierfs: float
    theirs: float
    of: str = ""
    """Empty: the metric itself. ``CPU``: what the daemons used for it."""


CPU_FLOOR = {"GiB": 0.05, "1,000": 0.02, "mount": 0.1}
"""Less than this, in seconds, is lost in the grain of the kernel's accounting: no comparison."""


def behind(result: CompareResult) -> list[Behind]:
    """Every metric and every peer by which tierfs is beaten, but the plain directory; the worst first."""
    found = []
    for network in result.networks:
        for metric in result.metrics(network.name):
            own = cell(result, network.name, metric, TIERFS)
            if own is None:
                continue
            for peer in result.running():
                if peer in (PLAIN, TIERFS):
                    continue
                other = cell(result, network.name, metric, peer)
                if other is None or other.to_tierfs is None:
                    continue
                if other.to_tierfs.median > BEHIND:
                    found.append(
                        Behind(
                            network.name, metric, peer, other.to_tierfs.median, other.to_tierfs.low > 1,
                            own.summary.median, other.summary.median,
                        )
                    )  # fmt: skip
                if worse := _more_cpu(network.name, metric, peer, own, other):
                    found.append(worse)
    return sorted(found, key=lambda each: -each.factor)


def _more_cpu(network: str, metric: Metric, peer: str, own: Cell, other: Cell) -> Behind | None:
    if own.daemon_cpu is None or other.daemon_cpu is None:
        return None
    floor = CPU_FLOOR[metric.per]
    if own.daemon_cpu <= floor or own.daemon_cpu <= BEHIND * other.daemon_cpu:
        return None
    factor = own.daemon_cpu / max(other.daemon_cpu, floor)
    return Behind(network, metric, peer, factor, False, own.daemon_cpu, other.daemon_cpu, of="CPU")


def best_peer(result: CompareResult, network: str, metric: Metric) -> tuple[str, Cell] | None:
    """The best of all that are neither the plain directory nor tierfs itself, by median."""
    cells = [
        (peer, found)
        for peer in result.running()
        if not peer.startswith((PLAIN, TIERFS)) and (found := cell(result, network, metric, peer))
    ]
    if not cells:
        return None
    pick: Callable[..., tuple[str, Cell]] = max if metric.higher_is_better else min
    return pick(cells, key=lambda item: item[1].summary.median)


def encode(result: CompareResult) -> bytes:
    return msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n"


def decode(data: bytes) -> CompareResult:
    return msgspec.json.decode(data, type=CompareResult)
