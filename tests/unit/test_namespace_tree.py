"""POSIX operations on the namespace: types, link counts, times, cookies, errors."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.namespace import DIRECTORY, FILE, START_NS, Namespace, open_namespace
from tierfs.errors import (
    AlreadyExists,
    DirectoryNotEmpty,
    InvalidArgument,
    IsADirectory,
    NameTooLong,
    NoAttribute,
    NotADirectory,
    NotFound,
    NotPermitted,
    TooManyLinks,
)
from tierfs.namespace import publish, schema, tree
from tierfs.namespace.db import WriteTransaction
from tierfs.namespace.rename import RenameResult
from tierfs.types import NO_CONTENT, ROOT_INO, ContentId, Inode

CONTENT = ContentId(b"c" * 16)
LATER_NS = START_NS + 7


def later(ns: Namespace) -> int:
    """Move the clock, so that what is touched from now on shows; returns the new time."""
    ns.clock.ns += 7
    return ns.clock.ns


def rename(ns: Namespace, old: str, new: str, **flags: bool) -> RenameResult:
    def split(path: str) -> tuple[int, bytes]:
        above, _, name = path.rpartition("/")
        return ns.resolve(above).ino, name.encode()

    (parent, name), (new_parent, new_name) = split(old), split(new)
    return ns.change(
        lambda txn: tree.rename(txn, parent, name, new_parent, new_name, now_ns=ns.clock.ns, **flags)
    )


def unlink(ns: Namespace, name: str, parent: int = ROOT_INO) -> Inode:
    return ns.change(lambda txn: tree.unlink(txn, parent, name.encode(), now_ns=ns.clock.ns))


def rmdir(ns: Namespace, name: str, parent: int = ROOT_INO) -> Inode:
    return ns.change(lambda txn: tree.rmdir(txn, parent, name.encode(), now_ns=ns.clock.ns))


def link(ns: Namespace, ino: int, name: str, parent: int = ROOT_INO) -> Inode:
    return ns.change(lambda txn: tree.link(txn, ino, parent, name.encode(), now_ns=ns.clock.ns))


# -- create, lookup ----------------------------------------------------------------------------------------


def test_create_sets_everything_and_touches_the_parent(ns: Namespace) -> None:
    now = later(ns)
    inode = ns.create("f", mode=stat.S_IFREG | 0o640, uid=5, gid=6, content_id=CONTENT)
    assert (inode.mode, inode.uid, inode.gid, inode.nlink) == (stat.S_IFREG | 0o640, 5, 6, 1)
    assert (inode.atime_ns, inode.mtime_ns, inode.ctime_ns) == (now, now, now)
    assert inode.content_id == CONTENT
    assert inode.flags & schema.DATA_LOCAL
    assert inode.flags & schema.UNPUBLISHED
    assert inode.valid_until_ns == schema.FOREVER_NS
    root = ns.get(ROOT_INO)
    assert (root.mtime_ns, root.ctime_ns, root.atime_ns, root.nlink) == (now, now, START_NS, 2)
    assert ns.get(inode.ino) == inode == ns.resolve("f")


def test_an_empty_file_without_content_is_not_local_data(ns: Namespace) -> None:
    assert not ns.create("f").flags & schema.DATA_LOCAL
    assert ns.get(ROOT_INO).ino == ROOT_INO


def test_mkdir_counts_links(ns: Namespace) -> None:
    inode = ns.mkdir("d")
    assert inode.is_dir
    assert inode.nlink == 2
    assert ns.get(ROOT_INO).nlink == 3
    ns.mkdir("e", inode.ino)
    assert ns.get(inode.ino).nlink == 3
    assert ns.get(ROOT_INO).nlink == 3


def test_set_group_id_directories_hand_down_their_group(ns: Namespace) -> None:
    top = ns.create("d", mode=DIRECTORY | stat.S_ISGID, gid=77)
    file = ns.create("f", parent=top.ino, gid=1)
    below = ns.create("e", parent=top.ino, mode=DIRECTORY, gid=1)
    assert (file.gid, file.mode) == (77, FILE)
    assert (below.gid, below.mode) == (77, DIRECTORY | stat.S_ISGID)


@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK])
def test_special_files(ns: Namespace, kind: int) -> None:
    inode = ns.create("s", mode=kind | 0o600, rdev=0x0103)
    assert ns.get(inode.ino).mode == kind | 0o600
    assert ns.get(inode.ino).rdev == 0x0103


def test_symlinks(ns: Namespace) -> None:
    inode = ns.create("l", mode=stat.S_IFLNK | 0o777, target=b"../\xff target")
    assert inode.is_symlink
    assert inode.size_bytes == len(b"../\xff target")
    with ns.db.read() as txn:
        assert tree.readlink(txn, inode.ino) == b"../\xff target"
        with pytest.raises(InvalidArgument):
            tree.readlink(txn, ROOT_INO)
        with pytest.raises(NotFound):
            tree.readlink(txn, 999)
    assert ns.create("long", target=b"x" * 4095).size_bytes == 4095
    with pytest.raises(NameTooLong):
        ns.create("longer", target=b"x" * 4096)


def test_names_may_be_any_bytes_up_to_255(ns: Namespace) -> None:
    names = [b"a b", b"\xff\xfe", b"\n", b"x" * 255, "\u00e9".encode(), "e\u0301".encode(), b"...", b"-"]
    for name in names:
        ns.create(name)
    with ns.db.read() as txn:
        assert [name for name, _, _ in tree.readdir(txn, ROOT_INO, 0, 100)] == names


@pytest.mark.parametrize(
    ("name", "error"),
    [
        (b"", InvalidArgument),
        (b".", InvalidArgument),
        (b"..", InvalidArgument),
        (b"a/b", InvalidArgument),
        (b"a\0b", InvalidArgument),
        (b"x" * 256, NameTooLong),
        (b".tierfs", NotPermitted),
    ],
)
def test_names_that_cannot_be(ns: Namespace, name: bytes, error: type[Exception]) -> None:
    file = ns.create("f")
    with pytest.raises(error):
        ns.create(name)
    with pytest.raises(error):
        ns.change(lambda txn: tree.link(txn, file.ino, ROOT_INO, name, now_ns=1))
    with pytest.raises(error):
        ns.change(lambda txn: tree.rename(txn, ROOT_INO, b"f", ROOT_INO, name, now_ns=1))
    assert ns.names() == ["f"]


def test_the_reserved_name_is_only_reserved_at_the_root(ns: Namespace) -> None:
    assert ns.create(".tierfs", parent=ns.mkdir("d").ino).ino


def test_create_errors(ns: Namespace) -> None:
    file = ns.create("f")
    with pytest.raises(AlreadyExists):
        ns.create("f")
    with pytest.raises(AlreadyExists):
        ns.mkdir("f")
    with pytest.raises(NotADirectory):
        ns.create("x", parent=file.ino)
    with pytest.raises(NotFound):
        ns.create("x", parent=12345)
    gone = ns.mkdir("d")
    rmdir(ns, "d")
    with pytest.raises(NotFound):
        ns.create("x", parent=gone.ino)


def test_lookup_errors(ns: Namespace) -> None:
    file = ns.create("f")
    with ns.db.read() as txn:
        with pytest.raises(NotFound):
            tree.lookup(txn, ROOT_INO, b"nope")
        with pytest.raises(NotADirectory):
            tree.lookup(txn, file.ino, b"x")
        with pytest.raises(NotFound):
            tree.lookup(txn, 999, b"x")
        with pytest.raises(NameTooLong):
            tree.lookup(txn, ROOT_INO, b"x" * 256)
        # A name is found by all of it, not by its beginning.
        with pytest.raises(NotFound):
            tree.lookup(txn, ROOT_INO, b"")


def test_resolve_and_path_of(ns: Namespace) -> None:
    deep = ns.mkdir("c", ns.mkdir("b", ns.mkdir("a").ino).ino)
    with ns.db.read() as txn:
        assert tree.path_of(txn, deep.ino) == b"a/b/c"
        assert tree.path_of(txn, ROOT_INO) == b""
        assert tree.resolve(txn, b"/a//./b/c/").ino == deep.ino
        assert tree.resolve(txn, b"a/b/../b/c").ino == deep.ino
        assert tree.resolve(txn, b"../..").ino == ROOT_INO
        assert tree.names_of(txn, ROOT_INO) == []


# -- link, unlink, rmdir -------------------------------------------------------------------------------------


def test_hard_links(ns: Namespace) -> None:
    inode = ns.create("a")
    now = later(ns)
    directory = ns.mkdir("d")
    linked = link(ns, inode.ino, "b", directory.ino)
    assert (linked.nlink, linked.ctime_ns, linked.mtime_ns) == (2, now, START_NS)
    assert ns.get(directory.ino).mtime_ns == now
    with ns.db.read() as txn:
        assert sorted(tree.names_of(txn, inode.ino)) == sorted([(ROOT_INO, b"a"), (directory.ino, b"b")])
    now = later(ns)
    left = unlink(ns, "a")
    assert (left.ino, left.nlink, left.ctime_ns) == (inode.ino, 1, now)
    assert ns.get(ROOT_INO).ctime_ns == now
    with ns.db.read() as txn:
        assert tree.orphans(txn) == []
        assert tree.path_of(txn, inode.ino) == b"d/b"


def test_link_errors(ns: Namespace) -> None:
    inode = ns.create("a")
    directory = ns.mkdir("d")
    with pytest.raises(NotPermitted):
        link(ns, directory.ino, "e")
    with pytest.raises(AlreadyExists):
        link(ns, inode.ino, "d")
    with pytest.raises(NotADirectory):
        link(ns, inode.ino, "x", inode.ino)
    with pytest.raises(NotFound):
        link(ns, 999, "x")
    unlink(ns, "a")
    with pytest.raises(NotFound):
        link(ns, inode.ino, "back")


def test_a_file_has_at_most_65000_links(ns: Namespace) -> None:
    inode = ns.create("a")

    def fill(txn: WriteTransaction) -> None:
        schema.put_inode(txn, schema.replace_inode(tree.get(txn, inode.ino), nlink=schema.LINK_MAX - 1))

    ns.change(fill)
    assert link(ns, inode.ino, "b").nlink == 65000
    with pytest.raises(TooManyLinks):
        link(ns, inode.ino, "c")


def test_unlink_of_the_last_name_leaves_an_orphan_until_it_is_reaped(ns: Namespace) -> None:
    inode = ns.create("a", mode=stat.S_IFLNK, target=b"t")
    ns.change(lambda txn: tree.set_xattr(txn, inode.ino, b"user.x", b"1", now_ns=1))
    now = later(ns)
    gone = unlink(ns, "a")
    assert (gone.nlink, gone.ctime_ns) == (0, now)
    assert ns.names() == []
    assert ns.get(inode.ino).nlink == 0
    with ns.db.read() as txn:
        assert tree.orphans(txn) == [inode.ino]
        assert tree.readlink(txn, inode.ino) == b"t"
    reaped = ns.change(lambda txn: tree.reap(txn, inode.ino))
    assert reaped is not None
    assert reaped.ino == inode.ino
    with ns.db.read() as txn:
        assert tree.orphans(txn) == []
        for table in (txn.tables.symlink, txn.tables.xattr, txn.tables.parent, txn.tables.dirent):
            assert txn.entries(table) == 0
        with pytest.raises(NotFound):
            tree.get(txn, inode.ino)


def test_reap_leaves_alone_what_has_a_name(ns: Namespace) -> None:
    inode = ns.create("a")
    assert ns.change(lambda txn: tree.reap(txn, inode.ino)) is None
    assert ns.resolve("a").ino == inode.ino
    assert ns.change(lambda txn: tree.reap(txn, 4711)) is None


def test_unlink_and_rmdir_errors(ns: Namespace) -> None:
    directory = ns.mkdir("d")
    file = ns.create("f", parent=directory.ino)
    with pytest.raises(IsADirectory):
        unlink(ns, "d")
    with pytest.raises(NotADirectory):
        rmdir(ns, "f", directory.ino)
    with pytest.raises(DirectoryNotEmpty):
        rmdir(ns, "d")
    with pytest.raises(NotFound):
        unlink(ns, "nope")
    with pytest.raises(NotFound):
        rmdir(ns, "nope")
    with pytest.raises(NotADirectory):
        unlink(ns, "x", file.ino)
    with pytest.raises(NameTooLong):
        unlink(ns, "x" * 256)


def test_rmdir(ns: Namespace) -> None:
    directory = ns.mkdir("d")
    now = later(ns)
    gone = rmdir(ns, "d")
    assert (gone.ino, gone.nlink) == (directory.ino, 0)
    root = ns.get(ROOT_INO)
    assert (root.nlink, root.mtime_ns, root.ctime_ns) == (2, now, now)


# -- rename --------------------------------------------------------------------------------------------------


def test_rename_keeps_the_inode_and_touches_both_parents(ns: Namespace) -> None:
    a, b = ns.mkdir("a"), ns.mkdir("b")
    file = ns.create("f", parent=a.ino)
    now = later(ns)
    result = rename(ns, "a/f", "b/g")
    assert (result.moved, result.replaced) == ((file.ino,), None)
    moved = ns.resolve("b/g")
    assert (moved.ino, moved.ctime_ns, moved.mtime_ns) == (file.ino, now, START_NS)
    assert ns.names(a.ino) == []
    for directory in (a, b):
        assert ns.get(directory.ino).mtime_ns == ns.get(directory.ino).ctime_ns == now


def test_rename_over_a_file_makes_it_an_orphan(ns: Namespace) -> None:
    old, new = ns.create("old"), ns.create("new")
    now = later(ns)
    result = rename(ns, "new", "old")
    assert result.replaced is not None
    assert (result.replaced.ino, result.replaced.nlink, result.replaced.ctime_ns) == (old.ino, 0, now)
    assert ns.resolve("old").ino == new.ino
    assert ns.names() == ["old"]
    with ns.db.read() as txn:
        assert tree.orphans(txn) == [old.ino]


def test_rename_over_one_of_several_links(ns: Namespace) -> None:
    old = ns.create("old")
    link(ns, old.ino, "other")
    ns.create("new")
    result = rename(ns, "new", "old")
    assert result.replaced is not None
    assert result.replaced.nlink == 1
    assert ns.resolve("other").ino == old.ino


def test_rename_between_two_links_of_one_inode_does_nothing(ns: Namespace) -> None:
    inode = ns.create("a")
    link(ns, inode.ino, "b")
    later(ns)
    before = ns.get(ROOT_INO)
    assert rename(ns, "a", "b") == RenameResult()
    assert rename(ns, "a", "a") == RenameResult()
    assert ns.names() == ["a", "b"]
    assert ns.get(ROOT_INO) == before
    assert ns.get(inode.ino).nlink == 2


def test_renaming_directories_counts_links(ns: Namespace) -> None:
    a, b = ns.mkdir("a"), ns.mkdir("b")
    sub = ns.mkdir("sub", a.ino)
    rename(ns, "a/sub", "b/sub")
    assert (ns.get(a.ino).nlink, ns.get(b.ino).nlink) == (2, 3)
    empty = ns.mkdir("empty", a.ino)
    assert ns.get(a.ino).nlink == 3
    result = rename(ns, "b/sub", "a/empty")
    assert result.replaced is not None
    assert (result.replaced.ino, result.replaced.nlink) == (empty.ino, 0)
    assert (ns.get(a.ino).nlink, ns.get(b.ino).nlink) == (3, 2)
    assert ns.resolve("a/empty").ino == sub.ino
    ns.mkdir("other", a.ino)
    assert ns.get(a.ino).nlink == 4
    rename(ns, "a/other", "a/empty")
    assert ns.get(a.ino).nlink == 3
    with ns.db.read() as txn:
        assert tree.path_of(txn, ns.resolve("a/empty").ino) == b"a/empty"


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("d", "d/e/x", InvalidArgument),
        ("d", "d/x", InvalidArgument),
        ("d", "d/e", InvalidArgument),
        ("d", "f", NotADirectory),
        ("f", "empty", IsADirectory),
        ("empty", "d", DirectoryNotEmpty),
        ("d/e", "d", DirectoryNotEmpty),
        ("nope", "x", NotFound),
        ("f/x", "y", NotADirectory),
        ("f", "f/x", NotADirectory),
        ("f", "x" * 256, NameTooLong),
    ],
)
def test_rename_errors_change_nothing(ns: Namespace, old: str, new: str, error: type[Exception]) -> None:
    ns.mkdir("e", ns.mkdir("d").ino)
    ns.mkdir("empty")
    ns.create("f")
    later(ns)
    before = ns.get(ROOT_INO), ns.names()
    with pytest.raises(error):
        rename(ns, old, new)
    assert (ns.get(ROOT_INO), ns.names()) == before


def test_rename_noreplace(ns: Namespace) -> None:
    ns.create("a")
    ns.create("b")
    with pytest.raises(AlreadyExists):
        rename(ns, "a", "b", noreplace=True)
    with pytest.raises(AlreadyExists):
        rename(ns, "a", "a", noreplace=True)
    rename(ns, "a", "c", noreplace=True)
    assert ns.names() == ["b", "c"]


def test_rename_exchange(ns: Namespace) -> None:
    a, b = ns.mkdir("a"), ns.mkdir("b")
    file = ns.create("f", parent=a.ino)
    directory = ns.mkdir("d", b.ino)
    now = later(ns)
    result = rename(ns, "a/f", "b/d", exchange=True)
    assert result.moved == (file.ino, directory.ino)
    assert result.replaced is None
    assert (ns.resolve("a/f").ino, ns.resolve("b/d").ino) == (directory.ino, file.ino)
    assert (ns.get(a.ino).nlink, ns.get(b.ino).nlink) == (3, 2)
    for ino in (a.ino, b.ino):
        assert ns.get(ino).mtime_ns == now
    for ino in (file.ino, directory.ino):
        assert (ns.get(ino).ctime_ns, ns.get(ino).mtime_ns) == (now, START_NS)
    with ns.db.read() as txn:
        assert tree.path_of(txn, directory.ino) == b"a/f"


def test_rename_exchange_in_one_directory_and_with_itself(ns: Namespace) -> None:
    a, b = ns.create("a"), ns.create("b")
    rename(ns, "a", "b", exchange=True)
    assert (ns.resolve("a").ino, ns.resolve("b").ino) == (b.ino, a.ino)
    assert rename(ns, "a", "a", exchange=True) == RenameResult()
    link(ns, a.ino, "c")
    assert rename(ns, "c", "b", exchange=True) == RenameResult()


def test_rename_exchange_errors(ns: Namespace) -> None:
    ns.mkdir("e", ns.mkdir("d").ino)
    with pytest.raises(NotFound):
        rename(ns, "d", "nope", exchange=True)
    for old, new in (("d", "d/e"), ("d/e", "d")):
        with pytest.raises(InvalidArgument):
            rename(ns, old, new, exchange=True)
    with pytest.raises(InvalidArgument):
        rename(ns, "d", "d", exchange=True, noreplace=True)


# -- readdir -------------------------------------------------------------------------------------------------


def pages(ns: Namespace, ino: int, limit: int, between: Callable[[], object] = lambda: None) -> list[bytes]:
    seen: list[bytes] = []
    cookie = 0
    while True:
        with ns.db.read() as txn:
            page = tree.readdir(txn, ino, cookie, limit)
        if not page:
            return seen
        seen += [name for name, _, _ in page]
        cookie = page[-1][1]
        between()


def test_readdir_in_pages_of_any_size(ns: Namespace) -> None:
    names = [b"f%d" % number for number in range(100)]

    def fill(txn: WriteTransaction) -> None:
        for name in names:
            tree.create(txn, ROOT_INO, name, mode=FILE, uid=0, gid=0, now_ns=1)

    ns.change(fill)
    ns.create("inner", parent=ns.mkdir("d").ino)
    for limit in (1, 7, 1000):
        assert pages(ns, ROOT_INO, limit) == [*names, b"d"]
    with ns.db.read() as txn:
        for name, cookie, inode in tree.readdir(txn, ROOT_INO, 0, 10):
            assert cookie > schema.FIRST_FREE_ID - 1
            assert tree.lookup(txn, ROOT_INO, name) == inode
        assert tree.readdir(txn, 999, 0, 10) == []


def test_entries_that_stay_are_met_once_whatever_happens_to_others(ns: Namespace) -> None:
    for number in range(30):
        ns.create(f"stay{number}")
        ns.create(f"go{number}")
    step = iter(range(30))

    def disturb() -> None:
        number = next(step, None)
        if number is not None:
            unlink(ns, f"go{number}")
            ns.create(f"new{number}")
            ns.create(f"tmp{number}")
            rename(ns, f"tmp{number}", f"stay{number}")  # replaced, but the name was there all the time

    seen = pages(ns, ROOT_INO, 4, disturb)
    assert len(seen) == len(set(seen))
    assert {name for name in seen if name.startswith(b"stay")} == {b"stay%d" % n for n in range(30)}


def test_cookies_survive_a_restart(tmp_path: Path) -> None:
    with open_namespace(tmp_path) as ns:
        for number in range(10):
            ns.create(f"f{number}")
        with ns.db.read() as txn:
            cookie = tree.readdir(txn, ROOT_INO, 0, 5)[-1][1]
    with open_namespace(tmp_path) as ns, ns.db.read() as txn:
        assert [name for name, _, _ in tree.readdir(txn, ROOT_INO, cookie, 100)] == [
            b"f5", b"f6", b"f7", b"f8", b"f9"
        ]  # fmt: skip


# -- attributes ----------------------------------------------------------------------------------------------


def set_attributes(ns: Namespace, ino: int, **changes: object) -> Inode:
    return ns.change(
        lambda txn: tree.set_attributes(txn, ino, now_ns=ns.clock.ns, **changes)  # type: ignore[arg-type]
    )


def test_set_attributes_changes_what_is_given_and_ctime(ns: Namespace) -> None:
    inode = ns.create("f")
    now = later(ns)
    changed = set_attributes(ns, inode.ino, mode=0o4711, uid=9)
    assert (changed.mode, changed.uid, changed.gid) == (stat.S_IFREG | 0o4711, 9, 1000)
    assert (changed.ctime_ns, changed.mtime_ns) == (now, START_NS)
    assert ns.get(inode.ino) == changed
    times = set_attributes(ns, inode.ino, atime_ns=1, mtime_ns=-5)
    assert (times.atime_ns, times.mtime_ns, times.ctime_ns) == (1, -5, now)
    assert set_attributes(ns, inode.ino, mtime_ns=2**70).mtime_ns == 2**63 - 1


def test_set_attributes_of_size_touches_mtime(ns: Namespace) -> None:
    inode = ns.create("f")
    now = later(ns)
    changed = set_attributes(ns, inode.ino, size_bytes=10, content_id=CONTENT)
    assert (changed.size_bytes, changed.content_id) == (10, CONTENT)
    assert (changed.mtime_ns, changed.ctime_ns) == (now, now)
    assert changed.flags & schema.DATA_LOCAL
    assert set_attributes(ns, inode.ino, size_bytes=11, mtime_ns=3).mtime_ns == 3


def test_flags_and_validity_do_not_touch_ctime(ns: Namespace) -> None:
    inode = ns.create("f", content_id=CONTENT)
    later(ns)
    changed = set_attributes(ns, inode.ino, clear_flags=schema.DATA_LOCAL, listed_until_ns=5)
    assert changed.ctime_ns == START_NS
    assert not changed.flags & schema.DATA_LOCAL
    assert changed.listed_until_ns == 5
    assert changed.content_id != NO_CONTENT
    with pytest.raises(NotFound):
        set_attributes(ns, 999, mode=0)


def test_root_attributes_can_be_changed(ns: Namespace) -> None:
    assert set_attributes(ns, ROOT_INO, mode=0o700, uid=3).mode == stat.S_IFDIR | 0o700
    assert ns.get(ROOT_INO).flags & schema.META_KNOWN


# -- extended attributes -------------------------------------------------------------------------------------


def test_extended_attributes(ns: Namespace) -> None:
    inode = ns.create("f")
    other = ns.create("g")
    now = later(ns)

    def put(name: bytes, value: bytes, **flags: bool) -> None:
        ns.change(lambda txn: tree.set_xattr(txn, inode.ino, name, value, now_ns=now, **flags))

    put(b"user.b", b"\0binary\xff")
    put(b"user.a", b"")
    put(b"user.big", b"v" * 65536)
    assert ns.get(inode.ino).ctime_ns == now
    with ns.db.read() as txn:
        assert tree.list_xattrs(txn, inode.ino) == [b"user.a", b"user.b", b"user.big"]
        assert tree.get_xattr(txn, inode.ino, b"user.b") == b"\0binary\xff"
        assert tree.get_xattr(txn, inode.ino, b"user.a") == b""
        assert tree.list_xattrs(txn, other.ino) == []
        with pytest.raises(NoAttribute):
            tree.get_xattr(txn, inode.ino, b"user.none")
        with pytest.raises(NotFound):
            tree.get_xattr(txn, 999, b"user.none")
    with pytest.raises(AlreadyExists):
        put(b"user.a", b"x", create=True)
    with pytest.raises(NoAttribute):
        put(b"user.new", b"x", replace=True)
    for name in (b"user.a", b"user.b", b"user.big"):
        assert ns.get(inode.ino).flags & schema.HAS_XATTR
        ns.change(lambda txn, name=name: tree.remove_xattr(txn, inode.ino, name, now_ns=now))
    assert not ns.get(inode.ino).flags & schema.HAS_XATTR
    with pytest.raises(NoAttribute):
        ns.change(lambda txn: tree.remove_xattr(txn, inode.ino, b"user.a", now_ns=now))


@pytest.mark.parametrize(
    ("name", "value", "number"), [(b"user." + b"n" * 251, b"", 36), (b"user.x", b"v" * 65537, 7)]
)
def test_extended_attributes_have_limits(ns: Namespace, name: bytes, value: bytes, number: int) -> None:
    inode = ns.create("f")
    with pytest.raises(NameTooLong) as raised:
        ns.change(lambda txn: tree.set_xattr(txn, inode.ino, name, value, now_ns=1))
    assert raised.value.errno == number
    assert not ns.get(inode.ino).flags & schema.HAS_XATTR


def test_the_list_of_attributes_has_a_limit(ns: Namespace) -> None:
    inode = ns.create("f")

    def fill(txn: WriteTransaction) -> None:
        for number in range(257):
            tree.set_xattr(txn, inode.ino, b"user.%0250d" % number, b"", now_ns=1)

    with pytest.raises(NameTooLong) as raised:
        ns.change(fill)
    assert raised.value.errno == 28


def test_a_file_without_a_name_gets_its_first_one(ns: Namespace) -> None:
    """As with O_TMPFILE; once it had a name that was removed, it gets no other."""

    def make(txn: WriteTransaction) -> Inode:
        content_id = ContentId(b"c" * 16)
        return tree.create_unnamed(
            txn, ROOT_INO, mode=FILE, uid=1, gid=2, content_id=content_id, now_ns=START_NS
        )

    inode = ns.db.commit_now(make)
    assert inode.nlink == 0
    with ns.db.read() as txn:
        assert tree.orphans(txn) == [inode.ino]
        assert publish.dirty_row(txn, inode.ino) is None
        assert tree.readdir(txn, ROOT_INO, 0, 10) == []
    now = later(ns)
    linked = ns.db.commit_now(lambda txn: tree.link(txn, inode.ino, ROOT_INO, b"f", now_ns=now))
    assert linked.nlink == 1
    with ns.db.read() as txn:
        assert tree.orphans(txn) == []
        assert tree.lookup(txn, ROOT_INO, b"f") == linked
        assert publish.dirty_row(txn, inode.ino) is not None
    ns.db.commit_now(lambda txn: tree.unlink(txn, ROOT_INO, b"f", now_ns=now))
    with pytest.raises(NotFound):
        ns.db.commit_now(lambda txn: tree.link(txn, inode.ino, ROOT_INO, b"g", now_ns=now))
    forgotten = ns.db.commit_now(make)
    assert ns.db.commit_now(lambda txn: tree.reap(txn, forgotten.ino)) == forgotten
