"""Readers of a file that turns from a staging file into a clean copy just now."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import MIB, ROOT_CALLER, Engine, running_engine, settings_for
from tierfs.cache import sealing
from tierfs.namespace import publish, tree
from tierfs.types import ROOT_INO, ObjectRef

SIZE_BYTES = 20 * MIB
"""More than two extents."""
SMALL_BYTES = 10_000
"""Small enough to share a file of the tier with others."""


def on_seal(monkeypatch: pytest.MonkeyPatch, action: Callable[[], Awaitable[None]]) -> None:
    """Run ``action`` once, while checksums of the next sealed file are computed."""
    original = sealing.summed
    armed = [True]

    async def summed(*arguments: Any) -> Any:
        found = await original(*arguments)
        if armed.pop() if armed else False:
            await action()
        return found

    monkeypatch.setattr(sealing, "summed", summed)


def damaged_blocks(engine: Engine) -> int:
    return sum(tier.damaged_blocks for tier in engine.parts.cache._tiers)


async def ref_of(engine: Engine, name: bytes) -> ObjectRef:
    with engine.parts.db.read() as txn:
        ref = publish.ref_of(txn, tree.lookup(txn, ROOT_INO, name))
    assert ref is not None
    return ref


@pytest.mark.parametrize("size_bytes", [SIZE_BYTES, SMALL_BYTES])
async def test_what_was_fetched_during_the_seal_does_not_hide_the_sealed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size_bytes: int
) -> None:
    data = random.Random(1).randbytes(size_bytes)
    async with running_engine(settings_for(tmp_path), publishing=False) as engine:
        cache = engine.parts.cache
        fetched = []

        async def fetch() -> None:
            ref = await ref_of(engine, b"file")
            middle = min(9 * MIB, size_bytes // 2)
            for _ in range(2):  # the second time from the tier
                fetched.append(await cache.read(ref, middle, 1000))
            assert set(fetched) == {data[middle : middle + 1000]}

        on_seal(monkeypatch, fetch)
        await engine.write_file("file", data)
        await engine.parts.publisher.publish_now((await engine.names.lookup(ROOT_INO, b"file")).ino)
        assert fetched
        ref = await ref_of(engine, b"file")
        for offset in range(0, size_bytes, MIB):
            part = cache.read_nowait(ref, offset, MIB)
            assert part is None or part == data[offset : offset + MIB], offset
        assert await cache.read(ref, 0, size_bytes) == data
        assert damaged_blocks(engine) == 0
        assert cache.is_complete(ref.content_id)


async def test_reads_during_the_seal_come_from_the_staging_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random.Random(2).randbytes(SIZE_BYTES)
    async with running_engine(settings_for(tmp_path), publishing=False) as engine:
        number, inode = await engine.files.create(ROOT_INO, b"file", 0o644, 2, ROOT_CALLER)
        await engine.files.write(number, 0, data)
        await engine.files.release(number)
        reader = await engine.files.open(inode.ino, 0, ROOT_CALLER)
        seen = []

        async def read() -> None:
            gets = engine.parts.store.counts.by_operation.get("get", 0)
            seen.append(await engine.files.read(reader, 9 * MIB, MIB) == data[9 * MIB : 10 * MIB])
            assert engine.parts.store.counts.by_operation.get("get", 0) == gets

        on_seal(monkeypatch, read)
        await engine.parts.publisher.publish_now(inode.ino)
        assert seen == [True]
        assert await engine.files.read(reader, 0, SIZE_BYTES) == data
        await engine.files.release(reader)
        assert damaged_blocks(engine) == 0


async def test_a_read_that_began_before_the_seal_ends_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked at the staging file, and finds that it has gone."""
    data = random.Random(3).randbytes(SIZE_BYTES)
    async with running_engine(settings_for(tmp_path), publishing=False) as engine:
        inode = await engine.write_file("file", data)
        content = await engine.parts.contents.acquire(inode.ino)
        staging = content.staging
        assert staging is not None
        original = staging.read

        async def late(offset: int, length: int) -> bytes:
            monkeypatch.setattr(staging, "read", original)
            await engine.parts.publisher.publish_now(inode.ino)
            assert content.staging is None
            return await original(offset, length)

        monkeypatch.setattr(staging, "read", late)
        assert await content.read(engine.parts.cache, MIB, 1000) == data[MIB : MIB + 1000]
        await engine.parts.contents.release(content)
