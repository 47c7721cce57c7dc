"""From what was asked for to a result: opens the target, runs the loads, and removes everything again."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence

from tierfs.bench import machine
from tierfs.bench.processes import own_cost_ns
from tierfs.bench.result import BenchResult, Parameter
from tierfs.bench.scale import Scale
from tierfs.bench.session import Session, Watcher, Workload
from tierfs.bench.target import BenchTarget


def run(
    target: BenchTarget,
    size: Scale,
    workloads: Sequence[Workload],
    *,
    seed: int = 0,
    watcher: Watcher | None = None,
    options: dict[str, Parameter] | None = None,
) -> BenchResult:
    """Measure. Whatever happens, what was made in the target is removed, or named in the notes.

    Raises ConfigError if the target cannot be measured at all; KeyboardInterrupt is passed on.
    """
    started = datetime.datetime.now(datetime.UTC)
    began_s = time.monotonic()
    about = machine.machine()
    loop_cost_ns = own_cost_ns()
    left: list[str] = []
    try:
        notes = target.open(size.size_bytes)
        described = target.describe()
        session = Session(target, size, seed=seed, watcher=watcher)
        session.notes += notes
        session.run(workloads)
    finally:
        left = target.close(lambda: watcher("removing what was made", 1.0) if watcher else None)
        if left and watcher is not None:
            watcher(left[0], 1.0)
    return BenchResult(
        started=started.isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - began_s, 3),
        command=machine.command_line(),
        target=described,
        machine=about,
        versions=machine.versions("fio"),
        options=options or {},
        cold=target.cold,
        loop_cost_ns=round(loop_cost_ns, 1),
        measurements=session.measurements,
        skipped=session.skipped,
        notes=[*session.notes, *left],
    )
