"""Epochs over the data set through a mountpoint: shuffled samples, tar shards, one large file.

Every byte that is read is checked against the manifest.
"""

from __future__ import annotations

import os
import tarfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import xxhash
from data import CHUNK_BYTES, MIB, Entry
from loader import DataLoader
from rich.progress import Progress

WORKERS = 4
_ORDER_SEED = 7
_BATCH_SIZES = {"sample": 32, "shard": 1, "large": 1}


class Damaged(Exception):
    """What was read is not what was written. The message names the files."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one part of an epoch, or all of it, read and how long that took."""

    files: int
    size_bytes: int
    seconds: float

    @property
    def mib_per_s(self) -> float:
        return self.size_bytes / MIB / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class Epoch:
    """``parts`` by kind of file, in the order of reading."""

    parts: dict[str, Reading] = field(default_factory=dict)

    @property
    def total(self) -> Reading:
        parts = self.parts.values()
        return Reading(
            sum(part.files for part in parts),
            sum(part.size_bytes for part in parts),
            sum(part.seconds for part in parts),
        )


class FileDataset:
    """Files below ``root``; an item is the index of the file, and the size and digest of what was read."""

    def __init__(self, root: Path, entries: Sequence[Entry]) -> None:
        self._root = root
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> tuple[int, int, str]:
        entry = self._entries[index]
        with open(self._root / entry.path, "rb", buffering=0) as file:
            digest = _Digest(file.fileno())
            if entry.kind == "shard":
                _read_members(digest)
            while digest.read(CHUNK_BYTES):
                pass
            # The next epoch shall be served by the tiers, as that of a real data set that is larger than
            # the memory of the machine; this one is small enough for the kernel to keep it.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return index, digest.size_bytes, digest.hexdigest()


class _Digest:
    """A file for reading that knows the digest of what went through."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._digest = xxhash.xxh3_128()
        self.size_bytes = 0

    def read(self, size_bytes: int) -> bytes:
        data = os.read(self._descriptor, size_bytes)
        self._digest.update(data)
        self.size_bytes += len(data)
        return data

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _read_members(file: _Digest) -> None:
    """As a tar-based dataset does: one pass, each member read whole."""
    with tarfile.open(fileobj=file, mode="r|", bufsize=CHUNK_BYTES) as archive:  # type: ignore[call-overload]
        for member in archive:
            body = archive.extractfile(member)
            if body is None or len(body.read()) != member.size:
                raise Damaged(f"{member.name}: a member of a shard is cut short")


class EpochReader:
    """Reads epochs with the same workers. A context manager."""

    def __init__(self, root: Path, entries: Sequence[Entry]) -> None:
        self._by_kind: dict[str, list[Entry]] = {}
        for entry in entries:
            self._by_kind.setdefault(entry.kind, []).append(entry)
        self._loaders = {
            kind: DataLoader(
                FileDataset(root, files),
                batch_size=_BATCH_SIZES[kind],
                worker_count=min(WORKERS, len(files)),
                seed=_ORDER_SEED,
            )
            for kind, files in self._by_kind.items()
        }
        self._running = ExitStack()

    def __enter__(self) -> EpochReader:
        with ExitStack() as starting:
            for loader in self._loaders.values():
                starting.enter_context(loader)
            self._running = starting.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._running.close()

    def read(self, number: int, progress: Progress) -> Epoch:
        """Epoch ``number`` (from 1). Raises ``Damaged`` if any file is not as the manifest has it."""
        epoch = Epoch()
        damaged: list[str] = []
        total = sum(entry.size_bytes for files in self._by_kind.values() for entry in files)
        task = progress.add_task(f"epoch {number}", total=total)
        for kind, loader in self._loaders.items():
            files = self._by_kind[kind]
            seen = size_bytes = 0
            started = time.monotonic()
            for batch in loader.epoch(number):
                for index, read_bytes, digest in batch:
                    seen += 1
                    size_bytes += read_bytes
                    if digest != files[index].digest:
                        damaged.append(files[index].path)
                    progress.advance(task, read_bytes)
            epoch.parts[kind] = Reading(seen, size_bytes, time.monotonic() - started)
            if seen != len(files):
                raise Damaged(f"epoch {number}: {seen} of {len(files)} files of kind {kind} were read")
        if damaged:
            raise Damaged(f"epoch {number}: {len(damaged)} files differ from the manifest: {damaged[:5]}")
        return epoch
