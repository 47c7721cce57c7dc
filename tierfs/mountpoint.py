"""Mountpoints as the kernel sees them, without touching what is mounted there.

Owns: reading ``/proc/self/mountinfo``, and the only calls that detach a mount. A mount whose engine is gone
answers ENOTCONN, and one whose engine hangs never answers: so nothing here calls stat on, or below, a
tierfs mountpoint, except ``probe``, which does it in a child process that may be left behind.

Who may call: any thread that may block; ``probe`` and ``prepare`` only before threads exist (they fork).
The engine never calls ``probe`` on its own mount.

Raises: ``MountError``.

Source of the mountinfo format: proc(5), "/proc/pid/mountinfo".
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tierfs.errors import MountError

FSTYPE = "fuse.tierfs"
_MNT_FORCE = 1
_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8
_MAX_SYMLINKS = 40
_OCTAL = re.compile(rb"\\([0-7]{3})")

Liveness = Literal["live", "dead", "hung"]


@dataclass(frozen=True, slots=True)
class MountInfo:
    """One line of mountinfo. ``path`` and ``source`` are decoded with surrogateescape."""

    mount_id: int
    device: str
    path: str
    fstype: str
    source: str
    options: str

    @property
    def is_tierfs(self) -> bool:
        return self.fstype == FSTYPE


def _unescape(field: bytes) -> str:
    return os.fsdecode(_OCTAL.sub(lambda match: bytes([int(match[1], 8)]), field))


def parse_mountinfo(data: bytes) -> list[MountInfo]:
    """The mounts in the order in which the kernel lists them: a later one at the same path covers."""
    found = []
    for line in data.splitlines():
        fields = line.split(b" ")
        try:
            dash = fields.index(b"-", 6)
            fstype, source = fields[dash + 1], fields[dash + 2]
        except (ValueError, IndexError):
            continue
        found.append(
            MountInfo(
                mount_id=int(fields[0]),
                device=fields[2].decode("ascii", "replace"),
                path=_unescape(fields[4]),
                fstype=_unescape(fstype),
                source=_unescape(source),
                options=_unescape(fields[5]),
            )
        )
    return found


def mounts() -> list[MountInfo]:
    """All mounts of this process's mount namespace."""
    with open("/proc/self/mountinfo", "rb") as file:
        return parse_mountinfo(file.read())


def tierfs_mounts(known: Sequence[MountInfo] | None = None) -> list[MountInfo]:
    """The tierfs mounts that are on top at their path."""
    top: dict[str, MountInfo] = {}
    for mount in mounts() if known is None else known:
        top[mount.path] = mount
    return [mount for mount in top.values() if mount.is_tierfs]


def mount_at(path: str, known: Sequence[MountInfo] | None = None) -> MountInfo | None:
    """The topmost mount exactly at ``path`` (canonical), or None."""
    found = None
    for mount in mounts() if known is None else known:
        if mount.path == path:
            found = mount
    return found


def set_read_ahead(path: str, size_bytes: int) -> bool:
    """How far the kernel reads ahead in files of the mount at ``path``; False if it may not be told.

    It is also the most that the kernel asks for in one request of a buffered read, and 128 KiB unless told.
    Source: Documentation/ABI/testing/sysfs-class-bdi of the kernel.
    """
    mount = mount_at(path)
    if mount is None:
        return False
    try:
        with open(f"/sys/class/bdi/{mount.device}/read_ahead_kb", "r+", encoding="ascii") as file:
            if int(file.read()) != size_bytes // 1024:
                file.seek(0)
                file.write(str(size_bytes // 1024))
    except (OSError, ValueError):
        return False
    return True


def is_below(path: str, directory: str) -> bool:
    """Whether ``path`` is ``directory`` or lies below it. Lexical: both absolute and canonical."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def mount_of(path: str, known: Sequence[MountInfo] | None = None) -> MountInfo | None:
    """The tierfs mount that ``path`` (canonical) lies on, or None."""
    deepest: MountInfo | None = None
    for mount in mounts() if known is None else known:
        if is_below(path, mount.path) and (deepest is None or len(mount.path) >= len(deepest.path)):
            deepest = mount
    return deepest if deepest is not None and deepest.is_tierfs else None


def canonical(path: str | os.PathLike[str], known: Sequence[MountInfo] | None = None) -> str:
    """``path`` absolute and without symbolic links, like realpath, but blind below a tierfs mountpoint.

    Below one, links are left as they are: resolving them would ask a mount that may be dead.
    """
    opaque = {mount.path for mount in (mounts() if known is None else known) if mount.is_tierfs}
    todo = os.path.abspath(path).split("/")[1:]
    done = "/"
    links = 0
    while todo:
        if done in opaque:
            return os.path.normpath(os.path.join(done, *todo))
        name = todo.pop(0)
        if name in {"", "."}:
            continue
        if name == "..":
            done = os.path.dirname(done)
            continue
        candidate = os.path.join(done, name)
        target = None
        if candidate not in opaque:
            try:
                target = os.readlink(candidate)
            except OSError:
                pass
        if target is None:
            done = candidate
            continue
        links += 1
        if links > _MAX_SYMLINKS:
            raise MountError(f"{path}: too many symbolic links")
        todo = target.split("/") + todo
        if target.startswith("/"):
            done = "/"
    return done


def probe(path: str, timeout_s: float = 2.0) -> Liveness:
    """Whether the file system mounted at ``path`` answers.

    ``dead``: ENOTCONN, its engine is gone. ``hung``: no answer in time. The question is asked in a child
    process, because a stat that waits for a hung engine cannot be interrupted.
    """
    child = os.fork()
    if child == 0:
        code = 0
        try:
            os.statvfs(path)  # os.stat may be answered by the kernel alone, from what it has cached
        except OSError as error:
            # ECANCELED: io_uring of a front that was killed is being taken apart.
            code = 1 if error.errno in {errno.ENOTCONN, errno.ECONNABORTED, errno.ECANCELED} else 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + timeout_s
    pause_s = 0.001
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "dead" if os.waitstatus_to_exitcode(status) == 1 else "live"
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            return "hung"
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.05)


def fsname_of(source: str) -> str:
    """``source`` as a value of the FUSE option ``fsname=``: commas and backslashes escaped for libfuse."""
    plain = "".join(char if char.isprintable() else "?" for char in source)
    return plain.replace("\\", "\\\\").replace(",", "\\,")


def unmount(path: str, *, lazy: bool = False, force: bool = False) -> None:
    """Unmount what is on top at ``path``; raises ``OSError`` (EBUSY when somebody uses it and not lazy).

    ``lazy``: out of sight at once, gone when the last user leaves. ``force``: pending and future requests
    fail with ECONNABORTED/ENOTCONN (root only; without effect on what fusermount3 does for a user).
    """
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        flags = _UMOUNT_NOFOLLOW
        if force:  # MNT_FORCE aborts the connection, yet alone it still answers EBUSY
            flags |= _MNT_FORCE | _MNT_DETACH
        elif lazy:
            flags |= _MNT_DETACH
        if libc.umount2(os.fsencode(path), flags) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
        return
    helper = shutil.which("fusermount3") or shutil.which("fusermount")
    if helper is None:
        raise OSError(errno.ENOENT, "fusermount3 is not installed (package fuse3)", path)
    command = [helper, "-u", *(["-z"] if lazy or force else []), "--", path]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode != 0:
        number = errno.EBUSY if "busy" in result.stderr.lower() else errno.EPERM
        raise OSError(number, result.stderr.strip() or "fusermount3 failed", path)


def detach(path: str) -> None:
    """Lazily unmount every tierfs mount on top at ``path``, one after the other."""
    for _ in range(16):
        mount = mount_at(path)
        if mount is None or not mount.is_tierfs:
            return
        try:
            unmount(path, lazy=True)
        except OSError as error:
            if error.errno == errno.EINVAL:  # gone meanwhile
                return
            raise MountError(f"{path}: cannot detach the dead mount: {error.strerror}") from error


def prepare(path: str) -> str:
    """Make sure that something can be mounted at ``path``; returns it canonical.

    A tierfs mount there whose engine is gone is detached. Anything else that is mounted there is refused.
    """
    target = canonical(path)
    for _ in range(16):
        mount = mount_at(target)
        if mount is None:
            break
        if not mount.is_tierfs:
            raise MountError(f"{target}: {mount.source} (type {mount.fstype}) is mounted there")
        state = probe(target)
        if state == "live":
            raise MountError(f"{target}: tierfs already serves {mount.source} there; unmount it first")
        if state == "hung":
            raise MountError(
                f"{target}: a tierfs mount of {mount.source} is there and does not answer; "
                f"look at its log, then 'tierfs umount --force {target}'"
            )
        try:
            unmount(target, lazy=True)
        except OSError as error:
            raise MountError(f"{target}: cannot detach the dead mount there: {error.strerror}") from error
    outer = mount_of(target)
    if outer is not None and probe(outer.path) != "live":
        raise MountError(f"{target}: lies on the tierfs mount {outer.path}, which does not answer")
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        raise MountError(f"{target}: no such directory; make it first") from None
    except OSError as error:
        raise MountError(f"{target}: {error.strerror}") from error
    if not stat.S_ISDIR(mode):
        raise MountError(f"{target}: is not a directory")
    if os.geteuid() != 0 and not os.access(target, os.W_OK):
        raise MountError(f"{target}: you may not write there, and fusermount3 wants that of a mountpoint")
    return target
