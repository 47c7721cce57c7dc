"""The frozen settings that every other module takes."""

from __future__ import annotations

import hashlib
import os

import msgspec


class TierSetting(msgspec.Struct, frozen=True, kw_only=True):
    """One tier, fast to slow. ``path`` None: a private tmpfs directory (RAM)."""

    name: str
    path: str | None
    capacity_bytes: int
    volatile: bool
    """True: lost at reboot (RAM)."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a mount needs to know. Sizes in bytes, times in seconds.

    ``source`` is canonical (``s3://bucket/prefix`` or an absolute directory, no slash at the end);
    ``mountpoint`` and ``state_dir`` are absolute. None of the directories named here is made by ``load``.
    """

    source: str
    mountpoint: str
    state_dir: str
    tiers: tuple[TierSetting, ...] = ()
    front: str = "auto"
    fuse_uring: str = "auto"
    """Whether requests come through io_uring (``on``) or /dev/fuse (``off``); with the native front."""
    read_only: bool = False
    open_mode: str = "auto"
    """Of a read-only mount: whether the kernel asks for each open (``ask``), never (``none``), or until many
    small files were opened and no large one (``auto``)."""
    ttl_s: float = 60.0
    negative_ttl_s: float = 1.0
    write_through: bool = False
    fsync: str = "local"
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    allow_other: bool = False
    uid: int = 0
    gid: int = 0
    umask: int = 0o022
    """Taken from the mode of objects and directories that carry none; not from what is created here."""
    log_level: str = "info"
    metrics_address: str | None = None
    memory_budget_bytes: int = 512 * 1024 * 1024
    """Bytes of file data that may be in flight or in transit in the engine's own memory."""
    fetch_concurrency: int = 32
    upload_concurrency: int = 8
    upload_delay_s: float = 1.0
    """How long after the last close an upload waits, so that write, close, rename costs one upload."""
    part_size_bytes: int = 16 * 1024 * 1024
    dirty_limit_bytes: int = 0
    """Writers are slowed when this much waits for upload; 0: 80 % of the write tier."""
    read_ahead_bytes: int = 64 * 1024 * 1024
    store_timeout_s: float = 60.0
    """How long a request is retried before the application sees the error."""
    replica: str | None = None
    """A second store, in which files are kept until they are in the first one; like ``source``."""
    replica_endpoint_url: str | None = None
    """Of a replica in a bucket; None: as for the source."""
    kernel_options: tuple[str, ...] = ()
    """Mount flags for the kernel as fstab spells them: ``noexec``, ``noatime``..."""

    @property
    def mount_id(self) -> str:
        """16 hex digits that name this source at this mountpoint."""
        return mount_id_of(self.source, self.mountpoint)

    @property
    def log_path(self) -> str:
        return os.path.join(self.state_dir, "tierfs.log")

    @property
    def file_mode(self) -> int:
        """Permission bits of an object that carries no mode."""
        return 0o666 & ~self.umask

    @property
    def dir_mode(self) -> int:
        """Permission bits of a directory that carries no mode."""
        return 0o777 & ~self.umask


def mount_id_of(source: str, mountpoint: str) -> str:
    """Names the state of one source at one mountpoint: the same pair finds its state again."""
    text = f"{source}\0{mountpoint}".encode("utf-8", "surrogateescape")
    return hashlib.blake2b(text, digest_size=8).hexdigest()
