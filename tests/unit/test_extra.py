"""Requests that go beside pyfuse3: decoding, errors, signals. What they do is tested through a mount."""

from __future__ import annotations

import errno
import logging
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from tierfs.errors import NoSuchRange, TierFull
from tierfs.fs.extra import (
    COPY_FILE_RANGE,
    COPY_FILE_RANGE_64,
    FALLOCATE,
    LSEEK,
    ExtraRequests,
)
from tierfs.fs.interrupt import InterruptWatch


def message(opcode: int, body: bytes, unique: int = 8) -> bytes:
    return struct.pack("<IIQQIIIHH", 40 + len(body), opcode, unique, 5, 1000, 1000, 77, 0, 0) + body


class Ranges:
    """Says what it was asked, and does what it is told."""

    def __init__(self, interrupts: InterruptWatch) -> None:
        self.interrupts = interrupts
        self.asked: list[tuple[Any, ...]] = []
        self.error: BaseException | None = None
        self.started = 0
        self.most = 0
        self.gate: trio.Event | None = None

    async def _do(self, *asked: Any) -> None:
        self.asked.append(asked)
        self.started += 1
        self.most = max(self.most, self.started)
        try:
            if self.gate is not None:
                await self.interrupts.guard(self.gate.wait)
            if self.error is not None:
                raise self.error
        finally:
            self.started -= 1

    async def fallocate(self, *asked: int) -> None:
        await self._do("fallocate", *asked)

    async def seek(self, *asked: int) -> int:
        await self._do("seek", *asked)
        return 1234

    async def copy(self, *asked: int) -> int:
        await self._do("copy", *asked)
        return 77


class Setting:
    def __init__(self, nursery: trio.Nursery) -> None:
        self.interrupts = InterruptWatch()
        services: Any = SimpleNamespace(
            interrupts=self.interrupts,
            contents=SimpleNamespace(),
            refresher=None,
            db=None,
            cache=None,
            settle=lambda: None,
            snapshots=SimpleNamespace(has_open=lambda number: False),
        )
        self.requests = ExtraRequests(services)
        self.ranges = Ranges(self.interrupts)
        self.requests._ranges = self.ranges  # type: ignore[assignment]
        self.into, self.answers = trio.open_memory_channel[tuple[int, int, bytes]](1000)
        nursery.start_soon(self.requests.run, self.answer)

    async def answer(self, unique: int, error: int, body: bytes) -> None:
        await self.into.send((unique, error, body))

    async def ask(self, opcode: int, body: bytes) -> tuple[int, bytes]:
        self.requests.take(message(opcode, body))
        with trio.fail_after(60):
            unique, error, answer = await self.answers.receive()
        assert unique == 8
        return error, answer


@pytest.fixture
async def setting(nursery):
    return Setting(nursery)


async def test_each_request_is_decoded(setting):
    assert await setting.ask(FALLOCATE, struct.pack("<QQQII", 3, 10, 20, 1, 0)) == (0, b"")
    assert await setting.ask(LSEEK, struct.pack("<QQII", 3, 10, 4, 0)) == (0, struct.pack("<Q", 1234))
    copy = struct.pack("<QQQQQQQ", 3, 1, 6, 4, 2, 1 << 40, 0)
    assert await setting.ask(COPY_FILE_RANGE_64, copy) == (0, struct.pack("<Q", 77))
    assert await setting.ask(COPY_FILE_RANGE, copy) == (0, struct.pack("<II", 77, 0))
    assert setting.ranges.asked == [
        ("fallocate", 3, 1, 10, 20),
        ("seek", 3, 10, 4),
        ("copy", 3, 1, 4, 2, 1 << 40),
        ("copy", 3, 1, 4, 2, 0xFFFFF000),
    ]


async def test_errors_become_an_errno(setting, caplog):
    seek = struct.pack("<QQII", 3, 10, 4, 0)
    for error, code in {
        NoSuchRange("no"): errno.ENXIO,
        TierFull("full"): errno.ENOSPC,
        OSError(errno.EROFS, "local"): errno.EROFS,
        ValueError("a bug"): errno.EIO,
    }.items():
        setting.ranges.error = error
        with caplog.at_level(logging.CRITICAL):
            assert await setting.ask(LSEEK, seek) == (code, b"")
    assert await setting.ask(LSEEK, b"short") == (errno.EIO, b"")
    assert await setting.ask(999, b"") == (errno.EOPNOTSUPP, b"")


async def test_a_signal_ends_a_request_that_waits(setting):
    setting.ranges.gate = trio.Event()
    setting.requests.take(message(FALLOCATE, struct.pack("<QQQII", 3, 0, 1, 0, 0), unique=20))
    await trio.testing.wait_all_tasks_blocked()
    setting.requests.interrupt(22)  # nobody's
    setting.requests.interrupt(20)
    with trio.fail_after(60):
        assert await setting.answers.receive() == (20, errno.EINTR, b"")
    setting.requests.interrupt(20)  # too late


async def test_a_signal_that_comes_first(setting):
    setting.ranges.gate = trio.Event()
    setting.requests.take(message(FALLOCATE, struct.pack("<QQQII", 3, 0, 1, 0, 0), unique=20))
    setting.requests.interrupt(20)
    with trio.fail_after(60):
        assert await setting.answers.receive() == (20, errno.EINTR, b"")
    setting.ranges.gate = None
    assert (await setting.ask(FALLOCATE, struct.pack("<QQQII", 3, 0, 1, 0, 0)))[0] == 0


async def test_the_number_of_requests_at_once_is_limited(setting):
    setting.ranges.gate = trio.Event()
    for unique in range(2, 1202, 2):
        setting.requests.take(message(FALLOCATE, struct.pack("<QQQII", 3, 0, 1, 0, 0), unique=unique))
    await trio.testing.wait_all_tasks_blocked()
    assert setting.ranges.started == 500
    setting.ranges.gate.set()
    with trio.fail_after(60):
        answered = {(await setting.answers.receive())[0] for _ in range(600)}
    assert answered == set(range(2, 1202, 2))
    assert setting.ranges.most == 500
