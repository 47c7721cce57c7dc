"""What a tier does in the background: commit its index, learn what it holds, look at its device.

Trio thread; every step that may block runs in a worker. ``run`` is one task per tier, in the cache's nursery.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import trio

from tierfs.cache import blocks, device
from tierfs.cache.index import IndexWriteFailed, Walked
from tierfs.cache.segments import SEGMENT_BYTES
from tierfs.cache.tier import Tier
from tierfs.log import get_logger
from tierfs.types import ContentId

_log = get_logger(__name__)

COMMIT_INTERVAL_S = 0.5
DEVICE_INTERVAL_S = 2.0
_RETRY_COMMIT_S = 5.0
_WALK_SLICE = 256
_SWEEP_SLICE = 256
_TOLERANCE_BYTES = 4 * blocks.ALLOCATION_BYTES
"""What a file may take beside its data (its block map) before a sweep looks closer."""
_BALLAST_BYTES = 1024 * 1024
_BALLAST_FROM_BYTES = 64 * 1024 * 1024


async def run(tier: Tier) -> None:
    """Until cancelled."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_commit_loop, tier)
        nursery.start_soon(_device_loop, tier)
        nursery.start_soon(_learn_or_not, tier)


async def _commit_loop(tier: Tier) -> None:
    while True:
        await tier.commit_wanted.wait()
        await trio.sleep(COMMIT_INTERVAL_S)
        tier.commit_wanted = trio.Event()
        try:
            await tier.commit()
        except IndexWriteFailed:
            tier.commit_wanted.set()
            await trio.sleep(_RETRY_COMMIT_S)
        except Exception:
            _log.exception("an index commit failed unexpectedly", tier=tier.name)
            await trio.sleep(_RETRY_COMMIT_S)


async def _device_loop(tier: Tier) -> None:
    while True:
        await look_at_device(tier)
        await trio.sleep(DEVICE_INTERVAL_S)


async def look_at_device(tier: Tier) -> None:
    """Bring the ledger up to what the file system says."""
    try:
        overhead, available, size = await trio.to_thread.run_sync(_measure, tier, limiter=tier.io)
    except OSError as error:
        tier.health.failed(error)
        return
    tier.ledger.overhead_bytes = overhead
    tier.ledger.set_device_free(available, size)
    tier.ledger.fit_policy()


def _measure(tier: Tier) -> tuple[int, int, int]:
    """Worker thread: (index and directories, free, size of the file system), in bytes."""
    available, size = device.free_bytes(tier.root)
    ballast = 0
    if tier.ledger.capacity_bytes >= _BALLAST_FROM_BYTES and not tier.setting.volatile:
        ballast = _BALLAST_BYTES
        if available > 2 * _BALLAST_BYTES:
            device.add_ballast(tier.root, ballast)
    directories = 0
    if not tier.setting.volatile:
        directories = max(0, os.stat(f"{tier.root}/objects").st_nlink - 2) * blocks.ALLOCATION_BYTES
    return tier.index.file_bytes + directories + ballast, available, size


async def _learn_or_not(tier: Tier) -> None:
    try:
        await _learn(tier)
    except Exception:
        _log.exception("what a tier holds could not be learnt; it is learnt as it is read", tier=tier.name)
        tier.walked.set()
        tier.note_change()


async def _learn(tier: Tier) -> None:
    """Walk the index to tell the eviction policy what is here; after an unclean stop also sweep."""
    unclean = not tier.index.was_clean or tier.index_lost
    segment_bytes: dict[int, int] = {}
    async for walked in _walk(tier):
        tier.presence.learn(walked)
        if unclean and walked.segment:
            segment_bytes[walked.segment] = segment_bytes.get(walked.segment, 0) + walked.nbytes
    tier.ledger.unwalked_bytes = 0
    tier.ledger.fit_policy()
    tier.walked.set()
    tier.note_change()
    await _remove_dead_segments(tier)
    if unclean:
        await _sweep_objects(tier)
        await _sweep_segments(tier, segment_bytes)


async def _walk(tier: Tier) -> AsyncIterator[Walked]:
    position: bytes | None = b""
    while position is not None:
        found, position = tier.index.walk(position, _WALK_SLICE)
        for walked in found:
            yield walked
        tier.note_change()
        await trio.lowlevel.checkpoint()


async def _remove_dead_segments(tier: Tier) -> None:
    """Segments of which all contents went before this process could count them."""
    for name, _ in await trio.to_thread.run_sync(_list, f"{tier.root}/segments", limiter=tier.io):
        try:
            segment = int(name, 16)
        except ValueError:
            continue
        if tier.segments.is_dead(segment):
            tier.evictor.free_segment(segment)


async def _sweep_objects(tier: Tier) -> None:
    """Remove files that no record speaks of, and free blocks that none calls present.

    Such are left by a stop between the write and the commit. They are never read; they only take space.
    """
    removed = 0
    for number in range(256):
        entries = await trio.to_thread.run_sync(_list, f"{tier.root}/objects/{number:02x}", limiter=tier.io)
        for chunk in _chunks(entries):
            for name, taken_bytes in chunk:
                removed += _check_file(tier, name, taken_bytes)
            await trio.lowlevel.checkpoint()
    if removed:
        _log.info("swept a tier after an unclean stop", tier=tier.name, freed_bytes=removed)


async def _sweep_segments(tier: Tier, segment_bytes: dict[int, int]) -> None:
    """Free what no record speaks of in segments that take more than their records say."""
    entries = await trio.to_thread.run_sync(_list, f"{tier.root}/segments", limiter=tier.io)
    doubtful = {}
    for name, taken_bytes in entries:
        known_bytes = segment_bytes.get(int(name, 16)) if len(name) == 16 else None
        if known_bytes is not None and taken_bytes > known_bytes + _TOLERANCE_BYTES:
            doubtful[int(name, 16)] = list[tuple[int, int]]()
    if not doubtful:
        return
    async for walked in _walk(tier):
        places = doubtful.get(walked.segment)
        if places is not None:
            places.append((walked.place_bytes, walked.nbytes))
    for segment, places in doubtful.items():
        position = 0
        for start, nbytes in sorted(places):
            if start > position:
                tier.evictor.free_place(segment, position, start - position)
            position = max(position, start + nbytes)
        tier.evictor.free_place(segment, position, SEGMENT_BYTES)
        await tier.evictor.settled()


def _check_file(tier: Tier, name: str, taken_bytes: int) -> int:
    try:
        content_id = ContentId(bytes.fromhex(name))
    except ValueError:
        return 0
    if len(content_id) != 16 or tier.has_fills(content_id) or tier.is_being_removed(content_id):
        return 0
    numbers = tier.index.extents_of(content_id)
    if not numbers:
        tier.evictor.unlink_later(content_id)
        return taken_bytes
    known, size_bytes = 0, 0
    for number in numbers:
        extent = tier.presence.extent(content_id, number)
        if extent is not None:
            known += extent.allocated(number)
            size_bytes = extent.size_bytes
    if taken_bytes <= known + _TOLERANCE_BYTES:
        return 0
    for number in range(blocks.extent_count(size_bytes)):
        extent = tier.presence.extent(content_id, number)
        absent = blocks.full_mask(size_bytes, number) & ~(extent.present if extent else 0)
        if absent:
            tier.evictor.punch_later(content_id, number, absent)
    return taken_bytes - known


def _list(directory: str) -> list[tuple[str, int]]:
    """Worker thread: (name, bytes on the device) of the files."""
    found = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                try:
                    found.append((entry.name, entry.stat(follow_symlinks=False).st_blocks * 512))
                except OSError:
                    continue
    except FileNotFoundError:
        pass
    except OSError as error:
        _log.warning("cannot list a tier's directory", path=directory, reason=str(error))
    return found


def _chunks(entries: list[tuple[str, int]]) -> Iterator[list[tuple[str, int]]]:
    for start in range(0, len(entries), _SWEEP_SLICE):
        yield entries[start : start + _SWEEP_SLICE]
