"""Cases C20 to C24: how many requests and bytes things cost. Nothing here measures time."""

from __future__ import annotations

import math
import mmap
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.mount import Mounted, MountFactory

KIB, MIB = 1 << 10, 1 << 20
BLOCK = 128 * KIB
pytestmark = pytest.mark.usefixtures("needs_mount")


def cost(mounted: Mounted, work: Callable[[], object]) -> dict[str, int]:
    """Requests by operation, and ``bytes``, that ``work`` costs."""
    before = mounted.status()["store"]
    work()
    after = mounted.status()["store"]
    spent = {name: n - before["requests"].get(name, 0) for name, n in after["requests"].items()}
    spent["bytes"] = after["bytes_read"] - before["bytes_read"]
    return {name: n for name, n in spent.items() if n}


def forget_pages(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


@pytest.mark.semantics(
    "S-SEE-4",
    "Inside its time-to-live a listed directory costs no request, neither for `ls` nor for `stat` of its entries.",
)
@pytest.mark.parametrize("command", [["ls", "-U"], ["ls", "-l"], ["find", "-type", "f"]], ids=" ".join)
def test_c20_listing_one_large_directory(mount_factory: MountFactory, command: list[str]) -> None:
    count = 3000
    mounted = mount_factory.prepare()
    (mounted.store_dir / "p").mkdir()
    for i in range(count):
        (mounted.store_dir / "p" / f"f{i:05}").write_bytes(b"")
    mounted.start()

    def listing() -> None:
        answer = subprocess.run(command, cwd=mounted.path / "p", capture_output=True, check=True, timeout=120)
        assert len(answer.stdout.splitlines()) in (count, count + 1)

    first = cost(mounted, listing)
    assert first.get("list", 0) <= math.ceil(count / 1000) + 2
    assert first.get("head", 0) == 0
    assert cost(mounted, listing) == {}


def test_c20_walking_a_tree(mount_factory: MountFactory) -> None:
    mounted = mount_factory.prepare()
    for i in range(4):
        for j in range(5):
            below = mounted.store_dir / f"d{i}" / f"e{j}"
            below.mkdir(parents=True)
            for k in range(100):
                (below / f"f{k}").write_bytes(b"x")
    mounted.start()

    def walk() -> None:
        found = subprocess.run(
            ["find", str(mounted.path), "-type", "f", "-size", "1c"],
            capture_output=True,
            check=True,
            timeout=120,
        )
        assert len(found.stdout.splitlines()) == 2000

    first = cost(mounted, walk)
    assert sum(first.values()) <= math.ceil(2000 / 1000) + 6
    assert cost(mounted, walk) == {}


def test_c20_cold_open_of_a_deep_key(mount_factory: MountFactory) -> None:
    mounted = mount_factory.prepare()
    for i in range(1500):
        (mounted.store_dir / f"f{i}").write_bytes(b"")
    deep = mounted.store_dir / "a" / "b" / "c" / "d" / "e"
    deep.mkdir(parents=True)
    (deep / "f").write_bytes(b"deep down")
    mounted.start()
    spent = cost(mounted, (mounted.path / "a" / "b" / "c" / "d" / "e" / "f").read_bytes)
    assert spent.get("get", 0) == 1
    assert sum(n for name, n in spent.items() if name not in ("get", "bytes")) <= 2


SHARED_MAP = """
import mmap, os, random, sys
path, size = sys.argv[1], os.stat(sys.argv[1]).st_size
fd = os.open(path, os.O_RDONLY)
view = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
children = []
for quarter in range(4):
    pid = os.fork()
    if pid == 0:
        chance, at, end = random.Random(quarter), quarter * size // 4, (quarter + 1) * size // 4
        total = 0
        while at < end:
            step = min(chance.choice([4, 16, 64, 256]) * 1024, end - at)
            total += sum(view[at:at + step:4096])
            at += step
        os._exit(0)
    children.append(pid)
assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
"""


@pytest.mark.parametrize("tiers", [None, ()], ids=["tier", "no tier"])
def test_c21_four_processes_share_one_mapping(
    mount_factory: MountFactory, tiers: tuple[str, ...] | None
) -> None:
    size = 64 * MIB
    mounted = mount_factory.prepare(tiers=tiers)
    (mounted.store_dir / "weights").write_bytes(random.Random(4).randbytes(size))
    mounted.start()
    os.stat(mounted.path / "weights")
    spent = cost(
        mounted,
        lambda: subprocess.run(
            [sys.executable, "-c", SHARED_MAP, str(mounted.path / "weights")], check=True, timeout=140
        ),
    )
    assert spent["bytes"] <= 1.1 * size
    assert spent["get"] <= size // (512 * KIB)  # parallel streams are recognised: no request per fault


def random_reads(path: Path, size: int, block: int, count: int, seed: int) -> None:
    buffer = mmap.mmap(-1, block)
    handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
    chance = random.Random(seed)
    for _ in range(count):
        offset = chance.randrange(size // block) * block
        assert os.preadv(handle, [buffer], offset) == block
    os.close(handle)


@pytest.mark.semantics("S-READ-7", "One block that several readers miss at once is fetched once.")
@pytest.mark.parametrize("block", [4 * KIB, 128 * KIB])
def test_c22_random_reads_fetch_no_block_twice(mount_factory: MountFactory, block: int) -> None:
    size = 20 * MIB
    mounted = mount_factory.prepare()
    (mounted.store_dir / "f").write_bytes(bytes(size))
    mounted.start()
    os.stat(mounted.path / "f")

    def readers() -> None:
        work = [
            threading.Thread(target=random_reads, args=(mounted.path / "f", size, block, 300, seed % 2))
            for seed in range(4)
        ]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()

    spent = cost(mounted, readers)
    assert spent["bytes"] <= size
    assert spent["get"] <= size // BLOCK


@pytest.mark.parametrize("block", [4 * KIB, 128 * KIB])
def test_c22_random_reads_without_tiers(mount_factory: MountFactory, block: int) -> None:
    size, count = 100 * MIB, 200
    mounted = mount_factory.prepare(tiers=())
    with open(mounted.store_dir / "f", "wb") as file:
        file.truncate(size)
    mounted.start()
    os.stat(mounted.path / "f")
    spent = cost(mounted, lambda: random_reads(mounted.path / "f", size, block, count, 5))
    assert spent["bytes"] <= 1.1 * block * count


def test_c23_one_stream_uses_parallel_requests(mount_factory: MountFactory) -> None:
    """One sequential reader of a slow store: its GETs overlap, so that they take less than their sum."""
    size = 128 * MIB
    mounted = mount_factory.prepare()
    with open(mounted.store_dir / "f", "wb") as file:
        file.truncate(size)
    mounted.start()
    os.stat(mounted.path / "f")
    spent: dict[str, int] = {}

    def read() -> None:
        with open(mounted.path / "f", "rb", buffering=0) as file:
            while file.read(MIB):
                pass

    spent = cost(mounted, read)
    assert spent["bytes"] <= 1.01 * size
    # Large enough to amortise the latency of each, small enough that several are in flight.
    assert size // (64 * MIB) <= spent["get"] <= size // (512 * KIB)


@pytest.mark.limit_s(240)
@pytest.mark.parametrize("order", ["same", "shuffled"])
def test_c24_cache_smaller_than_the_data(mount_factory: MountFactory, order: str) -> None:
    """Data 1.2 times the cache: later epochs find most of it, not nothing."""
    count, size = 240, 120 * KIB
    mounted = mount_factory.prepare()
    mounted.tiers = (f"{mounted.base / 'tier'}:{count * size * 10 // 12}",)
    for i in range(count):
        (mounted.store_dir / f"f{i}").write_bytes(b"%03d" % (i % 1000) * (size // 3))
    mounted.start()
    files = list(range(count))

    def epoch() -> None:
        for i in files:
            assert len((mounted.path / f"f{i}").read_bytes()) == size
            forget_pages(mounted.path / f"f{i}")

    fetched = []
    for number in range(4):
        if order == "shuffled":
            random.Random(number).shuffle(files)
        fetched.append(cost(mounted, epoch).get("bytes", 0))
    assert fetched[0] <= 1.15 * count * size  # read-ahead may be evicted before it is used
    for later in fetched[1:]:
        assert later <= 0.3 * count * size, fetched
