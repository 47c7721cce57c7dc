"""The data set in scaled units, and in which order a node reads it. Pure.

An epoch of 10 TB would be a million extents and more. So the data set and every capacity are divided by one
factor, chosen so that what a node reads in an epoch is a few thousand units; sizes of files and extents stay
what they are, and so do rates and times. Hit rates depend on ratios only, and an epoch is shorter, not
faster.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from tierfs.cache.blocks import EXTENT_SIZE_BYTES
from tierfs.cache.policy import Unit
from tierfs.plan.scenario import Scenario
from tierfs.types import ContentId, ObjectRef

NODE_UNITS = 8000
"""About how many units a node visits in one epoch."""
MAX_CONTENT_EXTENTS = 16
"""A longer file is simulated as several: a stream that goes on looks the same."""


class DataSet:
    """``window_bytes``: a node's epoch is at least that long, if the real one is."""

    def __init__(self, scenario: Scenario, window_bytes: float = 0.0) -> None:
        self._scenario = scenario
        self.content_bytes = min(scenario.content_bytes, MAX_CONTENT_EXTENTS * EXTENT_SIZE_BYTES)
        extents = -(-self.content_bytes // EXTENT_SIZE_BYTES)
        real = max(1, round(scenario.node_epoch_bytes / self.content_bytes))
        readers = scenario.gpus_of_node * scenario.workers
        wanted = max(NODE_UNITS // extents, readers, int(1.5 * window_bytes / self.content_bytes) + 1)
        self.node_contents = min(real, wanted)
        """Files that a node reads in one epoch."""
        self.contents = self.node_contents * scenario.nodes
        self.scale = self.contents * self.content_bytes / scenario.dataset_bytes
        """Simulated bytes per byte of the data set."""

    def capacity_bytes(self, real_bytes: float) -> int:
        """A capacity in simulated bytes."""
        return int(real_bytes * self.scale)

    def order(self, node: int, epoch: int) -> list[int]:
        """Numbers of the files that a node reads in one epoch, in turn."""
        own = range(node * self.node_contents, (node + 1) * self.node_contents)
        if self._scenario.order == "sequential":
            return list(own)
        dealt = random.Random(f"{self._scenario.seed} {node} {epoch}")
        if self._scenario.partition == "fixed":
            return dealt.sample(own, len(own))
        return dealt.sample(range(self.contents), self.node_contents)

    def ref(self, content: int) -> ObjectRef:
        """The file as the file system knows it."""
        return ObjectRef(ContentId(content.to_bytes(16, "big")), f"{content:012}", "", self.content_bytes)

    def units(self, content: int) -> Iterator[tuple[Unit, int]]:
        """The extents of one file, with their sizes."""
        content_id = ContentId(content.to_bytes(16, "big"))
        for number, start in enumerate(range(0, self.content_bytes, EXTENT_SIZE_BYTES)):
            yield (content_id, number), min(EXTENT_SIZE_BYTES, self.content_bytes - start)


class Names:
    """``prefetch.succession.Neighbours``: all files lie in one directory, in the order of their numbers."""

    def __init__(self, data: DataSet) -> None:
        self._data = data

    def after(self, ino: int, count: int) -> list[int]:
        return list(range(ino + 1, min(ino + 1 + count, self._data.contents + 1)))

    def ref_of(self, ino: int) -> ObjectRef | None:
        return self._data.ref(content_of(ino))


def ino_of(content: int) -> int:
    return content + 1


def content_of(ino: int) -> int:
    return ino - 1


def interleaved(data: DataSet, contents: list[int], readers: int) -> Iterator[tuple[Unit, int]]:
    """The visits when so many readers take the files in turn and go through them side by side."""
    for start in range(0, len(contents), readers):
        together = [data.units(content) for content in contents[start : start + readers]]
        while together:
            for units in together[:]:
                visit = next(units, None)
                if visit is None:
                    together.remove(units)
                else:
                    yield visit
