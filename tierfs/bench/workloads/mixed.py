"""An epoch goes on while a checkpoint is saved, and while it drains to the store."""

from __future__ import annotations

from tierfs.bench.processes import delayed
from tierfs.bench.result import Parameter
from tierfs.bench.session import Session, Workload
from tierfs.bench.workloads.checkpoint import shards
from tierfs.bench.workloads.naming import processes, size
from tierfs.bench.workloads.small_files import epoch

SAVE_AFTER_S = 0.3
SECONDS_FACTOR = 2


def _run(session: Session) -> None:
    files = session.small()
    session.warm_up(files)
    workers = session.scale.most
    seconds = session.each_s * SECONDS_FACTOR
    common: dict[str, Parameter] = {"workers": workers, "by": "loop"}
    session.measure(
        f"epoch alone, {processes(workers)}",
        epoch(session, files, 100, workers, repeat=True),
        operation="file",
        limit_s=seconds,
        parameters={**common, "part": "alone"},
    )
    saved = shards(session, "mixed", workers, session.scale.shard_bytes)
    try:
        writers = [delayed(session.target.write_file(saved, index), SAVE_AFTER_S) for index in range(workers)]
        session.measure_groups(
            [
                (
                    f"epoch while a checkpoint is saved, {processes(workers)}",
                    epoch(session, files, 101, workers, repeat=True),
                    "file",
                    {**common, "part": "reads"},
                ),
                (
                    f"the checkpoint meanwhile, {processes(workers, 'writer')}, "
                    f"{size(session.scale.shard_bytes)} each",
                    writers,
                    "shard saved",
                    {**common, "part": "saves", "shard_bytes": session.scale.shard_bytes},
                ),
            ],
            limit_s=seconds,
        )
    finally:
        session.target.remove(saved, tick=session.tick)


WORKLOAD = Workload(
    "mixed",
    "Workers read small files again and again; then the same while as many writers save a checkpoint, "
    "which goes on to the store while they read. What the processes of a tierfs mount spend is shown for all "
    "of it together.",
    1.0,
    _run,
)
