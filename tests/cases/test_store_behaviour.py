"""Cases C14 to C19 as far as any store can show them: parts, orphaned uploads, credentials, outages."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from tests.support.mount import Mounted, MountFactory, wait_until
from tests.support.posix import errno_of
from tierfs.store.base import MAX_OBJECT_BYTES, MAX_PARTS, part_size_for

MIB = 1 << 20


@pytest.mark.parametrize("size", [0, 1, 80 * 1024**3, 160_000 * MIB + 1, 10**12, MAX_OBJECT_BYTES])
def test_c14_part_size_grows_until_the_parts_suffice(size: int) -> None:
    part = part_size_for(size, 16 * MIB)
    assert part >= 16 * MIB
    assert -(-size // part) <= MAX_PARTS


@pytest.mark.usefixtures("needs_mount")
def test_c14_impossible_size_is_refused(mounted: Mounted) -> None:
    """At once; where the kernel writes to the tier's file without asking, at the next fsync."""
    with open(mounted.path / "f", "w+b", buffering=0) as file:
        written = errno_of(lambda: os.pwrite(file.fileno(), b"x", MAX_OBJECT_BYTES))
        assert errno.EFBIG in (written, errno_of(lambda: os.fsync(file.fileno())))
        assert errno_of(lambda: os.ftruncate(file.fileno(), MAX_OBJECT_BYTES + 1)) == errno.EFBIG
        file.truncate(0)
        file.write(b"fine")
    mounted.flush()
    assert (mounted.store_dir / "f").read_bytes() == b"fine"


def unfinished(store_dir: Path) -> list[Path]:
    return [p for p in (store_dir / ".tierfs" / "uploads").rglob("*") if p.is_file()]


@pytest.mark.usefixtures("needs_mount")
def test_c15_orphaned_uploads_are_resumed_or_aborted(mount_factory: MountFactory) -> None:
    options = ("--part-size", "5M", "--upload-delay", "0", "--upload-concurrency", "1")
    mounted = mount_factory.prepare(options=options)
    mounted.start()
    mounted.fail({"kind": "latency", "operation": "upload_part", "seconds": 0.4})
    data = os.urandom(31 * MIB)
    (mounted.path / "f").write_bytes(data)
    wait_until(lambda: any(p.name == "1.json" for p in unfinished(mounted.store_dir)), "a part in the store")
    mounted.kill9()
    assert unfinished(mounted.store_dir)
    mounted.heal()
    mounted.start()
    mounted.flush()
    assert (mounted.store_dir / "f").read_bytes() == data
    wait_until(lambda: not unfinished(mounted.store_dir), "the end of the orphaned upload")


@pytest.mark.usefixtures("needs_mount")
def test_c16_expired_token_is_refreshed(mount_factory: MountFactory) -> None:
    mounted = mount_factory.prepare()
    for i in range(5):
        (mounted.store_dir / f"f{i}").write_bytes(b"%d" % i * 1000)
    mounted.start()
    mounted.fail({"kind": "expired_token"})
    for i in range(5):
        assert (mounted.path / f"f{i}").read_bytes() == b"%d" % i * 1000
    (mounted.path / "new").write_bytes(b"new")
    mounted.flush()
    assert (mounted.store_dir / "new").read_bytes() == b"new"


@pytest.mark.usefixtures("needs_mount")
def test_c16_skewed_clock_is_called_by_its_name(mount_factory: MountFactory) -> None:
    mounted = mount_factory.prepare(options=("--store-timeout", "1"))
    mounted.fail({"kind": "clock_skew"})
    with pytest.raises(AssertionError, match="clock"):
        mounted.start()
    mounted.heal()
    mounted.start()


@pytest.mark.usefixtures("needs_mount")
@pytest.mark.parametrize("kind", ["short_body", "whole_object"])
def test_c18_short_body_never_enters_a_tier(mount_factory: MountFactory, kind: str) -> None:
    mounted = mount_factory.prepare()
    data = os.urandom(3 * MIB)
    (mounted.store_dir / "f").write_bytes(data)
    mounted.start()
    mounted.fail({"kind": kind, "operation": "get", "count": 4})
    assert (mounted.path / "f").read_bytes() == data
    mounted.remount()
    mounted.fail({"kind": "outage", "operation": "get"})
    assert (mounted.path / "f").read_bytes() == data


@pytest.mark.usefixtures("needs_mount")
def test_c19_handles_recover_after_an_outage(mount_factory: MountFactory) -> None:
    options = ("--store-timeout", "1", "--upload-delay", "0", "--ttl", "1")
    mounted = mount_factory.prepare(options=options)
    cached, cold = os.urandom(MIB), os.urandom(MIB)
    (mounted.store_dir / "cached").write_bytes(cached)
    (mounted.store_dir / "cold").write_bytes(cold)
    mounted.start()
    assert (mounted.path / "cached").read_bytes() == cached
    log = os.open(mounted.path / "log", os.O_CREAT | os.O_RDWR | os.O_APPEND)
    cold_handle = os.open(mounted.path / "cold", os.O_RDONLY)
    mounted.fail({"kind": "outage"})
    done = threading.Event()
    lines = 0

    def keep_writing() -> None:
        nonlocal lines
        while not done.is_set():
            os.write(log, b"line\n")
            lines += 1
            (mounted.path / f"small{lines % 20}").write_bytes(b"%d" % lines)

    writer = threading.Thread(target=keep_writing)
    writer.start()
    assert errno_of(lambda: os.pread(cold_handle, 4096, MIB - 4096)) in (errno.EIO, errno.ETIMEDOUT)
    assert (mounted.path / "cached").read_bytes() == cached
    mounted.heal()
    assert os.pread(cold_handle, MIB, 0) == cold
    done.set()
    writer.join()
    os.close(cold_handle)
    os.close(log)
    mounted.flush()
    assert (mounted.store_dir / "log").read_bytes() == b"line\n" * lines
    assert (mounted.store_dir / f"small{lines % 20}").read_bytes() == b"%d" % lines
