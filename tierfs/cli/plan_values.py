"""What was written after the options of ``tierfs plan``, as values of a scenario."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tierfs.config import values
from tierfs.errors import ConfigError

_BITS = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]?)bit(?:/s)?\s*$", re.IGNORECASE)
_COUNT = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMBT]?)\s*$", re.IGNORECASE)
_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def rate(value: str) -> float:
    """Bytes per second: ``10G``, ``10G/s``; or bits, in powers of 1000, as networks are sold: ``100Gbit``."""
    match = _BITS.match(value)
    if match is not None:
        return float(match[1]) * _DECIMAL[match[2].upper()] / 8
    try:
        return float(values.size_bytes(value.strip().removesuffix("/s")))
    except ValueError:
        raise ValueError(f"{value!r} is not a rate; write for example 500M, 10G/s or 100Gbit") from None


def count(value: str) -> float:
    """``100B``: 100 billion."""
    match = _COUNT.match(value)
    if match is None:
        raise ValueError(f"{value!r} is not a number; write for example 7B or 100B")
    return float(match[1]) * _DECIMAL[match[2].upper()]


OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "dataset": ("dataset_bytes", values.size_bytes),
    "sample_size": ("sample_bytes", values.size_bytes),
    "shard_size": ("shard_bytes", values.size_bytes),
    "checkpoint": ("checkpoint_bytes", values.size_bytes),
    "save_interval": ("save_interval_s", values.duration_s),
    "step_time": ("step_s", values.duration_s),
    "ram": ("ram_bytes", values.size_bytes),
    "nvme": ("nvme_bytes", values.size_bytes),
    "ram_rate": ("ram_rate", rate),
    "nvme_read_rate": ("nvme_read_rate", rate),
    "nvme_write_rate": ("nvme_write_rate", rate),
    "network": ("network_rate", rate),
    "mount_rate": ("mount_rate", rate),
    "mount_write_rate": ("mount_write_rate", rate),
    "mount_latency": ("mount_latency_s", values.duration_s),
    "local_latency": ("local_latency_s", values.duration_s),
    "read_ahead": ("read_ahead_bytes", values.size_bytes),
    "upload_delay": ("upload_delay_s", values.duration_s),
    "store_read_rate": ("store_read_rate", rate),
    "store_write_rate": ("store_write_rate", rate),
    "store_stream_rate": ("store_stream_rate", rate),
    "store_latency": ("store_latency_s", values.duration_s),
    "store_latency_p99": ("store_latency_p99_s", values.duration_s),
    "nfs_read_rate": ("nfs_read_rate", rate),
    "nfs_write_rate": ("nfs_write_rate", rate),
    "nfs_stream_rate": ("nfs_stream_rate", rate),
    "nfs_latency": ("nfs_latency_s", values.duration_s),
    "nfs_read_ahead": ("nfs_read_ahead_bytes", values.size_bytes),
}
"""Options that are written as text: the field of the scenario, and how the text is read."""
AS_THEY_ARE = frozenset({
    "gpus", "gpus_per_node", "samples_per_s", "layout", "order", "partition", "epochs", "workers",
    "prefetch_batches", "fetch_concurrency", "upload_concurrency", "seed",
})  # fmt: skip


def typed(given: dict[str, Any]) -> dict[str, Any]:
    """Fields of a scenario from options. Raises ``ConfigError`` that names the option."""
    found = {name: given[name] for name in AS_THEY_ARE & given.keys()}
    for name, (field, parse) in OPTIONS.items():
        if name in given:
            try:
                found[field] = parse(given[name])
            except ValueError as error:
                raise ConfigError(f"--{name.replace('_', '-')}: {error}") from None
    if "store_latency" in given and "store_latency_p99" not in given:
        found["store_latency_p99_s"] = found["store_latency_s"] * 4  # as the defaults are to each other
    _per_node(given, found)
    _per_step(given, found)
    _per_parameter(given, found)
    return found


def _per_node(given: dict[str, Any], found: dict[str, Any]) -> None:
    if "nodes" not in given:
        return
    if "gpus_per_node" in given:
        raise ConfigError("--nodes: give it or --gpus-per-node, not both")
    if given["nodes"] < 1 or found.get("gpus", 8) % given["nodes"]:
        raise ConfigError(
            f"--nodes: {found.get('gpus', 8)} GPUs cannot be spread evenly over {given['nodes']} nodes"
        )
    found["gpus_per_node"] = found.get("gpus", 8) // given["nodes"]


def _per_step(given: dict[str, Any], found: dict[str, Any]) -> None:
    if "batch_size" not in given:
        return
    if "samples_per_s" in given:
        raise ConfigError("--batch-size: give it or --samples-per-s, not both")
    if not found.get("step_s"):
        raise ConfigError("--batch-size: needs --step-time")
    found["samples_per_s"] = given["batch_size"] / found["step_s"]


def _per_parameter(given: dict[str, Any], found: dict[str, Any]) -> None:
    from tierfs.plan.scenario import BYTES_PER_PARAMETER

    optimizer = given.get("optimizer", "adam")
    if optimizer not in BYTES_PER_PARAMETER:
        raise ConfigError(f"--optimizer: {optimizer!r} is not one of {', '.join(BYTES_PER_PARAMETER)}")
    if "parameters" not in given:
        if "optimizer" in given:
            raise ConfigError("--optimizer: needs --parameters")
        return
    if "checkpoint" in given:
        raise ConfigError("--parameters: give it or --checkpoint, not both")
    try:
        found["checkpoint_bytes"] = int(count(given["parameters"]) * BYTES_PER_PARAMETER[optimizer])
    except ValueError as error:
        raise ConfigError(f"--parameters: {error}") from None
