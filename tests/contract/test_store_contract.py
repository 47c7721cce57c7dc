"""One suite for every object store: what ``tierfs.store.base`` promises."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.stores import MIB, open_named_store, store_names
from tests.support.streams import buffered, streamed
from tierfs.errors import ObjectNotFound, PreconditionFailed, StoreError, StoreUnsupported
from tierfs.store.base import Condition, ObjectStore
from tierfs.store.keys import encode_path
from tierfs.types import ObjectInfo

ABSENT = Condition(if_absent=True)
MISSING = Condition(if_match="0123456789abcdef0123456789abcdef")
SHAPES = pytest.mark.parametrize(
    "key",
    ["a b", "a+b", "a%20b", "100%.csv", "folder#1#/x", "한글/x", "\u00e9", "e\u0301", "q?x=1&y=2",
     "semi;colon",
     "a~b*c'(d)!", "at@sign:colon", "back\\slash", '"quoted"', "<&>", "{}[]|^`", "$dollar,comma=",
     "tab\tname", "new\nline", "\x01control", "trailing ", " leading", "...", ".hidden", "-dash",
     encode_path(b"latin-\xe9\xff"), "\U0001f600", "n" * 255, "/".join(["d" * 100] * 5)],
)


@pytest.fixture(params=store_names())
def store(request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    with open_named_store(request.param) as store:
        yield store


@pytest.fixture
def is_strict(request: pytest.FixtureRequest) -> bool:
    """False for SeaweedFS, whose own deviations are stated where they matter."""
    return "weed" not in request.node.callspec.id


def list_all(store: ObjectStore, prefix: str, *, recursive: bool = False,
             limit: int = 1000) -> tuple[dict[str, ObjectInfo], set[str]]:
    """Everything below a prefix; fails on a repeated entry, on an endless listing, on an overfull page."""
    objects: dict[str, ObjectInfo] = {}
    prefixes: set[str] = set()
    token: str | None = None
    for _ in range(10_000):
        page = store.list_page(prefix, recursive=recursive, token=token, limit=limit)
        assert len(page.objects) + len(page.prefixes) <= limit
        for info in page.objects:
            assert info.key not in objects
            objects[info.key] = info
        for name in page.prefixes:
            assert name not in prefixes
            assert name.endswith("/")
            prefixes.add(name)
        token = page.next_token
        if token is None:
            return objects, prefixes
    raise AssertionError("the listing does not end")


def assert_empty(store: ObjectStore) -> None:
    """No object is left. SeaweedFS goes on to list the directories, as prefixes, until they are deleted."""
    assert list_all(store, "", recursive=True) == ({}, set())


def read_all(store: ObjectStore, info: ObjectInfo) -> bytes:
    return store.get_range(info.key, 0, info.size_bytes, if_match=info.etag) if info.size_bytes else b""


def test_put_head_get(store: ObjectStore) -> None:
    body = os.urandom(100_000)
    put = store.put("a/b", body, metadata={"mode": "33188", "mtime": "1.5"})
    head = store.head("a/b")
    assert (head.key, head.size_bytes, head.etag) == ("a/b", len(body), put.etag)
    assert head.metadata == {"mode": "33188", "mtime": "1.5"}
    assert '"' not in head.etag
    assert abs(head.mtime_ns - put.mtime_ns) < 60 * 10**9
    assert store.get_range("a/b", 0, len(body)) == body


def test_an_answer_is_bytes_whatever_the_body_was(store: ObjectStore) -> None:
    body = bytearray(os.urandom(1000))
    store.put("view", memoryview(body))
    store.put("array", body)
    for key in ("view", "array"):
        found = store.get_range(key, 0, 1000)
        assert type(found) is bytes
        assert found == body


@SHAPES
def test_keys_round_trip(store: ObjectStore, key: str, is_strict: bool) -> None:
    """CASES C04: names with '#', space, '+', '%'."""
    if not is_strict and "\\" in key:
        pytest.skip("SeaweedFS takes a backslash for a slash")
    key = "shapes/" + key
    info = store.put(key, key.encode(), metadata={"n": "1"})
    objects, _ = list_all(store, "shapes/", recursive=True)
    assert list(objects) == [key]
    assert objects[key].etag == info.etag
    assert store.head(key).size_bytes == len(key.encode())
    assert store.get_range(key, 0, len(key.encode()), if_match=info.etag) == key.encode()
    assert store.get_range(key, 3, 4) == key.encode()[3:7]
    top, prefixes = list_all(store, "shapes/")
    first = key.removeprefix("shapes/").split("/")[0]
    assert (list(top), prefixes) == (([], {f"shapes/{first}/"}) if "/" in key.removeprefix("shapes/")
                                     else ([key], set()))
    copied = store.copy(store.head(key), key.replace("shapes/", "copies/", 1))
    assert read_all(store, copied) == key.encode()
    assert store.delete_many([key, copied.key]) == []
    assert_empty(store)


@pytest.mark.parametrize("size", [0, 1, 1000, 128 * 1024 - 1, 128 * 1024, 128 * 1024 + 976, MIB + 1])
def test_ranges_are_exact(store: ObjectStore, size: int) -> None:
    """CASES C02: the tail is there."""
    body = os.urandom(size)
    info = store.put("ranges", body)
    assert info.size_bytes == size
    assert read_all(store, store.head("ranges")) == body
    for offset in {0, 1, size // 2, size - 1}:
        for length in {1, size - offset, (size - offset) // 2}:
            if 0 <= offset < size and 0 < length <= size - offset:
                for read in (type(store).get_range, streamed, buffered):
                    assert read(store, "ranges", offset, length, if_match=info.etag) == \
                        body[offset:offset + length]


def test_a_range_past_the_end_is_an_error_not_a_short_answer(store: ObjectStore) -> None:
    info = store.put("short", b"0123456789")
    for offset, length in ((5, 6), (10, 1), (100, 10)):
        with pytest.raises(PreconditionFailed):
            store.get_range("short", offset, length)
        with pytest.raises(PreconditionFailed):
            store.get_range("short", offset, length, if_match=info.etag)
        with pytest.raises(PreconditionFailed):
            streamed(store, "short", offset, length, if_match=info.etag)


def test_missing_objects(store: ObjectStore) -> None:
    store.put("there/x", b"1")
    for key in ("missing", "there", "there/y", "there/x/z"):
        with pytest.raises(ObjectNotFound, match=key):
            store.head(key)
        with pytest.raises(ObjectNotFound):
            store.get_range(key, 0, 1)
        with pytest.raises(ObjectNotFound):
            streamed(store, key, 0, 1)
        with pytest.raises(ObjectNotFound):
            store.copy(ObjectInfo(key, 1, "etag", 0), "target")
        store.delete(key)
    assert list_all(store, "missing/") == ({}, set())
    assert list(list_all(store, "", recursive=True)[0]) == ["there/x"]


def test_reads_are_pinned_to_a_version(store: ObjectStore) -> None:
    """CASES C01."""
    old = store.put("f", b"0123456789")
    new = store.put("f", b"x" * 100)
    assert old.etag != new.etag
    with pytest.raises(PreconditionFailed):
        store.get_range("f", 0, 10, if_match=old.etag)
    for read in (streamed, buffered):
        with pytest.raises(PreconditionFailed):
            read(store, "f", 0, 10, if_match=old.etag)
        assert read(store, "f", 0, 100, if_match=new.etag) == b"x" * 100
    assert store.get_range("f", 0, 100, if_match=new.etag) == b"x" * 100
    assert store.head("f").size_bytes == 100


def test_same_size_is_another_version(store: ObjectStore) -> None:
    etags = {store.put("f", b"%d" % n).etag for n in range(10)}
    assert len(etags) == 10


def test_put_if_absent(store: ObjectStore) -> None:
    store.put("d/new", b"1", condition=ABSENT)
    with pytest.raises(PreconditionFailed):
        store.put("d/new", b"22", condition=ABSENT)
    assert store.head("d/new").size_bytes == 1


def test_put_if_match(store: ObjectStore) -> None:
    first = store.put("f", b"1")
    second = store.put("f", b"22", condition=Condition(if_match=first.etag))
    with pytest.raises(PreconditionFailed):
        store.put("f", b"333", condition=Condition(if_match=first.etag))
    with pytest.raises(PreconditionFailed):
        store.put("absent", b"1", condition=MISSING)
    assert store.head("f").etag == second.etag


def test_one_of_many_conditional_writers_wins(store: ObjectStore) -> None:
    barrier = threading.Barrier(6)

    def write(number: int) -> int:
        barrier.wait()
        try:
            store.put("race", b"%d" % number, condition=ABSENT)
        except PreconditionFailed:
            return 0
        return 1

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(write, range(6))) == 1


def test_compare_and_swap_loses_no_update(store: ObjectStore) -> None:
    store.put("counter", b"0")

    def increment(_: int) -> None:
        while True:
            info = store.head("counter")
            try:
                value = int(store.get_range("counter", 0, info.size_bytes, if_match=info.etag))
                store.put("counter", b"%d" % (value + 1), condition=Condition(if_match=info.etag))
            except PreconditionFailed:
                continue
            return

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(increment, range(12)))
    assert store.get_range("counter", 0, 2) == b"12"


def test_list_with_delimiter(store: ObjectStore) -> None:
    for key in ("a", "b/1", "b/2", "b/c/3", "b-", "b0"):
        store.put(key, key.encode())
    objects, prefixes = list_all(store, "")
    assert (set(objects), prefixes) == ({"a", "b-", "b0"}, {"b/"})
    objects, prefixes = list_all(store, "b/")
    assert (set(objects), prefixes) == ({"b/1", "b/2"}, {"b/c/"})
    objects, prefixes = list_all(store, "b")
    assert (set(objects), prefixes) == ({"b-", "b0"}, {"b/"})
    assert list_all(store, "b/c") == ({}, {"b/c/"})
    assert set(list_all(store, "b", recursive=True)[0]) == {"b/1", "b/2", "b/c/3", "b-", "b0"}
    assert set(list_all(store, "b/c/", recursive=True)[0]) == {"b/c/3"}
    assert list_all(store, "nothing/", recursive=True) == ({}, set())


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
@pytest.mark.parametrize("recursive", [False, True])
def test_paging_shows_every_entry_once(store: ObjectStore, limit: int, recursive: bool) -> None:
    keys = {f"p/d{n}/{m}" for n in range(3) for m in "xy"}
    keys |= {"p/a", "p/b", "p/c", "p/d1/z/q", "p/é", "p/ "}
    for key in keys:
        store.put(key, key.encode())
    objects, prefixes = list_all(store, "p/", recursive=recursive, limit=limit)
    if recursive:
        assert set(objects) == keys
    else:
        assert set(objects) == {"p/a", "p/b", "p/c", "p/é", "p/ "}
        assert prefixes == {"p/d0/", "p/d1/", "p/d2/"}
    for key, info in objects.items():
        head = store.head(key)
        assert (info.size_bytes, info.etag, info.metadata) == (head.size_bytes, head.etag, None)
        assert abs(info.mtime_ns - head.mtime_ns) < 10**9


def test_a_full_single_page_has_no_token(store: ObjectStore) -> None:
    for n in range(4):
        store.put(f"p/{n}", b"")
    assert store.list_page("p/", limit=4).next_token is None
    assert store.list_page("p/", limit=3).next_token is not None
    assert store.list_page("p/", recursive=True, limit=4).next_token is None


def test_more_than_a_thousand_keys(store: ObjectStore) -> None:
    keys = [f"many/{n:04d}" for n in range(1100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b""), keys))
    first = store.list_page("many/")
    assert len(first.objects) == 1000
    assert first.next_token is not None
    assert set(list_all(store, "many/")[0]) == set(keys)
    assert store.delete_many([*keys, "many/absent"]) == []
    assert_empty(store)


def test_delete(store: ObjectStore, is_strict: bool) -> None:
    store.put("d/e/f", b"1")
    store.delete("d/e/f")
    store.delete("d/e/f")
    with pytest.raises(ObjectNotFound):
        store.head("d/e/f")
    assert_empty(store)
    if is_strict:
        assert list_all(store, "") == ({}, set())


def test_delete_of_one_version(store: ObjectStore) -> None:
    old = store.put("f", b"ours")
    new = store.put("f", b"theirs!")
    with pytest.raises(PreconditionFailed):
        store.delete("f", if_match=old.etag)
    assert store.head("f").etag == new.etag
    store.delete("f", if_match=new.etag)
    with pytest.raises(ObjectNotFound):
        store.head("f")
    store.delete("f", if_match=new.etag)
    store.delete("d/absent", if_match=old.etag)


def test_delete_many_of_given_versions(store: ObjectStore) -> None:
    keys = ["v/plain", "v/ours", "v/theirs", "v/\x01control", "v/\x01theirs"]
    etags = {key: store.put(key, b"ours").etag for key in keys}
    for key in keys:
        if "theirs" in key:
            store.put(key, b"somebody else's")
    etags |= {"v/absent": etags["v/ours"], "v/not asked for": "0"}
    del etags["v/plain"]
    failures = store.delete_many([*keys, "v/absent"], etags)
    assert {failure.key: failure.replaced for failure in failures} == {"v/theirs": True, "v/\x01theirs": True}
    assert set(list_all(store, "v/")[0]) == {"v/theirs", "v/\x01theirs"}
    assert store.delete_many(["v/theirs", "v/\x01theirs"]) == []
    assert_empty(store)


def test_delete_of_a_marker_version(store: ObjectStore) -> None:
    marker = store.put("m/", b"")
    assert store.delete_many(["m/"], {"m/": marker.etag}) == []
    assert_empty(store)


def test_directory_markers(store: ObjectStore, is_strict: bool) -> None:
    store.put("m/", b"", metadata={"mode": "16877"})
    assert set(list_all(store, "")[1]) == {"m/"}
    assert set(list_all(store, "m/")[0]) == {"m/"}
    assert set(list_all(store, "", recursive=True)[0]) == {"m/"}
    assert store.head("m/").size_bytes == 0
    if is_strict:
        assert store.capabilities.keeps_directory_markers
        assert store.head("m/").metadata == {"mode": "16877"}
    store.put("m/x", b"1")
    assert {"m/", "m/x"} == set(list_all(store, "m/")[0])
    store.delete("m/x")
    assert set(list_all(store, "m/")[0]) == {"m/"}
    store.delete("m/")
    assert list_all(store, "") == ({}, set())


def test_a_prefix_without_marker_is_no_object(store: ObjectStore, is_strict: bool) -> None:
    store.put("p/x", b"1")
    if is_strict:  # SeaweedFS makes a marker of every directory
        with pytest.raises(ObjectNotFound):
            store.head("p/")
    assert set(list_all(store, "p/")[0]) == {"p/x"}


def test_copy(store: ObjectStore) -> None:
    source = store.put("from", b"content", metadata={"a": "1"})
    kept = store.copy(source, "to/kept")
    assert store.head("to/kept").metadata == {"a": "1"}
    assert kept.etag == store.head("to/kept").etag
    store.copy(source, "to/replaced", metadata={"b": "2"})
    assert store.head("to/replaced").metadata == {"b": "2"}
    assert store.get_range("to/replaced", 0, 7) == b"content"
    with pytest.raises(PreconditionFailed):
        store.copy(ObjectInfo("from", 7, "00000000000000000000000000000000", 0), "to/stale")
    with pytest.raises(ObjectNotFound):
        store.head("to/stale")


def test_copy_onto_itself_changes_metadata(store: ObjectStore) -> None:
    source = store.put("self", b"content", metadata={"a": "1"})
    changed = store.copy(source, "self", metadata={"b": "2"})
    head = store.head("self")
    assert head.metadata == {"b": "2"}
    assert head.etag == changed.etag
    assert store.get_range("self", 0, 7, if_match=head.etag) == b"content"


def test_conditional_copy(store: ObjectStore) -> None:
    if not store.capabilities.conditional_copy:
        pytest.skip("this store has no conditional copy")
    source = store.put("from", b"content")
    store.put("to", b"other")
    with pytest.raises(PreconditionFailed):
        store.copy(source, "to", condition=ABSENT)
    assert store.get_range("to", 0, 5) == b"other"


def test_multipart(store: ObjectStore) -> None:
    parts = [os.urandom(5 * MIB), os.urandom(5 * MIB), os.urandom(12345)]
    upload = store.start_multipart("big/object", metadata={"mode": "1"})
    assert [(u.key, u.upload_id) for u in store.list_unfinished_uploads("big/")] == [("big/object", upload)]
    assert store.list_unfinished_uploads("other/") == []
    with pytest.raises(ObjectNotFound):
        store.head("big/object")
    done = [store.upload_part("big/object", upload, n, parts[n - 1]) for n in (3, 1, 2)]
    assert [part.number for part in done] == [3, 1, 2]
    info = store.complete_multipart("big/object", upload, sorted(done, key=lambda part: part.number))
    head = store.head("big/object")
    assert (head.etag, head.size_bytes) == (info.etag, sum(map(len, parts)))
    assert info.size_bytes == head.size_bytes
    assert head.metadata == {"mode": "1"}
    assert read_all(store, head) == b"".join(parts)
    assert store.list_unfinished_uploads("") == []


def test_multipart_part_sent_twice(store: ObjectStore) -> None:
    first, second = os.urandom(5 * MIB), os.urandom(5 * MIB)
    upload = store.start_multipart("twice")
    store.upload_part("twice", upload, 1, first)
    parts = [store.upload_part("twice", upload, 1, second), store.upload_part("twice", upload, 2, b"tail")]
    store.complete_multipart("twice", upload, parts)
    assert read_all(store, store.head("twice")) == second + b"tail"


def test_copy_part(store: ObjectStore) -> None:
    base = os.urandom(12 * MIB)
    source = store.put("base", base)
    upload = store.start_multipart("changed")
    parts = [
        store.copy_part("changed", upload, 1, source, 0, 5 * MIB),
        store.upload_part("changed", upload, 2, b"N" * (5 * MIB)),
        store.copy_part("changed", upload, 3, source, 10 * MIB, 2 * MIB),
    ]
    assert [part.size_bytes for part in parts] == [5 * MIB, 5 * MIB, 2 * MIB]
    store.complete_multipart("changed", upload, parts)
    assert read_all(store, store.head("changed")) == base[:5 * MIB] + b"N" * (5 * MIB) + base[10 * MIB:]
    upload = store.start_multipart("stale")
    with pytest.raises(PreconditionFailed):
        store.copy_part("stale", upload, 1, ObjectInfo("base", 12 * MIB, "0" * 32, 0), 0, 5 * MIB)
    store.abort_multipart("stale", upload)


def test_conditional_multipart(store: ObjectStore) -> None:
    store.put("taken", b"mine")
    upload = store.start_multipart("taken")
    part = store.upload_part("taken", upload, 1, b"theirs")
    with pytest.raises(PreconditionFailed):
        store.complete_multipart("taken", upload, [part], condition=ABSENT)
    assert store.get_range("taken", 0, 4) == b"mine"
    store.abort_multipart("taken", upload)


def test_abort(store: ObjectStore) -> None:
    upload = store.start_multipart("gone")
    part = store.upload_part("gone", upload, 1, b"x")
    store.abort_multipart("gone", upload)
    store.abort_multipart("gone", upload)
    assert store.list_unfinished_uploads("") == []
    with pytest.raises(StoreError):
        store.complete_multipart("gone", upload, [part])
    with pytest.raises(ObjectNotFound):
        store.head("gone")


def test_object_beside_its_own_subtree(store: ObjectStore) -> None:
    """CASES C03: both are held, or the second is refused with a reason."""
    store.put("x", b"file")
    try:
        store.put("x/y", b"below")
    except StoreUnsupported as error:
        reason = str(error)
    else:
        reason = "x/y"
        assert set(list_all(store, "", recursive=True)[0]) >= {"x", "x/y"}
    assert "x/y" in reason
    assert store.get_range("x", 0, 4) == b"file"


def test_parallel_use(store: ObjectStore) -> None:
    body = os.urandom(300_000)
    info = store.put("shared", body)

    def work(n: int) -> bool:
        offset = n * 7001 % 200_000
        store.put(f"own/{n}", b"%d" % n)
        return store.get_range("shared", offset, 50_000, if_match=info.etag) == body[offset:offset + 50_000]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(60)))
    assert len(list_all(store, "own/")[0]) == 60


def test_check_and_url(store: ObjectStore) -> None:
    store.check()
    assert "://" in store.url
    assert "secret" not in store.url
    assert "secret" not in repr(store)
