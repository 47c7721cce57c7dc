"""Many processes open one file in every way at once, and uploads run while others write.

The kernel refuses an open with EIO when it gets a mode that does not go with the others: never may an application
see that. And what is in the store is always a state of the file that there was, never a mixture.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

from tests.support.front import kill_engine
from tests.support.mount import Mounted, MountFactory, opened, wait_until

pytestmark = pytest.mark.needs_fuse

PAGE = 4096
PAGES = 512
SECONDS = float(os.environ.get("TIERFS_HAMMER_SECONDS", "9"))
BUSY_S, QUIET_S = 0.8, 1.4
"""In the quiet time the file is uploaded and becomes a clean copy again, so that the next reader passes through."""


def page(number: int, text: int) -> bytes:
    """A page that knows where it belongs, with a checksum: a mixture or a page from elsewhere is found."""
    body = struct.pack("<II", number, text).ljust(PAGE - 4, bytes([text % 251]))
    return body + struct.pack("<I", zlib.crc32(body))


def check_page(number: int, data: bytes) -> None:
    body, (checksum,) = data[:-4], struct.unpack("<I", data[-4:])
    assert len(data) == PAGE, f"page {number} has {len(data)} bytes"
    assert zlib.crc32(body) == checksum, f"page {number} is torn: {data[:16]!r}"
    assert struct.unpack_from("<I", body)[0] == number, f"page {number} is another one"


def hammer(path: Path, seed: int, until: float) -> int:
    """One process: opens, reads, overwrites whole pages; returns how often. Page ``seed`` is its own."""
    chance = random.Random(seed)
    mine = page(seed, 0)
    count = 0
    while time.monotonic() < until:
        if time.monotonic() % (BUSY_S + QUIET_S) > BUSY_S:
            time.sleep(0.01 + 0.005 * chance.random())
            continue
        count += 1
        flags = chance.choice([os.O_RDONLY, os.O_RDONLY, os.O_RDONLY, os.O_RDWR, os.O_RDWR | os.O_APPEND])
        with opened(path, flags) as descriptor:
            number = chance.randrange(PAGES)
            if flags == os.O_RDWR:
                if chance.random() < 0.3:
                    with mmap.mmap(descriptor, PAGES * PAGE) as mapped:
                        assert mapped[seed * PAGE : (seed + 1) * PAGE] == mine
                        mine = page(seed, count)
                        mapped[seed * PAGE : (seed + 1) * PAGE] = mine
                else:
                    mine = page(seed, count)
                    assert os.pwrite(descriptor, mine, seed * PAGE) == PAGE
            assert os.pread(descriptor, PAGE, seed * PAGE) == mine, "what was written is not there"
            if number >= 8:
                check_page(number, os.pread(descriptor, PAGE, number * PAGE))
            assert os.fstat(descriptor).st_size == PAGES * PAGE
            time.sleep(chance.choice([0, 0, 0.001, 0.02]))
    with opened(path, os.O_RDONLY) as descriptor:
        assert os.pread(descriptor, PAGE, seed * PAGE) == mine
    return count


def run_hammers(path: Path, processes: int) -> list[subprocess.Popen[str]]:
    code = (
        "import sys, time; from pathlib import Path; from tests.native.test_passthrough_races import hammer; "
        "print(hammer(Path(sys.argv[1]), int(sys.argv[2]), time.monotonic() + float(sys.argv[3])))"
    )
    return [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path), str(seed), str(SECONDS)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(processes)
    ]


@pytest.mark.limit_s(120 + 3 * SECONDS)
@pytest.mark.parametrize("disturbed", [False, True], ids=["", "engines die"])
def test_one_file_in_every_way_from_eight_processes(native_mounts: MountFactory, disturbed: bool) -> None:
    mounted = native_mounts.prepare(options=("--upload-delay", "0"))
    whole = b"".join(page(number, 0) for number in range(PAGES))
    (mounted.store_dir / "f").write_bytes(whole)
    mounted.start()
    path = mounted.path / "f"
    assert path.read_bytes() == whole
    time.sleep(1)
    hammers = run_hammers(path, 8)
    while disturbed and any(hammer.poll() is None for hammer in hammers):
        time.sleep(0.02)
        if time.monotonic() % (2 * (BUSY_S + QUIET_S)) < 0.4 * BUSY_S:
            time.sleep(0.3 * BUSY_S)
            kill_engine(mounted)
            time.sleep(BUSY_S)
    counts = []
    for process in hammers:
        said, complaint = process.communicate(timeout=SECONDS + 60)
        assert process.returncode == 0, complaint
        counts.append(int(said))
    status = mounted.status()["front"]
    print(f"opens by each: {counts}; passed through: {status['passthrough_opens']}")
    assert min(counts) > 0
    assert status["passthrough_opens"] > 0
    data = path.read_bytes()
    for number in range(PAGES):
        check_page(number, data[number * PAGE : (number + 1) * PAGE])
    mounted.umount()
    assert (mounted.store_dir / "f").read_bytes() == data


def states_of(mounted: Mounted, path: Path, reader_first: bool, rounds: int) -> tuple[set[bytes], set[bytes]]:
    """Write ``rounds`` states, each all of one text; returns (what was there at a close, what the store had)."""
    states = {path.read_bytes()}
    stored = set()
    size = len(next(iter(states)))
    in_store = mounted.store_dir / path.name
    with contextlib.ExitStack() as stack:
        if reader_first:
            stack.enter_context(opened(path, os.O_RDONLY))
        for number in range(rounds):
            with opened(path, os.O_RDWR) as writer:
                text = bytes([65 + number]) * size
                for start in range(0, size, 256 * 1024):
                    os.pwrite(writer, text[start : start + 256 * 1024], start)
                    if start % (1024 * 1024) == 0:
                        time.sleep(0.01)
            states.add(text)
            time.sleep(0.05 * (number % 5))
            stored.add(in_store.read_bytes())
    mounted.flush()
    stored.add(in_store.read_bytes())
    assert in_store.read_bytes() == text
    return states, stored


@pytest.mark.parametrize("reader_first", [True, False], ids=["passed through", "through the engine"])
def test_no_mixture_in_the_store(native_mounts: MountFactory, reader_first: bool) -> None:
    """A file is overwritten again and again while it is being uploaded."""
    mounted = native_mounts.prepare(options=("--upload-delay", "0", "--part-size", "5M"))
    (mounted.store_dir / "f").write_bytes(b"0" * (12 << 20))
    mounted.fail({"kind": "latency", "operation": "*p*", "seconds": 0.02})
    mounted.start()
    path = mounted.path / "f"
    path.read_bytes()
    time.sleep(1)
    before = mounted.status()["front"]["passthrough_opens"]
    states, stored = states_of(mounted, path, reader_first, 12)
    mixed = [body for body in stored if body not in states]
    assert not mixed, [sorted(set(body)) for body in mixed]
    passed = mounted.status()["front"]["passthrough_opens"] - before
    # Without a reader a writer passes through only while the file is not uploaded.
    assert passed > 12 if reader_first else passed <= 12
    wait_until(lambda: mounted.status()["backlog"]["files"] == 0, "an empty backlog")
