"""Which file comes after which: asked from a real namespace."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierfs.namespace import publish, schema, tree
from tierfs.namespace.db import Database
from tierfs.namespace.transaction import WriteTransaction
from tierfs.prefetch.neighbours import following_in
from tierfs.types import ROOT_INO, Inode, ObjectInfo, new_content_id

NOW_NS = 10**18


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    database = Database.open(tmp_path, now_ns=lambda: NOW_NS)
    try:
        yield database
    finally:
        database.close()


def make(
    txn: WriteTransaction, parent: int, name: bytes, *, kind: int = stat.S_IFREG, size: int = 100
) -> int:
    """A file that is in the store (if it is one, and has a size), or something else."""
    regular = kind == stat.S_IFREG and size
    inode = tree.create(
        txn, parent, name, mode=kind | 0o755, uid=0, gid=0, now_ns=NOW_NS,
        target=b"t" if kind == stat.S_IFLNK else None,
        **({"content_id": new_content_id()} if regular else {}),
    )  # fmt: skip
    if regular:
        in_store: Inode = schema.replace_inode(inode, size_bytes=size, flags=inode.flags & ~schema.DATA_LOCAL)
        schema.put_inode(txn, in_store)
        info = ObjectInfo(key=name.decode("latin-1"), size_bytes=size, etag="e", mtime_ns=NOW_NS)
        publish.set_object(txn, inode.ino, info, [], NOW_NS)
    return inode.ino


async def test_files_after_a_file_in_the_order_of_names(db: Database) -> None:
    def build(txn: WriteTransaction) -> dict[bytes, int]:
        directory = make(txn, ROOT_INO, b"shards", kind=stat.S_IFDIR)
        inos = {
            name: make(txn, directory, name)
            for name in (b"s-10.tar", b"s-2.tar", b"s-1.tar", b"s-1", b"a", b"\xff\xfe")
        }
        make(txn, directory, b"s-11", kind=stat.S_IFDIR)
        make(txn, directory, b"s-12", kind=stat.S_IFLNK)
        make(txn, directory, b"s-13", size=0)
        tree.create(
            txn, directory, b"s-14", mode=stat.S_IFREG | 0o644, uid=0, gid=0, content_id=new_content_id(),
            now_ns=NOW_NS,
        )  # fmt: skip
        make(txn, ROOT_INO, b"other")
        return inos

    inos = await db.commit(build)
    following = following_in(db)
    names = {ino: name for name, ino in inos.items()}
    after = following.after(inos[b"a"], 20)
    assert [names[ino] for ino in after if ino in names] == [
        b"s-1", b"s-1.tar", b"s-10.tar", b"s-2.tar", b"\xff\xfe",
    ]  # fmt: skip
    assert [ino for ino in after if following.ref_of(ino)] == [ino for ino in after if ino in names]
    assert len(after) == 7, "not the directory and not the link"
    assert [names[ino] for ino in following.after(inos[b"s-1"], 2)] == [b"s-1.tar", b"s-10.tar"]
    assert list(following.after(inos[b"\xff\xfe"], 10)) == []
    found = following.ref_of(inos[b"s-2.tar"])
    assert found is not None
    assert (found.key, found.size_bytes) == ("s-2.tar", 100)


async def test_unknown_inodes_and_the_root_have_no_successor(db: Database) -> None:
    await db.commit(lambda txn: make(txn, ROOT_INO, b"file"))
    for ino in (ROOT_INO, 987654):
        assert list(following_in(db).after(ino, 5)) == []
        assert following_in(db).ref_of(ino) is None
