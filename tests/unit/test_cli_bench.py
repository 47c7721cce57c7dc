"""``tierfs bench`` as a command: what it prints, writes, refuses, and that it cleans up when it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tierfs.bench import fio, result
from tierfs.bench.histogram import Histogram
from tierfs.bench.report import duration, report_of
from tierfs.bench.result import BenchResult, Machine, Measurement, Skipped, Target, Timeline
from tierfs.cli import exit_codes
from tierfs.cli.app import run
from tierfs.report import html, render_html, render_text

TINY = ("--quick", "--size", "8M", "--time", "100", "--each", "0.05", "--workers", "2")


def some_result(**changes: Any) -> BenchResult:
    values: dict[str, Any] = {
        "started": "2026-11-30T12:00:00+00:00",
        "seconds": 12.5,
        "command": "tierfs bench /data",
        "target": Target(name="/data", kind="tierfs", details={"front": "native"}),
        "machine": Machine(processor="cpu", cores=2, memory_bytes=1 << 34, kernel="6", system="d", load=0.5),
        "cold": "not in any tier.",
        "measurements": [
            Measurement(
                workload="small-files",
                variant="cold, 2 workers",
                operation="file",
                operations=1000,
                bytes=1 << 30,
                seconds=2.0,
                latency=Histogram.of(range(1000, 2_000_000, 2000)),
                timeline=Timeline(slot_s=0.1, amounts=[1 << 20] * 20),
                cpu_s={"bench": 1.0, "engine": 2.0, "front": 0.25},
                notes=["cut short: its time was over"],
            ),
            Measurement(workload="metadata", variant="1 process", operations=10, seconds=1.0),
        ],
        "skipped": [
            Skipped(
                workload="rag", variant="mmap", reason="Traceback (most\n  x\nOSError: broken", failed=True
            )
        ],
        "notes": ["a note"],
    }
    return BenchResult(**{**values, **changes})


def test_the_table_has_everything_that_was_found() -> None:
    text = render_text(report_of(some_result(), plots=False))
    for words in (
        "tierfs bench: /data",
        "small-files  cold, 2 workers *",
        "512         500",
        "1.00 bench + 2.00 engine + 0.25 front",
        "metadata     1 process",
        "Cold is what is not in any tier.",
        "OSError: broken",
        "a note",
        "front    native",
    ):
        assert words in text
    assert "Traceback" not in text


def test_the_page_has_a_plot_of_each_kind() -> None:
    page = render_html(report_of(some_result()))
    for title in (
        "small-files: how long operations took",
        "small-files: throughput over time",
        "CPU seconds per GiB",
    ):
        assert f'aria-label="{title}"' in page
    assert page.count("<svg") == 3
    assert "cut short" in page


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0.00 ns"),
        (850, "850 ns"),
        (12_300, "12.3 us"),
        (4_560_000, "4.56 ms"),
        (1.2e9, "1.20 s"),
        (2e12, "2,000 s"),
    ],
)
def test_times_have_three_digits(nanoseconds: float, text: str) -> None:
    assert duration(nanoseconds) == text


def test_a_run_prints_a_table_and_writes_both_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    page, values = tmp_path / "r.html", tmp_path / "r.json"
    code = run(
        [
            "bench",
            str(tmp_path),
            "--dir",
            "data",
            *TINY,
            "--only",
            "small-files,metadata",
            "--html",
            str(page),
            "--json",
            str(values),
        ]
    )
    said = capsys.readouterr()
    assert code == exit_codes.OK, said.err
    assert "cold, 2 workers" in said.out
    assert "small-files: " in said.err
    found = result.read_result(values)
    assert {one.workload for one in found.measurements} == {"small-files", "metadata"}
    assert found.target.name == str(data)
    assert found.options["size_bytes"] == 8 << 20
    assert "<svg" in page.read_text()
    assert list(data.iterdir()) == []


def test_without_fio_what_is_left_out_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fio, "path", lambda: None)
    assert run(["bench", str(tmp_path), *TINY, "--only", "random-read", "--json", "-"]) == exit_codes.OK
    found = result.decode(capsys.readouterr().out)
    assert [one.variant for one in found.skipped] == ["warm, io_uring, 4 KiB, 1 worker"]
    assert "apt-get install fio" in found.skipped[0].reason
    ways = {one.parameters["way"] for one in found.measurements}
    assert ways == {"buffered", "direct", "mmap"}
    assert {one.parameters["by"] for one in found.measurements} == {"loop"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/nonexistent/directory"], "does not exist"),
        ([".", "--only", "fast"], "'fast' is not known"),
        ([".", "--size", "many"], "--size"),
        ([".", "--size", "1K"], "--size"),
        ([".", "--time", "soon"], "--time"),
        ([".", "--each", "1h"], "--each"),
        ([".", "--workers", "0"], "--workers"),
        ([".", "--region", "eu-1"], "--region is for a store"),
        (["gs://bucket"], "SOURCE is s3://bucket"),
        (["s3://user:secret@bucket"], "credentials"),
    ],
)
def test_what_was_asked_wrongly_is_said(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", *arguments]) == exit_codes.USAGE
    assert words in capsys.readouterr().err


def test_plots_without_matplotlib_are_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierfs.report.why_no_plots", lambda: "plots need matplotlib")
    monkeypatch.setattr(html, "why_no_plots", lambda: "plots need matplotlib")
    assert run(["bench", str(tmp_path), "--html", str(tmp_path / "r.html")]) == exit_codes.USAGE
    assert "matplotlib" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_loads_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", ".", "--only", "?"]) == exit_codes.OK
    assert "checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_removes_what_it_made(tmp_path: Path, number: signal.Signals) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "theirs").write_text("precious")
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tierfs",
            "bench",
            str(data),
            "--size",
            "64M",
            "--time",
            "100",
            "--only",
            "rag",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "warm, " in line or "cold, " in line:
            break
    # As a terminal does it: the whole group gets the signal, the measuring processes too.
    os.killpg(process.pid, number)
    _, complaints = process.communicate(timeout=60)
    assert process.returncode == exit_codes.INTERRUPTED, complaints
    assert "Traceback" not in complaints
    assert [path.name for path in data.iterdir()] == ["theirs"]
    deadline = time.monotonic() + 10
    while _group_is_alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _group_is_alive(process.pid)


def _group_is_alive(group: int) -> bool:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != b"Z":
            return True
    return False


def test_json_alone_is_on_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", f"file://{tmp_path}", *TINY, "--only", "metadata", "--json", "-"]) == exit_codes.OK
    said = capsys.readouterr()
    assert json.loads(said.out)["target"]["kind"] == "store"
    assert said.err == ""
