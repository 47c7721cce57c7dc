"""The benchmark of the front: what its table says, and the namespace that it makes without objects."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.front import imported
from benchmarks.front.lines import MOUNT, NULL, PLAIN, Lines, Wanted, alternate
from benchmarks.front.report import Findings, report_of
from tierfs.namespace import dump, tree
from tierfs.namespace.db import Database
from tierfs.report import render_text


@pytest.mark.parametrize(
    ("wanted", "mount", "plain", "verdict"),
    [
        (Wanted(0.9), [95.0, 80.0, 95.0], [100.0, 100.0, 100.0], "met"),
        (Wanted(0.96), [95.0], [100.0], "MISSED"),
        (Wanted(0.9), [], [100.0], "not measured"),
        (Wanted(3000.0, absolute=True), [3100.0], [9e9], "met"),
        (Wanted(0.02, absolute=True, at_most=True), [0.03], [], "MISSED"),
        (None, [1.0], [], ""),
    ],
)
def test_verdicts(wanted: Wanted | None, mount: list[float], plain: list[float], verdict: str) -> None:
    lines = Lines()
    metric = lines.line("reads", "a line", "GB/s", wanted)
    for who, values in ((MOUNT, mount), (PLAIN, plain)):
        for value in values:
            metric.add(who, value)
    assert lines.every[0].verdict == verdict
    assert lines.line("reads", "a line", "GB/s") is metric
    assert bool(lines.missed()) == (verdict in ("MISSED", "not measured"))


def test_a_line_shows_what_a_daemon_that_does_nothing_reaches() -> None:
    lines = Lines()
    share = lines.line("small", "share", "files/s", Wanted(0.9))
    rate = lines.line("small", "rate", "1/s", Wanted(3000.0, absolute=True))
    for metric in (share, rate):
        for who, value in ((MOUNT, 200.0), (PLAIN, 1000.0), (NULL, 250.0)):
            metric.add(who, value)
    assert lines.every[0].cells()[-2:] == ["0.25 x plain", "0.80"]
    assert lines.every[1].cells()[-2:] == ["250 1/s", "0.80"]


def test_a_time_counts_as_better_when_it_is_shorter() -> None:
    lines = Lines()
    metric = lines.line("writes", "blocked", "s", Wanted(0.9), higher_is_better=False)
    for number, (mine, other) in enumerate(((2.0, 1.0), (1.0, 0.95), (1.0, 1.0))):
        alternate(number, metric, {PLAIN: lambda other=other: other, MOUNT: lambda mine=mine: mine})
    assert metric.ratio(MOUNT, PLAIN) == pytest.approx(0.95)
    assert lines.every[0].verdict == "met"


def test_the_order_of_a_round_turns_around() -> None:
    seen: list[str] = []

    def step(name: str) -> float:
        seen.append(name)
        return 1.0

    metric = Lines().line("reads", "a line", "x")
    for number in range(2):
        alternate(number, metric, {PLAIN: lambda: step(PLAIN), MOUNT: lambda: step(MOUNT)})
    assert seen == [PLAIN, MOUNT, MOUNT, PLAIN]


def test_the_report_has_each_line_with_what_is_wanted_and_what_failed() -> None:
    found = Findings()
    metric = found.lines.line("Reads", "sequential", "GB/s", Wanted(0.95))
    metric.add(PLAIN, 2.0)
    metric.add(MOUNT, 1.5)
    found.lines.failures.append("writes: no space")
    text = render_text(report_of(found, [("machine", "2 cores")]))
    row = next(line for line in text.splitlines() if "sequential" in line)
    assert [
        part
        for part in ("1.50 [1.50-1.50]", "2.00 [2.00-2.00]", "0.75", ">= 0.95 x plain", "MISSED")
        if part not in row
    ] == []
    assert "writes: no space" in text


def test_an_imported_namespace_is_without_contradictions(tmp_path: Path) -> None:
    count = 2 * imported.PER_DIRECTORY + 7
    imported.fill(tmp_path, count, "/source")
    assert dump.check(tmp_path) == []
    with Database.open(tmp_path, read_only=True) as db, db.snapshot() as txn:
        for number in (0, imported.PER_DIRECTORY, count - 1):
            assert tree.resolve(txn, imported.path_of(number).encode()).is_regular
        assert tree.inode_count(txn) == count + 3 + 1
