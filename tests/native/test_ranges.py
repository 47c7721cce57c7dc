"""Ranges of files that the kernel passes through: the engine changes the file that others write directly."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.front import kill_engine
from tests.support.mount import Mounted, MountFactory, wait_until
from tests.support.posix import KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE, fallocate

pytestmark = pytest.mark.needs_fuse

PUNCH = PUNCH_HOLE | KEEP_SIZE
BLOCK = 128 * 1024
SIZE = 24 * BLOCK
"""Larger than what is packed into a segment with others."""
RECORDED_S = 0.8
"""By then the tier's index has recorded what was read: only such files are passed through."""


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    handle = os.open(path, flags | os.O_CREAT, 0o644)
    try:
        yield handle
    finally:
        os.close(handle)


@contextmanager
def passed_through(mounted: Mounted, data: bytes) -> Iterator[tuple[int, int]]:
    """Handles for reading and for writing of the file ``f``, whose reads and writes do not pass the front."""
    (mounted.store_dir / "f").write_bytes(data)
    path = mounted.path / "f"
    wait_until(path.exists, "the name")
    assert path.read_bytes() == data
    time.sleep(RECORDED_S)
    before = mounted.status()["front"]["passthrough_opens"]
    with opened(path, os.O_RDONLY) as reader, opened(path, os.O_RDWR) as writer:
        front = mounted.status()["front"]
        if front["passthrough_errno"]:
            pytest.skip(f"this kernel refuses passthrough: {os.strerror(front['passthrough_errno'])}")
        assert front["passthrough_opens"] == before + 2
        yield reader, writer


@pytest.mark.parametrize("kills", [False, True])
def test_direct_writes_and_ranges(native_mounts: MountFactory, kills: bool) -> None:
    mounted = native_mounts()
    chance = random.Random(3)
    model = bytearray(chance.randbytes(SIZE))

    def put(offset: int, data: bytes) -> None:
        model.extend(bytes(max(0, offset - len(model))))
        model[offset : offset + len(data)] = data

    with passed_through(mounted, bytes(model)) as (reader, writer), opened(mounted.path / "g", os.O_RDWR) as other:
        for number in range(40):
            data = chance.randbytes(chance.choice([10, BLOCK]))
            offset = chance.randrange(SIZE)
            os.pwrite(writer, data, offset)
            put(offset, data)
            offset, length = chance.randrange(SIZE), chance.choice([7, 4096, 3 * BLOCK])
            mode = chance.choice([0, KEEP_SIZE, PUNCH, ZERO_RANGE])
            fallocate(writer, mode, offset, length)
            if not mode & KEEP_SIZE:
                put(max(len(model), offset + length), b"")
            if mode in (PUNCH, ZERO_RANGE):
                end = min(offset + length, len(model))
                model[offset:end] = bytes(end - offset)
            assert os.fstat(reader).st_size == len(model)
            assert os.pread(reader, len(model) + 1, 0) == model
            at = chance.randrange(SIZE)
            copied = os.copy_file_range(reader, other, BLOCK, at, 0)
            assert os.pread(other, copied, 0) == model[at : at + copied]
            copied = os.copy_file_range(other, writer, 500, 0, at)
            put(at, os.pread(other, copied, 0))
            os.pwrite(writer, b"new end", len(model))
            put(len(model), b"new end")
            assert os.lseek(writer, 0, os.SEEK_HOLE) <= len(model)
            hole = os.lseek(reader, len(model) - 7, os.SEEK_HOLE)
            assert hole == len(model)
            if kills and number % 10 == 5:
                kill_engine(mounted)
        seen = os.fstat(writer).st_mtime_ns
    assert (mounted.path / "f").read_bytes() == model
    assert os.stat(mounted.path / "f").st_mtime_ns == seen
    mounted.umount()
    assert (mounted.store_dir / "f").read_bytes() == model


def test_a_hole_gives_back_space_of_a_file_that_is_passed_through(native_mounts: MountFactory) -> None:
    mounted = native_mounts()
    with passed_through(mounted, b"x" * SIZE) as (reader, writer):
        before = os.fstat(writer).st_blocks
        fallocate(writer, PUNCH, BLOCK, SIZE - BLOCK)
        assert os.fstat(reader).st_blocks < before // 4
        assert os.lseek(reader, BLOCK, os.SEEK_HOLE) == BLOCK
        os.pwrite(writer, b"back", 2 * BLOCK)
        assert os.lseek(reader, BLOCK, os.SEEK_DATA) == 2 * BLOCK


def test_requests_in_flight_are_repeated_to_the_next_engine(native_mounts: MountFactory) -> None:
    mounted = native_mounts.prepare()
    data = random.Random(1).randbytes(40 * BLOCK)
    (mounted.store_dir / "f").write_bytes(data)
    mounted.start()
    mounted.fail({"kind": "hang", "operation": "get", "seconds": 60})
    with opened(mounted.path / "f", os.O_RDONLY) as source, opened(mounted.path / "g", os.O_RDWR) as target:

        def kill() -> None:
            time.sleep(1)
            mounted.heal()
            kill_engine(mounted)

        killer = threading.Thread(target=kill)
        killer.start()
        copied = 0
        while copied < len(data):
            # Not all at once: that would be for the store to copy.
            some = os.copy_file_range(source, target, min(len(data) - 1, len(data) - copied))
            assert some > 0
            copied += some
        killer.join()
    status = mounted.status()["front"]
    assert status["engine_starts"] == 2
    assert status["repeated"] >= 1
    mounted.umount()
    assert (mounted.store_dir / "g").read_bytes() == data
