"""Worker processes with a pipe each. A worker ends when its pipe closes, so none outlives its maker."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess


class WorkerFailed(Exception):
    """A worker raised, or is gone. The message says which of both, and with what."""


@dataclass(frozen=True, slots=True)
class _Trouble:
    message: str


@dataclass(frozen=True, slots=True)
class Worker:
    process: BaseProcess
    pipe: Connection

    def receive(self) -> object:
        """The worker's next answer; raises ``WorkerFailed``."""
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise WorkerFailed("a worker process is gone") from None
        if isinstance(answer, _Trouble):
            raise WorkerFailed(answer.message)
        return answer


def start(run: Callable[..., None], *arguments: object) -> Worker:
    """Run ``run(pipe, *arguments)`` in a new process that does not listen to SIGINT: its maker decides."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_guarded, args=(run, theirs, *arguments), daemon=True)
    # Stopped half way, the new process would complain about what it did not get any more.
    came: list[int] = []
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    on_termination = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, on_interrupt)
        signal.signal(signal.SIGTERM, on_termination)
    theirs.close()
    if came:
        signal.raise_signal(signal.SIGTERM)
    return Worker(process, ours)


def stop(workers: Iterable[Worker]) -> None:
    """Close all pipes, and wait until all workers are gone."""
    workers = list(workers)
    for worker in workers:
        worker.pipe.close()
    for worker in workers:
        worker.process.join(timeout=5)
        if worker.process.is_alive():
            worker.process.terminate()
            worker.process.join()


def _guarded(run: Callable[..., None], pipe: Connection, *arguments: object) -> None:
    try:
        run(pipe, *arguments)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # nobody listens any more
    except Exception as error:
        try:
            pipe.send(_Trouble(f"{type(error).__name__}: {error}"))
        except OSError:
            return
