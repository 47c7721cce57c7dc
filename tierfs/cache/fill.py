"""Room in a tier for blocks that are being fetched. Trio thread only, except ``Fill.write``."""

from __future__ import annotations

import os

from tierfs.cache import blocks, device, record
from tierfs.cache.blocks import EXTENT_BLOCKS
from tierfs.cache.policy import Unit
from tierfs.cache.record import Extent
from tierfs.cache.segments import OWN_FILE, segment_path
from tierfs.types import BLOCK_SIZE_BYTES, ObjectRef


class Fill:
    """Room in a tier for some absent blocks of one extent, while they are fetched.

    Made by ``Tier.reserve``; ends in exactly one of ``Tier.complete`` and ``Tier.abandon``.
    """

    __slots__ = ("content_id", "count", "create", "dead", "extent", "extent_no", "first", "identity",
                 "nbytes", "path", "place_bytes", "segment")

    def __init__(self, root: str, ref: ObjectRef, extent_no: int, first: int, count: int, *,
                 create: bool) -> None:
        self.content_id = ref.content_id
        self.identity = record.identity_of(ref)
        self.extent_no = extent_no
        self.first = first
        self.count = count
        self.nbytes = blocks.allocated_bytes(blocks.span_mask(first, count), ref.size_bytes, extent_no)
        self.create = create
        """False: the index says that the file is there. One made now would be full of holes that it calls
        data."""
        self.path = device.object_path(root, ref.content_id)
        self.segment = OWN_FILE
        self.place_bytes = 0
        self.extent: Extent
        self.dead = False
        """The content was forgotten meanwhile: what is written is garbage."""

    def pack(self, root: str, segment: int, place_bytes: int) -> None:
        """All of the content goes to that place instead of into a file of its own."""
        self.path = segment_path(root, segment)
        self.segment, self.place_bytes = segment, place_bytes
        self.create = True

    @property
    def unit(self) -> Unit:
        return (self.content_id, self.extent_no)

    @property
    def offset_bytes(self) -> int:
        """Of the first byte, in the content."""
        return (self.extent_no * EXTENT_BLOCKS + self.first) * BLOCK_SIZE_BYTES

    def write(self, data: bytes | memoryview) -> None:
        """Worker thread: the bytes of all blocks. Raises ``OSError``."""
        fd = device.open_for_fill(self.path, create=self.create)
        try:
            device.pwrite_all(fd, data, self.place_bytes + self.offset_bytes)
        finally:
            os.close(fd)
