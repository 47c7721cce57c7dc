"""A checkpoint as a training job writes it: each rank, a process, writes its own shard and syncs it."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
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


def save(directory: Path, progress: Progress) -> tuple[Reading, list[Entry]]:
    """Write all shards at once. The time is the one for which training stands still: until the last fsync."""
    directory.mkdir(parents=True, exist_ok=True)
    seconds, digests = _on_all_ranks(_save_rank, directory, progress, "checkpoint: save")
    shards = [
        Entry(shard_path(directory, rank).name, "shard", SHARD_BYTES, digest)
        for rank, digest in enumerate(digests)
    ]
    return Reading(RANKS, RANKS * SHARD_BYTES, seconds), shards


def restore(directory: Path, shards: list[Entry], progress: Progress, label: str) -> Reading:
    """Read all shards at once. Raises ``Damaged`` if one is not what was saved."""
    seconds, digests = _on_all_ranks(_restore_rank, directory, progress, label)
    wrong = [shard.path for shard, digest in zip(shards, digests, strict=True) if shard.digest != digest]
    if wrong:
        raise Damaged(f"{label}: not what was saved: {', '.join(wrong)}")
    return Reading(RANKS, RANKS * SHARD_BYTES, seconds)


_Rank = Callable[[Connection, Path, int], None]
"""Says None when it is ready, waits for a word, then says bytes done, again and again, then the digest."""


def _on_all_ranks(run: _Rank, directory: Path, progress: Progress, label: str) -> tuple[float, list[str]]:
    """Seconds from the common start until the last rank is done, and what each of them answered."""
    ranks: dict[object, int] = {}
    running: list[Worker] = []
    try:
        for rank in range(RANKS):
            running.append(workers.start(run, directory, rank))
            ranks[running[rank].pipe] = rank
        for worker in running:
            worker.receive()
        task = progress.add_task(label, total=RANKS * SHARD_BYTES)
        started = time.monotonic()
        for worker in running:
            worker.pipe.send(None)
        digests: dict[int, str] = {}
        while len(digests) < RANKS:
            for pipe in wait([running[rank].pipe for rank in range(RANKS) if rank not in digests]):
                rank = ranks[pipe]
                answer = running[rank].receive()
                if isinstance(answer, str):
                    digests[rank] = answer
                elif isinstance(answer, int):
                    progress.advance(task, answer)
        return time.monotonic() - started, [digests[rank] for rank in range(RANKS)]
    finally:
        workers.stop(running)


def _save_rank(pipe: Connection, directory: Path, rank: int) -> None:
    state = random.Random(_SEED + rank).randbytes(SHARD_BYTES)
    digest = xxhash.xxh3_128_hexdigest(state)
    pipe.send(None)
    pipe.recv()
    view = memoryview(state)
    with open(shard_path(directory, rank), "wb", buffering=0) as file:
        for offset in range(0, SHARD_BYTES, _STEP_BYTES):
            done = 0
            step = view[offset : offset + _STEP_BYTES]
            while done < len(step):
                done += file.write(step[done:])
            pipe.send(done)
        os.fsync(file.fileno())
        # So that a restore does not come from the kernel's own memory.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    pipe.send(digest)


def _restore_rank(pipe: Connection, directory: Path, rank: int) -> None:
    pipe.send(None)
    pipe.recv()
    digest = xxhash.xxh3_128()
    with open(shard_path(directory, rank), "rb", buffering=0) as file:
        while data := file.read(_STEP_BYTES):
            digest.update(data)
            pipe.send(len(data))
        # As after the save.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    pipe.send(digest.hexdigest())
