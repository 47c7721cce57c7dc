"""Random changes of files and names while the write-back works, with a slow store and with crashes.

An engine without a kernel on a directory. Every request that writes waits a random moment before it is done and
another before its answer arrives. The model is a tree of plain Python objects; whenever the write-back has
drained, the bucket must hold just what the model does, and at every write no other file may depend on the
object that is overwritten. Snapshots made meanwhile keep every byte of their moment, until they are deleted.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from tests.support.engine import ROOT_CALLER, Engine, running_engine, settings_for
from tests.support.watched_store import WatchedStore
from tierfs.control.protocol import SnapshotCreateRequest, SnapshotDeleteRequest
from tierfs.errors import Interrupted, StoreError, StoreUnavailable
from tierfs.fs.attributes import AttributeChange
from tierfs.fs.ranges import Ranges
from tierfs.mount.snapshots import SnapshotHandlers
from tierfs.namespace import publish
from tierfs.namespace.transaction import HISTORY_TABLES
from tierfs.store.base import ObjectStore
from tierfs.types import ROOT_INO
from tierfs.writeback import copying

SEEDS = [int(os.environ["TIERFS_TEST_SEED"])] if "TIERFS_TEST_SEED" in os.environ else list(range(8))
STEPS = 300
BLOCK = 128 * 1024
EXCHANGE = 2


@dataclass(eq=False)
class File:
    data: bytearray = field(default_factory=bytearray)


@dataclass(eq=False)
class Folder:
    entries: dict[str, Folder | File] = field(default_factory=dict)

    def files(self, above: str = "") -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for name, entry in self.entries.items():
            if isinstance(entry, Folder):
                found |= entry.files(f"{above}{name}/")
            else:
                found[above + name] = bytes(entry.data)
        return found

    def holds(self, other: Folder | File) -> bool:
        return any(
            entry is other or (isinstance(entry, Folder) and entry.holds(other))
            for entry in self.entries.values()
        )


class Run:
    """One sequence: carries every operation out on the engine and on the model."""

    def __init__(self, root: Path, seed: int, *, with_copies: bool = False) -> None:
        self.chance = random.Random(seed)
        self.slow = self.chance.choice([0.0, 0.002, 0.02, 0.1])
        self.settings = settings_for(root, upload_delay_s=self.chance.choice([0.0, 0.02, 0.2]))
        self.top = Folder()
        self.told: list[str] = []
        self.mistakes: list[str] = []
        self.snapshots: dict[bytes, dict[str, bytes]] = {}
        self.snapshots_made = 0
        self.with_snapshots = seed % 2
        self.with_copies = with_copies
        self.alive = False
        self.engine: Engine
        self.store: WatchedStore

    # the engine

    async def live(self, number: int) -> int:
        """From the start of an engine to its crash, or the end of the sequence. Returns the next step."""
        async with running_engine(self.settings, wrap=self._wrap) as self.engine:
            self.alive = True
            try:
                for step in range(number, STEPS):
                    await self.step()
                    if step % 40 == 39:
                        interruption = self.chance.choice(["crash", "crash", "drain", "none"])
                        self.told.append(f"-- {interruption}")
                        if interruption == "crash":
                            return step + 1
                        if interruption == "drain":
                            await self.check()
                await self.check()
                await self._delete_all_snapshots()
            finally:
                self.alive = False
        return STEPS

    def _wrap(self, store: ObjectStore) -> ObjectStore:
        self.store = WatchedStore(store)
        self.store.before = self._before
        self.store.after = lambda operation, key: time.sleep(self._pause_s())
        return self.store  # type: ignore[return-value]

    def _pause_s(self) -> float:
        return random.random() * self.slow if random.random() < 0.3 else 0.0

    def _before(self, operation: str, key: str) -> None:
        time.sleep(self._pause_s())
        if key.startswith(".tierfs/"):
            return
        try:
            trio.from_thread.run_sync(self._check_write, operation, key)
        except (trio.Cancelled, trio.RunFinishedError):
            # The engine has died. What it sent before may arrive, or not.
            if random.random() < 0.5:
                raise StoreUnavailable("never sent") from None

    def _check_write(self, operation: str, key: str) -> None:
        """Whoever has an object at ``key`` must be the one that writes it: only that one has claimed it."""
        if not self.alive:
            return
        with self.engine.parts.db.read() as txn:
            owner = publish.owner_of_key(txn, key)
            row = publish.object_of(txn, owner) if owner is not None else None
            dirty = publish.dirty_row(txn, owner) if owner is not None else None
        claimed = operation != "delete" and dirty is not None and key in dirty.claims
        if row is not None and key in dict(row.all_keys()) and not claimed:
            self.mistakes.append(f"{operation} {key}, where inode {owner} has its object")

    async def check(self) -> None:
        with trio.move_on_after(120) as scope:
            while not await self.engine.parts.publisher.draining.drain():
                await trio.sleep(0.05)
        if scope.cancelled_caught:
            pytest.fail("does not drain:\n" + "\n".join([*self._left(), *self.told[-60:]]))
        expected = self.top.files()
        found = {
            str(path.relative_to(self.engine.bucket)): path.read_bytes()
            for path in self.engine.bucket.rglob("*")
            if path.is_file() and not path.relative_to(self.engine.bucket).parts[0].startswith(".tierfs")
        }
        different = {key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key)}
        assert not different, f"{sorted(different)} differ after\n" + "\n".join(self.told[-60:])
        assert not self.mistakes, "\n".join([*self.mistakes, *self.told[-60:]])
        for name, files in self.snapshots.items():
            assert await self._read_snapshot(name) == files, f"{name!r} differs after\n" + "\n".join(
                self.told[-60:]
            )

    async def _read_snapshot(self, name: bytes) -> dict[str, bytes]:
        """Every file of a snapshot, as an application would read it."""
        names, files = self.engine.names, self.engine.files
        top = await names.lookup(ROOT_INO, b".tierfs")
        root = await names.lookup((await names.lookup(top.ino, b"snapshots")).ino, name)
        found: dict[str, bytes] = {}
        waiting = [("", root.ino)]
        while waiting:
            above, ino = waiting.pop()
            await names.open_directory(ino)
            for entry, _, inode in names.read_directory(ino, 0):
                path = above + entry.decode()
                if inode.is_dir:
                    waiting.append((path + "/", inode.ino))
                    continue
                number = await files.open(inode.ino, os.O_RDONLY, ROOT_CALLER)
                found[path] = await files.read(number, 0, inode.size_bytes + 1)
                await files.release(number)
        return found

    def _left(self) -> list[str]:
        with self.engine.parts.db.read() as txn:
            lines = [f"doomed {row}" for row in publish.doomed_entries(txn)[0]]
            for row in publish.iter_dirty(txn):
                keys, held = publish.key_of(txn, row.ino), publish.object_of(txn, row.ino)
                lines.append(
                    f"{row} wants {keys} has {held} {self.engine.parts.publisher.failures.get(row.ino)}"
                )
        return lines

    # operations

    def _folders(self) -> list[Folder]:
        found, waiting = [], [self.top]
        while waiting:
            folder = waiting.pop()
            found.append(folder)
            waiting += [entry for entry in folder.entries.values() if isinstance(entry, Folder)]
        return found

    def _path(self, wanted: Folder) -> list[str]:
        def search(folder: Folder) -> list[str] | None:
            if folder is wanted:
                return []
            for name, entry in folder.entries.items():
                if isinstance(entry, Folder) and (below := search(entry)) is not None:
                    return [name, *below]
            return None

        path = search(self.top)
        assert path is not None
        return path

    async def _ino(self, folder: Folder) -> int:
        ino = ROOT_INO
        for name in self._path(folder):
            ino = (await self.engine.names.lookup(ino, name.encode())).ino
        return ino

    def _place(self) -> tuple[Folder, str]:
        return self.chance.choice(self._folders()), self.chance.choice("abcd")

    def _taken(self) -> tuple[Folder, str] | None:
        places = [(folder, name) for folder in self._folders() for name in folder.entries]
        return self.chance.choice(places) if places else None

    async def step(self) -> None:
        kinds = {"write": 10, "patch": 6, "truncate": 6, "chmod": 2, "unlink": 6, "rename": 10, "exchange": 4}
        kinds |= {"link": 6, "mkdir": 4, "rmdir": 1, "sleep": 4}
        kinds |= {"snapshot": 2 * self.with_snapshots, "delete_snapshot": self.with_snapshots}
        kinds |= {"copy": 12 * self.with_copies}
        (kind,) = self.chance.choices(list(kinds), list(kinds.values()))
        await getattr(self, f"_{kind}")()

    def _tell(self, what: str, *places: tuple[Folder, str]) -> None:
        paths = ["/".join([*self._path(folder), name]) for folder, name in places]
        self.told.append(f"{what} {' '.join(paths)}")

    async def _write(self) -> None:
        folder, name = self._place()
        found = folder.entries.get(name)
        if isinstance(found, Folder):
            return
        data = self.chance.randbytes(self.chance.choice([0, 1, 100, BLOCK + 1, 3 * BLOCK]))
        self._tell(f"write {len(data)}", (folder, name))
        ino = await self._ino(folder)
        flags = os.O_RDWR | os.O_TRUNC
        if found is None:
            found = folder.entries[name] = File()
            number, _ = await self.engine.files.create(ino, name.encode(), 0o644, flags, ROOT_CALLER)
        else:
            inode = await self.engine.names.lookup(ino, name.encode())
            number = await self.engine.files.open(inode.ino, flags, ROOT_CALLER)
        found.data[:] = data
        await self.engine.files.write(number, 0, data)
        await self._close(number)

    async def _close(self, number: int) -> None:
        if self.chance.random() < 0.1:
            await trio.sleep(0.02)
        await self.engine.files.flush(number)
        await self.engine.files.release(number)

    async def _patch(self) -> None:
        place = self._taken()
        found = place[0].entries[place[1]] if place else None
        if place is None or not isinstance(found, File):
            return
        offset, data = self.chance.choice([0, 1000, BLOCK]), self.chance.randbytes(500)
        self._tell(f"patch {offset}", place)
        inode = await self.engine.names.lookup(await self._ino(place[0]), place[1].encode())
        number = await self.engine.files.open(inode.ino, os.O_RDWR, ROOT_CALLER)
        await self.engine.files.write(number, offset, data)
        found.data.extend(b"\0" * (offset + len(data) - len(found.data)))
        found.data[offset : offset + len(data)] = data
        await self._close(number)

    async def _truncate(self) -> None:
        place = self._taken()
        found = place[0].entries[place[1]] if place else None
        if place is None or not isinstance(found, File):
            return
        size = self.chance.choice([0, 1, 4095, BLOCK, BLOCK + 1000])
        self._tell(f"truncate {size}", place)
        await self._set(place, AttributeChange(size_bytes=size))
        found.data.extend(b"\0" * (size - len(found.data)))
        del found.data[size:]

    async def _chmod(self) -> None:
        place = self._taken()
        if place is not None:
            self._tell("chmod", place)
            await self._set(place, AttributeChange(mode=self.chance.choice([0o600, 0o644, 0o755])))

    async def _set(self, place: tuple[Folder, str], change: AttributeChange) -> None:
        inode = await self.engine.names.lookup(await self._ino(place[0]), place[1].encode())
        await self.engine.attributes.set(inode.ino, change, ROOT_CALLER)

    async def _copy(self) -> None:
        """All of a file into another one, by the store where it can; names change meanwhile."""
        old, new = self._taken(), self._place()
        source = old[0].entries[old[1]] if old else None
        target = new[0].entries.get(new[1])
        if old is None or not isinstance(source, File) or isinstance(target, Folder) or source is target:
            return
        self._tell("copy", old, new)
        files, ranges = self.engine.files, Ranges(self.engine.parts.services, self.engine.files)
        inode = await self.engine.names.lookup(await self._ino(old[0]), old[1].encode())
        await self.engine.parts.cache.evict(inode.content_id)
        reader = await files.open(inode.ino, os.O_RDONLY, ROOT_CALLER)
        parent, name = await self._ino(new[0]), new[1].encode()
        flags = os.O_RDWR | os.O_TRUNC
        if target is None:
            target = new[0].entries[new[1]] = File()
            writer, copied = await files.create(parent, name, 0o644, flags, ROOT_CALLER)
        else:
            copied = await self.engine.names.lookup(parent, name)
            writer = await files.open(copied.ino, flags, ROOT_CALLER)
        # What is written, renamed or removed meanwhile is another matter: both are open.
        target.data[:] = source.data
        interrupts = self.engine.parts.services.interrupts
        tasks: list[trio.lowlevel.Task] = []
        is_interrupted = False

        async def copy() -> None:
            nonlocal is_interrupted
            tasks.append(trio.lowlevel.current_task())
            done = 0
            try:
                while some := await ranges.copy(reader, done, writer, done, len(target.data) - done):
                    done += some
            except Interrupted:
                is_interrupted = True
            interrupts.forget(tasks[0])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(copy)
            await trio.sleep(self.chance.choice([0.0, 0.002]))
            if self.chance.random() < 0.5:
                await getattr(self, self.chance.choice(["_rename", "_exchange", "_link", "_unlink"]))()
            if self.chance.random() < 0.2 and tasks:
                interrupts.interrupt(tasks[0])
        if is_interrupted:
            self.told.append("interrupted")
            await self.engine.attributes.set(copied.ino, AttributeChange(size_bytes=0), ROOT_CALLER)
            del target.data[:]
        await files.release(reader)
        await self._close(writer)

    async def _unlink(self) -> None:
        place = self._taken()
        if place is None or isinstance(place[0].entries[place[1]], Folder):
            return
        self._tell("unlink", place)
        await self.engine.names.unlink(await self._ino(place[0]), place[1].encode())
        del place[0].entries[place[1]]

    async def _rename(self) -> None:
        old, new = self._taken(), self._place()
        if old is None:
            return
        moved, replaced = old[0].entries[old[1]], new[0].entries.get(new[1])
        if moved is replaced or isinstance(replaced, Folder):
            return
        if isinstance(moved, Folder) and (replaced is not None or new[0] is moved or moved.holds(new[0])):
            return
        self._tell("rename", old, new)
        await self.engine.names.rename(
            await self._ino(old[0]), old[1].encode(), await self._ino(new[0]), new[1].encode(), 0
        )
        del old[0].entries[old[1]]
        new[0].entries[new[1]] = moved

    async def _exchange(self) -> None:
        old, new = self._taken(), self._taken()
        if old is None or new is None:
            return
        first, second = old[0].entries[old[1]], new[0].entries[new[1]]
        for one, other, place in ((first, second, new), (second, first, old)):
            if isinstance(one, Folder) and (one.holds(other) or place[0] is one or one.holds(place[0])):
                return
        if first is second:
            return
        self._tell("exchange", old, new)
        await self.engine.names.rename(
            await self._ino(old[0]), old[1].encode(), await self._ino(new[0]), new[1].encode(), EXCHANGE
        )
        old[0].entries[old[1]], new[0].entries[new[1]] = second, first

    async def _link(self) -> None:
        old, new = self._taken(), self._place()
        if old is None or new[1] in new[0].entries or isinstance(old[0].entries[old[1]], Folder):
            return
        self._tell("link", old, new)
        inode = await self.engine.names.lookup(await self._ino(old[0]), old[1].encode())
        await self.engine.names.link(inode.ino, await self._ino(new[0]), new[1].encode())
        new[0].entries[new[1]] = old[0].entries[old[1]]

    async def _mkdir(self) -> None:
        folder, name = self._place()
        if name in folder.entries or len(self._path(folder)) > 2:
            return
        self._tell("mkdir", (folder, name))
        await self.engine.names.create(await self._ino(folder), name.encode(), 0o040755, ROOT_CALLER)
        folder.entries[name] = Folder()

    async def _rmdir(self) -> None:
        place = self._taken()
        found = place[0].entries[place[1]] if place else None
        if place is None or not isinstance(found, Folder) or found.entries:
            return
        self._tell("rmdir", place)
        await self.engine.names.rmdir(await self._ino(place[0]), place[1].encode())
        del place[0].entries[place[1]]

    async def _snapshot(self) -> None:
        name = b"s%d" % self.snapshots_made
        self.snapshots_made += 1
        self.told.append(f"snapshot {name!r}")
        for _ in range(100):
            try:
                await SnapshotHandlers(self.engine.parts).create(
                    SnapshotCreateRequest(name=name), lambda progress: None
                )
                break
            except StoreError:
                await trio.sleep(0.05)
        self.snapshots[name] = self.top.files()

    async def _delete_snapshot(self) -> None:
        if self.snapshots:
            name = self.chance.choice(sorted(self.snapshots))
            del self.snapshots[name]
            self.told.append(f"delete snapshot {name!r}")
            await SnapshotHandlers(self.engine.parts).delete(
                SnapshotDeleteRequest(name=name), lambda progress: None
            )

    async def _delete_all_snapshots(self) -> None:
        """Nothing is left of them: no old record, no copy of an object."""
        while self.snapshots:
            await self._delete_snapshot()
        kept = self.engine.bucket / ".tierfs" / "snapshots"  # the directory goes with the last of them
        with trio.fail_after(60):
            while self._history_rows() or sum(len(names) for _, _, names in os.walk(kept)):
                await trio.sleep(0.02)
        await self.check()

    def _history_rows(self) -> list[str]:
        with self.engine.parts.db.read() as txn:
            return [name for name in HISTORY_TABLES if txn.entries(getattr(txn.tables, name))]

    async def _sleep(self) -> None:
        await trio.sleep(self.chance.choice([0.0, 0.01, 0.05]))


@pytest.mark.parametrize("seed", SEEDS)
async def test_the_bucket_comes_to_hold_what_the_names_say(tmp_path: Path, seed: int) -> None:
    await carried_out(Run(tmp_path, seed))


@pytest.mark.parametrize("seed", SEEDS[:2])
async def test_the_same_with_copies_that_the_store_makes(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "MIN_BYTES", 1)
    await carried_out(Run(tmp_path, seed, with_copies=True))


async def carried_out(run: Run) -> None:
    number = 0
    while number < STEPS:
        number = await run.live(number)
        # Tasks ended where they were; requests that are under way still arrive.
        await trio.to_thread.run_sync(run.store.wait_until_idle)
