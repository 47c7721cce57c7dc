"""A directory as target: of a local disk, of any mount, of a tierfs mount."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from tierfs.bench import caches, loops, mounted, result, space
from tierfs.bench.files import FileSet, make_files
from tierfs.bench.mounted import TierfsMount
from tierfs.bench.processes import Task
from tierfs.bench.target import DIRECTORY, MOUNT, PLACE_PREFIX, Tick
from tierfs.errors import ConfigError, ControlError
from tierfs.mountpoint import MountInfo, canonical, is_below, mounts

MARKER = "made-by-tierfs-bench"
SETTLE_S = 1.0
CLOSE_S = 5.0
CLOSE_AGAIN_S = 0.2


class DirectoryTarget:
    """See ``BenchTarget``. ``parent`` must exist; the place is made below it."""

    def __init__(self, parent: str) -> None:
        self.parent = canonical(parent)
        self.kind = DIRECTORY
        self.ways: tuple[str, ...] = loops.WAYS
        self.cold = ""
        self.mount: TierfsMount | None = None
        self._place: str | None = None
        self._marker = ""
        self._made: set[str] = set()
        self._system: MountInfo | None = None

    @property
    def place(self) -> str:
        assert self._place is not None, "not opened"
        return self._place

    def open(self, needed_bytes: int) -> list[str]:
        if not os.path.isdir(self.parent):
            problem = "is not a directory" if os.path.lexists(self.parent) else "does not exist"
            raise ConfigError(f"TARGET: {self.parent} {problem}")
        notes = []
        found = mounted.find(self.parent)
        if isinstance(found, TierfsMount):
            self.kind, self.mount = MOUNT, found
            tiers_bytes = found.tiers_bytes()
            if tiers_bytes < needed_bytes:
                notes.append(
                    f"the tiers hold {tiers_bytes / 1024**2:,.0f} MiB, and up to "
                    f"{needed_bytes / 1024**2:,.0f} MiB are read again and again: not all of what is called "
                    "warm is local"
                )
        elif found:
            notes.append(f"measured as a plain directory, its tierfs engine cannot be asked: {found}")
        self._system = _file_system(self.parent)
        self.cold = self._what_cold_is()
        space.check(self.parent, needed_bytes)
        notes += [
            f"{left} is left from a run that was killed; remove it when nothing uses it"
            for left in _left_behind(self.parent)
        ]
        place = os.path.join(self.parent, PLACE_PREFIX + secrets.token_hex(6))
        try:
            os.mkdir(place, 0o700)
        except OSError as error:
            raise ConfigError(
                f"TARGET: cannot make a directory in {self.parent}: {error.strerror}"
            ) from error
        self._place = place
        self._marker = f"process {os.getpid()}, started {time.time():.0f}\n"
        with open(os.path.join(place, MARKER), "x", encoding="ascii") as file:
            file.write(self._marker)
        return notes

    def describe(self) -> result.Target:
        system = self._system
        details = {}
        if self.mount is not None:
            details = self.mount.details()
        shown = f"{system.fstype} on {system.source}" if system is not None else ""
        return result.Target(name=self.parent, kind=self.kind, file_system=shown, details=details)

    def make(self, files: FileSet, *, stop_s: float, tick: Tick) -> FileSet:
        self._made.update(files.paths())
        written_s = stop_s
        if self.mount is not None:
            written_s -= max(stop_s - time.monotonic(), 0.0) / 2  # the other half is for the uploads
        made = make_files(files, stop_s=written_s, sync=False, progress=lambda _: tick())
        if self.mount is None:
            caches.write_back(made.paths())  # or their pages could not be dropped
            return made
        return self._stored(made, max(stop_s - time.monotonic(), SETTLE_S), tick)

    def _stored(self, files: FileSet, limit_s: float, tick: Tick) -> FileSet:
        """Those that the store has after that time, so that they can be made cold; the others are removed.

        All of them if it has none: then only warm reads can be measured.
        """
        if self.settle(limit_s=limit_s, tick=tick) is None:
            return files
        entries = tuple(
            entry
            for entry, path in zip(files.entries, files.paths(), strict=True)
            if not mounted.is_dirty(path)
        )
        if not entries:
            return files
        kept = replace(files, entries=entries)
        for path in set(files.paths()) - set(kept.paths()):
            os.unlink(path)
        return kept

    def remove(self, files: FileSet, *, tick: Tick) -> None:
        for path in files.paths():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            tick()
        for directory in reversed(files.directories()):
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(os.path.join(files.root, directory))
        with contextlib.suppress(FileNotFoundError):
            if os.path.realpath(files.root) != os.path.realpath(self.place):
                os.rmdir(files.root)

    def settle(self, *, limit_s: float, tick: Tick) -> str | None:
        if self.mount is None:
            return None
        tick()
        reply = self.mount.flush(self.place, limit_s)
        if reply.failed:
            return f"uploads failed: {reply.failed[0].message}"
        if reply.remaining_files:
            return f"{reply.remaining_files} files were not in the store after {limit_s:.0f} s"
        return None

    def make_cold(self, files: FileSet, *, limit_s: float, tick: Tick) -> str | None:
        if self.mount is None:
            caches.drop(files.paths())
            return None
        unsettled = self.settle(limit_s=limit_s, tick=tick)
        if unsettled:
            return unsettled
        caches.drop(files.paths())
        try:
            failed = self.mount.evict(files.paths(), limit_s)
        except ControlError as error:
            return f"eviction failed: {error}"
        return f"{len(failed)} files were not evicted: {failed[0]}" if failed else None

    def cpu_s(self) -> dict[str, float]:
        return self.mount.cpu_s() if self.mount is not None else {}

    def close(self, tick: Tick) -> list[str]:
        """Only names that were made here are unlinked; a directory with anything else in it stays."""
        if self._place is None:
            return []
        # A mount may show once more what an upload that was under way has just finished.
        stop_s = time.monotonic() + (CLOSE_S if self.mount is not None else 0.0)
        while (left := self._sweep(tick)) and time.monotonic() < stop_s:
            time.sleep(CLOSE_AGAIN_S)
        if not left:
            self._place = None
        return left

    def _sweep(self, tick: Tick) -> list[str]:
        """From the leaves to the place itself; what stays, and why."""
        left: list[str] = []
        known = {os.path.join(self.place, MARKER), *self._made}

        def attempt(call: Callable[[str], None], path: str) -> None:
            try:
                call(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno != errno.ENOTEMPTY or not left:  # else something in it is named already
                    left.append(f"{path} stays: {error.strerror}")

        for parent, _, names in os.walk(self.place, topdown=False):
            for name in names:
                path = os.path.join(parent, name)
                if path in known:
                    attempt(os.unlink, path)
                else:
                    left.append(f"{path} stays: it was not made here")
                tick()
            attempt(os.rmdir, parent)
        return left

    # -- tasks

    def read_files(self, files: FileSet, which: Sequence[int], *, repeat: bool = False) -> Task:
        return loops.read_files(*_chosen(files, which), repeat=repeat)

    def read_streams(
        self, files: FileSet, which: Sequence[int], *, block_bytes: int, way: str, repeat: bool = False
    ) -> Task:
        return loops.read_streams(*_chosen(files, which), block_bytes=block_bytes, way=way, repeat=repeat)

    def read_random(self, files: FileSet, *, block_bytes: int, way: str, seed: int, chain: int = 1) -> Task:
        paths, sizes = _chosen(files, range(len(files.entries)))
        return loops.read_random(paths, sizes, block_bytes=block_bytes, way=way, seed=seed, chain=chain)

    def write_file(self, files: FileSet, which: int) -> Task:
        (path,), (size,) = _chosen(files, [which])
        self._made.add(path)
        os.makedirs(files.root, exist_ok=True)
        return loops.write_file(path, size)

    def walk(self, files: FileSet) -> Task:
        return loops.walk_tree(files.root, rounds=None)

    # -- about the place

    def _what_cold_is(self) -> str:
        if self.mount is not None:
            return (
                "not in any tier (evicted by the engine) and not in the kernel's page cache: the data come "
                "from the store. Names and attributes stay known."
            )
        text = (
            "not in this kernel's page cache: dropped for each file with posix_fadvise. What the disk, or a "
            "server behind it, caches stays."
        )
        kind = self._system.fstype if self._system is not None else ""
        if kind in ("tmpfs", "ramfs"):
            return f"does not exist on {kind}: it is memory, and every read is warm."
        if kind.startswith("fuse") and kind != "fuseblk":
            text += f" What the {kind} daemon caches by itself stays too: it cannot be told to forget."
        return text


def _chosen(files: FileSet, which: Sequence[int]) -> tuple[list[str], list[int]]:
    entries = [files.entries[index] for index in which]
    return [os.path.join(files.root, name) for name, _ in entries], [size for _, size in entries]


def _file_system(path: str) -> MountInfo | None:
    here = canonical(path)
    best = None
    for info in mounts():
        if is_below(here, info.path) and (best is None or len(info.path) >= len(best.path)):
            best = info
    return best


def _left_behind(parent: str) -> list[str]:
    """Places of runs whose process is gone."""
    found = []
    for name in os.listdir(parent):
        marker = os.path.join(parent, name, MARKER)
        if name.startswith(PLACE_PREFIX) and os.path.isfile(marker):
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(marker, encoding="ascii") as file:
                    pid = int(file.read(100).split(",")[0].split()[1])
                if not os.path.exists(f"/proc/{pid}"):
                    found.append(os.path.join(parent, name))
    return found
