"""Files are written through passthrough while they are new or dirty: no request is made for a write.

What the engine has to know of such writes it learns from the file: sizes, times, what it takes on the disk, and that
an upload has been overtaken.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.native.test_passthrough import BIG, content, in_store, opened, patch, seen_by_another_process
from tests.support.front import kill_engine, recovery_s
from tests.support.mount import Mounted, MountFactory, wait_until
from tierfs.cli import native

pytestmark = pytest.mark.needs_fuse

MIB = 1 << 20
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL
LATE = ("--upload-delay", "600")
"""Nothing is uploaded by itself: what has been written stays dirty."""


@contextlib.contextmanager
def outliving(path: Path, flags: int = NEW) -> Iterator[int]:
    """A file that is open longer than its mount: close(2) has nobody to ask then."""
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def front(mounted: Mounted) -> dict[str, int]:
    status: dict[str, int] = mounted.status()["front"]
    if status["passthrough_errno"]:
        pytest.skip(f"this kernel refuses passthrough: {os.strerror(status['passthrough_errno'])}")
    return status


def passed(mounted: Mounted) -> int:
    return front(mounted)["passthrough_opens"]


def native_factory(tmp_path_factory: pytest.TempPathFactory) -> MountFactory:
    """As the fixture ``native_mounts``, for a whole module."""
    missing = native.why_not()
    if missing:
        if os.environ.get("CI") or os.environ.get("TIERFS_NEED_NATIVE"):
            pytest.fail(f"the native front cannot be tested: {missing}", pytrace=False)
        pytest.skip(f"the native front cannot be tested: {missing}")
    return MountFactory(tmp_path_factory.mktemp("native"), "native")


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    """One mount for what does not break it."""
    factory = native_factory(tmp_path_factory)
    yield factory(options=LATE)
    factory.close()


def test_writes_make_no_request(late: Mounted) -> None:
    data = content(1, 8 * MIB)
    with opened(late.path / "quiet", NEW) as descriptor:
        os.pwrite(descriptor, data[:MIB], 0)
        before = front(late)
        for start in range(0, 8 * MIB, MIB):
            assert os.pwrite(descriptor, data[start : start + MIB], start) == MIB
        for _ in range(1000):
            os.pwrite(descriptor, data[:4096], 0)
        after = front(late)
        assert after["passthrough_opens"] > 0
        # What status itself costs is not a request of the kernel's.
        assert after["relayed"] + after["answered"] - before["relayed"] - before["answered"] <= 2
        assert os.pread(descriptor, 9 * MIB, 0) == data


def test_close_makes_no_request(late: Mounted) -> None:
    for name, flags in (("new", NEW), ("new", os.O_RDWR)):
        with opened(late.path / name, flags) as descriptor:
            os.pwrite(descriptor, b"x", 0)
            before = front(late)
            for _ in range(200):
                os.close(os.dup(descriptor))
            after = front(late)
            assert after["relayed"] + after["answered"] - before["relayed"] - before["answered"] < 100


def test_sizes_and_times_while_it_is_written(late: Mounted) -> None:
    path = late.path / "sizes"
    data = content(2)
    with opened(path, NEW) as descriptor:
        assert seen_by_another_process(path)[0] == 0
        size = 0
        last_ns = 0
        for step in (1, 4095, 100_000, 1, BIG - 104_097):
            assert os.pwrite(descriptor, data[size : size + step], size) == step
            size += step
            seen, mtime_ns = seen_by_another_process(path)
            assert seen == size == os.fstat(descriptor).st_size
            assert mtime_ns > last_ns
            assert mtime_ns == os.fstat(descriptor).st_mtime_ns == os.fstat(descriptor).st_ctime_ns
            last_ns = mtime_ns
        assert abs(last_ns - time.time_ns()) < 5e9
        assert os.fstat(descriptor).st_blocks * 512 >= BIG
        assert path.read_bytes() == data
    assert seen_by_another_process(path) == (BIG, last_ns)
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    "how", ["O_TRUNC", "truncate", "ftruncate", "append", "mmap", "direct", "two handles", "times", "chmod", "ranges"]
)
def test_changes_of_a_file_that_is_being_written(late: Mounted, how: str) -> None:
    path = late.path / how
    data = content(3)
    before = passed(late)
    with opened(path, NEW) as descriptor, contextlib.ExitStack() as stack:
        assert passed(late) == before + 1
        assert os.pwrite(descriptor, data, 0) == BIG
        if how == "O_TRUNC":
            with opened(path, os.O_WRONLY | os.O_TRUNC) as other:
                assert os.fstat(descriptor).st_size == 0
                assert os.pread(descriptor, 10, 0) == b""
                os.pwrite(other, b"anew", 0)
            data = b"anew"
        elif how == "truncate":
            os.truncate(path, 1_000_001)
            data = data[:1_000_001]
        elif how == "ftruncate":
            os.ftruncate(descriptor, BIG)
            os.ftruncate(descriptor, 12_345)
            assert os.pread(descriptor, BIG, 0) == data[:12_345]
            os.pwrite(descriptor, b"end", 15_000)
            os.ftruncate(descriptor, 20_000)
            data = patch(data[:12_345], 15_000, b"end").ljust(20_000, b"\0")
        elif how == "append":
            appenders = [stack.enter_context(opened(path, os.O_WRONLY | os.O_APPEND)) for _ in range(2)]
            for number in range(6):
                os.write(appenders[number % 2], b"more%d" % number)
                data += b"more%d" % number
        elif how == "mmap":
            with mmap.mmap(descriptor, BIG) as mapped:
                mapped[1000:1007] = b"through"
                assert os.pread(descriptor, 7, 1000) == b"through"
            data = patch(data, 1000, b"through")
        elif how == "direct":
            other = stack.enter_context(opened(path, os.O_RDWR | os.O_DIRECT))
            with mmap.mmap(-1, 8192) as buffer:
                buffer[:] = b"d" * 8192
                assert os.pwrite(other, buffer, 4096) == 8192
            data = patch(data, 4096, b"d" * 8192)
        elif how == "two handles":
            other = stack.enter_context(opened(path, os.O_RDWR))
            os.pwrite(other, b"second", BIG - 3)
            os.pwrite(descriptor, b"first", 0)
            data = patch(patch(data, BIG - 3, b"second"), 0, b"first")
            assert os.pread(other, 5, 0) == b"first"
        elif how == "times":
            os.utime(descriptor, ns=(10**18, 10**18))
            assert seen_by_another_process(path) == (BIG, 10**18)
            assert os.fstat(descriptor).st_ctime_ns > 10**18
            os.pwrite(descriptor, b"x", 0)
            assert seen_by_another_process(path)[1] > 10**18
            os.utime(descriptor, ns=(10**18, 10**18))
            data = patch(data, 0, b"x")
        elif how == "chmod":
            os.fchmod(descriptor, 0o640)
            assert os.fstat(descriptor).st_size == BIG
        else:
            subprocess.run(["fallocate", "-p", "-o", "4096", "-l", "8192", path], check=True)
            subprocess.run(["fallocate", "-o", str(BIG), "-l", "5000", path], check=True)
            data = patch(data, 4096, bytes(8192)) + bytes(5000)
            os.pwrite(descriptor, b"behind", len(data))
            data += b"behind"
        assert seen_by_another_process(path)[0] == len(data)
        assert os.pread(descriptor, len(data) + 1, 0) == data
        assert path.read_bytes() == data
    assert path.read_bytes() == data
    assert path.stat().st_size == len(data)
    if how == "times":
        assert path.stat().st_mtime_ns == 10**18
    late.cli("flush", str(path))
    assert (late.store_dir / how).read_bytes() == data


def test_dirty_files_are_opened_again(late: Mounted) -> None:
    """A file that is not in the store yet is read, and changed, in the write tier itself."""
    path = late.path / "again"
    data = content(4)
    path.write_bytes(data)
    before = passed(late)
    with opened(path) as reader, opened(path, os.O_RDWR) as writer:
        assert passed(late) == before + 2
        os.pwrite(writer, b"changed", 5)
        data = patch(data, 5, b"changed")
        assert os.pread(reader, BIG + 1, 0) == data
    late.cli("flush", str(path))
    assert (late.store_dir / "again").read_bytes() == data


def test_uploaded_under_a_reader_and_written_again(late: Mounted) -> None:
    """The staging file has become a clean copy, and then a staging file: it is one file for who has it open."""
    path = late.path / "under"
    data = content(5)
    path.write_bytes(data)
    with opened(path) as reader:
        for number in range(3):
            late.cli("flush", str(path))
            late.cli("evict", str(path), check=False)
            assert os.pread(reader, BIG + 1, 0) == data
            with opened(path, os.O_RDWR) as writer:
                os.pwrite(writer, b"round %d" % number, number * 100_000)
            data = patch(data, number * 100_000, b"round %d" % number)
            assert os.pread(reader, BIG + 1, 0) == data
    late.cli("flush", str(path))
    assert (late.store_dir / "under").read_bytes() == data


@pytest.mark.parametrize("how", ["emptied", "made empty"])
def test_an_empty_file_is_uploaded_under_a_reader(late: Mounted, how: str) -> None:
    """It has no clean copy; who writes to it later gets the file that the reader has."""
    path = late.path / how
    writer = os.open(path, NEW)
    with opened(path) as reader:
        if how == "emptied":
            os.pwrite(writer, b"text", 0)
            os.ftruncate(writer, 0)
        os.close(writer)
        late.cli("flush", str(path))
        assert (late.store_dir / how).read_bytes() == b""
        os.rename(path, late.path / f"{how} moved")
        late.cli("flush")
        assert (late.store_dir / f"{how} moved").read_bytes() == b""
        with opened(late.path / f"{how} moved", os.O_WRONLY | os.O_APPEND) as writer:
            os.write(writer, b"line")
        assert os.pread(reader, 10, 0) == b"line"
    late.cli("flush")
    assert (late.store_dir / f"{how} moved").read_bytes() == b"line"


def test_names_that_change_while_it_is_written(late: Mounted) -> None:
    data = content(6)
    names = ("unlinked", "moved", "replaced")
    with contextlib.ExitStack() as stack:
        open_files = [stack.enter_context(opened(late.path / f"n-{name}", NEW)) for name in names]
        for descriptor in open_files:
            os.pwrite(descriptor, data[: BIG // 2], 0)
        os.unlink(late.path / "n-unlinked")
        os.rename(late.path / "n-moved", late.path / "n-there")
        (late.path / "n-new").write_bytes(b"new")
        os.rename(late.path / "n-new", late.path / "n-replaced")
        for descriptor in open_files:
            os.pwrite(descriptor, data[BIG // 2 :], BIG // 2)
            assert os.fstat(descriptor).st_size == BIG
            assert os.pread(descriptor, BIG + 1, 0) == data
    late.cli("flush")
    assert (late.path / "n-replaced").read_bytes() == b"new"
    assert (late.path / "n-there").read_bytes() == data
    assert (late.store_dir / "n-there").read_bytes() == data
    assert not (late.store_dir / "n-unlinked").exists()


def test_a_file_without_a_name(late: Mounted) -> None:
    data = content(7)
    before = passed(late)
    with opened(late.path, os.O_TMPFILE | os.O_RDWR) as descriptor:
        assert passed(late) == before + 1
        os.pwrite(descriptor, data, 0)
        subprocess.run(["ln", "-L", f"/proc/{os.getpid()}/fd/{descriptor}", late.path / "named"], check=True)
        assert (late.path / "named").stat().st_size == BIG
    assert (late.path / "named").read_bytes() == data


def test_writes_of_others_clear_set_user_id(late: Mounted) -> None:
    """Before anybody can execute what was written: until close, it is busy."""
    code = """
import os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
ours, theirs = sys.argv[1:]
d = os.open(ours, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o700)
os.fchmod(d, 0o4755)
assert os.fstat(d).st_mode & 0o7777 == 0o4755
os.write(d, b"changed")
os.close(d)
assert os.stat(ours).st_mode & 0o7777 == 0o755, oct(os.stat(ours).st_mode)
d = os.open(theirs, os.O_WRONLY)
os.write(d, b"changed")
assert os.fstat(d).st_mode & 0o7777 == 0o777, oct(os.fstat(d).st_mode)
"""
    directory = late.path / "set-id"
    directory.mkdir(mode=0o777)
    directory.chmod(0o777)
    (directory / "root").write_bytes(b"mine")
    (directory / "root").chmod(0o4777)
    arguments = [sys.executable, "-c", code, "own", "root"]
    done = subprocess.run(arguments, check=False, cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_written_over_the_death_of_an_engine(native_mounts: MountFactory) -> None:
    """Writes go on while there is no engine; the next one knows size, time and bytes, and uploads them all."""
    mounted = native_mounts(options=("--upload-delay", "0.2"))
    path = mounted.path / "f"
    data = content(8)
    with opened(path, NEW) as descriptor, opened(mounted.path / "gone", NEW) as nameless:
        assert passed(mounted) == 2
        os.pwrite(descriptor, data[:MIB], 0)
        os.pwrite(nameless, b"kept", 0)
        os.unlink(mounted.path / "gone")
        kill_engine(mounted)
        os.pwrite(descriptor, data[MIB:], MIB)
        recovery_s(mounted, "probe-directory")
        size, mtime_ns = seen_by_another_process(path)
        assert size == BIG
        assert abs(mtime_ns - time.time_ns()) < 60e9
        os.pwrite(descriptor, b"after", 7)
        data = patch(data, 7, b"after")
        assert seen_by_another_process(path)[1] > mtime_ns
        os.pwrite(nameless, b"more", 4)
        assert os.fstat(nameless).st_size == 8
        assert path.read_bytes() == data
        assert not (mounted.store_dir / "f").exists()
    assert in_store(mounted, "f") == data
    assert path.read_bytes() == data
    assert os.listdir(mounted.path) == ["f"]


def test_written_over_the_death_of_the_front(native_mounts: MountFactory) -> None:
    """Who has the file open can still write when the mount has gone: the next mount does not take it for clean."""
    mounted = native_mounts(options=("--upload-delay", "0"))
    data = content(9)
    with outliving(mounted.path / "f") as descriptor:
        assert passed(mounted) == 1
        os.pwrite(descriptor, data, 0)
        mounted.crash_and_restart()
        assert (mounted.path / "f").read_bytes() == data
        wait_until(lambda: mounted.status()["backlog"]["failed"], "a look at the file")
        os.pwrite(descriptor, b"late", 100)
        data = patch(data, 100, b"late")
        assert (mounted.path / "f").read_bytes() == data
        assert not (mounted.store_dir / "f").exists()
    assert in_store(mounted, "f") == data
    assert (mounted.path / "f").read_bytes() == data


def test_no_mixture_in_the_store_while_it_is_written(native_mounts: MountFactory) -> None:
    """fsync uploads; another handle overwrites from the front to the end meanwhile. What is in the store was there."""
    mounted = native_mounts.prepare(options=("--upload-delay", "0", "--part-size", "5M", "--fsync", "remote"))
    mounted.fail({"kind": "latency", "operation": "upload_part", "seconds": 0.05})
    mounted.start()
    size, piece = 11 * MIB, 64 * 1024
    path = mounted.path / "f"
    stop = threading.Event()
    with opened(path, NEW) as descriptor:
        os.pwrite(descriptor, bytes([64]) * size, 0)

        def overwrite() -> None:
            with opened(path, os.O_RDWR) as other:
                for number in range(65, 91):
                    for start in range(0, size, piece):
                        os.pwrite(other, bytes([number]) * piece, start)
                        time.sleep(0.0005)
                    if stop.wait(0.2):  # long enough for an upload, now and then
                        return

        writer = threading.Thread(target=overwrite)
        writer.start()
        stored = 0
        for _ in range(6):
            with contextlib.suppress(OSError):  # it kept changing
                os.fsync(descriptor)
                stored += 1
                body = (mounted.store_dir / "f").read_bytes()
                texts = [body[start] for start in range(0, size, piece)]
                assert all(body[n * piece : (n + 1) * piece] == bytes([text]) * piece for n, text in enumerate(texts))
                changes = [(a, b) for a, b in itertools.pairwise(texts) if a != b]
                assert len(changes) <= 1, texts
                assert all(a == b + 1 for a, b in changes), texts
        stop.set()
        writer.join()
        os.fsync(descriptor)
        stored += 1
        last = os.pread(descriptor, size, 0)
        assert (mounted.store_dir / "f").read_bytes() == last
    assert stored > 1


def test_who_writes_much_waits_near_the_dirty_limit(native_mounts: MountFactory) -> None:
    mounted = native_mounts.prepare(options=("--upload-delay", "0", "--dirty-limit", "150M"))
    mounted.fail({"kind": "latency", "operation": "complete_multipart", "seconds": 4})
    mounted.start()
    first, second = mounted.path / "first", mounted.path / "second"
    with opened(second, NEW) as descriptor:
        with opened(first, NEW) as other:
            assert passed(mounted) == 2
            for number in range(148):
                os.pwrite(other, bytes([number]) * MIB, number * MIB)
        assert not (mounted.store_dir / "first").exists()
        for number in range(200):
            os.pwrite(descriptor, bytes([number]) * MIB, (number % 40) * MIB)
            time.sleep(0.005)
            if number == 100:
                # There is no room for more of that kind: who comes now writes through the engine.
                with opened(mounted.path / "third", NEW):
                    assert passed(mounted) == 2
        assert (mounted.store_dir / "first").exists(), "the second writer did not wait for room"
    mounted.flush()
    assert (mounted.store_dir / "second").stat().st_size == 40 * MIB


@pytest.mark.parametrize("tiers", [(), ("ram:300M",)], ids=["no tier", "ram tier alone"])
def test_where_the_write_tier_keeps_nothing(native_mounts: MountFactory, tiers: tuple[str, ...]) -> None:
    """The staging file goes away after the upload, so nobody may have it open then."""
    mounted = native_mounts(tiers=tiers)
    data = content(10)
    with opened(mounted.path / "f", NEW) as descriptor:
        os.pwrite(descriptor, data, 0)
        assert passed(mounted) == 0
        assert (mounted.path / "f").read_bytes() == data
    assert in_store(mounted, "f") == data


def test_the_mount_ends_while_it_is_written(native_mounts: MountFactory) -> None:
    """A lazy unmount: what is there is uploaded, what comes later by the next mount."""
    mounted = native_mounts(options=("--upload-delay", "0"))
    data = content(11)
    with outliving(mounted.path / "f") as descriptor:
        os.pwrite(descriptor, data, 0)
        mounted.terminate()
        assert (mounted.store_dir / "f").read_bytes() == data
        os.pwrite(descriptor, b"late", 100)
        data = patch(data, 100, b"late")
    mounted.start()
    assert (mounted.path / "f").read_bytes() == data
    assert in_store(mounted, "f") == data
