"""The planner's saves and restores against arithmetic; what holds a job up; and the report of it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tierfs.bench import result
from tierfs.bench.histogram import Histogram
from tierfs.errors import ConfigError
from tierfs.plan import epochs, forecast, relief, saves, setups
from tierfs.plan.answer import Answer, answer
from tierfs.plan.describe import report, seconds, size
from tierfs.plan.measured import Check, Compared, load_check
from tierfs.plan.rates import read_reports
from tierfs.plan.relief import find_relief
from tierfs.plan.scenario import GIB, MIB, TIB, Scenario
from tierfs.report import render_text

LARGE = 100e12
JOB = Scenario(
    gpus=16,
    dataset_bytes=16 * GIB,
    checkpoint_bytes=32 * GIB,
    save_interval_s=600.0,
    nvme_write_rate=2.0 * GIB,
    network_rate=LARGE,
    mount_rate=LARGE,
    mount_write_rate=LARGE,
    mount_latency_s=0.0,
    store_stream_rate=LARGE,
    store_write_rate=1.0 * GIB,
    store_latency_s=0.0,
    store_latency_p99_s=0.0,
    upload_delay_s=1.0,
).check()
"""Two nodes, 16 GiB each: 8 s to their disks, and 32 s to the store."""


def changed(scenario: Scenario, **fields: object) -> Scenario:
    return msgspec.structs.replace(scenario, **fields).check()


# saves


def test_a_save_stalls_for_the_disk_and_drains_at_the_rate_of_the_store() -> None:
    saving = saves.simulate(JOB, setups.TIERFS)
    assert saving.stall_s == pytest.approx(8.0, rel=0.001)
    assert saving.drain_s == pytest.approx(1.0 + 32.0, rel=0.001)
    assert saving.keeps_up
    assert saving.piled_up_stall_s == saving.stall_s
    assert saving.lost_same_s == 300.0
    assert saving.lost_new_s == pytest.approx(333.0, rel=0.001)


def test_without_a_mount_training_waits_for_the_store_or_the_server() -> None:
    store = saves.simulate(JOB, setups.STORE)
    assert (store.stall_s, store.drain_s) == (pytest.approx(32.0, rel=0.001), 0.0)
    server = saves.simulate(changed(JOB, nfs_write_rate=0.5 * GIB, nfs_latency_s=0.0), setups.NFS)
    assert server.stall_s == pytest.approx(64.0, rel=0.001)


def test_connections_bound_a_drain() -> None:
    """8 connections of 50 MiB/s each, and 10 ms for each part of 16 MiB: 41.5 s for what the store takes in 16 s."""
    slow = changed(JOB, store_stream_rate=50.0 * MIB, store_latency_s=0.01, store_latency_p99_s=0.01)
    parts = 16 * GIB / (16 * MIB) / slow.upload_concurrency
    assert saves.simulate(slow, setups.TIERFS).drain_s == pytest.approx(
        1 + parts * (16 / 50 + 0.01), rel=0.02
    )


def test_saves_pile_up_where_the_store_is_too_slow_and_in_the_end_writers_wait_for_it() -> None:
    """A drain takes 64 s and the next save comes after 40 s: when the tier is full, a save costs the difference."""
    slow = changed(JOB, store_write_rate=0.5 * GIB, save_interval_s=40.0, nvme_bytes=256 * GIB)
    saving = saves.simulate(slow, setups.TIERFS)
    assert not saving.keeps_up
    assert saving.stall_s == pytest.approx(8.0, rel=0.001)
    assert saving.piled_up_stall_s == pytest.approx(64 - 40, rel=0.1)
    # 48 s bring 16 GiB in and take 12 GiB out; 80 % of the tier is 205 GiB.
    assert saving.piled_up_after == pytest.approx(205 / 4, rel=0.15)


def test_a_restore_takes_what_division_says() -> None:
    job = changed(JOB, nvme_read_rate=4.0 * GIB, store_read_rate=2.0 * GIB)
    saving = saves.simulate(job, setups.TIERFS)
    assert saving.restore_same_s == pytest.approx(4.0, rel=0.001)
    assert saving.restore_new_s == pytest.approx(16.0, rel=0.001)


def test_a_checkpoint_takes_room_from_the_data_set() -> None:
    """Each node keeps its half of 16 GiB, but not beside 6 GiB of checkpoint in 10 GiB of tier."""
    job = changed(
        JOB, partition="fixed", ram_bytes=0, nvme_bytes=10 * GIB, checkpoint_bytes=12 * GIB, epochs=2
    )
    hit_rate = forecast.forecast(job, setups.TIERFS).reading.epochs[-1].hit_rate
    assert 0.3 < hit_rate < 0.5
    alone = forecast.forecast(changed(job, checkpoint_bytes=0), setups.TIERFS)
    assert alone.reading.epochs[-1].hit_rate == 1.0


def test_no_checkpoint_costs_nothing() -> None:
    assert saves.simulate(changed(JOB, checkpoint_bytes=0), setups.TIERFS) == saves.Saving()


def test_utilisation_counts_saves_and_stalls() -> None:
    found = forecast.forecast(JOB, setups.TIERFS)
    assert found.reading.epochs[0].utilisation == pytest.approx(1.0)
    assert found.utilisation == pytest.approx(600 / 608, abs=0.001)


def test_an_upload_takes_from_the_reads_of_a_busy_mount() -> None:
    """A mount that can just feed its GPUs cannot do so while it uploads."""
    busy = changed(JOB, samples_per_s=700.0, mount_rate=0.8 * GIB, store_read_rate=LARGE, store_write_rate=LARGE,
                   nvme_bytes=64 * GIB, ram_bytes=0, epochs=1, dataset_bytes=256 * GIB)  # fmt: skip
    found = forecast.forecast(busy, setups.TIERFS).reading
    assert found.epochs[0].stall_s < 0.1
    assert found.stall_while_draining_s > 0.3


def test_stalls_between_windows_follow_the_hit_rate() -> None:
    job = changed(JOB, samples_per_s=1500.0, store_read_rate=2.0 * GIB, partition="fixed", epochs=4,
                  nvme_bytes=4 * GIB, ram_bytes=0, checkpoint_bytes=0, mount_rate=LARGE)  # fmt: skip
    stalls = [epoch.stall_s for epoch in forecast.forecast(job, setups.TIERFS).reading.epochs]
    assert stalls[0] > stalls[1] > 0
    assert stalls[1] >= stalls[2] >= stalls[3]


# relief


@pytest.fixture
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many simulations, each of less."""
    monkeypatch.setattr(epochs, "WINDOW_READS", 800)


def test_the_write_rate_of_the_disk_is_found_and_raised_until_it_is_enough() -> None:
    job = changed(JOB, save_interval_s=60.0, nvme_write_rate=1.0 * GIB)
    known = forecast.forecast(job, setups.TIERFS)
    found = find_relief(job, known, goal=0.95)
    assert found.rounds[0].bottleneck == ["write rate of the NVMe"]
    assert [change.factor for change in found.rounds[0].relief] == [2, 4, 8]
    assert found.rounds[0].relief[-1].utilisation == pytest.approx(60 / 62, abs=0.002)
    assert found.rounds[0].relief[-1].gpus_gained == pytest.approx(16 * (60 / 62 - 60 / 76), abs=0.05)
    assert found.reached


@pytest.mark.usefixtures("short_windows")
def test_the_store_is_found_where_it_starves_the_job() -> None:
    job = changed(JOB, checkpoint_bytes=0, epochs=1, samples_per_s=800.0, store_read_rate=0.5 * GIB)
    found = find_relief(job, forecast.forecast(job, setups.TIERFS), goal=0.9)
    assert found.rounds[0].bottleneck == ["read rate of the store"]
    assert found.reached


def test_two_bottlenecks_of_one_size_are_found_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of 1 GiB/s: doubling either the store or the network alone gains nothing."""
    few = {"store_read_rate", "network_rate", "workers", "nvme_bytes"}
    monkeypatch.setattr(relief, "CANDIDATES", [each for each in relief.CANDIDATES if each.field in few])
    job = changed(JOB, checkpoint_bytes=0, epochs=1, samples_per_s=2000.0, store_read_rate=2.0 * GIB,
                  network_rate=1.0 * GIB)  # fmt: skip
    found = find_relief(job, forecast.forecast(job, setups.TIERFS), goal=0.95)
    assert sorted(found.rounds[0].bottleneck) == ["network of a node", "read rate of the store"]
    assert found.rounds[0].relief[-1].utilisation > 1.5 * found.rounds[0].utilisation_before


def test_more_connections_are_found_where_they_are_what_saves_wait_for() -> None:
    """8 connections of 2 MiB/s take 128 s for 2 GiB, and a save comes every 60 s."""
    job = changed(JOB, checkpoint_bytes=4 * GIB, save_interval_s=60.0, store_stream_rate=2.0 * MIB, nvme_write_rate=LARGE,
                  samples_per_s=0.1)  # fmt: skip
    found = find_relief(job, forecast.forecast(job, setups.TIERFS), goal=0.95)
    names = {change.field: change.utilisation for change in found.rounds[0].tried}
    assert names["upload_concurrency"] == pytest.approx(names["store_stream_rate"], abs=0.01)
    assert names["upload_concurrency"] > found.rounds[0].utilisation_before + 0.3
    assert "nvme_bytes" not in names


def test_nothing_is_sought_where_nobody_waits() -> None:
    job = changed(JOB, checkpoint_bytes=0)
    assert find_relief(job, forecast.forecast(job, setups.TIERFS), goal=0.95).rounds == []


# the answer


@pytest.fixture(scope="module")
def small_answer() -> Answer:
    job = changed(JOB, samples_per_s=100.0, epochs=2, save_interval_s=60.0)
    return answer(job, sources={"gpus": "given"}, goal=0.95, with_curve=False)


def test_the_answer_is_plain_json(small_answer: Answer) -> None:
    found = json.loads(msgspec.json.encode(small_answer))
    assert found["format"] == "tierfs-plan"
    assert [one["setup"] for one in found["setups"]] == list(setups.SETUPS)
    assert found["scenario"]["gpus"] == 16
    assert found["setups"][2]["saving"]["stall_s"] == pytest.approx(8.0, rel=0.001)
    assert len(found["setups"][0]["reading"]["epochs"]) == 2


def test_the_report_names_bottleneck_relief_and_where_tierfs_loses(small_answer: Answer) -> None:
    text = render_text(report(small_answer))
    assert "16 GPUs on 2 nodes" in text
    assert "The first bottleneck: write rate of the NVMe." in text
    assert "tierfs is behind object store alone in: training lost with a node." in text
    assert any(line.split()[:2] == ["--gpus", "16"] and "given" in line for line in text.splitlines())
    assert any(line.split()[:1] == ["--ram"] and "assumed" in line for line in text.splitlines())


def test_the_curve_leaves_out_what_does_not_fit() -> None:
    """A checkpoint of 4 TiB cannot wait in one node's tier, but in eight of them."""
    job = changed(JOB, gpus=64, checkpoint_bytes=4 * TIB, epochs=1)
    points = forecast.curve(job, [8, 64])
    assert setups.TIERFS not in points[0].utilisation
    assert points[1].nodes == 8
    assert setups.TIERFS in points[1].utilisation


def test_how_far_the_model_is_off_is_part_of_the_package() -> None:
    check = load_check()
    assert check is not None
    assert check.rounds >= 3
    assert {"stall of a save", "drain of a save", "hit rate, epoch 2"} <= {
        one.figure for one in check.compared
    }
    assert set(check.per_core) == {"mount_rate", "mount_write_rate", "mount_latency_s"}


def test_errors_are_relative_and_of_shares_differences() -> None:
    def one(unit: str, predicted: float, measured: float) -> Compared:
        return Compared(job="j", figure="f", unit=unit, predicted=predicted, measured=measured, low=0, high=9)

    assert one("s", 3.0, 2.0).error == 0.5
    assert one("share", 0.5, 0.6).error == pytest.approx(-0.1)
    assert one("s", 3.0, 0.0).error is None
    check = Check(date="", machine="", command="", rounds=1, jobs={}, rates={},
                  compared=[one("s", 3.0, 2.0), one("share", 0.5, 0.6), one("s", 3.0, 0.0)])  # fmt: skip
    assert check.mean_error(shares=False) == 0.5
    assert check.mean_error(shares=True) == pytest.approx(0.1)
    assert check.worst() == check.compared[0]


def test_sizes_and_times_are_short() -> None:
    assert [size(value) for value in (10 * TIB, 1.5 * GIB, 100)] == ["10 TiB", "1.5 GiB", "100 B"]
    assert [seconds(value) for value in (0, 0.0123, 90, 90 * 60, 3 * 3600)] == [
        "0 s",
        "12.3 ms",
        "90 s",
        "90 min",
        "3 h",
    ]


# what can be asked


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"gpus": 0}, "--gpus"),
        ({"samples_per_s": 0.0}, "--samples-per-s"),
        ({"step_s": 0.0}, "--step-time"),
        ({"network_rate": 0.0}, "--network"),
        ({"store_read_rate": float("nan")}, "--store-read-rate"),
        ({"layout": "tapes"}, "--layout"),
        ({"partition": "none"}, "--partition"),
        ({"dataset_bytes": 1000}, "--dataset"),
        ({"nvme_bytes": 16 * GIB}, "--nvme"),
        ({"nvme_bytes": 0}, "--nvme"),
        ({"store_latency_s": -1.0}, "--store-latency"),
    ],
)
def test_what_cannot_be_simulated_is_named_by_its_option(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}:"):
        changed(JOB, **fields)


# reports of tierfs bench


def bench_report(path: Path, kind: str, measurements: list[result.Measurement], file_system: str = "") -> str:
    """As ``tierfs bench --json`` writes it."""
    machine = result.Machine(processor="p", cores=2, memory_bytes=1, kernel="k", system="s", load=0.0)
    target = result.Target(name="t", kind=kind, file_system=file_system)
    found = result.BenchResult(
        started="2026-01-01T00:00:00Z",
        seconds=1.0,
        command="tierfs bench",
        target=target,
        machine=machine,
        measurements=measurements,
    )
    result.write_result(found, path)
    return str(path)


def measurement(workload: str, mib_per_s: float, **parameters: str | int) -> result.Measurement:
    return result.Measurement(
        workload=workload,
        variant="v",
        parameters=dict(parameters),
        bytes=int(mib_per_s * MIB),
        seconds=1.0,
        latency=Histogram(count=100, buckets={1_000_000: 60, 20_000_000: 40}),
    )


def test_rates_come_from_reports_of_every_kind(tmp_path: Path) -> None:
    store = bench_report(tmp_path / "store", "store", [
        measurement("sequential-read", 70, workers=1), measurement("sequential-read", 900, workers=16),
        measurement("random-read", 1, workers=1, block_bytes=4096)])  # fmt: skip
    disk = bench_report(tmp_path / "disk", "directory", [
        measurement("sequential-read", 9000, way="buffered"), measurement("sequential-read", 3000, way="direct"),
        measurement("checkpoint", 1200, until="close")], "ext4 /dev/nvme0n1")  # fmt: skip
    mount = bench_report(
        tmp_path / "mount",
        "tierfs",
        [
            measurement("sequential-read", 800, state="cold"),
            measurement("sequential-read", 5000, state="warm"),
            measurement("checkpoint", 600, until="close"),
            measurement("checkpoint", 90, until="stored"),
        ],
    )
    assert read_reports([store, disk, mount]) == {
        "store_stream_rate": 70.0 * MIB,
        "network_rate": 900.0 * MIB,
        "store_latency_s": 0.001,
        "store_latency_p99_s": 0.02,
        "nvme_read_rate": 3000.0 * MIB,
        "nvme_write_rate": 1200.0 * MIB,
        "mount_rate": 800.0 * MIB,
        "mount_write_rate": 600.0 * MIB,
    }
    nfs = bench_report(
        tmp_path / "nfs", "directory", [measurement("sequential-read", 400, state="cold")], "nfs4 s:/x"
    )
    assert read_reports([nfs]) == {"nfs_stream_rate": 400.0 * MIB}


@pytest.mark.parametrize(
    "content",
    ["", "{}", '{"format": "tierfs-bench", "version": 9, "target": {"name": "t", "kind": "store"}}'],
)
def test_a_file_that_is_no_report_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "report").write_text(content)
    with pytest.raises(ConfigError, match=r"^--bench: .*report"):
        read_reports([str(tmp_path / "report")])
    with pytest.raises(ConfigError, match=r"^--bench: .*nothing"):
        read_reports([bench_report(tmp_path / "empty", "directory", [])])
    with pytest.raises(ConfigError, match=r"^--bench: cannot read .*gone"):
        read_reports([str(tmp_path / "gone")])
