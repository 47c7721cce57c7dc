"""What ``tierfs bench`` asks of fio, and what it makes of the answers (recorded from fio 3.33)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.mount import wait_until
from tierfs.bench import fio
from tierfs.bench.files import FileSet, large_files, make_files
from tierfs.control.registry import start_ticks
from tierfs.errors import BenchFailed

SAMPLES = Path(__file__).parent / "fio_samples"


def sample(name: str) -> str:
    return (SAMPLES / name).read_text()


def job(files: FileSet, **changes: object) -> fio.FioJob:
    values: dict[str, object] = {
        "files": files,
        "block_bytes": 4096,
        "jobs": 2,
        "way": "buffered",
        "sequential": False,
        "seconds": 0.2,
    }
    return fio.FioJob(**{**values, **changes})  # type: ignore[arg-type]


def test_a_group_of_jobs_is_one_outcome() -> None:
    outcome = fio.parse(sample("two_jobs_random.json"))
    read = json.loads(sample("two_jobs_random.json"))["jobs"][0]["read"]
    assert (outcome.operations, outcome.bytes, outcome.seconds) == (600, 600 * 4096, 0.076)
    assert outcome.latency.count == 600
    assert (outcome.latency.min_ns, outcome.latency.max_ns) == (read["lat_ns"]["min"], read["lat_ns"]["max"])
    assert outcome.latency.mean_ns == pytest.approx(read["lat_ns"]["mean"], rel=1e-3)
    assert outcome.cpu_s == pytest.approx((2.040816 + 2.721088) / 100 * 0.147)
    assert not outcome.cut


def test_percentiles_are_those_that_fio_computes() -> None:
    for name in ("two_jobs_random.json", "io_uring_sequential.json"):
        outcome = fio.parse(sample(name))
        of_fio = json.loads(sample(name))["jobs"][0]["read"]["lat_ns"]["percentile"]
        for text, value in of_fio.items():
            assert outcome.latency.quantile_ns(float(text) / 100) == pytest.approx(value, rel=0.02)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing_file.out", "open(missing): No such file or directory"),
        ("unaligned_direct.out", "Invalid argument"),
    ],
)
def test_the_reason_of_a_failure_is_told(name: str, reason: str) -> None:
    with pytest.raises(BenchFailed) as caught:
        fio.parse(sample(name), complaints=sample(name))
    assert reason in str(caught.value)
    with pytest.raises(BenchFailed, match="fio"):
        fio.parse(sample(name))


@pytest.mark.parametrize("text", ["", "fio: unrecognized option", "{", "{}", '{"jobs": [{}]}', "[]"])
def test_an_answer_of_another_kind_is_refused(text: str) -> None:
    with pytest.raises(BenchFailed, match="fio"):
        fio.parse(text)


def test_warnings_before_the_answer_are_passed_over() -> None:
    assert fio.parse("note: both iodepth >= 1\n" + sample("two_jobs_random.json")).operations == 600


def test_every_sequential_job_has_files_of_its_own_and_no_file_is_made() -> None:
    arguments = job(large_files("/data", 3, 1 << 20), sequential=True).arguments()
    assert "--filename=/data/shard-00000.bin:/data/shard-00002.bin" in arguments
    assert "--filename=/data/shard-00001.bin" in arguments
    assert "--size=2097152" in arguments
    assert {"--readonly", "--allow_file_create=0", "--invalidate=0"} <= set(arguments)
    random = job(large_files("/data", 2, 1 << 20)).arguments()
    assert random.count("--filename=/data/shard-00000.bin:/data/shard-00001.bin") == 2


def test_more_sequential_jobs_than_files_share_them() -> None:
    arguments = job(large_files("/d", 2, 1 << 20), sequential=True, jobs=3).arguments()
    assert [word for word in arguments if word.startswith("--filename")] == [
        "--filename=/d/shard-00000.bin",
        "--filename=/d/shard-00001.bin",
        "--filename=/d/shard-00000.bin",
    ]


def test_a_colon_in_a_path_does_not_end_it(tmp_path: Path) -> None:
    files = make_files(large_files(str(tmp_path / "a:b"), 1, 1 << 20))
    outcome = fio.run(job(files))
    assert outcome.operations == outcome.latency.count > 0
    assert outcome.bytes == outcome.operations * 4096


def test_a_file_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(BenchFailed, match="No such file"):
        fio.run(job(large_files(str(tmp_path), 1, 1 << 20)))
    assert list(tmp_path.iterdir()) == []


def test_without_fio_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fio, "path", lambda: None)
    with pytest.raises(BenchFailed, match="apt-get install fio"):
        fio.run(job(large_files("/data", 1, 1 << 20)))


def test_a_fio_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "fio"
    # As fio does, it has its work done by a process that outlives it.
    program.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {tmp_path}/pid\nwait\n")
    program.chmod(0o755)
    monkeypatch.setattr(fio, "path", lambda: str(program))
    monkeypatch.setattr(fio, "HANG_S", 1.0)
    with pytest.raises(BenchFailed, match="did not end"):
        fio.run(job(make_files(large_files(str(tmp_path / "data"), 1, 1 << 20))))
    pid = int((tmp_path / "pid").read_text())
    # Gone, or a zombie: soon, for a signal does not wait until it has worked.
    wait_until(lambda: not start_ticks(pid), "the end of the process", 60)
