"""Long reads of a store as the cache makes them: into a file, and what is in the file afterwards."""

from __future__ import annotations

import os

from tierfs.cache import record
from tierfs.cache.receive import receive
from tierfs.store.base import ObjectStore
from tierfs.store.body import Body

MARGIN = 4096
"""Where in the file the bytes go: not to its start."""


def streamed(store: ObjectStore, key: str, offset_bytes: int, length_bytes: int, *,
             if_match: str | None = None) -> bytes:
    """By ``cache.receive``, from the socket where it can."""
    target = os.memfd_create("streamed")
    try:
        def take(body: Body) -> bytes:
            assert body.length_bytes == length_bytes
            sums, error = receive(body, target, MARGIN)
            assert error is None
            return sums

        sums = store.stream(key, offset_bytes, length_bytes, take, if_match=if_match)
        data = os.pread(target, MARGIN + length_bytes + 1, 0)[MARGIN:]
        assert sums == record.checksums(data)
        return data
    finally:
        os.close(target)


def buffered(store: ObjectStore, key: str, offset_bytes: int, length_bytes: int, *,
             if_match: str | None = None) -> bytes:
    """Through a buffer, as where the bytes are not on the socket as they are."""
    def take(body: Body) -> bytes:
        data = bytearray(body.length_bytes)
        done = 0
        while done < len(data):
            with memoryview(data) as view:
                done += body.readinto(view[done : done + 100_000])
        return bytes(data)

    return store.stream(key, offset_bytes, length_bytes, take, if_match=if_match)
