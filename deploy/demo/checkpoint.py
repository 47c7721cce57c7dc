"""A checkpoint as a training job writes it: each rank, a process, writes its own shard and syncs it."""

from __future__ import annotations

import os
import random
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path

import workers
import xxhash
from data import MIB, Entry
from epochs import Damaged, Reading
from rich.progress import Progress
from workers import Worker

RANKS = 8
SHARD_BYTES = 32 * MIB
_STEP_BYTES = 4 * MIB
_SEED = 99


def shard_path(directory: Path, rank: int) -> Path:
    return directory / f"shard-{rank:05d}-of-{RANKS:05d}.bin"


class Ranks:
    """The processes of a training job, each with its state in memory. A context manager."""

    def __init__(self, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._directory = directory
        self._shard_bytes = shard_bytes
        self._workers: list[Worker] = []

    def __enter__(self) -> Ranks:
        """Waits until every rank has a state to save."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for rank in range(RANKS):
            self._workers.append(
                workers.start(_be_rank, shard_path(self._directory, rank), rank, self._shard_bytes)
            )
        for worker in self._workers:
            worker.receive()
        return self

    def __exit__(self, *exception: object) -> None:
        workers.stop(self._workers)

    def save(self, progress: Progress) -> tuple[Reading, list[Entry]]:
        """Write all shards at once. The time is for how long training stands still: to the last fsync."""
        seconds, digests = self._all("save", progress, "checkpoint: save")
        shards = [
            Entry(shard_path(self._directory, rank).name, "shard", self._shard_bytes, digest)
            for rank, digest in enumerate(digests)
        ]
        return Reading(RANKS, RANKS * self._shard_bytes, seconds), shards

    def restore(self, shards: list[Entry], progress: Progress, label: str) -> Reading:
        """Read all shards at once. Raises ``Damaged`` if one is not what was saved."""
        seconds, digests = self._all("restore", progress, label)
        wrong = [shard.path for shard, digest in zip(shards, digests, strict=True) if shard.digest != digest]
        if wrong:
            raise Damaged(f"{label}: not what was saved: {', '.join(wrong)}")
        return Reading(RANKS, RANKS * self._shard_bytes, seconds)

    def _all(self, action: str, progress: Progress, label: str) -> tuple[float, list[str]]:
        """Seconds until the last rank is done, and the digest that each of them answered."""
        task = progress.add_task(label, total=RANKS * self._shard_bytes)
        ranks: dict[object, int] = {worker.pipe: rank for rank, worker in enumerate(self._workers)}
        digests: dict[int, str] = {}
        started = time.monotonic()
        for worker in self._workers:
            worker.pipe.send(action)
        while len(digests) < RANKS:
            for pipe in wait([w.pipe for rank, w in enumerate(self._workers) if rank not in digests]):
                rank = ranks[pipe]
                answer = self._workers[rank].receive()
                if isinstance(answer, str):
                    digests[rank] = answer
                elif isinstance(answer, int):
                    progress.advance(task, answer)
        return time.monotonic() - started, [digests[rank] for rank in range(RANKS)]


def _be_rank(pipe: Connection, path: Path, rank: int, shard_bytes: int) -> None:
    """A rank's whole life: None when it is ready, then for each action bytes done, and at last the digest."""
    state = random.Random(_SEED + rank).randbytes(shard_bytes)
    pipe.send(None)
    while True:
        if pipe.recv() == "save":
            _save(pipe, path, state)
        else:
            _restore(pipe, path)


def _save(pipe: Connection, path: Path, state: bytes) -> None:
    view = memoryview(state)
    with open(path, "wb", buffering=0) as file:
        for offset in range(0, len(state), _STEP_BYTES):
            done = 0
            step = view[offset : offset + _STEP_BYTES]
            while done < len(step):
                done += file.write(step[done:])
            pipe.send(done)
        os.fsync(file.fileno())
        # So that a restore does not come from the kernel's own memory.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    pipe.send(xxhash.xxh3_128_hexdigest(state))


def _restore(pipe: Connection, path: Path) -> None:
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while data := file.read(_STEP_BYTES):
            digest.update(data)
            pipe.send(len(data))
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # as after the save
    pipe.send(digest.hexdigest())
