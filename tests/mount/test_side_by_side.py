"""The same random operations on the mount and on a plain directory, compared after each step.

Every so often the mount is ended and mounted again, or its engine is killed: with all files closed, neither
may change anything. ``TIERFS_TEST_SEED=N`` runs that seed instead of the fixed ones.
"""

from __future__ import annotations

import os
import random
import stat
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from tests.support.mount import Mounted, MountFactory
from tests.support.sequence import RandomOperations, Replica, tree_state

SEEDS = [int(os.environ["TIERFS_TEST_SEED"])] if "TIERFS_TEST_SEED" in os.environ else list(range(1, 6))
STEPS = 500


def compare(here: Replica, there: Replica, told: list[str]) -> None:
    ours, theirs = tree_state(here.root), tree_state(there.root)
    if ours != theirs:
        different = {
            name: (ours.get(name), theirs.get(name))
            for name in ours.keys() | theirs.keys()
            if ours.get(name) != theirs.get(name)
        }
        pytest.fail(f"(mount, directory) differ in {different}\nafter:\n" + "\n".join(told[-40:]))


def run(
    mounted: Mounted, plain: Path, seed: int, steps: int, *, interrupt: Callable[[], None], every: int
) -> None:
    top = mounted.path / "top"
    for directory in (top, plain):
        directory.mkdir()
    here, there = Replica(top), Replica(plain)
    told: list[str] = []
    try:
        for number, operation in enumerate(islice(RandomOperations(seed), steps), 1):
            ours, theirs = here.perform(operation), there.perform(operation)
            told.append(f"{number}: {operation} -> {theirs}")
            if ours != theirs:
                before = "\n".join(told[-40:])
                pytest.fail(f"seed {seed}, step {number}: mount {ours}, directory {theirs}\n{before}")
            if number % 50 == 0:
                compare(here, there, told)
            if number % every == 0:
                here.close_handles()
                there.close_handles()
                interrupt()
                told.append("-- interrupted here")
                compare(here, there, told)
    finally:
        here.close_handles()
        there.close_handles()
    compare(here, there, told)


@pytest.mark.parametrize("seed", SEEDS)
def test_with_remounts_between(mounted: Mounted, base_dir: Path, seed: int) -> None:
    run(mounted, base_dir / "plain", seed, STEPS, interrupt=mounted.remount, every=250)


@pytest.mark.parametrize("seed", [1000 + seed for seed in SEEDS[:3]])
def test_with_kills_between(mounted: Mounted, base_dir: Path, seed: int) -> None:
    run(mounted, base_dir / "plain", seed, STEPS, interrupt=mounted.crash_and_restart, every=125)


@pytest.mark.parametrize("seed", [2000 + seed for seed in SEEDS[:3]])
def test_with_uploads_between(mounted: Mounted, base_dir: Path, seed: int) -> None:
    """Everything is in the store, and the next operations start from there."""
    run(mounted, base_dir / "plain", seed, STEPS, interrupt=mounted.flush, every=100)


@pytest.mark.parametrize("seed", [3000 + seed for seed in SEEDS[:4]])
def test_with_anything_between(mount_factory: MountFactory, base_dir: Path, seed: int) -> None:
    """Kills, remounts, flushes and pauses in random order; at the end the store holds just what it should."""
    chance = random.Random(seed)
    mounted = mount_factory(options=("--upload-delay", chance.choice(["0", "0.05", "0.3", "1"])))
    plain = base_dir / "plain"

    def interrupt() -> None:
        kinds = [
            mounted.crash_and_restart,
            mounted.remount,
            mounted.flush,
            lambda: time.sleep(0.5),
            lambda: None,
        ]
        chance.choice(kinds)()

    run(mounted, plain, seed, STEPS, interrupt=interrupt, every=70)
    if mounted.is_plain:
        return
    mounted.umount()
    mounted.cli("meta", "check", "--state-dir", str(mounted.state_dir))
    ours, theirs = regular_files(mounted.store_dir / "top"), regular_files(plain)
    # A link or a fifo is an ordinary object in the store.
    assert {
        name: data for name, data in ours.items() if name in theirs or not os.path.lexists(plain / name)
    } == theirs


def regular_files(top: Path) -> dict[str, bytes]:
    paths = [Path(directory, name) for directory, _, files in os.walk(top) for name in files]
    files = [path for path in paths if stat.S_ISREG(os.lstat(path).st_mode)]
    return {str(path.relative_to(top)): path.read_bytes() for path in files}


def test_the_bucket_alone_holds_the_tree(mount_factory: MountFactory, base_dir: Path) -> None:
    """After a flush a second mount of the same source, with no local state, shows the same tree."""
    first = mount_factory()
    run(first, base_dir / "plain", 4711, 400, interrupt=first.flush, every=200)
    first.umount() if not first.is_plain else None
    if first.is_plain:
        return
    second = mount_factory(source=first.source)
    second.cli("import", "--metadata", str(second.path))
    state, expected = tree_state(second.path / "top"), tree_state(base_dir / "plain")
    # What a bucket cannot say: that names are links of one file, and extended attributes.
    for tree in (state, expected):
        for name, (fields, content, _, _) in tree.items():
            tree[name] = ((fields[0], *fields[2:]), content)
    assert state == expected
