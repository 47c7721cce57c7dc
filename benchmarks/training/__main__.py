"""``python -m benchmarks.training --interpreter PYTHON``: see :mod:`benchmarks.training`."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.servers import ServerFailed
from benchmarks.sources import SourceFailed, open_source
from benchmarks.training import pictures
from benchmarks.training.driver import LoadFailed, versions
from benchmarks.training.plan import Load, loads
from benchmarks.training.result import TrainingResult, encode
from benchmarks.training.rounds import Rounds
from tierfs.bench.machine import machine
from tierfs.report import print_text, why_no_plots, write_html


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[Load]]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--interpreter", type=Path, required=True, help="a Python with torch, DLIO...")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=40.0, help="no load is begun after this time (40)")
    parser.add_argument("--size", type=float, default=1.0, help="amount of data, 1.0: about 800 MiB")
    parser.add_argument("--loads", default="", help="only these, by name, with commas")
    parser.add_argument("--source", help="s3://bucket/prefix or a directory (default: a SeaweedFS server)")
    parser.add_argument("--work-dir", type=Path, help="on the disk to be measured")
    parser.add_argument("--json", type=Path, help="write all values to this file")
    parser.add_argument("--html", type=Path, help="write the report with plots to this file")
    options = parser.parse_args(arguments)
    known = loads(options.size)
    names = [name for name in options.loads.split(",") if name] or [load.name for load in known]
    if unknown := set(names) - {load.name for load in known}:
        parser.error(f"--loads: no load {min(unknown)!r}; there are {', '.join(load.name for load in known)}")
    if options.html and (missing := why_no_plots()):
        parser.error(f"--html: {missing}")
    return options, [load for load in known if load.name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    options, wanted = parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # told to stop, it still cleans up
    work_dir = Path(tempfile.mkdtemp(prefix="tierfs-training-", dir=options.work_dir))
    try:
        result = run(options, wanted, work_dir)
    except (SourceFailed, ServerFailed, LoadFailed) as error:
        print(f"benchmarks.training: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("benchmarks.training: interrupted", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)
    report = pictures.report(result, wanted)
    print_text(report)
    if options.json:
        options.json.write_bytes(encode(result))
    if options.html:
        write_html(report, options.html)
    return 0


def run(options: argparse.Namespace, wanted: Sequence[Load], work_dir: Path) -> TrainingResult:
    """Everything, in ``work_dir``. Raises SourceFailed, ServerFailed, LoadFailed."""
    began = time.monotonic()
    result = TrainingResult(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["python", *sys.orig_argv[1:]]),
        machine=machine(),
        packages=versions(options.interpreter, sorted({name for load in wanted for name in load.needs})),
    )
    with open_source(options.source, work_dir) as source:
        result.store = source.description
        deadline = began + options.minutes * 60
        Rounds(options.interpreter, source, work_dir, result, deadline, say).run(wanted, options.rounds)
    result.seconds = time.monotonic() - began
    result.load_after = os.getloadavg()[0]
    return result


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
