"""What one tier holds, by content and extent: the index, the extents in use, and what the policy knows.

Trio thread only; dictionary and bitmap work, and look-ups in LMDB. Nothing here waits.

``_extents`` is a cache of the index, except where an extent is ``busy`` (being read or filled by a worker):
such an extent may be ahead of its record, and stays.
"""

from __future__ import annotations

from tierfs.cache import blocks
from tierfs.cache.eviction import Taken
from tierfs.cache.index import TierIndex, Walked
from tierfs.cache.ledger import Ledger
from tierfs.cache.policy import Unit
from tierfs.cache.record import SUM_BYTES, Extent
from tierfs.cache.segments import Segments
from tierfs.types import BLOCK_SIZE_BYTES, ContentId, ObjectRef

_KEPT_EXTENTS = 8192
_KEPT_ANSWERS = 65536


class Presence:
    """See the module docstring. ``changed`` is set to True by whatever leaves something to commit."""

    def __init__(self, index: TierIndex, ledger: Ledger, segments: Segments) -> None:
        self.index = index
        self.ledger = ledger
        self.segments = segments
        self.pins = index.pins()
        ledger.unwalked_bytes = index.used_bytes
        self._extents: dict[Unit, Extent] = {}
        self._absent: set[Unit] = set()
        """Units that the index is known not to have."""
        self._complete: set[ContentId] = set()
        self._gaps: dict[ContentId, int] = {}
        """An extent that was not complete when last looked at, so that a growing file is not scanned anew."""

    # looking

    def extent(self, content_id: ContentId, extent_no: int) -> Extent | None:
        """Presence of that extent, or None if nothing of it is here."""
        unit = (content_id, extent_no)
        found = self._extents.get(unit)
        if found is None and unit not in self._absent:
            found = self.index.get(content_id, extent_no)
            if found is not None:
                self._keep(unit, found)
                self._make_known(unit, found.allocated(extent_no), found.segment)
            else:
                if len(self._absent) >= _KEPT_EXTENTS:
                    self._absent.clear()
                self._absent.add(unit)
        return found

    def is_current(self, unit: Unit, extent: Extent) -> bool:
        """That object still stands for the unit (it does not after eviction, or when forgotten)."""
        return self._extents.get(unit) is extent

    def is_busy(self, content_id: ContentId, extent_no: int) -> bool:
        extent = self._extents.get((content_id, extent_no))
        return extent is not None and extent.busy > 0

    def missing(self, content_id: ContentId, extent_no: int, mask: int) -> int:
        """Which blocks of ``mask`` are not here."""
        extent = self.extent(content_id, extent_no)
        return mask if extent is None else mask & ~extent.present

    def has_file(self, content_id: ContentId) -> bool:
        """There is a file of that content that the index knows."""
        return self.index.any_extent(content_id) is not None

    def size_of(self, content_id: ContentId) -> int:
        """Size of a content of which something is here; else 0."""
        number = self.index.any_extent(content_id)
        extent = None if number is None else self.extent(content_id, number)
        return 0 if extent is None else extent.size_bytes

    def resident_bytes(self, content_id: ContentId) -> int:
        """Bytes of the content that are here."""
        total = 0
        for number in self.index.extents_of(content_id):
            extent = self.extent(content_id, number)
            if extent is not None:
                total += blocks.content_bytes(extent.present, extent.size_bytes, number)
        return total

    def is_complete(self, content_id: ContentId) -> bool:
        """All of a content (that has any bytes) is here. Cheap to ask often while the answer stays."""
        if content_id in self._complete:
            return True
        start = self._gaps.get(content_id)
        if start is None:
            start = self.index.any_extent(content_id)
            if start is None:
                return False
        extent = self.extent(content_id, start)
        if extent is None:
            return False
        size = extent.size_bytes
        count = blocks.extent_count(size)
        for number in (*range(start, count), *range(start)):
            extent = self.extent(content_id, number)
            if extent is None or extent.present != blocks.full_mask(size, number):
                if len(self._gaps) >= _KEPT_ANSWERS:
                    self._gaps.clear()
                if extent is not None:
                    self._gaps[content_id] = number
                return False
        if len(self._complete) >= _KEPT_ANSWERS:
            self._complete.clear()
        self._complete.add(content_id)
        self._gaps.pop(content_id, None)
        return True

    def idle_units(self, content_id: ContentId) -> list[Unit]:
        """The extents of that content that are here and not in use just now."""
        units = [(content_id, number) for number in self.index.extents_of(content_id)]
        return [unit for unit in units if self.extent(*unit) is not None and not self.is_busy(*unit)]

    def sound_words(self, content_id: ContentId) -> dict[int, int]:
        """Blocks that are here and need no verification, by extent."""
        words = {}
        for number in self.index.extents_of(content_id):
            extent = self.extent(content_id, number)
            if extent is not None and extent.present & ~extent.unverified:
                words[number] = extent.present & ~extent.unverified
        return words

    # learning

    def learn(self, walked: Walked) -> None:
        """The walk found this committed record. It may be out of date."""
        unit = (walked.content_id, walked.extent_no)
        if unit not in self.ledger.policy and not self.index.is_changed(walked.content_id):
            self._make_known(unit, walked.nbytes, walked.segment)

    def _make_known(self, unit: Unit, nbytes: int, segment: int) -> None:
        """Tell the policy of a unit that the index had."""
        policy = self.ledger.policy
        if unit not in policy:
            self.ledger.unwalked_bytes = max(0, self.ledger.unwalked_bytes - nbytes)
            self.ledger.fit_policy()
            policy.load(unit, nbytes)
            self.segments.add(segment)
            if unit[0] in self.pins:
                policy.pin(unit)

    def _keep(self, unit: Unit, extent: Extent) -> None:
        self._extents[unit] = extent
        if len(self._extents) <= _KEPT_EXTENTS:
            return
        idle = [unit for unit, extent in self._extents.items() if not extent.busy]
        for unit in idle[: _KEPT_EXTENTS // 4]:
            del self._extents[unit]

    # changing

    def begin(self, ref: ObjectRef, extent_no: int, nbytes: int) -> Extent | None:
        """Room for ``nbytes`` more in that extent, by the policy. Busy from now on. None: refused."""
        content_id, unit = ref.content_id, (ref.content_id, extent_no)
        extent = self.extent(content_id, extent_no)
        if extent is not None and extent.size_bytes != ref.size_bytes:
            return None
        policy = self.ledger.policy
        self.ledger.fit_policy()
        if unit in policy:
            policy.grow(unit, nbytes)
        elif policy.admit(unit, nbytes):
            if content_id in self.pins:
                policy.pin(unit)
        else:
            return None
        if extent is None:
            extent = Extent(ref.size_bytes, blocks.blocks_in_extent(ref.size_bytes, extent_no))
        extent.busy += 1
        self._keep(unit, extent)
        return extent

    def fulfil(self, unit: Unit, extent: Extent, first: int, sums: bytes, identity: bytes,
               place: tuple[int, int]) -> None:
        """Blocks for which ``begin`` found room are there, with these checksums, at ``place``."""
        number = unit[1]
        extent.segment, extent.place_bytes = place
        twice = extent.present & blocks.span_mask(first, len(sums) // SUM_BYTES)
        if twice:
            # Fetched and copied from another tier at the same time: accounted twice, there once.
            allocated = blocks.allocated_bytes(twice & ~extent.zeros, extent.size_bytes, number)
            self.ledger.policy.grow(unit, -allocated)
        extent.mark(first, sums)
        self.put(unit, extent, identity)

    def give_back(self, unit: Unit, extent: Extent, nbytes: int) -> None:
        """Undo ``begin`` (after ``busy`` was taken back), unless the unit was forgotten meanwhile."""
        if self._extents.get(unit) is not extent:
            return
        self.ledger.policy.grow(unit, -nbytes)
        self._forget_if_empty(unit, extent)

    def put(self, unit: Unit, extent: Extent, identity: bytes | None = None) -> None:
        """Its record follows. ``identity`` None: as it was."""
        content_id, number = unit
        self._absent.discard(unit)
        if identity is None:
            identity = self.index.keep_identity(content_id, number)
        self.index.put(content_id, number, extent, identity)

    def adopt(self, content_id: ContentId, extents: dict[int, Extent], identity: bytes) -> None:
        """A file with these blocks has just been moved in."""
        for number, extent in extents.items():
            unit = (content_id, number)
            self.ledger.fit_policy()
            self.ledger.policy.load(unit, extent.allocated(number))
            self.put(unit, extent, identity)
            self._keep(unit, extent)

    def drop_blocks(self, unit: Unit, mask: int) -> None:
        """These blocks are not what they should be: they count as absent from now on."""
        extent = self.extent(*unit)
        if extent is None:
            return
        before = extent.allocated(unit[1])
        extent.clear(mask)
        self._complete.discard(unit[0])
        self.put(unit, extent)
        self.ledger.policy.grow(unit, extent.allocated(unit[1]) - before)
        self._forget_if_empty(unit, extent)

    def _forget_if_empty(self, unit: Unit, extent: Extent) -> None:
        if not extent.present and not extent.busy:
            self.ledger.policy.remove(unit, remember=False)
            self._extents.pop(unit, None)

    def take(self, units: list[Unit], *, remember: bool, with_refs: bool) -> list[Taken]:
        """Mark units absent, so that nobody finds them any more; the bytes are still in the file."""
        taken = []
        for unit in units:
            content_id, number = unit
            extent = self.extent(content_id, number)
            found = self.index.identity(content_id, number) if with_refs else None
            nbytes = self.ledger.policy.remove(unit, remember=remember)
            self._extents.pop(unit, None)
            self._complete.discard(content_id)
            self.index.remove(content_id, number)
            if extent is not None:
                self.segments.remove(extent.segment)
                ref = None
                if found is not None:
                    etag, version, key = found
                    ref = ObjectRef(content_id, key, etag, extent.size_bytes, version)
                taken.append(Taken(content_id, number, extent, nbytes, ref))
        return taken

    def take_tail(self, unit: Unit, keep_bytes: int, *, with_ref: bool) -> Taken | None:
        """The same for all but the first ``keep_bytes`` of a unit's blocks. None if that would be nothing."""
        extent = self.extent(*unit)
        if extent is None or extent.slack_bytes or extent.segment:
            return None
        going = list(blocks.bits(extent.present))[keep_bytes // BLOCK_SIZE_BYTES :]
        mask = sum(1 << bit for bit in going)
        if not mask:
            return None
        content_id, number = unit
        part = Extent(extent.size_bytes, 0)
        part.sums = bytearray(extent.sums)
        part.present, part.zeros = extent.present & mask, extent.zeros & mask
        part.unverified = extent.unverified & mask
        ref = None
        found = self.index.identity(content_id, number) if with_ref else None
        if found is not None:
            etag, version, key = found
            ref = ObjectRef(content_id, key, etag, extent.size_bytes, version)
        before = extent.allocated(number)
        extent.clear(mask)
        self._complete.discard(content_id)
        self.put(unit, extent)
        nbytes = before - extent.allocated(number)
        self.ledger.policy.grow(unit, -nbytes)
        return Taken(content_id, number, part, nbytes, ref)

    def forget(self, content_id: ContentId, filling: set[int]) -> int:
        """Nothing of that content counts as here, or will; returns the accounted bytes.

        ``filling``: extents that are being filled and may have no record yet.
        """
        freed = 0
        for number in filling.union(self.index.extents_of(content_id)):
            extent = self.extent(content_id, number)
            if extent is not None and extent.present:
                self.segments.remove(extent.segment)
            freed += self.ledger.policy.remove((content_id, number), remember=False)
            self._extents.pop((content_id, number), None)
        self._complete.discard(content_id)
        self._gaps.pop(content_id, None)
        if freed or content_id in self.pins or self.has_file(content_id):
            self.index.drop(content_id)
        self.pins.discard(content_id)
        return freed

    def set_pinned(self, content_id: ContentId, pinned: bool, filling: set[int]) -> None:
        """From now on (not) to be evicted; what is not here yet is pinned as it comes."""
        if pinned == (content_id in self.pins):
            return
        policy = self.ledger.policy
        for number in filling.union(self.index.extents_of(content_id)):
            self.extent(content_id, number)
            unit = (content_id, number)
            if not pinned and policy.is_pinned(unit):
                policy.unpin(unit)
            elif pinned and unit in policy:
                policy.pin(unit)
        (self.pins.add if pinned else self.pins.discard)(content_id)
        self.index.set_pin(content_id, pinned)
