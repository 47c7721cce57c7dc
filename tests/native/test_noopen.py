"""Read-only mounts whose files the kernel opens without asking (``--open-mode``): what is read, and what is promised.

The test of the front's part alone, request by request, is ``tierfs_native/tests/test_noopen.c``.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.front import engine_pid, kill_engine
from tests.support.mount import Mounted, MountFactory, mount_entry, opened, wait_until

pytestmark = pytest.mark.needs_fuse

BIG = 3_000_000
SMALL = 20_000
AFTER = 1024
"""Small opens in a row after which ``auto`` stops asking (``TIERFS_NOOPEN_AFTER``)."""
RECORDED_S = 0.8
"""By then the tier's index has recorded what was read."""


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def replace_object(mounted: Mounted, name: str, data: bytes) -> None:
    """As another writer of the bucket does it."""
    draft = mounted.base / "draft"
    draft.write_bytes(data)
    os.utime(draft, ns=(1, time.time_ns()))
    draft.rename(mounted.store_dir / name)


def read_only(factory: MountFactory, mode: str, *options: str, contents: dict[str, bytes]) -> Mounted:
    """A mount of these files, each of which has been read once."""
    mounted = factory.prepare(options=("--read-only", "--open-mode", mode, *options))
    for name, data in contents.items():
        (mounted.store_dir / name).write_bytes(data)
    mounted.start()
    for name, data in contents.items():
        assert (mounted.path / name).read_bytes() == data
    time.sleep(RECORDED_S)
    return mounted


def out_of_kernel_cache(descriptor: int) -> None:
    """What is read next of this file has to be asked for. The mount's own pages only: others go on as before."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def reads_as(path: Path, data: bytes) -> bool:
    """False also for a version that is gone and that nobody has: ESTALE, until its name is looked up again."""
    try:
        return path.read_bytes() == data
    except OSError as error:
        assert error.errno == errno.ESTALE
        return False


def asks(mounted: Mounted) -> bool:
    return not mounted.status()["front"]["no_open"]


def open_often(path: Path, count: int) -> bool:
    """Returns False, for use in a condition."""
    for _ in range(count):
        os.close(os.open(path, os.O_RDONLY))
    return False


def assert_hits_are_not_asked_for(mounted: Mounted, contents: dict[str, bytes]) -> None:
    """Nothing reaches the front for a file that the kernel has: no open, no read, no flush, no release.

    Python's own ``open`` would ask whether it is a terminal, which the kernel passes on each time.
    """
    before = mounted.status()["front"]
    for _ in range(100):
        for name, data in contents.items():
            with opened(mounted.path / name) as descriptor:
                assert os.read(descriptor, BIG + 1) == data
    after = mounted.status()["front"]
    # Somebody may have made the kernel drop its caches meanwhile; 400 opens would be 400 requests at least.
    assert after["answered"] + after["relayed"] - before["answered"] - before["relayed"] < 200
    assert after["passthrough_opens"] == after["opened_here"] == 0
    entry = mount_entry(mounted.path)
    assert entry is not None
    assert Path(f"/sys/class/bdi/{entry[0]}/read_ahead_kb").read_text().strip() == "1024"


def test_every_way_to_read(native_mounts: MountFactory) -> None:
    contents = {
        "big": content(1, BIG),
        "small": content(2, SMALL),
        "empty": b"",
        "odd": content(3, 1_048_577),
    }
    mounted = read_only(native_mounts, "none", contents=contents)
    chance = random.Random(1)
    for name, data in contents.items():
        size = len(data)
        with opened(mounted.path / name) as descriptor:
            for cold in (False, True):
                if cold:
                    out_of_kernel_cache(descriptor)
                assert os.pread(descriptor, size + 1, 0) == data
                for _ in range(50):
                    offset, length = chance.randrange(size + 100), chance.choice([1, 4096, 200_000])
                    assert os.pread(descriptor, length, offset) == data[offset : offset + length]
                if data:
                    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as mapped:
                        assert mapped[:] == data
            assert os.fstat(descriptor).st_size == size
            os.fsync(descriptor)
            if data:
                assert os.lseek(descriptor, 5, os.SEEK_DATA) == 5
                assert os.lseek(descriptor, 5, os.SEEK_HOLE) == size
            with pytest.raises(OSError) as failed:
                os.lseek(descriptor, size, os.SEEK_DATA)
            assert failed.value.errno == errno.ENXIO
        with opened(mounted.path / name, os.O_RDONLY | os.O_DIRECT) as direct:
            buffer = mmap.mmap(-1, max(4096, -(-size // 4096) * 4096))
            done = 0
            while done < size:
                done += os.preadv(direct, [memoryview(buffer)[done:]], done)
            assert buffer[:size] == data
    assert not asks(mounted)
    assert "files are opened without asking" in mounted.cli("status", str(mounted.path)).stdout
    assert_hits_are_not_asked_for(mounted, contents)


def test_what_is_not_local_comes_from_the_store(native_mounts: MountFactory) -> None:
    """Also after the death of an engine, and without that the next one is told what is open."""
    mounted = native_mounts.prepare(tiers=(), options=("--read-only", "--open-mode", "none"))
    for number in range(8):
        (mounted.store_dir / f"f{number}").write_bytes(content(number, 300_000 * number))
    (mounted.store_dir / "script.py").write_text("print('from the bucket')")
    mounted.start()
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(opened(mounted.path / f"f{number}")) for number in range(8)]
        for dead in (False, True):
            if dead:
                kill_engine(mounted)
            for number, reader in enumerate(readers):
                assert os.pread(reader, 4_000_000, 0) == content(number, 300_000 * number)
                out_of_kernel_cache(reader)
    said = subprocess.run(
        [sys.executable, mounted.path / "script.py"], capture_output=True, text=True, check=True, timeout=30
    )
    assert said.stdout == "from the bucket\n"


@pytest.mark.semantics(
    "S-OPEN-1",
    "In a read-only mount whose files are opened without asking, what others put in the place of an object is read by an open after the time-to-live, while a file that was open before keeps giving the old bytes, or ESTALE.",
)
@pytest.mark.parametrize(("mode", "local"), [("none", True), ("none", False), ("ask", True)])
def test_an_object_that_is_replaced(native_mounts: MountFactory, mode: str, local: bool) -> None:
    mounted = native_mounts.prepare(
        tiers=None if local else (), options=("--read-only", "--open-mode", mode, "--ttl", "0.5")
    )
    old = {"small": content(1, SMALL), "big": content(2, BIG)}
    new = {"small": content(3, SMALL + 100), "big": content(4, BIG + 100)}
    for name, data in old.items():
        (mounted.store_dir / name).write_bytes(data)
    mounted.start()
    with contextlib.ExitStack() as stack:
        readers = {name: stack.enter_context(opened(mounted.path / name)) for name in old}
        for name, reader in readers.items():
            path = mounted.path / name
            assert path.read_bytes() == old[name]
            replace_object(mounted, name, new[name])
            wait_until(lambda path=path, name=name: reads_as(path, new[name]), "the new one", limit_s=20)
            assert path.stat().st_size == len(new[name])
            for cold in (False, True):
                if cold:
                    out_of_kernel_cache(reader)
                try:
                    assert os.pread(reader, BIG, 0) == old[name]
                except OSError as error:
                    assert error.errno == errno.ESTALE
                    assert not local
            assert path.read_bytes() == new[name]


def test_a_file_without_a_name_outlives_the_engine(native_mounts: MountFactory) -> None:
    """No engine has been told that it is open; the kernel has not forgotten it, and that is enough."""
    contents = {"f": content(1, BIG), "g": content(2, SMALL)}
    mounted = read_only(native_mounts, "none", "--ttl", "0.5", contents=contents)
    with contextlib.ExitStack() as stack:
        readers = {name: stack.enter_context(opened(mounted.path / name)) for name in contents}
        for name in contents:
            (mounted.store_dir / name).unlink()
            wait_until(lambda name=name: not (mounted.path / name).exists(), "no name")
        kill_engine(mounted)
        (mounted.store_dir / "later").write_bytes(b"x")
        wait_until((mounted.path / "later").exists, "the next engine", limit_s=20)
        for name, reader in readers.items():
            out_of_kernel_cache(reader)
            assert os.pread(reader, BIG + 1, 0) == contents[name]
    assert engine_pid(mounted) is not None
    wait_until(lambda: mounted.status()["inodes"] <= 2, "the records to go with the last close", limit_s=20)


def test_nothing_can_be_changed(native_mounts: MountFactory) -> None:
    """Not even after somebody has told the kernel to let writes through."""
    mounted = read_only(native_mounts, "none", contents={"f": content(1, SMALL)})
    path = mounted.path / "f"
    with pytest.raises(OSError, match="Read-only"):
        os.open(path, os.O_RDWR)
    subprocess.run(["mount", "-i", "-o", "remount,rw", mounted.path], check=True, capture_output=True)
    errors = set()

    def attempt(change: object) -> None:
        try:
            change()  # type: ignore[operator]
        except OSError as error:
            errors.add(error.errno)
        else:
            errors.add(0)

    def write() -> None:
        with opened(path, os.O_RDWR) as descriptor:
            os.pwrite(descriptor, b"x", 0)
            os.fsync(descriptor)

    def allocate() -> None:
        with opened(path, os.O_RDWR) as descriptor:
            os.posix_fallocate(descriptor, 0, 2 * SMALL)

    def copy() -> None:
        with opened(path, os.O_RDWR) as descriptor:
            os.copy_file_range(descriptor, descriptor, 100, 0, SMALL // 2)

    for change in (
        write,
        allocate,
        copy,
        lambda: os.truncate(path, 0),
        lambda: os.open(path, os.O_WRONLY | os.O_TRUNC),
    ):
        attempt(change)
    assert errors == {errno.EROFS}
    with opened(path) as descriptor:
        out_of_kernel_cache(descriptor)
        assert os.pread(descriptor, SMALL + 1, 0) == content(1, SMALL)


def test_auto_waits_for_many_small_files_and_no_large_one(native_mounts: MountFactory) -> None:
    contents = {"small": content(1, SMALL), "big": content(2, BIG)}
    mounted = read_only(native_mounts, "auto", contents=contents)
    small, big = mounted.path / "small", mounted.path / "big"
    if mounted.status()["front"]["passthrough_errno"]:
        pytest.skip("this kernel refuses passthrough")
    passed = mounted.status()["front"]["passthrough_opens"]
    with opened(small) as early:
        for _ in range(3):
            open_often(small, AFTER // 2)
            assert big.read_bytes() == contents["big"]
        assert asks(mounted)
        assert mounted.status()["front"]["passthrough_opens"] == passed + 3
        with opened(big) as reader:
            # While a file is passed through, its inode cannot be opened in any other way.
            open_often(small, AFTER + 2)
            assert asks(mounted)
            assert os.pread(reader, BIG, 0) == contents["big"]
            assert big.read_bytes() == contents["big"]
        with opened(big) as reader:
            assert os.pread(reader, 10, 0) == contents["big"][:10]
        # The large file's release may still be on its way, which begins the count anew.
        wait_until(lambda: open_often(small, AFTER + 1) or not asks(mounted), "the end of asking")
        assert os.pread(early, SMALL, 0) == contents["small"]
    for name, data in contents.items():
        for flags in (0, os.O_DIRECT):
            with opened(mounted.path / name, flags) as descriptor:
                assert os.readv(descriptor, [mmap.mmap(-1, 1 << 20)]) == min(len(data), 1 << 20)
        assert (mounted.path / name).read_bytes() == data
    assert mounted.status()["front"]["passthrough_opens"] == passed + 6
    assert mounted.status()["open_handles"] == 0


def test_opens_are_asked_for_where_something_can_be_written(native_mounts: MountFactory) -> None:
    mounted = native_mounts.prepare()
    (mounted.store_dir / "f").write_bytes(b"data")
    mounted.start()
    open_often(mounted.path / "f", AFTER + 2)
    assert asks(mounted)
    assert "without asking" not in mounted.cli("status", str(mounted.path)).stdout
