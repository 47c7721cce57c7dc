"""Data for a load: files whose names, sizes and bytes follow from a seed: two targets get the same."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

PIECE_BYTES = 1024 * 1024
STAMP_BYTES = 16


@dataclass(frozen=True, slots=True)
class FileSet:
    """``entries``: relative path and size of each file; ``root``: where they are. Directories come first."""

    root: str
    entries: tuple[tuple[str, int], ...]
    seed: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.entries)

    def paths(self) -> list[str]:
        return [os.path.join(self.root, name) for name, _ in self.entries]

    def directories(self) -> list[str]:
        """Relative, parents before children; without the root itself."""
        found: dict[str, None] = {}
        for name, _ in self.entries:
            parts = name.split("/")[:-1]
            for depth in range(1, len(parts) + 1):
                found["/".join(parts[:depth])] = None
        return list(found)

    def at(self, root: str) -> FileSet:
        """The same files seen from elsewhere: through another mount, below a prefix..."""
        return replace(self, root=root)

    def first(self, count: int) -> FileSet:
        return replace(self, entries=self.entries[:count])

    def order(self, epoch: int) -> list[int]:
        """The shuffled order of an epoch, the same for a seed."""
        indices = list(range(len(self.entries)))
        random.Random(f"{self.seed} {epoch}").shuffle(indices)
        return indices


def small_files(
    root: str, count: int, *, low_bytes: int, high_bytes: int, per_directory: int = 1000, seed: int = 0
) -> FileSet:
    """``count`` files of sizes spread evenly between the two, in directories of ``per_directory``."""
    sizes = random.Random(f"{seed} sizes")
    entries = tuple(
        (f"d{number // per_directory:04d}/f{number:07d}.bin", sizes.randint(low_bytes, high_bytes))
        for number in range(count)
    )
    return FileSet(root, entries, seed)


def large_files(root: str, count: int, size_bytes: int, *, stem: str = "shard", seed: int = 0) -> FileSet:
    """``count`` files of one size in the root itself."""
    return FileSet(root, tuple((f"{stem}-{number:05d}.bin", size_bytes) for number in range(count)), seed)


class Content:
    """The bytes of a file set: random, so that nothing compresses or de-duplicates them."""

    def __init__(self, seed: int) -> None:
        self._piece = random.Random(f"{seed} content").randbytes(PIECE_BYTES)

    def piece(self, number: int, offset: int, length: int) -> bytes:
        """``length`` bytes (1 MiB at most) of file ``number`` at a multiple of 1 MiB."""
        stamp = (number << 64 | offset).to_bytes(STAMP_BYTES, "little")
        return (stamp + self._piece[STAMP_BYTES:length])[:length]

    def whole(self, number: int, size_bytes: int) -> bytes:
        return b"".join(
            self.piece(number, offset, min(PIECE_BYTES, size_bytes - offset))
            for offset in range(0, size_bytes, PIECE_BYTES)
        )


def make_files(
    files: FileSet,
    *,
    stop_s: float | None = None,
    sync: bool = True,
    progress: Callable[[int], None] | None = None,
) -> FileSet:
    """Write them; returns those that were written, the last one perhaps shorter.

    ``stop_s`` (``time.monotonic``): little more than a piece of 1 MiB is written after it. ``progress`` gets
    bytes as they are written. With ``sync`` they are on the device at the end, so that their pages can be
    dropped. Raises OSError.
    """
    os.makedirs(files.root, exist_ok=True)
    for directory in files.directories():
        os.makedirs(os.path.join(files.root, directory), exist_ok=True)
    content = Content(files.seed)
    made: list[tuple[str, int]] = []
    for number, (name, size) in enumerate(files.entries):
        path = os.path.join(files.root, name)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        written = 0
        try:
            for offset in range(0, size, PIECE_BYTES):
                piece = memoryview(content.piece(number, offset, min(PIECE_BYTES, size - offset)))
                written += len(piece)
                while piece:
                    piece = piece[os.write(fd, piece) :]
                if progress is not None:
                    progress(min(PIECE_BYTES, size - offset))
                if stop_s is not None and time.monotonic() > stop_s:
                    break
            if sync:
                os.fdatasync(fd)
        finally:
            os.close(fd)
        made.append((name, written))
        if stop_s is not None and time.monotonic() > stop_s:
            break
    return replace(files, entries=tuple(made))


def share(items: Sequence[int], workers: int) -> list[list[int]]:
    """``items`` dealt out to ``workers``, as a distributed sampler does: every ``workers``-th to one."""
    return [list(items[start::workers]) for start in range(workers) if items[start::workers]]
