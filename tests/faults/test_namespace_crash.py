"""kill -9 in the middle of commits: what was acknowledged is there, and the tables agree."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tierfs.errors import NotFound
from tierfs.namespace import tree
from tierfs.namespace.check import problems
from tierfs.namespace.db import Database, WriteTransaction
from tierfs.types import ROOT_INO

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


HEADER_BYTES = 2 * 4096
"""LMDB's two meta pages, of which each commit writes one, after its other pages are on the device."""


def test_a_power_cut_before_the_header_reached_the_device_loses_only_the_last_commit(tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    with Database.open(tmp_path / "state") as db:
        data = db.directory / "namespace.lmdb" / "data.mdb"
        for number in range(30):
            header = data.read_bytes()[:HEADER_BYTES]

            def step(txn: WriteTransaction, number: int = number) -> None:
                for name in (b"a%d" % number, b"b%d" % number):
                    tree.create(txn, ROOT_INO, name, mode=stat.S_IFREG | 0o644, uid=0, gid=0, now_ns=1)
                if number >= 3:
                    tree.unlink(txn, ROOT_INO, b"b%d" % (number - 3), now_ns=1)

            db.commit_now(step)
            # The other pages of this commit are on the device, its header is not.
            after_cut = copies / str(number) / "namespace.lmdb"
            after_cut.mkdir(parents=True)
            (after_cut / "data.mdb").write_bytes(header + data.read_bytes()[HEADER_BYTES:])
    for number in range(30):
        with Database.open(copies / str(number)) as db, db.read() as txn:
            assert list(problems(txn)) == []
            names = {name for name, _, _ in tree.readdir(txn, ROOT_INO, 0, 1000)}
        kept = range(number)
        assert names == {b"a%d" % n for n in kept} | {b"b%d" % n for n in kept if n > number - 4}


def test_a_reboot_in_between_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_until_killed(tmp_path, 1, 5)
    monkeypatch.setattr("tierfs.namespace.environment.boot_id", lambda: b"another")
    with Database.open(tmp_path) as db:
        assert db.unclean_boot
    with Database.open(tmp_path) as db:
        assert not db.unclean_boot
