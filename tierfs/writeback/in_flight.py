"""What is being worked on right now, so that two tasks never work on the same thing.

Two kinds of exclusion, both for the trio thread only and both without waiting: who meets one comes back
later.

* A *key* is written by one request at a time, and not while a request deletes it. The rows of the namespace
  cannot say that alone: a file that is unlinked gives its key up at once, while its upload is on the way.
* The object row of an *inode* is changed by one task at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tierfs.errors import TierfsError

published_here: ContextVar[int | None] = ContextVar("published_here", default=None)
"""The inode that this task publishes."""


class NotYet(TierfsError):
    """Something else has to end first; try again soon."""


class KeysInFlight:
    """Keys that requests are writing or deleting."""

    def __init__(self) -> None:
        self._written: set[str] = set()
        self._deleted: set[str] = set()

    @contextmanager
    def writing(self, keys: Iterable[str]) -> Iterator[None]:
        """Nobody else writes or deletes ``keys`` meanwhile. Raises ``NotYet`` if somebody is at it now."""
        wanted = set(keys)
        busy = wanted & (self._written | self._deleted)
        if busy:
            raise NotYet(f"{min(busy)}: another request for this key is under way")
        self._written |= wanted
        try:
            yield
        finally:
            self._written -= wanted

    @contextmanager
    def deleting(self, keys: Iterable[str]) -> Iterator[set[str]]:
        """Gives those of ``keys`` that may be deleted now: nobody writes them meanwhile."""
        free = set(keys) - self._written - self._deleted
        self._deleted |= free
        try:
            yield free
        finally:
            self._deleted -= free


class InodesInFlight:
    """Inodes whose objects and object rows are being changed."""

    def __init__(self) -> None:
        self._inos: set[int] = set()

    def __contains__(self, ino: int) -> bool:
        return ino in self._inos

    def __iter__(self) -> Iterator[int]:
        return iter(self._inos)

    def __len__(self) -> int:
        return len(self._inos)

    def add(self, ino: int) -> bool:
        """True if nobody was at it; then ``discard`` it in the end."""
        if ino in self._inos:
            return False
        self._inos.add(ino)
        return True

    def discard(self, ino: int) -> None:
        self._inos.discard(ino)
