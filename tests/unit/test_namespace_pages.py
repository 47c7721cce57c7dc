"""Pages of a listing as directory entries: what is shown, what is hidden, and never a sibling's harm."""

from __future__ import annotations

import random

import pytest

from tierfs.namespace.pages import parse_page
from tierfs.store.base import ListPage
from tierfs.types import ObjectInfo


def info(key: str, size: int = 1) -> ObjectInfo:
    return ObjectInfo(key, size, "e", 5)


def parse(*keys: str, prefix: str = "", prefixes: tuple[str, ...] = (), is_root: bool = False):
    return parse_page(ListPage([info(key) for key in keys], prefixes, None), prefix, is_root=is_root)


def test_a_page_with_a_delimiter() -> None:
    parsed = parse("p/a", "p/b", "p/", prefix="p/", prefixes=("p/d/", "p/é/"))
    assert set(parsed.top.files) == {b"a", b"b"}
    assert parsed.top.dirs == {b"d", "é".encode()}
    assert parsed.top.marker is not None
    assert parsed.top.marker.key == "p/"
    assert parsed.hidden == []
    assert list(parsed.directories) == [b""]


def test_a_page_without_one_makes_all_parents() -> None:
    keys = ["a/b/c/f", "a/g", "m/", "a/b/", "top"]
    random.Random(1).shuffle(keys)
    parsed = parse(*keys)
    assert set(parsed.directories) == {b"", b"a", b"a/b", b"a/b/c", b"m"}
    assert parsed.top.dirs == {b"a", b"m"}
    assert set(parsed.top.files) == {b"top"}
    assert set(parsed.directories[b"a"].files) == {b"g"}
    assert parsed.directories[b"a/b"].marker is not None
    assert parsed.directories[b"a"].marker is None
    assert parsed.directories[b"m"].files == {}


@pytest.mark.parametrize(
    "key",
    ["/", "/a", "a//b", "a/../b", "./a", "a/.", "..", "a\0b", "x" * 256, "a/" + "é" * 128, "a/\udcff",
     "\uf741\uf700x\uf780" + "\u00e9\uf7c3\uf7a9"],
)  # fmt: skip
def test_keys_without_a_path_are_hidden_and_harm_no_sibling(key: str) -> None:
    parsed = parse("p/" + key, "p/good", "p/a/good", prefix="p/")
    assert parsed.hidden == ["p/" + key]
    assert set(parsed.top.files) == {b"good"}
    assert set(parsed.directories[b"a"].files) == {b"good"}


def test_directories_above_a_hidden_key_are_shown_as_a_delimiter_would() -> None:
    parsed = parse("a/b//c", "x//y")
    assert parsed.top.dirs == {b"a", b"x"}
    assert parsed.directories[b"a"].dirs == {b"b"}
    assert len(parsed.hidden) == 2


def test_hidden_prefixes() -> None:
    parsed = parse("p/ok", prefix="p/", prefixes=("p//", "p/../", "p/d", "q/d/", "p/a/b/", "p/fine/"))
    assert parsed.top.dirs == {b"fine"}
    assert len(parsed.hidden) == 5


def test_answers_that_were_not_asked_for_are_hidden() -> None:
    parsed = parse("q/a", "p/b", prefix="p/")
    assert parsed.hidden == ["q/a"]
    assert set(parsed.top.files) == {b"b"}
    assert parse_page(ListPage([info("a", -1)], (), None), "", is_root=True).hidden == ["a"]


def test_what_tierfs_keeps_is_not_shown_at_the_root() -> None:
    keys = (".tierfs/long/1", ".tierfs", ".tierfsx", "d/.tierfs/x")
    parsed = parse(*keys, prefixes=(".tierfs/",), is_root=True)
    assert set(parsed.top.files) == {b".tierfsx"}
    assert parsed.hidden == []
    assert parsed.top.dirs == {b"d"}
    assert b".tierfs" in parse(*keys, is_root=False).top.dirs


def test_a_name_that_is_both_is_in_both() -> None:
    parsed = parse("x", "x/y")
    assert set(parsed.top.files) == parsed.top.dirs == {b"x"}
