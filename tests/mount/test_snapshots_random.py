"""Random operations on a mount, and snapshots now and then: each stays what the tree was at that moment.

``TIERFS_TEST_SEED=N`` runs that seed instead of the fixed ones.
"""

from __future__ import annotations

import os
import random
import stat
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.support.mount import MountFactory
from tests.support.sequence import RandomOperations, Replica, tree_state

SEEDS = [int(os.environ["TIERFS_TEST_SEED"])] if "TIERFS_TEST_SEED" in os.environ else [1, 2]
STEPS = 240
EVERY = 40
KEPT = 3

pytestmark = pytest.mark.usefixtures("needs_mount")


def bytes_of_files(top: Path) -> dict[str, bytes | None]:
    """None: a link or a special file, whose object says in its metadata what it is."""
    found = [path for path in top.rglob("*") if not stat.S_ISDIR(os.lstat(path).st_mode)]
    return {
        str(path.relative_to(top)): path.read_bytes() if stat.S_ISREG(os.lstat(path).st_mode) else None
        for path in found
    }


def check_store(store: Path, expected: dict[str, bytes | None]) -> None:
    """Every file is one object with its bytes, and nothing else is there."""
    found = bytes_of_files(store)
    assert found.keys() == expected.keys()
    assert {name: found[name] for name, data in expected.items() if data is not None} == {
        name: data for name, data in expected.items() if data is not None
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_snapshots_under_random_operations(mount_factory: MountFactory, seed: int) -> None:
    mounted = mount_factory(options=("--upload-delay", "0.05"))
    chance = random.Random(seed)
    top = mounted.path / "top"
    top.mkdir()
    replica = Replica(top)
    expected: dict[str, tuple[Path, dict[str, tuple[Any, ...]]]] = {}

    def delete(name: str) -> None:
        mounted.json("snapshot", "delete", str(mounted.path), "--name", name)
        del expected[name]

    for number, operation in enumerate(islice(RandomOperations(seed), STEPS), 1):
        replica.perform(operation)
        if number % EVERY:
            continue
        replica.close_handles()
        name = f"s{number}"
        made = mounted.json("snapshot", "create", str(top), "--name", name)["snapshot"]
        expected[name] = Path(made["location"]), tree_state(top)
        if len(expected) > KEPT:
            delete(chance.choice(sorted(expected)))
    replica.close_handles()
    mounted.flush()
    for name, (location, state) in expected.items():
        assert tree_state(location) == state, name
    name = chance.choice(sorted(expected))
    mounted.json("snapshot", "clone", name, str(mounted.path / "copy"))
    mounted.json("snapshot", "restore", str(top), "--name", name)
    for _ in range(2):
        assert tree_state(top) == tree_state(mounted.path / "copy") == expected[name][1], name
        mounted.flush()
    for place in ("top", "copy"):
        check_store(mounted.store_dir / place, bytes_of_files(top))
    while expected:
        delete(min(expected))
        for name, (location, state) in expected.items():
            assert tree_state(location) == state, name
