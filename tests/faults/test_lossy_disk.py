"""The disk that forgets: what is synced is there after a cut, and what is not is not promised."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.lossy_disk import LossyDisk
from tests.support.lossy_image import ROOT, LossyImage

FILE = stat.S_IFREG | 0o644
SEEDS = range(200)


def outcomes(prepare: str) -> set[tuple[tuple[str, bytes], ...]]:
    """Every directory that some cut leaves. ``prepare``: calls, one per word, on a directory with a synced ``a``."""
    found = set()
    for seed in SEEDS:
        image = LossyImage()
        node = image.add(ROOT, b"a", FILE, 0, 0)
        image.write(node.number, 0, b"old")
        image.sync_file(node.number)
        image.sync_directory(ROOT)
        for word in prepare.split():
            match word:
                case "write":
                    image.write(node.number, 0, b"new")
                case "extend":
                    image.write(node.number, 4096, b"far")
                case "fsync":
                    image.sync_file(node.number)
                case "rename":
                    image.rename(ROOT, b"a", ROOT, b"b")
                case "unlink":
                    image.remove(ROOT, b"a")
                case "create":
                    image.write(image.add(ROOT, b"c", FILE, 0, 0).number, 0, b"made")
                case "fsyncdir":
                    image.sync_directory(ROOT)
        after = image.cut(seed)
        entries = after.nodes[ROOT].entries
        found.add(
            tuple(sorted((name.decode(), bytes(after.nodes[n].current)) for name, n in entries.items()))
        )
    return found


OLD, NEW = ("a", b"old"), ("a", b"new")


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        ("", {(OLD,)}),
        ("write", {(OLD,), (NEW,)}),
        ("write fsync", {(NEW,)}),
        ("rename", {(OLD,), (("b", b"old"),)}),
        ("rename fsync", {(OLD,), (("b", b"old"),)}),
        ("rename fsyncdir", {(("b", b"old"),)}),
        ("unlink", {(OLD,), ()}),
        ("unlink fsyncdir", {()}),
        ("create fsyncdir", {(OLD, ("c", b"")), (OLD, ("c", b"made"))}),
        ("create", {(OLD,), (OLD, ("c", b"")), (OLD, ("c", b"made"))}),
        # A later name never without an earlier one.
        ("rename create", {(OLD,), (("b", b"old"),), (("b", b"old"), ("c", b"")), (("b", b"old"), ("c", b"made"))}),
    ],
)  # fmt: skip
def test_what_a_cut_may_leave(prepare: str, expected: set[tuple[tuple[str, bytes], ...]]) -> None:
    assert outcomes(prepare) == expected


def test_pages_of_one_write_may_arrive_without_each_other() -> None:
    kept = set()
    for seed in SEEDS:
        image = LossyImage()
        node = image.add(ROOT, b"a", FILE, 0, 0)
        image.sync_directory(ROOT)
        image.write(node.number, 0, b"1" * 4096 + b"2" * 4096)
        kept.add(bytes(image.cut(seed).nodes[node.number].current))
    assert kept == {b"", b"1" * 4096, bytes(4096) + b"2" * 4096, b"1" * 4096 + b"2" * 4096}


@pytest.fixture
def disk(base_dir: Path) -> Iterator[LossyDisk]:
    disk = LossyDisk(base_dir / "disk")
    yield disk
    disk.close()


@pytest.mark.needs_fuse
def test_as_a_file_system(disk: LossyDisk) -> None:
    top = disk.mountpoint
    (top / "d").mkdir()
    (top / "d" / "f").write_bytes(b"x" * 10_000)
    with open(top / "d" / "f", "r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        os.pwrite(file.fileno(), b"later", 4096)
        assert mapped[4096:4101] == b"later"
        os.fsync(file.fileno())
        os.ftruncate(file.fileno(), 20_000)
    os.rename(top / "d" / "f", top / "g")
    os.link(top / "g", top / "h")
    os.unlink(top / "g")
    for path in (top, top / "d"):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    (top / "unsynced").write_bytes(b"x")
    disk.cut(seed=1)
    left = set(os.listdir(top))
    assert {"d", "h"} <= left <= {"d", "h", "unsynced"}
    found = (top / "h").read_bytes()
    assert found[:4096] == b"x" * 4096
    assert found[4096:4101] == b"later"
    assert len(found) in (10_000, 20_000)
    assert (top / "h").stat().st_nlink == 1
