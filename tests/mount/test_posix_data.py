"""Reading and writing bytes: append, sparse, mmap, several handles, direct I/O, vectored and copied."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import random
import threading
from pathlib import Path

import pytest

from tests.support.posix import errno_of, fallocate

BLOCK = 128 * 1024
EDGES = sorted(
    {max(0, base + delta) for base in (0, 4096, BLOCK, 2 * BLOCK, 8 * BLOCK) for delta in (-1, 0, 1)}
)


def pattern(length: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(length)


@pytest.mark.parametrize("size", EDGES)
def test_sizes_around_every_internal_edge(workdir: Path, size: int) -> None:
    data = pattern(size, size)
    (workdir / "f").write_bytes(data)
    assert os.stat(workdir / "f").st_size == size
    assert (workdir / "f").read_bytes() == data
    with open(workdir / "f", "rb", buffering=0) as file:
        assert os.pread(file.fileno(), 10, size) == b""
        assert os.pread(file.fileno(), 100, max(0, size - 7)) == data[max(0, size - 7) :]


def test_random_reads_and_writes_match_a_bytearray(workdir: Path) -> None:
    chance = random.Random(31)
    model = bytearray()
    handle = os.open(workdir / "f", os.O_CREAT | os.O_RDWR)
    for step in range(600):
        offset = chance.choice([chance.randrange(2_000_000), chance.choice(EDGES)])
        length = chance.choice([1, 7, 512, 4096, 5000, BLOCK, 200_000])
        kind = chance.randrange(10)
        if kind < 5:
            data = chance.randbytes(length)
            assert os.pwrite(handle, data, offset) == length
            model.extend(bytes(max(0, offset - len(model))))
            model[offset : offset + length] = data
        elif kind < 9:
            assert os.pread(handle, length, offset) == bytes(model[offset : offset + length]), step
        else:
            os.ftruncate(handle, offset)
            del model[offset:]
            model.extend(bytes(offset - len(model)))
        assert os.fstat(handle).st_size == len(model)
    os.close(handle)
    assert (workdir / "f").read_bytes() == bytes(model)


def test_append(workdir: Path) -> None:
    (workdir / "f").write_bytes(b"start")
    one = os.open(workdir / "f", os.O_WRONLY | os.O_APPEND)
    two = os.open(workdir / "f", os.O_WRONLY | os.O_APPEND)
    for i in range(50):
        os.write(one if i % 2 else two, b"%02d" % i)
    os.lseek(one, 0, os.SEEK_SET)
    os.write(one, b"end")
    os.close(one)
    os.close(two)
    assert (workdir / "f").read_bytes() == b"start" + b"".join(b"%02d" % i for i in range(50)) + b"end"


@pytest.mark.semantics(
    "S-WRITE-10", "Writes with O_APPEND go to the end of the file, also from several handles at once."
)
def test_appends_of_several_threads_lose_nothing(workdir: Path) -> None:
    def work(number: int) -> None:
        handle = os.open(workdir / "f", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        for i in range(100):
            os.write(handle, b"%03d-%05d\n" % (number, i))
        os.close(handle)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = (workdir / "f").read_bytes().split(b"\n")[:-1]
    assert sorted(lines) == sorted(b"%03d-%05d" % (n, i) for n in range(4) for i in range(100))


@pytest.mark.semantics(
    "S-READ-6",
    "Holes read as zeros, and so does what a truncate cut off and a later write or truncate brought back into range.",
)
def test_writes_beyond_the_end_leave_zeros(workdir: Path) -> None:
    with open(workdir / "f", "wb", buffering=0) as file:
        os.pwrite(file.fileno(), b"x", 3_000_000)
        os.pwrite(file.fileno(), b"y", 1_000_000)
    data = (workdir / "f").read_bytes()
    assert len(data) == 3_000_001
    assert data[1_000_000:1_000_001] == b"y"
    assert data.count(0) == 3_000_001 - 2


@pytest.mark.semantics("S-WRITE-12", "A sparse file occupies local space for its written blocks only.")
def test_huge_sparse_file_costs_little(workdir: Path) -> None:
    size = 8 << 30
    handle = os.open(workdir / "f", os.O_CREAT | os.O_RDWR)
    try:
        os.ftruncate(handle, size)
        os.pwrite(handle, b"middle", size // 2)
        assert os.pread(handle, 6, size // 2) == b"middle"
        assert os.pread(handle, 100, size - 50) == bytes(50)
        assert os.fstat(handle).st_size == size
        assert os.fstat(handle).st_blocks * 512 < 10_000_000
    finally:
        os.unlink(workdir / "f")  # before it is uploaded: an object has no holes
        os.close(handle)


def test_seek_data_and_hole_never_hide_data(workdir: Path) -> None:
    handle = os.open(workdir / "f", os.O_CREAT | os.O_RDWR)
    os.pwrite(handle, b"d" * 1000, 1 << 20)
    os.ftruncate(handle, 4 << 20)
    os.fsync(handle)
    start = os.lseek(handle, 0, os.SEEK_DATA)
    end = os.lseek(handle, 1 << 20, os.SEEK_HOLE)
    assert start <= 1 << 20
    assert end >= (1 << 20) + 1000
    assert errno_of(lambda: os.lseek(handle, 5 << 20, os.SEEK_DATA)) == errno.ENXIO
    os.close(handle)


@pytest.mark.parametrize("size", [4096, BLOCK + 5, 1_000_000])
def test_mmap_read(workdir: Path, size: int) -> None:
    data = pattern(size)
    (workdir / "f").write_bytes(data)
    with open(workdir / "f", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        assert hashlib.sha256(view).digest() == hashlib.sha256(data).digest()


def test_mmap_write_reaches_the_file(workdir: Path) -> None:
    (workdir / "f").write_bytes(bytes(300_000))
    with open(workdir / "f", "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        view[0:5] = b"first"
        view[200_000:200_003] = b"mid"
        view[-4:] = b"last"
        view.flush()
        assert os.pread(file.fileno(), 3, 200_000) == b"mid"
    data = (workdir / "f").read_bytes()
    assert (data[:5], data[200_000:200_003], data[-4:], len(data)) == (b"first", b"mid", b"last", 300_000)


def test_mmap_outlives_close_and_unlink(workdir: Path) -> None:
    (workdir / "f").write_bytes(pattern(300_000))
    handle = os.open(workdir / "f", os.O_RDWR)
    view = mmap.mmap(handle, 0)
    os.close(handle)
    os.unlink(workdir / "f")
    view[10:14] = b"mark"
    assert view[10:14] == b"mark"
    assert view[299_000:] == pattern(300_000)[299_000:]
    view.close()


@pytest.mark.semantics(
    "S-WRITE-11", "A file written through a shared memory mapping has the mapped bytes after close."
)
def test_mmap_write_without_msync_is_there_after_close(workdir: Path) -> None:
    (workdir / "f").write_bytes(bytes(100_000))
    handle = os.open(workdir / "f", os.O_RDWR)
    view = mmap.mmap(handle, 0)
    view[50_000] = 77
    view.close()
    os.close(handle)
    assert (workdir / "f").read_bytes()[50_000] == 77


def test_private_mapping_does_not_change_the_file(workdir: Path) -> None:
    (workdir / "f").write_bytes(b"a" * 10_000)
    with open(workdir / "f", "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as view:
        view[0:3] = b"xyz"
        assert view[0:3] == b"xyz"
    assert (workdir / "f").read_bytes() == b"a" * 10_000


def test_overwrite_of_a_mapped_file_shows_in_the_mapping(workdir: Path) -> None:
    (workdir / "f").write_bytes(b"a" * 50_000)
    with open(workdir / "f", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        assert view[20_000] == ord("a")
        with open(workdir / "f", "r+b", buffering=0) as writer:
            os.pwrite(writer.fileno(), b"B" * 100, 20_000)
        assert view[20_000:20_100] == b"B" * 100


@pytest.mark.semantics(
    "S-SEE-1", "What a process has written through the mount, every process on the same mount sees at once."
)
def test_two_handles_see_each_others_writes_at_once(workdir: Path) -> None:
    one = os.open(workdir / "f", os.O_CREAT | os.O_RDWR)
    two = os.open(workdir / "f", os.O_RDWR)
    for i in range(20):
        os.pwrite(one, b"one%02d" % i, i * 1000)
        assert os.pread(two, 5, i * 1000) == b"one%02d" % i
        os.pwrite(two, b"two%02d" % i, i * 1000)
        assert os.pread(one, 5, i * 1000) == b"two%02d" % i
    os.ftruncate(two, 10)
    assert os.fstat(one).st_size == 10
    assert os.pread(one, 100, 0) == b"two00" + bytes(5)
    os.close(one)
    os.pwrite(two, b"!", 9)
    os.close(two)
    assert (workdir / "f").read_bytes() == b"two00" + bytes(4) + b"!"


def test_reader_that_opened_before_the_writer_sees_new_bytes(workdir: Path) -> None:
    (workdir / "f").write_bytes(b"old old old")
    reader = os.open(workdir / "f", os.O_RDONLY)
    assert os.pread(reader, 3, 0) == b"old"
    with open(workdir / "f", "r+b") as writer:
        writer.write(b"new")
    assert os.pread(reader, 20, 0) == b"new old old"
    with open(workdir / "f", "wb") as writer:
        writer.write(b"short")
    assert os.pread(reader, 20, 0) == b"short"
    os.close(reader)


def test_direct_io(workdir: Path) -> None:
    buffer = mmap.mmap(-1, 64 * 1024)
    data = pattern(64 * 1024, 5)
    buffer[:] = data
    handle = os.open(workdir / "f", os.O_CREAT | os.O_RDWR | os.O_DIRECT)
    assert os.pwrite(handle, buffer, 0) == 64 * 1024
    assert os.pwrite(handle, buffer, 64 * 1024) == 64 * 1024
    buffer[:] = bytes(64 * 1024)
    assert os.preadv(handle, [buffer], 64 * 1024) == 64 * 1024
    assert buffer[:] == data
    os.close(handle)
    assert (workdir / "f").read_bytes() == data + data


def test_direct_and_buffered_handles_agree(workdir: Path) -> None:
    direct = os.open(workdir / "f", os.O_CREAT | os.O_RDWR | os.O_DIRECT)
    buffered = os.open(workdir / "f", os.O_RDWR)
    buffer = mmap.mmap(-1, 4096)
    for i in range(10):
        buffer[:] = bytes([i]) * 4096
        os.pwrite(direct, buffer, i * 4096)
        assert os.pread(buffered, 4096, i * 4096) == bytes([i]) * 4096
        os.pwrite(buffered, bytes([100 + i]) * 4096, i * 4096)
        os.preadv(direct, [buffer], i * 4096)
        assert buffer[:] == bytes([100 + i]) * 4096
    os.close(direct)
    os.close(buffered)


def test_vectored_io_sendfile_and_copy_file_range(workdir: Path) -> None:
    source = os.open(workdir / "a", os.O_CREAT | os.O_RDWR)
    os.writev(source, [b"one", b"", b"two" * 1000])
    target = os.open(workdir / "b", os.O_CREAT | os.O_RDWR)
    assert os.sendfile(target, source, 0, 3003) == 3003
    os.lseek(target, 0, os.SEEK_SET)
    os.lseek(source, 0, os.SEEK_SET)
    copied = 0
    while copied < 3003:
        copied += os.copy_file_range(source, target, 3003 - copied)
    os.close(source)
    os.close(target)
    assert (workdir / "b").read_bytes() == b"one" + b"two" * 1000


def test_fallocate_extends_or_is_not_supported(workdir: Path) -> None:
    handle = os.open(workdir / "f", os.O_CREAT | os.O_RDWR)
    os.write(handle, b"data")
    os.posix_fallocate(handle, 0, 100_000)
    assert os.fstat(handle).st_size == 100_000
    assert os.pread(handle, 6, 0) == b"data\0\0"
    code = errno_of(lambda: fallocate(handle, 3, 0, 4))  # punch a hole, keep the size
    assert code in (0, errno.EOPNOTSUPP)
    assert os.pread(handle, 4, 0) == (b"data" if code else bytes(4))
    os.close(handle)


@pytest.mark.parametrize("flags", [os.O_SYNC, os.O_DSYNC])
def test_synchronous_writes(workdir: Path, flags: int) -> None:
    handle = os.open(workdir / "f", os.O_CREAT | os.O_WRONLY | flags)
    for i in range(10):
        os.write(handle, b"%d" % i)
    os.close(handle)
    assert (workdir / "f").read_bytes() == b"0123456789"


def test_fsync_of_files_and_directories(workdir: Path) -> None:
    handle = os.open(workdir / "f", os.O_CREAT | os.O_WRONLY)
    os.write(handle, b"x" * 200_000)
    os.fsync(handle)
    os.fdatasync(handle)
    os.close(handle)
    here = os.open(workdir, os.O_RDONLY)
    os.fsync(here)
    os.close(here)
    os.sync()


def test_access_mode_is_enforced_on_handles(workdir: Path) -> None:
    (workdir / "f").write_bytes(b"x")
    reader = os.open(workdir / "f", os.O_RDONLY)
    writer = os.open(workdir / "f", os.O_WRONLY)
    assert errno_of(lambda: os.write(reader, b"y")) == errno.EBADF
    assert errno_of(lambda: os.read(writer, 1)) == errno.EBADF
    os.close(reader)
    os.close(writer)


def test_flock_and_record_locks(workdir: Path) -> None:
    (workdir / "f").write_bytes(bytes(100))
    one = os.open(workdir / "f", os.O_RDWR)
    two = os.open(workdir / "f", os.O_RDWR)
    fcntl.flock(one, fcntl.LOCK_EX)
    assert errno_of(lambda: fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)) == errno.EAGAIN
    fcntl.flock(one, fcntl.LOCK_UN)
    fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(one)
    os.close(two)


def test_many_files_open_at_once(workdir: Path) -> None:
    handles = []
    for i in range(400):
        handle = os.open(workdir / f"f{i}", os.O_CREAT | os.O_RDWR)
        os.write(handle, b"%d" % i)
        handles.append(handle)
    for i, handle in enumerate(handles):
        assert os.pread(handle, 10, 0) == b"%d" % i
        os.close(handle)


def test_parallel_writers_of_one_file(workdir: Path) -> None:
    """Each thread owns every fourth block; nothing of one may overwrite another's."""
    size = 4096

    def work(number: int) -> None:
        handle = os.open(workdir / "f", os.O_CREAT | os.O_RDWR)
        for i in range(number, 200, 4):
            os.pwrite(handle, bytes([number + 1]) * size, i * size)
        os.close(handle)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (workdir / "f").read_bytes() == b"".join(bytes([i % 4 + 1]) * size for i in range(200))


def test_thirty_two_mebibytes(workdir: Path) -> None:
    data = pattern(1 << 20, 9)
    digest = hashlib.sha256()
    with open(workdir / "f", "wb", buffering=0) as file:
        for i in range(32):
            chunk = i.to_bytes(4, "big") + data[4:]
            digest.update(chunk)
            file.write(chunk)
    with open(workdir / "f", "rb") as file:
        assert hashlib.file_digest(file, "sha256").digest() == digest.digest()
