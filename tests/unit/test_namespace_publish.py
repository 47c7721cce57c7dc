"""What the bucket should hold against what it holds: keys, ownership, dirty and doomed rows."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tests.support.namespace import DIRECTORY, FILE, Namespace, open_namespace
from tierfs.namespace import publish, schema, tree
from tierfs.namespace.db import WriteTransaction
from tierfs.types import ROOT_INO, ContentId, Inode, ObjectInfo

CONTENT = ContentId(b"c" * 16)


@pytest.fixture
def ns(tmp_path: Path):
    with open_namespace(tmp_path, prefix="p/") as ns:
        yield ns


def info(key: str, etag: str = "e1", size: int = 3) -> ObjectInfo:
    return ObjectInfo(key, size, etag, 5)


def publish_all(ns: Namespace, ino: int, *etags: str) -> bool:
    """What the write-back does: put one object per name, say so, forget the dirty row."""

    def record(txn: WriteTransaction) -> bool:
        row = publish.dirty_row(txn, ino)
        assert row is not None
        keys = publish.key_of(txn, ino)
        first, *others = [info(key, etags[0] if etags else "e1") for key in keys]
        publish.set_object(txn, ino, first, others, ns.clock.ns)
        return publish.forget_dirty(txn, ino, row.generation)

    return ns.change(record)


def published(ns: Namespace, name: str, parent: int = ROOT_INO, mode: int = FILE) -> Inode:
    inode = ns.create(name, parent=parent, mode=mode, content_id=CONTENT)
    assert publish_all(ns, inode.ino)
    return ns.get(inode.ino)


def rename(ns: Namespace, parent: int, name: str, new_parent: int, new_name: str) -> None:
    ns.change(
        lambda txn: tree.rename(txn, parent, name.encode(), new_parent, new_name.encode(), now_ns=ns.clock.ns)
    )


def unlink(ns: Namespace, name: str, parent: int = ROOT_INO) -> Inode:
    return ns.change(lambda txn: tree.unlink(txn, parent, name.encode(), now_ns=ns.clock.ns))


def dirty_reasons(ns: Namespace) -> dict[int, int]:
    with ns.db.read() as txn:
        return {row.ino: row.reasons for row in publish.iter_dirty(txn)}


def doomed(ns: Namespace) -> dict[str, str]:
    """Key (prefixes marked with a star) -> ETag."""
    with ns.db.read() as txn:
        rows, following = publish.doomed_entries(txn)
    assert following is None
    return {row.key + ("*" if row.prefix else ""): row.etag for row in rows}


# -- keys ------------------------------------------------------------------------------------------------


def test_keys_of_names(ns: Namespace) -> None:
    directory = ns.mkdir("d")
    file = ns.create(b"f\xff", parent=directory.ino)
    ns.change(lambda txn: tree.link(txn, file.ino, ROOT_INO, b"other", now_ns=1))
    with ns.db.read() as txn:
        assert publish.key_of(txn, ROOT_INO) == ["p/"]
        assert publish.key_of(txn, directory.ino) == ["p/d/"]
        assert sorted(publish.key_of(txn, file.ino)) == ["p/d/f\uf7ff", "p/other"]
        assert publish.live_inode_at(txn, "p/d/f\uf7ff") == file.ino
        assert publish.live_inode_at(txn, "p/d/") == directory.ino
        for key in ("p/d", "p/other/", "q/d", "p/nope", "p//", "p/other/x"):
            assert publish.live_inode_at(txn, key) is None, key
        assert publish.live_inode_at(txn, "p/") == ROOT_INO


def test_keys_over_1024_bytes_get_a_hashed_one_under_the_reserved_prefix(ns: Namespace) -> None:
    parent = ROOT_INO
    for _ in range(5):
        parent = ns.mkdir("x" * 250, parent).ino
    file = ns.create("f", parent=parent)
    other = ns.create("g", parent=parent)
    with ns.db.read() as txn:
        (key,) = publish.key_of(txn, file.ino)
        assert key.startswith("p/.tierfs/long/")
        assert publish.key_of(txn, other.ino) != [key]
        assert len(key.encode()) <= 1024


def test_long_keys_are_told_apart_in_the_tables(ns: Namespace) -> None:
    parent = ns.mkdir("y" * 255, ns.mkdir("x" * 255).ino).ino
    one, two = published(ns, "1", parent), published(ns, "2", parent)
    with ns.db.read() as txn:
        for inode in (one, two):
            (key,) = publish.key_of(txn, inode.ino)
            assert publish.owner_of_key(txn, key) == inode.ino
        assert publish.is_prefix_needed(txn, "p/" + "x" * 255 + "/") is False


# -- dirty -------------------------------------------------------------------------------------------------


def test_what_is_made_here_is_dirty_until_it_is_published(ns: Namespace) -> None:
    inode = ns.create("f", content_id=CONTENT)
    directory = ns.mkdir("d")
    symlink = ns.create("l", target=b"t")
    fifo = ns.create("p", mode=stat.S_IFIFO | 0o600)
    assert dirty_reasons(ns) == dict.fromkeys(
        (inode.ino, directory.ino, symlink.ino, fifo.ino), schema.CREATED
    )
    assert publish_all(ns, inode.ino)
    assert inode.ino not in dirty_reasons(ns)
    after = ns.get(inode.ino)
    assert not after.flags & (schema.DATA_LOCAL | schema.UNPUBLISHED)
    assert after.valid_until_ns == ns.clock.ns + 60 * 10**9
    with ns.db.read() as txn:
        ref = publish.ref_of(txn, after)
        assert ref is not None
        assert (ref.key, ref.etag, ref.size_bytes, ref.content_id) == ("p/f", "e1", 3, CONTENT)
        assert publish.object_is_current(txn, inode.ino)
        assert not publish.object_is_current(txn, directory.ino)
        assert publish.dirty_count(txn) == 3


def test_a_change_during_publishing_is_not_forgotten(ns: Namespace) -> None:
    inode = ns.create("f", content_id=CONTENT)
    with ns.db.read() as txn:
        row = publish.dirty_row(txn, inode.ino)
    assert row is not None
    ns.change(lambda txn: publish.mark_dirty(txn, inode.ino, "content", 7))

    def record(txn: WriteTransaction) -> bool:
        publish.set_object(txn, inode.ino, info("p/f"), [], 1)
        return publish.forget_dirty(txn, inode.ino, row.generation)

    assert ns.change(record) is False
    assert dirty_reasons(ns) == {inode.ino: schema.CREATED | schema.CONTENT}
    assert ns.get(inode.ino).flags & schema.DATA_LOCAL
    with ns.db.read() as txn:
        assert publish.ref_of(txn, ns.get(inode.ino)) is None
        again = publish.dirty_row(txn, inode.ino)
        assert again is not None
        assert again.since_ns == row.since_ns
        assert not publish.object_is_current(txn, inode.ino)


def test_generations_grow_across_rows_that_came_and_went(ns: Namespace) -> None:
    inode = published(ns, "f")
    seen = []
    for _ in range(3):
        ns.change(lambda txn: publish.mark_dirty(txn, inode.ino, schema.ATTRIBUTES, 1))
        with ns.db.read() as txn:
            row = publish.dirty_row(txn, inode.ino)
        assert row is not None
        seen.append(row.generation)
        assert publish_all(ns, inode.ino)
    assert seen == sorted(set(seen))


def test_attribute_changes_make_dirty_and_valid_for_good(ns: Namespace) -> None:
    inode = published(ns, "f")

    def change(**what: int) -> None:
        ns.change(lambda txn: tree.set_attributes(txn, inode.ino, now_ns=9, **what))

    change(atime_ns=4)
    assert dirty_reasons(ns) == {}
    for what in ({"mode": 0o600}, {"uid": 1}, {"gid": 1}, {"mtime_ns": 1}):
        change(**what)
        assert dirty_reasons(ns) == {inode.ino: schema.ATTRIBUTES}
        assert ns.get(inode.ino).valid_until_ns == schema.FOREVER_NS
        assert publish_all(ns, inode.ino)
    change(mode=0o640, dirty=0)
    assert dirty_reasons(ns) == {}
    change(size_bytes=4)
    assert dirty_reasons(ns) == {inode.ino: schema.CONTENT}


def test_the_root_is_never_published(ns: Namespace) -> None:
    ns.change(lambda txn: tree.set_attributes(txn, ROOT_INO, mode=0o700, now_ns=9))
    assert dirty_reasons(ns) == {}
    assert ns.get(ROOT_INO).valid_until_ns == schema.FOREVER_NS


def test_dirty_entries_in_pages_and_totals(ns: Namespace) -> None:
    inos = [ns.create(f"f{number}").ino for number in range(5)]
    ns.change(lambda txn: tree.set_attributes(txn, inos[0], size_bytes=100, now_ns=1))
    ns.change(lambda txn: tree.set_attributes(txn, inos[1], size_bytes=11, now_ns=1))
    with ns.db.read() as txn:
        first = publish.dirty_entries(txn, limit=2)
        assert [row.ino for row in first] == inos[:2]
        assert [row.ino for row in publish.dirty_entries(txn, after_ino=first[-1].ino)] == inos[2:]
        assert publish.dirty_totals(txn) == (5, 111)


def test_reasons_have_words() -> None:
    assert schema.reason_names(schema.CONTENT | schema.MOVED) == ["content", "moved"]


# -- removal and rename --------------------------------------------------------------------------------------


def test_unlinking_dooms_the_object_and_drops_the_dirty_row(ns: Namespace) -> None:
    inode = published(ns, "f")
    ns.change(lambda txn: publish.mark_dirty(txn, inode.ino, "attributes", 1))
    unlink(ns, "f")
    assert doomed(ns) == {"p/f": "e1"}
    assert dirty_reasons(ns) == {}
    with ns.db.read() as txn:
        assert publish.owner_of_key(txn, "p/f") is None
        assert not publish.is_key_needed(txn, "p/f")
        rows, _ = publish.doomed_entries(txn)
        assert rows[0].ino == inode.ino
        # Whoever has it open can read on while the object is there.
        assert publish.ref_of(txn, ns.get(inode.ino)) is not None


def test_unlinking_what_was_never_published_leaves_nothing_to_do(ns: Namespace) -> None:
    ns.create("f", content_id=CONTENT)
    unlink(ns, "f")
    assert doomed(ns) == {}
    assert dirty_reasons(ns) == {}


def test_a_new_file_in_the_place_of_a_deleted_one_overwrites_it(ns: Namespace) -> None:
    published(ns, "f")
    unlink(ns, "f")
    new = ns.create("f", content_id=CONTENT)
    with ns.db.read() as txn:
        assert publish.is_key_needed(txn, "p/f")
        assert publish.expected_etag(txn, new.ino, "p/f") == "e1"
        (row,), _ = publish.doomed_entries(txn)
    # The old object is still there: the row must not go before the new one has taken its place.
    assert ns.change(lambda txn: publish.forget_doomed(txn, row)) is False
    assert doomed(ns) == {"p/f": "e1"}
    assert publish_all(ns, new.ino, "e2")
    assert doomed(ns) == {}
    with ns.db.read() as txn:
        assert publish.expected_etag(txn, new.ino, "p/f") == "e2"
        assert publish.owner_of_key(txn, "p/f") == new.ino


def test_deleted_keys_are_forgotten_once_deleted(ns: Namespace) -> None:
    published(ns, "f")
    unlink(ns, "f")
    with ns.db.read() as txn:
        (row,), _ = publish.doomed_entries(txn)
    assert ns.change(lambda txn: publish.forget_doomed(txn, row)) is True
    assert doomed(ns) == {}


def test_a_renamed_file_owns_its_old_key_until_it_has_moved(ns: Namespace) -> None:
    inode = published(ns, "a")
    rename(ns, ROOT_INO, "a", ROOT_INO, "b")
    assert dirty_reasons(ns) == {inode.ino: schema.MOVED}
    assert doomed(ns) == {}
    new = ns.create("a", content_id=CONTENT)
    with ns.db.read() as txn:
        assert publish.owner_of_key(txn, "p/a") == inode.ino
        assert publish.owner_of_key(txn, "p/b") is None
        assert publish.expected_etag(txn, new.ino, "p/a") is None
        assert not publish.keys_agree(txn, inode.ino)
    assert publish_all(ns, inode.ino)
    assert doomed(ns) == {"p/a": "e1"}
    with ns.db.read() as txn:
        assert publish.owner_of_key(txn, "p/a") is None
        assert publish.owner_of_key(txn, "p/b") == inode.ino


def test_renaming_over_a_published_file_expects_its_object(ns: Namespace) -> None:
    published(ns, "old")
    new = ns.create("tmp", content_id=CONTENT)
    rename(ns, ROOT_INO, "tmp", ROOT_INO, "old")
    assert doomed(ns) == {"p/old": "e1"}
    with ns.db.read() as txn:
        assert publish.expected_etag(txn, new.ino, "p/old") == "e1"
        assert publish.is_key_needed(txn, "p/old")
    # It moves on before it was published: the replaced object must not come back to life.
    rename(ns, ROOT_INO, "old", ROOT_INO, "elsewhere")
    assert publish_all(ns, new.ino)
    assert doomed(ns) == {"p/old": "e1"}
    with ns.db.read() as txn:
        assert not publish.is_key_needed(txn, "p/old")


def test_hard_links_are_objects_of_their_own(ns: Namespace) -> None:
    inode = published(ns, "a")
    ns.change(lambda txn: tree.link(txn, inode.ino, ROOT_INO, b"b", now_ns=1))
    assert dirty_reasons(ns) == {inode.ino: schema.MOVED}
    assert publish_all(ns, inode.ino)
    with ns.db.read() as txn:
        assert {key for key, _ in publish.object_of(txn, inode.ino).all_keys()} == {"p/a", "p/b"}  # type: ignore[union-attr]
        assert publish.owner_of_key(txn, "p/b") == inode.ino
    unlink(ns, "a")
    assert doomed(ns) == {}  # it may be the source of a copy
    assert publish_all(ns, inode.ino)
    assert doomed(ns) == {"p/a": "e1"}
    unlink(ns, "b")
    assert doomed(ns) == {"p/a": "e1", "p/b": "e1"}


def test_exchange_makes_both_dirty_and_keeps_ownership(ns: Namespace) -> None:
    a, b = published(ns, "a"), published(ns, "b")
    ns.change(lambda txn: tree.rename(txn, ROOT_INO, b"a", ROOT_INO, b"b", now_ns=1, exchange=True))
    assert dirty_reasons(ns) == {a.ino: schema.MOVED, b.ino: schema.MOVED}
    with ns.db.read() as txn:
        assert publish.owner_of_key(txn, "p/a") == a.ino
        assert publish.key_of(txn, a.ino) == ["p/b"]
    assert publish.parked_key(ns.db, a.ino) == f"p/.tierfs/parked/{a.ino}"


def test_two_inodes_cannot_own_one_key(ns: Namespace) -> None:
    a, b = published(ns, "a"), ns.create("b")
    ns.change(lambda txn: publish.set_object(txn, b.ino, info("p/a", "stolen"), [], 1))
    with ns.db.read() as txn:
        assert publish.owner_of_key(txn, "p/a") == b.ino
        assert publish.object_of(txn, a.ino) is None


def test_disown(ns: Namespace) -> None:
    inode = published(ns, "a")
    ns.change(lambda txn: tree.link(txn, inode.ino, ROOT_INO, b"b", now_ns=1))
    ns.change(lambda txn: tree.link(txn, inode.ino, ROOT_INO, b"c", now_ns=1))
    publish_all(ns, inode.ino)
    with ns.db.read() as txn:
        row = publish.object_of(txn, inode.ino)
    assert row is not None
    for key, left in (("p/b", {"p/a", "p/c"}), (row.key, {"p/a", "p/c"} - {row.key})):
        ns.change(lambda txn, key=key: publish.disown(txn, inode.ino, key))
        with ns.db.read() as txn:
            now = publish.object_of(txn, inode.ino)
            assert now is not None
            assert {known for known, _ in now.all_keys()} == left
            assert publish.owner_of_key(txn, key) is None
    (last,) = left
    ns.change(lambda txn: publish.disown(txn, inode.ino, last))
    with ns.db.read() as txn:
        assert publish.object_of(txn, inode.ino) is None


# -- directories ---------------------------------------------------------------------------------------------


def moved(ns: Namespace, ino: int, limit: int = 1000) -> list[int]:
    found: list[int] = []
    cursor = None
    while True:
        with ns.db.read() as txn:
            batch, cursor = publish.next_moved_children(txn, ino, cursor, limit)
        assert len(batch) <= limit
        found += batch
        if cursor is None:
            return found


def test_renaming_a_directory_is_two_rows_whatever_is_below(ns: Namespace) -> None:
    top = published(ns, "d", mode=DIRECTORY)
    sub = published(ns, "s", top.ino, DIRECTORY)
    files = [published(ns, f"f{number}", parent).ino for number in range(3) for parent in (top.ino, sub.ino)]
    assert moved(ns, top.ino) == []
    rename(ns, ROOT_INO, "d", ROOT_INO, "e")
    assert dirty_reasons(ns) == {top.ino: schema.MOVED}
    assert doomed(ns) == {"p/d/*": ""}
    with ns.db.read() as txn:
        assert publish.is_prefix_needed(txn, "p/d/")
        covering = publish.covering_prefix(txn, "p/d/s/f1")
        assert covering is not None
        assert covering.ino == top.ino
        assert publish.covering_prefix(txn, "p/d") is None
        assert publish.covering_prefix(txn, "p/dd/x") is None
    for limit in (1, 2, 1000):
        assert sorted(moved(ns, top.ino, limit)) == sorted([sub.ino, *files])
    for ino in (sub.ino, *files):
        ns.change(lambda txn, ino=ino: publish.mark_dirty(txn, ino, "moved", 1))
        assert publish_all(ns, ino)
    assert moved(ns, top.ino) == []
    assert publish_all(ns, top.ino)
    with ns.db.read() as txn:
        assert publish.is_prefix_needed(txn, "p/d/")  # the old keys still have to be deleted
        rows, _ = publish.doomed_entries(txn)
    for row in rows:
        assert ns.change(lambda txn, row=row: publish.forget_doomed(txn, row))
    with ns.db.read() as txn:
        assert not publish.is_prefix_needed(txn, "p/d/")


def test_a_directory_of_which_nothing_is_in_the_bucket_moves_for_free(ns: Namespace) -> None:
    top = ns.mkdir("tmp")
    ns.create("f", parent=top.ino, content_id=CONTENT)
    rename(ns, ROOT_INO, "tmp", ROOT_INO, "final")
    assert doomed(ns) == {}
    assert not ns.get(top.ino).flags & schema.IN_STORE
    # Once something below was published the old prefix matters.
    below = published(ns, "g", top.ino)
    assert below.ino
    assert ns.get(top.ino).flags & schema.IN_STORE
    rename(ns, ROOT_INO, "final", ROOT_INO, "other")
    assert doomed(ns) == {"p/final/*": ""}


def test_a_directory_that_comes_back_is_not_doomed(ns: Namespace) -> None:
    top = published(ns, "d", mode=DIRECTORY)
    published(ns, "f", top.ino)
    rename(ns, ROOT_INO, "d", ROOT_INO, "e")
    rename(ns, ROOT_INO, "e", ROOT_INO, "d")
    assert doomed(ns) == {"p/e/*": ""}
    with ns.db.read() as txn:
        assert not publish.is_prefix_needed(txn, "p/e/")
    assert moved(ns, top.ino) == []


def test_files_that_live_under_the_old_prefix_now_do_not_hold_it(ns: Namespace) -> None:
    top = published(ns, "d", mode=DIRECTORY)
    old = published(ns, "f", top.ino)
    rename(ns, ROOT_INO, "d", ROOT_INO, "e")
    new = ns.mkdir("d")
    published(ns, "g", new.ino)
    with ns.db.read() as txn:
        assert publish.is_prefix_needed(txn, "p/d/")
    for ino in (old.ino, top.ino, new.ino):
        ns.change(lambda txn, ino=ino: publish.mark_dirty(txn, ino, "moved", 1))
        publish_all(ns, ino)
    for key in list(doomed(ns)):
        if not key.endswith("*"):
            ns.change(lambda txn, key=key: publish.forget_doomed(txn, publish.doomed_row(txn, key)))  # type: ignore[arg-type]
    with ns.db.read() as txn:
        assert not publish.is_prefix_needed(txn, "p/d/")


def test_an_upload_that_ends_after_a_directory_above_was_renamed_stays_dirty(ns: Namespace) -> None:
    top = ns.mkdir("d")
    file = ns.create("f", parent=top.ino, content_id=CONTENT)
    with ns.db.read() as txn:
        row = publish.dirty_row(txn, file.ino)
    assert row is not None
    rename(ns, ROOT_INO, "d", ROOT_INO, "e")

    def record(txn: WriteTransaction) -> bool:
        publish.set_object(txn, file.ino, info("p/d/f"), [], 1)
        return publish.forget_dirty(txn, file.ino, row.generation)

    assert ns.change(record) is False
    assert dirty_reasons(ns)[file.ino] & schema.MOVED
    assert doomed(ns) == {"p/d/*": ""}  # a listing must not show directory d again
    assert publish_all(ns, file.ino)
    with ns.db.read() as txn:
        assert publish.owner_of_key(txn, "p/d/f") is None


def test_an_emptied_directory_of_others_gets_a_marker(ns: Namespace) -> None:
    top = published(ns, "d", mode=DIRECTORY)
    ns.change(lambda txn: publish.disown(txn, top.ino, "p/d/"))  # it exists by what is below it only
    published(ns, "f", top.ino)
    published(ns, "g", top.ino)
    unlink(ns, "f", top.ino)
    assert dirty_reasons(ns) == {}
    rename(ns, top.ino, "g", ROOT_INO, "g")
    assert dirty_reasons(ns)[top.ino] == schema.CREATED
    # With a marker of its own there is nothing to do.
    assert publish_all(ns, top.ino)
    published(ns, "h", top.ino)
    unlink(ns, "h", top.ino)
    assert top.ino not in dirty_reasons(ns)


def test_removing_a_directory_dooms_its_marker(ns: Namespace) -> None:
    published(ns, "d", mode=DIRECTORY)
    ns.change(lambda txn: tree.rmdir(txn, ROOT_INO, b"d", now_ns=1))
    assert doomed(ns) == {"p/d/": "e1"}
    with ns.db.read() as txn:
        assert not publish.is_key_needed(txn, "p/d/")


# -- claims ----------------------------------------------------------------------------------------------------


def claim(ns: Namespace, ino: int, *keys: str) -> bool:
    return ns.change(lambda txn: publish.claim_keys(txn, ino, keys, 1))


def test_a_claimed_key_is_known_before_the_object_is(ns: Namespace) -> None:
    inode = ns.create("f", content_id=CONTENT)
    other = ns.create("g", content_id=CONTENT)
    assert claim(ns, inode.ino, "p/f")
    with ns.db.read() as txn:
        assert publish.owner_of_key(txn, "p/f") == inode.ino
    assert not claim(ns, other.ino, "p/f")
    assert publish_all(ns, inode.ino)
    with ns.db.read() as txn:
        assert publish.owner_of_key(txn, "p/f") == inode.ino
    assert not claim(ns, inode.ino, "p/f")  # nothing to publish


def test_a_claim_outlives_the_file_as_a_doomed_key(ns: Namespace) -> None:
    inode = ns.create("f", content_id=CONTENT)
    claim(ns, inode.ino, "p/f")
    unlink(ns, "f")
    assert doomed(ns) == {"p/f": ""}
    # The upload ends after all.
    assert ns.change(lambda txn: publish.set_object(txn, inode.ino, info("p/f"), [], 1)) is False
    assert doomed(ns) == {"p/f": "e1"}
    with ns.db.read() as txn:
        assert publish.owner_of_key(txn, "p/f") is None


def test_an_interrupted_upload_to_an_old_name_is_cleaned_up(ns: Namespace) -> None:
    inode = ns.create("tmp", content_id=CONTENT)
    claim(ns, inode.ino, "p/tmp")
    rename(ns, ROOT_INO, "tmp", ROOT_INO, "final")
    # kill -9 here: nobody knows whether p/tmp was written.
    assert claim(ns, inode.ino, "p/final")
    assert doomed(ns) == {"p/tmp": ""}
    assert publish_all(ns, inode.ino)
    assert doomed(ns) == {"p/tmp": ""}
    with ns.db.read() as txn:
        assert publish.owner_of_key(txn, "p/tmp") is None
        assert not publish.is_key_needed(txn, "p/tmp")


def test_set_object_of_an_inode_that_is_gone_dooms_what_was_written(ns: Namespace) -> None:
    assert ns.change(lambda txn: publish.set_object(txn, 999, info("p/x"), [info("p/y")], 1)) is False
    assert doomed(ns) == {"p/x": "e1", "p/y": "e1"}


def test_doomed_entries_in_pages_with_prefixes_last(ns: Namespace) -> None:
    def fill(txn: WriteTransaction) -> None:
        publish.doom(txn, "p/a/", "", 1, prefix=True)
        for number in range(5):
            publish.doom(txn, f"p/k{number}", "e", 1)

    ns.change(fill)
    cursor, keys = None, []
    while True:
        with ns.db.read() as txn:
            rows, cursor = publish.doomed_entries(txn, cursor, 2)
            assert publish.doomed_count(txn) == 6
        keys += [row.key for row in rows]
        if cursor is None:
            break
    assert keys == ["p/k0", "p/k1", "p/k2", "p/k3", "p/k4", "p/a/"]
