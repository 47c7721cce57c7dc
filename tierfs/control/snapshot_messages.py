"""Requests and replies about snapshots; see ``protocol``."""

from __future__ import annotations

import msgspec


class SnapshotCreateRequest(msgspec.Struct, kw_only=True):
    """Make a snapshot of the directory ``path``.

    First everything below it is put into the store, open files too, unless ``flush`` is off; for
    ``timeout_s`` at most. ``complete``: first list every directory below it that has not been listed.
    """

    path: bytes = b""
    name: bytes
    flush: bool = True
    complete: bool = False
    timeout_s: float | None = None


class SnapshotInfo(msgspec.Struct, kw_only=True):
    """``path``: of the directory then, below the root of the mount; ``location``: where it can be read."""

    name: str
    path: str
    location: str
    created_ns: int
    number: int
    root_ino: int


class SnapshotCreateReply(msgspec.Struct, kw_only=True):
    """``elapsed_s``: of the transaction alone. ``not_in_store``: files below ``path`` of which the
    newest bytes were not in the store, or that were changed again meanwhile: the snapshot has what the store
    had."""

    snapshot: SnapshotInfo
    elapsed_s: float
    not_in_store: int


class SnapshotListRequest(msgspec.Struct, kw_only=True):
    """All snapshots, the oldest first."""


class SnapshotJob(msgspec.Struct, kw_only=True):
    """A restore or clone that has not ended. ``kind``: one of the two words; ``path``: what it makes."""

    kind: str
    path: str
    started_ns: int
    number: int


class SnapshotListReply(msgspec.Struct, kw_only=True):
    """``kept_objects``: copies in the bucket of what was overwritten or removed since."""

    snapshots: list[SnapshotInfo]
    jobs: list[SnapshotJob] = []
    kept_objects: int = 0
    is_sweeping: bool = False


class SnapshotDeleteRequest(msgspec.Struct, kw_only=True):
    """Delete a snapshot; what only it needs is removed in the background."""

    name: bytes


class SnapshotDeleteReply(msgspec.Struct, kw_only=True):
    snapshot: SnapshotInfo


class SnapshotDiffRequest(msgspec.Struct, kw_only=True):
    """What differs between ``name`` and, ``other`` or, without one, its directory as it is now."""

    name: bytes
    other: bytes | None = None
    limit: int = 10_000


class Difference(msgspec.Struct, kw_only=True):
    """``change``: ``added``, ``removed``, or ``changed``; ``what``: of the latter, ``content``, ``type``,
    ``attributes``, ``target``, comma-separated."""

    change: str
    path: str
    what: str = ""


class SnapshotDiffReply(msgspec.Struct, kw_only=True):
    """Counts are complete; ``differences`` ends at the limit asked for."""

    differences: list[Difference]
    added: int
    removed: int
    changed: int


class SnapshotRestoreRequest(msgspec.Struct, kw_only=True):
    """Make the directory ``path`` what it was in the snapshot ``name``.

    ``backup``: first make a snapshot of what is there now. ``force``: although files below are open for
    writing, or some cannot be had any more.
    """

    path: bytes = b""
    name: bytes
    backup: bool = True
    force: bool = False


class MissingFile(msgspec.Struct, kw_only=True):
    """What a snapshot shows and nobody can have any more."""

    path: str
    reason: str


class SnapshotRestoreReply(msgspec.Struct, kw_only=True):
    """``backup``: the snapshot of what was there before; None: nothing differed, or none was wanted.

    ``entries``: looked at. ``made``, ``replaced``, ``removed``: names; ``changed``: attributes of what
    stayed. ``atomic``: all of it became visible at one moment.
    """

    path: str
    name: str
    backup: str | None = None
    entries: int = 0
    made: int = 0
    replaced: int = 0
    removed: int = 0
    changed: int = 0
    atomic: bool = True
    missing: list[MissingFile] = []
    missing_count: int = 0
    elapsed_s: float = 0.0


class SnapshotCloneRequest(msgspec.Struct, kw_only=True):
    """Make a writable copy of a snapshot, or of the directory ``below`` in it, at ``path``."""

    name: bytes
    below: bytes = b""
    path: bytes
    force: bool = False


class SnapshotCloneReply(msgspec.Struct, kw_only=True):
    """``entries``: made."""

    path: str
    name: str
    entries: int = 0
    missing: list[MissingFile] = []
    missing_count: int = 0
    elapsed_s: float = 0.0
