"""A training loop in simulated time: loader processes read batches, GPUs take them, and all take a step
together.

Each GPU has its loader processes, which make whole batches in turn and may be some batches ahead (as in
PyTorch's DataLoader). A step begins when the last GPU has its batch: the time from when the first one could
have begun is the stall of that step.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from simpy import Environment, Event, Store

from tierfs.plan.node import PIECE_BYTES, Node

_STEADY = 0.02
"""Longer by less than this part is no stall."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What a training loop does in one step."""

    gpus: int
    """Of each node."""
    workers: int
    """Loader processes of each GPU."""
    prefetch_batches: int
    batch_bytes: float
    """Of one GPU in one step."""
    step_s: float


class Training:
    """``run`` steps on all nodes. ``orders``: the files of each node, in turn, taken by whoever is next."""

    def __init__(
        self,
        environment: Environment,
        pace: Pace,
        nodes: list[Node],
        orders: list[Iterator[int]],
        content_bytes: int,
    ) -> None:
        self._environment = environment
        self._pace = pace
        self._content_bytes = content_bytes
        self._queues: list[list[Store]] = []
        self._nodes = nodes
        self.stalls_s: list[float] = []
        self._marks: list[tuple[float, int]] = []
        """When each step ended, and what had arrived at the nodes by then."""
        for node, order in zip(nodes, orders, strict=True):
            for _ in range(pace.gpus):
                queues = [Store(environment, pace.prefetch_batches) for _ in range(pace.workers)]
                self._queues.append(queues)
                for number, queue in enumerate(queues):
                    environment.process(self._load(node, order, queue, number))

    def run(self, steps: int) -> bool:
        """Simulate so many steps; False if the files were not enough for them. Call it once."""
        steps_done = self._environment.process(self._train(steps))
        return bool(self._environment.run(until=steps_done))

    def steady_stall_s(self, warm_up_steps: int) -> float:
        """Mean stall of the steps after these, as it would be if they went on for ever.

        Loaders and read-ahead fill what room they have while the first step waits, and a starved job lives on
        that for a while. So where there are stalls and the loaders have little left, the time is counted that
        as much takes to arrive as is consumed. A job that does not stall within the window counts as fed.
        """
        pace, (begin_s, before), (end_s, after) = self._pace, self._marks[warm_up_steps - 1], self._marks[-1]
        steps = len(self._marks) - warm_up_steps
        elapsed_s, arrived = end_s - begin_s, after - before
        ready = sum(len(queue.items) for queues in self._queues for queue in queues)
        room = len(self._queues) * pace.workers * pace.prefetch_batches
        if elapsed_s > (1 + _STEADY) * steps * pace.step_s and ready < room / 2:
            elapsed_s *= steps * pace.batch_bytes * pace.gpus * len(self._nodes) / max(1, arrived)
        return max(0.0, elapsed_s / steps - pace.step_s)

    def _train(self, steps: int) -> Generator[Event, Any, bool]:
        environment, workers = self._environment, self._pace.workers
        for number in range(steps):
            wanted_s = environment.now
            for queues in self._queues:
                if not (yield queues[number % workers].get()):
                    return False
            self.stalls_s.append(environment.now - wanted_s)
            yield environment.timeout(self._pace.step_s)
            self._marks.append((environment.now, sum(node.arrived_bytes for node in self._nodes)))
        return True

    def _load(
        self, node: Node, order: Iterator[int], queue: Store, number: int
    ) -> Generator[Event, Any, None]:
        """One loader process: batches ``number``, ``number + workers``... of its GPU; False when files run
        out.
        """
        content, offset, owed = -1, self._content_bytes, 0.0
        while True:
            owed += self._pace.batch_bytes
            while owed >= 1:
                if offset >= self._content_bytes:
                    content = next(order, -1)
                    if content < 0:
                        yield queue.put(False)
                        return
                    offset = 0
                until_piece = PIECE_BYTES - offset % PIECE_BYTES
                length = min(until_piece, self._content_bytes - offset, int(owed))
                arrival, length = node.read(content, offset, length)
                offset += length
                owed -= length
                if arrival is not None:
                    yield arrival
            yield queue.put(True)
