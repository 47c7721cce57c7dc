"""Reads of what is not complete in a tier: the engine says where the bytes are, the front takes them from there."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from tests.support.front import kill_engine
from tests.support.mount import Mounted, MountFactory, wait_until
from tests.support.page_cache import drop_pages

pytestmark = pytest.mark.needs_fuse

KIB = 1024
MIB = 1024 * 1024
BIG = 40 * MIB + 1000
DATA = random.Random(11).randbytes(MIB) * 40 + random.Random(12).randbytes(1000)


@pytest.fixture
def mounted(native_mounts: MountFactory) -> Mounted:
    mounted = native_mounts(options=("--read-ahead", "0"), front="native")
    (mounted.store_dir / "big").write_bytes(DATA)
    wait_until((mounted.path / "big").exists, "the name")
    return mounted


def placed(mounted: Mounted) -> int:
    return int(mounted.status()["front"]["placed"])


def tier_file(mounted: Mounted) -> Path:
    return max((mounted.base / "tier").rglob("objects/??/*"), key=lambda path: path.stat().st_size)


def test_a_cold_file_is_read_where_it_lies(mounted: Mounted) -> None:
    assert (mounted.path / "big").read_bytes() == DATA
    assert placed(mounted) > 10


def test_what_is_not_in_the_page_cache_is_the_engines(mounted: Mounted) -> None:
    fd = os.open(mounted.path / "big", os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # the kernel asks for what is read, and no more
    try:
        assert os.pread(fd, 2 * MIB, 0) == DATA[: 2 * MIB]
        before = placed(mounted)
        path = tier_file(mounted)
        with path.open("rb") as file:
            drop_pages(file.fileno())
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(fd, 128 * KIB, 0) == DATA[: 128 * KIB]
        assert placed(mounted) == before
        assert os.pread(fd, 2 * MIB, 0) == DATA[: 2 * MIB]
    finally:
        os.close(fd)


def test_what_does_not_match_is_asked_for_again(mounted: Mounted) -> None:
    """As if the blocks had been evicted, and others been put there, between the engine's answer and the reading."""
    fd = os.open(mounted.path / "big", os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # the kernel asks for what is read, and no more
    try:
        assert os.pread(fd, MIB, 0) == DATA[:MIB]
        before = placed(mounted)
        assert before > 0
        path = tier_file(mounted)
        with path.open("r+b") as file:
            file.write(b"something else")
            file.flush()
            drop_pages(file.fileno())
            file.seek(0)
            file.read(MIB)  # the page cache has it: only the checksum can tell
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.pread(fd, 128 * KIB, 0)
        assert placed(mounted) == before
    finally:
        os.close(fd)


def test_eviction_all_the_while(native_mounts: MountFactory, tmp_path: Path) -> None:
    """A tier that holds a third of the file: what is said to lie there may be gone a moment later."""
    mounted = native_mounts(front="native", tiers=(f"{tmp_path / 'tier'}:24M",))
    (mounted.store_dir / "big").write_bytes(DATA)
    wait_until((mounted.path / "big").exists, "the name")
    wrong: list[int] = []

    def read(start: int) -> None:
        with (mounted.path / "big").open("rb", buffering=0) as file:
            for offset in [*range(start, len(DATA), MIB), *range(0, start, MIB)]:
                if os.pread(file.fileno(), MIB, offset) != DATA[offset : offset + MIB]:
                    wrong.append(offset)

    readers = [threading.Thread(target=read, args=(part * 10 * MIB,)) for part in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert not wrong
    assert placed(mounted) > 0


def test_an_engine_that_dies_meanwhile(mounted: Mounted) -> None:
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append((mounted.path / "big").read_bytes()))
    reader.start()
    kill_engine(mounted)
    reader.join(30)
    assert found == [DATA]
    assert (mounted.path / "big").read_bytes() == DATA
