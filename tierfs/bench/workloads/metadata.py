"""A storm: many processes walk the same tree at the same moment, as every rank does when a job starts."""

from __future__ import annotations

from tierfs.bench.session import Session, Workload
from tierfs.bench.target import STORE

OPENED = "entry listed, and opened if it is a file"
LISTED = "entry listed; times are those of a page of entries"
STORM_FACTOR = 4
"""How many times as many processes as workers: they wait more than they work."""


def _run(session: Session) -> None:
    files = session.small()
    counts = sorted({1, *session.scale.workers, session.scale.most * STORM_FACTOR})
    if session.scale.quick:
        counts = [1, session.scale.most * STORM_FACTOR]
    for count in counts:
        session.measure(
            "1 process" if count == 1 else f"{count} processes",
            [session.target.walk(files) for _ in range(count)],
            operation=OPENED if session.target.kind != STORE else LISTED,
            parameters={
                "workers": count,
                "entries": len(files.entries) + len(files.directories()),
                "by": "loop",
            },
        )


WORKLOAD = Workload(
    "metadata",
    "Processes that walk one tree at the same time: list each directory, stat each entry, open each file.",
    1.0,
    _run,
)
