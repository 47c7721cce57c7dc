"""The JSON of ``tierfs bench``: what is written is read again, and what is not its own is refused."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tierfs.bench import result as results
from tierfs.bench.histogram import Histogram
from tierfs.bench.result import BenchResult, Machine, Measurement, Skipped, Target, Timeline
from tierfs.errors import ConfigError, FormatError

SCHEMA = Path(results.__file__).with_name("schema.json")


def some_result() -> BenchResult:
    return BenchResult(
        started="2026-11-30T12:00:00+00:00",
        seconds=12.5,
        command="tierfs bench /data --quick",
        target=Target(name="/data", kind="tierfs", file_system="fuse.tierfs", details={"front": "native"}),
        machine=Machine(
            processor="p", cores=2, memory_bytes=1 << 34, kernel="6.1", system="Debian", load=0.25
        ),
        versions={"fio": "fio-3.33"},
        options={"quick": True, "size_bytes": 1 << 20, "seed": 1, "share": 0.5, "dir": "x"},
        measurements=[
            Measurement(
                workload="random-read",
                variant="4 KiB, 2 workers",
                parameters={"block_bytes": 4096, "workers": 2, "way": "buffered"},
                operation="read of 4 KiB",
                operations=3,
                bytes=2 * 1024**3,
                seconds=4.0,
                latency=Histogram.of([100, 2000, 3_000_000]),
                timeline=Timeline(slot_s=0.1, amounts=[4096, 0, 8192]),
                cpu_s={"bench": 3.0},
                notes=["cut short"],
            ),
            Measurement(workload="metadata", variant="2 workers"),
        ],
        skipped=[Skipped(workload="random-read", variant="io_uring", reason="fio is missing")],
    )


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    results.write_result(some_result(), path)
    assert results.read_result(path) == some_result()


def test_rates_and_cpu() -> None:
    read, tree = some_result().measurements
    assert read.bytes_per_s == 512 * 1024**2
    assert read.operations_per_s == 0.75
    assert read.cpu_s_per_gib("bench") == 1.5
    assert read.cpu_s_per_gib("engine") is None
    assert tree.bytes_per_s == 0.0
    assert tree.cpu_s_per_gib("bench") is None


def test_measurements_are_found_by_their_parameters() -> None:
    result = some_result()
    assert result.of("random-read", block_bytes=4096, way="buffered") == result.measurements[:1]
    assert result.of("random-read", block_bytes=8192) == []
    assert result.of("metadata") == result.measurements[1:]


def test_fields_that_a_later_release_added_are_passed_over() -> None:
    content = json.loads(results.encode(some_result()))
    content["later"] = {"x": 1}
    content["measurements"][0]["later"] = 2
    assert results.decode(json.dumps(content)) == some_result()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"version": 2}, FormatError, "version 2"),
        ({"format": "else"}, ConfigError, "not written by"),
        ({"seconds": "long"}, ConfigError, "seconds"),
        ({"measurements": [{"variant": "v"}]}, ConfigError, "workload"),
    ],
)
def test_what_is_no_result_is_refused_with_its_name(
    tmp_path: Path, change: dict[str, object], error: type[Exception], words: str
) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({**json.loads(results.encode(some_result())), **change}))
    with pytest.raises(error, match=words) as caught:
        results.read_result(path)
    assert "other.json" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_what_is_not_even_json_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        results.decode(text)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json"):
        results.read_result(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="directory"):
        results.write_result(some_result(), tmp_path / "directory" / "x.json")


def test_the_schema_is_that_of_the_version() -> None:
    """A change here is a change of a public format: fields are only added, or ``VERSION`` rises."""
    assert json.loads(SCHEMA.read_text()) == results.json_schema(), (
        "write json.dumps(json_schema(), indent=1) to tierfs/bench/schema.json"
    )
    described = results.json_schema()["$defs"]
    for structure in (BenchResult, Measurement, Histogram, Timeline, Target, Machine, Skipped):
        fields = {field.encode_name for field in msgspec.structs.fields(structure)}
        assert set(described[structure.__name__]["properties"]) == fields
