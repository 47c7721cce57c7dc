"""The power is cut while a namespace is changed: it is as it was at one moment, whatever the disk had of it."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.lossy_disk import LossyDisk
from tests.support.namespace_steps import KEPT
from tierfs.namespace import environment, tree
from tierfs.namespace.check import problems
from tierfs.namespace.db import Database
from tierfs.types import ROOT_INO

REPOSITORY = Path(__file__).resolve().parents[2]
ROUNDS = 5


@pytest.fixture
def disk(base_dir: Path) -> Iterator[LossyDisk]:
    disk = LossyDisk(base_dir / "disk")
    yield disk
    disk.close()


def run_until_killed(directory: Path, seed: int, first: int, lines: int) -> tuple[int, int]:
    """The last step that was durable, and the last one that can have been committed."""
    command = [sys.executable, "-m", "tests.support.namespace_steps", str(directory), str(seed), str(first)]
    durable, last = -1, first
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as writer:
        assert writer.stdout is not None
        try:
            for number, line in enumerate(writer.stdout):
                if line.endswith("\n"):
                    kind, step = line.split()
                    last = int(step) + 1
                    durable = int(step) if kind == "durable" else durable
                if number == lines:
                    writer.kill()
        finally:
            writer.kill()
    return durable, last


@pytest.mark.needs_fuse
@pytest.mark.limit_s(300)
def test_the_power_is_cut(disk: LossyDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(11)
    state = disk.mountpoint / "state"
    newest = lost = 0
    for seed in range(ROUNDS):
        # The writer belongs to the boot of now; the one that looks afterwards to the next one.
        durable, last = run_until_killed(state, seed, newest + 1, chance.randrange(1, 400))
        disk.cut(seed)
        monkeypatch.setattr(environment, "boot_id", lambda seed=seed: b"boot %d" % seed)
        with Database.open(state) as db, db.read() as txn:
            assert db.unclean_boot or seed == 0
            assert list(problems(txn)) == []
            found = sorted(int(name) for name, _, _ in tree.readdir(txn, ROOT_INO, 0, 1000))
        monkeypatch.undo()
        if durable < 0:
            durable = newest
        assert durable <= (found[-1] if found else 0) <= last
        if found:
            assert found == list(range(max(1, found[-1] - KEPT + 1), found[-1] + 1))
            lost += last - found[-1] > 1
            newest = found[-1]
    assert newest > 0
    assert lost, "no cut took anything"
