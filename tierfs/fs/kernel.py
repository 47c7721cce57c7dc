"""What the kernel has cached, and telling it to forget: never from inside a request.

A notification to the kernel may wait for an inode lock that a request in progress holds; sent from that
request it would wait for ever. So they go through a bounded queue to one worker thread. A full queue
drops the notification: the kernel's own timeouts then end the entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog
import trio

log = structlog.get_logger(__name__)

QUEUE_ENTRIES = 100_000
PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class EntryGone:
    """The name in that directory means something else now, or nothing."""

    parent_ino: int
    name: bytes


@dataclass(frozen=True, slots=True)
class InodeChanged:
    """Attributes, and unless ``attributes_only`` bytes, of that inode are not what they were."""

    ino: int
    attributes_only: bool


Notice = EntryGone | InodeChanged


@dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    """Not for the kernel: everything before it has been passed on."""

    reached: trio.Event


class KernelCaches:
    """``send`` passes one notice to the kernel; it may block and is called from one worker thread."""

    def __init__(self, send: Callable[[Notice], None]) -> None:
        self._send = send
        self._into, self._out = trio.open_memory_channel[Notice | _Mark](QUEUE_ENTRIES)
        self._runs = False
        self.dropped = 0

    def entry_gone(self, parent_ino: int, name: bytes) -> None:
        self._put(EntryGone(parent_ino, name))

    def inode_changed(self, ino: int, *, attributes_only: bool) -> None:
        self._put(InodeChanged(ino, attributes_only))

    async def passed_on(self) -> None:
        """Wait until the kernel (or a native front) has what was queued before. Not from inside a request."""
        if not self._runs:
            return
        mark = _Mark(trio.Event())
        with trio.move_on_after(PATIENCE_S):
            await self._into.send(mark)
            await mark.reached.wait()

    def _put(self, notice: Notice) -> None:
        try:
            self._into.send_nowait(notice)
        except trio.WouldBlock:
            self.dropped += 1

    async def run(self) -> None:
        """Pass notices on until cancelled."""
        limiter = trio.CapacityLimiter(1)
        self._runs = True
        async for notice in self._out:
            if isinstance(notice, _Mark):
                notice.reached.set()
                continue
            try:
                await trio.to_thread.run_sync(self._send, notice, limiter=limiter, abandon_on_cancel=True)
            except FileNotFoundError:
                continue  # the kernel had forgotten it already
            except OSError as error:
                log.warning("the kernel refused an invalidation", notice=repr(notice), reason=str(error))
