"""A store that does not answer: what is local does not wait for it, however many reads do."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from tests.support.mount import Mounted, MountFactory, wait_until
from tierfs.bench.caches import drop

pytestmark = [pytest.mark.usefixtures("needs_mount"), pytest.mark.needs_fuse]

MISSES = {"native": 64, "python": 8}
"""The kernel has 12 reads of its page cache in flight at a time, unless it is told otherwise; pyfuse3 cannot."""
LARGE_BYTES = 3_000_000


class Miss(threading.Thread):
    """Opens a file and reads it, on a store that does not answer."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self.path = path
        self.descriptor: int | None = None
        self.found: bytes | OSError | None = None

    def run(self) -> None:
        try:
            self.descriptor = os.open(self.path, os.O_RDONLY)
            self.found = os.pread(self.descriptor, LARGE_BYTES, 0)
            os.close(self.descriptor)
        except OSError as error:
            self.found = error

    def waits_in_the_kernel(self) -> bool:
        """Asked of the kernel: the first argument of the call that it is in is our descriptor."""
        if self.descriptor is None or self.native_id is None:
            return False
        call = Path(f"/proc/self/task/{self.native_id}/syscall").read_text().split()
        return len(call) > 1 and call[1] == hex(self.descriptor)


def contents(count: int, seed: str) -> dict[str, bytes]:
    chance = random.Random(seed)
    return {f"{seed}{i}": chance.randbytes(chance.choice([500, 60_000, LARGE_BYTES])) for i in range(count)}


def look_at_what_is_local(mounted: Mounted, local: dict[str, bytes]) -> None:
    """What an application does with local files; the kernel has none of their bytes."""
    paths = [str(mounted.path / name) for name in local]
    drop(paths)
    for name, data in local.items():
        assert (mounted.path / name).stat().st_size == len(data)
        assert (mounted.path / name).read_bytes() == data
    assert set(os.listdir(mounted.path)) >= set(local)
    (mounted.path / "made").write_bytes(b"meanwhile")
    os.rename(mounted.path / "made", mounted.path / "renamed")
    assert (mounted.path / "renamed").read_bytes() == b"meanwhile"
    os.unlink(mounted.path / "renamed")
    assert mounted.status()["backlog"]["failed"] == []


@pytest.mark.semantics(
    "S-READ-8",
    "What is local does not wait for reads that wait for the store. With `--front python` only while fewer than 12 of those are in flight, since the kernel then sends no more.",
)
def test_hits_do_not_wait_for_misses(mount_factory: MountFactory, front: str) -> None:
    """Reads wait for the store, for as long as this takes, and all get their bytes when it answers again."""
    mounted = mount_factory.prepare(options=("--ttl", "3600"))
    local, absent = contents(20, "local"), contents(MISSES[front], "absent")
    for name, data in (local | absent).items():
        (mounted.store_dir / name).write_bytes(data)
    mounted.start()
    for name, data in local.items():
        assert (mounted.path / name).read_bytes() == data
    mounted.fail({"kind": "block", "operation": "get", "key": "absent*"})
    misses = [Miss(mounted.path / name) for name in absent]
    for miss in misses:
        miss.start()
    wait_until(lambda: all(miss.waits_in_the_kernel() for miss in misses), "reads that wait")
    for _ in range(3):
        look_at_what_is_local(mounted, local)
        assert [miss.path.name for miss in misses if not miss.is_alive()] == []
    mounted.heal()
    for miss in misses:
        miss.join(60)
    assert {miss.path.name: miss.found for miss in misses} == absent
