"""Rates and latencies from reports of ``tierfs bench --json``.

A report is of one target, from one node. A store tells what one connection carries, how long it takes to
answer, and what one node gets at most (which counts as the network of the node; what all nodes get together
it cannot know). A local directory stands for the NVMe, a directory on NFS for the NFS server as one client
sees it, a mount of tierfs for what a mount fetches and how fast it answers.

Only what is needed is decoded; the format is public, and fields are only ever added to it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from tierfs.errors import ConfigError

_FORMAT, _VERSION = "tierfs-bench", 1
_SMALL_BLOCK_BYTES = 4096
_PAST_CACHES = frozenset({"direct", "io_uring"})
Parameter = str | int | float | bool


class _Histogram(msgspec.Struct):
    count: int = 0
    buckets: dict[str, int] = {}

    def quantile_s(self, share: float) -> float:
        """The lower end of the bucket in which that share is reached."""
        seen = 0
        for low_ns, count in sorted((int(low), count) for low, count in self.buckets.items()):
            seen += count
            if seen >= share * self.count:
                return low_ns / 1e9
        return 0.0


class _Measurement(msgspec.Struct):
    workload: str
    parameters: dict[str, Parameter] = {}
    bytes: int = 0
    seconds: float = 0.0
    latency: _Histogram | None = None

    @property
    def rate(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0


class _Target(msgspec.Struct):
    name: str
    kind: str
    file_system: str = ""


class _Report(msgspec.Struct):
    target: _Target
    format: str = ""
    version: int = 0
    measurements: list[_Measurement] = []

    def of(self, workload: str, **parameters: Parameter) -> Iterator[_Measurement]:
        for found in self.measurements:
            if found.workload == workload and all(
                found.parameters.get(name) == value for name, value in parameters.items()
            ):
                yield found


def read_reports(paths: Iterable[str]) -> dict[str, float]:
    """Fields of a scenario and their values. Raises ``ConfigError`` that names the file."""
    values: dict[str, float] = {}
    for path in paths:
        found = _values(_read(path))
        if not found:
            raise ConfigError(f"--bench: {path} holds nothing that the planner can use")
        values |= found
    return values


def _read(path: str) -> _Report:
    try:
        report = msgspec.json.decode(Path(path).read_bytes(), type=_Report)
    except OSError as error:
        raise ConfigError(f"--bench: cannot read {os.fspath(path)}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"--bench: {path} was not written by 'tierfs bench --json': {error}") from error
    if report.format != _FORMAT or report.version != _VERSION:
        raise ConfigError(f"--bench: {path} is not version {_VERSION} of what 'tierfs bench --json' writes")
    return report


def _values(report: _Report) -> dict[str, float]:
    kind = report.target.kind
    if kind == "store":
        found = _of_store(report)
    elif kind == "tierfs":
        found = _of_mount(report)
    elif "nfs" in report.target.file_system.lower():
        found = _of_nfs(report)
    else:
        found = _of_disk(report)
    return {field: value for field, value in found.items() if value > 0}


def _of_store(report: _Report) -> dict[str, float]:
    alone = _fastest(report.of("sequential-read", workers=1))
    latency = [each.latency for each in report.of("random-read", block_bytes=_SMALL_BLOCK_BYTES, workers=1)]
    histogram = next((each for each in latency if each is not None and each.count), None)
    return {
        "store_stream_rate": alone,
        "network_rate": _fastest(report.of("sequential-read")),
        "store_latency_s": histogram.quantile_s(0.5) if histogram else 0.0,
        "store_latency_p99_s": histogram.quantile_s(0.99) if histogram else 0.0,
    }


def _of_mount(report: _Report) -> dict[str, float]:
    saves = [each for each in report.of("checkpoint") if each.parameters.get("until") == "close"]
    warm = [each.latency for each in report.of("small-files", state="warm", workers=1)]
    histogram = next((each for each in warm if each is not None and each.count), None)
    return {
        "mount_rate": _fastest(report.of("sequential-read", state="cold")),
        "mount_write_rate": _fastest(saves),
        "local_latency_s": histogram.quantile_s(0.5) if histogram else 0.0,
    }


def _of_nfs(report: _Report) -> dict[str, float]:
    reads = report.of("sequential-read", state="cold")
    return {"nfs_stream_rate": _fastest(reads), "nfs_latency_s": _direct_latency_s(report)}


def _of_disk(report: _Report) -> dict[str, float]:
    reads = [each for each in report.of("sequential-read") if each.parameters.get("way") in _PAST_CACHES]
    saves = [each for each in report.of("checkpoint") if each.parameters.get("until") == "close"]
    return {"nvme_read_rate": _fastest(reads), "nvme_write_rate": _fastest(saves)}


def _direct_latency_s(report: _Report) -> float:
    for each in report.of("random-read", block_bytes=_SMALL_BLOCK_BYTES, way="direct"):
        if each.latency is not None and each.latency.count:
            return each.latency.quantile_s(0.5)
    return 0.0


def _fastest(found: Iterable[_Measurement]) -> float:
    return max((each.rate for each in found), default=0.0)
