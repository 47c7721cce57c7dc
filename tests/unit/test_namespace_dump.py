"""Dump, load and check: nothing is lost on the way, and every kind of contradiction is found."""

from __future__ import annotations

import io
import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.namespace import FILE, Namespace, open_namespace
from tierfs.errors import FormatError, NamespaceError
from tierfs.namespace import publish, records, schema, tree
from tierfs.namespace.check import problems
from tierfs.namespace.db import Database, WriteTransaction
from tierfs.namespace.dump import check, dump, load
from tierfs.namespace.transaction import TABLES
from tierfs.types import ROOT_INO, ContentId, ObjectInfo

CONTENT = ContentId(b"c" * 16)


def fill(ns: Namespace) -> None:
    """A bit of everything."""
    top = ns.mkdir("d")
    file = ns.create(b"odd \xff name\n", parent=top.ino, content_id=CONTENT)
    gone = ns.create("gone", content_id=CONTENT)
    ns.create("link", target=b"\xfe/target")
    ns.create("fifo", mode=stat.S_IFIFO | 0o600, rdev=5)
    below = ns.mkdir("e", top.ino)

    def more(txn: WriteTransaction) -> None:
        tree.link(txn, file.ino, ROOT_INO, b"second", now_ns=1)
        tree.set_xattr(txn, file.ino, b"user.\xff", b"\0\xff", now_ns=1)
        for ino, key in ((file.ino, "d/odd"), (gone.ino, "gone"), (below.ino, "d/e/")):
            publish.set_object(txn, ino, ObjectInfo(key, 3, "e", 5), [], 7)
        publish.claim_keys(txn, file.ino, publish.key_of(txn, file.ino), 1)
        tree.unlink(txn, ROOT_INO, b"gone", now_ns=1)
        tree.rename(txn, top.ino, b"e", ROOT_INO, b"f", now_ns=1)

    ns.change(more)


def rows(db: Database) -> dict[str, list[tuple[bytes, bytes]]]:
    """Everything in every table, but for what belongs to the machine and the session."""
    with db.snapshot() as txn:
        found = {
            name: list(txn.cursor(getattr(txn.tables, name)).iternext(True, True))
            for name in TABLES
        }
    found["meta"] = [
        (key, value) for key, value in found["meta"] if key not in (b"boot_id", b"clean", b"source")
    ]
    return found


def test_a_dump_loaded_again_is_the_same_namespace(tmp_path: Path) -> None:
    with open_namespace(tmp_path / "one", prefix="p/") as ns:
        fill(ns)
        before = rows(ns.db)
    text = io.StringIO()
    lines = dump(tmp_path / "one", text)
    assert len(text.getvalue().splitlines()) == lines
    assert text.getvalue().isascii()
    text.seek(0)
    assert load(tmp_path / "two", text) == lines
    assert check(tmp_path / "two") == []
    with Database.open(tmp_path / "two") as db:
        assert rows(db) == before
        assert db.tables.prefix == "p/"
        # Numbers go on where they were.
        inode = db.commit_now(lambda txn: tree.create(txn, 1, b"new", mode=FILE, uid=0, gid=0, now_ns=1))
    assert inode.ino == schema.unpack_u64(dict(before["meta"])[schema.META_NEXT_ID])[0]


def test_load_refuses_what_it_cannot_use_and_leaves_nothing(tmp_path: Path) -> None:
    with open_namespace(tmp_path / "one") as ns:
        fill(ns)
    text = io.StringIO()
    dump(tmp_path / "one", text)
    lines = text.getvalue().splitlines()
    target = tmp_path / "two"
    with pytest.raises(NamespaceError, match="exists"):
        load(tmp_path / "one", lines)
    for wrong, error in (
        ([], NamespaceError),
        (["{}"], FormatError),
        (["[]"], NamespaceError),
        ([lines[0].replace('"format": 4', '"format": 77'), *lines[1:]], FormatError),
    ):
        with pytest.raises(error):
            load(target, wrong)
        assert not (target / "namespace.lmdb").exists()
    broken = json.loads(lines[2])
    del broken["mode"]
    with pytest.raises(NamespaceError, match="line 3"):
        load(target, [*lines[:2], json.dumps(broken)])
    with pytest.raises(NamespaceError, match="line 2"):
        load(target, [lines[0], "not json"])
    assert load(target, lines) == len(lines)


def test_nothing_is_wrong_with_a_healthy_namespace(tmp_path: Path) -> None:
    with open_namespace(tmp_path) as ns:
        fill(ns)
        with ns.db.read() as txn:
            assert list(problems(txn)) == []
    assert check(tmp_path) == []


def _file(txn: WriteTransaction) -> int:
    return tree.resolve(txn, b"second").ino


def drop_inode(txn: WriteTransaction) -> None:
    records.delete_inode(txn, _file(txn))


def drop_cookie(txn: WriteTransaction) -> None:
    found = records.find_entry(txn, ROOT_INO, b"link")
    assert found is not None
    txn.delete(schema.pack_u64_pair(ROOT_INO, found[1]), txn.tables.dirseq)


def stray_cookie(txn: WriteTransaction) -> None:
    txn.put(
        schema.pack_u64_pair(ROOT_INO, 20), schema.DIRSEQ.pack(1, 0o40000, 0) + b"stray", db=txn.tables.dirseq
    )


def drop_reverse(txn: WriteTransaction) -> None:
    records.delete_parent_row(txn, ROOT_INO, b"second", _file(txn))


def stray_reverse(txn: WriteTransaction) -> None:
    txn.put(schema.parent_key(_file(txn), ROOT_INO, b"stray"), b"", db=txn.tables.parent)


def wrong_links(txn: WriteTransaction) -> None:
    schema.put_inode(txn, schema.replace_inode(tree.get(txn, _file(txn)), nlink=7))


def wrong_subdirectories(txn: WriteTransaction) -> None:
    schema.put_inode(txn, schema.replace_inode(tree.get(txn, ROOT_INO), nlink=9))


def wrong_type(txn: WriteTransaction) -> None:
    schema.put_inode(txn, schema.replace_inode(tree.get(txn, _file(txn)), mode=stat.S_IFSOCK))


def short_record(txn: WriteTransaction) -> None:
    txn.put(schema.inode_key(_file(txn)), b"short", db=txn.tables.inode)


def lost_target(txn: WriteTransaction) -> None:
    txn.delete(schema.pack_u64(tree.resolve(txn, b"link").ino), txn.tables.symlink)


def false_orphan(txn: WriteTransaction) -> None:
    txn.put(schema.pack_u64(_file(txn)), b"", db=txn.tables.orphan)


def number_not_given_out(txn: WriteTransaction) -> None:
    txn.put(schema.META_NEXT_ID, schema.pack_u64(18), db=txn.tables.meta)


def stolen_key(txn: WriteTransaction) -> None:
    txn.put(schema.object_key_digest("d/odd"), schema.pack_u64(ROOT_INO), db=txn.tables.objkey)


def bad_object(txn: WriteTransaction) -> None:
    txn.put(schema.pack_u64(_file(txn)), b"\xc1", db=txn.tables.object)


def bad_dirty(txn: WriteTransaction) -> None:
    txn.put(schema.pack_u64(_file(txn)), b"\xc1", db=txn.tables.dirty)


def dirty_but_not_for_good(txn: WriteTransaction) -> None:
    schema.put_inode(txn, schema.replace_inode(tree.get(txn, _file(txn)), valid_until_ns=5))


def flag_lost(txn: WriteTransaction) -> None:
    schema.put_inode(txn, schema.replace_inode(tree.get(txn, _file(txn)), flags=0))


def loop(txn: WriteTransaction) -> None:
    top = tree.resolve(txn, b"d")
    found = records.find_entry(txn, ROOT_INO, b"d")
    assert found is not None
    records.delete_entry(txn, ROOT_INO, b"d", top.ino, found[1])
    records.put_entry(txn, top.ino, b"self", top.ino, stat.S_IFDIR)


@pytest.mark.parametrize(
    "damage",
    [
        drop_inode, drop_cookie, stray_cookie, drop_reverse, stray_reverse, wrong_links, wrong_subdirectories,
        wrong_type, short_record, lost_target, false_orphan, number_not_given_out, stolen_key, bad_object,
        bad_dirty, dirty_but_not_for_good, flag_lost, loop,
    ],
)  # fmt: skip
def test_every_contradiction_is_found(tmp_path: Path, damage: Callable[[WriteTransaction], None]) -> None:
    with open_namespace(tmp_path) as ns:
        fill(ns)
        ns.change(damage)
    found = check(tmp_path)
    assert found
    assert all(isinstance(problem, str) and problem for problem in found)
