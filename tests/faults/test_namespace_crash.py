"""kill -9 in the middle of commits: what was acknowledged is there, and the tables agree."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tierfs.errors import NotFound
from tierfs.namespace import tree
from tierfs.namespace.check import problems
from tierfs.namespace.db import Database

ROUNDS = 12
REPOSITORY = Path(__file__).resolve().parents[2]


def run_until_killed(directory: Path, seed: int, lines: int) -> list[list[str]]:
    """Start a writer, kill it after it has acknowledged so many changes; returns what it printed."""
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.support.namespace_writer", str(directory), str(seed)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    assert writer.stdout is not None
    printed: list[str] = []
    try:
        for line in writer.stdout:
            printed.append(line)
            if len(printed) > lines:
                break
        os.kill(writer.pid, signal.SIGKILL)
        rest = writer.stdout.read()
        printed += rest.splitlines(keepends=True)
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    # The last line may have been cut off.
    return [line.split() for line in printed[1:] if line.endswith("\n")]


@pytest.mark.limit_s(240)
def test_acknowledged_changes_survive_kill_9_at_random_moments(tmp_path: Path) -> None:
    draw = random.Random(7)
    expected: set[tuple[str, str]] = set()
    maybe_gone: set[tuple[str, str]] = set()
    for seed in range(ROUNDS):
        for kind, task, name in run_until_killed(tmp_path, seed, draw.randrange(1, 400)):
            (maybe_gone if kind == "R" else expected).add((task, name))
        with Database.open(tmp_path) as db:
            assert not db.clean_close
            assert not db.unclean_boot  # the machine stayed up
            with db.read() as txn:
                assert list(problems(txn)) == []
                for task, name in expected - maybe_gone:
                    assert tree.resolve(txn, f"task{task}/{name}".encode()).nlink == 1
                for task in range(8):
                    try:
                        directory = tree.resolve(txn, b"task%d" % task)
                    except NotFound:
                        continue
                    # No half of a change: what was made was renamed in the same commit.
                    names = [name for name, _, _ in tree.readdir(txn, directory.ino, 0, 10**6)]
                    assert not [name for name in names if name.endswith(b".tmp")]
                orphans = tree.orphans(txn, limit=10**6)

            def reap_all(txn, orphans=orphans):
                return [tree.reap(txn, ino) for ino in orphans]

            assert None not in db.commit_now(reap_all)
    assert len(expected) > 100
    with Database.open(tmp_path) as db:
        assert db.clean_close


def test_a_reboot_in_between_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_until_killed(tmp_path, 1, 5)
    monkeypatch.setattr("tierfs.namespace.db._boot_id", lambda: b"another")
    with Database.open(tmp_path) as db:
        assert db.unclean_boot
    with Database.open(tmp_path) as db:
        assert not db.unclean_boot
