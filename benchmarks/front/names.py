"""Names and attributes: stat, walks with find and ls, and what changes the namespace."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.front import metadata
from benchmarks.front.lines import MOUNT, NULL, PLAIN, Lines, Wanted, alternate
from benchmarks.front.null import NullMount
from benchmarks.front.places import KEPT, Data, Place, Scale, drop, unused_groups
from benchmarks.mounted import fresh_mount
from tierfs.bench.files import FileSet
from tierfs.bench.loops import on_each
from tierfs.bench.processes import run_together

SECTION = "Names and attributes"
TIER_BYTES = 1024 * 1024 * 1024
"""Of the mount in which names are changed: the files are empty or small."""
WALKS = {"find": (("find", "."), 0.6), "ls -lR": (("ls", "-lR", "."), 1.5)}
JUICEFS_CREATES = {1: 1560.0, 8: 4730.0}
"""Per second, by processes: the fastest peer, measured beforehand on another run of this kind of machine."""
RCLONE_RENAMES, RCLONE_UNLINKS = 3520.0, 4210.0
CHANGES = {
    "create, 1": Wanted(2 * JUICEFS_CREATES[1], absolute=True, why="2 x JuiceFS"),
    "create, 8": Wanted(4 * JUICEFS_CREATES[8], absolute=True, why="4 x JuiceFS"),
    "rename, 1": Wanted(2 * RCLONE_RENAMES, absolute=True, why="2 x rclone"),
    "unlink, 1": Wanted(2 * RCLONE_UNLINKS, absolute=True, why="2 x rclone"),
}
"""By the names of ``benchmarks.front.metadata``; the number is that of processes."""


def stat_rate(paths: Sequence[str]) -> float:
    outcome = run_together([on_each(paths, "stat")], limit_s=3600.0)
    return outcome.operations / outcome.seconds


def walk(command: Sequence[str], files: FileSet) -> float:
    """Entries per second, dentries and inodes dropped before."""
    drop()
    start = time.monotonic()
    subprocess.run(command, cwd=files.root, stdout=subprocess.DEVNULL, check=True)
    return len(files.entries) / (time.monotonic() - start)


def measure(
    lines: Lines, scale: Scale, plain: Data, place: Place, null: NullMount | None, rounds: Iterable[int]
) -> None:
    """``null``: a mount whose daemon does nothing, if there is one.

    Raises BenchFailed, CalledProcessError.
    """
    data = {PLAIN: plain, MOUNT: place.data}
    if null is not None:
        data[NULL] = null.data
    paths = {who: found.small.first(scale.stat_count).paths() for who, found in data.items()}
    for every in data.values():
        subprocess.run(("ls", "-lR", "."), cwd=every.listed.root, stdout=subprocess.DEVNULL, check=True)
    for number in rounds:
        name = f"stat of {scale.stat_count:,} files, dropped"
        alternate(
            number, lines.line(SECTION, name, "1/s", Wanted(0.5)),
            {who: partial(_dropped, partial(stat_rate, found)) for who, found in paths.items()},
        )  # fmt: skip
        for found in paths.values():
            stat_rate(found)
        name = f"stat of {scale.stat_count:,} files, hot"
        alternate(
            number, lines.line(SECTION, name, "1/s", Wanted(0.9)),
            {who: partial(stat_rate, found) for who, found in paths.items()},
        )  # fmt: skip
        for words, (command, wanted) in WALKS.items():
            name = f"{words} over {scale.listed_count:,} entries, dropped"
            alternate(
                number, lines.line(SECTION, name, "entries/s", Wanted(wanted)),
                {who: partial(walk, command, found.listed) for who, found in data.items()},
            )  # fmt: skip


def _dropped(measured: Callable[[], float]) -> float:
    drop()
    return measured()


def measure_changes(
    lines: Lines,
    scale: Scale,
    work_dir: Path,
    options: Sequence[str],
    null: NullMount | None,
    rounds: Iterable[int],
) -> None:
    """Create, rename and unlink files, in a mount with these options and in a plain directory beside it.

    Both are new in every round: see ``unused_groups``. Raises LoopFailed, MountFailed, OSError.
    """
    for number in rounds:
        with unused_groups(work_dir) as beside:
            plain, store = beside / "plain", beside / "store"
            for directory in (plain, store):
                directory.mkdir()
            with fresh_mount(
                str(store), beside / "mnt", beside / "mount", tier_bytes=TIER_BYTES, options=(*KEPT, *options)
            ) as mount:
                places = {PLAIN: plain, MOUNT: mount.mountpoint}
                if null is not None:
                    places[NULL] = null.mountpoint
                for who in reversed(list(places)) if number % 2 else places:
                    _change(lines, scale, who, places[who] / f"changes{number}")


def _change(lines: Lines, scale: Scale, who: str, directory: Path) -> None:
    directory.mkdir()
    for found in metadata.measure(directory, files=scale.made_count, threads=(1, 8), pause_s=scale.pause_s):
        if found.step in CHANGES:
            wanted = CHANGES[found.step]
            words, _, processes = found.step.partition(", ")
            name = f"{words}, {processes} process{'es' if processes != '1' else ''}"
            lines.line(SECTION, name, "1/s", wanted, note=f"wanted: {wanted.why}").add(who, found.rate)
    directory.rmdir()
