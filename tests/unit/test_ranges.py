"""Ranges of a staging file: every change against a plain model, absent blocks, room, crashes."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import shutil
from pathlib import Path

import pytest
import trio

from tests.support.tiers import (
    BLOCK,
    MIB,
    RangeStore,
    body_of,
    device_bytes,
    nvme,
    object_file,
    opened_cache,
    settings_for,
    settled,
)
from tierfs.cache import device, holes, ranges
from tierfs.cache.sealing import seal
from tierfs.cache.staging import Staging
from tierfs.errors import NotSupported, StaleContent, TierFull
from tierfs.types import ObjectRef, new_content_id


@pytest.fixture
def store():
    return RangeStore()


def one_tier(tmp_path: Path, capacity_bytes: int = 128 * MIB, **kwargs):
    return settings_for(tmp_path, nvme(tmp_path / "n", capacity_bytes), **kwargs)


async def content(staging: Staging) -> bytes:
    return await staging.read(0, staging.size_bytes + 1)


async def positions(staging: Staging, *, data: bool) -> list[int | None]:
    """What a search from the start of each block finds."""
    return [await ranges.seek(staging, at, data=data) for at in range(0, staging.size_bytes, BLOCK)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [0, 5 * BLOCK + 77, 70 * BLOCK])
async def test_every_change_against_a_model(tmp_path, store, size, seed):
    dice = random.Random(f"{size}/{seed}")
    original = body_of(size, seed)
    model = bytearray(original)
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        ref = store.add("k", original)
        if size:
            await cache.read(ref, dice.randrange(size), BLOCK)
            await settled(cache)
            staging = await cache.convert(ref, new_content_id())
        else:
            staging = await cache.create_staging(new_content_id())
        for step in range(60):
            start = dice.randrange(size + 2 * BLOCK)
            length = dice.choice([1, 4096, BLOCK - 1, BLOCK, 3 * BLOCK + 5])
            if dice.random() < 0.3:
                start -= start % BLOCK
            end = start + length
            kind = dice.choice(["write", "allocate", "keep", "punch", "zero", "zero keep", "cut", "copy", "seek"])
            generation, changed = staging.generation, True
            if kind == "write":
                data = dice.randbytes(length)
                await staging.write(start, data)
                model.extend(bytes(max(0, start - len(model))))
                model[start:end] = data
            elif kind in ("allocate", "keep"):
                await ranges.allocate(staging, start, length, kind == "keep")
                changed = kind == "allocate" and end > len(model)
                if kind == "allocate":
                    model.extend(bytes(max(0, end - len(model))))
            elif kind == "punch":
                await ranges.punch(staging, start, length)
                changed = start < len(model)
                model[start:end] = bytes(max(0, min(end, len(model)) - start))
            elif kind in ("zero", "zero keep"):
                await ranges.zero(staging, start, length, kind == "zero keep")
                if kind == "zero":
                    model.extend(bytes(max(0, end - len(model))))
                model[start:end] = bytes(max(0, min(end, len(model)) - start))
            elif kind == "cut":
                await staging.truncate(start)
                del model[start:]
                model.extend(bytes(start - len(model)))
            elif kind == "copy":
                at = dice.randrange(size + 2 * BLOCK)
                copied = 0
                if at + length <= start or at >= end:
                    copied = await ranges.copy(staging, start, staging, at, length)
                changed = copied > 0
                data = bytes(model[start : start + copied])
                assert len(data) == copied
                model.extend(bytes(max(0, at - len(model)) if copied else 0))
                model[at : at + copied] = data
            else:
                changed = False
                if start < len(model):
                    found = await ranges.seek(staging, start, data=True)
                    assert not any(model[start : len(model) if found is None else found]), step
                    hole = await ranges.seek(staging, start, data=False)
                    assert hole is not None
                    assert start <= hole <= len(model)
            assert staging.size_bytes == len(model), (step, kind)
            assert (staging.generation > generation) == changed, (step, kind)
            if step % 10 == 0:
                assert await content(staging) == model, (step, kind)
        assert await content(staging) == model
        for start, length in staging.unchanged_ranges():
            assert original[start : start + length] == model[start : start + length]
        await staging.fill()
        store.remove("k")
        assert await content(staging) == model


async def test_only_the_edges_of_a_hole_are_fetched(tmp_path, store):
    body = body_of(6 * BLOCK)
    ref = store.add("k", body)
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        staging = await cache.convert(ref, new_content_id())
        await ranges.punch(staging, BLOCK, 3 * BLOCK)
        assert store.fetched_bytes() == 0
        await ranges.allocate(staging, 0, 9 * BLOCK, True)
        assert store.fetched_bytes() == 0
        await ranges.punch(staging, 5, 4)
        assert store.fetched_bytes() > 0
        assert await content(staging) == body[:5] + bytes(4) + body[9:BLOCK] + bytes(3 * BLOCK) + body[4 * BLOCK :]


async def test_a_hole_whose_edge_cannot_be_had_changes_nothing(tmp_path, store):
    body = body_of(2 * BLOCK)
    ref = store.add("k", body)
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        staging = await cache.convert(ref, new_content_id())
        store.remove("k")
        with pytest.raises(StaleContent):
            await ranges.punch(staging, 5, BLOCK)
        assert staging.generation == 0


async def test_absent_blocks_are_data(tmp_path, store):
    ref = store.add("k", body_of(4 * BLOCK))
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        staging = await cache.convert(ref, new_content_id())
        assert await positions(staging, data=True) == [0, BLOCK, 2 * BLOCK, 3 * BLOCK]
        assert await positions(staging, data=False) == [4 * BLOCK] * 4
        await ranges.punch(staging, BLOCK, 2 * BLOCK)
        await staging.truncate(5 * BLOCK)
        assert await positions(staging, data=True) == [0, 3 * BLOCK, 3 * BLOCK, 3 * BLOCK, None]
        assert await positions(staging, data=False) == [BLOCK, BLOCK, 2 * BLOCK, 4 * BLOCK, 4 * BLOCK]


async def test_copying_leaves_alone_what_is_not_here(tmp_path, store):
    ref = store.add("k", body_of(4 * BLOCK))
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        absent = await cache.convert(ref, new_content_id())
        other = await cache.create_staging(new_content_id())
        await other.write(0, b"o" * 2 * BLOCK)
        assert await ranges.copy(absent, 0, other, 0, BLOCK) == 0
        assert await ranges.copy(other, 0, absent, 5, 100) == 0  # a block would have to be fetched first
        assert await ranges.copy(other, BLOCK, absent, BLOCK, 9 * BLOCK) == BLOCK
        assert await ranges.copy(absent, BLOCK, other, 5, BLOCK) == BLOCK
        assert await ranges.copy(other, 2 * BLOCK, absent, 0, 1) == 0
        assert store.fetched_bytes() == 0
        assert await content(absent) == body_of(4 * BLOCK)[:BLOCK] + b"o" * BLOCK + body_of(4 * BLOCK)[2 * BLOCK :]


async def test_a_copy_that_ends_early_marks_no_more_than_it_has(tmp_path, store, monkeypatch):
    body = body_of(4 * BLOCK)
    ref = store.add("k", body)
    real = holes.copy
    monkeypatch.setattr(holes, "copy", lambda a, a_at, b, b_at, n: real(a, a_at, b, b_at, n - 10))
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        target = await cache.convert(ref, new_content_id())
        source = await cache.create_staging(new_content_id())
        await source.write(0, b"s" * 3 * BLOCK)
        assert await ranges.copy(source, 0, target, 0, 2 * BLOCK) == BLOCK
        assert await ranges.copy(source, 0, target, 2 * BLOCK, BLOCK) == 0
        assert await content(target) == b"s" * BLOCK + body[BLOCK:]


async def test_two_copies_in_opposite_directions(tmp_path, store):
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        one = await cache.create_staging(new_content_id())
        two = await cache.create_staging(new_content_id())
        await one.write(0, b"1" * BLOCK)
        await two.write(0, b"2" * BLOCK)
        with trio.fail_after(60):
            for _ in range(20):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(ranges.copy, one, 0, two, BLOCK, BLOCK)
                    nursery.start_soon(ranges.copy, two, 0, one, BLOCK, BLOCK)
        assert await content(one) == b"1" * BLOCK + b"2" * BLOCK
        assert await content(two) == b"2" * BLOCK + b"1" * BLOCK


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EOPNOTSUPP])
async def test_where_the_kernel_does_not_copy(tmp_path, store, monkeypatch, code):
    def refuse(*args: object) -> int:
        raise OSError(code, "not here")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    body = body_of(3 * MIB + 5)
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        source = await cache.create_staging(new_content_id())
        target = await cache.create_staging(new_content_id())
        await source.write(0, body)
        assert await ranges.copy(source, 0, target, 7, len(body)) == len(body)
        assert await content(target) == bytes(7) + body


async def test_a_file_system_without_holes(tmp_path, store, monkeypatch):
    """Zeros are written, and allocation is refused: the C library then writes zeros itself."""

    class Refusing:
        @staticmethod
        def fallocate64(*args: object) -> int:
            ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

    monkeypatch.setattr(device, "punch", lambda *args: False)
    monkeypatch.setattr(holes, "_libc", Refusing)
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        staging = await cache.create_staging(new_content_id())
        await staging.write(0, b"x" * 3 * MIB)
        await ranges.punch(staging, 5, 2 * MIB)
        assert await content(staging) == b"x" * 5 + bytes(2 * MIB) + b"x" * (MIB - 5)
        with pytest.raises(NotSupported):
            await ranges.allocate(staging, 0, 5 * MIB, False)
        assert cache.status()[0].state == "ok"
        assert staging.size_bytes == 3 * MIB


async def test_allocation_is_accounted_and_limited(tmp_path, store):
    async with opened_cache(store, one_tier(tmp_path, 64 * MIB)) as cache:
        tier = cache.tiers[0]
        staging = await cache.create_staging(new_content_id())
        await ranges.allocate(staging, 0, 20 * MIB, True)
        assert staging.size_bytes == 0
        assert tier.ledger.dirty_bytes >= 20 * MIB
        assert tier.ledger.dirty_bytes == device_bytes(tmp_path / "n")
        for length in (1 << 40, 60 * MIB):  # more than there is at all; more than is left
            with pytest.raises(TierFull):
                await ranges.allocate(staging, 0, length, False)
            assert staging.size_bytes == 0
        await ranges.zero(staging, 0, 20 * MIB, False)
        await ranges.punch(staging, 0, 20 * MIB)
        assert staging.size_bytes == 20 * MIB
        assert tier.ledger.dirty_bytes == device_bytes(tmp_path / "n") < MIB
        assert tier.ledger.reserved_bytes == 0


async def test_clean_data_makes_room_for_an_allocation(tmp_path, store):
    ref = store.add("k", body_of(40 * MIB))
    async with opened_cache(store, one_tier(tmp_path, 64 * MIB)) as cache:
        await cache.read(ref, 0, ref.size_bytes)
        staging = await cache.create_staging(new_content_id())
        await ranges.allocate(staging, 0, 40 * MIB, False)
        await settled(cache)
        assert device_bytes(tmp_path / "n") <= 64 * MIB
        assert cache.resident_bytes(ref).get("nvme", 0) < 40 * MIB


async def test_a_hole_is_punched_also_when_the_tier_is_full(tmp_path, store):
    async with opened_cache(store, one_tier(tmp_path, 16 * MIB, dirty_limit_bytes=4 * MIB)) as cache:
        staging = await cache.create_staging(new_content_id())
        await staging.write(0, b"x" * 8 * MIB)

        async def never() -> bool:
            raise AssertionError("a hole waits for nobody")

        cache.set_drain(never)
        with trio.fail_after(60):
            await ranges.punch(staging, 0, 4 * MIB)
        assert await staging.read(0, 10) == bytes(10)


async def test_space_that_was_never_used_is_given_back_with_the_upload(tmp_path, store):
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        staging = await cache.create_staging(new_content_id())
        await staging.write(BLOCK, b"x" * BLOCK)
        await ranges.allocate(staging, 0, 20 * MIB, True)
        await ranges.allocate(staging, 0, 8 * MIB, False)
        body = bytes(BLOCK) + b"x" * BLOCK + bytes(8 * MIB - 2 * BLOCK)
        info = store.set("k", body)
        ref = ObjectRef(staging.content_id, "k", info.etag, info.size_bytes)
        assert await seal(staging, ref)
        assert os.stat(object_file(tmp_path / "n", ref.content_id)).st_blocks * 512 < MIB
        assert cache.tiers[0].ledger.data_bytes < MIB
        assert await cache.read(ref, 0, len(body)) == body
        assert store.fetched_bytes() == 0


@pytest.mark.parametrize("synced", [False, True])
async def test_a_hole_after_a_power_cut(tmp_path, store, synced, monkeypatch):
    body = body_of(4 * BLOCK)
    ref = store.add("k", body)
    content_id = new_content_id()
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        staging = await cache.convert(ref, content_id)
        await ranges.punch(staging, BLOCK, 2 * BLOCK)
        if synced:
            await staging.sync()
        shutil.copytree(tmp_path / "n" / "dirty", tmp_path / "after")
        await staging.discard()
    shutil.rmtree(tmp_path / "n" / "dirty")
    (tmp_path / "after").rename(tmp_path / "n" / "dirty")
    monkeypatch.setattr(device, "boot_id", lambda: b"the next boot")
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        staging = await cache.open_staging(content_id)
        assert staging is not None
        expected = body[:BLOCK] + bytes(2 * BLOCK) + body[3 * BLOCK :] if synced else body
        assert await content(staging) == expected


async def test_a_crash_between_the_hole_and_its_mark(tmp_path, store, monkeypatch):
    """Nobody was told that the hole is there: the block is the one of the base again."""
    body = body_of(2 * BLOCK)
    ref = store.add("k", body)
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        staging = await cache.convert(ref, new_content_id())
        overlay = staging.overlay
        assert overlay is not None
        with monkeypatch.context() as patch:
            patch.setattr(overlay, "mark_present", lambda *args: (_ for _ in ()).throw(RuntimeError("killed")))
            with pytest.raises(RuntimeError):
                await ranges.punch(staging, 0, BLOCK)
        await staging.close()
        again = await cache.open_staging(staging.content_id)
        assert again is not None
        assert await content(again) == body
