"""The LMDB owner: group commit, isolation of failures, formats, locks, and what survives."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lmdb
import pytest
import trio

from tests.support.namespace import START_NS, Namespace, open_namespace
from tierfs.errors import (
    AlreadyExists,
    ConfigError,
    DamagedRecord,
    FormatError,
    NamespaceError,
    NotFound,
)
from tierfs.namespace import durability, schema
from tierfs.namespace.change import Change
from tierfs.namespace.db import Database, ReadTransaction, WriteTransaction
from tierfs.types import ROOT_INO, Inode

KEY = b"test"


def put(value: bytes, key: bytes = KEY):
    def fn(txn: WriteTransaction) -> bytes:
        txn.put(key, value, db=txn.tables.meta)
        return value

    return fn


def value_of(db: Database, key: bytes = KEY) -> bytes | None:
    with db.read() as txn:
        return txn.get(key, None, txn.tables.meta)


def test_a_new_database_has_a_root(ns: Namespace) -> None:
    root = ns.get(ROOT_INO)
    assert root.is_dir
    assert root.nlink == 2
    assert root.mtime_ns == START_NS
    assert ns.names() == []


async def test_commit_returns_the_result_and_is_visible_at_once(ns: Namespace) -> None:
    assert await ns.db.commit(put(b"1")) == b"1"
    assert value_of(ns.db) == b"1"


async def test_a_function_that_raises_leaves_nothing_behind(ns: Namespace) -> None:
    def fn(txn: WriteTransaction) -> None:
        txn.put(KEY, b"half", db=txn.tables.meta)
        raise AlreadyExists("no")

    with pytest.raises(AlreadyExists):
        await ns.db.commit(fn)
    assert value_of(ns.db) is None


async def test_functions_that_arrive_together_share_a_commit_and_fail_alone(ns: Namespace) -> None:
    started, gate = threading.Event(), threading.Event()

    def hold(txn: WriteTransaction) -> None:
        started.set()
        gate.wait(10)

    def wrong(txn: WriteTransaction) -> None:
        txn.put(b"wrong", b"x", db=txn.tables.meta)
        raise ZeroDivisionError

    errors: list[BaseException] = []
    results: dict[int, bytes] = {}

    async def one(number: int) -> None:
        results[number] = await ns.db.commit(put(b"%d" % number, b"key%d" % number))

    async def bad() -> None:
        try:
            await ns.db.commit(wrong)
        except ZeroDivisionError as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ns.db.commit, hold)
        await trio.to_thread.run_sync(started.wait)
        for number in range(20):
            nursery.start_soon(one, number)
            nursery.start_soon(bad)
        await trio.testing.wait_all_tasks_blocked()
        before = ns.db.commits
        gate.set()
    assert ns.db.commits == before + 2  # the one that waited, and one for all others
    assert len(errors) == 20
    assert results == {number: b"%d" % number for number in range(20)}
    assert value_of(ns.db, b"wrong") is None
    assert all(value_of(ns.db, b"key%d" % number) == b"%d" % number for number in range(20))


class Put(Change[int]):
    """A change of a ``Source``: refused without a key, damaged without a value."""

    checks_first = True

    def __init__(self, key: bytes, value: bytes | None) -> None:
        super().__init__()
        self.key = key
        self.value = value
        self.runs = 0

    def run(self, txn: WriteTransaction) -> int:
        self.runs += 1
        if not self.key:
            raise NotFound("no key")
        txn.put(self.key, self.value or b"half", db=txn.tables.meta)
        if self.value is None:
            raise DamagedRecord("in the middle")
        return self.runs


class Puts:
    """A source: each byte that comes from the socket is the number of a change."""

    def __init__(self, changes: list[Put]) -> None:
        self.changes = changes
        self.far, self.near = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.near.setblocking(False)
        self.descriptor = self.near.fileno()
        self.groups: list[list[Change[Any]]] = []
        self.finished = threading.Event()
        self.left = len(changes)
        self.takes = 0

    def take(self) -> list[Put]:
        self.takes += 1
        try:
            return [self.changes[number] for number in self.near.recv(100)]
        except OSError:
            return []

    def finish(self, changes: Sequence[Change[Any]]) -> None:
        self.groups.append(list(changes))
        self.left -= len(changes)
        if self.left <= 0:
            self.finished.set()

    def close(self) -> None:
        self.far.close()
        self.near.close()


async def serve(ns: Namespace, changes: list[Put], packets: list[bytes]) -> Puts:
    puts = Puts(changes)
    ns.db.serve(puts)
    for packet in packets:
        puts.far.send(packet)
    assert await trio.to_thread.run_sync(puts.finished.wait, 10)
    return puts


async def test_changes_of_a_source_share_a_transaction_and_fail_alone(ns: Namespace) -> None:
    changes = [Put(b"a", b"1"), Put(b"", b"2"), Put(b"c", b"3")]
    before = ns.db.commits
    puts = await serve(ns, changes, [bytes((0, 1, 2))])
    assert puts.groups == [changes]
    assert ns.db.commits == before + 1
    assert [type(change.error) for change in changes] == [type(None), NotFound, type(None)]
    assert (value_of(ns.db, b"a"), value_of(ns.db, b"c")) == (b"1", b"3")
    puts.close()


async def test_a_change_that_fails_in_the_middle_leaves_nothing_and_hurts_no_other(ns: Namespace) -> None:
    changes = [Put(b"a", b"1"), Put(b"b", None), Put(b"c", b"3")]
    puts = await serve(ns, changes, [bytes((0, 1, 2))])
    assert [type(change.error) for change in changes] == [type(None), DamagedRecord, type(None)]
    assert changes[0].runs == 2  # in a transaction that came to nothing, and in one of its own
    assert [value_of(ns.db, key) for key in (b"a", b"b", b"c")] == [b"1", None, b"3"]
    puts.close()


async def test_the_end_of_a_source_ends_nothing_else(ns: Namespace) -> None:
    puts = await serve(ns, [Put(b"a", b"1")], [b"\0"])
    puts.far.close()
    assert await ns.db.commit(put(b"later", b"b")) == b"later"
    assert value_of(ns.db, b"b") == b"later"
    puts.close()


async def test_a_source_that_has_ended_keeps_nobody_awake(ns: Namespace) -> None:
    puts = await serve(ns, [Put(b"a", b"1")], [b"\0"])
    puts.far.close()
    before = puts.takes
    for number in range(20):
        await ns.db.commit(put(b"later", b"b%d" % number))
    assert puts.takes - before < 100  # twice for a commit, and not all the time
    puts.near.close()


async def test_what_is_not_hurried_shares_the_next_transaction_in_its_place(ns: Namespace) -> None:
    order: list[str] = []

    async def one(name: str, hurried: bool) -> None:
        await ns.db.commit(lambda txn: order.append(name), hurried=hurried)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(one, "unhurried, alone", False)
    assert order == ["unhurried, alone"]
    started, gate = threading.Event(), threading.Event()

    def hold(txn: WriteTransaction) -> None:
        started.set()
        gate.wait(10)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ns.db.commit, hold)
        await trio.to_thread.run_sync(started.wait)
        for name, hurried in (("first", False), ("second", True), ("third", False)):
            nursery.start_soon(one, name, hurried)
            await trio.testing.wait_all_tasks_blocked()
        before = ns.db.commits
        gate.set()
    assert order[1:] == ["first", "second", "third"]
    assert ns.db.commits == before + 2  # ``hold``, and all others together


async def test_a_commit_that_is_queued_cannot_be_cancelled(ns: Namespace) -> None:
    started, gate = threading.Event(), threading.Event()

    def slow(txn: WriteTransaction) -> None:
        started.set()
        gate.wait(10)
        txn.put(KEY, b"done", db=txn.tables.meta)

    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ns.db.commit, slow)
            await trio.to_thread.run_sync(started.wait)
            scope.cancel()
            gate.set()
    assert value_of(ns.db) == b"done"
    with trio.CancelScope() as scope:
        scope.cancel()
        await ns.db.commit(put(b"never"))
    assert value_of(ns.db) == b"done"


async def test_a_failing_commit_reaches_every_caller(ns: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __init__(self, env: lmdb.Environment) -> None:
            self.env = env

        def begin(self, *args: object, **kwargs: object):
            error = lmdb.Error("mdb_txn_begin")
            error.code = 28  # as py-lmdb sets it from errno
            raise error

        def __getattr__(self, name: str) -> object:
            return getattr(self.env, name)

    committer = ns.db._committer
    assert committer is not None
    real = committer._env
    monkeypatch.setattr(committer, "_env", Failing(real))
    with pytest.raises(NamespaceError) as raised:
        await ns.db.commit(put(b"1"))
    assert raised.value.errno == 28
    monkeypatch.setattr(committer, "_env", real)
    assert await ns.db.commit(put(b"2")) == b"2"


def test_nested_reads_share_a_snapshot(ns: Namespace) -> None:
    ns.change(put(b"1"))
    with ns.db.read() as outer:
        ns.change(put(b"2"))
        with ns.db.read() as inner:
            assert inner is outer
            assert inner.get(KEY, None, inner.tables.meta) == b"1"
    assert value_of(ns.db) == b"2"


def test_a_read_block_belongs_to_one_thread(ns: Namespace) -> None:
    def elsewhere() -> bytes | None:
        with ns.db.snapshot() as txn:
            assert txn.get(schema.META_FORMAT, None, txn.tables.meta)
        with pytest.raises(RuntimeError), ns.db.read():
            pass
        return None

    with ns.db.read():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    ns.change(put(b"1"))
    assert value_of(ns.db) == b"1"


def test_a_read_block_ends_also_when_it_raises(ns: Namespace) -> None:
    def broken(txn: ReadTransaction) -> None:
        raise KeyError

    with pytest.raises(KeyError), ns.db.read() as txn:
        broken(txn)
    ns.change(put(b"1"))
    assert value_of(ns.db) == b"1"


def test_everything_is_there_after_reopening(tmp_path: Path) -> None:
    with open_namespace(tmp_path) as ns:
        ino = ns.create("a").ino
        generation = ns.get(ino).generation
    with open_namespace(tmp_path) as ns:
        assert ns.resolve("a").ino == ino
        assert ns.create("b").ino > ino  # numbers are never given out twice
        assert ns.get(ino).generation == generation > 0
        assert ns.db.clean_close


def test_a_kept_lock_refuses_a_second_engine_by_name_of_the_first(tmp_path: Path) -> None:
    with open_namespace(tmp_path), pytest.raises(NamespaceError, match=str(os.getpid())):
        Database.open(tmp_path)
    Database.open(tmp_path).close()


def test_files_are_private(tmp_path: Path) -> None:
    with open_namespace(tmp_path / "state"):
        assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
        for path in (tmp_path / "state" / "namespace.lmdb").iterdir():
            assert path.stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "state" / "namespace.lmdb").stat().st_mode & 0o777 == 0o700


def test_a_newer_format_is_refused_with_both_versions(tmp_path: Path) -> None:
    with open_namespace(tmp_path) as ns:
        ns.change(put(schema.pack_u64(99), schema.META_FORMAT))
    files = {path: path.read_bytes() for path in (tmp_path / "namespace.lmdb").iterdir() if path.suffix != ".mdb"}
    with pytest.raises(FormatError, match="99"):
        Database.open(tmp_path)
    assert {path: path.read_bytes() for path in files} == files


def test_a_database_without_a_header_of_its_own_gets_a_format_that_who_does_not_know_it_refuses(
    tmp_path: Path,
) -> None:
    """Who commits without it changes pages that the header speaks of, to which a power cut goes back."""
    with open_namespace(tmp_path) as ns:
        ns.change(put(schema.pack_u64(schema.OLDEST_FORMAT), schema.META_FORMAT))
    (tmp_path / "namespace.lmdb" / durability.FILE_NAME).unlink()
    with open_namespace(tmp_path) as ns, ns.db.read() as txn:
        assert txn.get(schema.META_FORMAT, None, txn.tables.meta) == schema.pack_u64(4)


def test_the_state_of_another_source_is_refused(tmp_path: Path) -> None:
    Database.open(tmp_path, source="s3://one", prefix="").close()
    with pytest.raises(ConfigError, match="s3://one"):
        Database.open(tmp_path, source="s3://two", prefix="")
    with Database.open(tmp_path, source="s3://one", prefix="") as db:
        assert db.tables.prefix == ""


READER = """
import sys
from pathlib import Path
from tierfs.errors import NamespaceError
from tierfs.namespace import tree
from tierfs.namespace.db import Database
with Database.open(Path(sys.argv[1]), read_only=True) as db:
    with db.read() as txn:
        print(tree.lookup(txn, 1, b"a").ino, db.tables.prefix)
    try:
        db.commit_now(lambda txn: None)
    except NamespaceError:
        print("refused")
"""


def test_read_only_opens_beside_a_live_engine_and_writes_nothing(tmp_path: Path) -> None:
    # In another process: LMDB must not be opened twice in one.
    with open_namespace(tmp_path, prefix="p/") as ns:
        ino = ns.create("a").ino
        answer = subprocess.run(
            [sys.executable, "-c", READER, str(tmp_path)], capture_output=True, text=True, check=True
        )
        assert answer.stdout.split() == [str(ino), "p/", "refused"]
        assert ns.create("b").ino > ino


def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "namespace.lmdb").mkdir()
    (tmp_path / "namespace.lmdb" / "data.mdb").write_bytes(os.urandom(16384))
    with pytest.raises(NamespaceError, match=r"namespace\.lmdb"):
        Database.open(tmp_path)
    os.unlink(tmp_path / "namespace.lmdb" / "data.mdb")
    Database.open(tmp_path).close()


def test_nothing_can_be_committed_after_close(tmp_path: Path) -> None:
    db = Database.open(tmp_path)
    db.close()
    with pytest.raises(NamespaceError):
        db.commit_now(put(b"x"))
    db.close()


async def test_sync_and_durable_commits(ns: Namespace) -> None:
    await ns.db.commit(put(b"1"), durable=True)
    await ns.db.sync()
    assert value_of(ns.db) == b"1"


# -- the C view of the records -------------------------------------------------------------------------------

INODE_OFFSETS = {
    "ino": (0, "<Q"),
    "mode": (8, "<I"),
    "uid": (12, "<I"),
    "gid": (16, "<I"),
    "nlink": (20, "<I"),
    "rdev": (24, "<Q"),
    "size_bytes": (32, "<Q"),
    "atime_ns": (40, "<q"),
    "mtime_ns": (48, "<q"),
    "ctime_ns": (56, "<q"),
    "generation": (64, "<Q"),
    "flags": (72, "<Q"),
    "content_id": (80, "16s"),
    "valid_until_ns": (96, "<q"),
    "listed_until_ns": (104, "<q"),
}


def test_inode_records_have_the_layout_that_the_docstring_gives_to_c() -> None:
    values = {
        name: bytes(range(16)) if form == "16s" else 7 + offset
        for name, (offset, form) in INODE_OFFSETS.items()
    }
    inode = Inode(**values)  # type: ignore[arg-type]
    raw = schema.pack_inode(inode)
    assert len(raw) == 128
    for name, (offset, form) in INODE_OFFSETS.items():
        assert struct.unpack_from(form, raw, offset)[0] == values[name], name
        assert offset % min(struct.calcsize(form), 8) == 0
    assert raw[112:] == bytes(16)
    assert schema.unpack_inode(raw) == inode
    for name, (offset, form) in INODE_OFFSETS.items():
        kind = {"<Q": "uint64_t", "<q": "int64_t ", "<I": "uint32_t", "16s": "uint8_t "}[form]
        field = "content_id[16]" if form == "16s" else name
        assert f"{kind} {field};".replace("  ", " ") in (schema.__doc__ or "").replace("  ", " "), name
        line = next(line for line in (schema.__doc__ or "").splitlines() if f" {field};" in line)
        if name != "ino":
            assert f"{offset} " in line.split("/*")[1], line


def test_entry_records_and_keys_have_the_documented_layout(ns: Namespace) -> None:
    ino = ns.create(b"name\xff").ino
    with ns.db.read() as txn:
        tables = txn.tables
        cursor = txn.cursor(tables.dirent)
        assert cursor.set_range(struct.pack(">Q", ROOT_INO) + b"name\xff\0")
        assert cursor.key() == struct.pack(">Q", ROOT_INO) + b"name\xff\0" + b"\xff" * 8
        record = cursor.value()
        assert len(record) == schema.DIRENT.size == 24
        assert struct.unpack("<QQII", record) == (ino, ino, 0o100000, 0)
        key, value = next(iter(txn.cursor(tables.dirseq).iternext()))
        assert key == struct.pack(">QQ", ROOT_INO, ino)
        assert value == struct.pack("<QII", ino, 0o100000, 0) + b"name\xff"
        assert txn.get(struct.pack(">Q", ino) + b"\xff" * 8, None, tables.inode) is not None
        assert txn.get(struct.pack(">QQ", ino, ROOT_INO) + b"name\xff", None, tables.parent) == b""
