"""``python -m benchmarks.planned``: what ``tierfs plan`` predicts for small jobs, and what a real mount then
does.

The store is a directory behind injected latency: each request takes so long, and then moves at so many bytes
per second (``TIERFS_FAULTS``). The tier is smaller than the data set. Each round has a new mount, some epochs
of a training loop, a checkpoint, and its restore, on the same mount and on another one with an empty tier.
Before that, the rates that a planner has to be told are measured: the disk of the tier, reads through a mount
of what is local, and what a mount fetches from a store without a limit.

``--write`` puts the result into the package, where ``tierfs plan`` reports it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from benchmarks import loops
from benchmarks.lockstep import run_epoch
from benchmarks.loops import LoopFailed, drop_page_cache, together
from benchmarks.mounted import Mounted, MountFailed
from benchmarks.quick import machine
from benchmarks.shaped import LATENCY_S, STREAM_RATE, Probed, ShapedMounts, probe, shares
from tierfs.plan import measured, saves, setups
from tierfs.plan.describe import shown, size
from tierfs.plan.epochs import Scale, read_epochs
from tierfs.plan.loader import Pace
from tierfs.plan.measured import Check, Compared
from tierfs.plan.scenario import KIB, MIB, Scenario
from tierfs.plan.trace import DataSet

UNLIMITED = 100e9
CONNECTIONS = 4
PULSES = 2
PLAIN_RATE = "nvme_write_rate"


@dataclass(frozen=True, slots=True)
class Job:
    """One small job. ``scenario``: without what is measured."""

    name: str
    scenario: Scenario

    @property
    def words(self) -> str:
        scenario, files = self.scenario, DataSet(self.scenario).contents
        saved = f", a checkpoint of {size(scenario.checkpoint_bytes)}" if scenario.checkpoint_bytes else ""
        return (
            f"{files} files of {size(scenario.content_bytes)}, a tier of {size(scenario.nvme_bytes)}, "
            f"{scenario.gpus} GPUs, loaders {scenario.workers} each, {size(scenario.demand_rate)}/s wanted"
            f"{saved}; the store takes {1000 * LATENCY_S:.0f} ms and {size(STREAM_RATE)}/s per request, "
            f"{CONNECTIONS} connections."
        )


def _job(name: str, **fields: object) -> Job:
    common = Scenario(
        gpus=2,
        gpus_per_node=2,
        epochs=3,
        ram_bytes=0,
        network_rate=UNLIMITED,
        store_read_rate=UNLIMITED,
        store_write_rate=UNLIMITED,
        store_stream_rate=STREAM_RATE,
        store_latency_s=LATENCY_S,
        store_latency_p99_s=LATENCY_S,
        fetch_concurrency=CONNECTIONS,
        upload_concurrency=CONNECTIONS,
        upload_delay_s=0.0,
    )
    return Job(name, msgspec.structs.replace(common, **fields).check())


JOBS = (
    _job(
        "shards",
        gpus=2,
        workers=1,
        prefetch_batches=4,
        dataset_bytes=896 * MIB,
        shard_bytes=32 * MIB,
        nvme_bytes=512 * MIB,
        sample_bytes=64 * KIB,
        samples_per_s=480.0,
        step_s=0.25,
        checkpoint_bytes=192 * MIB,
    ),
    _job(
        "small files",
        layout="files",
        gpus=2,
        workers=2,
        dataset_bytes=2000 * 96 * KIB,
        nvme_bytes=128 * MIB,
        sample_bytes=96 * KIB,
        samples_per_s=80.0,
        step_s=0.25,
    ),
)


def predict(scenario: Scenario) -> dict[str, tuple[str, float]]:
    """Figure -> (unit, value), by the planner's own model; epochs are simulated from their first to their
    last step.
    """
    # The saves come after the epochs: no checkpoint is in the tier while they read.
    reading = msgspec.structs.replace(scenario, checkpoint_bytes=0)
    keep = partial(setups.keep, reading, setups.TIERFS)
    build = partial(setups.build, reading, setups.TIERFS)
    every = set(range(1, scenario.epochs + 1))
    found: dict[str, tuple[str, float]] = {}
    for epoch in read_epochs(reading, keep, build, windows=every, scale=Scale.whole()):
        if epoch.number > 1:
            found[f"hit rate, epoch {epoch.number}"] = ("share", epoch.hit_rate)
        stall_s = epoch.stall_s or 0.0
        found[f"stall of a step, epoch {epoch.number}"] = ("s", stall_s)
        found[f"GPUs compute, epoch {epoch.number}"] = (
            "share",
            scenario.step_s / (scenario.step_s + stall_s),
        )
    if scenario.checkpoint_bytes:
        saving = saves.simulate(scenario, setups.TIERFS)
        found["stall of a save"] = ("s", saving.stall_s)
        found["drain of a save"] = ("s", saving.drain_s)
        found["reading it back, same node"] = ("s", saving.restore_same_s)
        found["reading it back, other node"] = ("s", saving.restore_new_s)
    return found


class Bench:
    """The directories of one run."""

    def __init__(self, work_dir: Path) -> None:
        self.work_dir = work_dir
        self.mounts = ShapedMounts(work_dir)

    def fill(self, job: Job) -> list[str]:
        """The data set of a job as files in a store; returns their names by number."""
        data = DataSet(job.scenario)
        noise = random.Random(1).randbytes(data.content_bytes + data.contents)
        directory = self.store(job) / "data"
        directory.mkdir(parents=True)
        names = [f"{number:06}" for number in range(data.contents)]
        for number, name in enumerate(names):
            (directory / name).write_bytes(noise[number : number + data.content_bytes])
        return names

    def store(self, job: Job) -> Path:
        return self.work_dir / job.name.replace(" ", "-")

    def measure(self, job: Job, names: Sequence[str]) -> dict[str, list[float]]:
        """One round: figure -> values."""
        scenario = job.scenario
        data = DataSet(scenario)
        pace = Pace(
            gpus=scenario.gpus,
            workers=scenario.workers,
            prefetch_batches=scenario.prefetch_batches,
            batch_bytes=scenario.samples_per_s * scenario.step_s * scenario.sample_bytes,
            step_s=scenario.step_s,
        )
        found: dict[str, list[float]] = {}
        with self._mount_of(job) as mounted:
            base = mounted.mountpoint / "data"
            os.listdir(base)
            for number in range(1, scenario.epochs + 1):
                drop_page_cache([str(base / name) for name in names])
                before = _fetched_bytes(mounted)
                stalls_s = run_epoch([str(base / names[content]) for content in data.order(0, number)], pace)
                fetched = _fetched_bytes(mounted) - before
                if number > 1:
                    found[f"hit rate, epoch {number}"] = [1 - fetched / scenario.dataset_bytes]
                stall_s = statistics.fmean(stalls_s)
                found[f"stall of a step, epoch {number}"] = [stall_s]
                found[f"GPUs compute, epoch {number}"] = [scenario.step_s / (scenario.step_s + stall_s)]
            if scenario.checkpoint_bytes:
                found |= self._save(mounted, scenario)
        if scenario.checkpoint_bytes:
            with self._mount_of(job) as mounted:
                paths = _ranks(mounted, scenario)
                os.listdir(mounted.mountpoint / "checkpoint")
                found["reading it back, other node"] = [together(shares(paths, scenario.gpus)).seconds]
                for path in paths:
                    os.unlink(path)
        return found

    def _mount_of(self, job: Job) -> contextlib.AbstractContextManager[Mounted]:
        tier_bytes = job.scenario.nvme_bytes
        return self.mounts.mount(self.store(job), tier_bytes=tier_bytes, shaped=True, connections=CONNECTIONS)

    def _save(self, mounted: Mounted, scenario: Scenario) -> dict[str, list[float]]:
        """Saves, each next to one on the plain disk: a shared disk is never the same for long."""
        plain = self.work_dir / "plain"
        plain.mkdir(exist_ok=True)
        (mounted.mountpoint / "checkpoint").mkdir(exist_ok=True)
        paths = _ranks(mounted, scenario)
        each = scenario.checkpoint_bytes // scenario.gpus
        found: dict[str, list[float]] = defaultdict(list)
        for _ in range(PULSES):
            beside = together([loops.write_file(str(plain / Path(path).name), each) for path in paths])
            found[PLAIN_RATE].append(beside.rate)
            saved = together([loops.write_file(path, each) for path in paths])
            found["stall of a save"].append(saved.seconds)
            found["drain of a save"].append(mounted.flush())
            drop_page_cache(paths)
            found["reading it back, same node"].append(together(shares(paths, scenario.gpus)).seconds)
        return found


def _ranks(mounted: Mounted, scenario: Scenario) -> list[str]:
    return [str(mounted.mountpoint / "checkpoint" / f"rank{rank}") for rank in range(scenario.gpus)]


def _fetched_bytes(mounted: Mounted) -> int:
    return int(mounted.status()["store"]["bytes_read"])


def compare(bench: Bench, jobs: Sequence[Job], rounds: int) -> tuple[Probed, list[Compared]]:
    """Rates and jobs, round by round, so that a disturbance of the machine does not hit one of them alone."""
    rates: dict[str, list[float]] = defaultdict(list)
    per_core: dict[str, list[float]] = defaultdict(list)
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    names = {job.name: bench.fill(job) for job in jobs}
    for number in range(rounds):
        probed = probe(bench.mounts, bench.work_dir / "probe")
        for field, rate in probed.rates.items():
            rates[field].append(rate)
        for field, rate in probed.per_core.items():
            per_core[field].append(rate)
        for job in jobs:
            print(f"round {number + 1} of {rounds}: {job.name}", file=sys.stderr, flush=True)
            for figure, values in bench.measure(job, names[job.name]).items():
                (rates[PLAIN_RATE] if figure == PLAIN_RATE else found[job.name, figure]).extend(values)
    told_rates = _medians(rates)
    compared = []
    for job in jobs:
        told = msgspec.structs.replace(job.scenario, **told_rates)
        for figure, (unit, predicted) in predict(told).items():
            values = found[job.name, figure]
            compared.append(
                Compared(
                    job=job.name,
                    figure=figure,
                    unit=unit,
                    predicted=predicted,
                    measured=statistics.median(values),
                    low=min(values),
                    high=max(values),
                )
            )
    return Probed(told_rates, _medians(per_core)), compared


def _medians(values: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(each) for name, each in values.items()}


def table(check: Check) -> str:
    lines = [
        f"machine   {check.machine}",
        f"command   {check.command}, {check.rounds} rounds",
        *(f"{name:<9} {words}" for name, words in check.jobs.items()),
        f"told      {_fields(check.rates)}",
        f"one core  {_fields(check.per_core)}",
        "",
        f"{'job':<12}  {'figure':<28}  {'predicted':>10}  {'measured':>10}  {'rounds':>22}  {'error':>6}",
    ]
    for one in check.compared:
        spread = f"{shown(one.low, one.unit)} to {shown(one.high, one.unit)}"
        error = one.shown_error
        lines.append(
            f"{one.job:<12}  {one.figure:<28}  {shown(one.predicted, one.unit):>10}  "
            f"{shown(one.measured, one.unit):>10}  {spread:>22}  {error:>6}"
        )
    return "\n".join(
        [
            *lines,
            "",
            _mean_errors(check),
        ]
    )


def _fields(values: dict[str, float]) -> str:
    return ", ".join(f"{field} {value:.4g}" for field, value in values.items())


def _mean_errors(check: Check) -> str:
    shares, times = check.mean_error(shares=True), check.mean_error(shares=False)
    return f"mean error: shares {100 * shares:.0f} points, times {100 * times:.0f} %"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planned", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--job", action="append", choices=[job.name for job in JOBS], help="only this one")
    parser.add_argument("--work-dir", type=Path, help="where everything is written (default: a new one)")
    parser.add_argument("--write", action="store_true", help="keep the result in the package")
    parser.add_argument(
        "--again", action="store_true", help="measure nothing: predict anew what the package has measured"
    )
    options = parser.parse_args(arguments)
    if options.again:
        return _keep(_predicted_anew(), write=options.write)
    jobs = [job for job in JOBS if not options.job or job.name in options.job]
    about = machine()
    with tempfile.TemporaryDirectory(prefix="tierfs-planned-", dir=options.work_dir) as work_dir:
        bench = Bench(Path(work_dir))
        try:
            probed, compared = compare(bench, jobs, options.rounds)
        except (MountFailed, LoopFailed) as error:
            print(f"benchmarks.planned: {error}", file=sys.stderr)
            return 1
    check = Check(
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        machine=f"{about['processor']}, {about['cores']} cores, Linux {about['kernel']}, "
        f"load {about['load']:.1f}",
        processor=about["processor"],
        command=f"python -m benchmarks.planned --rounds {options.rounds}",
        rounds=options.rounds,
        jobs={job.name: job.words for job in jobs},
        rates=probed.rates,
        per_core=probed.per_core,
        compared=compared,
    )
    return _keep(check, write=options.write)


def _predicted_anew() -> Check:
    """The model has changed: what it says now, told the same rates, next to what was measured then."""
    check = measured.load_check()
    assert check is not None
    said: dict[tuple[str, str], float] = {}
    for job in JOBS:
        told = msgspec.structs.replace(job.scenario, **check.rates)
        said |= {(job.name, figure): value for figure, (_, value) in predict(told).items()}
    compared = [msgspec.structs.replace(one, predicted=said[one.job, one.figure]) for one in check.compared]
    return msgspec.structs.replace(check, compared=compared)


def _keep(check: Check, *, write: bool) -> int:
    print(table(check))
    if write:
        data = msgspec.json.format(msgspec.json.encode(check), indent=1)
        (Path(measured.__file__).parent / measured.FILE).write_bytes(data + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
