"""Requests and replies about checkpoints; see ``protocol``."""

from __future__ import annotations

import msgspec

from tierfs.control.envelope import Failure


class CheckpointCommitRequest(msgspec.Struct, kw_only=True):
    """The files in directory ``path`` are a checkpoint: write its manifest when the store has them.

    ``wait``: hurry, and answer when it is written, or ``timeout_s`` is over.
    """

    path: bytes
    step: int | None = None
    wait: bool = False
    timeout_s: float | None = None


class CheckpointEntry(msgspec.Struct, kw_only=True):
    """One checkpoint. ``state``: ``local``, ``in the store`` or ``damaged`` (``message`` says how).

    ``left``: shards that are not in the store yet. ``bytes`` of a damaged manifest: 0.
    """

    path: str
    state: str
    step: int | None = None
    created_ns: int = 0
    ranks: int = 0
    shards: int = 0
    bytes: int = 0
    left: int = 0
    message: str = ""


class CheckpointCommitReply(msgspec.Struct, kw_only=True):
    checkpoint: CheckpointEntry


class CheckpointListRequest(msgspec.Struct, kw_only=True):
    """Every checkpoint at or below ``path``."""

    path: bytes = b""


class CheckpointListReply(msgspec.Struct, kw_only=True):
    checkpoints: list[CheckpointEntry]


class CheckpointVerifyRequest(msgspec.Struct, kw_only=True):
    """Compare what is in the store with the manifest. ``full``: the checksums of all bytes too."""

    path: bytes
    full: bool = False


class CheckpointVerifyReply(msgspec.Struct, kw_only=True):
    """``damaged``: every shard that is not what the manifest says (the first ``MAX_FAILURES``)."""

    path: str
    shards: int
    bytes: int
    checked_bytes: int = 0
    damaged_shards: int = 0
    damaged: list[Failure] = []


class CheckpointRestoreRequest(msgspec.Struct, kw_only=True):
    """Name the shards in the mount and fetch them. Without ``wait`` the reply comes when they can be read."""

    path: bytes
    wait: bool = False


class CheckpointRestoreReply(msgspec.Struct, kw_only=True):
    """Counts as in ``PrefetchReply``, final with ``wait`` only. ``sums``: xxh3-128 by path below ``path``."""

    path: str
    shards: int
    bytes: int
    started: bool = False
    cached_bytes: int = 0
    failed_bytes: int = 0
    evicted_bytes: int = 0
    skipped_bytes: int = 0
    failed_shards: int = 0
    failed: list[Failure] = []
    sums: dict[str, str] = {}


class CheckpointRemoveRequest(msgspec.Struct, kw_only=True):
    """Remove the manifest: what is at ``path`` is no checkpoint any more when the reply comes."""

    path: bytes


class CheckpointRemoveReply(msgspec.Struct, kw_only=True):
    """``had_manifest`` False: there was none, in the store or on its way."""

    path: str
    had_manifest: bool
