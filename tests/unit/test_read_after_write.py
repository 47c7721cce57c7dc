"""A read that came after a write to the same bytes sees them, however long the write takes."""

from __future__ import annotations

import os
from pathlib import Path

import trio
from trio.testing import wait_all_tasks_blocked

from tests.support.engine import ROOT_CALLER, running_engine, settings_for
from tierfs.writeback.under_way import WritesUnderWay

PAGE = 4096


async def test_a_read_waits_for_the_write_to_its_page(tmp_path: Path) -> None:
    """The kernel keeps what such a read gives it, in the place of what was written."""
    async with running_engine(settings_for(tmp_path), publishing=False) as engine:
        number, _ = await engine.files.create(1, b"f", 0o644, os.O_RDWR, ROOT_CALLER)
        await engine.files.write(number, 0, b"a" * 2 * PAGE)
        staging = engine.parts.services.handles.file(number).content.staging
        assert staging is not None
        seen: list[bytes] = []

        async def read() -> None:
            seen.append(await engine.files.read(number, 0, PAGE))

        async with trio.open_nursery() as nursery:
            async with staging.locked():  # so that the write has to wait
                nursery.start_soon(engine.files.write, number, 100, b"b" * 10)
                await wait_all_tasks_blocked()
                nursery.start_soon(read)
                await wait_all_tasks_blocked()
                assert seen == []
                assert await engine.files.read(number, PAGE, PAGE) == b"a" * PAGE  # nobody writes there
        assert seen == [b"a" * 100 + b"b" * 10 + b"a" * (PAGE - 110)]
        await engine.files.release(number)


async def test_a_write_that_fails_is_not_waited_for_any_longer(tmp_path: Path) -> None:
    async with running_engine(settings_for(tmp_path), publishing=False) as engine:
        number, _ = await engine.files.create(1, b"f", 0o644, os.O_RDWR, ROOT_CALLER)
        await engine.files.write(number, 0, b"a" * PAGE)
        staging = engine.parts.services.handles.file(number).content.staging
        assert staging is not None
        async with trio.open_nursery() as nursery, staging.locked():
            nursery.start_soon(engine.files.write, number, 0, b"b")
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        with trio.fail_after(60):
            assert await engine.files.read(number, 0, PAGE) == b"a" * PAGE
        await engine.files.release(number)


async def test_only_writes_that_had_begun_are_waited_for() -> None:
    writes = WritesUnderWay()
    with writes.begun(0, 10):
        with writes.begun(20, 30):
            assert writes.touch(9, 20)
            assert not writes.touch(10, 20)
            assert writes.touch(0, 100)
            await writes.wait(10, 20)
        async with trio.open_nursery() as nursery:
            done = trio.Event()

            async def wait() -> None:
                await writes.wait(0, 1)
                done.set()

            nursery.start_soon(wait)
            await wait_all_tasks_blocked()
            assert not done.is_set()
            nursery.cancel_scope.cancel()
    assert not writes.touch(0, 100)
    await writes.wait(0, 100)
