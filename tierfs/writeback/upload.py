"""One upload: the bytes of a ``FileContent`` become one plain object.

Parts that the store has already are copied there instead of sent: ``equal_parts`` says which.

The bytes may change while they are read. An upload never publishes a mixture: the staging file's
``generation`` is compared after the last byte was read and before the request that makes the object
visible. A small file is read into memory whole before its PUT; a large one goes up in parts, and is
completed only if the generation still is what it was. ``ContentChanged`` says that it was not.

Parts of one file, and files, share one limit on concurrent requests and one on the bytes in memory.

Source of sizes and limits: S3 user guide, "Amazon S3 multipart upload limits".
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio

from tierfs.cache.memory import ByteBudget
from tierfs.errors import (
    ObjectNotFound,
    PreconditionFailed,
    StoreError,
    TierfsError,
    TransientStoreError,
)
from tierfs.metrics import Metrics
from tierfs.store.base import MAX_SINGLE_COPY_BYTES, UNCONDITIONAL, Condition, ObjectStore, Part
from tierfs.types import ObjectInfo
from tierfs.writeback.equal_parts import EqualParts, PartPlan
from tierfs.writeback.part_index import StoredParts
from tierfs.writeback.unfinished import UnfinishedUploads

T = TypeVar("T")
SENT_BYTES = "tierfs_upload_sent_bytes_total"
COPIED_BYTES = "tierfs_upload_copied_bytes_total"
ABORT_TIMEOUT_S = 30
ReadRange = Callable[[int, int], Awaitable[bytes]]
"""``read(offset, length)``: exactly that many bytes, unless the file shrank."""


async def _nothing() -> None:
    pass


class ContentChanged(TierfsError):
    """The file was written while it was being uploaded; nothing was published."""


class Uploader:
    """Sends objects with bounded parallelism. Trio thread; store calls run in worker threads."""

    def __init__(
        self,
        store: ObjectStore,
        unfinished: UnfinishedUploads,
        equal_parts: EqualParts | None = None,
        metrics: Metrics | None = None,
        *,
        concurrency: int,
        memory_bytes: int,
    ) -> None:
        """``equal_parts``: None where nothing is ever copied instead of sent."""
        metrics = metrics or Metrics()
        self._store = store
        self._unfinished = unfinished
        self._equal_parts = equal_parts
        self._limiter = trio.CapacityLimiter(concurrency)
        # Bytes are taken from before a body is read into memory until it is sent.
        self._memory = ByteBudget(memory_bytes)
        self._concurrency = concurrency
        self._sent = metrics.counter(SENT_BYTES, "File data sent to the object store.")
        self._copied = metrics.counter(
            COPIED_BYTES, "File data that was copied in the object store instead of being sent."
        )

    @property
    def bytes_sent(self) -> int:
        """File data sent since the mount began, of uploads that came to nothing too."""
        return self._sent.value

    @property
    def bytes_copied(self) -> int:
        """File data that was copied on the server instead."""
        return self._copied.value

    def note_copied(self, size_bytes: int) -> None:
        """A whole file was copied on the server."""
        self._copied.add(size_bytes)

    async def upload(
        self,
        plan: PartPlan,
        read: ReadRange,
        unchanged: Callable[[], bool],
        metadata: Mapping[str, str],
        condition: Condition,
        *,
        before_visible: Callable[[], Awaitable[None]] = _nothing,
    ) -> ObjectInfo:
        """Publish ``plan.size_bytes`` bytes under ``plan.key``.

        ``read(offset, length)`` is awaited for exactly that many bytes. ``before_visible`` runs beside the
        sending of parts and is over before anybody can see the object. Raises ``ContentChanged``,
        ``PreconditionFailed`` (somebody else wrote the key) and any other ``StoreError``.
        """
        if plan.count > 1:
            return await self._multipart(plan, read, unchanged, metadata, condition, before_visible)
        key, size_bytes = plan.key, plan.size_bytes
        async with self._holding(size_bytes):
            body = await _read_exactly(read, 0, size_bytes)
            await before_visible()
            if not unchanged():
                raise ContentChanged(f"{key}: changed while it was read for upload")
            info = await self.call(lambda: self._store.put(key, body, metadata=metadata, condition=condition))
        self._sent.add(size_bytes)
        return info

    async def _multipart(
        self,
        plan: PartPlan,
        read: ReadRange,
        unchanged: Callable[[], bool],
        metadata: Mapping[str, str],
        condition: Condition,
        before_visible: Callable[[], Awaitable[None]],
    ) -> ObjectInfo:
        key = plan.key
        note = await self.call(lambda: self._unfinished.note(key))
        # Should it be started and nobody learn of that, the note stays: it names what there is to abort.
        try:
            upload_id = await self.call(lambda: self._store.start_multipart(key, metadata=metadata))
        except StoreError:
            await self.call(lambda: self._unfinished.failed(note))
            raise
        parts: dict[int, Part] = {}
        numbers = iter(range(1, plan.count + 1))

        async def send() -> None:
            for number in numbers:
                parts[number] = await self._part(plan, upload_id, number, read, unchanged)

        try:
            await self.call(lambda: self._unfinished.started(note, key, upload_id))
            await _in_parallel([before_visible, *[send] * self._concurrency])
            if not unchanged():
                raise ContentChanged(f"{key}: changed while it was read for upload")
            ordered = [parts[number] for number in sorted(parts)]
            info = await self.call(
                lambda: self._store.complete_multipart(key, upload_id, ordered, condition=condition)
            )
        except BaseException:
            with trio.CancelScope(shield=True), trio.move_on_after(ABORT_TIMEOUT_S):
                await self._abort(key, upload_id, note)
            raise
        await self.call(lambda: self._unfinished.done(note))
        return info

    async def _part(
        self, plan: PartPlan, upload_id: str, number: int, read: ReadRange, unchanged: Callable[[], bool]
    ) -> Part:
        """Send a part, or have it copied."""
        offset, length = plan.span(number)
        while True:
            async with self._holding(length):
                body = await _read_exactly(read, offset, length)
                if not unchanged():
                    raise ContentChanged(f"{plan.key}: changed while it was read for upload")
                source = await self._source_of(plan, number, body)
                if source is None:
                    request = partial(self._store.upload_part, plan.key, upload_id, number, body)
                    part = await self.call(request)
                    self._sent.add(length)
                    return part
                del body
            copied = await self._copied_part(plan, upload_id, number, source, length)
            if copied is not None:
                self._copied.add(length)
                return copied

    async def _source_of(self, plan: PartPlan, number: int, body: bytes) -> tuple[StoredParts, int] | None:
        if self._equal_parts is None or not plan.compares:
            return None
        # Not to be left behind by a cancellation, as requests are: the index is closed in the end.
        source = await trio.to_thread.run_sync(plan.source_of, number, body)
        return source if source is not None and await self._equal_parts.can_copy() else None

    async def _copied_part(
        self, plan: PartPlan, upload_id: str, number: int, source: tuple[StoredParts, int], length: int
    ) -> Part | None:
        """A part copied on the server; None if that version cannot be copied from (any more)."""
        row, offset = source
        request = partial(self._store.copy_part, plan.key, upload_id, number, row.info, offset, length)
        try:
            return await self.call(request)
        except (PreconditionFailed, ObjectNotFound):
            await trio.to_thread.run_sync(plan.reject, row)
        except TransientStoreError:
            raise
        except StoreError as error:
            if self._equal_parts is not None:
                self._equal_parts.give_up(str(error))
        return None

    async def copy(
        self,
        source: ObjectInfo,
        key: str,
        metadata: Mapping[str, str] | None = None,
        condition: Condition = UNCONDITIONAL,
    ) -> ObjectInfo:
        """``ObjectStore.copy``; what a crash leaves of a copy in parts is aborted at the next start."""
        request = partial(self._store.copy, source, key, metadata=metadata, condition=condition)
        if source.size_bytes <= MAX_SINGLE_COPY_BYTES:
            info = await self.call(request)
        else:
            note = await self.call(lambda: self._unfinished.note(key))
            try:
                info = await self.call(request)
            except StoreError:
                await self.call(lambda: self._unfinished.done(note))
                raise
            await self.call(lambda: self._unfinished.done(note))
        if self._equal_parts is not None:
            await self._equal_parts.keep_copy(source, info)
        return info

    @asynccontextmanager
    async def _holding(self, size_bytes: int) -> AsyncIterator[None]:
        await self._memory.acquire(size_bytes)
        try:
            yield
        finally:
            self._memory.release(size_bytes)

    async def _abort(self, key: str, upload_id: str, note: Path) -> None:
        try:
            await self.call(lambda: self._store.abort_multipart(key, upload_id))
        except TierfsError:
            return  # the note stays: the next start tries again
        await self.call(lambda: self._unfinished.done(note))

    async def call(self, function: Callable[[], T]) -> T:
        # Cancelled only when the mount ends: then nobody waits for a store that does not answer.
        return await trio.to_thread.run_sync(function, limiter=self._limiter, abandon_on_cancel=True)


async def _read_exactly(read: ReadRange, offset: int, length: int) -> bytes:
    body = await read(offset, length)
    if len(body) != length:
        raise ContentChanged(f"expected {length} bytes at {offset}, read {len(body)}")
    return body


async def _in_parallel(tasks: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Run them all; the first error cancels the others and is raised alone."""
    failure: list[BaseException] = []

    async def guarded(task: Callable[[], Awaitable[None]], scope: trio.CancelScope) -> None:
        try:
            await task()
        except Exception as error:
            if not failure:
                failure.append(error)
            scope.cancel()

    async with trio.open_nursery() as nursery:
        for task in tasks:
            nursery.start_soon(guarded, task, nursery.cancel_scope)
    if failure:
        raise failure[0]
