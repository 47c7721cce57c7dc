"""Room in a tier for blocks that are being fetched, from the promise of room to the bytes in their file.

Trio thread only, except ``Fill.write``. A fill holds its extent ``busy``, so that it is not evicted, and its
room in the ledger. A content that is forgotten meanwhile leaves its fills ``dead``: they end like any other,
and what they wrote is garbage. It is removed when no other fill and no removal is at work on the content's
file: a new fill may have begun in it, and a removal may be over for the worker and not yet for us.

A file is made only when the committed index knows nothing of the content, and not while an old one is being
removed: else the index would call its holes data.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Protocol

import trio

from tierfs.cache import blocks, device, record
from tierfs.cache.blocks import ALLOCATION_BYTES, EXTENT_BLOCKS
from tierfs.cache.eviction import Evictor
from tierfs.cache.health import TierHealth
from tierfs.cache.index import IndexWriteFailed, TierIndex
from tierfs.cache.ledger import Ledger
from tierfs.cache.policy import Unit
from tierfs.cache.presence import Presence
from tierfs.cache.record import Extent
from tierfs.cache.segments import OWN_FILE, PACKED_BYTES, Segments, segment_path
from tierfs.types import BLOCK_SIZE_BYTES, ContentId, ObjectRef


class Fill:
    """Room in a tier for some absent blocks of one extent, while they are fetched.

    Made by ``Tier.reserve``; ends in exactly one of ``Tier.complete`` and ``Tier.abandon``.
    """

    __slots__ = ("content_id", "count", "create", "dead", "extent", "extent_no", "first", "identity",
                 "nbytes", "path", "place_bytes", "segment", "wrote")

    def __init__(self, root: str, ref: ObjectRef, extent_no: int, first: int, count: int, *,
                 create: bool) -> None:
        self.content_id = ref.content_id
        self.identity = record.identity_of(ref)
        self.extent_no = extent_no
        self.first = first
        self.count = count
        self.nbytes = blocks.allocated_bytes(blocks.span_mask(first, count), ref.size_bytes, extent_no)
        self.create = create
        """False: the index says that the file is there. One made now would be full of holes that it calls
        data."""
        self.path = device.object_path(root, ref.content_id)
        self.segment = OWN_FILE
        self.place_bytes = 0
        self.extent: Extent
        self.wrote = False
        """Something may have been written."""
        self.dead = False
        """The content was forgotten meanwhile: what is written is garbage."""

    def pack(self, root: str, segment: int, place_bytes: int) -> None:
        """All of the content goes to that place instead of into a file of its own."""
        self.path = segment_path(root, segment)
        self.segment, self.place_bytes = segment, place_bytes
        self.create = True

    @property
    def unit(self) -> Unit:
        return (self.content_id, self.extent_no)

    @property
    def offset_bytes(self) -> int:
        """Of the first byte, in the content."""
        return (self.extent_no * EXTENT_BLOCKS + self.first) * BLOCK_SIZE_BYTES

    def write(self, data: bytes | memoryview) -> None:
        """Worker thread: the bytes of all blocks. Raises ``OSError``."""
        with self.open() as fd:
            device.pwrite_all(fd, data, self.target_bytes)

    @contextlib.contextmanager
    def open(self) -> Iterator[int]:
        """Worker thread: the file, to write the blocks at ``target_bytes``. Raises ``OSError``."""
        fd = device.open_for_fill(self.path, create=self.create)
        self.wrote = True
        try:
            yield fd
        finally:
            os.close(fd)

    @property
    def target_bytes(self) -> int:
        """Where the first byte goes, in the file."""
        return self.place_bytes + self.offset_bytes


class FillableTier(Protocol):
    """What filling needs of a tier; see ``Tier``."""

    root: str
    index: TierIndex
    ledger: Ledger
    health: TierHealth
    segments: Segments
    presence: Presence
    evictor: Evictor
    can_punch: bool
    commit_wanted: trio.Event

    @property
    def takes_clean(self) -> bool: ...
    def is_being_removed(self, content_id: ContentId) -> bool: ...
    def note_change(self) -> None: ...
    async def wait_change(self) -> None: ...
    async def commit(self) -> None: ...


class Fills:
    """The fills of one tier, by content."""

    def __init__(self, tier: FillableTier) -> None:
        self._tier = tier
        self._fills: dict[ContentId, list[Fill]] = {}
        self._garbage: dict[ContentId, dict[int, int]] = {}
        """Blocks by extent that were written and have no record, until ``collect`` may free them."""

    def __contains__(self, content_id: ContentId) -> bool:
        return content_id in self._fills

    def __len__(self) -> int:
        """Contents that are being filled."""
        return len(self._fills)

    def extents_of(self, content_id: ContentId) -> set[int]:
        """Extents of that content that are being filled."""
        return {fill.extent_no for fill in self._fills.get(content_id, ()) if not fill.dead}

    def give_up(self, content_id: ContentId) -> None:
        """The content has been forgotten: nobody wants what is on the way."""
        for fill in self._fills.get(content_id, ()):
            fill.dead = True

    async def reserve(self, ref: ObjectRef, extent_no: int, first: int, count: int) -> Fill | None:
        """Room for ``count`` absent blocks from bit ``first``; None if the tier cannot take them."""
        tier, content_id = self._tier, ref.content_id
        while True:
            if not tier.takes_clean:
                return None
            if tier.is_being_removed(content_id):
                await tier.wait_change()
                continue
            if self._can_pack(ref, first, count):
                fill = self._begin(ref, extent_no, first, count, create=False, packs=True)
                break
            create = not tier.presence.has_file(content_id)
            if create and content_id not in self._fills and tier.index.committed_has(content_id):
                try:
                    await tier.commit()
                except IndexWriteFailed:
                    return None
                continue
            fill = self._begin(ref, extent_no, first, count, create=create, packs=False)
            break
        if fill is None:
            return None
        try:
            made = await tier.evictor.make_room()
        except BaseException:
            self.abandon(fill)
            raise
        if fill.dead or not made:
            held_too_much = not made and not tier.ledger.can_make_room(0)
            self.abandon(fill)
            if held_too_much:
                tier.health.full("what is in it is pinned or dirty")
            return None
        return fill

    def reserve_nowait(self, ref: ObjectRef, count: int) -> Fill | None:
        """Room for all of a small content, if nothing has to be waited for or given up. Else ``reserve``."""
        tier = self._tier
        if (not tier.takes_clean or tier.is_being_removed(ref.content_id) or not self._can_pack(ref, 0, count)
                or not tier.evictor.has_room(ref.size_bytes + ALLOCATION_BYTES)):
            return None
        return self._begin(ref, 0, 0, count, create=False, packs=True)

    def _begin(self, ref: ObjectRef, extent_no: int, first: int, count: int, *, create: bool,
               packs: bool) -> Fill | None:
        """Nothing is waited for. None: it is or will be here, or the policy refuses it."""
        tier, content_id = self._tier, ref.content_id
        known = tier.presence.extent(content_id, extent_no)
        if (known is not None and known.segment) or any(f.segment for f in self._fills.get(content_id, ())):
            return None
        fill = Fill(tier.root, ref, extent_no, first, count, create=create)
        extent = tier.presence.begin(ref, extent_no, fill.nbytes)
        if extent is None:
            return None
        fill.extent = extent
        if packs:
            fill.pack(tier.root, *tier.segments.place(ref.size_bytes))
        self._fills.setdefault(content_id, []).append(fill)
        return fill

    def _can_pack(self, ref: ObjectRef, first: int, count: int) -> bool:
        """That is all of a small content, of which nothing is here."""
        return (ref.size_bytes <= PACKED_BYTES and first == 0 and count == blocks.block_count(ref.size_bytes)
                and self._tier.can_punch and ref.content_id not in self._fills
                and self._tier.presence.extent(ref.content_id, 0) is None)

    def complete(self, fill: Fill, sums: bytes) -> bool:
        """The bytes are in the file; ``sums`` are the checksums of the blocks. False: nobody wants them."""
        self._end(fill)
        if fill.dead:
            self._note_garbage(fill)
            self.collect(fill.content_id)
            return False
        place = (fill.segment, fill.place_bytes)
        self._tier.presence.fulfil(fill.unit, fill.extent, fill.first, sums, fill.identity, place)
        self.collect(fill.content_id)
        self._tier.commit_wanted.set()
        self._tier.health.worked()
        return True

    def abandon(self, fill: Fill) -> None:
        """The fetch failed, or the bytes could not be written. No worker writes any more."""
        self._end(fill)
        if not fill.dead:
            self._tier.presence.give_back(fill.unit, fill.extent, fill.nbytes)
        if fill.wrote or fill.segment:
            self._note_garbage(fill)
        self.collect(fill.content_id)

    def _end(self, fill: Fill) -> None:
        fill.extent.busy -= 1
        fills = self._fills[fill.content_id]
        fills.remove(fill)
        if not fills:
            del self._fills[fill.content_id]
        self._tier.note_change()

    def _note_garbage(self, fill: Fill) -> None:
        """Bytes without a record."""
        tier = self._tier
        if fill.segment:
            tier.segments.remove(fill.segment)
            tier.evictor.free_place(fill.segment, fill.place_bytes, fill.nbytes)
            return
        masks = self._garbage.setdefault(fill.content_id, {})
        masks[fill.extent_no] = masks.get(fill.extent_no, 0) | blocks.span_mask(fill.first, fill.count)

    def collect(self, content_id: ContentId) -> None:
        """Remove the garbage of a content once nothing else fills or removes its file.

        A file that has no records at all is unlinked, of any other the ranges are freed.
        """
        tier = self._tier
        if content_id not in self._garbage or content_id in self._fills or tier.is_being_removed(content_id):
            return
        masks = self._garbage.pop(content_id)
        if not tier.presence.has_file(content_id):
            tier.evictor.unlink_later(content_id)
            return
        for extent_no, mask in masks.items():
            extent = tier.presence.extent(content_id, extent_no)
            unknown = mask & ~extent.present if extent is not None else mask
            if unknown:
                tier.evictor.punch_later(content_id, extent_no, unknown)
