"""The front's answers against the engine's: the same records, the same questions, the same answers.

The engine is a real one, without a kernel, on a bucket that is a directory; it is asked through ``TierfsOperations``.
The front is ``answer-tool``, another process that reads the namespace while the engine writes it. Both have the
same clock. Where the engine would have to ask the bucket, or may know more than its records say, the front has to
relay, and only there.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyfuse3
import pytest
import trio

from tests.native.conftest import NativeBuild
from tests.support import answer_tool
from tests.support.answer_tool import NO_REPLY, RELAY, AnswerTool, Attributes, Entry, Name
from tests.support.engine import ROOT_CALLER, Engine, running_engine, settings_for
from tests.support.namespace import Clock
from tierfs.errors import TierfsError
from tierfs.fs.handles import DirectoryHandle
from tierfs.fs.ops import TierfsOperations
from tierfs.namespace import schema, tree
from tierfs.namespace.transaction import WriteTransaction
from tierfs.types import ROOT_INO, Inode

SECOND_NS = 10**9
TIMEOUT_TOLERANCE_NS = 1000
"""pyfuse3 takes timeouts as floats."""
ODD_NAMES = [
    b"plain", b"with space", b"new\nline", b"\xff\xfe\x80", "\u00e9\u4e2d\U0001f600".encode(), b"-", b"...", b".hidden",
    b"\x01\x7f", b"a" * 255, b"\xf0" * 255, b"%2F", b"back\\slash", b"*?[]", b"a:b", b".tierfs",
]  # fmt: skip


@dataclass(slots=True, eq=False)
class Sides:
    """Engine and front side by side. ``clock`` is what both take for now."""

    engine: Engine
    ops: TierfsOperations
    front: AnswerTool
    clock: Clock
    listed: list[tuple[bytes, int, Any]]
    """What the engine's readdir has said, while one runs: (name, cookie, attributes)."""

    def at(self, ns: int) -> None:
        self.clock.ns = self.front.now_ns = ns

    async def change(self, fn: Callable[[WriteTransaction], Any]) -> Any:
        return await self.engine.parts.db.commit(fn)

    async def alter(self, ino: int, **fields: int) -> None:
        """Change fields of an inode record behind everybody's back."""
        await self.change(
            lambda txn: schema.put_inode(txn, schema.replace_inode(tree.get(txn, ino), **fields))
        )

    def inode(self, ino: int) -> Inode | None:
        try:
            with self.engine.parts.db.read() as txn:
                return tree.get(txn, ino)
        except TierfsError:
            return None

    def is_in_flux(self, ino: int) -> bool:
        inode = self.inode(ino)
        return inode is not None and inode.is_regular and bool(inode.flags & schema.DATA_LOCAL)

    async def asks_bucket(self, parent: int, name: bytes) -> bool:
        """Whether the engine cannot answer this look-up from what it has."""
        try:
            return self.engine.parts.refresher.lookup_local(parent, name) is None
        except TierfsError:
            return False


@asynccontextmanager
async def both(native_build: NativeBuild, root: Path, **changes: object) -> AsyncIterator[Sides]:
    changes = {"ttl_s": 60.0, "negative_ttl_s": 5.0, "uid": 1234, "gid": 2345, "umask": 0o027, **changes}
    settings = settings_for(root, **changes)
    executable = native_build.executable("answer-tool")
    async with running_engine(settings, publishing=False) as engine:
        parts = engine.parts
        clock = Clock(parts.services.now_ns())
        parts.services.now_ns = parts.refresher._now_ns = clock
        await parts.refresher.listed(ROOT_INO)
        with AnswerTool(executable, parts.db.directory / "namespace.lmdb", settings) as front:
            sides = Sides(engine, TierfsOperations(parts.services), front, clock, [])
            sides.at(clock.ns)
            yield sides


# -- the same question to both ----------------------------------------------------------------------------------


async def answer_of(question: Any) -> Any:
    """What the engine says; -errno if it refuses."""
    try:
        return await question
    except pyfuse3.FUSEError as error:
        return -error.errno


def attributes_of(entry: Any) -> Attributes:
    return Attributes(
        entry.st_ino, entry.st_size, entry.st_blocks, entry.st_atime_ns, entry.st_mtime_ns, entry.st_ctime_ns,
        entry.st_mode, entry.st_nlink, entry.st_uid, entry.st_gid, entry.st_rdev, entry.st_blksize,
    )  # fmt: skip


def check_entry(said: Entry, entry: Any) -> None:
    assert said.attributes == attributes_of(entry)
    assert (said.nodeid, said.generation) == (entry.st_ino, entry.generation)
    assert said.entry_valid_ns == pytest.approx(entry.entry_timeout * 1e9, abs=TIMEOUT_TOLERANCE_NS)
    assert said.attr_valid_ns == pytest.approx(entry.attr_timeout * 1e9, abs=TIMEOUT_TOLERANCE_NS)


async def check_lookup(sides: Sides, parent: int, name: bytes) -> Entry | int:
    said = sides.front.lookup(parent, name)
    if parent == ROOT_INO and name == schema.RESERVED_NAME:
        assert said == RELAY  # whether there are snapshots only the engine knows
        return said
    if await sides.asks_bucket(parent, name):
        assert said == RELAY
        return said
    entry = await answer_of(sides.ops.lookup(parent, name, pyfuse3.RequestContext()))
    if not isinstance(entry, int) and sides.is_in_flux(entry.st_ino):
        assert said == RELAY
    elif isinstance(said, int) or isinstance(entry, int):
        assert said == entry, (parent, name)
    else:
        check_entry(said, entry)
    return said


async def check_getattr(sides: Sides, ino: int) -> None:
    said = sides.front.getattr(ino)
    entry = await answer_of(sides.ops.getattr(ino, pyfuse3.RequestContext()))
    if sides.is_in_flux(ino):
        assert said == RELAY
    elif isinstance(said, int) or isinstance(entry, int):
        assert said == entry, ino
    else:
        assert said[0] == pytest.approx(entry.attr_timeout * 1e9, abs=TIMEOUT_TOLERANCE_NS)
        assert said[1] == attributes_of(entry)


async def check_readlink(sides: Sides, ino: int) -> None:
    target = await answer_of(sides.ops.readlink(ino, pyfuse3.RequestContext()))
    assert sides.front.readlink(ino) == target


async def check_xattr(sides: Sides, ino: int, name: bytes) -> None:
    said = sides.front.getxattr(ino, name)
    value = await answer_of(sides.ops.getxattr(ino, name, pyfuse3.RequestContext()))
    inode = sides.inode(ino)
    has_some = inode is not None and bool(inode.flags & schema.HAS_XATTR)
    kept = name.startswith((b"user.", b"trusted.", b"security."))
    assert said == (RELAY if name.startswith(b"user.tierfs.") or (has_some and kept) else value), (ino, name)
    names = await answer_of(sides.ops.listxattr(ino, pyfuse3.RequestContext()))
    assert sides.front.listxattr(ino) == (RELAY if has_some else names if isinstance(names, int) else b"")


async def check_opendir(sides: Sides, ino: int) -> None:
    said = sides.front.opendir(ino)
    try:
        listed = sides.engine.parts.refresher.is_listed(ino)
    except TierfsError as error:
        assert said == -error.errno
    else:
        assert said == (answer_tool.FRONT_HANDLE | ino if listed else RELAY)


async def engine_lists(sides: Sides, ino: int, offset: int = 0) -> list[tuple[bytes, int, Any]]:
    handles = sides.engine.parts.services.handles
    handle = pyfuse3.FileHandleT(handles.add_directory(DirectoryHandle(pyfuse3.InodeT(ino))))
    sides.listed.clear()
    await sides.ops.readdir(handle, offset, sides)  # type: ignore[arg-type]
    handles.remove_directory(handle)
    return list(sides.listed)


@pytest.fixture(autouse=True)
def _collect_readdir(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token that the engine's readdir is given here is a ``Sides``."""

    def reply(sides: Sides, name: bytes, attributes: Any, cookie: int) -> bool:
        sides.listed.append((name, cookie, attributes))
        return True

    monkeypatch.setattr(pyfuse3, "readdir_reply", reply)


def front_lists(
    sides: Sides, ino: int, offset: int = 0, size: int = 4096, *, plus: bool = True
) -> list[Name]:
    names: list[Name] = []
    while True:
        page = sides.front.readdir(ino, answer_tool.FRONT_HANDLE | ino, offset, size, plus=plus)
        assert isinstance(page, list), page
        if not page:
            return names
        assert page[0].cookie > offset
        names += page
        offset = page[-1].cookie


async def check_readdir(sides: Sides, ino: int, offset: int = 0, size: int = 4096) -> None:
    expected = await engine_lists(sides, ino, offset)
    said = front_lists(sides, ino, offset, size)
    plain = front_lists(sides, ino, offset, size, plus=False)
    assert [(name.name, name.cookie) for name in said] == [(name, cookie) for name, cookie, _ in expected]
    for one, (name, _, entry) in zip(said, expected, strict=True):
        assert (one.ino, one.type) == (entry.st_ino, stat.S_IFMT(entry.st_mode) >> 12)
        if sides.is_in_flux(one.ino):
            assert one.entry is None
        elif name not in (b".", b".."):  # of these the kernel ignores the attributes
            assert one.entry is not None
            check_entry(one.entry, entry)
    assert [(name.name, name.cookie, name.ino, name.type) for name in plain] == [
        (name.name, name.cookie, name.ino, name.type) for name in said
    ]


# -- tests ------------------------------------------------------------------------------------------------------


def fill_bucket(root: Path) -> None:
    bucket = root / "bucket"
    for path in ("one", "sub/two", "sub/deep/three", "other/four"):
        (bucket / path).parent.mkdir(parents=True, exist_ok=True)
        (bucket / path).write_bytes(path.encode() * 100)


async def make(sides: Sides, parent: int, name: bytes, mode: int, **more: Any) -> Inode:
    return await sides.engine.names.create(parent, name, mode, ROOT_CALLER, **more)


async def populate(sides: Sides) -> list[int]:
    """Some of everything in the root and in ``made``. Returns numbers to ask for, absent ones too."""
    engine = sides.engine
    made = await make(sides, ROOT_INO, b"made", stat.S_IFDIR | 0o2751)
    await make(sides, ROOT_INO, b"link", stat.S_IFLNK | 0o777, target=b"made/../one")
    await make(sides, made.ino, b"long-link", stat.S_IFLNK | 0o777, target=b"t" * 4095)
    await make(sides, made.ino, b"fifo", stat.S_IFIFO | 0o600)
    await make(sides, made.ino, b"device", stat.S_IFBLK | 0o640, rdev=os.makedev(259, 70000) & 0xFFFFFFFF)
    file = await engine.write_file("written", b"x" * 5000)
    await engine.names.link(file.ino, made.ino, b"hard")
    for name in ODD_NAMES[:-1]:
        await make(sides, made.ino, name, stat.S_IFREG | 0o4755)
    tagged = await make(sides, made.ino, b"tagged", stat.S_IFREG | 0o644)
    await engine.attributes.set_xattr(tagged.ino, b"user.colour", b"blue")
    gone = await engine.write_file("gone", b"gone")
    await engine.names.unlink(ROOT_INO, b"gone")
    removed = await make(sides, made.ino, b"removed", stat.S_IFDIR | 0o755)
    await engine.names.rmdir(made.ino, b"removed")
    for path in (b"one", b"sub", b"other"):
        await engine.names.lookup(ROOT_INO, path)
    with engine.parts.db.read() as txn:
        inos = sorted({inode.ino for _, _, inode in tree.readdir(txn, ROOT_INO, 0, 10**6)} | {ROOT_INO})
        for directory in [ino for ino in inos if tree.get(txn, ino).is_dir]:
            inos += [inode.ino for _, _, inode in tree.readdir(txn, directory, 0, 10**6)]
    return [*sorted({*inos, gone.ino, removed.ino}), 0, 10**6, 2**63, 2**64 - 1]


async def test_everything_of_a_namespace(native_build: NativeBuild, tmp_path: Path) -> None:
    fill_bucket(tmp_path)
    async with both(native_build, tmp_path) as sides:
        inos = await populate(sides)
        made = sides.front.lookup(ROOT_INO, b"made")
        assert isinstance(made, Entry)
        known = [b"one", b"sub", b"other", b"link", b"written", b"made", b"absent", b"x" * 255, b"x" * 256]
        answered = 0
        for parent in inos:
            for name in [*known, *ODD_NAMES, b"hard", b"long-link", b"fifo", b"device", b"two"]:
                answered += not isinstance(await check_lookup(sides, parent, name), int)
        assert answered >= 9
        for ino in inos:
            if ino < 2**63:  # the namespace never gives out higher numbers
                await check_getattr(sides, ino)
                await check_readlink(sides, ino)
                await check_opendir(sides, ino)
                for name in (
                    b"user.colour",
                    b"user.tierfs.dirty",
                    b"system.posix_acl_access",
                    b"odd",
                    b"security.x",
                    b"security.selinux",
                ):
                    await check_xattr(sides, ino, name)
                inode = sides.inode(ino)
                if inode is not None and inode.is_dir:
                    for size in (500, 4096, 65536):
                        await check_readdir(sides, ino, 0, size)
                    for offset in (1, 2, 3, 20, 2**62):
                        await check_readdir(sides, ino, offset)


async def test_time_passes(native_build: NativeBuild, tmp_path: Path) -> None:
    """Negative answers end first, then positive ones; what is only here never does."""
    fill_bucket(tmp_path)
    async with both(native_build, tmp_path) as sides:
        await populate(sides)
        start = sides.clock.ns
        seen = set()
        for seconds in (0, 1, 4.9, 5.1, 30, 59, 61, 3600):
            sides.at(start + int(seconds * SECOND_NS))
            answers = [
                await check_lookup(sides, ROOT_INO, name) for name in (b"one", b"absent", b"made", b".tierfs")
            ]
            seen.add(tuple("entry" if isinstance(answer, Entry) else answer for answer in answers))
            await check_opendir(sides, ROOT_INO)
            await check_readdir(sides, ROOT_INO)
        assert seen == {
            # Whether there are snapshots only the engine knows.
            ("entry", -2, "entry", RELAY),
            ("entry", RELAY, "entry", RELAY),
            (RELAY, RELAY, "entry", RELAY),
        }


async def test_random_records(native_build: NativeBuild, tmp_path: Path) -> None:
    """Any combination of validity, flags and times that a record can have."""
    fill_bucket(tmp_path)
    chance = random.Random(7)
    async with both(native_build, tmp_path) as sides:
        inos = [ino for ino in await populate(sides) if sides.inode(ino) is not None]
        flags = [schema.META_KNOWN, schema.HAS_XATTR, schema.DATA_LOCAL, schema.UNPUBLISHED, 0]
        names = [b"one", b"sub", b"written", b"absent", b"plain", b"hard", b"\xff\xfe\x80", b"fifo", b"two"]
        for _ in range(1200):
            now = sides.clock.ns
            ino = chance.choice(inos)
            ahead = chance.choice([-1, 0, 1, 10**9, 59 * 10**9, 10**12, -(10**12)])
            old = sides.inode(ino)
            assert old is not None
            await sides.alter(
                ino,
                flags=(old.flags & (schema.DIR_LOCAL | schema.HAS_XATTR))
                | chance.choice(flags)
                | chance.choice(flags),
                valid_until_ns=chance.choice(
                    [now + ahead, schema.FOREVER_NS, 0, now + chance.randrange(10**11)]
                ),
                listed_until_ns=chance.choice([0, now + ahead, now + chance.randrange(60 * 10**9)])
                if old.is_dir
                else 0,
                mtime_ns=chance.choice([0, -1, 1, 2**63 - 1, -(2**63) + 1, chance.randrange(2**62)]),
                size_bytes=chance.choice([0, 1, 511, 512, 513, 5 * 2**40, 2**63 - 1]),
                uid=chance.choice([0, 1, 2**32 - 1]),
                generation=chance.randrange(2**64),
            )
            if chance.random() < 0.1:
                sides.at(now + chance.randrange(10**10))
            for _ in range(4):
                await check_lookup(sides, chance.choice(inos), chance.choice(names))
                await check_getattr(sides, chance.choice(inos))
            await check_opendir(sides, chance.choice(inos))
            await check_xattr(
                sides, chance.choice(inos), chance.choice([b"user.colour", b"user.x", b"system.x"])
            )
            inode = sides.inode(ino)
            if inode is not None and inode.is_dir and chance.random() < 0.3:
                await check_readdir(sides, ino, chance.choice([0, 1, 2, 30]), chance.choice([600, 4096]))


async def test_forget_reaches_the_engine_only_for_what_has_no_name(
    native_build: NativeBuild, tmp_path: Path
) -> None:
    async with both(native_build, tmp_path) as sides:
        kept = await sides.engine.write_file("kept", b"1")
        gone = await sides.engine.write_file("gone", b"2")
        assert sides.front.forget(gone.ino) == NO_REPLY
        await sides.engine.names.unlink(ROOT_INO, b"gone")
        assert sides.front.forget(kept.ino) == NO_REPLY
        assert sides.front.forget(gone.ino) == RELAY
        assert sides.front.batch_forget([kept.ino, ROOT_INO, 10**9]) == NO_REPLY
        assert sides.front.batch_forget([kept.ino, gone.ino]) == RELAY
        await sides.ops.forget([(gone.ino, 1)])
        assert sides.front.forget(gone.ino) == NO_REPLY  # reaped, as relaying it is for
        with pytest.raises(TierfsError):
            sides.engine.attributes.get(gone.ino)


async def test_large_directory_under_commits(native_build: NativeBuild, tmp_path: Path) -> None:
    """10,000 entries over many calls, each exactly once, while other names come and go among them."""
    async with both(native_build, tmp_path) as sides:
        engine = sides.engine
        directory = await make(sides, ROOT_INO, b"big", stat.S_IFDIR | 0o755)
        stable = [b"%05d" % number for number in range(10_000)]

        def create_all(txn: WriteTransaction) -> None:
            for name in stable:
                tree.create(
                    txn, directory.ino, name, mode=stat.S_IFREG | 0o644, uid=0, gid=0, now_ns=sides.clock.ns
                )

        await sides.change(create_all)
        passes, commits = 0, 0
        handle = sides.front.opendir(directory.ino)
        assert handle == answer_tool.FRONT_HANDLE | directory.ino

        async def keep_committing(cancel: trio.CancelScope) -> None:
            nonlocal commits
            with cancel:
                number = 0
                while True:
                    name, other = b"n%d" % number, b"m%d" % (number // 2)
                    await make(sides, directory.ino, name, stat.S_IFIFO | 0o600)
                    await engine.names.rename(directory.ino, name, directory.ino, other, 0)
                    if number % 3:
                        await engine.names.unlink(directory.ino, other)
                    number, commits = number + 1, commits + 3

        def list_once() -> list[Name]:
            return front_lists(sides, directory.ino, size=32768)

        def look_up(name: bytes) -> Entry | int:
            return sides.front.lookup(directory.ino, name)

        async with trio.open_nursery() as nursery:
            cancel = trio.CancelScope()
            nursery.start_soon(keep_committing, cancel)
            while passes < 3 or commits < 500:
                names = await trio.to_thread.run_sync(list_once)
                found = [name.name for name in names]
                # A name may be met twice: its file was removed behind the scan, and a new one made ahead of it.
                met = [(name.name, name.ino) for name in names]
                assert len(set(met)) == len(met)
                assert [name for name in found if name[:1] not in b".nm"] == stable
                for name in random.Random(passes).sample(stable, 50):
                    entry = await trio.to_thread.run_sync(look_up, name)
                    assert isinstance(entry, Entry)
                    assert stat.S_ISREG(entry.attributes.mode)
                for number in range(0, 50, 7):
                    flapping = await trio.to_thread.run_sync(look_up, b"m%d" % number)
                    assert flapping == -2 or isinstance(flapping, Entry)
                passes += 1
            cancel.cancel()
        await check_readdir(sides, directory.ino, size=32768)
        # Attributes cost the kernel more than names: at first it is told few, until somebody wants them.
        first = sides.front.readdir(directory.ino, handle, 0, 32768)
        assert isinstance(first, list)
        later = sides.front.readdir(directory.ino, handle, first[-1].cookie, 32768)
        assert isinstance(later, list)
        assert len(first) < 50 < len(later)


async def test_what_was_acknowledged_is_seen(native_build: NativeBuild, tmp_path: Path) -> None:
    """A look-up after the reply to a change has the change: the front's snapshot is never older."""
    async with both(native_build, tmp_path) as sides:
        for number in range(200):
            name = b"f%d" % number
            made = await make(sides, ROOT_INO, name, stat.S_IFIFO | 0o600)
            entry = sides.front.lookup(ROOT_INO, name)
            assert isinstance(entry, Entry)
            assert entry.nodeid == made.ino
            await sides.engine.names.unlink(ROOT_INO, name)
            assert sides.front.lookup(ROOT_INO, name) == -2


async def test_no_database(native_build: NativeBuild, tmp_path: Path) -> None:
    """The tool, as the front, says what is wrong and ends."""
    settings = settings_for(tmp_path)
    tool = AnswerTool(native_build.executable("answer-tool"), tmp_path / "nowhere", settings)
    assert tool._process.wait(timeout=30) == 1
    for pipe in (tool._process.stdin, tool._process.stdout):
        assert pipe is not None
        pipe.close()
