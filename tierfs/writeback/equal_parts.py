"""Which parts of a file are in the store already, so that they are copied there instead of sent.

Content decides, not what is known of the writes: a file may be changed through the kernel, where nobody sees
which bytes, or written anew from its start, or under another name that is then renamed over the old one. So
every part of an upload gets a digest while it is in memory, and ``part_index`` keeps the digests of every
version that went up from here. At the next upload a part whose digest, length and owner are those of a part
of

1. the version that was put under the same key last, at the same place in the file, or else
2. any other object, or place, in the index

is copied on the server, pinned to the ETag of that version. Should it be gone or replaced by then, the store
says so, and the part is sent.

What counts as equal. Both parts went through this process, or an earlier one on the same state directory, and
have one xxh3-128 with a seed that nobody else knows. By accident that happens to different bytes once in
2**128. It is not made against somebody who tries: who could find two such parts without the seed would need a
victim that uploads one of them, and would have to be the owner of the file with the other: parts of files of
other users are not considered. What others put into the bucket is never considered, nor what was only read.

Parts below the least size of S3 are not copied; a last part that has grown, or was cut, is sent.

Source of the rules: Amazon S3 API reference (UploadPartCopy), S3 user guide ("Amazon S3 multipart upload
limits").
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import structlog
import trio

from tierfs.errors import StoreError, TransientStoreError
from tierfs.store.base import MAX_PARTS, MIN_PART_SIZE_BYTES, ObjectStore, part_size_for
from tierfs.store.part_copy import copy_key, why_no_part_copy
from tierfs.types import ObjectInfo
from tierfs.writeback.part_index import PartIndex, StoredParts
from tierfs.writeback.unfinished import UnfinishedUploads

log = structlog.get_logger(__name__)


class PartPlan:
    """The parts of one upload to one key; kept over its attempts. Methods are for worker threads.

    Without an ``index`` everything is sent.
    """

    def __init__(
        self, index: PartIndex | None, key: str, uid: int, size_bytes: int, part_size_bytes: int
    ) -> None:
        self.key = key
        self.size_bytes = size_bytes
        self.part_size_bytes = part_size_bytes
        self._index = index
        self._uid = uid
        self._earlier: StoredParts | None = None
        self._digests: dict[int, bytes] = {}
        self._rejected: list[StoredParts] = []

    @property
    def compares(self) -> bool:
        """Whether it is worth asking ``source_of``."""
        return self._index is not None

    @property
    def count(self) -> int:
        """How many parts there are; 1 for an empty file."""
        return max(1, -(-self.size_bytes // self.part_size_bytes))

    def span(self, number: int) -> tuple[int, int]:
        """(offset, length) of part ``number``, from 1."""
        offset = (number - 1) * self.part_size_bytes
        return offset, min(self.part_size_bytes, self.size_bytes - offset)

    def look_back(self) -> None:
        """Find out what went up under this key before; the parts get the same size if that is possible."""
        earlier = self._index.get(self.key) if self._index is not None else None
        if earlier is None or earlier.uid != self._uid:
            return
        size = earlier.part_size_bytes
        fits = -(-self.size_bytes // size) <= MAX_PARTS and size >= MIN_PART_SIZE_BYTES
        if size == self.part_size_bytes or (fits and size <= 2 * self.part_size_bytes):
            self._earlier, self.part_size_bytes = earlier, size

    def source_of(self, number: int, body: bytes) -> tuple[StoredParts, int] | None:
        """Note the digest of part ``number``; where the same bytes are in the store: a row, and an offset."""
        if self._index is None:
            return None
        digest = self._digests[number] = self._index.digest(body)
        if len(body) < MIN_PART_SIZE_BYTES and number < self.count:
            return None
        earlier = self._earlier
        if earlier is not None and earlier not in self._rejected and earlier.holds(number, digest, len(body)):
            return earlier, (number - 1) * earlier.part_size_bytes
        if len(body) < self.part_size_bytes:
            return None
        found = self._index.find(digest, self.part_size_bytes, self._uid)
        if found is None or found[0] in self._rejected:
            return None
        return found[0], (found[1] - 1) * self.part_size_bytes

    def reject(self, source: StoredParts) -> None:
        """That version is gone."""
        if source not in self._rejected:
            self._rejected.append(source)
            if self._index is not None:
                self._index.forget(source)

    def stored_as(self, info: ObjectInfo) -> None:
        """The object is complete: from now on later uploads can have its parts."""
        index = self._index
        if index is not None and len(self._digests) == self.count and info.size_bytes == self.size_bytes:
            digests = b"".join(self._digests[number] for number in range(1, self.count + 1))
            index.put(
                StoredParts(
                    info.key,
                    info.etag,
                    info.version_id,
                    info.size_bytes,
                    self.part_size_bytes,
                    self._uid,
                    digests,
                )
            )


def plain_plan(key: str, size_bytes: int, part_size_bytes: int) -> PartPlan:
    """For an upload of which every part is sent. ``part_size_bytes`` grows until there are not too many."""
    return PartPlan(None, key, 0, size_bytes, part_size_for(size_bytes, part_size_bytes))


class EqualParts:
    """Plans for uploads, and whether the store can be asked to copy. Trio thread only."""

    def __init__(
        self,
        store: ObjectStore,
        index: PartIndex,
        unfinished: UnfinishedUploads,
        probe_key: str,
        *,
        part_size_bytes: int,
    ) -> None:
        """``probe_key``: a key that nobody else uses, for trying out the store."""
        self._store = store
        self._index = index
        self._unfinished = unfinished
        self._probe_key = probe_key
        self._part_size_bytes = part_size_bytes
        self._lock = trio.Lock()
        self._copies: bool | None = None
        """Whether the store copies parts; None: not known yet."""

    async def plan(self, key: str, uid: int, size_bytes: int) -> PartPlan:
        """For an upload of so many bytes of a file of that user."""
        part_size = part_size_for(size_bytes, self._part_size_bytes)
        plan = PartPlan(self._index, key, uid, size_bytes, part_size)
        if plan.count > 1:
            await _blocking(plan.look_back)
        return plan

    async def keep(self, plan: PartPlan, info: ObjectInfo) -> None:
        """The upload has become that object."""
        if plan.count > 1:
            await _blocking(lambda: plan.stored_as(info))

    async def keep_copy(self, source: ObjectInfo, info: ObjectInfo) -> None:
        """That object has been copied on the server to another key, or got another ETag."""
        if source.size_bytes > self._part_size_bytes:
            await _blocking(lambda: self._keep_copy(source, info))

    def _keep_copy(self, source: ObjectInfo, info: ObjectInfo) -> None:
        row = self._index.get(source.key)
        if row is not None and row.etag == source.etag:
            copy = msgspec.structs.replace(row, key=info.key, etag=info.etag, version_id=info.version_id)
            self._index.put(copy)

    async def can_copy(self) -> bool:
        """Whether the store copies parts as it should; tried out once for each state directory."""
        if self._copies is None:
            async with self._lock:
                if self._copies is None:
                    await self._find_out()
        return bool(self._copies)

    async def _find_out(self) -> None:
        store, index = self._store, self._index
        if not store.capabilities.part_copy:
            self.give_up("it has no part copy")
        elif await trio.to_thread.run_sync(index.knows_copies, store.url):
            self._copies = True
        else:
            # Should this be the end of the process, the note stays, and the next one uses the same key.
            note = await trio.to_thread.run_sync(self._unfinished.note, copy_key(self._probe_key))
            try:
                reason = await trio.to_thread.run_sync(
                    why_no_part_copy, store, self._probe_key, abandon_on_cancel=True
                )
            except TransientStoreError:
                return  # not known yet
            except StoreError as error:
                reason = str(error)
            await trio.to_thread.run_sync(self._unfinished.done, note)
            if reason is not None:
                self.give_up(reason)
                return
            self._copies = True
            await trio.to_thread.run_sync(index.note_copies, store.url)

    def give_up(self, reason: str) -> None:
        """Nothing is copied any more, until the next mount."""
        if self._copies is not False:
            log.warning(
                "what is in the store already is sent all the same", store=self._store.url, reason=reason
            )
        self._copies = False


async def _blocking(function: Callable[[], None]) -> None:
    # Never left behind: the index is closed when the mount ends.
    await trio.to_thread.run_sync(function)
