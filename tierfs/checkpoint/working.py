"""The directory into which the ranks of one node write a checkpoint, until it gets its final name.

``PARENT/.NAME.partial``: a name with a dot in front, which ``ls`` and patterns like ``*`` pass over. Who has
made it holds an exclusive flock on it while it lives: so a directory that is not locked was left behind by a
save that was killed, and no rank takes it for the one that it is to write into. It gets its name when it is
locked already.

What ranks tell each other are extended attributes of it (``user.tierfs-save.*``). They cost no request to the
store, are atomic, and go where the directory goes. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tierfs.errors import CheckpointError, NotSupported

REQUEST = "user.tierfs.checkpoint"
"""What the engine listens to; reading it tells the state of a checkpoint."""
MARK = "user.tierfs-save."
ATTEMPT = MARK + "attempt"
DRAFT, LEFT = ".new", ".old"
"""What is added to the working name of one that is not locked yet, and of one that is being removed."""
SYNC_THREADS = 8
RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def working_path(final: str) -> str:
    """Where the checkpoint is written that is to be called ``final``."""
    parent, name = os.path.split(final)
    return os.path.join(parent, f".{name}.partial")


def check_mount(directory: str) -> None:
    """Raises ``NotSupported`` if an existing directory is not on a tierfs mount."""
    try:
        os.getxattr(directory, "user.tierfs.state")
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP, errno.EPERM):
            raise NotSupported(f"{directory}: not on a tierfs mount; checkpoints are saved on one") from None
        raise


class WorkingDirectory:
    """One open working directory. ``is_owner``: made, and locked, by this process."""

    def __init__(self, final: str, descriptor: int, attempt: dict[str, Any], *, is_owner: bool) -> None:
        self.final = final
        self.path = working_path(final)
        self.descriptor = descriptor
        self.attempt = attempt
        self.is_owner = is_owner

    @classmethod
    def make(cls, final: str, attempt: dict[str, Any]) -> WorkingDirectory:
        """A new one, in place of what a save that was killed has left. Raises ``CheckpointError``."""
        path, draft = working_path(final), working_path(final) + DRAFT
        for left in (path, draft):
            _clear(left)
        shutil.rmtree(path + LEFT, ignore_errors=True)
        try:
            os.mkdir(draft)
        except FileExistsError:
            raise CheckpointError(f"{final}: another save has begun at the same time") from None
        descriptor = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.setxattr(descriptor, ATTEMPT, json.dumps(attempt).encode())
            name = os.fsencode(os.path.basename(path)).hex()
            asked = {"action": "saving", "id": attempt["id"], "name": name}
            os.setxattr(descriptor, REQUEST, json.dumps(asked).encode())
            try:
                rename(draft, path, RENAME_NOREPLACE)
            except FileExistsError:
                raise CheckpointError(f"{final}: another save has begun at the same time") from None
        except BaseException:
            os.close(descriptor)
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return cls(final, descriptor, attempt, is_owner=True)

    @classmethod
    def find(cls, final: str) -> WorkingDirectory | None:
        """The one of a save that is under way; None: there is none (yet)."""
        path = working_path(final)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            if is_locked(descriptor) and os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                attempt = json.loads(os.getxattr(descriptor, ATTEMPT))
                return cls(final, descriptor, attempt, is_owner=False)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODATA):
                os.close(descriptor)
                raise
        os.close(descriptor)
        return None

    # what ranks tell each other

    def tell(self, rank: int, state: dict[str, Any], *, first: bool = False) -> None:
        """``first``: raises ``FileExistsError`` if that rank has said something already."""
        name = f"{MARK}rank.{rank}"
        os.setxattr(self.descriptor, name, json.dumps(state).encode(), os.XATTR_CREATE if first else 0)

    def heard(self, rank: int) -> dict[str, Any] | None:
        """What that rank has said last; None: nothing."""
        try:
            told: dict[str, Any] = json.loads(os.getxattr(self.descriptor, f"{MARK}rank.{rank}"))
        except OSError as error:
            if error.errno == errno.ENODATA:
                return None
            raise
        return told

    # how it ends

    @property
    def is_published(self) -> bool:
        """The final name means this directory.

        The kernel knows what the directory is called now. To look up a name that is not there yet would ask
        the store again and again.
        """
        name = os.path.basename(self.final)
        if os.path.basename(os.readlink(f"/proc/self/fd/{self.descriptor}")) != name:
            return False
        try:
            return os.stat(self.final).st_ino == os.fstat(self.descriptor).st_ino
        except FileNotFoundError:
            return False

    @property
    def is_abandoned(self) -> bool:
        """Who made it is gone, and has not published it."""
        return not is_locked(self.descriptor) and not self.is_published

    def sync(self, files: list[str]) -> None:
        """These files, paths below the directory, survive a power cut when this returns."""
        with ThreadPoolExecutor(min(SYNC_THREADS, max(1, len(files)))) as pool:
            for _ in pool.map(lambda file: fsync(os.path.join(self.path, file)), files):
                pass

    def files(self) -> list[str]:
        """Every regular file in it, paths below the directory."""
        found = []
        for above, _, names in os.walk(self.path):
            found += [os.path.relpath(os.path.join(above, name), self.path) for name in names]
        return [file for file in found if not os.path.islink(os.path.join(self.path, file))]

    def request(self, request: dict[str, Any]) -> None:
        """The engine is to write the manifest, once this directory has its final name and is in the store."""
        os.setxattr(self.descriptor, REQUEST, json.dumps({"action": "commit", **request}).encode())
        for name in os.listxattr(self.descriptor):
            if name.startswith(MARK):
                os.removexattr(self.descriptor, name)

    def publish(self, *, replace: bool) -> None:
        """Give it the final name. ``replace``: what had that name goes. Raises ``FileExistsError``."""
        try:
            rename(self.path, self.final, RENAME_NOREPLACE)
        except FileExistsError:
            if not replace:
                raise
            rename(self.path, self.final, RENAME_EXCHANGE)
            shutil.rmtree(self.path)
        fsync(os.path.dirname(self.final))

    def discard(self) -> None:
        """Remove it, unless it is published. For its owner."""
        if not self.is_published:
            shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """The lock of the owner ends."""
        os.close(self.descriptor)


def is_locked(descriptor: int) -> bool:
    """Whether the maker of this directory lives. (Shared locks are only ever held for this question.)"""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def rename(old: str, new: str, flags: int) -> None:
    """renameat2(2). Raises ``OSError``."""
    call = ctypes.CDLL(None, use_errno=True).renameat2
    if call(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), ctypes.c_uint(flags)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), old, None, new)


def _clear(path: str) -> None:
    """Remove what a save that was killed has left. Raises ``CheckpointError`` if it lives."""
    with contextlib.suppress(FileNotFoundError):
        with _opened(path) as descriptor:
            if is_locked(descriptor):
                raise CheckpointError(f"{path}: another process is saving this checkpoint")
        # Under another name first: a rank that looks for the new one must not find half of this.
        left = path.removesuffix(DRAFT) + LEFT
        os.rename(path, left)
        shutil.rmtree(left)


def fsync(path: str) -> None:
    """fsync(2) of a file or directory by name. Raises ``OSError``."""
    with _opened(path) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
