"""Small files whose bytes the device has and the page cache has not: the front reads and checks them by itself."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.mount import Mounted, MountFactory, opened, wait_until
from tests.support.page_cache import drop_pages

pytestmark = pytest.mark.needs_fuse

COUNT = 80
READERS = 12


def contents() -> dict[str, bytes]:
    chance = random.Random(3)
    return {f"file{number:03}": chance.randbytes(chance.randrange(1, 60_000)) for number in range(COUNT)}


@pytest.fixture
def mounted(native_mounts: MountFactory) -> Mounted:
    """Everything has been read once, and the tier's index says so."""
    mounted = native_mounts(front="native")
    for name, data in contents().items():
        (mounted.store_dir / name).write_bytes(data)
    wait_until((mounted.path / "file000").exists, "the names")

    def is_recorded() -> bool:
        before = relayed(mounted)
        for name in contents():
            with opened(mounted.path / name) as descriptor:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.read(descriptor, 100_000)
        return relayed(mounted) == before

    wait_until(is_recorded, "the tier's index")
    return mounted


def relayed(mounted: Mounted) -> int:
    return int(mounted.status()["front"]["relayed"])


def segments(mounted: Mounted) -> Sequence[Path]:
    found = list((mounted.base / "tier").rglob("segments/*"))
    assert found
    return found


def forget_pages(mounted: Mounted) -> None:
    """Of the tier, and of the mount."""
    for path in segments(mounted):
        with opened(path) as descriptor:
            drop_pages(descriptor)
    for name in contents():
        with opened(mounted.path / name) as descriptor:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def read_together(mounted: Mounted) -> dict[str, bytes]:
    """By many threads, in no order."""
    names = list(contents())
    random.Random(5).shuffle(names)
    found: dict[str, bytes] = {}

    def read(share: Sequence[str]) -> None:
        for name in share:
            with opened(mounted.path / name) as descriptor:
                found[name] = os.read(descriptor, 100_000)

    threads = [threading.Thread(target=read, args=(names[first::READERS],)) for first in range(READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_many_at_a_time_and_damage_that_only_the_engine_can_mend(mounted: Mounted) -> None:
    before = relayed(mounted)
    for _ in range(3):
        forget_pages(mounted)
        assert read_together(mounted) == contents()
    assert relayed(mounted) == before
    for path in segments(mounted):
        with path.open("r+b", buffering=0) as file:
            for offset in range(50, file.seek(0, os.SEEK_END), 4096):
                file.seek(offset)
                file.write(b"not what it was")
    # The kernel reads nothing ahead here: what lies beside a file that is read would not be checked.
    forget_pages(mounted)
    assert read_together(mounted) == contents()
