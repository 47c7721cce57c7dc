"""``python -m benchmarks.front``: what a hit costs, against a plain directory, and what is wanted.

One run measures everything: reads in every way, small files, names, writes, batches, hits while misses hang,
the cost of operations, and namespaces of growing size. It takes about 20 minutes and 15 GiB below
``--work-dir``, which is on the disk to be compared with; ``--quick`` takes three minutes and less of
everything. Needs root, for mounting with passthrough and for dropping the kernel's caches, and fio.

The exit status is 0 if everything was measured, whether or not what is wanted was reached.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.front import costs, entries, misses, names, null, reads, small, transport, writes
from benchmarks.front.places import MIB, QUICK, TINY, Data, Place, Scale, make_data, mounted, on_tmpfs
from benchmarks.front.report import Findings, report_of
from benchmarks.loops import LoopFailed
from benchmarks.mounted import MountFailed
from tierfs.bench.machine import machine, versions
from tierfs.errors import TierfsError
from tierfs.report import print_text, why_no_plots, write_html

COST_ROUNDS = 3
BESIDE = ("--upload-delay", "3600")
"""Uploads of what a line has written would cost the next one."""
FAILURES = (TierfsError, LoopFailed, MountFailed, OSError, subprocess.CalledProcessError)


class Run:
    """Measures the parts that were asked for, each in its share of the time."""

    def __init__(self, scale: Scale, parts: Sequence[str], work_dir: Path) -> None:
        self.scale = scale
        self.found = Findings()
        self._parts = parts
        self._work_dir = work_dir
        self._plain_dir = work_dir / "store"
        self._end_s = time.monotonic() + scale.limit_s
        self._done: set[str] = set()
        self._part_end_s = 0.0

    def rounds(self, most: int = 1000) -> Iterator[int]:
        """Numbers of rounds, at least one, while the part's time lasts."""
        for number in range(min(self.scale.rounds, most)):
            if number and time.monotonic() > self._part_end_s:
                return
            yield number

    def part(self, name: str, measure: Callable[[], None]) -> None:
        """One part. What fails is noted, and the others are tried."""
        if name not in self._parts:
            return
        self._done.add(name)
        left = sum(WEIGHTS[other] for other in self._parts if other not in self._done) + WEIGHTS[name]
        now_s = time.monotonic()
        self._part_end_s = now_s + max(self._end_s - now_s, 0.0) * WEIGHTS[name] / left
        print(f"{name}...", file=sys.stderr, flush=True)
        try:
            if now_s > self._end_s:
                raise TimeoutError(f"no time was left after {self.scale.limit_s:.0f} s")
            measure()
        except FAILURES as error:
            self.found.lines.failures.append(f"{name}: {error}")
            print(f"{name}: {error}", file=sys.stderr, flush=True)

    def everything(self) -> None:
        """Raises what keeps the data from being made or the mount from being there."""
        if any(name not in ON_THEIR_OWN for name in self._parts):
            self._on_one_mount()
        self.part("tmpfs", self._tmpfs)
        self.part("entries", self._entries)
        self.part("transport", self._transport)

    def _on_one_mount(self) -> None:
        scale, work_dir = self.scale, self._work_dir
        data = make_data(scale, self._plain_dir)
        misses.make_cold(self._plain_dir, scale.rounds)
        beside = work_dir / "plain"
        beside.mkdir()
        written_bytes = scale.shards * scale.shard_bytes
        tier_bytes = 2 * (data.large.total_bytes + data.small.total_bytes + written_bytes) + 512 * MIB
        lines = self.found.lines
        with contextlib.ExitStack() as stack:
            faults = stack.enter_context(misses.faults_file(work_dir / "faults.json"))
            place = stack.enter_context(
                mounted(
                    data,
                    self._plain_dir,
                    work_dir / "main",
                    tier_bytes=tier_bytes,
                    options=BESIDE,
                    local=("large", "small"),
                )
            )
            asked = self._null(stack, data)
            self.part("reads", lambda: reads.measure(lines, scale, data, place, self.rounds()))
            self.part("small", lambda: self._small(data, place, asked))
            self.part("batches", lambda: small.measure_batches(lines, scale, data, place, self.rounds()))
            self.part("names", lambda: names.measure(lines, scale, data, place, asked, self.rounds()))
            self.part(
                "changes",
                lambda: names.measure_changes(lines, scale, work_dir, BESIDE, asked, self.rounds()),
            )
            self.part("writes", lambda: writes.measure(lines, scale, beside, place, self.rounds()))
            self.part("misses", lambda: self._misses(place, faults))
            self.part("costs", lambda: self._costs(data, beside, place))

    def _null(self, stack: contextlib.ExitStack, data: Data) -> null.NullMount | None:
        """The mount whose daemon does nothing, where a part compares with it and it can be had."""
        if not WITH_NULL.intersection(self._parts):
            return None
        why = null.why_not()
        if why:
            self.found.skipped.append(why)
            return None
        return stack.enter_context(null.mounted(data, self._work_dir / "null"))

    def _small(self, data: Data, place: Place, asked: null.NullMount | None) -> None:
        tier_bytes = 2 * data.small.total_bytes + 256 * MIB
        with mounted(
            data,
            self._plain_dir,
            self._work_dir / "ro",
            tier_bytes=tier_bytes,
            options=("--read-only", "--open-mode", "none"),
            local=("small",),
        ) as read_only:
            small.measure(
                self.found.lines, data, place, read_only, asked.data if asked else None, self.rounds()
            )

    def _misses(self, place: Place, faults: Path) -> None:
        self.found.latencies = misses.measure(self.found.lines, self.scale, place, faults, self.rounds())

    def _costs(self, data: Data, beside: Path, place: Place) -> None:
        self.found.costs = costs.measure(self.scale, data, beside, place, self.rounds(COST_ROUNDS))

    def _tmpfs(self) -> None:
        with on_tmpfs() as directory:
            large = make_large(self.scale, directory / "store")
            with mounted(
                large,
                directory / "store",
                directory / "mount",
                tier_bytes=2 * large.large.total_bytes + 64 * MIB,
                local=("large",),
            ) as place:
                reads.measure_tmpfs(self.found.lines, self.scale, large, place, self.rounds())

    def _entries(self) -> None:
        def is_over() -> bool:
            return time.monotonic() > self._part_end_s

        self.found.sizes = entries.measure(self.scale, self._work_dir, is_over)

    def _transport(self) -> None:
        if not transport.PARAMETER.exists():
            self.found.skipped.append("transport: this kernel has no FUSE over io_uring (Linux 6.14)")
            return
        work_dir = self._work_dir / "transport"
        work_dir.mkdir()
        few = min(self.scale.rounds, 3)
        wanted = argparse.Namespace(
            calls=self.scale.transport_calls, rounds=few, hits_rounds=few // 2, seed=1
        )
        self.found.transport = list(transport.run(wanted, work_dir).metrics.values())


def make_large(scale: Scale, root: Path) -> Data:
    """The large file, of a quarter of its size, for memory is scarcer than disk; hardly anything else."""
    return make_data(replace(scale, large_bytes=scale.large_bytes // 4, small_count=1, listed_count=1), root)


WEIGHTS = {
    "reads": 2.0,
    "small": 3.0,
    "batches": 1.0,
    "names": 1.5,
    "changes": 2.5,
    "writes": 1.0,
    "misses": 1.5,
    "costs": 3.0,
    "tmpfs": 0.7,
    "entries": 4.0,
    "transport": 1.5,
}
"""The parts, and each one's share of the time."""
ON_THEIR_OWN = {"tmpfs", "entries", "transport"}
"""Those that make their own mounts and data."""
WITH_NULL = {"small", "names", "changes"}
"""Those in which the kernel asks the front for everything."""


def facts_of(scale: Scale, began_s: float, load: float) -> list[tuple[str, str]]:
    about = machine()
    programs = ", ".join(f"{name} {version}" for name, version in versions("fio").items())
    return [
        ("machine", f"{about.processor}, {about.cores} cores, {about.memory_bytes / 2**30:.1f} GiB"),
        ("system", f"{about.system}, Linux {about.kernel}"),
        ("load", f"{load:.2f} before, {os.getloadavg()[0]:.2f} after"),
        ("versions", programs),
        ("command", shlex.join(sys.orig_argv)),
        ("scale", f"{scale.rounds} rounds at most; {time.monotonic() - began_s:.0f} s"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.front",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="three minutes")
    parser.add_argument("--tiny", action="store_true", help="only see whether it works")
    parser.add_argument("--only", nargs="+", choices=list(WEIGHTS), metavar="PART", help=", ".join(WEIGHTS))
    parser.add_argument("--rounds", type=int, help="instead of the scale's own")
    parser.add_argument("--work-dir", type=Path, help="on the disk to be compared with (default: a new one)")
    parser.add_argument("--html", type=Path, help="write a report with plots to this file")
    parser.add_argument("--json", type=Path, help="write all values to this file")
    options = parser.parse_args(arguments)
    missing = why_no_plots()
    if options.html and missing:
        print(f"benchmarks.front: {missing}", file=sys.stderr)
        return 1
    scale = TINY if options.tiny else QUICK if options.quick else Scale()
    if options.rounds:
        scale = replace(scale, rounds=options.rounds)
    load, began_s = os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tierfs-front-", dir=options.work_dir) as directory:
        os.environ["TIERFS_RUN_DIR"] = f"{directory}/run"
        run = Run(scale, options.only or list(WEIGHTS), Path(directory))
        try:
            run.everything()
        except FAILURES as error:
            print(f"benchmarks.front: {error}", file=sys.stderr)
            return 1
    found = run.found
    facts = facts_of(scale, began_s, load)
    report = report_of(found, facts)
    print_text(report)
    if options.html:
        write_html(report, options.html)
    if options.json:
        content = {
            "facts": dict(facts),
            "lines": [line.as_json() for line in found.lines.every],
            "costs": [asdict(cost) for cost in found.costs],
            "sizes": [asdict(size) for size in found.sizes],
            "transport": {metric.name: metric.as_json(transport.RING) for metric in found.transport},
            "failures": found.lines.failures,
        }
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    return 1 if found.lines.failures else 0


if __name__ == "__main__":
    sys.exit(main())
