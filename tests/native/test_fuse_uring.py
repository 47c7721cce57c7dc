"""FUSE over io_uring: what goes through the queues, and what becomes of it when a process dies or the mount ends.

The kernel offers it only while its parameter ``enable_uring`` is on: these tests switch it on and back, one process
at a time. The whole suite goes this way with ``TIERFS_FUSE_URING=on`` in the environment.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.front import engine_pid, is_gone, kill_engine, recovery_s
from tests.support.mount import Mounted, MountFactory, wait_until

pytestmark = pytest.mark.needs_fuse

PARAMETER = Path("/sys/module/fuse/parameters/enable_uring")
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def parameter() -> Iterator[Path]:
    """The kernel's parameter, on; and for this process alone, so that nobody switches it off meanwhile."""
    try:
        with open(PARAMETER, "rb+", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            before = PARAMETER.read_text().strip()
            PARAMETER.write_text("1")
            try:
                yield PARAMETER
            finally:
                PARAMETER.write_text("1" if before == "Y" else "0")
    except OSError as error:
        pytest.skip(f"FUSE over io_uring cannot be switched on here: {PARAMETER}: {error.strerror}")


@pytest.fixture
def mounted(parameter: Path, native_mounts: MountFactory) -> Mounted:
    mounted = native_mounts(options=("--fuse-uring", "on", "--upload-delay", "0.2", "--negative-ttl", "0"))
    assert mounted.status()["front"]["transport"] == "io_uring"
    return mounted


def came_through_ring(mounted: Mounted) -> int:
    return int(mounted.status()["front"]["ring_requests"])


def test_all_kinds_of_requests(mounted: Mounted) -> None:
    """Those that the front answers, those that pyfuse3 does, those that go on the channel; small and as large as can be."""
    root = mounted.path
    chance = random.Random(1)
    big = chance.randbytes(5 * MIB + 12_345)
    (root / "d").mkdir()
    for name, data in {"big": big, "small": b"s" * 5000, "empty": b""}.items():
        (root / "d" / name).write_bytes(data)
        assert (root / "d" / name).read_bytes() == data
    long = "n" * 255
    (root / long).write_bytes(b"long name")
    os.symlink("t" * 4000, root / "link")
    assert os.readlink(root / "link") == "t" * 4000
    os.setxattr(root / "d/small", "user.large", b"v" * 60_000)
    assert os.getxattr(root / "d/small", "user.large") == b"v" * 60_000
    os.rename(root / long, root / "d" / "renamed")
    assert sorted(os.listdir(root / "d")) == ["big", "empty", "renamed", "small"]
    with open(root / "d/big", "rb+", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, 6 * MIB)
        assert os.lseek(file.fileno(), 0, os.SEEK_DATA) == 0
        os.ftruncate(file.fileno(), len(big))
    for number in range(300):
        (root / f"e{number}").touch()
    assert len(os.listdir(root)) == 302
    mounted.flush()
    assert (mounted.store_dir / "d" / "big").read_bytes() == big
    for number in range(300):
        os.unlink(root / f"e{number}")
    mounted.remount()
    assert (root / "d/big").read_bytes() == big
    fd = os.open(root / "d/big", os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert os.pread(fd, 6 * MIB, 0) == big
    os.close(fd)
    assert came_through_ring(mounted) > 0
    assert "requests through io_uring" in mounted.cli("status", str(mounted.path)).stdout


def test_more_readers_than_entries_in_a_queue(mounted: Mounted) -> None:
    """Those that find none wait, and come after the others."""
    data = random.Random(2).randbytes(200_000)
    for number in range(20):
        (mounted.store_dir / f"f{number}").write_bytes(data)
    readers = []
    for _ in range(100):
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                for number in range(20):
                    fd = os.open(mounted.path / f"f{number}", os.O_RDONLY)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                    assert os.pread(fd, MIB, 0) == data
                    os.close(fd)
                os._exit(0)
            os._exit(1)
        readers.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in readers] == [0] * 100


def test_the_engine_dies(mounted: Mounted) -> None:
    """Requests that wait in the queues are answered by the next engine, once."""
    for number in range(8):
        (mounted.store_dir / f"f{number}").write_bytes(bytes([number]) * 300_000)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(mounted.path / f"f{number}", "rb")) for number in range(8)]
        writer = stack.enter_context(open(mounted.path / "w", "wb", buffering=0))
        for round_no in range(3):
            kill_engine(mounted)
            maker = subprocess.Popen(["mkdir", mounted.path / f"made{round_no}"])
            writer.write(b"x" * MIB)
            assert files[round_no].read() == bytes([round_no]) * 300_000
            assert maker.wait(30) == 0
            assert recovery_s(mounted, "probe") < 30
    assert (mounted.path / "w").stat().st_size == 3 * MIB
    assert mounted.status()["front"]["transport"] == "io_uring"


def test_a_reader_that_is_killed_while_it_waits(mounted: Mounted) -> None:
    """INTERRUPT comes through /dev/fuse and finds the request that came through a queue."""
    (mounted.store_dir / "f").write_bytes(b"d" * 1000)
    mounted.fail({"kind": "hang", "seconds": 30})
    start = time.monotonic()
    with subprocess.Popen(["stat", mounted.path / "f"], stdout=subprocess.DEVNULL) as reader:
        try:
            where = Path(f"/proc/{reader.pid}/wchan")
            wait_until(lambda: where.read_text() == "request_wait_answer", "the look-up")
        finally:
            reader.send_signal(signal.SIGKILL)
        reader.wait(25)
    assert time.monotonic() - start < 25
    mounted.heal()
    wait_until((mounted.path / "f").exists, "the name", limit_s=40)
    assert (mounted.path / "f").read_bytes() == b"d" * 1000


def test_the_front_dies(mounted: Mounted) -> None:
    (mounted.path / "f").write_bytes(b"kept")
    engine = engine_pid(mounted)
    assert engine is not None
    held = os.open(mounted.path / "f", os.O_RDONLY)
    mounted.kill9()
    wait_until(lambda: is_gone(engine), "the end of the engine")

    def is_dead() -> bool:
        try:
            os.stat(mounted.path / "f")
        except OSError as error:
            assert error.errno in (errno.ENOTCONN, errno.ECANCELED, errno.ECONNABORTED)
            return error.errno == errno.ENOTCONN
        return False

    wait_until(is_dead, "an error for every request")
    with contextlib.suppress(OSError):
        os.close(held)
    mounted.start()
    assert (mounted.path / "f").read_bytes() == b"kept"


@pytest.mark.parametrize("busy", [False, True])
def test_the_mount_ends(mounted: Mounted, busy: bool) -> None:
    (mounted.path / "f").write_bytes(b"kept")
    if not busy:
        mounted.umount()
    else:
        with open(mounted.path / "f", "rb") as file:
            subprocess.run(["umount", "-l", mounted.path], check=True)
            assert file.read() == b"kept"
        assert mounted.process is not None
        assert mounted.process.wait(30) == 0
        mounted.process = None
    mounted.start()
    assert (mounted.path / "f").read_bytes() == b"kept"


def test_without_it(parameter: Path, native_mounts: MountFactory) -> None:
    """Not asked for, or not offered: /dev/fuse, and the reason."""
    mounted = native_mounts()
    assert mounted.status()["front"]["transport"] == "device"
    assert "auto" in mounted.status()["front"]["transport_why"]
    assert "enable_uring is Y" in mounted.cli("doctor", check=False).stdout
    mounted.umount()
    mounted.options = ("--fuse-uring", "on")
    parameter.write_text("0")
    try:
        mounted.start()
        (mounted.path / "f").write_bytes(b"through /dev/fuse")
        front = mounted.status()["front"]
        assert front["transport"] == "device"
        assert "enable_uring is N" in front["transport_why"]
        assert front["ring_requests"] == 0
    finally:
        parameter.write_text("1")


def test_benchmark(parameter: Path, base_dir: Path) -> None:
    """The comparison with /dev/fuse runs to its end, and has a figure for each way."""
    command = [sys.executable, "-m", "benchmarks.front.transport", "--rounds", "1", "--hits-rounds", "0"]
    done = subprocess.run(
        [*command, "--calls", "40", "--json", "--work-dir", base_dir],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout)["metrics"]
    assert set(metrics["stat, 1 reader"]["values"]) == {"io_uring", "/dev/fuse"}
    assert all(metric["ratios"]["/dev/fuse"] for name, metric in metrics.items() if "CPU" not in name)
