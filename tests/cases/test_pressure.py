"""Cases C10 to C13: full caches, unexpected errors, many open files, forked readers."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.support.mount import Mounted, MountFactory
from tests.support.posix import errno_of

MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("needs_mount")


def test_c10_cache_full_of_files_in_use(mount_factory: MountFactory) -> None:
    """20 readers of files that do not fit together, all held open: reads go on, the cap holds."""
    mounted = mount_factory.prepare()
    mounted.tiers = (f"{mounted.base / 'tier'}:32M",)
    for i in range(20):
        (mounted.store_dir / f"f{i}").write_bytes(bytes([i + 1]) * (8 * MIB))
    mounted.start()
    handles = [os.open(mounted.path / f"f{i}", os.O_RDONLY) for i in range(20)]
    wrong: list[int] = []

    def read(i: int) -> None:
        for offset in range(0, 8 * MIB, MIB):
            if os.pread(handles[i], MIB, offset) != bytes([i + 1]) * MIB:
                wrong.append(i)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for handle in handles:
        os.close(handle)
    assert not wrong
    (tier,) = mounted.status()["tiers"]
    assert tier["used_bytes"] <= 32 * MIB
    assert len(mounted.log().splitlines()) < 200


def test_c11_touch_remove_list(mounted: Mounted) -> None:
    """Also invalidations of names that the kernel has already forgotten."""
    for i in range(50):
        (mounted.path / "f").write_bytes(b"")
        os.unlink(mounted.path / "f")
        assert os.listdir(mounted.path) == []
        (mounted.store_dir / f"remote{i % 3}").write_bytes(b"1")
        os.unlink(mounted.store_dir / f"remote{i % 3}")
    assert errno_of(lambda: os.stat(mounted.path / "f")) == 2


@pytest.fixture
def many_descriptors() -> Iterator[int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 6000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield min(4000, wanted - 500)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.limit_s(240)
def test_c12_thousands_of_open_files(mount_factory: MountFactory, many_descriptors: int) -> None:
    """Idle handles hold neither a connection nor a worker: one more read returns."""
    mounted = mount_factory.prepare()
    for i in range(many_descriptors):
        (mounted.store_dir / f"f{i}").write_bytes(b"%d" % i * 100)
    (mounted.store_dir / "other").write_bytes(b"other")
    mounted.start()
    handles = []
    try:
        for i in range(many_descriptors):
            handles.append(os.open(mounted.path / f"f{i}", os.O_RDONLY))
            assert os.pread(handles[-1], 4096, 0) == b"%d" % i * 100
        answer = subprocess.run(
            ["cat", str(mounted.path / "other")], timeout=30, capture_output=True, check=True
        )
        assert answer.stdout == b"other"
        assert mounted.status()["open_handles"] >= many_descriptors
    finally:
        for handle in handles:
            os.close(handle)


FORKED = """
import mmap, multiprocessing, os, random, signal, sys, time
top, count = sys.argv[1], int(sys.argv[2])
context = multiprocessing.get_context("fork")
parent_fd = os.open(top + "/big", os.O_RDONLY)
parent_map = mmap.mmap(parent_fd, 0, prot=mmap.PROT_READ)

def expected(i):
    return (b"%05d" % i) * 2000

def work(seed, epochs):
    order = list(range(count))
    for epoch in range(epochs):
        random.Random(seed * 100 + epoch).shuffle(order)
        for i in order:
            with open(f"{top}/f{i}", "rb") as file:
                assert file.read() == expected(i), i
        assert parent_map[1_000_000:1_000_005] == b"BBBBB"
        assert os.pread(parent_fd, 5, 0) == b"BBBBB"

workers = [context.Process(target=work, args=(n, 2)) for n in range(8)]
victim = context.Process(target=work, args=(99, 1000))
for process in [*workers, victim]:
    process.start()
time.sleep(0.5)
os.kill(victim.pid, signal.SIGKILL)
for process in [*workers, victim]:
    process.join()
assert [w.exitcode for w in workers] == [0] * 8, [w.exitcode for w in workers]
"""


@pytest.mark.limit_s(240)
def test_c13_forked_readers(mount_factory: MountFactory) -> None:
    mounted = mount_factory.prepare()
    for i in range(300):
        (mounted.store_dir / f"f{i}").write_bytes((b"%05d" % i) * 2000)
    (mounted.store_dir / "big").write_bytes(b"B" * (2 * MIB))
    mounted.start()
    subprocess.run([sys.executable, "-c", FORKED, str(mounted.path), "300"], check=True, timeout=200)
    assert (mounted.path / "f7").read_bytes() == b"00007" * 2000
