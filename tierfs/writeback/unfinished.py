"""Multipart uploads that a crash left behind: noted before they start, aborted at the next start.

Other nodes may be uploading into the same bucket, so the store's own list of unfinished uploads does not
say which are ours. A note is one small file named after nothing but a counter; it needs no fsync, because
a power cut that loses the note also loses at most an upload that the bucket's own life cycle rule ends.

The store names an upload when it has started it. Should the process die before it knows that name, the note
has the key alone: then the store's list is asked, and what it shows for that key and from that time on goes.
That could be an upload of another node, to the very object that this one was writing: it would begin anew.

A start that failed may have been carried out as well. Its note stays, and serves the next attempt at that
key: once that one has a name, the others go. (What gets lost between the retries of one request,
``store.retry`` takes care of.)
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from tierfs.errors import StoreAccessDenied, StoreError, StoreUnsupported, TierfsError
from tierfs.store.base import ObjectStore

log = structlog.get_logger(__name__)


MOST_UNNAMED = 1000
"""Failed starts that are remembered. What an older one has left is for the bucket's life cycle rule."""
SKEW_NS = 15 * 60 * 10**9
"""Servers refuse requests of clients whose clock is further off."""


class UnfinishedUploads:
    """``directory`` is private to one mount. Methods block: worker threads only."""

    def __init__(self, directory: Path, store: ObjectStore, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._directory = directory
        self._store = store
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._unnamed: dict[str, tuple[Path, int]] = {}
        """Key -> note, and when it was made, of uploads that the store has not given a name, or not yet."""
        self._doubtful: set[Path] = set()

    def note(self, key: str) -> Path:
        """An upload to ``key`` is about to start; returns what ``started``, ``failed`` and ``done`` take.

        Raises ``TierfsError`` if the disk is full: then it must not start.
        """
        with self._lock:
            known = self._unnamed.get(key)
            if known is not None and known[0].exists():
                return known[0]
            if len(self._unnamed) >= MOST_UNNAMED:
                forgotten, _ = self._unnamed.pop(next(iter(self._unnamed)))
                self._doubtful.discard(forgotten)
                forgotten.unlink(missing_ok=True)
            now_ns = self._now_ns()
            path = self._write_note(key, now_ns)
            self._unnamed[key] = path, now_ns
            return path

    def _write_note(self, key: str, now_ns: int) -> Path:
        path = self._directory / f"{os.getpid()}-{os.urandom(8).hex()}.json"
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump({"key": key, "noted_ns": now_ns}, file)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise _failure(key, error) from error
        return path

    def failed(self, note: Path) -> None:
        """The store did not answer, or with an error, when it was asked to start."""
        with self._lock:
            self._doubtful.add(note)

    def started(self, note: Path, key: str, upload_id: str) -> None:
        """The store calls it ``upload_id``. Raises ``TierfsError``; the note names the key as before then."""
        new = note.with_suffix(".new")
        try:
            new.write_text(json.dumps({"key": key, "upload_id": upload_id}), encoding="utf-8")
            new.replace(note)
        except OSError as error:
            new.unlink(missing_ok=True)
            raise _failure(key, error) from error
        with self._lock:
            _, noted_ns = self._unnamed.pop(key, (note, self._now_ns()))
            is_doubtful = note in self._doubtful
            self._doubtful.discard(note)
        if is_doubtful:
            try:
                self._abort_unnamed(key, noted_ns, besides=upload_id)
            except StoreError as error:
                log.warning("an upload without a name may be left", key=key, reason=str(error))

    def done(self, note: Path) -> None:
        """The upload was completed or aborted, or never started."""
        with self._lock:
            self._doubtful.discard(note)
            for key in [key for key, (path, _) in self._unnamed.items() if path == note]:
                del self._unnamed[key]
        note.unlink(missing_ok=True)

    def abort_all(self) -> int:
        """Abort what an earlier run left behind; returns how many. What fails is kept for the next start."""
        aborted = 0
        if not self._directory.is_dir():
            return 0
        for path in self._directory.glob("*.new"):
            path.unlink(missing_ok=True)
        for path in self._directory.glob("*.json"):
            key = ""
            try:
                note = json.loads(path.read_text(encoding="utf-8"))
                key = str(note["key"])
                if "upload_id" in note:
                    self._store.abort_multipart(key, str(note["upload_id"]))
                    aborted += 1
                else:
                    aborted += self._abort_unnamed(key, int(note["noted_ns"]))
            except (StoreAccessDenied, StoreUnsupported) as error:
                log.warning("unfinished upload not aborted", key=key, reason=str(error))
                if "upload_id" in note:
                    continue
                # The list will not be had next time either.
            except StoreError as error:
                log.warning("unfinished upload not aborted", key=key, reason=str(error))
                continue
            except (ValueError, KeyError, TypeError):
                log.warning("unreadable note of an unfinished upload dropped", path=str(path))
            path.unlink(missing_ok=True)
        return aborted

    def _abort_unnamed(self, key: str, noted_ns: int, *, besides: str = "") -> int:
        """Whatever else has been started for that key since then."""
        found = [
            upload
            for upload in self._store.list_unfinished_uploads(key)
            if upload.key == key and upload.upload_id != besides and upload.started_ns >= noted_ns - SKEW_NS
        ]
        for upload in found:
            self._store.abort_multipart(key, upload.upload_id)
        return len(found)


def _failure(key: str, error: OSError) -> TierfsError:
    failure = TierfsError(f"{key}: its upload cannot be noted in the state directory: {error.strerror}")
    failure.errno = error.errno or failure.errno
    return failure
