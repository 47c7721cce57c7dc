"""The bytes of an answer while they come in, for who does not want to hold all of them in memory.

``ObjectStore.stream`` hands a ``Body`` to a function, in the thread that asked, until that returns.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol, TypeVar

from tierfs.errors import PreconditionFailed, StoreError, StoreUnavailable

T = TypeVar("T")


class Body(Protocol):
    """``length_bytes`` bytes, to be read once, in order; by one of the two ways, not by both."""

    length_bytes: int

    def readinto(self, buffer: memoryview) -> int:
        """Some bytes, at least one unless the body is at its end. Raises a ``StoreError``."""
        ...

    def descriptor(self) -> Descriptor | None:
        """Where the bytes can be read with read(2); None if they come in another form (encrypted, say)."""
        ...


class Descriptor(Protocol):
    """A body as the kernel has it."""

    number: int
    """The descriptor; it may be non-blocking."""
    head: bytes
    """The first bytes, which have been read from it already."""
    timeout_s: float
    """How long nothing may come."""

    def finished(self) -> None:
        """All bytes have been read: what they came through can be used again."""
        ...

    def failed(self, error_no: int, received_bytes: int) -> StoreError:
        """What it means that reading ended with that errno (0: at the end) after so many bytes."""
        ...


Consume = Callable[[Body], T]
"""Takes a body, and may be called again with another one if that broke off. Raises only what a body raised;
it may stop before the end."""


class BytesBody:
    """A body that is in memory already."""

    def __init__(self, data: bytes) -> None:
        self.length_bytes = len(data)
        self._rest = memoryview(data)

    def readinto(self, buffer: memoryview) -> int:
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def descriptor(self) -> None:
        return None


class FileBody:
    """From a file, at the position of its descriptor. Its own ``Descriptor``."""

    head = b""
    timeout_s = 0.0

    def __init__(self, key: str, number: int, length_bytes: int) -> None:
        self.length_bytes = length_bytes
        self.number = number
        self._key = key
        self._left_bytes = length_bytes

    def readinto(self, buffer: memoryview) -> int:
        count = os.readv(self.number, [buffer[: self._left_bytes]]) if self._left_bytes else 0
        if self._left_bytes and not count:
            raise self.failed(0, self.length_bytes - self._left_bytes)
        self._left_bytes -= count
        return count

    def descriptor(self) -> FileBody:
        return self

    def finished(self) -> None:
        """Nothing to do."""

    def failed(self, error_no: int, received_bytes: int) -> StoreError:
        if error_no:
            return StoreUnavailable(f"{self._key}: get: {os.strerror(error_no)}")
        # Whoever asks for bytes past the end believes in another version.
        return PreconditionFailed(f"{self._key}: ended {self.length_bytes - received_bytes} bytes too early")


class WholeBodies:
    """``stream`` for a store that only has ``get_range``."""

    def get_range(self, key: str, offset_bytes: int, length_bytes: int, *,
                  if_match: str | None = None, version_id: str | None = None) -> bytes:
        raise NotImplementedError

    def stream(self, key: str, offset_bytes: int, length_bytes: int, consume: Consume[T], *,
               if_match: str | None = None, version_id: str | None = None) -> T:
        """See ``base.ObjectStore``."""
        return consume(BytesBody(self.get_range(key, offset_bytes, length_bytes, if_match=if_match,
                                                version_id=version_id)))
