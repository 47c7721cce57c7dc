"""The pulse of a checkpoint: every writer saves its shard at the same moment; and its restore, cold."""

from __future__ import annotations

import time

from tierfs.bench.files import FileSet, large_files
from tierfs.bench.result import Measurement, Parameter
from tierfs.bench.session import COLD, WARM, Session, Workload
from tierfs.bench.target import MOUNT
from tierfs.bench.workloads.naming import processes, size

PULSE_LIMIT_FACTOR = 10


def shards(session: Session, name: str, count: int, shard_bytes: int) -> FileSet:
    return large_files(f"{session.target.place}/{name}", count, shard_bytes, stem="rank", seed=session.seed)


def _save(session: Session) -> None:
    most = session.scale.most
    for pulse in range(1, session.scale.pulses + 1):
        for writers in sorted({1, most}):
            shard_bytes = session.scale.shard_bytes
            saved = shards(session, f"save{pulse}-{writers}", writers, shard_bytes)
            name = f"{processes(writers, 'writer')}, {size(shard_bytes)} each"
            if session.scale.pulses > 1:
                name += f", pulse {pulse}"
            try:
                _pulse(session, saved, name, writers)
            finally:
                session.target.remove(saved, tick=session.tick)


def _pulse(session: Session, saved: FileSet, name: str, writers: int) -> None:
    tasks = [session.target.write_file(saved, index) for index in range(writers)]
    began = time.monotonic()
    found = session.measure(
        name,
        tasks,
        operation="shard saved",
        limit_s=session.pass_s(PULSE_LIMIT_FACTOR),
        parameters={
            "workers": writers,
            "shard_bytes": saved.entries[0][1],
            "until": "close",
            "by": "loop",
        },
    )
    if found is not None and session.target.kind == MOUNT:
        _until_stored(session, found, began)


def _until_stored(session: Session, saved: Measurement, began_s: float) -> None:
    """How long until the store has all of it: what the trainer does not wait for."""
    session.say("waiting for the uploads")
    name = f"{saved.variant}, until in the store"
    limit_s = max(session.time_left_s(), 1.0)
    unsettled = session.target.settle(limit_s=limit_s, tick=session.tick)
    if unsettled:
        session.skip(name, unsettled)
        return
    session.measurements.append(
        Measurement(
            workload=saved.workload,
            variant=name,
            parameters={**saved.parameters, "until": "stored"},
            operation=saved.operation,
            operations=saved.operations,
            bytes=saved.bytes,
            seconds=round(time.monotonic() - began_s, 6),
        )
    )


def _restore(session: Session) -> None:
    most = session.scale.most
    wanted = shards(session, "restore", most, session.scale.shard_bytes)
    session.say("making a checkpoint")
    stop_s = time.monotonic() + session.time_left_s() / 2
    saved = session.target.make(wanted, stop_s=stop_s, tick=session.tick)
    try:
        readers = len(saved.entries)
        states = (COLD, WARM) if session.target.cold else ("",)
        for state in states:
            name = ", ".join(part for part in (state, processes(readers, "reader")) if part)
            if state == COLD and not session.make_cold(saved, name):
                continue
            if state == WARM:
                session.warm_up(saved)
            parameters: dict[str, Parameter] = {
                "workers": readers,
                "shard_bytes": saved.entries[0][1],
                "by": "loop",
            }
            if state:
                parameters["state"] = state
            session.measure(
                name,
                [session.target.read_files(saved, [index]) for index in range(readers)],
                operation="shard read",
                limit_s=session.pass_s(PULSE_LIMIT_FACTOR),
                parameters=parameters,
            )
    finally:
        session.target.remove(wanted, tick=session.tick)


SAVE = Workload(
    "checkpoint", "Every writer saves its shard at the same moment: write, fsync, close.", 1.5, _save
)
RESTORE = Workload(
    "restore", "Every reader reads its shard of a checkpoint at the same moment.", 1.5, _restore
)
