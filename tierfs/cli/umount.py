"""``tierfs umount``

The engine drains while the mount is still up, so that nothing is lost sight of; then this command, not the
engine, asks the kernel to unmount: a mount that is in use stays, and the engine notices nothing.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from typing import TYPE_CHECKING, Annotated

import typer

from tierfs.cli import exit_codes, target
from tierfs.cli.exit_codes import Busy, NoMount
from tierfs.cli.target import JsonOption
from tierfs.errors import ConfigError, MountError

if TYPE_CHECKING:
    from tierfs.control.client import ControlClient
    from tierfs.control.protocol import DrainReply
    from tierfs.control.registry import Found, MountRecord

GRACE_S = 30.0
"""How long the engine may go on uploading what was written between the drain and the unmount."""
NO_LIMIT_S = 10.0 * 365 * 86400
EXIT_TIMEOUT_S = 120.0
FORCED_EXIT_TIMEOUT_S = 10.0
PING_TIMEOUT_S = 10.0


def command(
    path: Annotated[
        str | None,
        typer.Argument(metavar="[MOUNTPOINT]", help="Or a path inside it; without, the only mount there is."),
    ] = None,
    lazy: Annotated[
        bool,
        typer.Option("--lazy", help="Out of sight now; open files go on, uploads too, in the background."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Now: open files fail, uploads stop and go on at the next mount.")
    ] = False,
    timeout: Annotated[
        str | None,
        typer.Option(help="Upload for at most this time (30, 5m...); the rest is kept.", metavar="TIME"),
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="Take the mountpoint from this TOML file.", metavar="FILE")
    ] = None,
    if_dead: Annotated[
        bool, typer.Option("--if-dead", help="Only if its engine is gone; never an error.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Upload what is waiting, unmount, and wait for the engine to end.

    Exit codes: 0 unmounted, all in the store; 3 no such mount; 4 in use, nothing changed; 5 unmounted, and
    something is still to be uploaded: it is kept and goes on at the next mount; 6 the engine does not answer.
    """
    if lazy and force:
        raise ConfigError("--lazy and --force exclude each other")
    if config is not None:
        path = _mountpoint_in(config)
    if if_dead:
        _clear_dead(path)
        return
    from tierfs.cli import output, timing

    timeout_s = timing.seconds(timeout)
    left = _umount(target.find(path), lazy=lazy, force=force, timeout_s=timeout_s, quiet=as_json)
    if as_json:
        output.show_json(left)
    if left["remaining_files"]:
        raise typer.Exit(exit_codes.PARTLY)


def _mountpoint_in(config: str) -> str:
    from tierfs.config.load import mountpoint_in

    return mountpoint_in(config)


def _clear_dead(path: str | None) -> None:
    from tierfs.mountpoint import canonical, detach, mount_at, probe

    try:
        point = canonical(path) if path is not None else target.find(None).mountpoint
    except NoMount:
        return
    mount = mount_at(point)
    if mount is not None and mount.is_tierfs and probe(point) == "dead":
        detach(point)


def _umount(
    found: Found, *, lazy: bool, force: bool, timeout_s: float | None, quiet: bool
) -> dict[str, object]:
    """Unmount; returns what is left to upload and whether the engine has ended."""
    from tierfs.control.client import ControlClient, EngineGone, EngineSilent

    os.chdir("/")  # this command itself must not be what keeps the mount busy
    record = found.record
    if record is None or not record.is_running():
        return _umount_without_engine(found, lazy=lazy, force=force)
    try:
        with ControlClient(record.socket_path, timeout_s=PING_TIMEOUT_S) as probe:
            probe.call("ping")
        with ControlClient(record.socket_path) as engine:
            if force:
                return _force(found, record, engine)
            if lazy:
                return _lazy(found, record, engine)
            return _gently(found, record, engine, timeout_s=timeout_s, quiet=quiet)
    except (EngineSilent, EngineGone) as error:
        if not record.is_running():
            return _umount_without_engine(found, lazy=lazy, force=force)
        if force:
            return _force(found, record, None)
        if lazy:
            return _lazy(found, record, None)
        raise EngineSilent(
            f"{found.mountpoint}: its engine (pid {record.pid}) does not answer: {error}. "
            f"Nothing was changed. 'tierfs umount --force' ends it; what is not in the store yet is kept in "
            f"{record.state_dir}; its log is {record.log_path}"
        ) from None


def _umount_without_engine(found: Found, *, lazy: bool, force: bool) -> dict[str, object]:
    """The engine is gone, or not ours to know: let the kernel decide."""
    from tierfs.cli.output import say
    from tierfs.control import registry
    from tierfs.control.client import EngineSilent
    from tierfs.mountpoint import detach, probe

    state = probe(found.mountpoint)
    if state == "hung" and not (lazy or force):
        raise EngineSilent(f"{found.mountpoint}: does not answer, nothing was changed; see --force")
    if state != "dead":
        if not (lazy or force):
            _refuse_if_used(found.mountpoint)
        _unmount(found.mountpoint, lazy=lazy, force=force)
        say(f"{found.mountpoint}: unmounted; its engine belongs to another user and uploads on its own")
        return _left(0, 0, None)
    detach(found.mountpoint)
    if found.record is not None:
        _drop_memory(found.record)
        registry.remove(found.record)
        say(
            f"{found.mountpoint}: its engine had died; the dead mount is gone. What it had not uploaded is "
            f"kept in {found.record.state_dir} and goes on at the next mount of {found.record.source} there"
        )
    return _left(0, 0, None)


def _gently(
    found: Found, record: MountRecord, engine: ControlClient, *, timeout_s: float | None, quiet: bool
) -> dict[str, object]:
    from tierfs.control.protocol import UnmountRequest

    if found.is_mounted:
        _refuse_if_used(found.mountpoint)
    drained = _drain(found, record, engine, timeout_s=timeout_s, quiet=quiet)
    grace_s = GRACE_S if timeout_s is None else min(GRACE_S, timeout_s)
    engine.call("unmount", UnmountRequest(mode="normal", grace_s=0.0 if drained.remaining_files else grace_s))
    if found.is_mounted:
        try:
            _unmount(found.mountpoint, lazy=False, force=False)
        except Busy:
            engine.call("unmount", UnmountRequest(mode="normal", grace_s=NO_LIMIT_S))
            _refuse_if_used(found.mountpoint)
            raise
    if not _wait_for_end(record, EXIT_TIMEOUT_S):
        raise MountError(
            f"{found.mountpoint}: unmounted, but its engine (pid {record.pid}) has not ended after "
            f"{EXIT_TIMEOUT_S:g} s; its log is {record.log_path}"
        )
    _tell_left(record, drained.remaining_files, drained.remaining_bytes, drained)
    return _left(drained.remaining_files, drained.remaining_bytes, record)


def _drain(
    found: Found, record: MountRecord, engine: ControlClient, *, timeout_s: float | None, quiet: bool
) -> DrainReply:
    from tierfs.cli import output
    from tierfs.control.protocol import DrainRequest, Progress

    last = Progress()

    def note(state: Progress) -> None:
        nonlocal last
        last = state
        update(state)

    try:
        with output.progress("upload", quiet=quiet) as update:
            reply: DrainReply = engine.call("drain", DrainRequest(timeout_s=timeout_s), note)
            return reply
    except KeyboardInterrupt:
        left_files, left_bytes = last.total_files - last.done_files, last.total_bytes - last.done_bytes
        output.say(
            f"interrupted: {found.mountpoint} is still mounted; {output.files(left_files)} "
            f"({output.size(left_bytes)}) are not in the store yet and are being uploaded"
        )
        raise typer.Exit(exit_codes.INTERRUPTED) from None


def _lazy(found: Found, record: MountRecord, engine: ControlClient | None) -> dict[str, object]:
    from tierfs.cli.holders import holders_of
    from tierfs.cli.output import files, say, size
    from tierfs.control.protocol import UnmountRequest

    users = holders_of(found.mountpoint)
    left_files = left_bytes = 0
    if engine is not None:
        reply = engine.call("unmount", UnmountRequest(mode="lazy", grace_s=NO_LIMIT_S))
        left_files, left_bytes = reply.remaining_files, reply.remaining_bytes
    if found.is_mounted:
        _unmount(found.mountpoint, lazy=True, force=False)
    if users:
        names = ", ".join(f"{user.pid} ({user.command})" for user in users)
        say(f"{found.mountpoint}: detached; engine {record.pid} serves what these have open: {names}")
    if left_files:
        say(f"engine {record.pid} goes on uploading {files(left_files)} ({size(left_bytes)})")
    # Both are on their way, not left behind: no exit code 5.
    return _left(0, 0, record) | {"uploading_files": left_files, "uploading_bytes": left_bytes}


def _force(found: Found, record: MountRecord, engine: ControlClient | None) -> dict[str, object]:
    from tierfs.control.client import EngineGone, EngineSilent
    from tierfs.control.protocol import UnmountRequest

    left_files = left_bytes = 0
    if engine is not None:
        try:
            reply = engine.call("unmount", UnmountRequest(mode="force", grace_s=0.0))
            left_files, left_bytes = reply.remaining_files, reply.remaining_bytes
        except (EngineGone, EngineSilent):
            pass
    if found.is_mounted:
        try:
            _unmount(found.mountpoint, lazy=True, force=True)
        except NoMount:
            pass  # the engine was faster
    if not _wait_for_end(record, FORCED_EXIT_TIMEOUT_S):
        _kill(record)
    from tierfs.control import registry

    _drop_memory(record)
    registry.remove(record)
    _tell_left(record, left_files, left_bytes, None)
    return _left(left_files, left_bytes, record)


def _drop_memory(record: MountRecord) -> None:
    """Give back the RAM tiers of an engine that did not end by itself. They hold nothing but clean copies."""
    import shutil

    from tierfs.cache.opening import RAM_DIRECTORY

    if not record.is_running():
        for directory in RAM_DIRECTORY.glob(f"tierfs-{os.geteuid()}-{record.mount_id}-*"):
            shutil.rmtree(directory, ignore_errors=True)


def _kill(record: MountRecord) -> None:
    """SIGKILL for an engine that does not end, never for a process that got its number since."""
    from tierfs.cli.output import say

    try:
        handle = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return
    try:
        if record.is_running():
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            say(f"engine {record.pid} did not end by itself and was killed")
            _wait_for_end(record, FORCED_EXIT_TIMEOUT_S)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)


def _refuse_if_used(mountpoint: str) -> None:
    """Raise ``Busy`` naming who uses the mount."""
    from tierfs.cli.holders import holders_of, mounts_below
    from tierfs.cli.output import printable

    lines = [f"a mount on {inner}" for inner in mounts_below(mountpoint)]
    lines += [
        f"process {user.pid} ({user.command}): {', '.join(user.uses)}" for user in holders_of(mountpoint)
    ]
    if lines:
        told = "".join(f"\n  {printable(line)}" for line in lines)
        raise Busy(f"{mountpoint} is in use, nothing was changed (--lazy or --force go ahead anyway):{told}")


def _unmount(mountpoint: str, *, lazy: bool, force: bool) -> None:
    from tierfs.mountpoint import unmount

    try:
        unmount(mountpoint, lazy=lazy, force=force)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise Busy(f"{mountpoint} is in use, by a process that this user may not see") from None
        if error.errno == errno.EINVAL:
            raise NoMount(f"{mountpoint} is not mounted any more") from None
        raise MountError(f"{mountpoint}: cannot unmount: {error.strerror}") from None


def _wait_for_end(record: MountRecord, timeout_s: float) -> bool:
    """Whether the engine's process has ended; a zombie, which its parent must bury, counts."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.005
    while record.is_running():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.2)
    return True


def _tell_left(record: MountRecord, files: int, size_bytes: int, drained: DrainReply | None) -> None:
    from tierfs.cli import output

    if not files:
        return
    what = f"{output.files(files)} ({output.size(size_bytes)})"
    output.say(
        f"{record.mountpoint}: unmounted; {what} are not in the store yet. They are kept in "
        f"{record.state_dir} and go on at the next mount of {record.source} there"
    )
    if drained is not None:
        output.list_failures(drained.failed)


def _left(files: int, size_bytes: int, record: MountRecord | None) -> dict[str, object]:
    return {
        "remaining_files": files,
        "remaining_bytes": size_bytes,
        "engine_ended": record is None or not record.is_running(),
        "state_dir": None if record is None else record.state_dir,
    }
