"""The numbers of a run of the training loads."""

from __future__ import annotations

import msgspec

from benchmarks.training.plan import Figure, Load
from tierfs.bench.result import Machine
from tierfs.bench.statistics import Summary, ratio, summarize

PLAIN, MOUNT = "plain", "mount"
TARGETS = (PLAIN, MOUNT)


class Value(msgspec.Struct, kw_only=True):
    """One number of one load, by target and round."""

    load: str
    figure: str
    target: str
    round: int
    value: float


class Failure(msgspec.Struct, kw_only=True):
    load: str
    target: str
    reason: str


class TrainingResult(msgspec.Struct, kw_only=True):
    """``daemon_s``: CPU seconds of the mount's processes, for each run of a load."""

    format: str = "tierfs-training"
    version: int = 1
    started: str
    command: str
    machine: Machine
    store: str = ""
    mount: str = ""
    packages: dict[str, str] = {}
    rounds: int = 0
    seconds: float = 0.0
    load_after: float = 0.0
    values: list[Value] = []
    daemon_s: dict[str, list[float]] = {}
    failures: list[Failure] = []

    def of(self, load: Load, figure: Figure, target: str) -> dict[int, float]:
        """By round."""
        return {
            value.round: value.value
            for value in self.values
            if (value.load, value.figure, value.target) == (load.name, figure.key, target)
        }

    def summary(self, load: Load, figure: Figure, target: str) -> Summary | None:
        return summarize(list(self.of(load, figure, target).values()))

    def times(self, load: Load, figure: Figure) -> Summary | None:
        """How many times as good the mount is as the directory, pair by pair."""
        plain, mount = (self.of(load, figure, target) for target in TARGETS)
        both = sorted(plain.keys() & mount.keys())
        return ratio(
            [mount[number] for number in both],
            [plain[number] for number in both],
            higher_is_better=figure.higher_is_better,
        )


def encode(result: TrainingResult) -> bytes:
    return msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n"
