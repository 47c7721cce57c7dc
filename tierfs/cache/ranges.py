"""Ranges of a staging file: allocate, punch holes, make zeros, find data and holes, copy.

Built on ``Staging``, whose docstring has the order of the steps: a hole is a write of zeros (changed bits,
the file, present bits), so a crash leaves it undone, or done. Allocating changes no byte: absent blocks
stay absent, with space of their own.

Trio thread only; system calls run in the tier's workers. Raises what ``Staging.write`` raises.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import trio

from tierfs.cache import blocks, holes
from tierfs.cache.staging import Staging
from tierfs.errors import TierFull


async def allocate(staging: Staging, offset_bytes: int, length_bytes: int, keep_size: bool) -> None:
    """Let later writes into that range need no more space. Without ``keep_size`` the file grows."""
    end = offset_bytes + length_bytes
    async with staging.locked():
        room = await _room(staging, offset_bytes, end)
        await staging.apply(
            offset_bytes, end, lambda fd: holes.allocate(fd, offset_bytes, length_bytes, keep_size=keep_size),
            room_bytes=room, grows=not keep_size, changed=False, present=False)


async def punch(staging: Staging, offset_bytes: int, length_bytes: int, keep_size: bool = True) -> None:
    """Zeros in that range, as far as the file has one; they take no space."""
    async with staging.locked():
        end = min(offset_bytes + length_bytes, staging.size_bytes)
        if end <= offset_bytes:
            return
        await staging.fill_edges(offset_bytes, end)
        await staging.apply(offset_bytes, end, lambda fd: holes.clear(fd, offset_bytes, end - offset_bytes),
                            room_bytes=0, grows=False)


async def zero(staging: Staging, offset_bytes: int, length_bytes: int, keep_size: bool) -> None:
    """Zeros in that range, with space of their own. Without ``keep_size`` the file grows."""
    end = offset_bytes + length_bytes
    async with staging.locked():
        room = await _room(staging, offset_bytes, end)
        await staging.fill_edges(offset_bytes, end)
        await staging.apply(
            offset_bytes, end, lambda fd: holes.zero(fd, offset_bytes, length_bytes, keep_size=keep_size),
            room_bytes=room, grows=not keep_size)


async def _room(staging: Staging, offset_bytes: int, end_bytes: int) -> int:
    """What has to be found for that range. Raises ``TierFull`` for more than the tier could ever hold."""
    length = end_bytes - offset_bytes
    taken = await staging.with_file(lambda fd: holes.data_bytes(fd, offset_bytes, end_bytes))
    room = length - min(taken, length)
    if room > staging.dirty.tier.ledger.limit_bytes:
        raise TierFull(f"{room} bytes are more than the tier can hold")
    return room


async def seek(staging: Staging, offset_bytes: int, *, data: bool) -> int | None:
    """Where the next data (or hole) begins at or behind the offset, which lies inside the file.

    The end of the file counts as a hole. None: no data up to the end. Absent blocks are data.
    """
    position, overlay = offset_bytes, staging.overlay
    while (size := staging.size_bytes) > position:
        own_until = size
        if overlay is not None:
            absent_at, absent_until = overlay.next_absent(position, size)
            if absent_at == position:
                if data:
                    await trio.lowlevel.checkpoint()
                    return position
                position = absent_until
                continue
            own_until = absent_at
        found = await staging.with_file(partial(holes.seek, offset_bytes=position, data=data))
        if found is not None and found < own_until:
            return found
        position = own_until
    await trio.lowlevel.checkpoint()
    return None if data else staging.size_bytes


async def copy(
        source: Staging, source_bytes: int, target: Staging, target_bytes: int, length_bytes: int) -> int:
    """Copy by the file system, which may share the blocks. Returns how much; 0: it has to be done otherwise
    (blocks are absent, there is no room at once, the source ends before).

    Both are locked: neither becomes a clean copy, which may lose blocks, nor changes.
    """
    first, second = sorted((source, target), key=lambda staging: staging.content_id)
    async with first.locked():
        if first is second:
            return await _copy_locked(source, source_bytes, target, target_bytes, length_bytes)
        async with second.locked():
            return await _copy_locked(source, source_bytes, target, target_bytes, length_bytes)


async def _copy_locked(
        source: Staging, source_bytes: int, target: Staging, target_bytes: int, length_bytes: int) -> int:
    length = min(length_bytes, source.size_bytes - source_bytes)
    if length <= 0 or (
            source.overlay is not None and source.overlay.any_absent(source_bytes, source_bytes + length)):
        return 0
    return await _copy_in(target, target_bytes, length, lambda: target.dirty.with_files(
        source.content_id, target.content_id,
        lambda from_fd, fd: holes.copy(from_fd, source_bytes, fd, target_bytes, length)))


async def copy_from_file(
        source_fd: int, source_bytes: int, target: Staging, target_bytes: int, length_bytes: int) -> int:
    """The same from a file of a tier that does not change meanwhile, and is as long as that."""
    async with target.locked():
        return await _copy_in(target, target_bytes, length_bytes, lambda: target.with_file(
            lambda fd: holes.copy(source_fd, source_bytes, fd, target_bytes, length_bytes)))


async def _copy_in(
        target: Staging, offset_bytes: int, length_bytes: int, work: Callable[[], Awaitable[int]]) -> int:
    room = length_bytes + 2 * blocks.ALLOCATION_BYTES
    end = offset_bytes + length_bytes
    if (target.overlay is not None and target.overlay.partly_covered(offset_bytes, end)) \
            or not target.dirty.try_reserve(room):
        return 0
    with target.dirty.releasing(room):
        return await target.copy_in(work, offset_bytes, length_bytes)
