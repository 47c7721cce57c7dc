"""Listings applied as a difference: what changes, what stays, what others may never undo."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.namespace import DIRECTORY, START_NS, Namespace, open_namespace
from tierfs.errors import NotFound
from tierfs.namespace import publish, refresh, schema, tree
from tierfs.namespace.db import WriteTransaction
from tierfs.namespace.listing import Invalidation
from tierfs.namespace.refresh import Refresher
from tierfs.types import ROOT_INO, ContentId, Inode, content_id_of_object

CONTENT = ContentId(b"c" * 16)


@pytest.fixture(autouse=True)
def _with_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a listing finds is what these tests ask for, however long it takes."""
    monkeypatch.setattr(refresh, "PATIENCE_S", 3600.0)


async def listed(ns: Namespace, refresher: Refresher, path: str = "") -> list[str]:
    """Names of a directory after its listing has expired and been made again."""
    ns.clock.advance(61)
    await refresher.listed(ns.resolve(path).ino)
    return sorted(ns.names(ns.resolve(path).ino))


def publish_here(ns: Namespace, inode: Inode, body: bytes = b"x") -> None:
    """The write-back in small: the object appears in the bucket and is recorded."""

    def record(txn: WriteTransaction) -> None:
        row = publish.dirty_row(txn, inode.ino)
        assert row is not None
        publish.set_object(txn, inode.ino, info, [], ns.clock.ns)
        assert publish.forget_dirty(txn, inode.ino, row.generation)

    with ns.db.read() as txn:
        (key,) = publish.key_of(txn, inode.ino)
    info = ns.store.set(key, body)
    ns.change(record)


async def test_new_objects_become_files_with_the_defaults(ns: Namespace, refresher: Refresher) -> None:
    ns.store.set("a", b"hello")
    ns.store.set("d/x", b"")
    assert await listed(ns, refresher) == ["a", "d"]
    a, d, x = ns.resolve("a"), ns.resolve("d"), ns.resolve("d/x")
    assert (a.mode, a.uid, a.gid, a.nlink, a.size_bytes) == (stat.S_IFREG | 0o644, 1000, 1000, 1, 5)
    assert a.mtime_ns == a.ctime_ns == START_NS
    info = ns.store.info("a")
    assert a.content_id == content_id_of_object("a", info.etag, 5, None)
    assert (d.mode, d.nlink, d.flags & schema.DIR_SEEN) == (DIRECTORY, 2, schema.DIR_SEEN)
    assert x.content_id == bytes(16)
    assert ns.get(ROOT_INO).nlink == 3
    with ns.db.read() as txn:
        ref = publish.ref_of(txn, a)
        assert ref is not None
        assert (ref.key, ref.etag) == ("a", info.etag)
        assert publish.dirty_count(txn) == 0
    assert ns.invalidations == []


async def test_umask_and_owner_come_from_the_settings(ns: Namespace) -> None:
    ns.store.set("a")
    ns.store.set("d/x")
    await ns.refresher(umask=0o027, uid=5, gid=6).listed(ROOT_INO)
    assert (ns.resolve("a").mode & 0o7777, ns.resolve("d").mode & 0o7777) == (0o640, 0o750)
    assert (ns.resolve("a").uid, ns.resolve("d").gid) == (5, 6)


async def test_unchanged_entries_keep_everything_and_stay_valid(ns: Namespace, refresher: Refresher) -> None:
    ns.store.set("a", b"1")
    await listed(ns, refresher)
    before = ns.resolve("a")
    ns.change(lambda txn: tree.set_attributes(txn, before.ino, mode=0o600, now_ns=1, dirty=0))
    await listed(ns, refresher)
    after = ns.resolve("a")
    assert (after.ino, after.mode, after.content_id) == (before.ino, stat.S_IFREG | 0o600, before.content_id)
    assert after.valid_until_ns == ns.clock.ns + 60 * 10**9
    assert ns.invalidations == []
    assert ns.get(ROOT_INO).mtime_ns == START_NS


async def test_a_changed_object_gets_a_new_inode_under_the_same_cookie(
    ns: Namespace, refresher: Refresher
) -> None:
    for name in "abc":
        ns.store.set(name, b"old")
    await listed(ns, refresher)
    old = ns.resolve("b")
    ns.change(lambda txn: tree.set_attributes(txn, old.ino, mode=0o4750, uid=7, now_ns=1, dirty=0))
    ns.change(lambda txn: tree.set_xattr(txn, old.ino, b"user.k", b"v", now_ns=1))
    order = ns.names()
    ns.store.set("b", b"newer")
    await listed(ns, refresher)
    new = ns.resolve("b")
    assert new.ino != old.ino
    assert (new.mode, new.uid, new.size_bytes) == (stat.S_IFREG | 0o4750, 7, 5)
    assert new.content_id != old.content_id
    assert ns.names() == order
    with ns.db.read() as txn:
        assert tree.get_xattr(txn, new.ino, b"user.k") == b"v"
        assert tree.orphans(txn) == [old.ino]
        ref = publish.ref_of(txn, tree.get(txn, old.ino))
        assert ref is not None  # an open reader goes on in its version
        assert ref.etag != ns.store.info("b").etag
        assert publish.owner_of_key(txn, "b") == new.ino
        assert publish.doomed_count(txn) == 0
    assert ns.invalidations == [Invalidation(ROOT_INO, b"b", old.ino)]


async def test_objects_that_are_gone_are_removed(ns: Namespace, refresher: Refresher) -> None:
    for key in ("a", "b", "d/x", "d/e/y"):
        ns.store.set(key)
    await refresher.import_prefix("", 2)
    a, d = ns.resolve("a"), ns.resolve("d")
    for key in ("a", "d/x", "d/e/y"):
        ns.store.remove(key)
    assert await listed(ns, refresher) == ["b"]
    assert Invalidation(ROOT_INO, b"a", a.ino) in ns.invalidations
    assert Invalidation(ROOT_INO, b"d", d.ino) in ns.invalidations
    root = ns.get(ROOT_INO)
    assert (root.nlink, root.mtime_ns) == (2, ns.clock.ns)
    with ns.db.read() as txn:
        assert len(tree.orphans(txn)) == 5
        assert publish.doomed_count(txn) == 0
        assert publish.owner_of_key(txn, "a") is None


async def test_local_state_survives_a_listing_that_does_not_show_it(
    ns: Namespace, refresher: Refresher
) -> None:
    ns.create("file", content_id=CONTENT)
    ns.create("inner", parent=ns.mkdir("dir").ino)
    ns.create("link", target=b"t")
    assert await listed(ns, refresher) == ["dir", "file", "link"]
    assert await listed(ns, refresher, "dir") == ["inner"]
    assert ns.invalidations == []


async def test_local_changes_win_over_a_changed_object(ns: Namespace, refresher: Refresher) -> None:
    ns.store.set("a", b"1")
    await listed(ns, refresher)
    inode = ns.resolve("a")
    ns.change(lambda txn: tree.set_attributes(txn, inode.ino, size_bytes=9, content_id=CONTENT, now_ns=1))
    ns.store.set("a", b"theirs")
    await listed(ns, refresher)
    assert ns.resolve("a").ino == inode.ino
    assert ns.resolve("a").size_bytes == 9
    ns.store.remove("a")
    assert await listed(ns, refresher) == ["a"]


async def test_what_was_published_while_the_listing_ran_stays(ns: Namespace, refresher: Refresher) -> None:
    inode = ns.create("new", content_id=CONTENT)
    late = ns.create("late", content_id=CONTENT)

    def during(operation: str, key: str) -> None:
        ns.store.fail = None
        ns.clock.advance(1)
        publish_here(ns, inode)
        publish_here(ns, late)
        ns.store.remove("late")  # as if the answer had been computed before the upload

    ns.store.fail = during
    assert await listed(ns, refresher) == ["late", "new"]
    assert not ns.resolve("late").flags & schema.UNPUBLISHED
    assert await listed(ns, refresher) == ["new"]  # the next listing is believed


async def test_published_directories_go_when_their_marker_does(ns: Namespace, refresher: Refresher) -> None:
    publish_here(ns, ns.mkdir("d"), b"")
    assert await listed(ns, refresher) == ["d"]
    assert await listed(ns, refresher, "d") == []
    ns.store.remove("d/")
    assert await listed(ns, refresher) == []
    publish_here(ns, ns.mkdir("e"), b"")
    ns.store.remove("e/")
    assert await listed(ns, refresher, "e") == []  # now in the other order: first itself, then its parent
    assert await listed(ns, refresher) == []


async def test_a_directory_that_is_gone_keeps_what_is_only_here(ns: Namespace, refresher: Refresher) -> None:
    ns.store.set("d/theirs")
    ns.store.set("d/e/theirs")
    await refresher.import_prefix("", 2)
    e = ns.resolve("d/e")
    mine = ns.create("mine", parent=e.ino, content_id=CONTENT)
    ns.store.remove("d/theirs")
    ns.store.remove("d/e/theirs")
    assert await listed(ns, refresher) == ["d"]
    assert ns.names(ns.resolve("d").ino) == ["e"]
    assert ns.names(e.ino) == ["mine"]
    assert ns.resolve("d/e/mine").ino == mine.ino
    assert await listed(ns, refresher) == ["d"]


async def test_doomed_keys_are_not_shown_again(ns: Namespace, refresher: Refresher) -> None:
    ns.store.set("a", b"1")
    ns.store.set("b", b"1")
    await listed(ns, refresher)
    ns.change(lambda txn: tree.unlink(txn, ROOT_INO, b"a", now_ns=ns.clock.ns))
    assert await listed(ns, refresher) == ["b"]
    # Somebody else writes the name anew: that object is theirs, and is spared.
    ns.store.set("a", b"theirs")
    assert await listed(ns, refresher) == ["a", "b"]
    with ns.db.read() as txn:
        assert publish.doomed_count(txn) == 0


async def test_a_renamed_file_is_not_shown_under_its_old_key(ns: Namespace, refresher: Refresher) -> None:
    ns.store.set("a", b"1")
    await listed(ns, refresher)
    ns.change(lambda txn: tree.rename(txn, ROOT_INO, b"a", ROOT_INO, b"b", now_ns=ns.clock.ns))
    assert await listed(ns, refresher) == ["b"]
    assert await listed(ns, refresher) == ["b"]


async def test_a_renamed_directory_is_not_shown_under_its_old_prefix(
    ns: Namespace, refresher: Refresher
) -> None:
    ns.store.set("d/x", b"1")
    ns.store.set("d/s/y", b"1")
    await refresher.import_prefix("", 2)
    top = ns.resolve("d")
    ns.change(lambda txn: tree.rename(txn, ROOT_INO, b"d", ROOT_INO, b"e", now_ns=ns.clock.ns))
    assert await listed(ns, refresher) == ["e"]
    # Its children have not moved yet: no listing of the new prefix shows them, and they stay.
    assert await listed(ns, refresher, "e") == ["s", "x"]
    assert await listed(ns, refresher, "e/s") == ["y"]
    # A new directory takes the old name: what lies there is still the old one's.
    new = ns.mkdir("d")
    assert new.ino != top.ino
    assert await listed(ns, refresher, "d") == []
    with pytest.raises(NotFound):
        await refresher.lookup(new.ino, b"x")
    publish_here(ns, ns.create("mine", parent=new.ino, content_id=CONTENT))
    assert await listed(ns, refresher, "d") == ["mine"]
    assert await listed(ns, refresher) == ["d", "e"]


async def test_others_may_add_to_a_directory_that_was_renamed(ns: Namespace, refresher: Refresher) -> None:
    ns.store.set("d/x", b"1")
    await refresher.import_prefix("", 2)
    ns.change(lambda txn: tree.rename(txn, ROOT_INO, b"d", ROOT_INO, b"e", now_ns=ns.clock.ns))
    ns.store.set("e/theirs")
    ns.store.set("e/x", b"conflict")
    assert await listed(ns, refresher, "e") == ["theirs", "x"]
    with ns.db.read() as txn:
        row = publish.object_of(txn, tree.resolve(txn, b"e/x").ino)
    assert row is not None
    assert row.key == "d/x"


async def test_a_directory_that_was_removed_here_does_not_come_back(
    ns: Namespace, refresher: Refresher
) -> None:
    for key in ("d/x", "d/y"):
        ns.store.set(key)
    await refresher.import_prefix("", 2)
    top = ns.resolve("d")

    def remove(txn: WriteTransaction) -> None:
        tree.unlink(txn, top.ino, b"x", now_ns=1)
        tree.rename(txn, top.ino, b"y", ROOT_INO, b"kept", now_ns=1)
        tree.rmdir(txn, ROOT_INO, b"d", now_ns=1)

    ns.change(remove)
    assert await listed(ns, refresher) == ["kept"]
    with pytest.raises(NotFound):
        await refresher.lookup(ROOT_INO, b"d")
    # Once its objects are gone the name is free for others.
    with ns.db.read() as txn:
        rows, _ = publish.doomed_entries(txn)
    for row in rows:
        ns.store.remove(row.key)
        ns.change(lambda txn, row=row: publish.forget_doomed(txn, row))
    ns.store.remove("d/y")
    ns.change(lambda txn: publish.disown(txn, tree.resolve(txn, b"kept").ino, "d/y"))
    ns.store.set("d/theirs")
    assert await listed(ns, refresher) == ["d", "kept"]


# -- a file and a directory of one name ------------------------------------------------------------------------


@pytest.mark.parametrize("arrange", [lambda keys: keys, lambda keys: keys[::-1]])
async def test_of_x_beside_x_slash_y_the_directory_wins(
    ns: Namespace, refresher: Refresher, arrange: Callable[[list[str]], list[str]]
) -> None:
    for key in arrange(["x", "x/y", "z"]):
        ns.store.set(key, b"1")
    for _ in range(2):
        assert await listed(ns, refresher) == ["x", "z"]
        assert ns.resolve("x").is_dir
        assert sorted(ns.names(ns.resolve("x").ino)) == ["y"]
    assert refresher.counts.shadowed_keys == 2


async def test_a_file_is_shadowed_when_a_directory_appears_and_returns_when_it_goes(
    ns: Namespace, refresher: Refresher
) -> None:
    ns.store.set("x", b"1")
    await listed(ns, refresher)
    old = ns.resolve("x")
    ns.store.set("x/y", b"2")
    await listed(ns, refresher)
    directory = ns.resolve("x")
    assert directory.is_dir
    assert Invalidation(ROOT_INO, b"x", old.ino) in ns.invalidations
    assert ns.get(ROOT_INO).nlink == 3
    with ns.db.read() as txn:
        assert publish.doomed_count(txn) == 0  # the shadowed object is not ours to delete
    ns.store.remove("x/y")
    await listed(ns, refresher)
    assert ns.resolve("x").is_regular
    assert ns.get(ROOT_INO).nlink == 2
    assert ns.store.keys() == ["x"]


async def test_a_local_file_keeps_its_name_against_a_foreign_directory(
    ns: Namespace, refresher: Refresher
) -> None:
    mine = ns.create("x", content_id=CONTENT)
    ns.store.set("x/y", b"2")
    ns.store.set("x/e/y", b"2")
    await listed(ns, refresher)
    assert ns.resolve("x").ino == mine.ino
    await refresher.import_prefix("", 2)
    assert ns.resolve("x").ino == mine.ino


# -- markers ---------------------------------------------------------------------------------------------------


async def test_markers_belong_to_their_directory(ns: Namespace, refresher: Refresher) -> None:
    ns.store.set("d/")
    ns.store.set("d/x")
    await refresher.import_prefix("", 2)
    assert await listed(ns, refresher, "d") == ["x"]
    d = ns.resolve("d")
    with ns.db.read() as txn:
        row = publish.object_of(txn, d.ino)
        assert row is not None
        assert row.key == "d/"
        assert publish.owner_of_key(txn, "d/") == d.ino
    ns.store.remove("d/")
    await listed(ns, refresher, "d")
    with ns.db.read() as txn:
        assert publish.object_of(txn, d.ino) is None
        assert publish.owner_of_key(txn, "d/") is None


async def test_removing_an_empty_directory_of_others_dooms_its_marker(
    ns: Namespace, refresher: Refresher
) -> None:
    ns.store.set("d/")
    await refresher.import_prefix("", 2)
    ns.change(lambda txn: tree.rmdir(txn, ROOT_INO, b"d", now_ns=1))
    with ns.db.read() as txn:
        (row,), _ = publish.doomed_entries(txn)
    assert (row.key, row.prefix) == ("d/", False)
    assert await listed(ns, refresher) == []


# -- names -----------------------------------------------------------------------------------------------------


async def test_every_name_round_trips_and_unrepresentable_ones_are_hidden(
    ns: Namespace, refresher: Refresher
) -> None:
    good = ["a b", "a+b", "a%20b", "100%.csv", "folder#1#", "\u00e9", "e\u0301", "\uf7ff", "n\nl", "..."]
    for key in good:
        ns.store.set(key, b"1")
    for key in ("a//b", "../x", "./y", "z\0", "w" * 256):
        ns.store.set(key, b"1")
    await refresher.listed(ROOT_INO)
    with ns.db.read() as txn:
        names = {name for name, _, _ in tree.readdir(txn, ROOT_INO, 0, 100)}
        assert {b"\xff"} < names
        assert {key.encode() for key in good} - {"\uf7ff".encode()} < names
        for name in names:
            inode = tree.lookup(txn, ROOT_INO, name)
            if inode.is_regular:
                assert publish.key_of(txn, inode.ino)[0] in good
    assert refresher.counts.hidden_keys == 5


async def test_a_prefix_mount_sees_only_its_own(tmp_path: Path) -> None:
    with open_namespace(tmp_path, prefix="team/data/") as ns:
        for key in ("team/data/a", "team/data/d/x", "team/data/.tierfs/long/1", "team/other", "team/data"):
            ns.store.set(key, b"1")
        refresher = ns.refresher()
        assert await listed(ns, refresher) == ["a", "d"]
        with ns.db.read() as txn:
            assert publish.key_of(txn, ns.resolve("d/x").ino) == ["team/data/d/x"]


# -- many entries ------------------------------------------------------------------------------------------------


async def test_listings_of_many_pages_in_small_commits(ns: Namespace, refresher: Refresher) -> None:
    names = [f"f{number:05d}" for number in range(9500)]
    ns.store.fill(names)
    ns.store.fill(["d/x", "f00001/y"])
    assert len(await listed(ns, refresher)) == 9501
    assert ns.resolve("f00001").is_dir
    assert ns.store.requests() == {"list": 1 + 10}
    for name in names[::2]:
        ns.store.remove(name)
    ns.store.fill(names[1::4], b"changed")
    assert len(await listed(ns, refresher)) == 4750 + 1
    assert ns.get(ROOT_INO).nlink == 2 + 2
    assert ns.resolve(names[5]).size_bytes == len(b"changed")
    assert ns.resolve(names[3]).size_bytes == 1


async def test_a_large_directory_disappears_in_batches(ns: Namespace, refresher: Refresher) -> None:
    keys = [f"d/s{number % 7}/f{number}" for number in range(9000)]
    ns.store.fill([*keys, "other"])
    await refresher.import_prefix("", 4)
    with ns.db.read() as txn:
        assert tree.inode_count(txn) == 9000 + 7 + 1 + 1 + 1
    for key in keys:
        ns.store.remove(key)
    before = ns.db.commits
    assert await listed(ns, refresher) == ["other"]
    assert ns.db.commits - before >= 3
    with ns.db.read() as txn:
        assert txn.entries(txn.tables.dirent) == 1
        assert txn.entries(txn.tables.objkey) == 1


async def test_a_directory_that_is_renamed_while_it_is_listed(ns: Namespace, refresher: Refresher) -> None:
    ns.store.fill([f"d/f{number}" for number in range(3)])
    await refresher.listed(ROOT_INO)
    top = ns.resolve("d")
    ns.clock.advance(61)

    def during(operation: str, key: str) -> None:
        if key == "d/":
            ns.store.fail = None
            ns.change(lambda txn: tree.rename(txn, ROOT_INO, b"d", ROOT_INO, b"e", now_ns=ns.clock.ns))

    ns.store.fail = during
    await refresher.listed(top.ino)
    assert sorted(ns.names(top.ino)) == ["f0", "f1", "f2"]
    with ns.db.read() as txn:
        assert len(publish.next_moved_children(txn, top.ino)[0]) == 3
