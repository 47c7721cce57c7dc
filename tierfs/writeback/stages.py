"""How far what was written has come: memory, the disk of this node, the store. For ``status`` and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from tierfs.cache.residency import Cache
from tierfs.writeback.content_table import ContentTable
from tierfs.writeback.objects import ObjectWriter


@dataclass(frozen=True, slots=True)
class Stage:
    """Files, and their bytes."""

    files: int
    size_bytes: int


class Stages:
    """Cheap to ask, whatever the backlog; trio thread only."""

    def __init__(self, cache: Cache, contents: ContentTable, writer: ObjectWriter) -> None:
        self._cache = cache
        self._contents = contents
        self._writer = writer

    def memory(self) -> Stage:
        """Written since the last sync, whole files counted: a power cut may cost some of that."""
        staged = self._cache.staged()
        files, size_bytes = staged.memory_files, staged.memory_bytes
        for content in self._contents.passthrough.ahead_of_staging():
            # Its staging file counts already if that is not on the disk either.
            if not self._cache.is_unsynced(content.content_id):
                files, size_bytes = files + 1, size_bytes + content.size_bytes
        return Stage(files, size_bytes)

    def disk(self) -> Stage:
        """On the disk of the write tier, and not known to be in the store."""
        staged = self._cache.staged()
        return Stage(staged.disk_files, staged.disk_bytes)

    def uploading(self) -> Stage:
        """Those of them that are on their way into the store right now."""
        sizes = self._writer.uploading.values()
        return Stage(len(sizes), sum(sizes))
