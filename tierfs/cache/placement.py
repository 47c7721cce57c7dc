"""Which tier new bytes go to, and which bytes move between tiers. Trio thread only.

While a tier has room, new data goes into the first that has, fast to slow, and nothing is evicted. When all
are full it goes to the slowest tier, whose eviction policy knows most of what was read lately;
a faster tier takes it over when it is read again and the faster tier's own policy says that it is
worth a place there. So a fast tier is not a queue through which every byte has to pass.

What a faster tier evicts is copied into the next one that has not got it, if that takes it.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence

import trio

from tierfs.cache import blocks, device, record
from tierfs.cache.blocks import EXTENT_SIZE_BYTES
from tierfs.cache.eviction import Taken
from tierfs.cache.fill import Fill
from tierfs.cache.policy import Admission, Unit
from tierfs.cache.record import SUM_BYTES, Extent
from tierfs.cache.tier import Tier
from tierfs.log import get_logger
from tierfs.types import BLOCK_SIZE_BYTES, ObjectRef

_log = get_logger(__name__)

_VISIT_BYTES = 2 * EXTENT_SIZE_BYTES
"""Reads of one unit with less than this between them are one visit."""
_KEPT_OFFERS = 16384
_PROMOTIONS = 2
"""Units being copied to a faster tier at one time; more are not worth the disturbance."""


class Placement:
    """For all tiers of one mount, fast to slow."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tuple(tiers)
        self._nursery: trio.Nursery | None = None
        self._moving: set[Unit] = set()
        self._offered: dict[Unit, int] = {}
        """Unit -> bytes that its tier had served when it was last offered to a faster one."""
        for tier in self._tiers[:-1]:
            tier.on_evict = self._demote_from(tier)

    def start(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery

    def tiers_for(self, ref: ObjectRef, extent_no: int, nbytes: int) -> list[Tier]:
        """The tiers to try for new blocks of that extent, best first."""
        usable = [tier for tier in self._tiers if tier.takes_clean]
        if len(usable) < 2:
            return usable
        unit = (ref.content_id, extent_no)
        pinned = [tier for tier in usable if ref.content_id in tier.presence.pins]
        home = [tier for tier in usable if unit in tier.ledger.policy]
        roomy = [tier for tier in usable if tier.ledger.has_room(nbytes)]
        return list(dict.fromkeys([*pinned, *home, *roomy, *reversed(usable)]))

    def accepts(self, nbytes: int) -> bool:
        """Some tier would take that many bytes."""
        return any(tier.takes_clean and tier.ledger.can_make_room(nbytes) for tier in self._tiers)

    # to a faster tier

    def offer(self, ref: ObjectRef, extent_no: int, tier: Tier) -> None:
        """That extent was read from ``tier``: a faster one may want it."""
        unit = (ref.content_id, extent_no)
        offered = self._offered.get(unit)
        if offered is not None and tier.hit_bytes - offered < _VISIT_BYTES:
            return
        if len(self._offered) >= _KEPT_OFFERS:
            self._offered.clear()
        self._offered[unit] = tier.hit_bytes
        position = self._tiers.index(tier)
        if position == 0 or unit in self._moving:
            return
        faster = self._tiers[position - 1]
        extent = tier.presence.extent(*unit)
        if not faster.takes_clean or extent is None or len(self._moving) >= _PROMOTIONS:
            return
        missing = faster.presence.missing(*unit, extent.present)
        nbytes = blocks.allocated_bytes(missing, extent.size_bytes, extent_no)
        if not nbytes:
            return
        if not faster.ledger.has_room(nbytes) and not self._earns_a_place(faster, unit, nbytes):
            return
        assert self._nursery is not None
        self._moving.add(unit)
        self._nursery.start_soon(self._promote, ref, extent_no, tier, faster)

    @staticmethod
    def _earns_a_place(faster: Tier, unit: Unit, nbytes: int) -> bool:
        """Ask the policy by admitting the unit; in any case it remembers that the unit was asked for."""
        faster.ledger.fit_policy()
        policy = faster.ledger.policy
        if unit in policy:
            return True
        admission = policy.admit(unit, nbytes)
        if admission is not Admission.REFUSED:
            policy.remove(unit)
        return admission is Admission.MAIN

    async def _promote(self, ref: ObjectRef, extent_no: int, tier: Tier, faster: Tier) -> None:
        try:
            await self.copy_between(ref, extent_no, tier, faster)
        except Exception:
            _log.exception("a promotion failed unexpectedly", key=ref.key)
        finally:
            self._moving.discard((ref.content_id, extent_no))

    # to a slower tier

    def _demote_from(self, tier: Tier) -> Callable[[Taken], Awaitable[None]]:
        slower = self._tiers[self._tiers.index(tier) + 1]

        async def demote(taken: Taken) -> None:
            if taken.ref is None or not slower.takes_clean:
                return
            await self._copy(taken.ref, taken.extent_no, taken.extent, tier, slower)

        return demote

    async def copy_between(self, ref: ObjectRef, extent_no: int, source: Tier, target: Tier) -> None:
        """Copy what ``source`` has of that extent and ``target`` has not, as far as possible."""
        extent = source.presence.extent(ref.content_id, extent_no)
        if extent is None:
            return
        extent.busy += 1
        try:
            await self._copy(ref, extent_no, extent, source, target)
        finally:
            extent.busy -= 1
            source.note_change()

    async def copy_into(self, ref: ObjectRef, extent_no: int, mask: int, target: Tier) -> None:
        """Copy what other tiers have of these blocks, as far as that can be read, and drop what cannot."""
        for tier in self._tiers:
            if tier is not target and target.presence.missing(ref.content_id, extent_no, mask):
                await self.copy_between(ref, extent_no, tier, target)

    async def _copy(self, ref: ObjectRef, extent_no: int, extent: Extent, source: Tier, target: Tier) -> None:
        """Copy the verified blocks of an extent that nobody changes meanwhile."""
        have = extent.present & ~extent.unverified
        for first, count in blocks.runs(target.presence.missing(ref.content_id, extent_no, have)):
            fill = await target.reserve(ref, extent_no, first, count)
            if fill is None:
                return
            sums = bytes(extent.sums[first * SUM_BYTES : (first + count) * SUM_BYTES])
            finished = False
            try:
                path, place = source.locate(ref.content_id, extent)
                error = await trio.to_thread.run_sync(_copy_blocks, path, place, fill, ref.size_bytes, sums,
                                                      limiter=source.io)
                finished = True
            finally:
                if not finished:
                    target.abandon(fill)
            if error is not None:
                target.abandon(fill)
                if isinstance(error, ValueError):
                    unit = (ref.content_id, extent_no)
                    source.drop_blocks(unit, extent, blocks.span_mask(first, count))
                _log.info("not copied to another tier", source=source.name, target=target.name,
                          reason=str(error))
                return
            target.complete(fill, sums)


    async def take_file(self, ref: ObjectRef, path: str) -> None:
        """Copy a file with all bytes of ``ref`` into the tiers that take it."""
        for extent_no in range(blocks.extent_count(ref.size_bytes)):
            count = blocks.blocks_in_extent(ref.size_bytes, extent_no)
            for tier in self.tiers_for(ref, extent_no, count * BLOCK_SIZE_BYTES):
                fill = await tier.reserve(ref, extent_no, 0, count)
                if fill is None:
                    continue
                result: bytes | OSError | ValueError = ValueError("cancelled")
                try:
                    result = await trio.to_thread.run_sync(_copy_and_sum, path, fill, ref.size_bytes,
                                                           limiter=tier.io)
                finally:
                    if isinstance(result, bytes):
                        tier.complete(fill, result)
                    else:
                        tier.abandon(fill)
                break


def _copy_and_sum(path: str, fill: Fill, size_bytes: int) -> bytes | OSError | ValueError:
    """Worker thread: fill from the same place of another file; the checksums."""
    try:
        data = _read_for(path, 0, fill, size_bytes)
        fill.write(data)
    except (OSError, ValueError) as error:
        return error
    return record.checksums(data)


def _read_for(path: str, place_bytes: int, fill: Fill, size_bytes: int) -> bytes:
    start = fill.offset_bytes
    length = min(start + fill.count * BLOCK_SIZE_BYTES, size_bytes) - start
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = device.pread_all(fd, length, place_bytes + start)
    finally:
        os.close(fd)
    if len(data) != length:
        raise ValueError("the source is too short")
    return data


def _copy_blocks(path: str, place_bytes: int, fill: Fill, size_bytes: int,
                 sums: bytes) -> OSError | ValueError | None:
    """Worker thread: fill from the same place of another file. ``ValueError``: not what ``sums`` say."""
    try:
        data = _read_for(path, place_bytes, fill, size_bytes)
        if record.checksums(data) != sums:
            return ValueError("the source is damaged")
        fill.write(data)
    except (OSError, ValueError) as error:
        return error
    return None
