"""What is asked: the job, the node, the network, the stores. Sizes in bytes, times in seconds, rates in
bytes/s.

Every field has a default, so that a question can be short. The defaults of rates are assumptions about
hardware, not measurements; a forecast says of each value whether it was given, read from a report, or
assumed.
"""

from __future__ import annotations

import math

import msgspec

from tierfs.cache.blocks import EXTENT_SIZE_BYTES
from tierfs.config import Settings
from tierfs.errors import ConfigError

KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4
BYTES_PER_PARAMETER = {"none": 2, "sgd": 10, "adam": 14}
"""In a checkpoint: 16-bit weights; and 32-bit weights and one moment (sgd) or two (adam)."""
LAYOUTS = ("shards", "files")
PARTITIONS = ("shuffled", "fixed")
ORDERS = ("shuffled", "sequential")
DEFAULTS = Settings(source="/", mountpoint="/", state_dir="/")
"""Of a mount: connections, read-ahead, size of parts, delay of uploads."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """See the module docstring. ``check`` has to be called once before it is simulated."""

    # the job
    gpus: int = 8
    gpus_per_node: int = 8
    dataset_bytes: int = TIB
    sample_bytes: int = 128 * KIB
    samples_per_s: float = 50.0
    """What one GPU can consume."""
    step_s: float = 1.0
    """Time of one step when nobody waits for data."""
    layout: str = "shards"
    """``shards``: samples are packed, shards read from start to end. ``files``: one file per sample."""
    shard_bytes: int = 256 * MIB
    order: str = "shuffled"
    """``sequential``: every epoch in the same order."""
    partition: str = "shuffled"
    """Which node reads what: dealt anew each epoch, or ``fixed``: each node has its own part."""
    epochs: int = 3
    workers: int = 4
    """Loader processes per GPU."""
    prefetch_batches: int = 2
    """Batches that each loader process may be ahead."""
    checkpoint_bytes: int = 0
    save_interval_s: float = 3600.0
    """Training between two saves."""

    # the node
    ram_bytes: int = 64 * GIB
    """For cached data: a RAM tier, or what the kernel's page cache has for a network file system. 0: none."""
    nvme_bytes: int = 2 * TIB
    ram_rate: float = 10.0 * GIB
    nvme_read_rate: float = 5.0 * GIB
    nvme_write_rate: float = 2.0 * GIB
    local_latency_s: float = 0.0001
    """Of one read of what is local, through the mount."""
    network_rate: float = 10.0 * GIB
    """Of a node, in each direction."""
    mount_rate: float = 1.0 * GIB
    """What one mount gets from a store that has no limit of its own."""
    mount_write_rate: float = 1.0 * GIB
    """What one mount writes to a disk that has no limit of its own."""
    mount_latency_s: float = 0.002
    """What the mount adds to each request to the store."""

    # the stores; their rates are for all nodes together
    store_read_rate: float = 20.0 * GIB
    store_write_rate: float = 10.0 * GIB
    store_stream_rate: float = 80.0 * MIB
    """Of one connection."""
    store_latency_s: float = 0.030
    store_latency_p99_s: float = 0.120
    nfs_read_rate: float = 4.0 * GIB
    nfs_write_rate: float = 2.0 * GIB
    nfs_stream_rate: float = 1.0 * GIB
    """Of one client."""
    nfs_latency_s: float = 0.001
    nfs_read_ahead_bytes: int = 16 * MIB

    # the mount
    fetch_concurrency: int = DEFAULTS.fetch_concurrency
    upload_concurrency: int = DEFAULTS.upload_concurrency
    read_ahead_bytes: int = DEFAULTS.read_ahead_bytes
    upload_delay_s: float = DEFAULTS.upload_delay_s

    seed: int = 1

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def gpus_of_node(self) -> int:
        """GPUs of one node; fewer than a node has if the job is smaller than a node."""
        return min(self.gpus, self.gpus_per_node)

    @property
    def content_bytes(self) -> int:
        """Size of one file of the data set."""
        if self.layout == "files":
            return self.sample_bytes
        fair = self.dataset_bytes // (self.nodes * self.gpus_of_node * self.workers)
        return max(self.sample_bytes, min(self.shard_bytes, fair), 1)

    @property
    def demand_rate(self) -> float:
        """What one node reads while no GPU waits."""
        return self.gpus_of_node * self.samples_per_s * self.sample_bytes

    @property
    def node_epoch_bytes(self) -> float:
        """What one node reads in one epoch."""
        return self.dataset_bytes / self.nodes

    @property
    def node_checkpoint_bytes(self) -> float:
        """What one node writes in one save: every rank its part."""
        return self.checkpoint_bytes / self.nodes

    @property
    def tier_sizes(self) -> list[int]:
        """Capacities of the tiers of a mount, fast to slow."""
        return [size for size in (self.ram_bytes, self.nvme_bytes) if size]

    def check(self) -> Scenario:
        """Itself; raises ``ConfigError`` that names the option if it cannot be simulated."""
        for name in ("gpus", "gpus_per_node", "dataset_bytes", "sample_bytes", "shard_bytes", "epochs",
                     "workers", "prefetch_batches", "fetch_concurrency", "upload_concurrency"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{option(name)}: {getattr(self, name)} is less than 1")
        for name in self.__struct_fields__:
            value = getattr(self, name)
            positive = name.endswith("_rate") or name in {"samples_per_s", "step_s", "save_interval_s"}
            if isinstance(value, str):
                continue
            if not math.isfinite(value) or value < 0 or (positive and value == 0):
                raise ConfigError(
                    f"{option(name)}: {value} must be {'more than' if positive else 'at least'} 0"
                )
        for name, choices in (("layout", LAYOUTS), ("partition", PARTITIONS), ("order", ORDERS)):
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{option(name)}: {getattr(self, name)!r} is not one of {', '.join(choices)}"
                )
        if self.dataset_bytes < self.sample_bytes * self.gpus:
            raise ConfigError("--dataset: smaller than one sample for each GPU")
        if self.checkpoint_bytes and self.node_checkpoint_bytes > 0.8 * self.nvme_bytes and self.nvme_bytes:
            raise ConfigError(
                "--nvme: a node's part of the checkpoint does not fit into 80 % of it, and would be "
                "written at the rate of the store; make it larger, or spread the checkpoint over more --gpus"
            )
        if self.checkpoint_bytes and not self.nvme_bytes:
            raise ConfigError("--nvme: checkpoints need a tier that survives a reboot")
        if self.nvme_bytes and self.nvme_bytes < 16 * EXTENT_SIZE_BYTES:
            raise ConfigError(f"--nvme: {self.nvme_bytes} bytes is too small to be simulated (128M at least)")
        return self


_OPTIONS = {
    "dataset_bytes": "dataset",
    "sample_bytes": "sample-size",
    "shard_bytes": "shard-size",
    "checkpoint_bytes": "checkpoint",
    "save_interval_s": "save-interval",
    "step_s": "step-time",
    "ram_bytes": "ram",
    "nvme_bytes": "nvme",
    "network_rate": "network",
    "nfs_read_ahead_bytes": "nfs-read-ahead",
    "read_ahead_bytes": "read-ahead",
}


def option(field: str) -> str:
    """The option of ``tierfs plan`` that sets a field."""
    name = _OPTIONS.get(field) or (
        field.removesuffix("_s") if "latency" in field or "delay" in field else field
    )
    return "--" + name.replace("_", "-")
