"""The benchmark that the planner is checked with: its training loop does what the simulated one does."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from simpy import Environment

from benchmarks import planned
from benchmarks.lockstep import run_epoch
from benchmarks.loops import LoopFailed
from tierfs.plan import setups
from tierfs.plan.loader import Pace, Training
from tierfs.plan.measured import Check, Compared, load_check
from tierfs.plan.node import Nothing, Read

FILE_BYTES, FILES = 300_000, 7


class InstantNode:
    """Has everything at hand."""

    arrived_bytes = 0

    def __init__(self) -> None:
        self.kept, self.visited = Nothing(), set()

    def read(self, content: int, offset: int, length: int) -> Read:
        return Read(None, length)


@pytest.mark.parametrize("batch_bytes", [100_000.0, 333_333.0])
def test_real_loaders_make_as_many_steps_as_simulated_ones(tmp_path: Path, batch_bytes: float) -> None:
    paths = []
    for number in range(FILES):
        paths.append(str(tmp_path / str(number)))
        Path(paths[-1]).write_bytes(os.urandom(FILE_BYTES))
    pace = Pace(gpus=1, workers=1, prefetch_batches=2, batch_bytes=batch_bytes, step_s=0.001)
    training = Training(Environment(), pace, [InstantNode()], [iter(range(FILES))], FILE_BYTES)
    training.run(1000)
    stalls_s = run_epoch(paths, pace)
    assert len(stalls_s) == len(training.stalls_s) == FILES * FILE_BYTES // int(batch_bytes)
    assert min(stalls_s) >= 0


def test_a_loader_that_cannot_read_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.lockstep.ANSWER_LIMIT_S", 0.5)
    with pytest.raises(LoopFailed):
        run_epoch([str(tmp_path / "gone")], Pace(1, 1, 1, 1000.0, 0.001))


def test_every_figure_that_is_predicted_has_a_unit_and_a_job_can_be_simulated() -> None:
    figures = planned.predict(planned.JOBS[1].scenario)
    assert {"hit rate, epoch 2", "stall of a step, epoch 1", "GPUs compute, epoch 3"} <= figures.keys()
    assert {unit for unit, _ in figures.values()} == {"s", "share"}
    assert all(
        job.scenario.nodes == 1 and job.scenario.dataset_bytes > job.scenario.nvme_bytes
        for job in planned.JOBS
    )
    assert setups.TIERFS in setups.SETUPS


def test_table_of_a_check_shows_errors() -> None:
    one = Compared(job="j", figure="f", unit="share", predicted=0.5, measured=0.6, low=0.55, high=0.65)
    check = Check(
        date="",
        machine="m",
        command="c",
        rounds=3,
        jobs={"j": "what"},
        rates={"mount_rate": 1.0},
        compared=[one],
    )
    assert "-10 points" in planned.table(check)
    assert planned.table(check).splitlines()[-1] == "mean error: shares 10 points, times 0 %"


def test_what_the_package_says_of_the_model_is_what_the_model_says() -> None:
    """Eviction, read-ahead or model have changed much? ``python -m benchmarks.planned --again --write``, or measure."""
    check = load_check()
    assert check is not None
    for job in planned.JOBS:
        figures = planned.predict(msgspec.structs.replace(job.scenario, **check.rates))
        for one in check.compared:
            if one.job == job.name:
                assert figures[one.figure][1] == pytest.approx(one.predicted, rel=0.25, abs=0.05), one.figure
    assert {one.job for one in check.compared} == {job.name for job in planned.JOBS}
