"""One tier: filling, reading, capacity, eviction, and what trouble does to it."""

from __future__ import annotations

import errno
import os
import random
import stat
import tracemalloc
from pathlib import Path

import lmdb
import pytest
import trio

from tests.support.tiers import (
    BLOCK,
    EXTENT,
    KIB,
    MIB,
    Clock,
    RangeStore,
    body_of,
    device_bytes,
    nvme,
    object_file,
    opened_tier,
)
from tierfs.cache import blocks, device, record, upkeep
from tierfs.cache.index import IndexWriteFailed
from tierfs.cache.tier import Tier
from tierfs.errors import FormatError
from tierfs.types import BLOCK_SIZE_BYTES, ContentId, ObjectRef

STORE = RangeStore()


def an_object(size_bytes: int, seed: int = 0) -> tuple[ObjectRef, bytes]:
    body = body_of(size_bytes, seed)
    return STORE.add(f"o{size_bytes}/{seed}", body), body


async def put(tier: Tier, ref: ObjectRef, body: bytes, only: range | None = None) -> bool:
    """Fill all blocks (or blocks ``only``) of a content, as a fetch would; False if the tier refused one."""
    done = True
    for extent_no, start, stop in blocks.extent_spans(0, ref.size_bytes):
        mask = tier.presence.missing(ref.content_id, extent_no, blocks.range_mask(start, stop))
        if only is not None:
            mask &= sum(1 << n % 64 for n in only if n // 64 == extent_no)
        for first, count in blocks.runs(mask):
            fill = await tier.reserve(ref, extent_no, first, count)
            if fill is None:
                done = False
                continue
            data = body[fill.offset_bytes : fill.offset_bytes + count * BLOCK]
            await trio.to_thread.run_sync(fill.write, data)
            assert tier.complete(fill, record.checksums(data))
    return done


async def read(tier: Tier, ref: ObjectRef, start: int, stop: int) -> bytes | None:
    data = tier.read_nowait(ref.content_id, start, stop)
    if data is not None:
        return data
    pieces = []
    for _, low, high in blocks.extent_spans(start, stop):
        piece = await tier.read_blocks(ref.content_id, low, high)
        if piece is None:
            return None
        pieces.append(piece)
    return b"".join(pieces)


def check_accounts(tier: Tier) -> None:
    """The ledger is what lies on the device, and no more than the capacity."""
    ledger = tier.ledger
    assert ledger.used_bytes <= ledger.capacity_bytes
    on_device = device_bytes(Path(tier.root))
    assert abs(ledger.data_bytes - on_device) <= BLOCK, (ledger.data_bytes, on_device)


@pytest.mark.parametrize("size", [1, 4095, BLOCK - 1, BLOCK, BLOCK + 1, MIB + 5, EXTENT, EXTENT + 1, 3 * EXTENT - 7])
async def test_what_is_put_is_read_in_any_cut(tmp_path, size):
    ref, body = an_object(size)
    dice = random.Random(size)
    async with opened_tier(nvme(tmp_path, 64 * MIB)) as tier:
        assert await read(tier, ref, 0, 1) is None
        assert await put(tier, ref, body)
        assert tier.presence.is_complete(ref.content_id)
        assert tier.presence.resident_bytes(ref.content_id) == size
        for _ in range(30):
            start = dice.randrange(size)
            stop = dice.randint(start + 1, min(size, start + 300 * KIB))
            assert await read(tier, ref, start, stop) == body[start:stop]
        for number, low, high in blocks.extent_spans(0, size):
            assert await tier.read_blocks(ref.content_id, low, high) == body[low:high], number
        check_accounts(tier)


async def test_files_are_private(tmp_path):
    ref, body = an_object(10)
    root = tmp_path / "new" / "tier"
    async with opened_tier(nvme(root, MIB * 8)) as tier:
        await put(tier, ref, body)
        await tier.commit()
        for path in [root, *root.rglob("*")]:
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == (0o700 if path.is_dir() else 0o600), path


async def test_a_tier_in_use_is_refused(tmp_path):
    async with opened_tier(nvme(tmp_path, MIB)):
        with pytest.raises(device.TierInUse, match="another mount"):
            async with opened_tier(nvme(tmp_path, MIB)):
                pass


async def test_a_link_or_a_foreign_directory_is_no_tier(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(NotADirectoryError):
        async with opened_tier(nvme(tmp_path / "link", MIB)):
            pass
    if os.geteuid() == 0:
        os.chown(tmp_path / "real", 12345, 12345)
        with pytest.raises(PermissionError):
            async with opened_tier(nvme(tmp_path / "real", MIB)):
                pass


@pytest.mark.parametrize("clean", [True, False])
async def test_restart_keeps_what_was_committed(tmp_path, clean):
    ref, body = an_object(2 * EXTENT + 5)
    async with opened_tier(nvme(tmp_path, 64 * MIB), clean=clean) as tier:
        await put(tier, ref, body)
        await tier.commit()
    async with opened_tier(nvme(tmp_path, 64 * MIB)) as tier:
        assert tier.presence.is_complete(ref.content_id)
        assert await read(tier, ref, 0, len(body)) == body
        check_accounts(tier)


async def test_a_clean_stop_commits_what_was_pending(tmp_path):
    ref, body = an_object(5000)
    async with opened_tier(nvme(tmp_path, 64 * MIB), upkeep_runs=False) as tier:
        await put(tier, ref, body)
    async with opened_tier(nvme(tmp_path, 64 * MIB)) as tier:
        assert tier.presence.is_complete(ref.content_id)


async def test_after_a_kill_uncommitted_blocks_are_absent_and_swept(tmp_path):
    small, small_body = an_object(350_000)
    large, large_body = an_object(3 * MIB)
    async with opened_tier(nvme(tmp_path, 64 * MIB), clean=False, upkeep_runs=False) as tier:
        await put(tier, large, large_body, range(4))
        await tier.commit()
        await put(tier, large, large_body)
        await put(tier, small, small_body)
    assert device_bytes(tmp_path) > 3 * MIB
    async with opened_tier(nvme(tmp_path, 64 * MIB)) as tier:
        assert tier.presence.resident_bytes(large.content_id) == 4 * BLOCK
        assert tier.presence.resident_bytes(small.content_id) == 0
        await tier.walked.wait()
        with trio.fail_after(60):
            while object_file(tmp_path, small.content_id).exists() or tier.ledger.freeing_bytes:
                await trio.sleep(0.01)
            while device_bytes(tmp_path) > 5 * BLOCK:
                await trio.sleep(0.01)
        assert await read(tier, large, 0, 4 * BLOCK) == large_body[: 4 * BLOCK]
        check_accounts(tier)
        assert await put(tier, small, small_body)
        assert await read(tier, small, 0, 350_000) == small_body


async def test_after_an_unclean_reboot_blocks_are_verified_before_use(tmp_path):
    ref, body = an_object(MIB)
    async with opened_tier(nvme(tmp_path, 64 * MIB), clean=False) as tier:
        await put(tier, ref, body)
        await tier.commit()
    with object_file(tmp_path, ref.content_id).open("r+b") as file:
        file.seek(3 * BLOCK)
        file.write(b"what the device had")
    async with opened_tier(nvme(tmp_path, 64 * MIB), boot_id=b"next boot") as tier:
        assert tier.read_nowait(ref.content_id, 0, 100) is None
        assert await tier.read_blocks(ref.content_id, 0, 2 * BLOCK) == body[: 2 * BLOCK]
        assert tier.read_nowait(ref.content_id, 0, 100) == body[:100]
        assert tier.read_nowait(ref.content_id, 2 * BLOCK, 2 * BLOCK + 1) is None
        assert await tier.read_blocks(ref.content_id, 2 * BLOCK, 4 * BLOCK) is None
        assert tier.damaged_blocks == 1
        assert tier.presence.resident_bytes(ref.content_id) == 7 * BLOCK
        assert await tier.read_blocks(ref.content_id, 2 * BLOCK, 3 * BLOCK) == body[2 * BLOCK : 3 * BLOCK]


async def test_a_damaged_block_is_dropped_and_can_be_put_again(tmp_path):
    ref, body = an_object(MIB)
    async with opened_tier(nvme(tmp_path, 64 * MIB)) as tier:
        await put(tier, ref, body)
        path = object_file(tmp_path, ref.content_id)
        with path.open("r+b") as file:
            file.seek(5 * BLOCK + 17)
            file.write(b"\0")
        assert await tier.read_blocks(ref.content_id, 5 * BLOCK, 6 * BLOCK) is None
        assert not tier.presence.is_complete(ref.content_id)
        assert await put(tier, ref, body)
        assert await tier.read_blocks(ref.content_id, 0, MIB) == body
        os.truncate(path, 6 * BLOCK + 1)
        assert await tier.read_blocks(ref.content_id, 6 * BLOCK, 7 * BLOCK) is None
        assert await tier.read_blocks(ref.content_id, 7 * BLOCK, 8 * BLOCK) is None
        assert tier.damaged_blocks == 3


async def test_a_vanished_file_is_made_anew(tmp_path):
    ref, body = an_object(2 * MIB)
    async with opened_tier(nvme(tmp_path, 64 * MIB)) as tier:
        await put(tier, ref, body, range(4))
        await tier.commit()
        tier.files.close()
        object_file(tmp_path, ref.content_id).unlink()
        fill = await tier.reserve(ref, 0, 8, 1)
        # A file made here would be full of holes that the index calls data.
        with pytest.raises(FileNotFoundError):
            fill.write(body[8 * BLOCK : 9 * BLOCK])
        tier.abandon(fill)
        assert await tier.read_blocks(ref.content_id, 0, BLOCK) is None
        assert tier.presence.resident_bytes(ref.content_id) == 0
        assert await put(tier, ref, body)
        assert await read(tier, ref, 0, 2 * MIB) == body


@pytest.mark.parametrize("seed", range(4))
async def test_capacity_is_obeyed_and_bytes_stay_right(tmp_path, seed):
    dice = random.Random(seed)
    objects = [an_object(dice.choice([3000, 90_000, MIB, 9 * MIB, 20 * MIB]), n) for n in range(25)]
    capacity = 24 * MIB
    async with opened_tier(nvme(tmp_path, capacity)) as tier:
        for _ in range(60):
            ref, body = dice.choice(objects)
            first = dice.randrange(blocks.block_count(ref.size_bytes))
            await put(tier, ref, body, range(first, first + dice.randint(1, 40)))
            assert tier.ledger.used_bytes <= capacity
            other, other_body = dice.choice(objects)
            start = dice.randrange(other.size_bytes)
            stop = min(other.size_bytes, start + dice.randint(1, 200_000))
            found = await read(tier, other, start, stop)
            assert found is None or found == other_body[start:stop]
        await tier.evictor.settled()
        check_accounts(tier)
        assert device_bytes(tmp_path) <= capacity + BLOCK
    async with opened_tier(nvme(tmp_path, capacity)) as tier:
        for ref, body in objects:
            for number, low, high in blocks.extent_spans(0, ref.size_bytes):
                extent = tier.presence.extent(ref.content_id, number)
                for first, count in blocks.runs(extent.present if extent else 0):
                    start = low + first * BLOCK
                    stop = min(start + count * BLOCK, high)
                    assert await tier.read_blocks(ref.content_id, start, stop) == body[start:stop]
        assert tier.damaged_blocks == 0


async def test_a_small_content_is_unlinked_and_a_large_one_punched(tmp_path):
    small, small_body = an_object(300_000)
    large, large_body = an_object(3 * EXTENT)
    async with opened_tier(nvme(tmp_path, 64 * MIB)) as tier:
        await put(tier, small, small_body)
        await put(tier, large, large_body)
        tier.evictor.evict([(small.content_id, 0), (large.content_id, 1)])
        await tier.evictor.settled()
        assert not object_file(tmp_path, small.content_id).exists()
        assert object_file(tmp_path, large.content_id).stat().st_blocks * 512 <= 2 * EXTENT + 4 * KIB
        assert await read(tier, large, EXTENT, EXTENT + 1) is None
        assert await read(tier, large, 2 * EXTENT, 3 * EXTENT) == large_body[2 * EXTENT :]
        tier.evictor.evict([(large.content_id, 0), (large.content_id, 2)])
        await tier.evictor.settled()
        assert not object_file(tmp_path, large.content_id).exists()
        check_accounts(tier)


async def test_small_contents_share_segments(tmp_path):
    objects = [an_object(random.Random(n).randint(1, 250_000), n) for n in range(40)]
    total = sum(-(-ref.size_bytes // 4096) * 4096 for ref, _ in objects)
    async with opened_tier(nvme(tmp_path, 64 * MIB)) as tier:
        for ref, body in objects:
            assert await put(tier, ref, body)
        assert list((tmp_path / "objects").rglob("*")) == []
        (segment,) = (tmp_path / "segments").iterdir()
        assert tier.ledger.data_bytes == total
        check_accounts(tier)
        for ref, body in objects:
            assert tier.read_nowait(ref.content_id, 0, ref.size_bytes) == body
        tier.evictor.evict([(ref.content_id, 0) for ref, _ in objects[:20]])
        await tier.evictor.settled()
        check_accounts(tier)
        for ref, body in objects[20:]:
            assert await tier.read_blocks(ref.content_id, 0, ref.size_bytes) == body
        for ref, body in objects[:20]:
            assert await read(tier, ref, 0, 1) is None
            assert await put(tier, ref, body)
    async with opened_tier(nvme(tmp_path, 64 * MIB)) as tier:
        await tier.walked.wait()
        for ref, body in objects:
            assert await read(tier, ref, 0, ref.size_bytes) == body
        for ref, _ in objects:
            tier.evictor.forget(ref.content_id)
        await tier.evictor.settled()
        assert tier.ledger.data_bytes == 0
        assert not segment.exists()
        assert device_bytes(tmp_path) == 0


async def test_a_segment_is_swept_after_a_kill(tmp_path):
    objects = [an_object(100_000 + n, n) for n in range(30)]
    async with opened_tier(nvme(tmp_path, 64 * MIB), clean=False, upkeep_runs=False) as tier:
        for number, (ref, body) in enumerate(objects):
            await put(tier, ref, body)
            if number == 19:
                await tier.commit()
                tier.evictor.evict([(ref.content_id, 0) for ref, _ in objects[:5]])
                await tier.evictor.settled()
                tier.evictor.forget(objects[10][0].content_id)
                await tier.evictor.settled()
    kept = objects[5:10] + objects[11:20]
    async with opened_tier(nvme(tmp_path, 64 * MIB)) as tier:
        await tier.walked.wait()
        with trio.fail_after(60):
            while device_bytes(tmp_path) > tier.ledger.data_bytes:
                await trio.sleep(0.01)
        for ref, body in objects:
            if (ref, body) in kept:
                assert await tier.read_blocks(ref.content_id, 0, ref.size_bytes) == body
            else:
                assert await read(tier, ref, 0, 10) is None
        check_accounts(tier)
        assert tier.damaged_blocks == 0


async def test_a_damaged_packed_content_gets_another_place(tmp_path):
    objects = [an_object(140_000, n) for n in range(3)]
    async with opened_tier(nvme(tmp_path, 64 * MIB)) as tier:
        for ref, body in objects:
            await put(tier, ref, body)
        ref, body = objects[1]
        _, place, size = tier.place_of(ref.content_id)
        (path,) = (tmp_path / "segments").iterdir()
        with path.open("r+b") as file:
            file.seek(place + 135_000)
            file.write(b"rot")
        assert await tier.read_blocks(ref.content_id, 0, BLOCK) == body[:BLOCK]
        assert await tier.read_blocks(ref.content_id, 0, size) is None
        assert tier.damaged_blocks == 1
        assert tier.presence.resident_bytes(ref.content_id) == 0
        assert await put(tier, ref, body)
        assert tier.place_of(ref.content_id)[1] > place
        for ref, body in objects:
            assert await tier.read_blocks(ref.content_id, 0, size) == body
        await tier.evictor.settled()
        check_accounts(tier)


async def test_a_content_that_is_fetched_in_parts_is_not_packed(tmp_path):
    ref, body = an_object(250_000)
    async with opened_tier(nvme(tmp_path, 64 * MIB)) as tier:
        assert await put(tier, ref, body, range(1, 2))
        assert await put(tier, ref, body)
        assert tier.place_of(ref.content_id) is None
        assert await read(tier, ref, 0, 250_000) == body
        whole = await tier.reserve(an_object(5000)[0], 0, 0, 1)
        assert whole.segment
        assert await tier.reserve(an_object(5000)[0], 0, 0, 1) is None
        tier.abandon(whole)


async def test_a_hole_is_punched_only_after_the_commit(tmp_path, monkeypatch):
    ref, body = an_object(2 * EXTENT)
    async with opened_tier(nvme(tmp_path, 64 * MIB), upkeep_runs=False) as tier:
        await put(tier, ref, body)
        await tier.commit()
        committed = []
        real = device.punch

        def punch(fd: int, offset_bytes: int, length_bytes: int) -> bool:
            with tier.index._env.begin(db=tier.index._extent_table) as txn:
                committed.append(txn.get(ref.content_id + (1).to_bytes(4, "big")))
            return real(fd, offset_bytes, length_bytes)

        monkeypatch.setattr(device, "punch", punch)
        tier.evictor.evict([(ref.content_id, 1)])
        await tier.evictor.settled()
        assert committed == [None]


async def test_without_a_commit_no_hole_is_punched(tmp_path, monkeypatch):
    ref, body = an_object(2 * EXTENT)
    async with opened_tier(nvme(tmp_path, 64 * MIB), upkeep_runs=False, clean=False) as tier:
        await put(tier, ref, body)
        await tier.commit()

        def fail(batch: object) -> None:
            raise IndexWriteFailed("no space")

        monkeypatch.setattr(tier.index, "commit_batch", fail)
        tier.evictor.evict([(ref.content_id, 1)])
        await tier.evictor.settled()
    async with opened_tier(nvme(tmp_path, 64 * MIB)) as tier:
        # Killed with the old record: it must still be true.
        assert await tier.read_blocks(ref.content_id, EXTENT, 2 * EXTENT) == body[EXTENT:]


async def test_a_file_is_made_only_when_the_committed_index_has_forgotten_the_old_one(tmp_path):
    ref, body = an_object(MIB)
    async with opened_tier(nvme(tmp_path, 64 * MIB), clean=False, upkeep_runs=False) as tier:
        await put(tier, ref, body)
        await tier.commit()
        tier.evictor.evict([(ref.content_id, 0)])
        await tier.evictor.settled()
        await put(tier, ref, body, range(1))
    async with opened_tier(nvme(tmp_path, 64 * MIB)) as tier:
        # Only block 0 was written after the eviction; the old record said that all eight were there.
        for number in range(8):
            found = await read(tier, ref, number * BLOCK, (number + 1) * BLOCK)
            assert found in (None, body[number * BLOCK : (number + 1) * BLOCK])
        assert tier.damaged_blocks == 0


async def test_an_extent_in_use_is_not_evicted(tmp_path):
    async with opened_tier(nvme(tmp_path, 4 * MIB)) as tier:
        first, first_body = an_object(MIB, 1)
        await put(tier, first, first_body)
        extent = tier.presence.extent(first.content_id, 0)
        extent.busy += 1
        for seed in range(2, 14):
            ref, body = an_object(MIB, seed)
            await put(tier, ref, body)
        assert tier.presence.is_complete(first.content_id)
        extent.busy -= 1
        for seed in range(14, 40):
            ref, body = an_object(MIB, seed)
            await put(tier, ref, body)
        check_accounts(tier)


async def test_pinned_units_stay_and_a_full_tier_says_no(tmp_path):
    clock = Clock()
    pinned, pinned_body = an_object(3 * MIB, 1)
    async with opened_tier(nvme(tmp_path, 4 * MIB), now_ns=clock) as tier:
        tier.set_pinned(pinned.content_id, True)
        assert await put(tier, pinned, pinned_body)
        for seed in range(2, 8):
            ref, body = an_object(MIB // 2, seed)
            await put(tier, ref, body)
        assert tier.presence.is_complete(pinned.content_id)
        assert tier.ledger.policy.pinned_bytes == 3 * MIB
        big, big_body = an_object(2 * MIB, 9)
        assert not await put(tier, big, big_body)
        assert tier.ledger.used_bytes <= 4 * MIB
        tier.set_pinned(pinned.content_id, False)
        clock.advance(60)
        assert await put(tier, big, big_body)
        check_accounts(tier)
    async with opened_tier(nvme(tmp_path, 4 * MIB)) as tier:
        assert tier.presence.pins == set()


async def test_pins_hold_after_a_restart(tmp_path):
    pinned, body = an_object(2 * MIB, 1)
    async with opened_tier(nvme(tmp_path, 4 * MIB)) as tier:
        await put(tier, pinned, body)
        tier.set_pinned(pinned.content_id, True)
    async with opened_tier(nvme(tmp_path, 4 * MIB)) as tier:
        await tier.walked.wait()
        assert tier.ledger.policy.pinned_bytes == 2 * MIB
        for seed in range(2, 9):
            ref, other = an_object(MIB, seed)
            await put(tier, ref, other)
        assert tier.presence.is_complete(pinned.content_id)


async def test_a_full_index_disk_bypasses_the_tier(tmp_path, monkeypatch):
    clock = Clock()
    async with opened_tier(nvme(tmp_path, 16 * MIB), now_ns=clock, upkeep_runs=False) as tier:
        ref, body = an_object(MIB)
        await put(tier, ref, body)

        def fail(batch: object) -> None:
            raise IndexWriteFailed("no space")

        with monkeypatch.context() as patch:
            patch.setattr(tier.index, "commit_batch", fail)
            with pytest.raises(IndexWriteFailed):
                await tier.commit()
        assert not tier.takes_clean
        clock.advance(120)
        assert tier.takes_clean
        await tier.commit()
        assert tier.index.committed_has(ref.content_id)


async def test_the_ballast_pays_for_a_commit_on_a_full_disk(tmp_path, monkeypatch):
    async with opened_tier(nvme(tmp_path, 64 * MIB), upkeep_runs=False) as tier:
        assert (tmp_path / "index.lmdb" / "ballast").stat().st_blocks * 512 >= MIB
        assert tier.ledger.overhead_bytes >= MIB
        ref, body = an_object(MIB)
        await put(tier, ref, body)
        real = tier.index.commit_batch

        def commit(batch: object) -> None:
            if (tmp_path / "index.lmdb" / "ballast").exists():
                failure = IndexWriteFailed("No space left on device")
                failure.errno = errno.ENOSPC
                raise failure
            real(batch)

        monkeypatch.setattr(tier.index, "commit_batch", commit)
        await tier.commit()
        assert tier.index.committed_has(ref.content_id)
        assert tier.health.state == "ok"
        await upkeep.look_at_device(tier)
        assert (tmp_path / "index.lmdb" / "ballast").exists()


async def test_a_content_forgotten_while_it_is_filled_leaves_nothing(tmp_path):
    ref, body = an_object(MIB)
    async with opened_tier(nvme(tmp_path, 16 * MIB)) as tier:
        await put(tier, ref, body, range(2))
        fill = await tier.reserve(ref, 0, 2, 2)
        tier.evictor.forget(ref.content_id)
        await tier.evictor.settled()
        fill.create = True  # The worker may have opened the file before it was unlinked, or make it now.
        fill.write(body[2 * BLOCK : 4 * BLOCK])
        assert not tier.complete(fill, record.checksums(body[2 * BLOCK : 4 * BLOCK]))
        await tier.evictor.settled()
        assert not object_file(tmp_path, ref.content_id).exists()
        assert tier.ledger.data_bytes == 0
        assert len(tier.ledger.policy) == 0


async def test_a_content_forgotten_while_it_is_filled_and_filled_anew_leaves_nothing(tmp_path):
    """The old fill ends while the new one is at work in the same file."""
    ref, body = an_object(MIB)
    async with opened_tier(nvme(tmp_path, 16 * MIB)) as tier:
        old = await tier.reserve(ref, 0, 0, 2)
        tier.evictor.forget(ref.content_id)
        await tier.evictor.settled()
        new = await tier.reserve(ref, 0, 4, 2)
        for fill in (old, new):
            fill.write(body[fill.offset_bytes : fill.offset_bytes + 2 * BLOCK])
        assert not tier.complete(old, record.checksums(body[: 2 * BLOCK]))
        assert tier.complete(new, record.checksums(body[4 * BLOCK : 6 * BLOCK]))
        await tier.evictor.settled()
        check_accounts(tier)
        assert await read(tier, ref, 4 * BLOCK, 6 * BLOCK) == body[4 * BLOCK : 6 * BLOCK]


async def test_a_forgotten_fill_ends_after_the_unlink_and_before_its_end(tmp_path, monkeypatch):
    """The worker that writes makes the file anew, behind the back of the one that has just removed it."""
    ref, body = an_object(MIB)
    unlink = device.unlink_if_there
    async with opened_tier(nvme(tmp_path, 16 * MIB)) as tier:
        fill = await tier.reserve(ref, 0, 0, 2)

        def end_the_fill() -> None:
            assert not tier.complete(fill, record.checksums(body[: 2 * BLOCK]))

        def unlink_and_write(path: str) -> None:
            unlink(path)
            monkeypatch.undo()
            fill.write(body[: 2 * BLOCK])
            trio.from_thread.run_sync(end_the_fill)

        monkeypatch.setattr(device, "unlink_if_there", unlink_and_write)
        tier.evictor.forget(ref.content_id)
        await tier.evictor.settled()
        assert not object_file(tmp_path, ref.content_id).exists()
        check_accounts(tier)


async def test_an_abandoned_fill_gives_everything_back(tmp_path):
    ref, body = an_object(MIB)
    async with opened_tier(nvme(tmp_path, 16 * MIB)) as tier:
        fill = await tier.reserve(ref, 0, 0, 8)
        fill.write(body)
        tier.abandon(fill)
        await tier.evictor.settled()
        assert not object_file(tmp_path, ref.content_id).exists()
        await put(tier, ref, body, range(2))
        fill = await tier.reserve(ref, 0, 2, 6)
        fill.write(body[2 * BLOCK :])
        tier.abandon(fill)
        await tier.evictor.settled()
        check_accounts(tier)
        assert await read(tier, ref, 0, 2 * BLOCK) == body[: 2 * BLOCK]


async def test_blocks_that_arrive_twice_are_accounted_once(tmp_path):
    ref, body = an_object(MIB)
    async with opened_tier(nvme(tmp_path, 16 * MIB)) as tier:
        fills = [await tier.reserve(ref, 0, 0, 4), await tier.reserve(ref, 0, 2, 6)]
        for fill in fills:
            data = body[fill.offset_bytes : fill.offset_bytes + fill.count * BLOCK]
            fill.write(data)
            tier.complete(fill, record.checksums(data))
        assert tier.ledger.data_bytes == MIB
        check_accounts(tier)


async def test_a_damaged_index_costs_clean_contents_only(tmp_path):
    ref, body = an_object(MIB)
    async with opened_tier(nvme(tmp_path, 16 * MIB)) as tier:
        await put(tier, ref, body)
    (tmp_path / "dirty" / ("ab" * 16)).write_bytes(b"not in the store yet")
    (tmp_path / "index.lmdb" / "data.mdb").write_bytes(b"\xff" * 50_000)
    async with opened_tier(nvme(tmp_path, 16 * MIB)) as tier:
        assert (tmp_path / "index.lmdb.damaged-1").is_dir()
        assert (tmp_path / "dirty" / ("ab" * 16)).read_bytes() == b"not in the store yet"
        assert tier.presence.resident_bytes(ref.content_id) == 0
        with trio.fail_after(60):
            while object_file(tmp_path, ref.content_id).exists():
                await trio.sleep(0.01)
        assert await put(tier, ref, body)
        assert await read(tier, ref, 0, MIB) == body


async def test_an_index_that_cannot_be_read_any_more_is_not_used_any_more(tmp_path, monkeypatch):
    ref, body = an_object(MIB)
    other, other_body = an_object(2 * MIB)
    async with opened_tier(nvme(tmp_path, 16 * MIB)) as tier:
        await put(tier, ref, body)
        await tier.commit()
        assert await read(tier, ref, 0, MIB) == body

        class Broken:
            def begin(self, *args, **kwargs):
                raise lmdb.CorruptedError("page 7")

            close = tier.index._env.close

        with monkeypatch.context() as patch:
            patch.setattr(tier.index, "_env", Broken())
            assert tier.presence.extent(other.content_id, 0) is None
            assert not await put(tier, other, other_body)
            assert not tier.presence.is_complete(other.content_id)
            tier.evictor.forget(other.content_id)
            await tier.evictor.settled()
    async with opened_tier(nvme(tmp_path, 16 * MIB)) as tier:
        assert (tmp_path / "index.lmdb.damaged-1").is_dir()
        assert await put(tier, other, other_body)


async def test_a_newer_tier_is_refused_and_left_alone(tmp_path):
    async with opened_tier(nvme(tmp_path, 16 * MIB)):
        pass
    with lmdb.open(str(tmp_path / "index.lmdb"), max_dbs=8) as env:
        with env.begin(write=True, db=env.open_db(b"meta")) as txn:
            txn.put(b"format", b"tierfs tier index 99")
    with pytest.raises(FormatError, match="99"):
        async with opened_tier(nvme(tmp_path, 16 * MIB)):
            pass
    assert not list(tmp_path.glob("*damaged*"))


async def test_descriptors_are_bounded(tmp_path):
    async with opened_tier(nvme(tmp_path, 256 * MIB)) as tier:
        refs = []
        for seed in range(600):
            ref, body = an_object(100, seed)
            await put(tier, ref, body)
            refs.append((ref, body))
        before = len(os.listdir("/proc/self/fd"))
        for ref, body in refs:
            assert await read(tier, ref, 0, 100) == body
        assert len(os.listdir("/proc/self/fd")) - before <= 512
        assert len(tier.files) <= 512


async def test_little_memory_per_small_content(tmp_path):
    async with opened_tier(nvme(tmp_path, 256 * MIB), upkeep_runs=False) as tier:
        sums = record.checksums(b"x" * 100)

        async def remember(numbers: range) -> None:
            for number in numbers:
                ref = ObjectRef(ContentId(number.to_bytes(16, "big")), f"key-{number}", "etag", 100)
                fill = await tier.reserve(ref, 0, 0, 1)
                tier.complete(fill, sums)
                if number % 2000 == 0:
                    await tier.commit()
            await tier.commit()

        await remember(range(10_000))
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            await remember(range(10_000, 50_000))
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert grown / 40_000 < 400


async def test_the_walk_learns_everything_once(tmp_path):
    async with opened_tier(nvme(tmp_path, 64 * MIB)) as tier:
        for seed in range(50):
            ref, body = an_object(20_000, seed)
            await put(tier, ref, body)
        big, big_body = an_object(20 * MIB)
        await put(tier, big, big_body)
        used, units = tier.ledger.clean_bytes, len(tier.ledger.policy)
    async with opened_tier(nvme(tmp_path, 64 * MIB)) as tier:
        assert tier.ledger.clean_bytes == used
        assert await read(tier, big, 0, 100) == big_body[:100]
        assert tier.ledger.clean_bytes == used
        await tier.walked.wait()
        assert (tier.ledger.clean_bytes, len(tier.ledger.policy), tier.ledger.unwalked_bytes) == (used, units, 0)


async def test_room_is_found_among_units_that_are_not_walked_yet(tmp_path):
    capacity = 4 * MIB
    async with opened_tier(nvme(tmp_path, capacity)) as tier:
        for seed in range(7):
            ref, body = an_object(MIB // 2, seed)
            await put(tier, ref, body)
    async with opened_tier(nvme(tmp_path, capacity)) as tier:
        ref, body = an_object(2 * MIB)
        assert await put(tier, ref, body)
        check_accounts(tier)


async def test_a_file_system_without_holes_keeps_whole_files(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "punch", lambda fd, offset, length: False)
    async with opened_tier(nvme(tmp_path, 40 * MIB)) as tier:
        for seed in range(8):
            ref, body = an_object(2 * EXTENT - seed, seed)
            await put(tier, ref, body)
            assert await read(tier, ref, 0, 100) in (None, body[:100])
            small, small_body = an_object(5000, seed)
            assert await put(tier, small, small_body)
            await tier.evictor.settled()
            assert tier.ledger.used_bytes <= 40 * MIB
            check_accounts(tier)
        assert list((tmp_path / "segments").iterdir()) == []


def test_block_size_is_what_the_tests_assume():
    assert (BLOCK_SIZE_BYTES, blocks.EXTENT_SIZE_BYTES) == (BLOCK, EXTENT)
