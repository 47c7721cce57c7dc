"""Reading directories: completeness, rewind, telldir and seekdir, concurrent changes, size."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from pathlib import Path

import pytest

from tests.support.posix import DirStream


def fill(path: Path, count: int) -> list[bytes]:
    names = [f"name-{i:05}".encode() for i in range(count)]
    for name in names:
        os.close(os.open(bytes(path) + b"/" + name, os.O_CREAT | os.O_WRONLY))
    return names


def test_dot_and_dotdot(workdir: Path) -> None:
    os.mkdir(workdir / "d")
    with DirStream(workdir / "d") as stream:
        names = [stream.read(), stream.read(), stream.read()]
    assert sorted(names[:2]) == [b".", b".."]
    assert names[2] is None
    assert os.stat(workdir / "d" / ".").st_ino == os.stat(workdir / "d").st_ino
    assert os.stat(workdir / "d" / "..").st_ino == os.stat(workdir).st_ino


def test_types_and_inode_numbers_of_entries(workdir: Path) -> None:
    (workdir / "f").write_bytes(b"1")
    os.mkdir(workdir / "d")
    os.symlink("f", workdir / "s")
    os.mkfifo(workdir / "p")
    found = {entry.name: entry for entry in os.scandir(workdir)}
    assert sorted(found) == ["d", "f", "p", "s"]
    assert found["f"].is_file(follow_symlinks=False)
    assert found["d"].is_dir(follow_symlinks=False)
    assert found["s"].is_symlink()
    assert not found["p"].is_file(follow_symlinks=False)
    for name, entry in found.items():
        assert entry.inode() == os.lstat(workdir / name).st_ino


@pytest.mark.parametrize("count", [0, 1, 30, 700])
def test_rewind_reads_again_from_the_start(workdir: Path, count: int) -> None:
    names = fill(workdir, count)
    with DirStream(workdir) as stream:
        for _ in range(min(count, 10)):
            stream.read()
        stream.rewind()
        assert sorted(stream.rest()) == names
        stream.rewind()
        assert sorted(stream.rest()) == names


def test_rewind_sees_what_came_since(workdir: Path) -> None:
    names = fill(workdir, 20)
    with DirStream(workdir) as stream:
        assert sorted(stream.rest()) == names
        (workdir / "later").write_bytes(b"")
        os.unlink(bytes(workdir) + b"/" + names[0])
        stream.rewind()
        assert sorted(stream.rest()) == sorted([*names[1:], b"later"])


@pytest.mark.semantics("S-NAME-6", "`rewinddir`, `telldir` and `seekdir` work, in directories of any size.")
def test_seek_to_every_position_told(workdir: Path) -> None:
    fill(workdir, 400)
    with DirStream(workdir) as stream:
        positions, names = [], []
        while True:
            position = stream.tell()
            name = stream.read()
            if name is None:
                break
            positions.append(position)
            names.append(name)
        order = list(range(len(positions)))
        random.Random(7).shuffle(order)
        for i in order[:120]:
            stream.seek(positions[i])
            assert stream.read() == names[i]
        stream.seek(positions[200])
        assert len([1 for _ in iter(stream.read, None)]) == len(names) - 200


def test_positions_survive_removals(workdir: Path) -> None:
    """After entries before and after a position are gone, the rest is still read exactly once."""
    names = fill(workdir, 500)
    with DirStream(workdir) as stream:
        first = [name for name in (stream.read() for _ in range(200)) if name not in (b".", b"..")]
        for name in first[::2]:
            os.unlink(bytes(workdir) + b"/" + name)
        rest = stream.rest()
    assert sorted([*first, *rest]) == sorted(names)


def test_remove_everything_while_reading(workdir: Path) -> None:
    fill(workdir, 1500)
    removed = 0
    with os.scandir(workdir) as entries:
        for entry in entries:
            os.unlink(entry.path)
            removed += 1
    assert removed == 1500
    assert os.listdir(workdir) == []


@pytest.mark.semantics(
    "S-NAME-5",
    "An entry that exists during a whole listing appears in it exactly once, whatever others create or remove meanwhile.",
)
def test_entries_that_stay_appear_exactly_once(workdir: Path) -> None:
    """Others create, remove and rename while one reads; what stays is seen once each time."""
    stays = set(fill(workdir, 600))
    done = threading.Event()
    failures: list[BaseException] = []

    def change(seed: int) -> None:
        chance = random.Random(seed)
        made: list[bytes] = []
        try:
            while not done.is_set():
                name = bytes(workdir) + b"/other-%d-%d" % (seed, chance.randrange(10**9))
                os.close(os.open(name, os.O_CREAT | os.O_WRONLY))
                os.stat(name)  # what one has just made is there
                made.append(name)
                if len(made) > 20:
                    os.unlink(made.pop(chance.randrange(len(made))))
                if len(made) > 5:
                    os.rename(made[0], made[0] + b"x")
                    made.append(made.pop(0) + b"x")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=change, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(8):
            with DirStream(workdir) as stream:
                counts = Counter(stream.rest())
            assert {name: counts[name] for name in stays} == dict.fromkeys(stays, 1)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not failures


def test_two_readers_of_one_directory_do_not_disturb_each_other(workdir: Path) -> None:
    names = fill(workdir, 300)
    with DirStream(workdir) as one, DirStream(workdir) as other:
        first: list[bytes] = []
        second: list[bytes] = []
        while True:
            a, b = one.read(), other.read()
            if a is None and b is None:
                break
            first += [a] if a else []
            second += [b] if b else []
    assert sorted(set(first) - {b".", b".."}) == sorted(set(second) - {b".", b".."}) == names


@pytest.mark.limit_s(240)
@pytest.mark.semantics("S-NAME-6", "`rewinddir`, `telldir` and `seekdir` work, in directories of any size.")
def test_large_directory(workdir: Path) -> None:
    count = 6_000
    here = os.open(workdir, os.O_RDONLY)
    for i in range(count):
        os.mknod(f"f{i}", 0o100644, dir_fd=here)
    with DirStream(workdir) as stream:
        seen = Counter(stream.rest())
        assert len(seen) == count
        assert max(seen.values()) == 1
        stream.rewind()
        assert len(stream.rest()) == count
    assert sum(1 for _ in os.scandir(workdir)) == count
    os.close(here)
