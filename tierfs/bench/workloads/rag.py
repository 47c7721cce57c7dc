"""Random reads as a retrieval service makes them: a query is a chain of small reads, each of which has to end
before the next one is known. What counts is the tail."""

from __future__ import annotations

from tierfs.bench.loops import BUFFERED, MMAP
from tierfs.bench.result import Parameter
from tierfs.bench.scale import KIB
from tierfs.bench.session import COLD, WARM, Session, Workload
from tierfs.bench.workloads.naming import processes

CHAIN = 8
BLOCK_BYTES = 4 * KIB
QUERY = f"query of {CHAIN} reads of 4 KiB"


def _run(session: Session) -> None:
    files = session.large()
    if not session.target.cold:
        for workers in session.in_turn(session.scale.workers):
            _queries(session, "", "store", workers)
        return
    most = session.scale.most
    if session.make_cold(files, f"{COLD}, {BUFFERED}, {processes(most)}"):
        _queries(session, COLD, BUFFERED, most)
    session.warm_up(files)
    warm = [(way, workers) for way in (BUFFERED, MMAP) for workers in session.scale.workers]
    for way, workers in session.in_turn(warm):
        _queries(session, WARM, way, workers)


def _queries(session: Session, state: str, way: str, workers: int) -> None:
    parameters: dict[str, Parameter] = {
        "workers": workers,
        "way": way,
        "block_bytes": BLOCK_BYTES,
        "by": "loop",
    }
    parameters["chain"] = CHAIN
    if state:
        parameters["state"] = state
    tasks = [
        session.target.read_random(
            session.large(), block_bytes=BLOCK_BYTES, way=way, seed=session.seed + 1000 + number, chain=CHAIN
        )
        for number in range(workers)
    ]
    name = ", ".join(part for part in (state, way, processes(workers)) if part)
    session.measure(name, tasks, operation=QUERY, parameters=parameters)


WORKLOAD = Workload(
    "rag",
    f"Queries of a vector index: each is {CHAIN} reads of 4 KiB at random places, one after the other.",
    1.3,
    _run,
)
