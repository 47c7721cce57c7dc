"""Whether a file that is being made will soon be the target of a copy that the store can make.

Writes into new files pass through the kernel to a file of the write tier, and once that has been decided at
the open it stays so until the last close: the bytes of the file have to be there then. But cp(1) opens its
source, makes its target, and asks for a copy of everything; and where the source is not here, the store had
better make that (``writeback.copying``). So while somebody has a file open that could be copied so, and has
not read anything of it, new files are not passed through. A guess: if it is wrong, somebody writes a little
slower, or a copy is made as ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

PATIENCE_S: Final = 30.0
"""Who copies makes the target at once."""


class ExpectedCopies:
    """Changed on the trio thread only; ``is_likely`` may be asked on any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._unread: set[int] = set()
        """Numbers of handles."""
        self._until_s = 0.0

    def note_open(self, number: int) -> None:
        """A file that the store can copy has been opened for reading."""
        self._unread.add(number)
        self._until_s = self._clock() + PATIENCE_S

    def note_used(self, number: int) -> None:
        """It has been read, copied or closed."""
        if self._unread:
            self._unread.discard(number)

    @property
    def is_likely(self) -> bool:
        """A file that is made now may well be the target of a copy."""
        return bool(self._unread) and self._clock() < self._until_s
