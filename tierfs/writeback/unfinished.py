"""Multipart uploads that a crash left behind: noted before they start, aborted at the next start.

Other nodes may be uploading into the same bucket, so the store's own list of unfinished uploads does not
say which are ours. A note is one small file named after nothing but a counter; it needs no fsync, because
a power cut that loses the note also loses at most an upload that the bucket's own life cycle rule ends.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import structlog

from tierfs.errors import StoreError
from tierfs.store.base import ObjectStore

log = structlog.get_logger(__name__)


class UnfinishedUploads:
    """``directory`` is private to one mount. Methods block: worker threads only."""

    def __init__(self, directory: Path, store: ObjectStore) -> None:
        self._directory = directory
        self._store = store

    def note(self, key: str, upload_id: str) -> Path:
        """Remember an upload; returns what ``done`` takes."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._directory / f"{os.getpid()}-{os.urandom(8).hex()}.json"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump({"key": key, "upload_id": upload_id}, file)
        return path

    def done(self, note: Path) -> None:
        """The upload was completed or aborted."""
        note.unlink(missing_ok=True)

    def abort_all(self) -> int:
        """Abort what an earlier run left behind; returns how many. What fails is kept for the next start."""
        aborted = 0
        if not self._directory.is_dir():
            return 0
        for path in self._directory.glob("*.json"):
            try:
                note = json.loads(path.read_text(encoding="utf-8"))
                self._store.abort_multipart(str(note["key"]), str(note["upload_id"]))
            except StoreError as error:
                log.warning("unfinished upload not aborted", key=note.get("key"), reason=str(error))
                continue
            except (ValueError, KeyError, TypeError):
                log.warning("unreadable note of an unfinished upload dropped", path=str(path))
            path.unlink(missing_ok=True)
            aborted += 1
        return aborted
