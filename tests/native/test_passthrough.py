"""Reads and writes that the kernel passes through to the tier's file: the same bytes, sizes and times as ever.

The rule of the kernel behind most of it: while an inode is open, all its opens are of one kind, and all that pass
through use one file.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.front import kill_engine, recovery_s
from tests.support.mount import Mounted, MountFactory, opened, wait_until

pytestmark = pytest.mark.needs_fuse

BIG = 3_000_000
"""Larger than what is packed into a segment with others."""
RECORDED_S = 0.8
"""By then the tier's index has recorded what was read: files are lent that the next engine would find as well."""


def content(seed: int, size: int = BIG) -> bytes:
    return random.Random(seed).randbytes(size)


def passed(mounted: Mounted) -> int:
    front = mounted.status()["front"]
    if front["passthrough_errno"]:
        pytest.skip(f"this kernel refuses passthrough: {os.strerror(front['passthrough_errno'])}")
    return int(front["passthrough_opens"])


def in_tier(mounted: Mounted, name: str, data: bytes) -> Path:
    """Put a file into the bucket and read it once, so that all of it is in the tier."""
    (mounted.store_dir / name).write_bytes(data)
    path = mounted.path / name
    wait_until(path.exists, "the name")
    assert path.read_bytes() == data
    time.sleep(RECORDED_S)
    return path


def in_store(mounted: Mounted, name: str) -> bytes:
    mounted.flush()
    return (mounted.store_dir / name).read_bytes()


@pytest.fixture
def mounted(native_mounts: MountFactory) -> Mounted:
    """Names in the bucket are looked for again at once; uploads come soon."""
    mounted = native_mounts(options=("--negative-ttl", "0", "--upload-delay", "0.2"))
    in_tier(mounted, "probe", content(0))
    with opened(mounted.path / "probe"):
        assert passed(mounted) == 1
    return mounted


@contextlib.contextmanager
def passing(mounted: Mounted, count: int = 1) -> Iterator[None]:
    """So many opens in the block pass through."""
    before = passed(mounted)
    yield
    assert passed(mounted) - before == count


def out_of_page_cache(mounted: Mounted) -> None:
    subprocess.run(["sync", "-f", mounted.base], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3")


def direct_read(descriptor: int, size: int) -> bytes:
    """With O_DIRECT: aligned buffer, whole blocks."""
    buffer = mmap.mmap(-1, (size + 4095) // 4096 * 4096)
    try:
        count = 0
        while count < size:
            got = os.preadv(descriptor, [memoryview(buffer)[count:]], count)
            if not got:
                break
            count += got
        return bytes(buffer[:count])
    finally:
        buffer.close()


def test_every_way_to_read(mounted: Mounted, base_dir: Path) -> None:
    data = content(1)
    path = in_tier(mounted, "f", data)
    # Two readers, and a new file that is written twice.
    with passing(mounted, 4), opened(path) as descriptor, opened(path, os.O_RDONLY | os.O_DIRECT) as direct:
        chance = random.Random(1)
        for drop in (False, True):
            if drop:
                out_of_page_cache(mounted)
            assert os.read(descriptor, BIG + 1) == data[: len(os.pread(descriptor, BIG + 1, 0))]
            for _ in range(200):
                offset, length = chance.randrange(BIG + 5000), chance.choice([1, 4096, 100_000])
                assert os.pread(descriptor, length, offset) == data[offset : offset + length]
            assert direct_read(direct, BIG) == data
            for kind in (mmap.MAP_SHARED, mmap.MAP_PRIVATE):
                with mmap.mmap(descriptor, BIG, flags=kind, prot=mmap.PROT_READ) as mapped:
                    assert mapped[:] == data
            with mmap.mmap(descriptor, BIG, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
                mapped[:5] = b"mine!"
            target = os.open(base_dir / "copy", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            sent = 0
            while sent < BIG:
                sent += os.sendfile(target, descriptor, sent, BIG - sent)
            assert os.pread(target, BIG + 1, 0) == data
            os.close(target)
            with opened(mounted.path / "copy", os.O_RDWR | os.O_CREAT | os.O_TRUNC) as target:
                copied = 0
                while copied < BIG:
                    copied += os.copy_file_range(descriptor, target, BIG - copied, copied)
                assert os.pread(target, BIG + 1, 0) == data
            os.lseek(descriptor, 0, os.SEEK_SET)
        assert os.lseek(descriptor, 0, os.SEEK_END) == BIG
        assert os.lseek(descriptor, 0, os.SEEK_HOLE) == BIG
    assert (mounted.store_dir / "f").read_bytes() == data


def test_io_uring(mounted: Mounted) -> None:
    """fio reads through io_uring with 16 requests at a time, and checks what it wrote with checksums."""
    path = mounted.path / "f"
    job = ["--name=j", f"--filename={path}", "--size=4M", "--bs=4k", "--ioengine=io_uring", "--iodepth=16",
           "--verify=crc32c", "--randseed=7", "--thread"]  # fmt: skip
    subprocess.run(["fio", *job, "--rw=write", "--do_verify=0"], check=True, capture_output=True, cwd=mounted.base)
    mounted.flush()
    time.sleep(RECORDED_S)
    before = passed(mounted)
    subprocess.run(["fio", *job, "--rw=randread"], check=True, capture_output=True, cwd=mounted.base)
    assert passed(mounted) > before


def patch(data: bytes, offset: int, new: bytes) -> bytes:
    whole = bytearray(data.ljust(offset + len(new), b"\0"))
    whole[offset : offset + len(new)] = new
    return bytes(whole)


def seen_by_another_process(path: Path) -> tuple[int, int]:
    """(size, mtime in ns) from stat(2) in a process of its own."""
    code = "import os, sys; s = os.stat(sys.argv[1]); print(s.st_size, s.st_mtime_ns)"
    said = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True).stdout
    size, mtime_ns = map(int, said.split())
    return size, mtime_ns


def test_a_reader_and_then_a_writer(mounted: Mounted) -> None:
    """The writer passes through as well, since all opens of an inode do what the first one does."""
    data = content(2)
    path = in_tier(mounted, "f", data)
    old_ns = path.stat().st_mtime_ns
    with passing(mounted, 3), opened(path) as reader:
        assert os.pread(reader, 10, 0) == data[:10]
        with opened(path, os.O_RDWR) as writer:
            data = patch(data, 100, b"changed")
            assert os.pwrite(writer, b"changed", 100) == 7
            assert os.pread(reader, 200, 0) == data[:200]
            data += b"tail" * 10_000
            assert os.pwrite(writer, b"tail" * 10_000, BIG) == 40_000
            assert os.fstat(reader).st_size == len(data)
            size, mtime_ns = seen_by_another_process(path)
            assert size == len(data)
            assert mtime_ns > old_ns
            assert abs(mtime_ns - time.time_ns()) < 5e9
            assert os.fstat(writer).st_mtime_ns == mtime_ns
            assert path.read_bytes() == data
        assert os.pread(reader, len(data) + 1, 0) == data
        assert in_store(mounted, "f") == data
        assert os.pread(reader, len(data) + 1, 0) == data
    assert path.stat().st_size == len(data)
    mounted.remount()
    assert path.read_bytes() == data
    assert path.stat().st_mtime_ns == mtime_ns


def test_a_writer_and_then_a_reader(mounted: Mounted) -> None:
    data = content(3)
    path = in_tier(mounted, "f", data)
    with opened(path, os.O_RDWR) as writer:
        os.pwrite(writer, b"first", 0)
        with opened(path) as reader:
            data = patch(data, 0, b"first")
            assert os.pread(reader, BIG + 1, 0) == data
            os.pwrite(writer, b"second", 50)
            data = patch(data, 50, b"second")
            assert os.pread(reader, BIG + 1, 0) == data
    assert in_store(mounted, "f") == data
    assert path.read_bytes() == data


@pytest.mark.parametrize("how", ["O_TRUNC", "truncate", "ftruncate", "append", "mmap", "grow"])
def test_changes_while_a_reader_has_it_open(mounted: Mounted, how: str) -> None:
    data = content(4)
    path = in_tier(mounted, "f", data)
    with passing(mounted, 1 if how == "truncate" else 2), opened(path) as reader:
        assert os.pread(reader, 10, 5) == data[5:15]
        if how == "O_TRUNC":
            with opened(path, os.O_WRONLY | os.O_TRUNC) as writer:
                assert os.fstat(reader).st_size == 0
                assert os.pread(reader, 10, 0) == b""
                os.write(writer, b"anew")
            data = b"anew"
        elif how == "truncate":
            os.truncate(path, 1_000_001)
            data = data[:1_000_001]
        elif how == "ftruncate":
            with opened(path, os.O_RDWR) as writer:
                os.ftruncate(writer, 12_345)
                assert os.pread(reader, BIG, 0) == data[:12_345]
                os.ftruncate(writer, 20_000)
            data = data[:12_345] + bytes(20_000 - 12_345)
        elif how == "append":
            with opened(path, os.O_WRONLY | os.O_APPEND) as writer:
                for _ in range(3):
                    os.write(writer, b"more")
            data += b"more" * 3
        elif how == "mmap":
            with opened(path, os.O_RDWR) as writer, mmap.mmap(writer, BIG) as mapped:
                mapped[1000:1007] = b"through"
                assert os.pread(reader, 7, 1000) == b"through"
                mapped.flush()
            data = patch(data, 1000, b"through")
        else:
            with opened(path, os.O_WRONLY) as writer:
                os.pwrite(writer, b"far", 2 * BIG)
            data = patch(data, 2 * BIG, b"far")
        assert os.fstat(reader).st_size == len(data)
        assert os.pread(reader, len(data) + 1, 0) == data
        assert seen_by_another_process(path)[0] == len(data)
        assert in_store(mounted, "f") == data
        assert os.pread(reader, len(data) + 1, 0) == data
    assert path.read_bytes() == data
    mounted.remount()
    assert path.read_bytes() == data


def test_mapped_writes_reach_the_store(mounted: Mounted) -> None:
    """A shared mapping outlives the descriptor; what it writes comes with the last unmap."""
    data = content(5)
    path = in_tier(mounted, "f", data)
    with opened(path):
        descriptor = os.open(path, os.O_RDWR)
        mapped = mmap.mmap(descriptor, BIG)
        os.close(descriptor)
        mapped[7:11] = b"late"
        mapped.close()
    data = patch(data, 7, b"late")
    assert path.read_bytes() == data
    assert in_store(mounted, "f") == data


def test_many_opens_dup_and_fork(mounted: Mounted) -> None:
    data = content(6)
    path = in_tier(mounted, "f", data)
    with passing(mounted, 50):
        descriptors = [os.open(path, os.O_RDONLY) for _ in range(50)]
        twin = os.dup(descriptors[0])
        pid = os.fork()
        if pid == 0:
            good = all(os.pread(d, 100, 50) == data[50:150] for d in descriptors)
            os._exit(0 if good else 1)
        for descriptor in descriptors:
            os.close(descriptor)
        assert os.waitpid(pid, 0)[1] == 0
        assert os.pread(twin, BIG, 0) == data
        os.close(twin)
    with passing(mounted, 1), opened(path) as descriptor:
        assert os.pread(descriptor, BIG, 0) == data


def test_unlinked_renamed_and_replaced_while_open(mounted: Mounted) -> None:
    data = content(7)
    for name in ("unlinked", "renamed", "replaced", "in the bucket"):
        in_tier(mounted, name, data)
    with passing(mounted, 5), contextlib.ExitStack() as stack:  # readers, and who writes "new"
        readers = [
            stack.enter_context(opened(mounted.path / name)) for name in ("unlinked", "renamed", "replaced", "in the bucket")
        ]
        os.unlink(mounted.path / "unlinked")
        os.rename(mounted.path / "renamed", mounted.path / "other")
        (mounted.path / "new").write_bytes(b"new")
        os.rename(mounted.path / "new", mounted.path / "replaced")
        (mounted.store_dir / "in the bucket").write_bytes(b"written elsewhere")
        mounted.flush()
        out_of_page_cache(mounted)
        for reader in readers:
            assert os.pread(reader, BIG + 1, 0) == data
    assert (mounted.path / "replaced").read_bytes() == b"new"
    assert (mounted.path / "other").read_bytes() == data
    assert not (mounted.path / "unlinked").exists()


@pytest.mark.parametrize("how", ["evict", "full"])
def test_evicted_while_open(native_mounts: MountFactory, how: str) -> None:
    """What somebody reads directly stays in the tier until it is closed."""
    mounted = native_mounts.prepare(options=("--negative-ttl", "0"))
    mounted.tiers = (f"{mounted.base / 'tier'}:24M",)
    mounted.start()
    data = content(8)
    path = in_tier(mounted, "f", data)
    with passing(mounted), opened(path) as reader:
        if how == "evict":
            mounted.cli("evict", str(path), check=False)
        else:
            for i in range(20):
                (mounted.store_dir / f"g{i}").write_bytes(content(100 + i))
            for i in range(20):
                assert (mounted.path / f"g{i}").read_bytes() == content(100 + i)
        out_of_page_cache(mounted)
        assert os.pread(reader, BIG + 1, 0) == data
    assert path.read_bytes() == data


@pytest.mark.parametrize("how", ["evict", "writer", "changed before"])
def test_open_over_the_death_of_an_engine(mounted: Mounted, how: str) -> None:
    """The next engine knows what is passed through: it neither evicts that nor writes into another file."""
    data = content(9)
    path = in_tier(mounted, "f", data)
    with opened(path) as reader, contextlib.ExitStack() as stack:
        if how == "changed before":
            writer = stack.enter_context(opened(path, os.O_RDWR))
            os.pwrite(writer, b"before", 10)
            data = patch(data, 10, b"before")
        kill_engine(mounted)
        assert os.pread(reader, BIG + 1, 0) == data
        recovery_s(mounted, "probe-directory")
        if how == "evict":
            mounted.cli("evict", str(path), check=False)
        else:
            if how == "writer":
                writer = stack.enter_context(opened(path, os.O_RDWR))
            os.pwrite(writer, b"after", BIG - 2)
            data = patch(data, BIG - 2, b"after")
            assert seen_by_another_process(path)[0] == len(data)
        out_of_page_cache(mounted)
        assert os.pread(reader, len(data) + 1, 0) == data
        with opened(path) as again:
            assert os.pread(again, len(data) + 1, 0) == data
    assert path.read_bytes() == data
    assert in_store(mounted, "f") == data


def test_uploaded_and_evicted_while_a_reader_has_it_open(mounted: Mounted) -> None:
    """After the upload the staging file is a clean copy: it is still what the reader has, and what writers get."""
    data = content(10)
    path = in_tier(mounted, "f", data)
    with opened(path) as reader:
        for number in range(3):
            with opened(path, os.O_RDWR) as writer:
                os.pwrite(writer, b"round %d" % number, number * 100_000)
            data = patch(data, number * 100_000, b"round %d" % number)
            assert in_store(mounted, "f") == data
            mounted.cli("evict", str(path), check=False)
            out_of_page_cache(mounted)
            assert os.pread(reader, BIG + 1, 0) == data
            with opened(path) as again:
                assert os.pread(again, BIG + 1, 0) == data
    assert path.read_bytes() == data


def test_small_files_are_packed_and_not_passed_through(mounted: Mounted) -> None:
    contents = {f"s{i}": content(i, 5000 + i) for i in range(30)}
    for name, data in contents.items():
        (mounted.store_dir / name).write_bytes(data)
    for _ in range(2):
        for name, data in contents.items():
            assert (mounted.path / name).read_bytes() == data
    with passing(mounted, 0):
        for name, data in contents.items():
            assert (mounted.path / name).read_bytes() == data


@pytest.mark.parametrize(
    ("tiers", "options", "passes"),
    [
        (None, ("--read-only",), True),
        ((), (), False),
        (("ram:64M",), (), True),
        (("ram:64M",), ("--read-only",), True),
        (None, ("--read-only", "--open-mode", "none"), False),
        (("ram:64M", "DISK"), (), True),
    ],
    ids=["read-only", "no tier", "ram tier", "ram tier, read-only", "opens not asked for", "two tiers"],
)
def test_other_mounts(
    native_mounts: MountFactory, tiers: tuple[str, ...] | None, options: tuple[str, ...], passes: bool
) -> None:
    mounted = native_mounts.prepare(tiers=tiers, options=("--negative-ttl", "0", *options))
    mounted.tiers = tuple(tier.replace("DISK", f"{mounted.base}/tier:1G") for tier in mounted.tiers)
    mounted.start()
    data = content(11)
    path = in_tier(mounted, "f", data)
    opens = 2 if passes and "--read-only" not in options else int(passes)  # the writer's as well
    with passing(mounted, opens), opened(path) as reader:
        assert os.pread(reader, BIG + 1, 0) == data
        with mmap.mmap(reader, BIG, prot=mmap.PROT_READ) as mapped:
            assert mapped[:] == data
        if "--read-only" in options:
            with pytest.raises(OSError, match="Read-only"):
                os.open(path, os.O_RDWR)
        else:
            with opened(path, os.O_RDWR) as writer:
                os.pwrite(writer, b"changed", 3)
            data = patch(data, 3, b"changed")
            assert os.pread(reader, BIG + 1, 0) == data
            assert in_store(mounted, "f") == data
