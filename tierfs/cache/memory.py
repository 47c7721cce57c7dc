"""The engine's own memory for file data: one budget, and the buffer of what no tier could take.

Trio thread only; nothing here blocks or waits, except ``ByteBudget.acquire``.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import trio

from tierfs.types import BLOCK_SIZE_BYTES, ContentId


class ByteBudget:
    """A semaphore over bytes. More than all of it may be taken only while nothing else is."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._waiting: deque[tuple[int, trio.Event]] = deque()

    def try_acquire(self, nbytes: int) -> bool:
        if self.used_bytes and self.used_bytes + nbytes > self.limit_bytes:
            return False
        self.used_bytes += nbytes
        return True

    async def acquire(self, nbytes: int) -> None:
        """First come, first served."""
        if not self._waiting and self.try_acquire(nbytes):
            await trio.lowlevel.checkpoint()
            return
        entry = (nbytes, trio.Event())
        self._waiting.append(entry)
        try:
            await entry[1].wait()
        except trio.Cancelled:
            if entry[1].is_set():
                self.release(nbytes)
            else:
                self._waiting.remove(entry)
            raise

    def release(self, nbytes: int) -> None:
        self.used_bytes -= nbytes
        while self._waiting and self.try_acquire(self._waiting[0][0]):
            self._waiting.popleft()[1].set()


class TransitBuffer:
    """Blocks on their way to a reader that no tier takes: bounded, oldest out first.

    Blocks of one request share its body; the accounting counts each block for itself.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._blocks: OrderedDict[tuple[ContentId, int], memoryview] = OrderedDict()

    def add(self, content_id: ContentId, first_block: int, body: bytes) -> None:
        """Keep a body that starts at that block."""
        view = memoryview(body)
        for start in range(0, len(view), BLOCK_SIZE_BYTES):
            key = (content_id, first_block + start // BLOCK_SIZE_BYTES)
            old = self._blocks.pop(key, None)
            if old is not None:
                self.used_bytes -= len(old)
            block = view[start : start + BLOCK_SIZE_BYTES]
            self._blocks[key] = block
            self.used_bytes += len(block)
        while self.used_bytes > self.limit_bytes:
            self.used_bytes -= len(self._blocks.popitem(last=False)[1])

    def __contains__(self, key: tuple[ContentId, int]) -> bool:
        return key in self._blocks

    def read(self, content_id: ContentId, offset_bytes: int, end_bytes: int) -> bytes | None:
        """The bytes if every block of the range is here, else None."""
        if not self._blocks:
            return None
        pieces = []
        position = offset_bytes
        while position < end_bytes:
            number, start = divmod(position, BLOCK_SIZE_BYTES)
            block = self._blocks.get((content_id, number))
            if block is None:
                return None
            stop = min(len(block), start + end_bytes - position)
            if stop <= start:
                return None
            pieces.append(block[start:stop])
            position += stop - start
        return bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)

    def forget(self, content_id: ContentId) -> None:
        for key in [key for key in self._blocks if key[0] == content_id]:
            self.used_bytes -= len(self._blocks.pop(key))
