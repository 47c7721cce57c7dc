"""A data loader in PyTorch's manner, without PyTorch: a dataset, a shuffling sampler, worker processes.

As with ``torch.utils.data.DataLoader``: a dataset is anything with ``__len__`` and ``__getitem__``; the
order is drawn anew for each epoch from a seed; persistent workers each fetch whole batches, a few ahead of
the consumer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Generic, Protocol, TypeVar

import workers
from workers import Worker

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
_AHEAD = 2
"""Batches that a worker has to do at any time, as ``prefetch_factor`` of PyTorch."""


class Dataset(Protocol[T_co]):
    """Must be picklable: each worker gets a copy."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> T_co: ...


class DataLoader(Generic[T]):
    """Batches of a dataset, in a new order each epoch. A context manager: leaving it ends the workers."""

    def __init__(self, dataset: Dataset[T], *, batch_size: int, worker_count: int, seed: int) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._worker_count = worker_count
        self._seed = seed
        self._workers: dict[object, Worker] = {}

    def __enter__(self) -> DataLoader[T]:
        """Starts the workers and waits for them, so that their start is no part of an epoch."""
        for _ in range(self._worker_count):
            worker = workers.start(_work, self._dataset)
            self._workers[worker.pipe] = worker
        for worker in self._workers.values():
            worker.receive()
        return self

    def __exit__(self, *exception: object) -> None:
        workers.stop(self._workers.values())

    def epoch(self, number: int) -> Iterator[list[T]]:
        """Every item of the dataset once. Batches arrive as workers finish them."""
        order = list(range(len(self._dataset)))
        random.Random(self._seed + number).shuffle(order)
        starts = range(0, len(order), self._batch_size)
        batches = [order[start : start + self._batch_size] for start in starts]
        outstanding = dict.fromkeys(self._workers.values(), 0)

        def hand_out(worker: Worker) -> None:
            if batches:
                worker.pipe.send(batches.pop())
                outstanding[worker] += 1

        for _ in range(_AHEAD):
            for worker in outstanding:
                hand_out(worker)
        while busy := [worker.pipe for worker, count in outstanding.items() if count]:
            for pipe in wait(busy):
                worker = self._workers[pipe]
                batch = worker.receive()
                assert isinstance(batch, list)
                outstanding[worker] -= 1
                hand_out(worker)
                yield batch


def _work(pipe: Connection, dataset: Dataset[object]) -> None:
    """A worker's whole life: an empty list to say hello, then one answer per list of indices."""
    pipe.send([])
    while True:
        pipe.send([dataset[index] for index in pipe.recv()])
