"""A training loop on real files: loader processes that read batches, GPUs that sleep for a step, all in
lockstep.

The same as ``tierfs.plan.loader`` simulates, for comparing the two: each GPU has loader processes that make
whole batches in turn and may be some batches ahead; files are taken by whoever is next.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.queues import Queue
from typing import Any

from benchmarks.loops import LoopFailed, buffer
from tierfs.plan.loader import Pace
from tierfs.plan.node import PIECE_BYTES

ANSWER_LIMIT_S = 120.0
READY, BATCH, END = "ready", "batch", "end"


def run_epoch(paths: Sequence[str], pace: Pace) -> list[float]:
    """Read all files in this order; returns how long each step waited for its data. Raises LoopFailed."""
    context = multiprocessing.get_context("fork")
    taken = context.Value("q", 0)
    start = context.Event()
    queues: list[list[Queue[str]]] = []
    processes: list[ForkProcess] = []
    try:
        for _ in range(pace.gpus):
            queues.append([])
            for _ in range(pace.workers):
                queue, process = _loader(context, paths, pace, taken, start)
                queues[-1].append(queue)
                processes.append(process)
        for queue in (queue for mine in queues for queue in mine):
            _expect(queue, READY)
        start.set()
        return _train(queues, pace)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _loader(
    context: ForkContext, paths: Sequence[str], pace: Pace, taken: Any, start: Any
) -> tuple[Queue[str], ForkProcess]:
    queue: Queue[str] = context.Queue(pace.prefetch_batches)
    process = context.Process(target=_load, args=(paths, pace, taken, start, queue), daemon=True)
    process.start()
    return queue, process


def _expect(queue: Queue[str], wanted: str) -> None:
    with contextlib.suppress(Exception):
        if queue.get(timeout=ANSWER_LIMIT_S) == wanted:
            return
    raise LoopFailed("a loader process did not answer")


def _train(queues: list[list[Queue[str]]], pace: Pace) -> list[float]:
    stalls_s: list[float] = []
    number = 0
    while True:
        wanted_s = time.monotonic()
        for mine in queues:
            try:
                if mine[number % pace.workers].get(timeout=ANSWER_LIMIT_S) == END:
                    return stalls_s
            except Exception as error:
                raise LoopFailed("a loader process made no batch") from error
        stalls_s.append(time.monotonic() - wanted_s)
        time.sleep(pace.step_s)
        number += 1


def _load(paths: Sequence[str], pace: Pace, taken: Any, start: Any, queue: Queue[str]) -> None:
    """One loader process: batches until no file is left."""
    memory = buffer(PIECE_BYTES)
    queue.put(READY)
    start.wait()
    fd, offset, owed = -1, 0, 0.0
    while True:
        owed += pace.batch_bytes
        while owed >= 1:
            if fd < 0:
                with taken.get_lock():
                    index, taken.value = taken.value, taken.value + 1
                if index >= len(paths):
                    queue.put(END)
                    queue.close()
                    queue.join_thread()
                    return
                fd, offset = os.open(paths[index], os.O_RDONLY), 0
            length = min(PIECE_BYTES - offset % PIECE_BYTES, int(owed))
            count = os.preadv(fd, [memory[:length]], offset)
            offset += count
            owed -= count
            if count < length:
                os.close(fd)
                fd = -1
        queue.put(BATCH)
