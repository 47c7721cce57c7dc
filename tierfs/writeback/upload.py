"""One upload: the bytes of a ``FileContent`` become one plain object.

The bytes may change while they are read. An upload never publishes a mixture: the staging file's
``generation`` is compared after the last byte was read and before the request that makes the object
visible. A small file is read into memory whole before its PUT; a large one goes up in parts, and is
completed only if the generation still is what it was. ``ContentChanged`` says that it was not.

Parts of one file, and files, share one limit on concurrent requests and one on the bytes in memory.

Source of sizes and limits: S3 user guide, "Amazon S3 multipart upload limits".
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio

from tierfs.cache.memory import ByteBudget
from tierfs.errors import TierfsError
from tierfs.store.base import Condition, ObjectStore, Part, part_size_for
from tierfs.types import ObjectInfo
from tierfs.writeback.unfinished import UnfinishedUploads

T = TypeVar("T")
ABORT_TIMEOUT_S = 30
ReadRange = Callable[[int, int], Awaitable[bytes]]
"""``read(offset, length)``: exactly that many bytes, unless the file shrank."""


class ContentChanged(TierfsError):
    """The file was written while it was being uploaded; nothing was published."""


class Uploader:
    """Sends objects with bounded parallelism. Trio thread; store calls run in worker threads."""

    def __init__(
        self,
        store: ObjectStore,
        unfinished: UnfinishedUploads,
        *,
        concurrency: int,
        part_size_bytes: int,
        memory_bytes: int,
    ) -> None:
        self._store = store
        self._unfinished = unfinished
        self._limiter = trio.CapacityLimiter(concurrency)
        # Bytes are taken from before a body is read into memory until it is sent.
        self._memory = ByteBudget(memory_bytes)
        self._concurrency = concurrency
        self._part_size_bytes = part_size_bytes
        self.bytes_sent = 0

    async def upload(
        self,
        key: str,
        size_bytes: int,
        read: ReadRange,
        unchanged: Callable[[], bool],
        metadata: Mapping[str, str],
        condition: Condition,
    ) -> ObjectInfo:
        """Publish ``size_bytes`` bytes under ``key``.

        ``read(offset, length)`` is awaited for exactly that many bytes. Raises ``ContentChanged``,
        ``PreconditionFailed`` (somebody else wrote the key) and any other ``StoreError``.
        """
        if size_bytes <= self._part_size_bytes:
            async with self._holding(size_bytes):
                body = await _read_exactly(read, 0, size_bytes)
                if not unchanged():
                    raise ContentChanged(f"{key}: changed while it was read for upload")
                info = await self.call(
                    lambda: self._store.put(key, body, metadata=metadata, condition=condition)
                )
            self.bytes_sent += size_bytes
            return info
        return await self._multipart(key, size_bytes, read, unchanged, metadata, condition)

    async def _multipart(
        self,
        key: str,
        size_bytes: int,
        read: ReadRange,
        unchanged: Callable[[], bool],
        metadata: Mapping[str, str],
        condition: Condition,
    ) -> ObjectInfo:
        part_size = part_size_for(size_bytes, self._part_size_bytes)
        upload_id = await self.call(lambda: self._store.start_multipart(key, metadata=metadata))
        note = await self.call(lambda: self._unfinished.note(key, upload_id))
        parts: dict[int, Part] = {}
        numbers = iter(range(1, -(-size_bytes // part_size) + 1))

        async def send() -> None:
            for number in numbers:
                offset = (number - 1) * part_size
                length = min(part_size, size_bytes - offset)
                async with self._holding(length):
                    body = await _read_exactly(read, offset, length)
                    if not unchanged():
                        raise ContentChanged(f"{key}: changed while it was read for upload")
                    request = partial(self._store.upload_part, key, upload_id, number, body)
                    parts[number] = await self.call(request)
                self.bytes_sent += len(body)

        try:
            await _in_parallel(send, self._concurrency)
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


async def _in_parallel(task: Callable[[], Awaitable[None]], count: int) -> None:
    """Run ``count`` copies of ``task``; the first error cancels the others and is raised alone."""
    failure: list[BaseException] = []

    async def guarded(scope: trio.CancelScope) -> None:
        try:
            await task()
        except Exception as error:
            if not failure:
                failure.append(error)
            scope.cancel()

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(guarded, nursery.cancel_scope)
    if failure:
        raise failure[0]
