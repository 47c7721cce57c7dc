"""The digests of what went up: what is found, what is forgotten, what a damaged file costs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierfs.writeback import part_index
from tierfs.writeback.part_index import PartIndex, StoredParts

MIB = 1 << 20
PART = 5 * MIB


@pytest.fixture
def index(tmp_path: Path) -> Iterator[PartIndex]:
    index = PartIndex.open(tmp_path / "parts.lmdb")
    yield index
    index.close()


def row(index: PartIndex, key: str, parts: list[bytes], *, etag: str = "e1", uid: int = 0) -> StoredParts:
    """What an upload of full parts with these texts leaves."""
    digests = b"".join(index.digest(text) for text in parts)
    return StoredParts(key, etag, None, PART * len(parts), PART, uid, digests)


def test_a_part_is_found_by_key_and_by_digest(index: PartIndex) -> None:
    stored = row(index, "a", [b"1", b"2"])
    index.put(stored)
    assert index.get("a") == stored
    assert index.get("b") is None
    assert index.find(index.digest(b"2"), PART, 0) == (stored, 2)
    assert index.find(index.digest(b"3"), PART, 0) is None


def test_parts_of_others_and_of_another_size_are_not_found(index: PartIndex) -> None:
    index.put(row(index, "a", [b"1"], uid=1000))
    assert index.find(index.digest(b"1"), PART, 1001) is None
    assert index.find(index.digest(b"1"), 2 * PART, 1000) is None
    assert index.find(index.digest(b"1"), PART, 1000) is not None


def test_a_short_last_part_equals_only_one_of_its_length(index: PartIndex) -> None:
    stored = StoredParts("a", "e", None, PART + 7, PART, 0, index.digest(b"1") + index.digest(b"2"))
    index.put(stored)
    assert stored.holds(2, index.digest(b"2"), 7)
    assert not stored.holds(2, index.digest(b"2"), 8)
    assert not stored.holds(3, index.digest(b"2"), 7)
    assert index.find(index.digest(b"2"), PART, 0) is None


def test_a_new_version_takes_the_place_of_the_old_one(index: PartIndex) -> None:
    index.put(row(index, "a", [b"1", b"2"]))
    newer = row(index, "a", [b"1", b"3"], etag="e2")
    index.put(newer)
    assert index.find(index.digest(b"2"), PART, 0) is None
    assert index.find(index.digest(b"1"), PART, 0) == (newer, 1)


def test_forgetting_leaves_a_newer_version_alone(index: PartIndex) -> None:
    old, new = row(index, "a", [b"1"]), row(index, "a", [b"1"], etag="e2")
    index.put(old)
    index.put(new)
    index.forget(old)
    assert index.get("a") == new
    index.forget(new)
    assert index.get("a") is None
    assert index.find(index.digest(b"1"), PART, 0) is None


def test_the_oldest_rows_go_first(index: PartIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_index, "MOST_PARTS", 40)
    for number in range(10):
        index.put(row(index, f"k{number}", [b"%d" % number, b"x%d" % number]))
    kept = [number for number in range(10) if index.get(f"k{number}") is not None]
    assert kept == [6, 7, 8, 9]
    assert index.find(index.digest(b"0"), PART, 0) is None
    assert index.find(index.digest(b"9"), PART, 0) is not None


def test_without_room_it_begins_anew(index: PartIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_index, "MOST_PARTS", 1 << 40)
    index._env.set_mapsize(1 << 20)
    for number in range(40):
        parts = [b"%d.%d" % (number, part) for part in range(1000)]
        index.put(row(index, f"k{number}", parts))
    stored = row(index, "last", [b"1"])
    index.put(stored)
    assert index.get("last") == stored
    assert index.get("k0") is None


def test_it_survives_a_restart(tmp_path: Path) -> None:
    first = PartIndex.open(tmp_path / "p")
    stored = row(first, "a", [b"1"])
    first.put(stored)
    first.note_copies("s3://one")
    first.close()
    second = PartIndex.open(tmp_path / "p")
    assert second.find(second.digest(b"1"), PART, 0) == (stored, 1)
    assert second.knows_copies("s3://one")
    assert not second.knows_copies("s3://two")
    second.close()


def test_two_state_directories_have_different_digests(tmp_path: Path) -> None:
    one, two = PartIndex.open(tmp_path / "one"), PartIndex.open(tmp_path / "two")
    assert one.digest(b"text" * 1000) != two.digest(b"text" * 1000)
    one.close()
    two.close()


@pytest.mark.parametrize("damage", ["overwritten", "cut", "empty"])
def test_a_damaged_file_is_thrown_away(tmp_path: Path, damage: str) -> None:
    first = PartIndex.open(tmp_path / "p")
    first.put(row(first, "a", [b"%d" % number for number in range(1000)]))
    first.close()
    data = tmp_path / "p" / "data.mdb"
    if damage == "overwritten":
        data.write_bytes(b"\x5a" * 65536)
    else:
        os.truncate(data, 3 * 4096 if damage == "cut" else 0)
    second = PartIndex.open(tmp_path / "p")
    assert second.get("a") is None
    second.put(row(second, "b", [b"1"]))
    assert second.get("b") is not None
    second.close()
