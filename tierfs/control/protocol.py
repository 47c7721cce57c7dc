"""The messages of the control channel.

``OPERATIONS`` maps an operation's name to its request and its reply. Fields are only ever added, with a
default, so that a command and an engine of neighbouring versions understand each other; anything else
raises ``PROTOCOL``. Names of reply fields are what ``--json`` prints: public.

Paths in requests are bytes, relative to the root of the mount, without a slash in front; ``b""`` is the
root (JSON carries them as base64: names need not be text). Paths in replies are for people and are text.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tierfs.control.checkpoint_messages import CheckpointCommitReply as CheckpointCommitReply
from tierfs.control.checkpoint_messages import CheckpointCommitRequest as CheckpointCommitRequest
from tierfs.control.checkpoint_messages import CheckpointEntry as CheckpointEntry
from tierfs.control.checkpoint_messages import CheckpointListReply as CheckpointListReply
from tierfs.control.checkpoint_messages import CheckpointListRequest as CheckpointListRequest
from tierfs.control.checkpoint_messages import CheckpointRemoveReply as CheckpointRemoveReply
from tierfs.control.checkpoint_messages import CheckpointRemoveRequest as CheckpointRemoveRequest
from tierfs.control.checkpoint_messages import CheckpointRestoreReply as CheckpointRestoreReply
from tierfs.control.checkpoint_messages import CheckpointRestoreRequest as CheckpointRestoreRequest
from tierfs.control.checkpoint_messages import CheckpointVerifyReply as CheckpointVerifyReply
from tierfs.control.checkpoint_messages import CheckpointVerifyRequest as CheckpointVerifyRequest
from tierfs.control.envelope import HEADER as HEADER
from tierfs.control.envelope import MAX_FAILURES as MAX_FAILURES
from tierfs.control.envelope import MAX_REPLY_BYTES as MAX_REPLY_BYTES
from tierfs.control.envelope import MAX_REQUEST_BYTES as MAX_REQUEST_BYTES
from tierfs.control.envelope import NO_REPLY as NO_REPLY
from tierfs.control.envelope import PROTOCOL as PROTOCOL
from tierfs.control.envelope import Answer as Answer
from tierfs.control.envelope import Failure as Failure
from tierfs.control.envelope import Problem as Problem
from tierfs.control.envelope import Progress as Progress
from tierfs.control.envelope import Request as Request
from tierfs.control.snapshot_messages import Difference as Difference
from tierfs.control.snapshot_messages import MissingFile as MissingFile
from tierfs.control.snapshot_messages import SnapshotCloneReply as SnapshotCloneReply
from tierfs.control.snapshot_messages import SnapshotCloneRequest as SnapshotCloneRequest
from tierfs.control.snapshot_messages import SnapshotCreateReply as SnapshotCreateReply
from tierfs.control.snapshot_messages import SnapshotCreateRequest as SnapshotCreateRequest
from tierfs.control.snapshot_messages import SnapshotDeleteReply as SnapshotDeleteReply
from tierfs.control.snapshot_messages import SnapshotDeleteRequest as SnapshotDeleteRequest
from tierfs.control.snapshot_messages import SnapshotDiffReply as SnapshotDiffReply
from tierfs.control.snapshot_messages import SnapshotDiffRequest as SnapshotDiffRequest
from tierfs.control.snapshot_messages import SnapshotInfo as SnapshotInfo
from tierfs.control.snapshot_messages import SnapshotJob as SnapshotJob
from tierfs.control.snapshot_messages import SnapshotListReply as SnapshotListReply
from tierfs.control.snapshot_messages import SnapshotListRequest as SnapshotListRequest
from tierfs.control.snapshot_messages import SnapshotRestoreReply as SnapshotRestoreReply
from tierfs.control.snapshot_messages import SnapshotRestoreRequest as SnapshotRestoreRequest


class PingRequest(msgspec.Struct, kw_only=True):
    """Is anybody there? Answered by the server itself."""


class PingReply(msgspec.Struct, kw_only=True):
    version: str
    pid: int
    protocol: int


class StatusRequest(msgspec.Struct, kw_only=True):
    """What the mount is and how it does."""


class EngineStatus(msgspec.Struct, kw_only=True):
    pid: int
    started_ns: int
    rss_bytes: int = 0
    buffer_bytes: int = 0
    """File data in flight or in transit in the engine's memory; ``buffer_budget_bytes`` at most."""
    buffer_budget_bytes: int = 0


class FrontStatus(msgspec.Struct, kw_only=True):
    """Which front answers the kernel (``python`` or ``native``), and why that one.

    ``engine_starts``: 1 unless an engine died and was replaced under the mount. The native front counts
    requests: ``answered`` by itself, ``relayed`` to the engine, ``repeated`` for a later engine. Opens that
    pass through to a tier's file: ``passthrough_opens``; ``passthrough_errno``: why the kernel refuses that.
    ``placed``: reads whose bytes the front took from where the engine said that they lie.
    ``transport``: requests come through ``device`` (/dev/fuse) or ``io_uring`` (``ring_requests`` did so);
    ``transport_why``: the reason. ``no_open``: the kernel opens files without asking (``open_mode``).
    """

    kind: str
    why: str
    pid: int = 0
    engine_starts: int = 0
    answered: int = 0
    relayed: int = 0
    repeated: int = 0
    passthrough_opens: int = 0
    opened_here: int = 0
    passthrough_errno: int = 0
    no_open: bool = False
    transport: str = "device"
    transport_why: str = ""
    ring_requests: int = 0
    placed: int = 0


class TierStatus(msgspec.Struct, kw_only=True):
    """One tier. ``hits`` and ``misses`` count block reads. ``state``: ``ok``, ``bypassed``, ``failing``...

    ``files``: contents of which the tier holds at least a block.
    """

    name: str
    path: str
    capacity_bytes: int
    used_bytes: int
    dirty_bytes: int
    pinned_bytes: int
    hits: int
    misses: int
    state: str = "ok"
    volatile: bool = False
    files: int = 0


class Backlog(msgspec.Struct, kw_only=True):
    """What is not in the store yet. ``oldest_s``: for how long the oldest of it has been waiting.

    Since the engine started: ``sent_bytes`` of files went to the store, and ``copied_bytes`` were copied
    there instead, because the store had them already.
    """

    files: int = 0
    bytes: int = 0
    oldest_s: float = 0.0
    deletes: int = 0
    failed: list[Failure] = []
    conflicts: int = 0
    """Files that got a ``.conflict-`` name since the engine started: another node wrote the same object."""
    sent_bytes: int = 0
    copied_bytes: int = 0


class StageStatus(msgspec.Struct, kw_only=True):
    """Files at one stage, and their bytes."""

    files: int = 0
    bytes: int = 0


class Stages(msgspec.Struct, kw_only=True):
    """How far what was written through the mount has come.

    ``memory``: written since the last sync, whole files counted; a power cut may cost some of that, a killed
    process none. ``disk``: synced to the disk of the write tier, and not in the store. ``uploading``: those
    of both that are being sent right now. Bytes of these two are bytes on the device, of ``uploading`` and
    ``store`` those of files. ``store``: put there since the engine started, each time that a file was.
    """

    memory: StageStatus
    disk: StageStatus
    uploading: StageStatus
    store: StageStatus


class ReplicaStatus(msgspec.Struct, kw_only=True):
    """A second place for what is not in the store yet.

    ``held_files``: what a loss of this node would not lose; ``waiting_files``: what it would. ``state``:
    ``ok``, or ``failing``; then ``why`` says more.
    """

    url: str
    state: str = "ok"
    why: str = ""
    held_files: int = 0
    held_bytes: int = 0
    waiting_files: int = 0
    waiting_bytes: int = 0


class StoreStatus(msgspec.Struct, kw_only=True):
    """Requests sent by operation, body bytes, and whether the store answers (``ok``, ``failing``)."""

    url: str
    state: str = "ok"
    requests: dict[str, int] = {}
    bytes_read: int = 0
    bytes_written: int = 0
    errors: int = 0


class StatusReply(msgspec.Struct, kw_only=True):
    version: str
    uptime_s: float
    source: str
    mountpoint: str
    mount_id: str
    state_dir: str
    read_only: bool
    engine: EngineStatus
    front: FrontStatus
    tiers: list[TierStatus]
    backlog: Backlog
    store: StoreStatus
    stages: Stages | None = None
    """None only from an engine of an earlier version, before ``tierfs upgrade``."""
    replica: ReplicaStatus | None = None
    open_handles: int = 0
    open_directories: int = 0
    inodes: int = 0
    hidden_keys: int = 0
    """Keys that no path can name (``a//b``, ``..``), and objects shadowed by a directory."""


class FlushRequest(msgspec.Struct, kw_only=True):
    """Wait until everything at or below ``path`` that was closed before now is in the store.

    What is written meanwhile is not waited for.
    """

    path: bytes = b""
    timeout_s: float | None = None


class FlushReply(msgspec.Struct, kw_only=True):
    """``remaining_...``: of what was there at the call; ``open_files`` of them were open for writing.

    ``remaining_deletes``: objects without a name that are still in the store; 0 with a path.
    """

    flushed_files: int
    flushed_bytes: int
    remaining_files: int
    remaining_bytes: int
    open_files: int = 0
    remaining_deletes: int = 0
    failed: list[Failure] = []


class ImportRequest(msgspec.Struct, kw_only=True):
    """List everything below ``prefix`` now, with ``jobs`` requests at a time.

    ``metadata``: also ask for mode, owner and mtime of every object, one request each.
    """

    prefix: bytes = b""
    jobs: int = 16
    metadata: bool = False


class ImportReply(msgspec.Struct, kw_only=True):
    entries: int
    directories: int
    requests: int
    hidden_keys: int
    elapsed_s: float
    failed: list[Failure] = []


class PrefetchRequest(msgspec.Struct, kw_only=True):
    """Make files, and everything below directories, local. Without ``wait`` the reply comes at once."""

    paths: list[bytes]
    wait: bool = False


class PrefetchReply(msgspec.Struct, kw_only=True):
    """``cached + failed + evicted + skipped == total`` once it is done (``started`` False).

    ``cached_bytes``: local now. ``evicted_bytes``: fetched, and pushed out again since. ``skipped_bytes``:
    not tried, because no tier can take them. ``failed`` also lists paths that do not exist.
    """

    total_files: int
    total_bytes: int
    cached_bytes: int
    failed_bytes: int
    evicted_bytes: int
    skipped_bytes: int
    failed_files: int = 0
    failed: list[Failure] = []
    started: bool = False


class PinRequest(msgspec.Struct, kw_only=True):
    """Make local and keep: in the tier of that name, or in the one that holds most of it."""

    paths: list[bytes]
    tier: str | None = None


class UnpinRequest(msgspec.Struct, kw_only=True):
    paths: list[bytes]


class EvictRequest(msgspec.Struct, kw_only=True):
    """Drop local copies; what is not in the store yet stays and is listed as failed."""

    paths: list[bytes]
    tier: str | None = None


class PathsReply(msgspec.Struct, kw_only=True):
    """How many files and bytes were pinned, unpinned or freed."""

    files: int
    bytes: int
    failed: list[Failure] = []


class DrainRequest(msgspec.Struct, kw_only=True):
    """Put the whole backlog into the store now, deletes included.

    Returns early when only uploads are left that waiting will not help.
    """

    timeout_s: float | None = None


class DrainReply(msgspec.Struct, kw_only=True):
    remaining_files: int
    remaining_bytes: int
    failed: list[Failure] = []


class UnmountRequest(msgspec.Struct, kw_only=True):
    """A notice: the caller is about to unmount. The engine does not do it itself.

    ``normal`` and ``lazy``: when the kernel lets go, the last drain takes ``grace_s`` at most. ``force``:
    stop serving now, drain for ``grace_s`` at most, keep the rest, exit.
    """

    mode: Literal["normal", "lazy", "force"] = "normal"
    grace_s: float = 30.0


class UnmountReply(msgspec.Struct, kw_only=True):
    pid: int
    remaining_files: int
    remaining_bytes: int


class UpgradeRequest(msgspec.Struct, kw_only=True):
    """Make room for another engine, with the code that is installed now. Native front only."""


class UpgradeReply(msgspec.Struct, kw_only=True):
    """The engine that answers ends at once."""

    pid: int
    version: str


OPERATIONS: dict[str, tuple[type[Any], type[Any]]] = {
    "ping": (PingRequest, PingReply),
    "status": (StatusRequest, StatusReply),
    "flush": (FlushRequest, FlushReply),
    "import": (ImportRequest, ImportReply),
    "prefetch": (PrefetchRequest, PrefetchReply),
    "pin": (PinRequest, PathsReply),
    "unpin": (UnpinRequest, PathsReply),
    "evict": (EvictRequest, PathsReply),
    "drain": (DrainRequest, DrainReply),
    "unmount": (UnmountRequest, UnmountReply),
    "upgrade": (UpgradeRequest, UpgradeReply),
    "checkpoint-commit": (CheckpointCommitRequest, CheckpointCommitReply),
    "checkpoint-list": (CheckpointListRequest, CheckpointListReply),
    "checkpoint-verify": (CheckpointVerifyRequest, CheckpointVerifyReply),
    "checkpoint-restore": (CheckpointRestoreRequest, CheckpointRestoreReply),
    "checkpoint-remove": (CheckpointRemoveRequest, CheckpointRemoveReply),
    "snapshot-create": (SnapshotCreateRequest, SnapshotCreateReply),
    "snapshot-list": (SnapshotListRequest, SnapshotListReply),
    "snapshot-delete": (SnapshotDeleteRequest, SnapshotDeleteReply),
    "snapshot-diff": (SnapshotDiffRequest, SnapshotDiffReply),
    "snapshot-restore": (SnapshotRestoreRequest, SnapshotRestoreReply),
    "snapshot-clone": (SnapshotCloneRequest, SnapshotCloneReply),
}
