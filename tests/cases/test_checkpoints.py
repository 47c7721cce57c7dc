"""Cases C29 to C32: unmount before the upload ends, locks, markers seen elsewhere, what fsync promises."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.mount import Mounted, MountFactory, wait_until
from tests.support.posix import errno_of

MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("needs_mount")

SLOW = {"kind": "latency", "operation": "put", "seconds": 0.05, "bytes_per_s": 10e6}
SLOW_PARTS = {"kind": "latency", "operation": "upload_part", "seconds": 0.05, "bytes_per_s": 10e6}


def test_c29_unmount_waits_for_the_upload(mount_factory: MountFactory) -> None:
    mounted = mount_factory(options=("--upload-delay", "60"))
    mounted.fail(SLOW, SLOW_PARTS)
    data = {f"shard{i}": os.urandom(8 * MIB) for i in range(4)}
    for name, content in data.items():
        (mounted.path / name).write_bytes(content)
    assert mounted.status()["backlog"]["bytes"] > 0
    mounted.umount()
    assert {name: (mounted.store_dir / name).read_bytes() for name in data} == data


def test_c29_sigterm_and_then_sigkill_lose_nothing(mounted: Mounted) -> None:
    """As systemd does it when the grace period is too short."""
    mounted.fail({**SLOW, "bytes_per_s": 2e6}, {**SLOW_PARTS, "bytes_per_s": 2e6})
    data = os.urandom(24 * MIB)
    (mounted.path / "f").write_bytes(data)
    assert mounted.process is not None
    mounted.process.send_signal(signal.SIGTERM)
    time.sleep(1)
    mounted.kill9()
    mounted.heal()
    mounted.start()
    assert (mounted.path / "f").read_bytes() == data
    mounted.flush()
    assert (mounted.store_dir / "f").read_bytes() == data


FILE_LOCK = """
import fcntl, os, sys
path, rounds = sys.argv[1], int(sys.argv[2])
for _ in range(rounds):
    lock = os.open(path + ".lock", os.O_CREAT | os.O_RDWR)
    fcntl.KIND(lock, fcntl.LOCK_EX)
    with open(path) as file:
        value = int(file.read())
    with open(path, "w") as file:
        file.write(str(value + 1))
    os.close(lock)
"""


@pytest.mark.semantics(
    "S-LOCK-1",
    "`flock` and `fcntl` locks hold between the processes of one machine and end with the process; other machines do not see them.",
)
@pytest.mark.parametrize("kind", ["flock", "lockf"])
def test_c30_locks_between_processes(workdir: Path, kind: str) -> None:
    (workdir / "counter").write_text("0")
    script = FILE_LOCK.replace("KIND", kind)
    workers = [
        subprocess.Popen([sys.executable, "-c", script, str(workdir / "counter"), "25"]) for _ in range(4)
    ]
    assert [worker.wait(60) for worker in workers] == [0] * 4
    assert (workdir / "counter").read_text() == "100"


def test_c30_lock_ends_with_its_process(workdir: Path) -> None:
    (workdir / "l").write_bytes(b"")
    code = "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(600)"
    holder = subprocess.Popen([sys.executable, "-c", code, str(workdir / "l")], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        busy = subprocess.run(["flock", "-n", str(workdir / "l"), "true"], check=False)
        assert busy.returncode == 1
    finally:
        holder.kill()
        holder.communicate()
    subprocess.run(["flock", "-w", "10", str(workdir / "l"), "true"], check=True)


@pytest.mark.semantics(
    "S-SEE-3",
    "A name that did not exist is asked for again after the negative time-to-live (`--negative-ttl`, 1 s).",
)
def test_c31_new_marker_is_seen_elsewhere(mount_factory: MountFactory) -> None:
    mounted = mount_factory.prepare(options=("--ttl", "2", "--negative-ttl", "0.3"))
    (mounted.store_dir / "d").mkdir()
    (mounted.store_dir / "d" / "step669").write_bytes(b"old")
    mounted.start()
    assert os.listdir(mounted.path / "d") == ["step669"]
    assert errno_of((mounted.path / "d" / "_READY").read_bytes) == errno.ENOENT
    (mounted.store_dir / "d" / "_READY").write_bytes(b"yes")
    wait_until(lambda: errno_of((mounted.path / "d" / "_READY").read_bytes) == 0, "the marker by name", 20)
    wait_until(lambda: "_READY" in os.listdir(mounted.path / "d"), "the marker in the listing", 20)
    (mounted.store_dir / "d" / "step1000").write_bytes(b"new")
    wait_until(lambda: "step1000" in os.listdir(mounted.path / "d"), "the new step in the listing", 20)
    os.unlink(mounted.store_dir / "d" / "step669")
    wait_until(lambda: "step669" not in os.listdir(mounted.path / "d"), "the end of the old step", 20)


RANK = """
import os, sys
top, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
try:
    with open(f"{top}/tmp/shard{rank}", "wb", buffering=0) as file:
        file.write(bytes([65 + rank]) * size)
        os.fsync(file.fileno())
    directory = os.open(f"{top}/tmp", os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)
except OSError:
    sys.exit(3)
"""


@pytest.mark.limit_s(300)
def test_c32_checkpoint_directory_is_absent_or_complete(mount_factory: MountFactory) -> None:
    """Ranks write and sync their shards, then one renames the directory; the engine dies at any moment."""
    mounted = mount_factory(options=("--upload-delay", "0.2"))
    chance = random.Random(32)
    ranks, size = 4, 300_000
    acknowledged = 0
    for number in range(8):
        top = mounted.path / f"c{number}"
        killer = subprocess.Popen(
            ["sh", "-c", f"sleep {chance.uniform(0.05, 0.5):.3f}; kill -9 {mounted.pid}"]
        )
        renamed = False
        try:
            os.makedirs(top / "tmp")
            workers = [
                subprocess.Popen([sys.executable, "-c", RANK, str(top), str(rank), str(size)])
                for rank in range(ranks)
            ]
            if all([worker.wait(60) == 0 for worker in workers]):  # noqa: C419 - wait for each of them
                os.rename(top / "tmp", top / "final")
                handle = os.open(top, os.O_RDONLY)
                os.fsync(handle)
                os.close(handle)
                renamed = True
        except OSError as error:
            assert error.errno in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO), error
        killer.wait(30)
        mounted.kill9()
        mounted.start()
        final = top / "final"
        assert final.exists() or not renamed
        if final.exists():
            acknowledged += 1
            for rank in range(ranks):
                assert (final / f"shard{rank}").read_bytes() == bytes([65 + rank]) * size
    mounted.umount()
    for number in range(8):
        for shard in (mounted.store_dir / f"c{number}").rglob("final/shard*"):
            assert shard.read_bytes() == bytes([65 + int(shard.name[5:])]) * size
    mounted.start()


def test_c32_second_rename_by_another_rank(mounted: Mounted) -> None:
    os.makedirs(mounted.path / "tmp")
    (mounted.path / "tmp" / "shard").write_bytes(b"1")
    os.rename(mounted.path / "tmp", mounted.path / "final")
    assert errno_of(lambda: os.rename(mounted.path / "tmp", mounted.path / "final")) == errno.ENOENT
    os.makedirs(mounted.path / "tmp")
    (mounted.path / "tmp" / "other").write_bytes(b"2")
    code = errno_of(lambda: os.rename(mounted.path / "tmp", mounted.path / "final"))
    assert code in (errno.ENOTEMPTY, errno.EEXIST)
    assert os.listdir(mounted.path / "final") == ["shard"]
