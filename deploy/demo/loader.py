"""A data loader in PyTorch's manner, without PyTorch: a dataset, a shuffling sampler, worker processes.

As with ``torch.utils.data.DataLoader``: a dataset is anything with ``__len__`` and ``__getitem__``; the
order is drawn anew for each epoch from a seed; persistent workers each fetch whole batches, a few ahead of
the consumer. Workers end when their pipe closes, so none outlives the process that made it.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Generic, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
_AHEAD = 2
"""Batches that a worker has to do at any time, as ``prefetch_factor`` of PyTorch."""


class Dataset(Protocol[T_co]):
    """Must be picklable: each worker gets a copy."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> T_co: ...


class WorkerFailed(Exception):
    """A worker raised, or is gone. The message says which of both, and with what."""


@dataclass(frozen=True, slots=True)
class _Trouble:
    message: str


class DataLoader(Generic[T]):
    """Batches of a dataset, in a new order each epoch. A context manager: leaving it ends the workers."""

    def __init__(self, dataset: Dataset[T], *, batch_size: int, workers: int, seed: int) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._seed = seed
        self._worker_count = workers
        self._workers: list[tuple[BaseProcess, Connection]] = []

    def __enter__(self) -> DataLoader[T]:
        """Starts the workers and waits for them, so that their start is no part of an epoch."""
        context = get_context("spawn")
        for _ in range(self._worker_count):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(theirs, self._dataset), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append((worker, ours))
        for _, pipe in self._workers:
            self._receive(pipe)
        return self

    def __exit__(self, *exception: object) -> None:
        for _, pipe in self._workers:
            pipe.close()
        for worker, _ in self._workers:
            worker.join(timeout=5)
            if worker.is_alive():
                worker.terminate()
                worker.join()

    def epoch(self, number: int) -> Iterator[list[T]]:
        """Every item of the dataset once. Batches arrive as workers finish them."""
        order = list(range(len(self._dataset)))
        random.Random(self._seed + number).shuffle(order)
        starts = range(0, len(order), self._batch_size)
        batches = [order[start : start + self._batch_size] for start in starts]
        batches.reverse()
        outstanding = {pipe: 0 for _, pipe in self._workers}
        for _ in range(_AHEAD):
            for pipe in outstanding:
                if batches:
                    pipe.send(batches.pop())
                    outstanding[pipe] += 1
        while busy := [pipe for pipe, count in outstanding.items() if count]:
            for ready in wait(busy):
                assert isinstance(ready, Connection)
                pipe = ready
                batch = self._receive(pipe)
                outstanding[pipe] -= 1
                if batches:
                    pipe.send(batches.pop())
                    outstanding[pipe] += 1
                yield batch

    @staticmethod
    def _receive(pipe: Connection) -> list[T]:
        try:
            answer = pipe.recv()
        except EOFError:
            raise WorkerFailed("a worker process is gone") from None
        if isinstance(answer, _Trouble):
            raise WorkerFailed(answer.message)
        assert isinstance(answer, list)
        return answer


def _work(pipe: Connection, dataset: Dataset[object]) -> None:
    """A worker's whole life: an empty list to say hello, then one answer per list of indices."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that made it decides
    pipe.send([])
    while True:
        try:
            indices = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer: object = [dataset[index] for index in indices]
        except Exception as error:
            answer = _Trouble(f"{type(error).__name__}: {error}")
        try:
            pipe.send(answer)
        except OSError:
            return


