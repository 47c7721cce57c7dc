"""A checkpoint as a training job writes it: each rank, a process, writes its own shard and syncs it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import xxhash
from data import MIB, Entry
from epochs import Damaged, Reading
from loader import WorkerFailed
from rich.progress import Progress

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
    context = get_context("spawn")
    processes: list[BaseProcess] = []
    pipes: dict[Connection, int] = {}
    try:
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_guarded, args=(run, theirs, directory, rank), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes[ours] = rank
        for pipe in pipes:
            _expect(pipe)
        task = progress.add_task(label, total=RANKS * SHARD_BYTES)
        started = time.monotonic()
        for pipe in pipes:
            pipe.send(None)
        digests: dict[int, str] = {}
        while len(digests) < RANKS:
            for ready in wait([pipe for pipe, rank in pipes.items() if rank not in digests]):
                assert isinstance(ready, Connection)
                answer = _expect(ready)
                if isinstance(answer, str):
                    digests[pipes[ready]] = answer
                elif isinstance(answer, int):
                    progress.advance(task, answer)
        return time.monotonic() - started, [digests[rank] for rank in range(RANKS)]
    finally:
        for pipe in pipes:
            pipe.close()
        for started_process in processes:
            started_process.join(timeout=5)
            if started_process.is_alive():
                started_process.terminate()
                started_process.join()


def _expect(pipe: Connection) -> object:
    try:
        answer = pipe.recv()
    except EOFError:
        raise WorkerFailed("a rank ended before it was done") from None
    if isinstance(answer, Exception):
        raise WorkerFailed(f"{type(answer).__name__}: {answer}")
    return answer


def _guarded(run: _Rank, pipe: Connection, directory: Path, rank: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that made it decides
    try:
        run(pipe, directory, rank)
    except EOFError:
        return
    except OSError as error:
        try:
            pipe.send(OSError(f"{shard_path(directory, rank)}: {error.strerror or error}"))
        except OSError:
            return


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
