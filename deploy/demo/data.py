"""The demo's data set: made from a seed, and described by a manifest that readers check against.

2,000 samples of 4 to 100 KiB, 4 tar shards, one large file, as a training job has them. Contents do not
compress. The manifest lies outside the data set, so nothing that the file system did can change it.

As a program: ``python data.py DIRECTORY MANIFEST``.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import tarfile
from dataclasses import asdict, dataclass
from pathlib import Path

import console
import xxhash
from rich.progress import Progress

KIB = 1024
MIB = 1024 * KIB
CHUNK_BYTES = MIB
SEED = 20240607
_FIXED_TIME_S = 1_700_000_000
"""The time stamp of tar members: the same seed gives the same bytes."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the data set. ``path`` is relative to it; ``digest`` is xxh3_128 in hex."""

    path: str
    kind: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to make."""

    samples: int = 2000
    sample_min_bytes: int = 4 * KIB
    sample_max_bytes: int = 100 * KIB
    shards: int = 4
    members_per_shard: int = 400
    large_bytes: int = 256 * MIB


class _Recorder:
    """A new file that knows the digest and the size of what was written to it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "wb")  # noqa: SIM115 - closed in __exit__
        self._digest = xxhash.xxh3_128()
        self.size_bytes = 0

    def __enter__(self) -> _Recorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        self.size_bytes += len(data)
        return self._file.write(data)

    def entry(self, path: str, kind: str) -> Entry:
        return Entry(path, kind, self.size_bytes, self._digest.hexdigest())


def make(directory: Path, plan: Plan, progress: Progress | None = None) -> list[Entry]:
    """Write the data set below ``directory``, which may be a mountpoint."""
    numbers = random.Random(SEED)
    entries: list[Entry] = []
    expected = plan.samples * (plan.sample_min_bytes + plan.sample_max_bytes) // 2
    total = expected + plan.shards * plan.members_per_shard * 52 * KIB + plan.large_bytes
    task = progress.add_task("sample data set", total=total) if progress else None

    def finished(recorder: _Recorder, path: str, kind: str) -> None:
        entries.append(recorder.entry(path, kind))
        if progress is not None and task is not None:
            progress.advance(task, recorder.size_bytes)

    for index in range(plan.samples):
        path = f"samples/{index % 20:02d}/{index:05d}.bin"
        with _Recorder(directory / path) as recorder:
            recorder.write(numbers.randbytes(numbers.randint(plan.sample_min_bytes, plan.sample_max_bytes)))
        finished(recorder, path, "sample")
    for index in range(plan.shards):
        path = f"shards/train-{index:04d}.tar"
        with _Recorder(directory / path) as recorder:
            _write_shard(recorder, index, plan, numbers)
        finished(recorder, path, "shard")
    path = "large/embeddings.bin"
    with _Recorder(directory / path) as recorder:
        for offset in range(0, plan.large_bytes, CHUNK_BYTES):
            recorder.write(numbers.randbytes(min(CHUNK_BYTES, plan.large_bytes - offset)))
    finished(recorder, path, "large")
    if progress is not None and task is not None:
        progress.update(task, completed=total)
    return entries


def _write_shard(file: _Recorder, shard: int, plan: Plan, numbers: random.Random) -> None:
    """One shard in WebDataset's layout: members that share a stem make up one sample."""
    with tarfile.open(fileobj=file, mode="w|") as archive:  # type: ignore[call-overload]
        for member in range(plan.members_per_shard):
            size = numbers.randint(plan.sample_min_bytes, plan.sample_max_bytes)
            for suffix, body in ((".bin", numbers.randbytes(size)), (".cls", b"%d" % (member % 10))):
                info = tarfile.TarInfo(f"{shard:04d}-{member:06d}{suffix}")
                info.size, info.mtime = len(body), _FIXED_TIME_S
                archive.addfile(info, io.BytesIO(body))


def save_manifest(path: Path, entries: list[Entry]) -> None:
    path.write_text(json.dumps([asdict(entry) for entry in entries]), encoding="utf-8")


def load_manifest(path: Path) -> list[Entry]:
    return [Entry(**fields) for fields in json.loads(path.read_text(encoding="utf-8"))]


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the demo's data set.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("manifest", type=Path)
    arguments = parser.parse_args()
    console.stop_on_signals()
    with console.progress() as progress:
        entries = make(arguments.directory, Plan(), progress)
    save_manifest(arguments.manifest, entries)
    size_bytes = sum(entry.size_bytes for entry in entries)
    console.say(f"{len(entries)} files, {size_bytes / MIB:.0f} MiB in {arguments.directory}")


if __name__ == "__main__":
    main()
