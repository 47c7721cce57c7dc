"""All of a file copied into a new one: the store makes the copy, through a real kernel."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support.front import kill_engine
from tests.support.mount import Mounted, MountFactory, opened, wait_until

pytestmark = pytest.mark.needs_fuse

MIB = 1 << 20
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL
COPY_FILE_RANGE = "326 "
"""Its number on x86-64, as /proc shows it."""


def with_cold_file(native_mounts: MountFactory, size: int) -> tuple[Mounted, bytes]:
    """A mount, and the bytes of ``a``, which is in the store and not here."""
    mounted = native_mounts.prepare()
    data = os.urandom(size)
    (mounted.store_dir / "a").write_bytes(data)
    mounted.start()
    assert (mounted.path / "a").stat().st_size == size
    (mounted.path / "written").write_bytes(b"through the kernel")
    refusal = mounted.status()["front"]["passthrough_errno"]
    if refusal:
        pytest.skip(f"this kernel refuses passthrough: {os.strerror(refusal)}")
    mounted.flush()
    return mounted, data


def traffic(mounted: Mounted) -> dict[str, int]:
    """Requests for content, and bytes of it."""
    store = mounted.status()["store"]
    kinds = ("get", "put", "copy", "start_multipart", "upload_part", "copy_part")
    requests = {kind: store["requests"].get(kind, 0) for kind in kinds}
    return requests | {"read": store["bytes_read"], "written": store["bytes_written"]}


NOTHING = {
    "get": 0,
    "put": 0,
    "start_multipart": 0,
    "upload_part": 0,
    "copy_part": 0,
    "read": 0,
    "written": 0,
}


@pytest.mark.semantics(
    "S-RANGE-5",
    "With the native front and passthrough, `copy_file_range` of all of a clean file (of 1 MiB or more, and not all "
    "of it here) into an empty one, as `cp` calls it, is made by the store: no byte passes through this node, and "
    "when it returns, the copy is in the store and has nothing to do with its source any more.",
)
def test_cp_moves_no_bytes(native_mounts: MountFactory) -> None:
    mounted, data = with_cold_file(native_mounts, 64 * MIB)
    before = traffic(mounted)
    subprocess.run(["cp", mounted.path / "a", mounted.path / "b"], check=True)
    assert (mounted.store_dir / "b").read_bytes() == data
    mounted.flush()
    after = traffic(mounted)
    assert {kind: after[kind] - before[kind] for kind in after} == NOTHING | {"copy": 1}
    assert (mounted.path / "b").stat().st_size == len(data)
    assert (mounted.path / "b").read_bytes() == data
    # The other way round: what is there already is emptied first.
    (mounted.store_dir / "c").write_bytes(data[::-1])
    wait_until((mounted.path / "c").exists, "the name")
    wait_until(lambda: not mounted.status()["open_handles"], "the end of the read, which was passed through")
    before = traffic(mounted)
    subprocess.run(["cp", mounted.path / "c", mounted.path / "b"], check=True)
    mounted.flush()
    after = traffic(mounted)
    assert {kind: after[kind] - before[kind] for kind in after} == NOTHING | {"copy": 1}
    assert (mounted.path / "b").read_bytes() == data[::-1]
    mounted.umount()
    assert (mounted.store_dir / "b").read_bytes() == data[::-1]


def seen_by_another_process(path: Path) -> bytes:
    return subprocess.run(["cat", path], check=True, capture_output=True).stdout


def test_a_copy_is_read_and_written_while_it_is_open(native_mounts: MountFactory) -> None:
    mounted, data = with_cold_file(native_mounts, 5 * MIB + 77)
    path = mounted.path / "b"
    before = traffic(mounted)["copy"]
    with opened(mounted.path / "a") as source, opened(path, NEW) as target, opened(path) as reader:
        assert os.copy_file_range(source, target, 1 << 30) == len(data)
        assert traffic(mounted)["copy"] == before + 1
        kill_engine(mounted)
        assert os.fstat(reader).st_size == len(data)
        assert os.pread(target, len(data) + 1, 0) == data
        assert os.pread(reader, len(data) + 1, 0) == data
        assert seen_by_another_process(path) == data
        with mmap.mmap(reader, 0, prot=mmap.PROT_READ) as view:
            changed = bytearray(data)
            os.pwrite(target, b"changed", MIB + 5)
            changed[MIB + 5 : MIB + 12] = b"changed"
            assert view[:] == changed
        os.pwrite(target, b"end", len(data))
        changed += b"end"
        os.fsync(target)
        assert seen_by_another_process(path) == changed
        (mounted.path / "a").unlink()
        kill_engine(mounted)
        assert os.pread(reader, len(changed) + 1, 0) == changed
        os.rename(path, mounted.path / "c")
    mounted.umount()
    assert (mounted.store_dir / "c").read_bytes() == changed
    assert not (mounted.store_dir / "a").exists()
    assert not (mounted.store_dir / "b").exists()


def is_copying(thread: int) -> bool:
    return Path(f"/proc/self/task/{thread}/syscall").read_text().startswith(COPY_FILE_RANGE)


def test_the_engine_is_killed_while_the_store_is_at_work(native_mounts: MountFactory) -> None:
    mounted, data = with_cold_file(native_mounts, 5 * MIB)
    mounted.fail({"kind": "block", "operation": "copy"})
    copier = threading.get_native_id()

    def kill() -> None:
        wait_until(lambda: is_copying(copier), "the copy")
        time.sleep(0.5)
        kill_engine(mounted)
        mounted.heal()

    killer = threading.Thread(target=kill)
    with opened(mounted.path / "a") as source, opened(mounted.path / "b", NEW) as target:
        killer.start()
        copied = 0
        while copied < len(data):
            some = os.copy_file_range(source, target, len(data) - copied)
            assert some > 0
            copied += some
        killer.join()
        assert os.pread(target, len(data) + 1, 0) == data
    assert mounted.status()["front"]["engine_starts"] == 2
    mounted.umount()
    assert (mounted.store_dir / "b").read_bytes() == data


def test_a_signal_ends_the_wait_for_the_store(native_mounts: MountFactory) -> None:
    mounted, _ = with_cold_file(native_mounts, 5 * MIB)
    mounted.fail({"kind": "block", "operation": "copy"})
    program = (
        "import ctypes, os, signal, sys\n"
        "signal.signal(signal.SIGALRM, lambda *_: None)\n"
        "a, b = os.open(sys.argv[1], os.O_RDONLY), os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)\n"
        "signal.setitimer(signal.ITIMER_REAL, 1, 1)\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "done = libc.copy_file_range(a, None, b, None, ctypes.c_size_t(9_000_000), 0)\n"
        "print(done, ctypes.get_errno(), os.fstat(b).st_size)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(mounted.path / "a"), str(mounted.path / "b")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["-1", str(errno.EINTR), "0"], done.stderr
    (mounted.path / "b").write_bytes(b"something else")
    mounted.heal()
    mounted.umount()
    assert (mounted.store_dir / "b").read_bytes() == b"something else"
