"""The measuring side: statistics, loops, and the parts of a source that need no server."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks import loops
from benchmarks.budget import READER, Budget, spending
from benchmarks.plan import GET_BYTES, MANY_SMALL, MIB, STREAM, TINY, Plan, in_order, pieces
from benchmarks.samples import Metric, show, table
from benchmarks.sources import DirectorySource, client, empty, fill, open_source


def test_medians_spread_and_ratios_of_rounds() -> None:
    metric = Metric("read", "MiB/s")
    for mine, other in ((100, 200), (50, 50), (10, 40)):
        metric.add("mount", mine)
        metric.add("plain", other)
    assert metric.median("mount") == 50
    assert metric.spread("mount") == (10, 100)
    assert metric.ratio("mount", "plain") == 0.5, "the median of the ratios, not the ratio of the medians"
    assert metric.ratio("mount", "nobody") is None
    assert metric.median("nobody") is None
    assert metric.spread("nobody") is None


def test_ratio_says_how_many_times_as_good() -> None:
    metric = Metric("blocked", "s", higher_is_better=False)
    metric.add("mount", 2.0)
    metric.add("plain", 1.0)
    assert metric.ratio("mount", "plain") == 0.5
    assert metric.as_json("mount")["ratios"] == {"plain": 0.5}
    assert metric.as_json("mount")["medians"] == {"mount": 2.0, "plain": 1.0}


def test_table_has_a_line_per_metric_and_leaves_out_what_was_not_measured() -> None:
    read, memory = Metric("read", "MiB/s"), Metric("memory", "MiB", higher_is_better=False)
    read.add("mount", 1234.5)
    read.add("plain", 2469.0)
    memory.add("mount", 55.55)
    lines = table([read, memory, Metric("nothing", "s")], "mount", ("plain", "direct")).splitlines()
    assert len(lines) == 5
    assert "1,234 [1,234-1,234]" in lines[2]
    assert lines[2].endswith("0.50 (2,469)")
    assert lines[3].endswith("55.5 [55.5-55.5]")
    assert lines[4].endswith("-")
    assert len({len(line) for line in lines[:2]}) == 1


def test_three_digits_that_mean_something() -> None:
    assert [show(value) for value in (12345.6, 99.94, 1.234)] == ["12,346", "99.9", "1.23"]


def test_loops_run_side_by_side_and_count(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"f{number}").write_bytes(os.urandom(3 * MIB + number))
    paths = [str(tmp_path / f"f{number}") for number in range(4)]
    outcome = loops.together([loops.read_files(paths[:2]), loops.read_files(paths[2:])])
    assert outcome.amount == 12 * MIB + 6
    assert outcome.seconds > 0
    assert outcome.rate == outcome.amount / outcome.seconds


def test_preparation_is_not_timed() -> None:
    def prepare() -> loops.Timed:
        time.sleep(2)
        return lambda: 1

    assert loops.together([prepare, lambda: lambda: 1]).seconds < 2


def test_metadata_loops(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}") for number in range(10)]
    assert loops.together([loops.create_files(paths)]).amount == 10
    assert loops.together([loops.stat_files(paths)]).amount == 10
    assert loops.together([loops.unlink_files(paths)]).amount == 10
    assert list(tmp_path.iterdir()) == []


def test_written_file_has_its_size(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    assert loops.together([loops.write_file(str(path), 9 * MIB + 5)]).amount == 9 * MIB + 5
    assert path.stat().st_size == 9 * MIB + 5
    loops.drop_page_cache([str(path)])


def test_a_failing_loop_fails_the_whole() -> None:
    with pytest.raises(loops.LoopFailed, match="FileNotFoundError"):
        loops.together([loops.read_files(["/does/not/exist"]), lambda: lambda: 1])


def test_directory_source_is_filled_read_and_emptied(tmp_path: Path) -> None:
    with open_source(str(tmp_path), tmp_path) as source:
        assert isinstance(source, DirectorySource)
        body = os.urandom(36 * MIB)
        assert fill(source, {"a/large": body, "a/small": b"xyz"}) == 2
        ranges = pieces("a/large", len(body))
        assert [length for _, _, length in ranges] == [GET_BYTES] * 4 + [4 * MIB]
        assert loops.together([source.direct(ranges)]).amount == len(body)
        assert loops.together([source.direct(ranges[::2]), source.direct(ranges[1::2])]).amount == len(body)
        assert (
            loops.together([client(source, [*ranges, ("a/small", 0, 3)], threads=4)]).amount == len(body) + 3
        )
        empty(source)
        assert not [path for path in source.directory.rglob("*") if path.is_file() and path.name == "large"]
        directory = source.directory
    assert not directory.exists()


def test_order_alternates() -> None:
    seen: list[int] = []
    steps = [lambda: seen.append(1), lambda: seen.append(2)]
    in_order(steps, False)
    in_order(steps, True)
    assert seen == [1, 2, 2, 1]


def test_plan_prepares_the_same_data_twice(tmp_path: Path) -> None:
    with open_source(str(tmp_path / "store"), tmp_path) as source:
        assert isinstance(source, DirectorySource)
        plan = Plan(TINY, source, tmp_path / "mnt", tmp_path)
        plan.prepare()
        plain = {
            path.relative_to(plan.plain_dir): path.read_bytes() for path in plan.plain_dir.rglob("*.bin")
        }
        assert len(plain) == 1 + 2 * TINY.small_files
        assert len(plain[Path("large.bin")]) == TINY.large_bytes
        assert all((source.directory / name).read_bytes() == body for name, body in plain.items())
        assert len(list((source.directory / "entries").iterdir())) == TINY.entries


def test_goals_are_named_met_or_missed(tmp_path: Path) -> None:
    plan = Plan(TINY, DirectorySource(tmp_path), tmp_path, tmp_path)
    assert plan.goals() == []
    for name, reference, value in ((STREAM, "direct", 90.0), (MANY_SMALL, "client", 70.0)):
        plan.metric(name, "MiB/s").add("mount", value)
        plan.metric(name, "MiB/s").add(reference, 100.0)
    plan.metric("memory: at rest", "MiB", higher_is_better=False).add("mount", 900.0)
    plan.memory_goal_bytes = 812 * MIB
    assert [line.split()[0] for line in plan.goals()] == ["met", "MISSED", "MISSED"]
    assert "0.70 x client, wanted 0.80" in plan.goals()[1]


def test_a_budget_says_what_the_cores_allow() -> None:
    budget = Budget("cold", "MiB")
    for server_s in (0.9, 1.0, 1.4):
        budget.add("mount", {"server": server_s, "engine": 0.5, "reader": 0.5}, 1000, 500.0)
        budget.add("direct", {"server": 1.0, "reader": 0.6}, 1000, 1000.0)
    assert budget.per_unit_s("mount") == {"server": 0.001, "engine": 0.0005, "reader": 0.0005}
    assert budget.most("mount", cores=2) == 1000.0
    title, mount, direct, most, left = budget.lines("mount", "direct", 0.8, cores=2)
    assert "ms per MiB" in title
    assert mount.split() == ["mount", "server", "1.00", "+", "engine", "0.50", "+", "reader", "0.50", "=", "2.00"]
    assert direct.split() == ["direct", "server", "1.00", "+", "reader", "0.60", "=", "1.60"]
    assert "1,000 MiB a second, 1.00 x direct" in most
    assert "leaves 1.00 to tierfs," in left  # 2 cores / 800 per second, less 1.50 of server and reader
    assert budget.lines("mount", "nobody", 0.8, cores=2) == []


def test_what_processes_spend() -> None:
    def spin() -> loops.Timed:
        def timed() -> int:
            end = time.process_time() + 0.1
            while time.process_time() < end:
                pass
            return 1

        return timed

    with spending({"self": os.getpid(), "gone": 2**22 + 1}) as spent:
        loops.together([spin, spin])
    assert set(spent) == {"self", READER}
    assert spent[READER] >= 0.15  # in clock ticks
