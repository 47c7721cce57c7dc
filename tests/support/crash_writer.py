"""A writer that keeps a journal of what was acknowledged, and the check of it after a crash.

Run as a program it works below a directory until a system call fails::

    python -m tests.support.crash_writer DIRECTORY JOURNAL SEED

The journal lies outside the mount. ``begin`` goes in before a version of a slot is written, ``done`` after
the last fsync that makes it durable returned. So after a crash a slot must hold the last ``done`` version, or
one that was begun after it (more than one, if each was killed before it was done); where a slot is replaced by
rename, wholly one of them.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path

SLOTS = 6
PAGE_BYTES = 4096


def size_of(slot: int, version: int) -> int:
    """In-place slots keep their size; the others change it with each version."""
    if is_in_place(slot):
        return 300_000
    return random.Random(slot * 1_000_003 + version).choice([0, 1, 5000, 131_072, 200_001, 400_000])


def is_in_place(slot: int) -> bool:
    return slot % 3 == 0


def page_of(slot: int, version: int, number: int) -> bytes:
    seed = f"{slot}/{version}/{number}".encode()
    return hashlib.blake2b(seed, digest_size=64).digest() * (PAGE_BYTES // 64)


def content_of(slot: int, version: int) -> bytes:
    size = size_of(slot, version)
    pages = b"".join(page_of(slot, version, n) for n in range(-(-size // PAGE_BYTES)))
    return pages[:size]


def sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def work(directory: Path, journal: Path, seed: int) -> None:
    """Write versions until something fails. Goes on from where the journal ends."""
    chance = random.Random(seed)
    done, begun = read_journal(journal)
    log = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    latest = [max(done.get(slot, 0), begun.get(slot, 0)) for slot in range(SLOTS)]
    while True:
        slot = chance.randrange(SLOTS)
        version = latest[slot] = latest[slot] + 1
        os.write(log, f"begin {slot} {version}\n".encode())
        path = directory / f"slot{slot}"
        target = path if is_in_place(slot) else directory / f"tmp-{slot}-{version}"
        handle = os.open(target, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            write_all(handle, content_of(slot, version))
            os.fsync(handle)
        finally:
            os.close(handle)
        if target != path:
            os.rename(target, path)
        sync_directory(directory)
        os.write(log, f"done {slot} {version}\n".encode())


def read_journal(journal: Path) -> tuple[dict[int, int], dict[int, int]]:
    """(last version acknowledged, last version begun) of each slot."""
    done: dict[int, int] = {}
    begun: dict[int, int] = {}
    if journal.exists():
        for line in journal.read_text().splitlines():
            word, slot, version = line.split()
            (done if word == "done" else begun)[int(slot)] = int(version)
    return done, begun


@dataclass(frozen=True, slots=True)
class Verdict:
    acknowledged: int
    problems: list[str]


def verify(directory: Path, journal: Path) -> Verdict:
    """Compare what is there with what was acknowledged; see the module docstring."""
    done, begun = read_journal(journal)
    problems = []
    for slot in range(SLOTS):
        path = directory / f"slot{slot}"
        versions = list(range(done.get(slot, 0), begun.get(slot, 0) + 1))
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            if slot in done:
                problems.append(f"slot {slot}: acknowledged version {done[slot]} is gone")
            continue
        if is_in_place(slot):
            problems += _torn_pages(slot, data, versions, acknowledged=slot in done)
        elif data not in [content_of(slot, version) for version in versions if version]:
            problems.append(f"slot {slot}: {len(data)} bytes that are none of the versions {versions}")
    return Verdict(acknowledged=len(done), problems=problems)


def _torn_pages(slot: int, data: bytes, versions: list[int], *, acknowledged: bool) -> list[str]:
    if acknowledged and len(data) != size_of(slot, 1):
        return [f"slot {slot}: {len(data)} bytes instead of {size_of(slot, 1)}"]
    problems = []
    for number in range(-(-len(data) // PAGE_BYTES)):
        page = data[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]
        allowed = [page_of(slot, version, number)[: len(page)] for version in versions if version]
        if not acknowledged:
            allowed.append(bytes(len(page)))
        if page not in allowed:
            problems.append(f"slot {slot}: page {number} is of none of the versions {versions}")
    return problems[:3]


if __name__ == "__main__":
    try:
        work(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    except OSError as failure:
        print(failure, file=sys.stderr)
