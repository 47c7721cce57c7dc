"""One run: its target, its scale, its time, and what it has found so far.

A load (``workloads``) asks the session for data, for cold data, and to measure tasks; the session times them,
adds the CPU seconds of the daemons behind the target, and keeps what came out. Each load has its share of the
time that is left; when that is over, its remaining variants are skipped, and said to be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tierfs.bench import daemons, fio, scale
from tierfs.bench.files import FileSet, large_files, small_files
from tierfs.bench.processes import Outcome, Task, run_groups, run_together
from tierfs.bench.result import Measurement, Parameter, Skipped
from tierfs.bench.scale import Scale
from tierfs.bench.target import BenchTarget
from tierfs.errors import BenchFailed, TierfsError

COLD, WARM = "cold", "warm"
START_S = 0.8
"""About what it takes to start fio, or processes."""
MAKE_SHARE = 0.4
"""Of a load's time, what making its data may take."""

T = TypeVar("T")
Watcher = Callable[[str, float], None]
"""Called a few times a second with what is being done, and which share of the time is over."""


@dataclass(frozen=True, slots=True)
class Workload:
    """``what``: in one sentence, for the report. ``weight``: its share of the time, against the others'."""

    name: str
    what: str
    weight: float
    run: Callable[[Session], None]


class Session:
    """See the module docstring. ``measurements`` and ``skipped`` are what it found."""

    def __init__(
        self, target: BenchTarget, size: Scale, *, seed: int = 0, watcher: Watcher | None = None
    ) -> None:
        self.target = target
        self.scale = size
        self.seed = seed
        self.measurements: list[Measurement] = []
        self.skipped: list[Skipped] = []
        self.notes: list[str] = []
        self._watcher = watcher
        self._doing = ""
        self.each_s = size.variant_s
        self._started_s = time.monotonic()
        self._stop_s = self._started_s + size.limit_s
        self._load_stop_s = self._stop_s
        self._load = ""
        self._large: FileSet | None = None
        self._small: FileSet | None = None

    # -- time

    def run(self, workloads: Sequence[Workload]) -> None:
        """All of them, one after the other. What fails is noted, and the next one is tried."""
        for number, workload in enumerate(workloads):
            left = workloads[number:]
            now_s = time.monotonic()
            share = workload.weight / sum(other.weight for other in left)
            self._load = workload.name
            self._load_stop_s = now_s + max(self._stop_s - now_s, 0.0) * share
            self.say("preparing")
            if now_s >= self._stop_s:
                self.skip("", self._no_time())
                continue
            try:
                workload.run(self)
            except (TierfsError, OSError) as error:
                self.fail("", error)

    def in_turn(self, variants: Sequence[T]) -> Iterator[T]:
        """Variants one after the other, each so short (``each_s``) that all of them have a turn.

        They are not made shorter than a quarter of their usual time: the last ones are left out before that.
        """
        usual_s = self.scale.variant_s
        try:
            for number, variant in enumerate(variants):
                fair_s = self.time_left_s() / (len(variants) - number) - START_S
                self.each_s = min(usual_s, max(fair_s, usual_s / 4))
                yield variant
        finally:
            self.each_s = usual_s

    def time_left_s(self) -> float:
        """Of the load that runs now."""
        return self._load_stop_s - time.monotonic()

    def pass_s(self, factor: float) -> float:
        """How long something that ends by itself may take: so many times a variant's time, or a third of
        what the load has left, where that is more."""
        return max(self.each_s * factor, self.time_left_s() / 3)

    def say(self, what: str) -> None:
        """What is being done now."""
        self._doing = f"{self._load}: {what}"
        self.tick()

    def tick(self) -> None:
        if self._watcher is not None:
            over = (time.monotonic() - self._started_s) / self.scale.limit_s
            self._watcher(self._doing, min(over, 1.0))

    # -- data

    def large(self) -> FileSet:
        """Some large files, made by the first load that needs them."""
        if self._large is None:
            wanted = large_files(
                f"{self.target.place}/large",
                self.scale.large_count,
                self.scale.large_file_bytes,
                seed=self.seed,
            )
            self._large = self._make(wanted)
        return self._large

    def small(self) -> FileSet:
        """Many small files."""
        if self._small is None:
            wanted = small_files(
                f"{self.target.place}/small",
                self.scale.small_count,
                low_bytes=self.scale.small_low_bytes,
                high_bytes=self.scale.small_high_bytes,
                per_directory=250,
                seed=self.seed,
            )
            self._small = self._make(wanted)
        return self._small

    def _make(self, wanted: FileSet) -> FileSet:
        self.say(f"making {len(wanted.entries)} files, {wanted.total_bytes / scale.MIB:.0f} MiB")
        stop_s = time.monotonic() + self.time_left_s() * MAKE_SHARE
        made = self.target.make(wanted, stop_s=stop_s, tick=self.tick)
        if len(made.entries) < len(wanted.entries):
            files = f"{len(made.entries)} of {len(wanted.entries)} files"
            mib = f"{made.total_bytes / scale.MIB:.0f} of {wanted.total_bytes / scale.MIB:.0f} MiB"
            self.notes.append(f"{self._load}: there was time to make and store {files} ({mib})")
        if not made.entries:
            raise BenchFailed("there was no time to make a single file")
        return made

    def make_cold(self, files: FileSet, variant: str) -> bool:
        """Whether the files are cold now; if not, the variant is skipped."""
        self.say("making the data cold")
        why_not = self.target.make_cold(files, limit_s=max(self.time_left_s() / 2, 1.0), tick=self.tick)
        if why_not:
            self.skip(variant, f"not cold: {why_not}")
        return why_not is None

    def warm_up(self, files: FileSet) -> None:
        """Read everything once, untimed, so that it is as near as it gets."""
        if not self.target.cold:
            return
        self.say("reading the data once")
        limit_s = max(self.time_left_s() / 2, 0.5)
        tasks = [self.target.read_files(files, range(len(files.entries)))]
        if run_together(tasks, limit_s=limit_s, tick=self.tick).cut:
            self.notes.append(
                f"{self._load}: there was no time to read all of the data before; part was not warm"
            )

    # -- measuring

    def measure(
        self,
        variant: str,
        tasks: Sequence[Task],
        *,
        operation: str,
        parameters: dict[str, Parameter],
        limit_s: float | None = None,
    ) -> Measurement | None:
        """Run tasks together and keep what came out; None if there was no time, or they failed.

        ``limit_s`` None: as long as a variant has (``each_s``).
        """
        found = self.measure_groups([(variant, tasks, operation, parameters)], limit_s=limit_s)
        return found[0] if found else None

    def measure_groups(
        self,
        groups: Sequence[tuple[str, Sequence[Task], str, dict[str, Parameter]]],
        *,
        limit_s: float | None = None,
    ) -> list[Measurement]:
        """The same for several kinds of tasks at one moment: (variant, tasks, operation, parameters) each.

        What daemons spend cannot be told apart: it is in a last measurement, of all groups together.
        """
        limit = self._limit(groups[0][0], limit_s)
        if limit is None:
            return []

        def run() -> list[Outcome]:
            return run_groups([tasks for _, tasks, _, _ in groups], limit_s=limit, tick=self.tick)

        return self._keep(groups[0][0], run, [(variant, what, how) for variant, _, what, how in groups])

    def measure_fio(
        self, variant: str, job: fio.FioJob, *, operation: str, parameters: dict[str, Parameter]
    ) -> Measurement | None:
        """The same by fio, for ``job.seconds`` or what is left."""
        limit = self._limit(variant, job.seconds)
        if limit is None:
            return None

        def run() -> list[Outcome]:
            return [fio.run(job, tick=self.tick)]

        found = self._keep(variant, run, [(variant, operation, parameters)])
        return found[0] if found else None

    def skip(self, variant: str, reason: str) -> None:
        self.skipped.append(Skipped(workload=self._load, variant=variant, reason=reason))

    def fail(self, variant: str, error: Exception) -> None:
        """Note what was tried and did not work."""
        reason = str(error) or type(error).__name__
        self.skipped.append(Skipped(workload=self._load, variant=variant, reason=reason, failed=True))

    def _keep(
        self,
        title: str,
        run: Callable[[], list[Outcome]],
        groups: Sequence[tuple[str, str, dict[str, Parameter]]],
    ) -> list[Measurement]:
        self.say(title)
        before = self.target.cpu_s()
        try:
            outcomes = run()
        except BenchFailed as error:
            self.fail(title, error)
            return []
        spent = daemons.difference(before, self.target.cpu_s())
        found: list[Measurement] = []
        for outcome, (variant, operation, parameters) in zip(outcomes, groups, strict=True):
            found.append(
                Measurement(
                    workload=self._load,
                    variant=variant,
                    parameters=parameters,
                    operation=operation,
                    operations=outcome.operations,
                    bytes=outcome.bytes,
                    seconds=round(outcome.seconds, 6),
                    latency=outcome.latency,
                    timeline=outcome.timeline if outcome.timeline.amounts else None,
                    cpu_s={"bench": round(outcome.cpu_s, 3), **(spent if len(groups) == 1 else {})},
                    notes=["cut short: its time was over"] if outcome.cut else [],
                )
            )
        if len(groups) > 1:
            found.append(_all_of(found, spent))
        self.measurements += found
        return found

    def _limit(self, variant: str, wanted_s: float | None) -> float | None:
        """How long it may run; None, and noted, if there is no time for something that says anything."""
        wanted = self.each_s if wanted_s is None else wanted_s
        left = self.time_left_s()
        if left < self.scale.variant_s / 4:
            self.skip(variant, self._no_time())
            return None
        return min(wanted, left)

    def _no_time(self) -> str:
        return f"no time left of {self.scale.limit_s:.0f} s; give --time"


def _all_of(parts: Sequence[Measurement], spent: dict[str, float]) -> Measurement:
    """What ran at the same moment, as one."""
    return Measurement(
        workload=parts[0].workload,
        variant="all of that together",
        parameters={**parts[0].parameters, "part": "all"},
        operation="any of them",
        operations=sum(part.operations for part in parts),
        bytes=sum(part.bytes for part in parts),
        seconds=max(part.seconds for part in parts),
        cpu_s={"bench": round(sum(part.cpu_s["bench"] for part in parts), 3), **spent},
    )
