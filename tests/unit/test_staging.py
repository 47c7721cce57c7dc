"""Dirty contents: every change against a plain model, durability step by step, room, and the end of a content."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import trio

from tests.support.tiers import (
    BLOCK,
    EXTENT,
    MIB,
    RangeStore,
    body_of,
    device_bytes,
    nvme,
    object_file,
    opened_cache,
    ram,
    settings_for,
    settled,
)
from tierfs.cache import area, device, sidecar
from tierfs.cache.sealing import seal
from tierfs.cache.sidecar import Sidecar
from tierfs.cache.staging import Staging
from tierfs.errors import AlreadyExists, InvalidArgument, ObjectTooLarge, StaleContent, TierFailed, TierFull
from tierfs.types import ContentId, ObjectRef, new_content_id


@pytest.fixture
def store():
    return RangeStore()


def one_tier(tmp_path: Path, capacity_bytes: int = 128 * MIB, **kwargs):
    return settings_for(tmp_path, nvme(tmp_path / "n", capacity_bytes), **kwargs)


async def write(staging: Staging, offset: int, data: bytes) -> None:
    if not staging.write_nowait(offset, data):
        await staging.write(offset, data)


async def content(staging: Staging) -> bytes:
    return await staging.read(0, staging.size_bytes + 1)


def ref_to(staging: Staging, store: RangeStore, key: str, body: bytes) -> ObjectRef:
    """The object that an upload made of it."""
    info = store.set(key, body)
    return ObjectRef(staging.content_id, key, info.etag, info.size_bytes)


async def test_a_new_content(tmp_path, store):
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        staging = await cache.create_staging(new_content_id())
        assert (staging.size_bytes, staging.generation, staging.base) == (0, 0, None)
        assert await content(staging) == b""
        assert staging.write_nowait(5, b"hello")
        assert staging.generation == 1
        assert staging.read_nowait(0, 100) == b"\0" * 5 + b"hello"
        await staging.write(BLOCK * 3, b"x" * 200_000)
        assert staging.size_bytes == BLOCK * 3 + 200_000
        await staging.truncate(7)
        assert await content(staging) == b"\0" * 5 + b"he"
        await staging.truncate(9)
        assert await content(staging) == b"\0" * 5 + b"he\0\0"
        assert await cache.open_staging(staging.content_id) is staging
        with pytest.raises(AlreadyExists):
            await cache.create_staging(staging.content_id)
        path = tmp_path / "n" / "dirty" / staging.content_id.hex()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert store.ranges == []


@pytest.mark.parametrize("cached", ["nothing", "some", "all"])
@pytest.mark.parametrize("size", [1, 5000, BLOCK, BLOCK + 1, 10 * BLOCK - 3, EXTENT + 3 * BLOCK])
@pytest.mark.parametrize("seed", range(2))
async def test_a_converted_content_against_a_model(tmp_path, store, cached, size, seed):
    dice = random.Random(f"{cached}/{size}/{seed}")
    original = body_of(size, seed)
    ref = store.add("k", original)
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        if cached == "all":
            await cache.read(ref, 0, size)
        elif cached == "some":
            for _ in range(4):
                await cache.read(ref, dice.randrange(size), BLOCK)
        await settled(cache)
        staging = await cache.convert(ref, new_content_id())
        assert staging.base == ref
        model = bytearray(original)
        for step in range(60):
            generation = staging.generation
            limit = max(size + 2 * BLOCK, 1)
            action = dice.random()
            start = dice.randrange(limit)
            if action < 0.45:
                data = dice.randbytes(dice.choice([1, 100, 4096, BLOCK, 3 * BLOCK + 5]))
                await write(staging, start, data)
                model.extend(bytes(max(0, start - len(model))))
                model[start : start + len(data)] = data
                assert staging.generation > generation
            elif action < 0.55:
                await staging.truncate(start)
                del model[start:]
                model.extend(bytes(start - len(model)))
                assert staging.generation > generation
            elif action < 0.60:
                await staging.sync()
            elif action < 0.65:
                await staging.close()
                reopened = await cache.open_staging(staging.content_id)
                assert reopened is not None
                assert reopened is not staging
                staging = reopened
            elif action < 0.68:
                await staging.fill()
            else:
                length = dice.choice([1, 5000, 2 * BLOCK])
                found = staging.read_nowait(start, length)
                if found is None:
                    found = await staging.read(start, length)
                assert found == model[start : start + length], step
            assert staging.size_bytes == len(model)
        for start, length in staging.unchanged_ranges():
            assert original[start : start + length] == model[start : start + length]
        assert await content(staging) == model
        await staging.fill()
        store.remove("k")
        assert await content(staging) == model
        new = ref_to(staging, store, "new", bytes(model))
        assert await seal(staging, new)
        assert await cache.read(new, 0, len(model) + 1) == model
        assert cache.resident_bytes(new) == ({"nvme": len(model)} if model else {})
        assert cache.dirty_contents() == []
        (tier,) = cache.status()
        assert tier.dirty_bytes == 0
        assert abs(tier.used_bytes - device_bytes(tmp_path / "n")) <= BLOCK


async def test_converting_reuses_the_local_file(tmp_path, store):
    body = body_of(3 * EXTENT)
    ref = store.add("k", body)
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        await cache.prefetch(ref, 0, len(body))
        inode = object_file(tmp_path / "n", ref.content_id).stat().st_ino
        store.ranges.clear()
        staging = await cache.convert(ref, new_content_id())
        assert not object_file(tmp_path / "n", ref.content_id).exists()
        await staging.write(EXTENT + 10, b"changed")
        assert await content(staging) == body[: EXTENT + 10] + b"changed" + body[EXTENT + 17 :]
        assert list(staging.unchanged_ranges()) == [(0, EXTENT), (EXTENT + BLOCK, 2 * EXTENT - BLOCK)]
        new = ref_to(staging, store, "k", await content(staging))
        assert await seal(staging, new)
        assert object_file(tmp_path / "n", new.content_id).stat().st_ino == inode
        assert store.ranges == []
        (tier,) = cache.status()
        assert tier.used_bytes == len(body)


async def test_a_large_converted_file_fetches_only_what_is_touched(tmp_path, store):
    body = body_of(40 * MIB)
    ref = store.add("k", body)
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        staging = await cache.convert(ref, new_content_id())
        await staging.write(20 * MIB + 5, b"x")
        assert store.fetched_bytes() == BLOCK
        await staging.write(30 * MIB, b"y" * (2 * BLOCK))
        assert store.fetched_bytes() == 0
        assert staging.allocated_bytes <= 4 * BLOCK
        # Sealed with what is local; the rest is in the new object.
        model = bytearray(body)
        model[20 * MIB + 5] = ord("x")
        model[30 * MIB : 30 * MIB + 2 * BLOCK] = b"y" * (2 * BLOCK)
        new = ref_to(staging, store, "k", bytes(model))
        assert await seal(staging, new)
        assert cache.resident_bytes(new)["nvme"] == 3 * BLOCK
        assert await cache.read(new, 0, len(model)) == model
        assert not any(key != "k" for key, _, _ in store.ranges)


async def test_a_base_that_is_gone_is_stale_not_zeros(tmp_path, store):
    ref = store.add("k", body_of(10 * BLOCK))
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        staging = await cache.convert(ref, new_content_id())
        await staging.write(0, b"a" * BLOCK)
        store.set("k", body_of(10 * BLOCK, 2))
        assert await staging.read(0, BLOCK) == b"a" * BLOCK
        with pytest.raises(StaleContent):
            await staging.read(0, 2 * BLOCK)
        with pytest.raises(StaleContent):
            await staging.write(3 * BLOCK + 1, b"z")
        await staging.write(3 * BLOCK, b"z" * BLOCK)
        assert await staging.read(3 * BLOCK, BLOCK) == b"z" * BLOCK
        # Cut off, the lost part is not needed any more.
        await staging.truncate(BLOCK)
        await staging.truncate(2 * BLOCK)
        assert await content(staging) == b"a" * BLOCK + bytes(BLOCK)


async def test_readers_of_the_old_content_never_see_new_bytes(tmp_path, store):
    body = body_of(4 * MIB)
    ref = store.add("k", body)
    async with opened_cache(store, one_tier(tmp_path)) as cache, trio.open_nursery() as nursery:
        await cache.prefetch(ref, 0, len(body))
        done = False

        async def read() -> None:
            dice = random.Random(1)
            while not done:
                start = dice.randrange(len(body))
                data = cache.read_nowait(ref, start, 50_000)
                if data is None or dice.random() < 0.5:
                    data = await cache.read(ref, start, 50_000)
                assert data == body[start : start + 50_000]
                await trio.lowlevel.checkpoint()

        for _ in range(3):
            nursery.start_soon(read)
        for _ in range(8):
            staging = await cache.convert(ref, new_content_id())
            for offset in range(0, len(body), 100_000):
                await staging.write(offset, b"new" * 10_000)
            await staging.discard()
            await cache.prefetch(ref, 0, len(body))
        done = True


async def test_converting_does_not_wait_for_the_store(tmp_path, store):
    body = body_of(20 * BLOCK)
    ref = store.add("k", body)
    async with opened_cache(store, one_tier(tmp_path)) as cache, trio.open_nursery() as nursery:
        await cache.read(ref, 0, 2 * BLOCK)
        store.gate = threading.Event()
        nursery.start_soon(cache.prefetch, ref, 0, len(body))
        with trio.fail_after(60):
            while not store.running:
                await trio.sleep(0.001)
            staging = await cache.convert(ref, new_content_id())
            await staging.write(0, b"n" * (20 * BLOCK))
        store.gate.set()
        with trio.fail_after(60):
            while not cache.is_complete(ref.content_id):
                await trio.sleep(0.001)
        # What the fetch wrote went into the old content, not into ours.
        assert await content(staging) == b"n" * (20 * BLOCK)
        assert await cache.read(ref, 0, len(body)) == body


async def test_a_write_while_the_base_is_being_read_wins(tmp_path, store):
    body = body_of(4 * BLOCK)
    ref = store.add("k", body)
    async with opened_cache(store, one_tier(tmp_path)) as cache, trio.open_nursery() as nursery:
        staging = await cache.convert(ref, new_content_id())
        store.gate = threading.Event()
        found: list[bytes] = []

        async def read() -> None:
            found.append(await staging.read(0, 4 * BLOCK))

        nursery.start_soon(read)
        nursery.start_soon(staging.fill)
        with trio.fail_after(60):
            while not store.running:
                await trio.sleep(0.001)
        assert staging.write_nowait(BLOCK, b"w" * BLOCK)
        store.gate.set()
        with trio.fail_after(60):
            while not found:
                await trio.sleep(0.001)
        assert found == [body[:BLOCK] + b"w" * BLOCK + body[2 * BLOCK :]]
        assert await content(staging) == found[0]


async def test_sparse_files_cost_what_is_in_them(tmp_path, store):
    size = 100 << 30
    async with opened_cache(store, one_tier(tmp_path, 16 * MIB)) as cache:
        staging = await cache.create_staging(new_content_id())
        await staging.truncate(size)
        await staging.write(size - 1, b"x")
        await staging.write(50 << 30, b"y" * BLOCK)
        assert staging.allocated_bytes <= 3 * BLOCK
        assert await staging.read(size - 10, 100) == bytes(9) + b"x"
        (tier,) = cache.status()
        assert tier.used_bytes == tier.dirty_bytes == staging.allocated_bytes
        ref = ObjectRef(staging.content_id, "k", "etag", size)
        assert await seal(staging, ref)
        (tier,) = cache.status()
        assert tier.dirty_bytes == 0
        assert tier.used_bytes <= 3 * BLOCK
        assert await cache.read(ref, size - 10, 100) == bytes(9) + b"x"
        assert await cache.read(ref, 10 << 30, 5) == bytes(5)
        assert cache.is_complete(ref.content_id)
        assert store.ranges == []
        await cache.forget(ref.content_id)
        await settled(cache)
        assert cache.status()[0].used_bytes == 0


async def test_an_impossible_size_is_the_writers_error_not_the_tiers(tmp_path, store):
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        staging = await cache.create_staging(new_content_id())
        with pytest.raises(ObjectTooLarge):
            await staging.truncate((1 << 63) - 1)
        assert staging.size_bytes == 0
        with pytest.raises(ObjectTooLarge):
            await staging.write((1 << 63) - 10, b"x")
        assert cache.status()[0].state == "ok"
        await staging.write(0, b"still fine")
        assert await content(staging) == b"still fine"


# restart


@pytest.mark.parametrize("clean", [True, False])
async def test_dirty_contents_are_found_again(tmp_path, store, clean):
    body = body_of(5 * BLOCK)
    ref = store.add("k", body)
    script = (
        "import sys, trio\n"
        "from pathlib import Path\n"
        "from tests.support.tiers import *\n"
        "from tierfs.types import ContentId\n"
        "async def main():\n"
        "    store = RangeStore()\n"
        "    ref = store.add('k', body_of(5 * BLOCK))\n"
        "    base = Path(sys.argv[1])\n"
        "    async with opened_cache(store, settings_for(base, nvme(base / 'n', 64 * MIB))) as cache:\n"
        "        new = await cache.create_staging(ContentId(b'n' * 16))\n"
        "        assert new.write_nowait(0, b'never synced')\n"
        "        changed = await cache.convert(ref, ContentId(b'c' * 16))\n"
        "        await changed.write(BLOCK + 3, b'changed')\n"
        "        assert changed.write_nowait(3 * BLOCK, b'w' * BLOCK)\n"
        "        await changed.truncate(5 * BLOCK - 7)\n"
        "        print('ready', flush=True)\n"
        "        if sys.argv[2] == 'False':\n"
        "            await trio.sleep_forever()\n"
        "trio.run(main)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path), str(clean)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        if not clean:
            process.send_signal(signal.SIGKILL)
    model = bytearray(body[: 5 * BLOCK - 7])
    model[BLOCK + 3 : BLOCK + 10] = b"changed"
    model[3 * BLOCK : 4 * BLOCK] = b"w" * BLOCK
    async with opened_cache(store, settings_for(tmp_path, nvme(tmp_path / "n", 64 * MIB))) as cache:
        found = {dirty.content_id: dirty for dirty in cache.dirty_contents()}
        assert found.keys() == {b"n" * 16, b"c" * 16}
        assert (found[ContentId(b"n" * 16)].size_bytes, found[ContentId(b"n" * 16)].base) == (12, None)
        assert (found[ContentId(b"c" * 16)].size_bytes, found[ContentId(b"c" * 16)].base) == (len(model), ref)
        on_device = sum(os.stat(path).st_blocks * 512 for path in (tmp_path / "n" / "dirty").iterdir())
        assert cache.status()[0].dirty_bytes == on_device
        new = await cache.open_staging(ContentId(b"n" * 16))
        assert await content(new) == b"never synced"
        changed = await cache.open_staging(ContentId(b"c" * 16))
        assert await content(changed) == model
        assert list(changed.unchanged_ranges()) == [(0, BLOCK), (2 * BLOCK, BLOCK), (4 * BLOCK, BLOCK - 7)]
        assert await cache.open_staging(ContentId(b"z" * 16)) is None


@pytest.mark.parametrize("synced", [True, False])
async def test_after_a_power_cut_only_durable_blocks_are_believed(tmp_path, store, synced, monkeypatch):
    """The worst the device may hold: every present bit, but of the bytes only those that were synced."""
    body = body_of(6 * BLOCK)
    ref = store.add("k", body)
    content_id = new_content_id()
    model = bytearray(body)
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        await cache.read(ref, 4 * BLOCK, BLOCK)
        staging = await cache.convert(ref, content_id)
        await staging.write(10, b"first")
        await staging.write(BLOCK, b"s" * BLOCK)
        if synced:
            await staging.sync()
            model[10:15] = b"first"
            model[BLOCK : 2 * BLOCK] = b"s" * BLOCK
        part = tmp_path / "n" / "dirty" / f"{content_id.hex()}.part"
        durable = part.read_bytes()
        await staging.write(2 * BLOCK + 5, b"later")
        await staging.write(3 * BLOCK, b"l" * BLOCK)
        snapshot = tmp_path / "after"
        shutil.copytree(tmp_path / "n" / "dirty", snapshot)
        await staging.discard()
    if synced:
        (snapshot / part.name).write_bytes(durable)
    else:
        (snapshot / part.name).write_bytes(b"\xff" * len(body))
    shutil.rmtree(tmp_path / "n" / "dirty")
    snapshot.rename(tmp_path / "n" / "dirty")
    monkeypatch.setattr(device, "boot_id", lambda: b"the next boot")
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        staging = await cache.open_staging(content_id)
        assert await content(staging) == model
        # What may have changed is not offered for a copy on the server.
        for start, length in staging.unchanged_ranges():
            assert body[start : start + length] == model[start : start + length]
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        assert await content(await cache.open_staging(content_id)) == model


async def test_after_a_power_cut_a_cut_stays_cut(tmp_path, store, monkeypatch):
    body = body_of(6 * BLOCK)
    ref = store.add("k", body)
    content_id = new_content_id()
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        staging = await cache.convert(ref, content_id)
        await staging.truncate(BLOCK + 7)
        await staging.truncate(6 * BLOCK)
        await staging.sync()
    monkeypatch.setattr(device, "boot_id", lambda: b"the next boot")
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        staging = await cache.open_staging(content_id)
        assert await content(staging) == body[: BLOCK + 7] + bytes(5 * BLOCK - 7)


async def test_a_truncate_that_was_cut_short_is_whole_after_a_restart(tmp_path, store, monkeypatch):
    """Killed when the file has been cut, and the sidecar does not say so yet: no byte of the base comes back."""
    body = body_of(3 * BLOCK)
    ref = store.add("k", body)
    content_id = new_content_id()

    def killed(sidecar: Sidecar, limit_bytes: int) -> None:
        raise OSError(errno.EIO, "stopped here")

    async with opened_cache(store, one_tier(tmp_path)) as cache:
        staging = await cache.convert(ref, content_id)
        with monkeypatch.context() as patch:
            patch.setattr(Sidecar, "set_limit", killed)
            with pytest.raises(TierFailed):
                await staging.truncate(BLOCK + 10)
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        staging = await cache.open_staging(content_id)
        assert await content(staging) == body[: BLOCK + 10]
        await staging.truncate(3 * BLOCK)
        assert await content(staging) == body[: BLOCK + 10] + bytes(2 * BLOCK - 10)


async def test_a_sidecar_alone_is_the_base(tmp_path, store, monkeypatch):
    """A crash between the steps of a conversion."""
    body = body_of(3 * BLOCK)
    ref = store.add("k", body)
    content_id = new_content_id()
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        await cache.read(ref, 0, len(body))
        await cache.tiers[0].commit()

        def fail(*args: object) -> None:
            raise OSError(errno.EIO, "stopped here")

        with monkeypatch.context() as patch:
            patch.setattr(area.os, "rename", lambda old, new: fail() if new.endswith(".part") else os.replace(old, new))
            with pytest.raises(TierFailed):
                await cache.convert(ref, content_id)
        assert await cache.read(ref, 0, len(body)) == body
        assert await cache.open_staging(content_id) is None
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        (dirty,) = cache.dirty_contents()
        assert (dirty.content_id, dirty.base) == (content_id, ref)
        staging = await cache.open_staging(content_id)
        assert await content(staging) == body
        await staging.discard()
    assert list((tmp_path / "n" / "dirty").iterdir()) == []


async def test_remains_and_damage_in_the_directory(tmp_path, store, caplog):
    body = body_of(3 * BLOCK)
    ref = store.add("k", body)
    content_id = new_content_id()
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        staging = await cache.convert(ref, content_id)
        await staging.write(0, b"x")
    dirty = tmp_path / "n" / "dirty"
    (dirty / f"{'ab' * 16}.base.tmp").write_bytes(b"half a sidecar")
    (dirty / f"{'cd' * 16}.part").write_bytes(b"bytes without a sidecar")
    (dirty / "README").write_bytes(b"somebody was here")
    base = dirty / f"{content_id.hex()}.base"
    damaged = bytearray(base.read_bytes())
    damaged[40] ^= 1
    base.write_bytes(damaged)
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        assert cache.dirty_contents() == []
        assert await cache.open_staging(content_id) is None
    assert not (dirty / f"{'ab' * 16}.base.tmp").exists()
    for name in (f"{'cd' * 16}.part", "README", base.name, f"{content_id.hex()}.part"):
        assert (dirty / name).exists(), name
    assert sum("kept aside" in line for line in caplog.messages) == 2


async def test_a_lost_index_loses_no_dirty_content(tmp_path, store):
    body = body_of(3 * BLOCK)
    ref = store.add("k", body)
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        await cache.read(ref, 0, len(body))
        new = await cache.create_staging(ContentId(b"n" * 16))
        await new.write(0, b"new")
        changed = await cache.convert(ref, ContentId(b"c" * 16))
        await changed.write(5, b"changed")
    shutil.rmtree(tmp_path / "n" / "index.lmdb")
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        assert await content(await cache.open_staging(ContentId(b"n" * 16))) == b"new"
        changed = await cache.open_staging(ContentId(b"c" * 16))
        assert await content(changed) == body[:5] + b"changed" + body[12:]


async def test_sync_makes_bytes_then_name_then_marks_durable(tmp_path, store, monkeypatch):
    ref = store.add("k", body_of(3 * BLOCK))
    steps: list[str] = []

    def name_of(fd: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{fd}")).suffix or "data"

    real_data, real_dir = os.fdatasync, device.sync_directory
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        new = await cache.create_staging(new_content_id())
        changed = await cache.convert(ref, new_content_id())
        await new.write(0, b"x")
        await changed.write(0, b"x")
        monkeypatch.setattr(os, "fdatasync", lambda fd: (steps.append(name_of(fd)), real_data(fd)))
        monkeypatch.setattr(device, "sync_directory", lambda path: (steps.append("names"), real_dir(path)))
        await new.sync()
        await new.sync()
        assert steps == ["data", "names", "data"]
        steps.clear()
        await changed.sync()
        assert steps == [".part", ".base"]


async def test_a_failed_sync_is_an_error_and_is_tried_again(tmp_path, store, monkeypatch):
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        staging = await cache.create_staging(new_content_id())
        await staging.write(0, b"x")

        def fail(fd: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            with pytest.raises(TierFailed):
                await staging.sync()
        await staging.sync()


# room


async def test_writing_evicts_clean_data_first(tmp_path, store):
    refs = [store.add(f"k{n}", body_of(MIB, n)) for n in range(16)]
    async with opened_cache(store, one_tier(tmp_path, 16 * MIB)) as cache:
        for ref in refs:
            await cache.read(ref, 0, MIB)
        staging = await cache.create_staging(new_content_id())
        for offset in range(0, 12 * MIB, 100_000):
            await write(staging, offset, b"d" * 100_000)
            (tier,) = cache.status()
            assert tier.used_bytes + tier.overhead_bytes <= 16 * MIB
        assert await content(staging) == b"d" * 12_600_000
        (tier,) = cache.status()
        assert tier.dirty_bytes >= 12 * MIB
        assert device_bytes(tmp_path / "n") <= 16 * MIB


async def test_full_of_dirty_data_means_wait_for_the_drain_then_enospc(tmp_path, store):
    async with opened_cache(store, one_tier(tmp_path, 8 * MIB)) as cache:
        first = await cache.create_staging(new_content_id())
        await first.write(0, b"1" * (7 * MIB))
        second = await cache.create_staging(new_content_id())
        with pytest.raises(TierFull):
            await second.write(0, b"2" * (2 * MIB))
        assert second.size_bytes == 0
        assert cache.status()[0].state == "ok"
        calls = 0

        async def drain() -> bool:
            nonlocal calls
            calls += 1
            if first.is_closed:
                return False
            return await seal(first, ref_to(first, store, "first", b"1" * (7 * MIB)))

        cache.set_drain(drain)
        await second.write(0, b"2" * (2 * MIB))
        assert calls >= 1
        assert await content(second) == b"2" * (2 * MIB)
        # Overwriting what is there takes no room, even now.
        await second.write(5 * MIB, b"3" * MIB)
        with pytest.raises(TierFull):
            await second.write(20 * MIB, b"4" * (6 * MIB))
        await second.write(0, b"5" * (2 * MIB))
        assert await second.read(0, 3) == b"555"


async def test_near_the_dirty_limit_writers_wait_for_the_drain(tmp_path, store):
    async with opened_cache(store, one_tier(tmp_path, 64 * MIB, dirty_limit_bytes=4 * MIB)) as cache:
        first = await cache.create_staging(new_content_id())
        await first.write(0, b"1" * (5 * MIB))
        second = await cache.create_staging(new_content_id())
        assert not second.write_nowait(0, b"x")
        drained = []

        async def drain() -> bool:
            if first.is_closed:
                return False
            drained.append(await seal(first, ref_to(first, store, "first", b"1" * (5 * MIB))))
            return True

        cache.set_drain(drain)
        await second.write(0, b"x")
        assert drained == [True]
        # Where nothing drains there is still room: being slow does not help anybody then.
        await second.write(0, b"2" * (6 * MIB))
        await second.write(6 * MIB, b"3" * MIB)


async def test_a_disk_that_somebody_else_fills(tmp_path, store, monkeypatch):
    root = tmp_path / "n"
    limit = 6 * MIB
    real = os.pwrite

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if device_bytes(root) + len(data) > limit:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    refs = [store.add(f"k{n}", body_of(MIB, n)) for n in range(5)]
    async with opened_cache(store, one_tier(tmp_path, 64 * MIB)) as cache:
        for ref in refs:
            await cache.read(ref, 0, MIB)
        monkeypatch.setattr(os, "pwrite", pwrite)
        staging = await cache.create_staging(new_content_id())
        for offset in range(0, 5 * MIB, BLOCK):
            await write(staging, offset, b"d" * BLOCK)
        with pytest.raises(TierFull):
            await staging.write(5 * MIB, b"d" * (2 * MIB))
        assert staging.size_bytes == 5 * MIB
        assert await content(staging) == b"d" * (5 * MIB)
        limit = 64 * MIB
        await staging.write(5 * MIB, b"e" * MIB)
        assert staging.size_bytes == 6 * MIB


async def test_a_write_that_stops_half_way_leaves_no_trace(tmp_path, store, monkeypatch):
    real = os.pwrite
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        staging = await cache.create_staging(new_content_id())
        await staging.write(0, b"a" * 1000)
        calls = 0

        def pwrite(fd: int, data: bytes, offset: int) -> int:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise OSError(errno.EIO, "Input/output error")
            return real(fd, data[:500_000], offset)

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", pwrite)
            with pytest.raises(TierFailed):
                await staging.write(1000, b"b" * 1_000_000)
        assert staging.size_bytes == 1000
        assert await content(staging) == b"a" * 1000
        await staging.truncate(2000)
        assert await content(staging) == b"a" * 1000 + bytes(1000)


async def test_small_writes_need_no_worker_and_large_ones_do(tmp_path, store):
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        staging = await cache.create_staging(new_content_id())
        assert staging.write_nowait(0, b"x" * BLOCK)
        assert not staging.write_nowait(0, b"x" * (BLOCK + 1))
        async with staging._lock:
            assert not staging.write_nowait(0, b"x")
        ref = store.add("k", body_of(3 * BLOCK))
        changed = await cache.convert(ref, new_content_id())
        assert not changed.write_nowait(5, b"x")
        assert changed.write_nowait(BLOCK, b"x" * BLOCK)
        assert changed.write_nowait(BLOCK + 5, b"y")
        assert await changed.read(BLOCK, 8) == b"xxxxxyxx"
        # The last block is replaced by a write that reaches the end of the base.
        other = await cache.convert(store.add("o", body_of(BLOCK + 10)), new_content_id())
        assert other.write_nowait(BLOCK, b"z" * 10)
        assert await other.read(BLOCK, 20) == b"z" * 10


async def test_thousands_of_open_stagings_hold_few_descriptors(tmp_path, store):
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        before = len(os.listdir("/proc/self/fd"))
        stagings = []
        for number in range(1500):
            staging = await cache.create_staging(new_content_id())
            await write(staging, 0, b"%d" % number)
            stagings.append(staging)
        assert len(os.listdir("/proc/self/fd")) - before <= 520
        for number, staging in enumerate(stagings):
            await write(staging, 10, b"more")
            assert await content(staging) == (b"%d" % number).ljust(10, b"\0") + b"more"


# the end


async def test_a_sealed_content_is_an_ordinary_clean_one(tmp_path, store):
    body = body_of(9 * MIB + 5)
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        staging = await cache.create_staging(new_content_id())
        await staging.write(0, body)
        ref = ref_to(staging, store, "k", body)
        assert await seal(staging, ref)
        assert staging.is_closed
        assert cache.is_complete(ref.content_id)
        assert cache.read_nowait(ref, 100, 1000) == body[100:1100]
        assert await cache.read(ref, 0, len(body)) == body
        with pytest.raises(TierFailed):
            await staging.write(0, b"x")
        with pytest.raises(TierFailed):
            await staging.read(0, 1)
        assert await cache.tiers[0].read_blocks(ref.content_id, 0, EXTENT) == body[:EXTENT]
        await staging.discard()
        assert cache.is_complete(ref.content_id)
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        assert cache.dirty_contents() == []
        assert await cache.read(ref, 0, len(body)) == body
        assert store.ranges == []
        assert await cache.evict(ref.content_id) == -(-len(body) // 4096) * 4096
        assert await cache.read(ref, 0, len(body)) == body


async def test_a_content_written_during_the_seal_stays_dirty(tmp_path, store):
    body = body_of(20 * MIB)
    async with opened_cache(store, one_tier(tmp_path)) as cache, trio.open_nursery() as nursery:
        staging = await cache.create_staging(new_content_id())
        await staging.write(0, body)
        ref = ref_to(staging, store, "k", body)
        results = []

        async def seal_now() -> None:
            results.append(await seal(staging, ref))

        nursery.start_soon(seal_now)
        await trio.sleep(0.002)
        await write(staging, 3, b"changed")
        with trio.fail_after(60):
            while not results:
                await trio.sleep(0.001)
        if results == [False]:
            assert await staging.read(0, 12) == body[:3] + b"changed" + body[10:12]
            assert len(cache.dirty_contents()) == 1
            assert cache.resident_bytes(ref)["nvme"] > 0
            assert not cache.is_complete(ref.content_id)


async def test_what_cannot_be_sealed(tmp_path, store):
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        staging = await cache.create_staging(new_content_id())
        await staging.write(0, b"12345")
        with pytest.raises(InvalidArgument):
            await seal(staging, ObjectRef(new_content_id(), "k", "etag", 5))
        assert not await seal(staging, ObjectRef(staging.content_id, "k", "etag", 6))
        assert await content(staging) == b"12345"


async def test_an_empty_content_leaves_nothing_behind(tmp_path, store):
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        staging = await cache.create_staging(new_content_id())
        assert await seal(staging, ref_to(staging, store, "k", b""))
        assert cache.dirty_contents() == []
    assert device_bytes(tmp_path / "n") == 0


async def test_discard_frees_everything(tmp_path, store):
    ref = store.add("k", body_of(5 * BLOCK))
    async with opened_cache(store, one_tier(tmp_path)) as cache:
        await cache.read(ref, 0, 5 * BLOCK)
        new = await cache.create_staging(new_content_id())
        await new.write(0, b"x" * MIB)
        changed = await cache.convert(ref, new_content_id())
        await changed.write(0, b"x")
        await new.discard()
        await new.discard()
        await changed.discard()
        await new.close()
        assert cache.dirty_contents() == []
        assert cache.status()[0].used_bytes == 0
        assert list((tmp_path / "n" / "dirty").iterdir()) == []
        assert await cache.open_staging(new.content_id) is None
        assert await cache.read(ref, 0, 5 * BLOCK) == body_of(5 * BLOCK)


async def test_dirty_bytes_are_never_evicted_or_forgotten(tmp_path, store):
    async with opened_cache(store, one_tier(tmp_path, 8 * MIB)) as cache:
        staging = await cache.create_staging(new_content_id())
        await staging.write(0, b"d" * (4 * MIB))
        assert await cache.evict(staging.content_id) == 0
        await cache.forget(staging.content_id)
        for number in range(20):
            ref = store.add(f"k{number}", body_of(MIB, number))
            assert await cache.read(ref, 0, MIB) == body_of(MIB, number)
        assert await content(staging) == b"d" * (4 * MIB)
        assert cache.resident_bytes(staging.content_id) == {"nvme": 4 * MIB}


# where the write tier is not the first


async def test_with_a_ram_tier_in_front_the_base_comes_from_it(tmp_path, store):
    body = body_of(3 * BLOCK)
    ref = store.add("k", body)
    settings = settings_for(tmp_path, ram(tmp_path / "r", 8 * MIB), nvme(tmp_path / "n", 64 * MIB))
    async with opened_cache(store, settings) as cache:
        await cache.read(ref, 0, len(body))
        assert set(cache.resident_bytes(ref)) == {"ram"}
        store.ranges.clear()
        staging = await cache.convert(ref, new_content_id())
        await staging.write(5, b"x")
        assert await content(staging) == body[:5] + b"x" + body[6:]
        assert store.ranges == []
        assert set(cache.resident_bytes(staging.content_id)) == {"nvme"}


@pytest.mark.parametrize("with_ram", [True, False])
async def test_without_a_tier_that_survives_a_reboot(tmp_path, store, with_ram):
    body = body_of(3 * MIB)
    tiers = (ram(tmp_path / "r", 8 * MIB),) if with_ram else ()
    async with opened_cache(store, settings_for(tmp_path, *tiers)) as cache:
        staging = await cache.create_staging(new_content_id())
        await staging.write(0, body)
        assert (tmp_path / "staging" / "dirty" / staging.content_id.hex()).exists()
        assert [tier.name for tier in cache.status()] == (["ram", "staging"] if with_ram else ["staging"])
        ref = ref_to(staging, store, "k", body)
        assert await seal(staging, ref)
        # Kept where there is a tier to keep it in; in any case not in the staging area.
        assert cache.resident_bytes(ref) == ({"ram": 3 * MIB} if with_ram else {})
        assert device_bytes(tmp_path / "staging") == 0
        assert await cache.read(ref, 0, len(body)) == body
        changed = await cache.convert(ref, new_content_id())
        await changed.write(1, b"x")
        assert await content(changed) == body[:1] + b"x" + body[2:]
        new = ref_to(changed, store, "k", body[:1] + b"x" + body[2:])
        assert await seal(changed, new)
        assert await cache.read(new, 0, 3) == body[:1] + b"x" + body[2:3]


def test_a_sidecar_says_what_was_written(tmp_path):
    base = ObjectRef(ContentId(b"b" * 16), "key/ä\udc80", "etag", 20 * MIB, "version")
    path = str(tmp_path / "x.base")
    made = sidecar.Sidecar.create(path, base, b"boot", limit_bytes=20 * MIB, present={0: 5, 2: 1}, changed={0: 4},
                                  durable={})
    made.mark_present(1, 0xFF)
    made.mark_changed(1, 0x0F)
    made.set_durable({1: 0x03})
    made.set_limit(19 * MIB)
    made.close()
    found, boot = sidecar.Sidecar.open(path)
    assert (found.base, found.limit_bytes, boot) == (base, 19 * MIB, b"boot")
    assert found.words() == ({0: 5, 1: 0xFF, 2: 1}, {0: 4, 1: 0x0F}, {1: 0x03})
    found.close()
    whole = Path(path).read_bytes()
    for position in (0, 9, 17, 22, 30, 60):
        damaged = bytearray(whole)
        damaged[position] ^= 0x81
        Path(path).write_bytes(damaged)
        with pytest.raises(sidecar.BadSidecar):
            sidecar.Sidecar.open(path)
    Path(path).write_bytes(whole[:10])
    with pytest.raises(sidecar.BadSidecar):
        sidecar.Sidecar.open(path)


WRITERS_COME_AND_GO = """
import os, sys, threading
from tierfs.cache import device
path, ends = sys.argv[1], threading.Event()
def write():
    while not ends.is_set():
        os.close(os.open(path, os.O_WRONLY))
writers = [threading.Thread(target=write) for _ in range(2)]
for writer in writers:
    writer.start()
found = {device.close_and_look_for_writers(None, path) for _ in range(3000)}
ends.set()
for writer in writers:
    writer.join()
assert True in found and device.close_and_look_for_writers(None, path) is False
"""


def test_looking_for_writers_survives_those_that_come_in_that_moment(tmp_path):
    (tmp_path / "f").touch()
    command = [sys.executable, "-c", WRITERS_COME_AND_GO, str(tmp_path / "f")]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0
