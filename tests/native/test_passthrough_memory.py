"""Files of a RAM tier are passed through on a mount that is written to: a writer gets the file that readers have.

That file is in memory; what fsync and close promise is kept all the same, because the write tier gets the bytes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.native.test_passthrough import (
    BIG,
    RECORDED_S,
    content,
    in_store,
    in_tier,
    opened,
    passing,
    patch,
    seen_by_another_process,
)
from tests.native.test_passthrough_writes import native_factory, outliving
from tests.support.front import kill_engine, recovery_s
from tests.support.mount import Mounted, MountFactory, wait_until

pytestmark = pytest.mark.needs_fuse


HOWS = ("pwrite", "O_TRUNC", "truncate", "ftruncate", "append", "mmap", "ranges", "times")
OPTIONS = ("--negative-ttl", "0", "--upload-delay", "0.2")


@pytest.fixture(scope="module")
def two_tiers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    """Memory before a disk, with a file of its name for every way to change one; all are in memory."""
    factory = native_factory(tmp_path_factory)
    mounted = factory.prepare(options=OPTIONS)
    mounted.tiers = ("ram:128M", f"{mounted.base}/tier:1G")
    for name in (*HOWS, "again"):
        (mounted.store_dir / name).write_bytes(content(1))
    mounted.start()
    for name in (*HOWS, "again"):
        assert (mounted.path / name).read_bytes() == content(1)
    time.sleep(RECORDED_S)
    yield mounted
    factory.close()


@pytest.fixture
def in_memory(native_mounts: MountFactory) -> tuple[Mounted, Path]:
    """A mount with one tier, in memory, and a file in it."""
    mounted = native_mounts(options=OPTIONS, tiers=("ram:24M",))
    return mounted, in_tier(mounted, "f", content(1))


def tier_in_memory(mounted: Mounted) -> Path:
    return Path(next(tier["path"] for tier in mounted.status()["tiers"] if tier["volatile"]))


def live_files(mounted: Mounted) -> list[str]:
    return os.listdir(tier_in_memory(mounted) / "dirty")


@pytest.mark.parametrize("how", HOWS)
def test_changes_while_a_reader_has_it_open(two_tiers: Mounted, how: str) -> None:
    mounted, data = two_tiers, content(1)
    path = mounted.path / how
    with passing(mounted, 1 if how == "truncate" else 2), opened(path) as reader:
        assert os.pread(reader, 10, 5) == data[5:15]
        if how == "truncate":
            os.truncate(path, 1_000_001)
            data = data[:1_000_001]
        else:
            flags = {"O_TRUNC": os.O_RDWR | os.O_TRUNC, "append": os.O_WRONLY | os.O_APPEND}.get(how, os.O_RDWR)
            with opened(path, flags) as writer:
                if how == "pwrite":
                    os.pwrite(writer, b"changed", 100)
                    os.pwrite(writer, b"tail", BIG)
                    data = patch(patch(data, 100, b"changed"), BIG, b"tail")
                elif how == "O_TRUNC":
                    assert os.pread(reader, 10, 0) == b""
                    os.write(writer, b"anew")
                    data = b"anew"
                elif how == "ftruncate":
                    os.pwrite(writer, b"early", 0)
                    os.ftruncate(writer, 12_345)
                    assert os.pread(reader, BIG, 0) == patch(data, 0, b"early")[:12_345]
                    os.ftruncate(writer, 20_000)
                    data = patch(data, 0, b"early")[:12_345].ljust(20_000, b"\0")
                elif how == "append":
                    for _ in range(3):
                        os.write(writer, b"more")
                    data += b"more" * 3
                elif how == "mmap":
                    with mmap.mmap(writer, BIG) as mapped:
                        mapped[1000:1007] = b"through"
                        assert os.pread(reader, 7, 1000) == b"through"
                    data = patch(data, 1000, b"through")
                elif how == "ranges":
                    os.pwrite(writer, b"before", 4090)
                    os.posix_fallocate(writer, BIG, 5000)
                    data = patch(data, 4090, b"before") + bytes(5000)
                    assert os.copy_file_range(writer, writer, 4096, 0, BIG - 100) == 4096
                    data = patch(data, BIG - 100, data[:4096])
                else:
                    os.utime(writer, ns=(10**18, 10**18))
                    assert seen_by_another_process(path) == (BIG, 10**18)
                assert os.fstat(writer).st_size == len(data)
        assert os.fstat(reader).st_size == len(data)
        assert os.pread(reader, len(data) + 1, 0) == data
        assert seen_by_another_process(path)[0] == len(data)
        assert live_files(mounted)
        assert in_store(mounted, how) == data
        assert os.pread(reader, len(data) + 1, 0) == data
    assert path.read_bytes() == data
    wait_until(lambda: not live_files(mounted), "the end of the live file")


def test_fsync_and_close_survive_the_loss_of_memory(in_memory: tuple[Mounted, Path]) -> None:
    mounted, path = in_memory
    data = content(1)
    mounted.fail({"kind": "outage"})
    with outliving(path, os.O_RDONLY) as reader, outliving(path, os.O_RDWR) as writer:
        os.pwrite(writer, b"synced", 10)
        os.fsync(writer)
        other = os.open(path, os.O_RDWR)
        os.pwrite(other, b"closed", 1_000_000)
        os.close(other)
        data = patch(patch(data, 10, b"synced"), 1_000_000, b"closed")
        assert os.pread(reader, BIG + 1, 0) == data
        memory = tier_in_memory(mounted)
        mounted.kill9()
        for file in (memory / "dirty").iterdir():
            file.unlink()
        mounted.heal()
        mounted.start()
    assert in_store(mounted, "f") == data
    assert path.read_bytes() == data


def test_uploaded_and_written_again(two_tiers: Mounted) -> None:
    """Between uploads the file in memory and the clean copy in the write tier are two."""
    mounted, data = two_tiers, content(1)
    path = mounted.path / "again"
    with opened(path) as reader:
        for number in range(3):
            with opened(path, os.O_RDWR) as writer:
                os.pwrite(writer, b"round %d" % number, number * 100_000)
            data = patch(data, number * 100_000, b"round %d" % number)
            assert in_store(mounted, "again") == data
            mounted.cli("evict", str(path), check=False)
            assert os.pread(reader, BIG + 1, 0) == data
            with opened(path) as again:
                assert os.pread(again, BIG + 1, 0) == data
    assert path.read_bytes() == data


@pytest.mark.parametrize("how", ["reader only", "writer"])
def test_open_over_the_death_of_an_engine(in_memory: tuple[Mounted, Path], how: str) -> None:
    mounted, path = in_memory
    data = content(1)
    with opened(path) as reader, contextlib.ExitStack() as stack:
        if how == "writer":
            writer = stack.enter_context(opened(path, os.O_RDWR))
            os.pwrite(writer, b"before", 10)
            data = patch(data, 10, b"before")
        kill_engine(mounted)
        assert os.pread(reader, BIG + 1, 0) == data
        recovery_s(mounted, "probe-directory")
        mounted.cli("evict", str(path), check=False)
        if how == "reader only":
            writer = stack.enter_context(opened(path, os.O_RDWR))
        os.pwrite(writer, b"after", BIG - 2)
        data = patch(data, BIG - 2, b"after")
        assert seen_by_another_process(path)[0] == len(data)
        assert os.pread(reader, len(data) + 1, 0) == data
        with opened(path) as again:
            assert os.pread(again, len(data) + 1, 0) == data
    assert in_store(mounted, "f") == data
    assert path.read_bytes() == data


def test_evicted_while_it_is_read(in_memory: tuple[Mounted, Path]) -> None:
    mounted, path = in_memory
    data = content(1)
    with passing(mounted, 2), opened(path) as reader:
        for i in range(12):
            (mounted.store_dir / f"g{i}").write_bytes(content(100 + i))
        for i in range(12):
            assert (mounted.path / f"g{i}").read_bytes() == content(100 + i)
        assert os.pread(reader, BIG + 1, 0) == data
        with opened(path, os.O_RDWR) as writer:
            os.pwrite(writer, b"changed", 0)
        data = patch(data, 0, b"changed")
        assert os.pread(reader, BIG + 1, 0) == data
    assert path.read_bytes() == data
