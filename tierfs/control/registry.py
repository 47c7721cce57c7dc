"""Running mounts, one small JSON file each, and the lock on a mount's state directory.

The file says which process serves a mount and where its socket is. It can outlive its engine (kill -9), so
every reader checks the process: pid and start time.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tierfs import __version__
from tierfs.config import Settings
from tierfs.errors import ControlError, MountError
from tierfs.mountpoint import canonical, is_below, mount_of, tierfs_mounts

# Linux limits the path of a unix socket to 107 bytes and a NUL (unix(7)).
_MAX_SOCKET_PATH_BYTES = 107


class MountRecord(msgspec.Struct, kw_only=True, frozen=True):
    """One running mount. ``pid_start_ticks``: field 22 of ``/proc/PID/stat``, so that a reused pid shows.

    ``front_pid``: the process that starts another engine should this one die; 0: none does.
    """

    mount_id: str
    mountpoint: str
    source: str
    pid: int
    pid_start_ticks: int
    uid: int
    state_dir: str
    socket_path: str
    log_path: str
    front: str
    read_only: bool
    version: str
    started_ns: int
    front_pid: int = 0
    front_start_ticks: int = 0

    def is_running(self) -> bool:
        return start_ticks(self.pid) == self.pid_start_ticks

    def is_between_engines(self) -> bool:
        """The engine is gone and its front is not: there will be another record soon."""
        return (
            self.front_pid != 0
            and not self.is_running()
            and start_ticks(self.front_pid) == self.front_start_ticks
        )


def run_dir() -> Path:
    """Where records and sockets are; ``TIERFS_RUN_DIR`` overrides."""
    given = os.environ.get("TIERFS_RUN_DIR")
    if given:
        return Path(given)
    if os.geteuid() == 0:
        return Path("/run/tierfs")
    session = os.environ.get("XDG_RUNTIME_DIR")
    if session and os.path.isdir(session):
        return Path(session) / "tierfs"
    return Path.home() / ".cache" / "tierfs" / "run"


def start_ticks(pid: int) -> int:
    """When a process was started, in clock ticks since boot; 0 if there is none (or a zombie)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    fields = stat.rpartition(b")")[2].split()  # the command name may hold blanks and parentheses
    return 0 if fields[0] in {b"Z", b"X"} else int(fields[19])


def record_for(settings: Settings, *, front: str, front_pid: int = 0) -> MountRecord:
    """The record of the mount that this process is about to serve. ``front_pid``: of a front of its own."""
    socket_path = run_dir() / f"{settings.mount_id}.sock"
    if len(os.fsencode(socket_path)) > _MAX_SOCKET_PATH_BYTES:
        raise ControlError(f"{socket_path} is too long for a socket; set TIERFS_RUN_DIR to a shorter path")
    return MountRecord(
        mount_id=settings.mount_id,
        mountpoint=settings.mountpoint,
        source=settings.source,
        pid=os.getpid(),
        pid_start_ticks=start_ticks(os.getpid()),
        uid=os.geteuid(),
        state_dir=settings.state_dir,
        socket_path=str(socket_path),
        log_path=settings.log_path,
        front=front,
        read_only=settings.read_only,
        version=__version__,
        started_ns=time.time_ns(),
        front_pid=front_pid,
        front_start_ticks=start_ticks(front_pid) if front_pid else 0,
    )


def _path_of(mount_id: str) -> Path:
    return run_dir() / f"{mount_id}.json"


def write(record: MountRecord) -> None:
    """Announce a mount, atomically; readable by its owner only. Raises ``ControlError``."""
    path = _path_of(record.mount_id)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _replace(path, record)
    except OSError as error:
        raise ControlError(f"{path}: cannot write it: {error.strerror}; set TIERFS_RUN_DIR") from error


def _replace(path: Path, record: MountRecord) -> None:
    temporary = path.with_suffix(f".{record.pid}.new")
    descriptor = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
    )
    try:
        os.write(descriptor, msgspec.json.encode(record))
    finally:
        os.close(descriptor)
    os.replace(temporary, path)


def remove(record: MountRecord) -> None:
    """Take back what ``write`` announced, unless another engine has announced itself since."""
    path = _path_of(record.mount_id)
    current = _read(path)
    if current is None or (current.pid, current.pid_start_ticks) != (record.pid, record.pid_start_ticks):
        return
    for stale in (path, Path(record.socket_path)):
        try:
            stale.unlink(missing_ok=True)
        except OSError:
            pass


def _read(path: Path) -> MountRecord | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=MountRecord)
    except (OSError, msgspec.DecodeError):
        return None


def records() -> list[MountRecord]:
    """All records, those of dead engines too (see ``MountRecord.is_running``)."""
    try:
        paths = sorted(run_dir().glob("*.json"))
    except OSError:
        return []
    return [record for path in paths if (record := _read(path)) is not None]


class Found(msgspec.Struct, kw_only=True, frozen=True):
    """A mount, and the path below its root that was asked for.

    ``record`` None: the kernel has a tierfs mount there that no record of this user describes.
    ``is_mounted`` False: an engine runs, but its mount is gone (it may still be uploading).
    """

    mountpoint: str
    relative: bytes
    record: MountRecord | None
    is_mounted: bool


def find(path: str | None) -> Found:
    """The mount that ``path`` lies on; with None, the current directory's, or the only one there is.

    Mounts of which this user has no record count only if there is no other. Never touches the mount.
    Raises ``ControlError`` when there is none, or with None more than one.
    """
    by_mountpoint = {record.mountpoint: record for record in records()}
    if path is None:
        path = _only_mountpoint(by_mountpoint)
    target = canonical(path)
    mount = mount_of(target)
    if mount is not None:
        return Found(
            mountpoint=mount.path,
            relative=_relative(target, mount.path),
            record=by_mountpoint.get(mount.path),
            is_mounted=True,
        )
    for point, record in by_mountpoint.items():
        if is_below(target, point) and record.is_running():
            return Found(mountpoint=point, relative=_relative(target, point), record=record, is_mounted=False)
    raise ControlError(f"{path}: is not on a tierfs mount")


def _only_mountpoint(by_mountpoint: Mapping[str, MountRecord]) -> str:
    try:
        here = mount_of(os.getcwd())
    except OSError:
        here = None
    if here is not None:
        return here.path
    mounted = {mount.path for mount in tierfs_mounts()}
    ours = {
        point for point, record in by_mountpoint.items() if point in mounted or record.is_running()
    } or mounted
    if not ours:
        raise ControlError("there is no tierfs mount")
    if len(ours) > 1:
        raise ControlError("there are several tierfs mounts, name one: " + ", ".join(sorted(ours)))
    return ours.pop()


def _relative(path: str, mountpoint: str) -> bytes:
    return os.fsencode(path[len(mountpoint.rstrip("/")) :].strip("/"))


@contextmanager
def hold_state_dir(state_dir: Path) -> Iterator[None]:
    """Keep the state directory for this process until the end of the block; made if it is not there.

    Raises ``MountError`` naming who holds it: two engines on one namespace would destroy it.
    """
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(state_dir / "lock", flags, 0o600)
    except OSError as error:
        raise MountError(f"state_dir: cannot use {state_dir}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 4096, 0).decode("utf-8", "replace").strip() or "another process"
            raise MountError(f"{state_dir}: in use by {holder}") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
