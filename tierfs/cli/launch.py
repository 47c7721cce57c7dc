"""Start the engine of a mount: in this process, or in one of its own that outlives the command.

The detached engine is the grandchild of the command (two forks, before any thread exists), leader of its
own session, with its standard error in the log file. It reports over a pipe, one JSON message per line:
``{"pid": N}``, then ``{"ready": {...}}`` or ``{"error": "...", "code": N}``. The command waits for one of
them; an end of file without it means that the engine died. With the native front it is the front that takes
the place of the engine here, and the engine, its child, that reports: see ``native``.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NoReturn

from tierfs import mountpoint, notify
from tierfs.cli import exit_codes, native, output, remembered
from tierfs.config import Settings
from tierfs.config.tiers import remember_capacities
from tierfs.errors import MountError, StoreError, TierfsError

OnReady = Callable[[dict[str, Any]], None]
Announcement = Literal["text", "json", "none"]
"""How to tell on standard output what was decided."""
LOG_TAIL_LINES = 20
SIGNALS_EVERY_S = 0.2
PID_WITHIN_S = 5.0
"""After an interruption: how long the engine, just born, may take to say who it is."""


def serve_here(settings: Settings, announcement: Announcement) -> int:
    """Serve the mount in this process until it ends; systemd is told (``Type=notify``)."""
    _prepare(settings)
    why = _why_python(settings)
    if why is None:
        _make_state_dir(settings)
        native.become_front(settings, announcement=announcement)

    def on_ready(decided: dict[str, Any]) -> None:
        remember(settings)
        notify.sd_notify(f"READY=1\nMAINPID={os.getpid()}\nSTATUS={settings.source} on {settings.mountpoint}")
        announce(settings, decided, announcement)

    return serve_engine(settings, on_ready, stderr=True, why=why or "")


def _why_python(settings: Settings) -> str | None:
    """Why pyfuse3 is to drive the mount; None: the native front does. Raises ``MountError``."""
    if settings.front == "python":
        return "asked for"
    why = native.why_not()
    if why is not None and settings.front == "native":
        raise MountError(f"--front native: {why}; use --front python or auto")
    return why


def serve_detached(settings: Settings, announcement: Announcement) -> int:
    """Serve the mount in a process of its own; returns when it is ready. Raises what kept it from that."""
    _prepare(settings)
    why = _why_python(settings)
    _make_state_dir(settings)
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _become_daemon(settings, writer, why)
    os.close(writer)
    return _await(settings, child, reader, announcement)


def _prepare(settings: Settings) -> None:
    mounted = mountpoint.mount_at(settings.mountpoint)
    try:
        mountpoint.prepare(settings.mountpoint)
    except MountError as error:
        if mounted is not None:
            raise exit_codes.Busy(str(error)) from None
        raise


def warn_of_large_tiers(settings: Settings) -> None:
    """Tell if a tier's file system is smaller than the tier is meant to be: it works, and never fills."""
    for tier in settings.tiers:
        if tier.path is None:
            continue
        path = tier.path
        while not os.path.isdir(path) and path != "/":
            path = os.path.dirname(path)
        info = os.statvfs(path)
        total_bytes = info.f_blocks * info.f_frsize
        if tier.capacity_bytes > total_bytes:
            output.say(
                f"tier {tier.path}: {output.size(tier.capacity_bytes)} asked for, but its file system holds "
                f"{output.size(total_bytes)} in all"
            )


def _make_state_dir(settings: Settings) -> None:
    try:
        os.makedirs(settings.state_dir, mode=0o700, exist_ok=True)
    except OSError as error:
        raise MountError(f"state_dir: cannot make {settings.state_dir}: {error.strerror}") from error


class _Reports:
    """What the engine tells before the mount is ready, line by line. ``pid``: its own, once it has told."""

    def __init__(self, reader: int) -> None:
        self._reader = reader
        self._pending = b""
        self.pid = 0

    def next(self, limit_s: float = float("inf")) -> dict[str, Any] | None:
        """The next message; None at the end, or after that time.

        It never waits long in one system call: a signal that comes just before such a call is noticed only
        when that returns.
        """
        stop_s = time.monotonic() + limit_s
        while b"\n" not in self._pending:
            if time.monotonic() > stop_s:
                return None
            if select.select([self._reader], [], [], SIGNALS_EVERY_S)[0]:
                data = os.read(self._reader, 1 << 16)
                if not data:
                    return None
                self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        message: dict[str, Any] = json.loads(line.decode("utf-8", "surrogateescape"))
        self.pid = message.get("pid", self.pid)
        return message


def _await(settings: Settings, child: int, reader: int, announcement: Announcement) -> int:
    """Read the engine's messages until it is ready or has failed. ``child``: its parent, which ends soon."""
    reports = _Reports(reader)
    try:
        os.waitpid(child, 0)
        while (message := reports.next()) is not None:
            if "ready" in message:
                announce(settings, message["ready"], announcement)
                return exit_codes.OK
            if "error" in message:
                output.say(message["error"])
                return int(message["code"])
    except KeyboardInterrupt:
        while not reports.pid and reports.next(PID_WITHIN_S) is not None:
            pass
        if reports.pid:
            os.kill(reports.pid, signal.SIGTERM)
        raise
    finally:
        os.close(reader)
    output.say("the engine ended before the mount was ready; the end of its log:")
    for line in _tail(Path(settings.log_path)):
        print(line, file=sys.stderr)
    return exit_codes.FAILED


def _tail(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", "replace").splitlines()[-LOG_TAIL_LINES:]
    except OSError:
        return []


def _become_daemon(settings: Settings, writer: int, why: str | None) -> NoReturn:
    """In the first child: detach, serve, and leave without the exit handlers of the command."""
    code = exit_codes.FAILED
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.chdir("/")
        _redirect(settings, writer)
        if why is None:
            native.become_front(settings, report=writer, announcement="none")

        def on_ready(decided: dict[str, Any]) -> None:
            remember(settings)
            tell(writer, {"ready": decided})
            os.close(writer)

        tell(writer, {"pid": os.getpid()})
        try:
            code = serve_engine(settings, on_ready, stderr=False, why=why or "")
        except TierfsError as error:
            code = exit_codes.code_of(error)
            tell(writer, {"error": str(error), "code": code})
    except BaseException:
        traceback.print_exc()  # into the log, or to the terminal as long as there is none
    finally:
        os._exit(code)


def tell(writer: int, message: dict[str, Any]) -> None:
    """One message for the command that waits."""
    data = (json.dumps(message) + "\n").encode()
    try:
        while data:
            data = data[os.write(writer, data) :]
    except OSError:
        pass  # nobody waits any more: the command was interrupted


def _redirect(settings: Settings, keep: int) -> None:
    """Standard input from nowhere, output and errors to the log; everything else but ``keep`` closed."""
    null = os.open(os.devnull, os.O_RDWR)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    log = os.open(settings.log_path, flags, 0o600)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    inherited = [int(name) for name in os.listdir("/proc/self/fd")]
    for descriptor in inherited:
        if descriptor > 2 and descriptor != keep:
            try:
                os.close(descriptor)
            except OSError:
                pass


def serve_engine(
    settings: Settings, on_ready: OnReady, *, stderr: bool, under_front: bool = False, why: str = ""
) -> int:
    """What every engine process does, attached or not. ``why``: of the Python front."""
    import faulthandler
    import resource

    from tierfs import log

    os.umask(0o022)  # for objects in a directory; what is private is made with its own mode
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    faulthandler.enable()
    _make_state_dir(settings)
    try:
        log.configure(level=settings.log_level, file=Path(settings.log_path), stderr=stderr)
    except OSError as error:
        raise MountError(f"state_dir: cannot write {settings.log_path}: {error.strerror}") from error
    logger = log.get_logger("tierfs.engine")
    try:
        import tierfs.mount

        code = tierfs.mount.run(settings, on_ready=on_ready, under_front=under_front, why=why)
    except TierfsError as error:
        logger.error("cannot serve the mount", source=settings.source, reason=str(error))
        if isinstance(error, StoreError) and settings.source not in str(error):
            error.args = (f"{settings.source}: {error}",)
        if isinstance(error, MountError):
            error.args = ("; ".join([str(error), *_obstacles(settings)]),)
        raise
    except KeyboardInterrupt:
        logger.warning("interrupted")
        return exit_codes.INTERRUPTED
    except Exception:
        logger.exception("unexpected exception")
        raise MountError(f"internal error; {settings.log_path} has the details") from None
    logger.info("the engine ends", code=code)
    return code


def _obstacles(settings: Settings) -> list[str]:
    """What ``tierfs doctor`` would find in the way of any mount: the kernel itself only says "refused"."""
    from tierfs.cli import checks

    results = [check() for check in (checks.fuse_device, checks.fuse_helper, checks.privileges)]
    found = [f"{result.found}: {result.advice}" for result in results if result.level == "blocks"]
    if settings.allow_other and (result := checks.user_allow_other()).level != "ok":
        found.append(f"allow_other: {result.found}: {result.advice}")
    return found


def remember(settings: Settings) -> None:
    """What the next mount of this source has to know, and ``meta drain``."""
    remember_capacities(settings)
    remembered.write(settings)


def announce(settings: Settings, decided: dict[str, Any], announcement: Announcement) -> None:
    """Tell on standard output what was decided."""
    if announcement == "json":
        output.show_json(_decided_json(settings, decided))
    elif announcement == "text":
        _print_decided(settings, decided)
    sys.stdout.flush()


def _decided_json(settings: Settings, decided: dict[str, Any]) -> dict[str, Any]:
    """What ``mount --json`` prints: the main settings and what the engine made of them."""
    return {
        "source": settings.source,
        "mountpoint": settings.mountpoint,
        "mount_id": settings.mount_id,
        "state_dir": settings.state_dir,
        "log": settings.log_path,
        "read_only": settings.read_only,
        "allow_other": settings.allow_other,
        **decided,
    }


def _print_decided(settings: Settings, decided: dict[str, Any]) -> None:
    """Tell what was decided, and why."""
    access = "read-only" if settings.read_only else "read-write"
    visible = "all users" if settings.allow_other else "this user only"
    print(f"{settings.source} is mounted on {settings.mountpoint} ({access}, visible to {visible})")
    for tier in decided.get("tiers", []):
        print(f"  tier   {tier['name']:6} {output.size(tier['capacity_bytes']):>10}  {tier['path']}")
    if not decided.get("tiers"):
        print("  tier   none: every read goes to the store")
    front = decided.get("front", {})
    print(f"  front  {front.get('kind', '?')} ({front.get('why', '?')})")
    print(f"  passthrough: {decided.get('passthrough', 'no (only the native front can)')}")
    print(f"  state  {settings.state_dir}")
    print(f"  log    {settings.log_path}, pid {decided.get('pid', '?')}")
    resumed = decided.get("resumed") or {}
    if resumed.get("files"):
        size = output.size(resumed.get("bytes", 0))
        print(f"  resumes the upload of {output.files(resumed['files'])} ({size})")
