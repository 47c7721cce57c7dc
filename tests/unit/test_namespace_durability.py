"""A power cut takes any pages that were not synced; what is left is the namespace as it was at one moment."""

from __future__ import annotations

import os
import random
import stat
import threading
from pathlib import Path

import pytest

from tierfs.errors import NamespaceError
from tierfs.namespace import durability, lazy_sync, tree
from tierfs.namespace.check import problems
from tierfs.namespace.db import Database, WriteTransaction
from tierfs.namespace.durability import Checkpoints
from tierfs.types import ROOT_INO

PAGE_BYTES = 4096
STEPS = 60
KEPT = 4
"""Names that a step leaves; it removes older ones, so that pages are used again."""


class Disk:
    """What of two files is durable for sure, and any mixture of that with what is in them now."""

    def __init__(self, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = state / "namespace.lmdb"
        self.durable = {"data.mdb": b"", durability.FILE_NAME: b""}
        self.synced_count = 0
        note = Checkpoints._note

        def watched_note(checkpoints: Checkpoints, txn_id: int, meta: bytes) -> None:
            self.durable["data.mdb"] = (self.path / "data.mdb").read_bytes()
            note(checkpoints, txn_id, meta)
            self.durable[durability.FILE_NAME] = (self.path / durability.FILE_NAME).read_bytes()
            self.synced_count += 1

        monkeypatch.setattr(Checkpoints, "_note", watched_note)

    def cut(self, state: Path, chance: random.Random) -> None:
        """A copy after a power cut at this moment."""
        path = state / "namespace.lmdb"
        path.mkdir(parents=True)
        part = chance.choice([0.0, 0.3, 0.7, 1.0])
        for name, durable in self.durable.items():
            current = (self.path / name).read_bytes()
            pages = bytearray(durable.ljust(len(current), b"\0"))
            for at in range(0, len(current), PAGE_BYTES):
                if chance.random() < part:
                    pages[at : at + PAGE_BYTES] = current[at : at + PAGE_BYTES]
            (path / name).write_bytes(pages)


def step(txn: WriteTransaction, number: int) -> None:
    tree.create(txn, ROOT_INO, b"%d" % number, mode=stat.S_IFREG | 0o644, uid=0, gid=0, now_ns=1)
    if number >= KEPT:
        tree.unlink(txn, ROOT_INO, b"%d" % (number - KEPT), now_ns=1)


def names_in(state: Path) -> list[int]:
    with Database.open(state) as db, db.read() as txn:
        assert list(problems(txn)) == []
        return sorted(int(name) for name, _, _ in tree.readdir(txn, ROOT_INO, 0, 1000))


def names_after(number: int) -> list[int]:
    return list(range(max(0, number - KEPT + 1), number + 1))


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made durable but what asks for it."""
    monkeypatch.setattr(lazy_sync, "_LAZY_S", 3600.0)


@pytest.fixture
def boots(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The last one is the boot of now."""
    boots = [b"first"]
    monkeypatch.setattr("tierfs.namespace.environment.boot_id", lambda: boots[-1])
    return boots


@pytest.mark.usefixtures("slowly")
@pytest.mark.parametrize("seed", range(6))
def test_one_moment_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boots: list[bytes], seed: int
) -> None:
    """Whatever of the rest the device had, and whoever made the changes durable."""
    chance = random.Random(seed)
    disk = Disk(tmp_path / "state", monkeypatch)
    cuts: list[tuple[Path, int, int]] = []
    durable = -1
    with Database.open(tmp_path / "state") as db:
        for number in range(STEPS):
            kind = chance.choice(["lazy"] * 8 + ["durable", "full"])
            db.commit_now(lambda txn, n=number: step(txn, n), durable=kind == "durable", lazy=kind == "lazy")
            if kind != "lazy":
                durable = number
            if chance.random() < 0.4:
                copy = tmp_path / f"cut{number}"
                disk.cut(copy, chance)
                cuts.append((copy, durable, number))
    assert len(cuts) > STEPS // 5
    torn = 0
    for copy, durable, newest in cuts:
        boots.append(copy.name.encode())
        found = names_in(copy)
        last = found[-1] if found else -1
        assert durable <= last <= newest
        assert found == names_after(last)
        torn += last < newest
    assert torn


@pytest.mark.usefixtures("slowly")
def test_a_killed_process_loses_nothing(tmp_path: Path, boots: list[bytes]) -> None:
    """Within one boot the page cache is the truth, and the next checkpoint comes before anything is written."""
    copy = tmp_path / "copy" / "namespace.lmdb"
    copy.mkdir(parents=True)
    with Database.open(tmp_path / "state") as db:
        for number in range(10):
            db.commit_now(lambda txn, n=number: step(txn, n), lazy=True)
        for name in ("data.mdb", durability.FILE_NAME):
            (copy / name).write_bytes((db.directory / "namespace.lmdb" / name).read_bytes())
    assert names_in(copy.parent) == names_after(9)
    boots.append(b"second")
    assert names_in(copy.parent) == names_after(9)


@pytest.mark.usefixtures("slowly")
def test_a_tool_that_only_reads_goes_back_as_well(tmp_path: Path, boots: list[bytes]) -> None:
    copy = tmp_path / "copy" / "namespace.lmdb"
    copy.mkdir(parents=True)
    with Database.open(tmp_path / "state") as db:
        db.commit_now(lambda txn: step(txn, 0))
        db.commit_now(lambda txn: step(txn, 1), lazy=True)
        for name in ("data.mdb", durability.FILE_NAME):
            (copy / name).write_bytes((db.directory / "namespace.lmdb" / name).read_bytes())
    boots.append(b"second")
    with Database.open(copy.parent, read_only=True) as db, db.snapshot() as txn:
        assert [name for name, _, _ in tree.readdir(txn, ROOT_INO, 0, 10)] == [b"0"]
    assert names_in(copy.parent) == [0]


def test_what_nobody_waits_for_becomes_durable_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = threading.Event()
    with Database.open(tmp_path / "state") as db:
        note = Checkpoints._note
        monkeypatch.setattr(Checkpoints, "_note", lambda *args: (note(*args), noted.set())[0])
        db.commit_now(lambda txn: step(txn, 0), lazy=True)
        assert noted.wait(60)


@pytest.mark.usefixtures("slowly")
def test_a_device_that_does_not_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boots: list[bytes]
) -> None:
    """Nothing is changed any more, and the next start goes back to what is durable for sure, in whatever boot."""
    copy = tmp_path / "copy" / "namespace.lmdb"
    copy.mkdir(parents=True)
    db = Database.open(tmp_path / "state")
    db.commit_now(lambda txn: step(txn, 0))
    db.commit_now(lambda txn: step(txn, 1), lazy=True)

    def refuse(_: int) -> None:
        raise OSError(5, "I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", refuse)
        with pytest.raises(NamespaceError, match="cannot be made durable"):
            db.commit_now(lambda txn: step(txn, 2), durable=True)
    with pytest.raises(NamespaceError, match="cannot be made durable"):
        db.commit_now(lambda txn: step(txn, 3), lazy=True)
    for name in ("data.mdb", durability.FILE_NAME):
        (copy / name).write_bytes((db.directory / "namespace.lmdb" / name).read_bytes())
    with pytest.raises(NamespaceError, match="cannot be made durable"):
        db.close()
    assert names_in(copy.parent) == [0]
