"""Keys that were deleted from the bucket while a listing was under way.

The bucket's answer may be older than the deletion, and by the time that it is applied the ``doomed`` row of
the key may be gone: without this memory the listing would bring back what was removed here.

Nothing is remembered while no listing is under way. ``listing`` belongs to the trio thread, the rest to
functions of a transaction.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Departures:
    """See the module docstring. Deletions are numbered; a listing may not know those after its start."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listings = 0
        self._count = 0
        self._keys: dict[str, int] = {}
        self._prefixes: dict[str, int] = {}
        self._below: dict[str, int] = {}
        """The last deletion at or below each prefix that ends in ``/``."""

    @contextmanager
    def listing(self) -> Iterator[int]:
        """From before the request until all is applied; gives the number that tells what came later."""
        with self._lock:
            self._listings += 1
            began = self._count
        try:
            yield began
        finally:
            with self._lock:
                self._listings -= 1
                if not self._listings:
                    self._keys.clear()
                    self._prefixes.clear()
                    self._below.clear()

    def note(self, key: str, *, prefix: bool) -> None:
        """The object (or all that lay below the prefix) is gone from the bucket."""
        with self._lock:
            if not self._listings:
                return
            self._count += 1
            (self._prefixes if prefix else self._keys)[key] = self._count
            end = 0
            while (end := key.find("/", end) + 1) > 0:
                self._below[key[:end]] = self._count

    def has_key(self, key: str, began: int) -> bool:
        """The object has been deleted since."""
        return self._keys.get(key, 0) > began

    def has_below(self, prefix: str, began: int) -> bool:
        """Something at or below ``prefix`` (ending in ``/``) has been deleted since."""
        return self._below.get(prefix, 0) > began

    def covers(self, key: str, began: int) -> bool:
        """A prefix that ``key`` lies under has been emptied since, its directory having been renamed."""
        if not self._prefixes:
            return False
        end = 0
        while (end := key.find("/", end) + 1) > 0:
            if self._prefixes.get(key[:end], 0) > began:
                return True
        return False
