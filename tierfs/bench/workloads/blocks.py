"""Large files, in blocks: from front to back, and at random places.

Cold reads go through a file once, by loops of our own. Warm ones go on for a while, by fio where it is there:
several block sizes, numbers of workers and ways to read.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierfs.bench import fio
from tierfs.bench.files import FileSet, share
from tierfs.bench.loops import BUFFERED, DIRECT, MMAP
from tierfs.bench.result import Parameter
from tierfs.bench.scale import KIB, MIB
from tierfs.bench.session import COLD, WARM, Session, Workload
from tierfs.bench.workloads.naming import processes, size

COLD_LIMIT_FACTOR = 3
STORE = "store"


@dataclass(frozen=True, slots=True)
class _Variant:
    block_bytes: int
    workers: int
    way: str

    def name(self, state: str) -> str:
        return ", ".join(
            part for part in (state, self.way, size(self.block_bytes), processes(self.workers)) if part
        )


def _sequential(session: Session) -> None:
    files = session.large()
    blocks = (MIB,) if session.scale.quick else (128 * KIB, MIB, 8 * MIB)
    if not session.target.cold:
        sizes = (8 * MIB,) if session.scale.quick else (MIB, 8 * MIB, 16 * MIB)
        direct = [_Variant(block, workers, STORE) for block in sizes for workers in session.scale.workers]
        for variant in session.in_turn(direct):
            _stream(session, files, variant, "")
        return
    for workers in sorted({1, session.scale.most}):
        variant = _Variant(MIB, workers, BUFFERED)
        if session.make_cold(files, variant.name(COLD)):
            _stream(session, files, variant, COLD)
    session.warm_up(files)
    for variant in session.in_turn(_warm_variants(session, blocks)):
        _warm(session, files, variant, sequential=True)


def _random(session: Session) -> None:
    files = session.large()
    blocks = (4 * KIB,) if session.scale.quick else (4 * KIB, 64 * KIB)
    if not session.target.cold:
        sizes = (4 * KIB, 128 * KIB)
        direct = [_Variant(block, workers, STORE) for block in sizes for workers in session.scale.workers]
        for variant in session.in_turn(direct):
            _pick(session, files, variant, "")
        return
    for block in blocks:
        variant = _Variant(block, session.scale.most, BUFFERED)
        if session.make_cold(files, variant.name(COLD)):
            _pick(session, files, variant, COLD)
    session.warm_up(files)
    for variant in session.in_turn(_warm_variants(session, blocks)):
        _warm(session, files, variant, sequential=False)


def _warm_variants(session: Session, blocks: tuple[int, ...]) -> list[_Variant]:
    """Every way, block size and number of workers; with ``--quick`` only what differs most."""
    most = session.scale.most
    found = []
    for block in blocks:
        for way in (BUFFERED, DIRECT, MMAP, fio.IO_URING):
            counts = session.scale.workers
            if session.scale.quick:
                counts = {BUFFERED: (1, most), DIRECT: (most,), MMAP: (1,), fio.IO_URING: (1,)}[way]
            found += [_Variant(block, workers, way) for workers in sorted(set(counts))]
    return found


def _stream(session: Session, files: FileSet, variant: _Variant, state: str) -> None:
    """Cold: each file once. Else (a store) again and again."""
    parts = share(range(len(files.entries)), variant.workers)
    tasks = [
        session.target.read_streams(
            files, part, block_bytes=variant.block_bytes, way=variant.way, repeat=not state
        )
        for part in parts
    ]
    session.measure(
        variant.name(state),
        tasks,
        operation=f"read of {size(variant.block_bytes)}",
        limit_s=session.pass_s(COLD_LIMIT_FACTOR) if state else None,
        parameters=_parameters(variant, state, "loop"),
    )


def _pick(session: Session, files: FileSet, variant: _Variant, state: str) -> None:
    tasks = [
        session.target.read_random(
            files, block_bytes=variant.block_bytes, way=variant.way, seed=session.seed + number
        )
        for number in range(variant.workers)
    ]
    session.measure(
        variant.name(state),
        tasks,
        operation=f"read of {size(variant.block_bytes)}",
        parameters=_parameters(variant, state, "loop"),
    )


def _warm(session: Session, files: FileSet, variant: _Variant, *, sequential: bool) -> None:
    name = variant.name(WARM)
    if fio.path() is not None:
        job = fio.FioJob(
            files=files,
            block_bytes=variant.block_bytes,
            jobs=variant.workers,
            way=variant.way,
            sequential=sequential,
            seconds=session.each_s,
            seed=session.seed,
        )
        operation = f"read of {size(variant.block_bytes)}"
        session.measure_fio(name, job, operation=operation, parameters=_parameters(variant, WARM, "fio"))
    elif variant.way not in session.target.ways:
        session.skip(name, fio.MISSING)
    elif sequential:
        tasks = [
            session.target.read_streams(
                files, part, block_bytes=variant.block_bytes, way=variant.way, repeat=True
            )
            for part in share(range(len(files.entries)), variant.workers)
        ]
        operation = f"read of {size(variant.block_bytes)}"
        session.measure(name, tasks, operation=operation, parameters=_parameters(variant, WARM, "loop"))
    else:
        _pick(session, files, variant, WARM)


def _parameters(variant: _Variant, state: str, by: str) -> dict[str, Parameter]:
    found: dict[str, Parameter] = {
        "block_bytes": variant.block_bytes,
        "workers": variant.workers,
        "way": variant.way,
        "by": by,
    }
    if state:
        found["state"] = state
    if variant.way == fio.IO_URING and by == "fio":
        found["depth"] = fio.IO_URING_DEPTH
    return found


SEQUENTIAL = Workload(
    "sequential-read", "Large files from front to back, as shards and checkpoints are read.", 3.0, _sequential
)
RANDOM = Workload("random-read", "Blocks at random places of large files.", 2.0, _random)
