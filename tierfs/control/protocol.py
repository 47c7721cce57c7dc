"""The messages of the control channel.

``OPERATIONS`` maps an operation's name to its request and its reply. Fields are only ever added, with a
default, so that a command and an engine of neighbouring versions understand each other; anything else
raises ``PROTOCOL``. Names of reply fields are what ``--json`` prints: public.

Paths in requests are bytes, relative to the root of the mount, without a slash in front; ``b""`` is the
root (JSON carries them as base64: names need not be text). Paths in replies are for people and are text.
"""

from __future__ import annotations

import struct
from typing import Any, Literal

import msgspec

PROTOCOL = 1
MAX_REQUEST_BYTES = 8 * 1024 * 1024
MAX_REPLY_BYTES = 32 * 1024 * 1024
HEADER = struct.Struct(">I")
MAX_FAILURES = 100
"""How many failures a reply lists; the counts beside them are complete."""


class Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=False):
    """What a client sends. ``arguments`` is the JSON of the operation's request."""

    protocol: int
    operation: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class Progress(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How far a long operation is. A total of 0 is not known (yet)."""

    phase: str = ""
    done_files: int = 0
    total_files: int = 0
    done_bytes: int = 0
    total_bytes: int = 0
    failed_files: int = 0
    note: str = ""


class Problem(msgspec.Struct, kw_only=True):
    """Why a request was refused or failed. ``error`` is the name of a class in ``tierfs.errors``."""

    error: str
    errno: int
    message: str


NO_REPLY = msgspec.Raw(b"")


class Answer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a server sends: exactly one field is set."""

    progress: Progress | None = None
    reply: msgspec.Raw = NO_REPLY
    problem: Problem | None = None


class Failure(msgspec.Struct, kw_only=True):
    """One path for which something did not work, and what."""

    path: str
    message: str


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


class UpgradeRequest(msgspec.Struct, kw_only=True):
    """Make room for another engine, with the code that is installed now. Native front only."""


class UpgradeReply(msgspec.Struct, kw_only=True):
    """The engine that answers ends at once."""

    pid: int
    version: str


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
