"""The namespace against a model of POSIX made of dicts, and the bucket against the names.

Between operations the database is reopened, inodes are published and deleted as the write-back would,
uploads are cut off by a crash, and directories are listed again: none of this may show in the tree. Snapshots are
made, deleted and swept up after: each shows the tree of its moment, whatever happens afterwards.
"""

from __future__ import annotations

import copy
import errno
import random
import shutil
import stat
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support import writeback_model as writeback
from tests.support.namespace import DIRECTORY, FILE, Namespace, open_namespace
from tierfs.errors import NamespaceError, NotADirectory
from tierfs.namespace import past, publish, records, schema, snapshots, tree
from tierfs.namespace import sweep as history_sweep
from tierfs.namespace.check import problems
from tierfs.namespace.db import WriteTransaction
from tierfs.namespace.listing import Defaults, Listing, apply_entries, finish, resolve_deferred, sweep
from tierfs.namespace.pages import parse_page
from tierfs.namespace.transaction import HISTORY_TABLES, ReadTransaction
from tierfs.types import ROOT_INO, Inode, new_content_id

NAMES = ("a", "b", "c")
paths = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4).map("/".join)
picks = st.integers(0, 10**6)
FAST_DIRECTORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


@dataclass(eq=False)
class Node:
    """A file of the model. ``ino`` is what the namespace answered when it was made."""

    kind: int
    ino: int = 0
    nlink: int = 1
    mode: int = 0o644
    mtime_ns: int = 0
    ctime_ns: int = 0
    target: bytes | None = None
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    entries: dict[str, Node] = field(default_factory=dict)

    @property
    def is_dir(self) -> bool:
        return self.kind == stat.S_IFDIR

    def touch(self, now_ns: int) -> None:
        self.mtime_ns = self.ctime_ns = now_ns


class ModelError(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(errno.errorcode[number])
        self.number = number


class Model:
    """A tree of nodes with the rules of POSIX."""

    def __init__(self, now_ns: int) -> None:
        self.root = Node(stat.S_IFDIR, ROOT_INO, 2, 0o755, now_ns, now_ns)

    def walk(self, path: str) -> Node:
        node = self.root
        for name in filter(None, path.split("/")):
            if not node.is_dir:
                raise ModelError(errno.ENOTDIR)
            if name not in node.entries:
                raise ModelError(errno.ENOENT)
            node = node.entries[name]
        return node

    def parent(self, path: str) -> tuple[Node, str]:
        above, _, name = path.rpartition("/")
        node = self.walk(above)
        if not node.is_dir:
            raise ModelError(errno.ENOTDIR)
        return node, name

    def create(self, path: str, kind: int, now_ns: int, target: bytes | None) -> Node:
        parent, name = self.parent(path)
        if name in parent.entries:
            raise ModelError(errno.EEXIST)
        node = Node(kind, nlink=2 if kind == stat.S_IFDIR else 1, target=target)
        node.mode = 0o777 if target is not None else 0o755 if node.is_dir else 0o644
        node.touch(now_ns)
        parent.entries[name] = node
        parent.nlink += node.is_dir
        parent.touch(now_ns)
        return node

    def link(self, old: str, new: str, now_ns: int) -> None:
        node = self.walk(old)
        if node.is_dir:
            raise ModelError(errno.EPERM)
        parent, name = self.parent(new)
        if name in parent.entries:
            raise ModelError(errno.EEXIST)
        parent.entries[name] = node
        node.nlink += 1
        node.ctime_ns = now_ns
        parent.touch(now_ns)

    def remove(self, path: str, want_dir: bool, now_ns: int) -> None:
        parent, name = self.parent(path)
        if name not in parent.entries:
            raise ModelError(errno.ENOENT)
        node = parent.entries[name]
        if node.is_dir and not want_dir:
            raise ModelError(errno.EISDIR)
        if not node.is_dir and want_dir:
            raise ModelError(errno.ENOTDIR)
        if node.entries:
            raise ModelError(errno.ENOTEMPTY)
        del parent.entries[name]
        parent.nlink -= node.is_dir
        self._drop(node, now_ns)
        parent.touch(now_ns)

    def _drop(self, node: Node, now_ns: int) -> None:
        node.nlink = 0 if node.is_dir else node.nlink - 1
        node.ctime_ns = now_ns

    def rename(self, old: str, new: str, now_ns: int, noreplace: bool, exchange: bool) -> None:
        source_dir, source_name = self.parent(old)
        target_dir, target_name = self.parent(new)
        if source_name not in source_dir.entries:
            raise ModelError(errno.ENOENT)
        node = source_dir.entries[source_name]
        known = target_dir.entries.get(target_name)
        if known is not None and noreplace:
            raise ModelError(errno.EEXIST)
        if known is None and exchange:
            raise ModelError(errno.ENOENT)
        if node.is_dir and self._contains(node, target_dir):
            raise ModelError(errno.EINVAL)
        if known is node:
            return
        if exchange:
            assert known is not None
            if known.is_dir and self._contains(known, source_dir):
                raise ModelError(errno.EINVAL)
            source_dir.entries[source_name], target_dir.entries[target_name] = known, node
            source_dir.nlink += known.is_dir - node.is_dir
            target_dir.nlink += node.is_dir - known.is_dir
            known.ctime_ns = now_ns
        else:
            if known is not None:
                if node.is_dir and not known.is_dir:
                    raise ModelError(errno.ENOTDIR)
                if known.is_dir and not node.is_dir:
                    raise ModelError(errno.EISDIR)
                if known.entries:
                    raise ModelError(errno.ENOTEMPTY)
                self._drop(known, now_ns)
                target_dir.nlink -= known.is_dir
            del source_dir.entries[source_name]
            target_dir.entries[target_name] = node
            source_dir.nlink -= node.is_dir
            target_dir.nlink += node.is_dir
        node.ctime_ns = now_ns
        source_dir.touch(now_ns)
        target_dir.touch(now_ns)

    def _contains(self, node: Node, other: Node) -> bool:
        return node is other or any(self._contains(below, other) for below in node.entries.values())


class TreeMachine(RuleBasedStateMachine):
    @initialize()
    def open(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="tierfs-model-", dir=FAST_DIRECTORY))
        self.stack = ExitStack()
        self.ns: Namespace = self.stack.enter_context(open_namespace(self.directory))
        self.ns.change(lambda txn: finish(txn, ROOT_INO, None, self._listing()))
        self.model = Model(self.ns.clock.ns)
        self.cookies: dict[tuple[int, str], int] = {}
        self.snapshots: dict[bytes, Node] = {}
        self.snapshots_made = 0

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            try:
                self._compare()
                writeback.drain(self.ns)
                assert self.ns.store.bodies() == writeback.expected_keys(self.ns)
                self._compare()
            finally:
                self.stack.close()
                shutil.rmtree(self.directory)

    # -- one operation on both -------------------------------------------------------------------------

    def _both(self, on_model, on_tree) -> tuple[object, object]:
        """Both succeed, or both fail with the same errno."""
        self.ns.clock.advance(1)
        expected: object = None
        answered: object = None
        failed = number = 0
        try:
            expected = on_model()
        except ModelError as error:
            failed = error.number
        try:
            answered = self.ns.change(on_tree)
        except NamespaceError as error:
            number = error.errno
        assert failed == number, f"model {errno.errorcode.get(failed)}, tree {errno.errorcode.get(number)}"
        return expected, answered

    def _at(self, txn: WriteTransaction, path: str) -> tuple[int, bytes]:
        above, _, name = path.rpartition("/")
        parent = tree.resolve(txn, above.encode())
        if not parent.is_dir:
            raise NotADirectory(above)
        return parent.ino, name.encode()

    def _create(self, path: str, mode: int, target: bytes | None = None) -> None:
        now_ns = self.ns.clock.ns + 10**9
        content_id = new_content_id()

        def make(txn: WriteTransaction):
            parent, name = self._at(txn, path)
            kept = content_id if stat.S_ISREG(mode) else bytes(16)
            return tree.create(
                txn, parent, name, mode=mode, uid=1, gid=1, target=target, content_id=kept, now_ns=now_ns
            )

        kind = stat.S_IFMT(mode)
        node, inode = self._both(lambda: self.model.create(path, kind, now_ns, target), make)
        if node is not None:
            node.ino = inode.ino  # type: ignore[attr-defined]

    @rule(path=paths)
    def create(self, path: str) -> None:
        self._create(path, FILE)

    @rule(path=paths)
    def mkdir(self, path: str) -> None:
        self._create(path, DIRECTORY)

    @rule(path=paths)
    def symlink(self, path: str) -> None:
        self._create(path, stat.S_IFLNK | 0o777, b"target of " + path.encode())

    @rule(old=paths, new=paths)
    def link(self, old: str, new: str) -> None:
        now_ns = self.ns.clock.ns + 10**9

        def make(txn: WriteTransaction) -> object:
            source = tree.resolve(txn, old.encode())
            if source.is_dir:
                return tree.link(txn, source.ino, ROOT_INO, b"x", now_ns=now_ns)
            parent, name = self._at(txn, new)
            return tree.link(txn, source.ino, parent, name, now_ns=now_ns)

        self._both(lambda: self.model.link(old, new, now_ns), make)

    @rule(path=paths)
    def unlink(self, path: str) -> None:
        now_ns = self.ns.clock.ns + 10**9
        self._both(
            lambda: self.model.remove(path, False, now_ns),
            lambda txn: tree.unlink(txn, *self._at(txn, path), now_ns=now_ns),
        )

    @rule(path=paths)
    def rmdir(self, path: str) -> None:
        now_ns = self.ns.clock.ns + 10**9
        self._both(
            lambda: self.model.remove(path, True, now_ns),
            lambda txn: tree.rmdir(txn, *self._at(txn, path), now_ns=now_ns),
        )

    @rule(old=paths, new=paths, flag=st.sampled_from(["", "", "", "noreplace", "exchange"]))
    def rename(self, old: str, new: str, flag: str) -> None:
        now_ns = self.ns.clock.ns + 10**9
        noreplace, exchange = flag == "noreplace", flag == "exchange"

        def move(txn: WriteTransaction) -> object:
            source, target = self._at(txn, old), self._at(txn, new)
            return tree.rename(txn, *source, *target, now_ns=now_ns, noreplace=noreplace, exchange=exchange)

        self._both(lambda: self.model.rename(old, new, now_ns, noreplace, exchange), move)

    @rule(path=paths, mode=st.sampled_from([0o600, 0o4755, 0o1777]), mtime=st.integers(0, 10**18))
    def set_attributes(self, path: str, mode: int, mtime: int) -> None:
        now_ns = self.ns.clock.ns + 10**9

        def on_model() -> None:
            node = self.model.walk(path)
            node.mode, node.mtime_ns, node.ctime_ns = mode, mtime, now_ns

        self._both(
            on_model,
            lambda txn: tree.set_attributes(
                txn, tree.resolve(txn, path.encode()).ino, mode=mode, mtime_ns=mtime, now_ns=now_ns
            ),
        )

    @rule(path=paths, name=st.sampled_from([b"user.a", b"user.b"]), value=st.binary(max_size=3))
    def set_xattr(self, path: str, name: bytes, value: bytes) -> None:
        now_ns = self.ns.clock.ns + 10**9

        def on_model() -> None:
            node = self.model.walk(path)
            node.xattrs[name] = value
            node.ctime_ns = now_ns

        self._both(
            on_model,
            lambda txn: tree.set_xattr(
                txn, tree.resolve(txn, path.encode()).ino, name, value, now_ns=now_ns
            ),
        )

    @rule(path=paths, name=st.sampled_from([b"user.a", b"user.b"]))
    def remove_xattr(self, path: str, name: bytes) -> None:
        now_ns = self.ns.clock.ns + 10**9

        def on_model() -> None:
            node = self.model.walk(path)
            if name not in node.xattrs:
                raise ModelError(errno.ENODATA)
            del node.xattrs[name]
            node.ctime_ns = now_ns

        self._both(
            on_model,
            lambda txn: tree.remove_xattr(txn, tree.resolve(txn, path.encode()).ino, name, now_ns=now_ns),
        )

    # -- snapshots ---------------------------------------------------------------------------------------

    @rule(path=st.one_of(st.just(""), paths))
    def snapshot(self, path: str) -> None:
        name = b"s%d" % self.snapshots_made

        def on_model() -> Node:
            node = self.model.walk(path)
            if not node.is_dir:
                raise ModelError(errno.ENOTDIR)
            return node

        node, row = self._both(
            on_model,
            lambda txn: snapshots.create(
                txn, name, tree.resolve(txn, path.encode()).ino, now_ns=self.ns.clock.ns
            ),
        )
        if isinstance(node, Node):
            assert isinstance(row, schema.SnapshotRow)
            self.snapshots[name] = copy.deepcopy(node)
            self.snapshots_made += 1

    @rule(pick=picks, swept=st.booleans())
    def delete_snapshot(self, pick: int, swept: bool) -> None:
        if self.snapshots:
            name = sorted(self.snapshots)[pick % len(self.snapshots)]
            del self.snapshots[name]
            self.ns.change(lambda txn: snapshots.delete(txn, name))
        if swept:
            self.sweep_history()

    @rule()
    def sweep_history(self) -> None:
        """To the end, in small pages."""
        with self.ns.db.read() as txn:
            place = history_sweep.begin(txn)
        while place is not None:
            at = place
            place = self.ns.change(lambda txn, at=at: history_sweep.step(txn, at, 2, self.ns.clock.ns))
        if not self.snapshots:
            with self.ns.db.read() as txn:
                left = [name for name in HISTORY_TABLES if txn.entries(getattr(txn.tables, name))]
            assert left == [], "without a snapshot nothing old is kept"

    # -- what must not show ------------------------------------------------------------------------------

    @rule()
    def reopen(self) -> None:
        clock, store = self.ns.clock, self.ns.store
        self.stack.close()
        self.ns = self.stack.enter_context(open_namespace(self.directory))
        self.ns.clock, self.ns.store = clock, store
        with self.ns.db.read() as txn:
            orphans = tree.orphans(txn)
        for ino in orphans:
            self.ns.change(lambda txn, ino=ino: tree.reap(txn, ino))

    @rule(pick=picks, crash=st.booleans())
    def publish(self, pick: int, crash: bool) -> None:
        waiting = writeback.dirty_inos(self.ns)
        if waiting:
            writeback.publish_one(self.ns, waiting[pick % len(waiting)], crash=crash)

    @rule()
    def delete_doomed(self) -> None:
        writeback.delete_doomed(self.ns)

    @rule()
    def drain(self) -> None:
        writeback.drain(self.ns)
        assert self.ns.store.bodies() == writeback.expected_keys(self.ns)

    def _listing(self) -> Listing:
        now_ns = self.ns.clock.ns
        return Listing(now_ns, now_ns + 60 * 10**9, now_ns, Defaults(1, 1, 0o644, 0o755))

    @rule(pick=picks, expired=st.booleans())
    def list_again(self, pick: int, expired: bool) -> None:
        """Nobody else writes to this bucket: a listing may change nothing but validity."""
        with self.ns.db.read() as txn:
            directories = [ROOT_INO]
            for ino in directories:
                directories += [
                    child for _, _, child, kind in records.iter_entries(txn, ino) if kind == stat.S_IFDIR
                ]
        ino = directories[pick % len(directories)]
        self.ns.clock.advance(61 if expired else 1)
        with self.ns.db.read() as txn:
            (prefix,) = publish.key_of(txn, ino)
        page = self.ns.store.list_page(prefix)
        parsed = parse_page(page, prefix, is_root=ino == ROOT_INO)
        assert page.next_token is None
        assert not parsed.hidden

        def apply(txn: WriteTransaction) -> None:
            listing = self._listing()
            covered = publish.covering_prefix(txn, prefix) is not None
            directory = tree.get(txn, ino)
            changes = apply_entries(
                txn, directory, prefix, parsed.top.dirs, parsed.top.files.items(), listing
            )
            assert changes.added == 0, "an entry appeared that nobody made"
            assert not changes.invalidations, changes
            if not covered:
                changes, following = sweep(txn, tree.get(txn, ino), prefix, listing, 0, 10**6)
                assert following is None
                assert not changes.invalidations, "an entry disappeared"
                assert not changes.gone_directories
            changes = resolve_deferred(txn, tree.get(txn, ino), changes.deferred, listing)
            finish(txn, ino, parsed.top.marker, listing)

        self.ns.change(apply)

    # -- comparison ------------------------------------------------------------------------------------

    @invariant()
    def tables_agree(self) -> None:
        if hasattr(self, "ns"):
            with self.ns.db.read() as txn:
                assert list(problems(txn)) == []

    @invariant()
    def trees_agree(self) -> None:
        if hasattr(self, "ns"):
            self._compare()

    @invariant()
    def snapshots_agree(self) -> None:
        if hasattr(self, "ns"):
            with self.ns.db.read() as txn:
                assert [row.name for row in snapshots.every(txn)] == sorted(
                    self.snapshots, key=lambda name: int(name[1:])
                )
                for name, root in self.snapshots.items():
                    self._compare_snapshot(txn, snapshots.find(txn, name), root)

    def _compare_snapshot(self, txn: ReadTransaction, row: schema.SnapshotRow, root: Node) -> None:
        waiting = [root]
        while waiting:
            node = waiting.pop()
            inode = past.inode(txn, row, node.ino)
            where = f"inode {node.ino} in snapshot {row.name!r}"
            assert stat.S_IMODE(inode.mode) == node.mode, where
            assert (stat.S_IFMT(inode.mode), inode.nlink) == (node.kind, node.nlink), where
            assert inode.ctime_ns == node.ctime_ns, where
            if not inode.flags & schema.DATA_LOCAL:
                assert inode.mtime_ns == node.mtime_ns, where
            assert past.xattrs(txn, row, node.ino) == node.xattrs, where
            if node.target is not None:
                assert past.readlink(txn, row, node.ino) == node.target, where
            if not node.is_dir:
                continue
            found = self._pages(txn, row, node.ino)
            assert {name.decode(): entry.ino for name, entry in found} == {
                name: below.ino for name, below in node.entries.items()
            }, where
            assert len(found) == len(node.entries), where
            for name, entry in found:
                assert past.lookup(txn, row, node.ino, name) == entry, where
            for name in set(NAMES) - node.entries.keys():
                assert past.entry(txn, row, node.ino, name.encode()) is None, where
            waiting += node.entries.values()

    def _pages(self, txn: ReadTransaction, row: schema.SnapshotRow, ino: int) -> list[tuple[bytes, Inode]]:
        """A directory of a snapshot, two entries at a time."""
        found: list[tuple[bytes, Inode]] = []
        cookie = 0
        while page := past.readdir(txn, row, ino, cookie, 2):
            cookie = page[-1][1]
            found += [(name, inode) for name, _, inode in page]
        return found

    def _compare(self) -> None:
        seen: set[tuple[int, str]] = set()
        with self.ns.db.read() as txn:
            waiting = [self.model.root]
            while waiting:
                node = waiting.pop()
                inode = tree.get(txn, node.ino)
                where = f"inode {node.ino}"
                assert stat.S_IMODE(inode.mode) == node.mode, where
                assert (stat.S_IFMT(inode.mode), inode.nlink) == (node.kind, node.nlink), where
                assert (inode.mtime_ns, inode.ctime_ns) == (node.mtime_ns, node.ctime_ns), where
                if node.target is not None:
                    assert tree.readlink(txn, node.ino) == node.target
                if not node.is_dir:
                    continue
                found = tree.readdir(txn, node.ino, 0, 10**6)
                assert {name.decode(): entry.ino for name, _, entry in found} == {
                    name: below.ino for name, below in node.entries.items()
                }, where
                for name, cookie, _ in found:
                    known = self.cookies.setdefault((node.ino, name.decode()), cookie)
                    assert known == cookie, "a name changed its cookie while it was there"
                    seen.add((node.ino, name.decode()))
                waiting += node.entries.values()
        self.cookies = {key: cookie for key, cookie in self.cookies.items() if key in seen}


class RandomDriver:
    """Long sequences that a search for short ones does not try; one seed, one sequence."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.with_snapshots = seed % 2
        self.machine = TreeMachine()

    def path(self) -> str:
        return "/".join(self.random.choice(NAMES) for _ in range(self.random.choice((1, 1, 2, 2, 3))))

    def run(self, steps: int) -> None:
        draw, machine = self.random, self.machine
        pick = partial(draw.randrange, 10**6)
        flags = ("", "", "", "noreplace", "exchange")
        choices: list[tuple[int, Callable[[], None]]] = [
            (6, lambda: machine.create(path=self.path())),
            (8, lambda: machine.mkdir(path=self.path())),
            (1, lambda: machine.symlink(path=self.path())),
            (3, lambda: machine.link(old=self.path(), new=self.path())),
            (4, lambda: machine.unlink(path=self.path())),
            (3, lambda: machine.rmdir(path=self.path())),
            (12, lambda: machine.rename(old=self.path(), new=self.path(), flag=draw.choice(flags))),
            (1, lambda: machine.set_attributes(path=self.path(), mode=0o600, mtime=pick())),
            (12, lambda: machine.publish(pick=pick(), crash=draw.random() < 0.2)),
            (6, lambda: machine.delete_doomed()),
            (6, lambda: machine.list_again(pick=pick(), expired=draw.random() < 0.5)),
            (1, lambda: machine.reopen()),
            (2, lambda: machine.set_xattr(path=self.path(), name=b"user.a", value=draw.randbytes(2))),
            (1, lambda: machine.remove_xattr(path=self.path(), name=b"user.a")),
            (3 * self.with_snapshots, lambda: machine.snapshot(path=draw.choice(("", self.path())))),
            (
                2 * self.with_snapshots,
                lambda: machine.delete_snapshot(pick=pick(), swept=draw.random() < 0.5),
            ),
        ]
        weights = [weight for weight, _ in choices]
        machine.open()
        try:
            for _ in range(steps):
                draw.choices(choices, weights)[0][1]()
                machine.tables_agree()
                machine.trees_agree()
                machine.snapshots_agree()
        finally:
            machine.teardown()


@pytest.mark.parametrize("seed", range(8))
def test_long_random_sequences(seed: int) -> None:
    RandomDriver(seed).run(300)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
