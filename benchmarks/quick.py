"""``python -m benchmarks.quick``: the numbers that matter most, in one run of less than three minutes.

Measures a mount against a plain directory (on the same disk as the tier) and against what the store gives by
itself. Without ``--source`` it starts a SeaweedFS server if its binary ``weed`` is found, else it uses a
directory as store. Writes less than 2 GiB below ``--work-dir`` and removes it again. What each line means:

* *cold*: nothing of the file is local; every round has a new mount with an empty tier. The server's own data
  are in its page cache, for everybody alike. For the plain directory: not in the page cache.
* *warm*: in the tier, but not in the kernel's cache of the mount. Plain directory: in the page cache.
* *x direct*: against the same bytes by plain HTTP (or pread), by as many processes as the line says.
* *x client*: against tierfs's own store client with as many threads, without a mount.

For the two cold lines it adds up what server, daemon and readers spend of the processors: see ``budget``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.loops import LoopFailed
from benchmarks.mounted import MountFailed
from benchmarks.plan import CLIENT, DIRECT, MOUNT, PLAIN, TINY, Plan, Scale
from benchmarks.samples import table
from benchmarks.sources import SourceFailed, open_source

LAST_ROUND_AFTER_S = 110.0
"""No further round is begun after this time, so that a slow machine gets an answer too."""


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 1024**3, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def report(plan: Plan, about: dict[str, Any], seconds: float) -> str:
    lines = [
        f"machine   {about['processor']}, {about['cores']} cores, {about['memory_gib']} GiB, "
        f"Linux {about['kernel']}, Python {about['python']}, load before {about['load']:.2f}",
        f"store     {plan.source.description}",
        f"mount     {plan.notes.get('mount command', '-')}",
        f"command   {shlex.join(sys.orig_argv)}",
        f"          {plan.notes['rounds']} rounds in {seconds:.0f} s",
        "",
        table(plan.metrics, MOUNT, (PLAIN, DIRECT, CLIENT)),
        "",
        *plan.goals(),
        "",
        *plan.budget_lines(),
    ]
    return "\n".join(lines)


def run(
    scale: Scale, given: str | None, mountpoint: Path | None, work_dir: Path
) -> tuple[Plan, dict[str, Any], float]:
    """Measure everything. Raises SourceFailed, MountFailed, LoopFailed."""
    about = machine()
    start = time.monotonic()
    with open_source(given, work_dir) as source:
        plan = Plan(scale, source, mountpoint or work_dir / "mnt", work_dir)
        plan.prepare()
        for number in range(scale.rounds):
            if number and time.monotonic() - start > LAST_ROUND_AFTER_S:
                break
            plan.measure(number)
            plan.notes["rounds"] = number + 1
        plan.measure_memory()
    return plan, about, time.monotonic() - start


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quick", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--source", help="s3://bucket/prefix or a directory; a fresh place in it is used")
    parser.add_argument("--mountpoint", type=Path, help="an empty directory")
    parser.add_argument("--work-dir", type=Path, help="where everything is written (default: a new one)")
    parser.add_argument("--json", type=Path, help="write all values to this file")
    parser.add_argument("--rounds", type=int, default=Scale.rounds)
    parser.add_argument("--entries", type=int, default=Scale.entries, help="size of the large directory")
    parser.add_argument("--tiny", action="store_true", help="only see whether it works")
    options = parser.parse_args(arguments)
    scale = TINY if options.tiny else Scale(rounds=options.rounds, entries=options.entries)
    with tempfile.TemporaryDirectory(prefix="tierfs-quick-", dir=options.work_dir) as work_dir:
        try:
            plan, about, seconds = run(scale, options.source, options.mountpoint, Path(work_dir))
        except (SourceFailed, MountFailed, LoopFailed) as error:
            print(f"benchmarks.quick: {error}", file=sys.stderr)
            return 1
    print(report(plan, about, seconds))
    if options.json:
        content = {
            "machine": about,
            "store": plan.source.description,
            "command": shlex.join(sys.orig_argv),
            "notes": plan.notes,
            "metrics": {metric.name: metric.as_json(MOUNT) for metric in plan.metrics},
            "budgets": {budget.name: budget.as_json() for budget in plan.budgets.values()},
        }
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
