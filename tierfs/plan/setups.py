"""The three set-ups that are compared, as nodes of the simulation.

``nfs``: one server for all nodes, a client that reads ahead, the kernel's page cache. ``object store``: every
loader process streams objects itself; nothing is kept. ``tierfs``: a mount on every node, on the same store.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from simpy import Environment

from tierfs.plan.fetching import FetchQueue
from tierfs.plan.node import MountNode, Node, Nothing, StreamNode
from tierfs.plan.queueing import Latency, Route, Server
from tierfs.plan.scenario import Scenario
from tierfs.plan.tiers import Kept, PageCache, Tiers
from tierfs.plan.trace import DataSet

NFS, STORE, TIERFS = "nfs", "object store", "tierfs"
SETUPS = (NFS, STORE, TIERFS)


def keep(scenario: Scenario, setup: str, data: DataSet) -> Kept:
    """What a new node of that set-up has: nothing yet. One checkpoint is always in the tiers, sent or not."""
    if setup == TIERFS and scenario.tier_sizes:
        tiers = Tiers([data.capacity_bytes(size) for size in scenario.tier_sizes])
        tiers.set_dirty(data.capacity_bytes(scenario.node_checkpoint_bytes))
        return tiers
    if setup == NFS and scenario.ram_bytes:
        return PageCache(data.capacity_bytes(scenario.ram_bytes))
    return Nothing()


def build(
    scenario: Scenario,
    setup: str,
    environment: Environment,
    data: DataSet,
    kept: Sequence[Kept],
    share: float,
) -> list[Node]:
    """Nodes that share a server for all. ``share``: the part of a node that is simulated."""
    chance = random.Random(scenario.seed)
    part = share * len(kept) / scenario.nodes
    more_s = scenario.mount_latency_s if setup == TIERFS else 0.0
    local = Latency(scenario.local_latency_s, scenario.local_latency_s, chance)
    nodes: list[Node] = []
    if setup == NFS:
        shared = Server("NFS server", scenario.nfs_read_rate * part)
        wait = Latency(scenario.nfs_latency_s, scenario.nfs_latency_s, chance)
    else:
        shared = Server("store", scenario.store_read_rate * part)
        wait = Latency(scenario.store_latency_s, scenario.store_latency_p99_s, chance, more_s=more_s)
    for each in kept:
        network = Server("network", scenario.network_rate * share)
        ram = Route([Server("RAM", scenario.ram_rate * share)], local)
        if setup == TIERFS:
            mount = Server("mount", scenario.mount_rate * share)
            nvme = Route([Server("NVMe", scenario.nvme_read_rate * share)], local)
            route = Route([shared, network, mount], wait, scenario.store_stream_rate)
            fetches = FetchQueue(environment, route, max(1, round(scenario.fetch_concurrency * share)))
            places = [
                place for place, size in ((ram, scenario.ram_bytes), (nvme, scenario.nvme_bytes)) if size
            ]
            nodes.append(MountNode(environment, scenario, data, each, fetches, places))
            continue
        if setup == NFS:
            client = Server("NFS client", scenario.nfs_stream_rate * share)
            route = Route([shared, network, client], wait)
            ahead_bytes = scenario.nfs_read_ahead_bytes
        else:
            route = Route([shared, network], wait, scenario.store_stream_rate)
            ahead_bytes = 0
        nodes.append(StreamNode(environment, data, each, route, ram, reads_ahead_bytes=ahead_bytes))
    return nodes
