"""What the suite wants of a file system under test, and the part that all of them share.

A peer is mounted and unmounted by its own command line, in the foreground where it can be, with its output
in a log. Nothing here touches the mountpoint from this process: whether it answers is asked through a
process that can be given up (:func:`answers`).

Raises ``PeerFailed``, with what the peer printed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.compare import processes
from benchmarks.servers import S3Server, credentials
from tierfs.mountpoint import mount_at

MOUNT_LIMIT_S = 45.0
UNMOUNT_LIMIT_S = 45.0
COMMAND_LIMIT_S = 60.0
POLL_S = 0.02
MIB = 1024 * 1024


class PeerFailed(Exception):
    """A peer did not do what was asked within its time; the message shows the end of its log."""


@dataclass(frozen=True, slots=True)
class Site:
    """What all peers of a run have in common. ``endpoint_url`` and ``filer`` may be those of the proxy."""

    work_dir: Path
    server: S3Server
    endpoint_url: str
    filer: tuple[int, int] | None
    bucket: str
    cache_bytes: int
    redis_url: str | None = None
    binaries: Mapping[str, str] = field(default_factory=dict)
    """Programs by name, with the path of each; one that is not in it is not here."""
    far: bool = False


class Peer:
    """One file system. ``plain_objects``: a file is one object at the same path, so that data put into the
    bucket appear in it, and what it writes appears in the bucket."""

    name = ""
    plain_objects = True
    mountpoint_is_store = True
    """False: there is no mount and no store behind it."""
    package = ""
    """Where it comes from, said when it is missing."""
    program = ""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.mark = processes.new_mark(self.name)
        self.mountpoint = site.work_dir / "mnt" / self.name
        self.cache_dir = site.work_dir / "cache" / self.name
        self.log = site.work_dir / "log" / f"{self.name}.log"
        self._foreground: subprocess.Popen[bytes] | None = None
        for directory in (self.mountpoint, self.cache_dir, self.log.parent):
            directory.mkdir(parents=True, exist_ok=True)

    # What differs.

    def missing(self) -> str | None:
        """Why this peer is left out; None if it can run."""
        if self.program and self.program not in self.site.binaries:
            return f"{self.program} is not installed ({self.package})"
        return None

    def version(self) -> str:
        return first_line([self.binary, "--version"])

    def prepare(self) -> None:
        """Once, before the first mount."""

    def mount_command(self) -> list[str]:
        """The program, which stays in the foreground."""
        raise NotImplementedError

    def waiting(self) -> int:
        """How many uploads it still has to do, as far as it tells."""
        return 0

    def companions(self) -> list[str]:
        """Marks of further processes whose CPU time is this peer's: a metadata server of its own."""
        return []

    # What does not.

    @property
    def binary(self) -> str:
        return self.site.binaries[self.program]

    @property
    def environment(self) -> dict[str, str]:
        return {**credentials(self.site.endpoint_url), processes.MARK: self.mark}

    @property
    def directory(self) -> Path:
        """What is measured."""
        return self.mountpoint

    def mount(self) -> None:
        """Returns when the root can be listed."""
        command = self.mount_command()
        with self.log.open("ab") as output:
            output.write(f"\n$ {' '.join(command)}\n".encode())
            output.flush()
            self._foreground = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                env={**os.environ, **self.environment},
            )  # fmt: skip
        limit = time.monotonic() + MOUNT_LIMIT_S
        while not (is_mounted(self.mountpoint) and answers(self.mountpoint)):
            if self._foreground.poll() is not None and not is_mounted(self.mountpoint):
                raise PeerFailed(f"{self.name} ended with {self._foreground.returncode}\n{self.log_tail()}")
            if time.monotonic() > limit:
                raise PeerFailed(
                    f"{self.name} was not mounted after {MOUNT_LIMIT_S:.0f} s\n{self.log_tail()}"
                )
            time.sleep(POLL_S)

    def unmount(self) -> None:
        """The proper way; raises PeerFailed if that does not work."""
        limit = time.monotonic() + UNMOUNT_LIMIT_S
        while is_mounted(self.mountpoint):
            self.ask_to_unmount(limit - time.monotonic())
            if time.monotonic() > limit:
                raise PeerFailed(f"{self.name} could not be unmounted\n{self.log_tail()}")
        if self._foreground is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._foreground.wait(max(1.0, limit - time.monotonic()))
        if not processes.wait_until_gone(self.mark, max(1.0, limit - time.monotonic())):
            raise PeerFailed(f"{self.name} runs on after it was unmounted\n{self.log_tail()}")
        self._reap()

    def ask_to_unmount(self, limit_s: float) -> None:
        """One try."""
        with contextlib.suppress(PeerFailed):
            run(["umount", str(self.mountpoint)], limit_s=limit_s)
            return
        time.sleep(0.1)

    def drain(self, limit_s: float) -> None:
        """Wait until all that was written is in the store. Raises PeerFailed."""
        limit = time.monotonic() + limit_s
        while left := self.waiting():
            if time.monotonic() > limit:
                raise PeerFailed(
                    f"{self.name}: {left} uploads to go after {limit_s:.0f} s\n{self.log_tail()}"
                )
            time.sleep(POLL_S)

    def forget(self) -> None:
        """Delete its local copies. Not mounted."""
        shutil.rmtree(self.cache_dir, ignore_errors=True)
        self.cache_dir.mkdir(parents=True, exist_ok=True)

    def abandon(self) -> None:
        """Get rid of it whatever state it is in; never raises. Who waits for the mountpoint gets an error."""
        for mark in self.own_marks():
            processes.end(mark, grace_s=2.0)
        if is_mounted(self.mountpoint):
            with contextlib.suppress(PeerFailed):
                run(["umount", "-l", str(self.mountpoint)], limit_s=10)
        self._reap()
        shutil.rmtree(self.cache_dir, ignore_errors=True)

    def own_marks(self) -> list[str]:
        return [self.mark]

    def log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return self.log.read_text(errors="replace")[-1500:]
        return ""

    def _reap(self) -> None:
        if self._foreground is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._foreground.wait(5)
            self._foreground = None


def is_mounted(path: Path) -> bool:
    """From the kernel's table, without touching it."""
    return mount_at(str(path)) is not None


def answers(path: Path, limit_s: float = 10.0) -> bool:
    """Whether a directory can be listed within the limit."""
    try:
        run(["ls", "-U", str(path)], limit_s=limit_s)
    except PeerFailed:
        return False
    return True


def run(
    command: Sequence[str], *, limit_s: float = COMMAND_LIMIT_S, environment: Mapping[str, str] | None = None
) -> str:
    """Run a command that may hang in the kernel, and be left behind; gives its standard output. Raises
    PeerFailed.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        errors="replace", env={**os.environ, **(environment or {})}, start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=max(limit_s, 0.1))
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1)
        raise PeerFailed(f"{' '.join(command)}: no end within {limit_s:.0f} s") from None
    if process.returncode:
        raise PeerFailed(f"{' '.join(command)}: exit code {process.returncode}\n{errors[-1500:]}")
    return output


def first_line(command: Sequence[str]) -> str:
    """What a program says about its version."""
    try:
        return run(command, limit_s=10).strip().partition("\n")[0]
    except (PeerFailed, OSError) as error:
        return f"unknown ({str(error).partition(chr(10))[0]})"
