"""When the bucket is asked: request counts, validity, negative answers, failures, single flight."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.support.namespace import Namespace, open_namespace
from tierfs.errors import NameTooLong, NotADirectory, NotFound, StoreAccessDenied, StoreUnavailable
from tierfs.namespace import publish, records, schema, tree
from tierfs.namespace.db import WriteTransaction
from tierfs.namespace.listing import Invalidation
from tierfs.namespace.refresh import Refresher
from tierfs.types import ROOT_INO, ContentId, Inode

CONTENT = ContentId(b"c" * 16)


async def walk(refresher: Refresher, path: str) -> Inode:
    """What the kernel does for a path: one look-up per name."""
    ino = ROOT_INO
    inode = None
    for name in path.split("/"):
        inode = refresher.lookup_local(ino, name.encode()) or await refresher.lookup(ino, name.encode())
        ino = inode.ino
    assert inode is not None
    return inode


def lists(ns: Namespace) -> int:
    """LISTs since the last call; nothing else was asked."""
    requests = ns.store.requests()
    assert set(requests) <= {"list"}
    return requests.get("list", 0)


# -- what it costs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 1000, 1001, 5000])
async def test_n_new_entries_cost_a_thousandth_of_n_lists_and_then_none(
    ns: Namespace, refresher: Refresher, count: int
) -> None:
    ns.store.fill([f"f{number}" for number in range(count)])
    await refresher.listed(ROOT_INO)
    assert lists(ns) <= -(-count // 1000) + 1
    await refresher.listed(ROOT_INO)
    assert refresher.is_listed(ROOT_INO)
    for number in range(0, count, 97):
        assert refresher.lookup_local(ROOT_INO, b"f%d" % number) is not None
    assert lists(ns) == 0


async def test_a_small_tree_is_known_after_one_request(ns: Namespace, refresher: Refresher) -> None:
    ns.store.fill([f"a{x}/b{y}/c{z}" for x in range(5) for y in range(5) for z in range(5)])
    await walk(refresher, "a1/b2/c3")
    assert lists(ns) == 1
    for x in range(5):
        for y in range(5):
            inode = refresher.lookup_local(refresher.lookup_local(ROOT_INO, b"a%d" % x).ino, b"b%d" % y)  # type: ignore[union-attr]
            assert inode is not None
            assert refresher.is_listed(inode.ino)
    assert lists(ns) == 0


async def test_a_deep_key_is_opened_cold_with_two_requests(ns: Namespace, refresher: Refresher) -> None:
    ns.store.fill(
        [f"set/{x:02d}/{y:02d}/{z:03d}.bin" for x in range(16) for y in range(10) for z in range(100)]
    )
    ns.store.fill(["one/two/three/four/five/six.bin"])
    await refresher.listed(ROOT_INO)
    ns.store.requests()
    assert (await walk(refresher, "one/two/three/four/five/six.bin")).size_bytes == 1
    assert sum(ns.store.requests().values()) <= 2


async def test_a_walk_over_a_three_level_tree(ns: Namespace, refresher: Refresher) -> None:
    ns.store.fill([f"{x:02d}/{y:02d}/{z:03d}" for x in range(16) for y in range(10) for z in range(100)])

    async def find(ino: int) -> int:
        await refresher.listed(ino)
        with ns.db.read() as txn:
            entries = tree.readdir(txn, ino, 0, 10**6)
        return sum([1 + (await find(inode.ino) if inode.is_dir else 0) for _, _, inode in entries])

    assert await find(ROOT_INO) == 16_000 + 16 * 10 + 16
    assert lists(ns) <= 16 + 16 * 2
    assert await find(ROOT_INO) == 16_000 + 16 * 10 + 16
    assert lists(ns) == 0


async def test_names_in_a_huge_directory_are_asked_for_singly_until_a_listing_is_cheaper(
    ns: Namespace, refresher: Refresher
) -> None:
    ns.store.fill([f"d/f{number:05d}" for number in range(5000)])
    ns.store.fill(["x"])
    top = await walk(refresher, "d")
    ns.store.requests()
    for number in range(4990, 4994):
        assert (await refresher.lookup(top.ino, b"f%05d" % number)).size_bytes == 1
    requests = ns.store.requests()
    assert requests["head"] == 4
    assert not refresher.is_listed(top.ino)
    await refresher.lookup(top.ino, b"f04995")
    assert ns.store.requests() == {"list": 5}
    assert refresher.is_listed(top.ino)
    assert refresher.lookup_local(top.ino, b"f04996") is not None


async def test_listed_entries_do_not_cost_heads(ns: Namespace, refresher: Refresher) -> None:
    ns.store.fill([f"f{number}" for number in range(100)])
    await refresher.listed(ROOT_INO)
    for number in range(100):
        inode = refresher.lookup_local(ROOT_INO, b"f%d" % number)
        assert inode is not None
        assert inode.size_bytes == 1
    assert lists(ns) == 1


async def test_import_lists_everything_in_parallel(ns: Namespace, refresher: Refresher) -> None:
    ns.store.fill([f"a{x}/b{y}/c{z}" for x in range(8) for y in range(20) for z in range(20)])
    ns.store.fill([f"big/{number}" for number in range(3000)])
    ns.store.fill(["bad//key", "top"])
    seen: list[tuple[int, int]] = []
    result = await refresher.import_prefix(
        b"", 4, lambda entries, directories: seen.append((entries, directories))
    )
    assert result.entries == 8 * 20 * 20 + 8 * 20 + 8 + 3000 + 1 + 1 + 1
    assert result.directories == 8 * 20 + 8 + 1 + 1
    assert result.hidden_keys >= 1
    assert result.requests == sum(ns.store.requests().values()) <= 25
    assert seen
    with ns.db.read() as txn:
        assert tree.lookup(txn, tree.resolve(txn, b"a3/b7").ino, b"c19").size_bytes == 1
    again = await refresher.import_prefix("a1", 4)
    assert (again.requests, again.entries) == (0, 20 * 20 + 20)
    assert (await refresher.import_prefix("top", 4)).entries == 0
    with pytest.raises(NotFound):
        await refresher.import_prefix("nope", 4)


async def test_complete_subtree(ns: Namespace, refresher: Refresher) -> None:
    ns.store.fill([f"d/{x}/f{y}" for x in range(30) for y in range(100)])
    await refresher.listed(ROOT_INO)
    top = ns.resolve("d")
    own = ns.mkdir("own")
    ns.mkdir("sub", own.ino)
    await refresher.complete_subtree(top.ino)
    with ns.db.read() as txn:
        assert sum(1 for _ in range(30) if tree.resolve(txn, b"d/%d/f99" % _)) == 30
    ns.store.requests()
    await refresher.complete_subtree(top.ino)
    ns.clock.advance(61)
    await refresher.complete_subtree(own.ino)  # nothing of it was ever in the bucket
    assert ns.store.requests() == {}
    await refresher.complete_subtree(top.ino)
    assert ns.store.requests()["list"] >= 30


# -- how long answers are believed ---------------------------------------------------------------------------


async def test_a_positive_answer_is_believed_for_the_ttl(ns: Namespace, refresher: Refresher) -> None:
    ns.store.set("a", b"1")
    first = await walk(refresher, "a")
    ns.store.set("a", b"changed")
    ns.clock.advance(59)
    assert refresher.lookup_local(ROOT_INO, b"a") == first
    ns.clock.advance(2)
    assert refresher.lookup_local(ROOT_INO, b"a") is None
    second = await refresher.lookup(ROOT_INO, b"a")
    assert (second.size_bytes, second.ino != first.ino) == (7, True)
    assert ns.invalidations == [Invalidation(ROOT_INO, b"a", first.ino)]


async def test_a_negative_answer_is_believed_for_the_negative_ttl(
    ns: Namespace, refresher: Refresher
) -> None:
    ns.store.set("d/a")
    top = await walk(refresher, "d")
    ns.store.requests()
    with pytest.raises(NotFound):
        refresher.lookup_local(top.ino, b"_READY")
    ns.store.set("d/_READY")
    with pytest.raises(NotFound):
        refresher.lookup_local(top.ino, b"_READY")
    ns.clock.advance(1.01)
    assert refresher.lookup_local(top.ino, b"_READY") is None
    assert (await refresher.lookup(top.ino, b"_READY")).size_bytes == 0
    assert lists(ns) == 1
    assert b"_READY" in [name.encode() for name in ns.names(top.ino)]


async def test_directories_made_here_obey_the_negative_ttl_too(ns: Namespace, refresher: Refresher) -> None:
    top = ns.mkdir("d")
    with pytest.raises(NotFound):
        refresher.lookup_local(top.ino, b"x")
    assert refresher.is_listed(top.ino)
    ns.clock.advance(1.01)
    ns.store.set("d/x")
    assert (await refresher.lookup(top.ino, b"x")).is_regular
    assert lists(ns) == 1


async def test_ttl_zero_asks_every_time_and_answers(ns: Namespace) -> None:
    refresher = ns.refresher(ttl_s=0.0, negative_ttl_s=0.0)
    ns.store.set("a", b"1")
    for size in (1, 5):
        ns.store.set("a", b"x" * size)
        ns.clock.advance(0.001)
        assert (await refresher.lookup(ROOT_INO, b"a")).size_bytes == size
    ns.clock.advance(0.001)
    with pytest.raises(NotFound):
        await refresher.lookup(ROOT_INO, b"b")
    assert lists(ns) == 3


async def test_expired_entries_of_a_large_directory_are_asked_for_singly(
    ns: Namespace, refresher: Refresher
) -> None:
    ns.store.fill([f"f{number:05d}" for number in range(3000)])
    ns.store.fill(["d/x", "d/y"])
    await refresher.listed(ROOT_INO)
    ns.store.set("f00007", b"changed")
    ns.store.remove("f00008")
    ns.store.set("new", b"1")
    ns.store.fill(["d/z"])
    ns.store.requests()
    ns.clock.advance(61)
    assert (await refresher.lookup(ROOT_INO, b"f00007")).size_bytes == 7
    assert ns.store.requests() == {"head": 1}
    with pytest.raises(NotFound):
        await refresher.lookup(ROOT_INO, b"f00008")
    assert ns.store.requests() == {"head": 1, "list": 1}
    assert (await refresher.lookup(ROOT_INO, b"new")).size_bytes == 1
    assert ns.store.requests() == {"head": 1, "list": 1}
    assert (await refresher.lookup(ROOT_INO, b"d")).is_dir
    assert ns.store.requests() == {"list": 1}
    assert sorted(ns.names(ns.resolve("d").ino)) == ["x", "y", "z"]
    # Each of these is believed again, for a TTL or a negative one.
    assert refresher.lookup_local(ROOT_INO, b"f00007") is not None
    with pytest.raises(NotFound):
        refresher.lookup_local(ROOT_INO, b"f00008")
    assert refresher.lookup_local(ROOT_INO, b"f00009") is None
    ns.clock.advance(1.01)
    assert refresher.lookup_local(ROOT_INO, b"f00008") is None


async def test_many_questions_about_a_large_directory_become_a_listing(
    ns: Namespace, refresher: Refresher
) -> None:
    ns.store.fill([f"f{number:05d}" for number in range(3000)])
    await refresher.listed(ROOT_INO)
    ns.clock.advance(61)
    ns.store.requests()
    for number in range(100):
        assert (await refresher.lookup(ROOT_INO, b"f%05d" % number)).size_bytes == 1
    assert ns.store.requests() == {"head": 4, "list": 3}


async def test_a_name_that_was_a_file_and_is_a_directory_now(ns: Namespace, refresher: Refresher) -> None:
    ns.store.fill([f"f{number:05d}" for number in range(3000)])
    await refresher.listed(ROOT_INO)
    ns.store.remove("f00001")
    ns.store.set("f00001/x")
    ns.clock.advance(61)
    assert (await refresher.lookup(ROOT_INO, b"f00001")).is_dir
    ns.store.remove("f00001/x")
    ns.store.set("f00001", b"22")
    ns.clock.advance(61)
    again = await refresher.lookup(ROOT_INO, b"f00001")
    assert (again.is_regular, again.size_bytes) == (True, 2)


async def test_what_is_only_here_is_never_asked_for(ns: Namespace, refresher: Refresher) -> None:
    inode = ns.create("mine", content_id=CONTENT)
    ns.clock.advance(10**6)
    assert refresher.lookup_local(ROOT_INO, b"mine") == inode
    assert (await refresher.lookup(ROOT_INO, b"mine")) == inode
    assert ns.store.requests() == {}


async def test_deleted_names_are_not_asked_for(ns: Namespace, refresher: Refresher) -> None:
    ns.store.set("a", b"1")
    await refresher.listed(ROOT_INO)
    ns.change(lambda txn: tree.unlink(txn, ROOT_INO, b"a", now_ns=ns.clock.ns))
    ns.clock.advance(2)
    ns.store.requests()
    with pytest.raises(NotFound):
        await refresher.lookup(ROOT_INO, b"a")
    assert ns.store.requests() == {}


async def test_answers_are_kept_across_a_restart(tmp_path: Path) -> None:
    with open_namespace(tmp_path) as ns:
        ns.store.fill([f"d/f{number}" for number in range(10)])
        await ns.refresher().import_prefix("", 1)
    with open_namespace(tmp_path) as ns:
        refresher = ns.refresher()
        assert (await walk(refresher, "d/f7")).size_bytes == 1
        assert refresher.is_listed(ns.resolve("d").ino)
        assert ns.store.requests() == {}


async def test_revalidate_asks_although_it_is_believed(ns: Namespace, refresher: Refresher) -> None:
    ns.store.set("a", b"1", {"mode": "33152", "uid": "7"})
    ns.store.set("d/x")
    await refresher.listed(ROOT_INO)
    first = ns.resolve("a")
    assert first.mode == stat.S_IFREG | 0o644
    same = await refresher.revalidate(first.ino)
    assert (same.ino, same.mode, same.uid) == (first.ino, stat.S_IFREG | 0o600, 7)
    ns.store.set("a", b"22", {"mode": "33152"})
    second = await refresher.revalidate(first.ino)
    assert (second.ino != first.ino, second.size_bytes) == (True, 2)
    ns.store.remove("a")
    with pytest.raises(NotFound):
        await refresher.revalidate(second.ino)
    ns.store.set("d/y")
    top = ns.resolve("d")
    assert (await refresher.revalidate(top.ino)).ino == top.ino
    assert sorted(ns.names(top.ino)) == ["x", "y"]


async def test_metadata_of_an_object_restore_its_kind(ns: Namespace, refresher: Refresher) -> None:
    ns.store.set("l", b"../target", {"mode": str(stat.S_IFLNK | 0o777)})
    ns.store.set("p", b"", {"mode": str(stat.S_IFIFO | 0o640), "uid": "3", "mtime": "5.25"})
    ns.store.set("bad", b"a\0b", {"mode": str(stat.S_IFLNK | 0o777)})
    await refresher.listed(ROOT_INO)
    link = await refresher.revalidate(ns.resolve("l").ino)
    assert (link.is_symlink, link.size_bytes) == (True, 9)
    with ns.db.read() as txn:
        assert tree.readlink(txn, link.ino) == b"../target"
    fifo = await refresher.revalidate(ns.resolve("p").ino)
    assert (fifo.mode, fifo.uid, fifo.mtime_ns) == (stat.S_IFIFO | 0o640, 3, 5_250_000_000)
    assert (await refresher.revalidate(ns.resolve("bad").ino)).is_regular
    # A later listing knows the same objects again.
    ns.clock.advance(61)
    await refresher.listed(ROOT_INO)
    assert (ns.resolve("l").ino, ns.resolve("p").ino) == (link.ino, fifo.ino)


async def test_import_with_metadata_brings_back_what_a_lost_state_directory_knew(
    ns: Namespace, refresher: Refresher
) -> None:
    ns.store.set("d/", b"", {"mode": str(stat.S_IFDIR | 0o2750), "gid": "9"})
    ns.store.set("d/run", b"#!", {"mode": str(stat.S_IFREG | 0o755), "uid": "7"})
    ns.store.set("d/l", b"run", {"mode": str(stat.S_IFLNK | 0o777)})
    ns.store.fill(["d/e/plain", "other"])
    await refresher.import_prefix("", 4, metadata=True)
    assert (ns.resolve("d").mode, ns.resolve("d").gid) == (stat.S_IFDIR | 0o2750, 9)
    assert (ns.resolve("d/run").mode, ns.resolve("d/run").uid) == (stat.S_IFREG | 0o755, 7)
    assert ns.resolve("d/l").is_symlink
    assert ns.resolve("d/e/plain").mode == stat.S_IFREG | 0o644
    assert ns.store.requests()["head"] == 5
    await refresher.import_prefix("", 4, metadata=True)
    assert ns.store.requests() == {}  # what is known is known


async def test_creating_in_a_large_directory_does_not_count_it_each_time(
    ns: Namespace, refresher: Refresher, monkeypatch: pytest.MonkeyPatch
) -> None:
    ns.store.fill([f"f{number:05d}" for number in range(3000)])
    await refresher.listed(ROOT_INO)
    counted = 0
    real = records.count_entries

    def count(txn, ino, limit):
        nonlocal counted
        counted += 1
        return real(txn, ino, limit)

    monkeypatch.setattr(records, "count_entries", count)
    for number in range(20):
        ns.clock.advance(1.01)
        with pytest.raises(NotFound):
            await refresher.lookup(ROOT_INO, b"new%d" % number)
        ns.create(f"new{number}", content_id=CONTENT)
    assert counted == 1


# -- errors --------------------------------------------------------------------------------------------------


async def test_lookup_errors(ns: Namespace, refresher: Refresher) -> None:
    file = ns.create("f", content_id=CONTENT)
    with pytest.raises(NotADirectory):
        refresher.lookup_local(file.ino, b"x")
    with pytest.raises(NameTooLong):
        refresher.lookup_local(ROOT_INO, b"x" * 256)
    with pytest.raises(NotFound):
        refresher.lookup_local(999, b"x")
    with pytest.raises(NotFound):
        await refresher.listed(999)


def fail_with(ns: Namespace, error: Exception | None) -> None:
    def fail(operation: str, key: str) -> None:
        if error is not None:
            raise type(error)(*error.args)

    ns.store.fail = fail if error is not None else None


async def test_during_an_outage_what_was_known_is_served(ns: Namespace, refresher: Refresher) -> None:
    ns.store.set("d/a", b"1")
    top = await walk(refresher, "d")
    ns.clock.advance(61)
    fail_with(ns, StoreUnavailable("down"))
    assert (await refresher.lookup(top.ino, b"a")).size_bytes == 1
    assert refresher.store_failing
    await refresher.listed(top.ino)
    assert ns.names(top.ino) == ["a"]
    for _ in range(3):
        with pytest.raises(NotFound):  # the complete listing did not have it: files can still be made
            await refresher.lookup(top.ino, b"unknown")
    asked = sum(ns.store.requests().values())
    for _ in range(50):
        await refresher.lookup(top.ino, b"a")
    assert sum(ns.store.requests().values()) == 0, asked  # the store is left alone for a while
    fail_with(ns, None)
    ns.clock.advance(1.1)
    with pytest.raises(NotFound):
        await refresher.lookup(top.ino, b"unknown")
    assert not refresher.store_failing


async def test_during_an_outage_what_was_never_known_fails(ns: Namespace, refresher: Refresher) -> None:
    ns.store.set("d/a", b"1")
    fail_with(ns, StoreUnavailable("down"))
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await refresher.listed(ROOT_INO)
        with pytest.raises(StoreUnavailable):
            await refresher.lookup(ROOT_INO, b"d")


async def test_during_an_outage_a_new_directory_can_be_filled(ns: Namespace, refresher: Refresher) -> None:
    await refresher.listed(ROOT_INO)
    fail_with(ns, StoreUnavailable("down"))
    top = ns.mkdir("checkpoint")
    ns.clock.advance(100)
    with pytest.raises(NotFound):
        await refresher.lookup(top.ino, b"shard")
    ns.create("shard", parent=top.ino, content_id=CONTENT)
    assert (await refresher.lookup(top.ino, b"shard")).is_regular


async def test_during_an_outage_a_published_directory_of_ours_can_be_filled(
    ns: Namespace, refresher: Refresher
) -> None:
    top = ns.mkdir("runs")

    def published(txn: WriteTransaction) -> bool:
        publish.set_object(txn, top.ino, ns.store.set("runs/"), [], ns.clock.ns)
        row = publish.dirty_row(txn, top.ino)
        assert row is not None
        return publish.forget_dirty(txn, top.ino, row.generation)

    assert ns.change(published)
    for _ in range(2):
        ns.clock.advance(61)
        await refresher.listed(ROOT_INO)
        await refresher.listed(top.ino)
    fail_with(ns, StoreUnavailable("down"))
    ns.clock.advance(100)
    with pytest.raises(NotFound):
        await refresher.lookup(top.ino, b"new")
    fail_with(ns, None)
    ns.store.set("runs/theirs")
    ns.clock.advance(100)
    await refresher.listed(top.ino)
    fail_with(ns, StoreUnavailable("down"))
    ns.clock.advance(100)
    assert (await refresher.lookup(top.ino, b"theirs")).nlink == 1
    with pytest.raises(NotFound):
        await refresher.lookup(top.ino, b"new")


async def test_refusals_are_errors_also_for_what_was_known(ns: Namespace, refresher: Refresher) -> None:
    ns.store.set("a", b"1")
    await refresher.listed(ROOT_INO)
    ns.clock.advance(61)
    fail_with(ns, StoreAccessDenied("no"))
    with pytest.raises(StoreAccessDenied):
        await refresher.lookup(ROOT_INO, b"a")
    with pytest.raises(StoreAccessDenied):
        await refresher.listed(ROOT_INO)


async def test_an_unexpected_exception_reaches_the_caller_and_the_next_question_works(
    ns: Namespace, refresher: Refresher
) -> None:
    ns.store.set("a", b"1")
    fail_with(ns, ZeroDivisionError("bug"))
    with pytest.raises(ZeroDivisionError):
        await refresher.listed(ROOT_INO)
    fail_with(ns, None)
    await refresher.listed(ROOT_INO)
    assert ns.names() == ["a"]


async def test_an_error_on_a_later_page_removes_nothing(ns: Namespace, refresher: Refresher) -> None:
    ns.store.fill([f"f{number:05d}" for number in range(3000)])
    await refresher.listed(ROOT_INO)
    ns.clock.advance(61)
    asked = 0

    def fail(operation: str, key: str) -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise StoreUnavailable("down")

    ns.store.fail = fail
    await refresher.listed(ROOT_INO)
    assert len(ns.names()) == 3000
    assert ns.invalidations == []


# -- one question at a time ------------------------------------------------------------------------------------


async def test_concurrent_callers_share_one_request(ns: Namespace, refresher: Refresher) -> None:
    ns.store.fill([f"d/f{number}" for number in range(50)])
    await refresher.listed(ROOT_INO)
    ns.clock.advance(61)
    ns.store.requests()
    top = ns.resolve("d")
    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(refresher.lookup, top.ino, b"f%d" % number)
            nursery.start_soon(refresher.listed, top.ino)
    assert lists(ns) == 1


async def test_a_cancelled_caller_leaves_the_question_running(ns: Namespace, refresher: Refresher) -> None:
    ns.store.set("a", b"1")
    asked, gate = threading.Event(), threading.Event()

    def slow(operation: str, key: str) -> None:
        asked.set()
        gate.wait(10)

    ns.store.fail = slow
    async with trio.open_nursery() as nursery:
        nursery.start_soon(refresher.listed, ROOT_INO)
        await trio.to_thread.run_sync(asked.wait)
        nursery.cancel_scope.cancel()
    gate.set()
    assert (await refresher.lookup(ROOT_INO, b"a")).size_bytes == 1
    assert lists(ns) == 1


async def test_a_slow_store_delays_what_is_known_by_no_more_than_the_patience(
    ns: Namespace, refresher: Refresher, autojump_clock: trio.testing.MockClock
) -> None:
    ns.store.set("a", b"1")
    await refresher.listed(ROOT_INO)
    ns.clock.advance(61)
    gate = threading.Event()
    ns.store.fail = lambda operation, key: (gate.wait(10), None)[1]
    try:
        began = trio.current_time()
        assert (await refresher.lookup(ROOT_INO, b"a")).size_bytes == 1
        await refresher.listed(ROOT_INO)
        assert 9 < trio.current_time() - began < 11
    finally:
        gate.set()


# -- together with publishing ----------------------------------------------------------------------------------


async def test_the_store_may_forget_markers(ns: Namespace) -> None:
    class Forgetful(type(ns.store)):  # type: ignore[misc]
        @property
        def capabilities(self):
            import dataclasses

            return dataclasses.replace(super().capabilities, keeps_directory_markers=False)

    ns.store.__class__ = Forgetful
    refresher = ns.refresher()
    top = ns.mkdir("d")

    def published(txn):
        publish.set_object(txn, top.ino, ns.store.set("d/"), [], ns.clock.ns)
        row = publish.dirty_row(txn, top.ino)
        assert row is not None
        return publish.forget_dirty(txn, top.ino, row.generation)

    assert ns.change(published)
    ns.store.remove("d/")
    ns.clock.advance(61)
    await refresher.listed(ROOT_INO)
    assert ns.names() == ["d"]
    assert ns.get(top.ino).flags & schema.DIR_LOCAL
