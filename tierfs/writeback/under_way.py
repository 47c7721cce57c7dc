"""Writes to one file that have begun and not ended, for reads that came after them. Trio thread only.

The kernel believes what it has written into its page cache before the file system has answered. When it sees
another time of modification it drops these pages and reads them again; should it get what was there before a
write that is still under way, it keeps that, and the write is not seen by anybody until the page goes. So a
read waits for the writes to its range that came before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio


class _Write:
    __slots__ = ("end", "ended", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self.ended: trio.Event | None = None
        """Made by the first who waits for it."""


class WritesUnderWay:
    """See the module docstring. Offsets in bytes; ``end`` is behind the last one."""

    def __init__(self) -> None:
        self._writes: list[_Write] = []

    @contextmanager
    def begun(self, start: int, end: int) -> Iterator[None]:
        """A write is under way while the block runs."""
        write = _Write(start, end)
        self._writes.append(write)
        try:
            yield
        finally:
            self._writes.remove(write)
            if write.ended is not None:
                write.ended.set()

    def touch(self, start: int, end: int) -> bool:
        """Whether one of them has bytes of that range."""
        return any(write.start < end and start < write.end for write in self._writes)

    async def wait(self, start: int, end: int) -> None:
        """Until those that have bytes of that range now have ended; not for any that begin meanwhile."""
        for write in [write for write in self._writes if write.start < end and start < write.end]:
            if write.ended is None:
                write.ended = trio.Event()
            await write.ended.wait()
