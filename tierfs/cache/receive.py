"""The body of an answer into the file of a tier, block by block, with checksums. Worker threads only.

Nobody holds the body in memory. With the native part a block is received, summed and written while it is in
the processor's cache; without it, or where the bytes are not on the socket as they are, they go through a
buffer of the thread.
"""

from __future__ import annotations

import threading

import tierfs_native
from tierfs.cache import device, record
from tierfs.store.body import Body
from tierfs.types import BLOCK_SIZE_BYTES

_BUFFER_BYTES = 8 * BLOCK_SIZE_BYTES
_MOST_TIMEOUT_MS = 2**31 - 1

_native = tierfs_native.transfer()
_local = threading.local()


def receive(body: Body, target: int, offset_bytes: int) -> tuple[bytes, OSError | None]:
    """(checksums of the blocks, what went wrong with the target). Raises what is wrong with the body.

    ``target``: a descriptor; the body goes to ``offset_bytes``. When the target fails, the rest of the body
    is left alone.
    """
    source = body.descriptor() if _native is not None else None
    if _native is None or source is None:
        return _through_buffer(body, target, offset_bytes)
    sums, received, source_errno, target_errno = _native.receive(
        source.number, target, offset_bytes, body.length_bytes, source.head,
        min(_MOST_TIMEOUT_MS, int(source.timeout_s * 1000)))
    if target_errno:
        return b"", OSError(target_errno, "the tier's file cannot be written")
    if source_errno or received != body.length_bytes:
        raise source.failed(source_errno, received)
    source.finished()
    return sums, None


def _through_buffer(body: Body, target: int, offset_bytes: int) -> tuple[bytes, OSError | None]:
    buffer: bytearray | None = getattr(_local, "buffer", None)
    if buffer is None:
        # Kept: fresh memory costs more than the copy, since the kernel clears it.
        buffer = _local.buffer = bytearray(_BUFFER_BYTES)
    sums = []
    left = body.length_bytes
    with memoryview(buffer) as view:
        while left:
            wanted = min(left, _BUFFER_BYTES)
            have = 0
            while have < wanted:
                have += body.readinto(view[have:wanted])
            sums.append(record.checksums(view[:wanted]))
            try:
                device.pwrite_all(target, view[:wanted], offset_bytes)
            except OSError as error:
                return b"", error
            offset_bytes += wanted
            left -= wanted
    return b"".join(sums), None
