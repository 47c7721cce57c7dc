"""Shuffled epochs over many small files, by worker processes as a data loader forks them.

Each worker opens, reads and closes its share of the epoch's order. A cold epoch is read once; a warm one
again and again until time is over.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierfs.bench.files import FileSet, share
from tierfs.bench.processes import Task
from tierfs.bench.result import Parameter
from tierfs.bench.session import COLD, WARM, Session, Workload
from tierfs.bench.workloads.naming import processes

EPOCH_LIMIT_FACTOR = 3


def epoch(session: Session, files: FileSet, number: int, workers: int, *, repeat: bool = False) -> list[Task]:
    """The tasks of one epoch; with ``repeat`` they go on until time is over."""
    parts: Sequence[Sequence[int]] = share(files.order(number), workers)
    return [session.target.read_files(files, part, repeat=repeat) for part in parts]


def _run(session: Session) -> None:
    files = session.small()
    most = session.scale.most
    if not session.target.cold:
        for number, workers in enumerate(session.scale.workers):
            _epoch(session, files, number, workers, "", repeat=True)
        return
    number = 0
    counts = (most,) if session.scale.quick else session.scale.workers
    for workers in counts:
        if session.make_cold(files, f"{COLD}, {processes(workers)}"):
            _epoch(session, files, number, workers, COLD)
            number += 1
    session.warm_up(files)
    for workers in session.scale.workers:
        _epoch(session, files, number, workers, WARM, repeat=True)
        number += 1


def _epoch(
    session: Session, files: FileSet, number: int, workers: int, state: str, *, repeat: bool = False
) -> None:
    limit_s = None if repeat else session.pass_s(EPOCH_LIMIT_FACTOR)
    tasks = epoch(session, files, number, workers, repeat=repeat)
    name = ", ".join(part for part in (state, processes(workers)) if part)
    parameters: dict[str, Parameter] = {
        "workers": workers,
        "files": len(files.entries),
        "mean_bytes": files.total_bytes // len(files.entries),
        "by": "loop",
    }
    if state:
        parameters["state"] = state
    session.measure(name, tasks, operation="file", parameters=parameters, limit_s=limit_s)


WORKLOAD = Workload(
    "small-files",
    "A shuffled epoch over small files (4 to 100 KiB): open, read, close, each once.",
    3.0,
    _run,
)
