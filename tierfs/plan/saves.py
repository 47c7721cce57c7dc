"""Saving a checkpoint and reading it back: who waits, for how long, and what is at risk meanwhile.

All ranks write their parts at once, and training goes on when the last one is on stable storage. One node
stands for all, with its share of the store. On a mount that is the NVMe tier, and the upload follows behind,
with its own connections; writers wait for it only when the tier's limit of unsent data (80 %) is reached.
Without a mount, training waits for the server or the store itself.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import msgspec
from simpy import Container, Environment, Event, Store

from tierfs.plan.fetching import PREFETCH_SHARE
from tierfs.plan.queueing import Latency, Route, Server
from tierfs.plan.scenario import DEFAULTS, Scenario
from tierfs.plan.setups import NFS, TIERFS

DIRTY_SHARE = 0.8
SAVES = 4
"""So many saves in a row: a backlog that grows from one to the next is seen."""
RANK_CONNECTIONS = 8
"""Of a rank that speaks to the store itself."""
MAX_PARTS = 1500
"""Of one save, in one node; larger ones are simulated in larger parts."""


class Saving(msgspec.Struct, frozen=True, kw_only=True):
    """What a save and a restart cost. Seconds."""

    stall_s: float = 0.0
    """Training stands still for one save, as long as saves do not pile up."""
    drain_s: float = 0.0
    """From the end of that until the store has everything; 0 if it has it then."""
    keeps_up: bool = True
    """The store has one save before the next begins."""
    piled_up_stall_s: float = 0.0
    """The stall in the long run: more than ``stall_s`` where saves pile up until the tier is full of them."""
    piled_up_after: int = 0
    """Saves until then; 0 if that does not happen."""
    restore_same_s: float = 0.0
    """Reading it back on the nodes that wrote it: after a crash of the job."""
    restore_new_s: float = 0.0
    """Reading it back on other nodes."""
    lost_same_s: float = 0.0
    """Training that is lost with a crash of the job, on average."""
    lost_new_s: float = 0.0
    """The same when a node is lost with its disk: back to the last checkpoint that the store had."""


@dataclass(slots=True)
class _Save:
    began_s: float
    unsent_parts: int
    written_s: float = 0.0
    stored_s: float = 0.0


def fits(scenario: Scenario) -> bool:
    """A node's part of a checkpoint can wait in its tier."""
    return scenario.node_checkpoint_bytes <= DIRTY_SHARE * scenario.nvme_bytes


def simulate(scenario: Scenario, setup: str) -> Saving:
    """Some saves, then a restore."""
    if not scenario.checkpoint_bytes:
        return Saving()
    node_bytes, interval_s = scenario.node_checkpoint_bytes, scenario.save_interval_s
    limit_bytes = DIRTY_SHARE * scenario.nvme_bytes
    first = _SimulatedSaves(scenario, setup, limit_bytes).run(1)[0]
    stall_s, drain_s = first.written_s - first.began_s, first.stored_s - first.written_s
    long_stall_s, after = stall_s, 0
    cycle_s = stall_s + interval_s
    if drain_s > cycle_s:
        # The room is as good as full of unsent data, whatever its size.
        last = _SimulatedSaves(scenario, setup, node_bytes).run(SAVES)[-1]
        long_stall_s = max(stall_s, last.written_s - last.began_s)
        after = math.ceil(limit_bytes / (node_bytes * (1 - cycle_s / drain_s)))
    restore_new_s = restore_s(scenario, setup, local=False)
    return Saving(
        stall_s=stall_s,
        drain_s=drain_s,
        keeps_up=drain_s <= cycle_s,
        piled_up_stall_s=long_stall_s,
        piled_up_after=after,
        restore_same_s=restore_s(scenario, setup, local=True) if setup == TIERFS else restore_new_s,
        restore_new_s=restore_new_s,
        lost_same_s=interval_s / 2,
        lost_new_s=interval_s / 2 + drain_s,
    )


def restore_s(scenario: Scenario, setup: str, *, local: bool) -> float:
    """Reading a checkpoint back, every rank its part. ``local``: from the tier that it was written to."""
    if local:
        route = Route([Server("NVMe", scenario.nvme_read_rate)])
        return _transfer_s(route, scenario.node_checkpoint_bytes, scenario.gpus_of_node)
    ways = _ways(scenario, setup, reading=True)
    return _transfer_s(ways.route, scenario.node_checkpoint_bytes, ways.connections)


@dataclass(frozen=True, slots=True)
class _Ways:
    """From one node to the store, or back."""

    route: Route
    connections: int


def _ways(scenario: Scenario, setup: str, *, reading: bool) -> _Ways:
    network = Server("network", scenario.network_rate)
    if setup == NFS:
        rate = scenario.nfs_read_rate if reading else scenario.nfs_write_rate
        servers = [
            network,
            Server("NFS server", rate / scenario.nodes),
            Server("NFS client", scenario.nfs_stream_rate),
        ]
        wait = Latency(scenario.nfs_latency_s, scenario.nfs_latency_s, random.Random(scenario.seed))
        return _Ways(Route(servers, wait), scenario.gpus_of_node)
    rate = scenario.store_read_rate if reading else scenario.store_write_rate
    servers = [network, Server("store", rate / scenario.nodes)]
    more_s = scenario.mount_latency_s if setup == TIERFS else 0.0
    chance = random.Random(scenario.seed)
    wait = Latency(scenario.store_latency_s, scenario.store_latency_p99_s, chance, more_s=more_s)
    if setup == TIERFS:
        servers.append(Server("mount", scenario.mount_rate))
        # A file that is read from start to end is read ahead of, and that has its share of the connections.
        ahead = max(1, int(scenario.fetch_concurrency * PREFETCH_SHARE))
        connections = ahead if reading else scenario.upload_concurrency
    else:
        connections = RANK_CONNECTIONS * scenario.gpus_of_node
    return _Ways(Route(servers, wait, scenario.store_stream_rate), connections)


def _parts(nbytes: float) -> tuple[int, float]:
    """(how many, bytes of one) requests that move so much."""
    count = max(1, round(nbytes / max(DEFAULTS.part_size_bytes, nbytes / MAX_PARTS)))
    return count, nbytes / count


def _transfer_s(route: Route, nbytes: float, connections: int) -> float:
    """Moving that much in parts, so many at once."""
    environment = Environment()
    count, part_bytes = _parts(nbytes)
    numbers = iter(range(count))

    def connection() -> Generator[Event, Any, None]:
        for _ in numbers:
            yield environment.timeout(route.arrival_s(environment.now, part_bytes) - environment.now)

    for _ in range(connections):
        environment.process(connection())
    environment.run()
    return environment.now


class _SimulatedSaves:
    """Saves of one node, one after the other, with training between them."""

    def __init__(self, scenario: Scenario, setup: str, limit_bytes: float) -> None:
        """``limit_bytes``: so much may be on the disk and not in the store."""
        self._scenario = scenario
        self._environment = Environment()
        self._ways = _ways(scenario, setup, reading=False)
        self._is_mount = setup == TIERFS
        self._parts, self._part_bytes = _parts(scenario.node_checkpoint_bytes)
        self._disk = Route(
            [Server("NVMe", scenario.nvme_write_rate), Server("mount", scenario.mount_write_rate)]
        )
        self._dirty = Container(self._environment, max(1.001 * self._parts * self._part_bytes, limit_bytes))
        """What is on the disk and not in the store."""
        self._unsent: Store = Store(self._environment)
        self._saves: list[_Save] = []

    def run(self, saves: int) -> list[_Save]:
        """Until all of them are in the store."""
        self._environment.process(self._train(saves))
        if self._is_mount:
            for _ in range(self._ways.connections):
                self._environment.process(self._upload())
        self._environment.run()
        return self._saves

    def _train(self, saves: int) -> Generator[Event, Any, None]:
        environment = self._environment
        for _ in range(saves):
            yield environment.timeout(self._scenario.save_interval_s)
            save = _Save(began_s=environment.now, unsent_parts=self._parts)
            self._saves.append(save)
            if self._is_mount:
                yield from self._write(save)
                save.written_s = environment.now
                environment.process(self._publish(save))
            else:
                route, connections = self._ways.route, self._ways.connections
                yield environment.timeout(_transfer_s(route, self._parts * self._part_bytes, connections))
                save.written_s = save.stored_s = environment.now

    def _write(self, save: _Save) -> Generator[Event, Any, None]:
        environment = self._environment
        for _ in range(self._parts):
            yield self._dirty.put(self._part_bytes)
            yield environment.timeout(
                self._disk.arrival_s(environment.now, self._part_bytes) - environment.now
            )

    def _publish(self, save: _Save) -> Generator[Event, Any, None]:
        """A file is sent some time after it was closed."""
        yield self._environment.timeout(self._scenario.upload_delay_s)
        for _ in range(self._parts):
            self._unsent.put(save)

    def _upload(self) -> Generator[Event, Any, None]:
        environment = self._environment
        while True:
            save = yield self._unsent.get()
            arrival_s = self._ways.route.arrival_s(environment.now, self._part_bytes)
            yield environment.timeout(arrival_s - environment.now)
            yield self._dirty.get(self._part_bytes)
            save.unsent_parts -= 1
            save.stored_s = environment.now
