"""The native front of a mount, and the engine as its child.

``tierfs mount`` becomes the front (exec), which starts ``python -m tierfs.cli.native STATE_DIR``, and again
whenever that dies. The settings reach it in a file of the state directory: what a command line once said must
not change under a running mount. Credentials are not among them; they come from the environment, which is
inherited.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from tierfs import notify
from tierfs.cli import exit_codes, remembered
from tierfs.config import Settings
from tierfs.errors import MountError, TierfsError

ANNOUNCEMENT = "TIERFS_ANNOUNCEMENT"
REPORT_FD = 5
"""Where the first engine of a mount says how it went; see ``launch``."""
OLDEST_KERNEL = (5, 4)
WORKERS = 2
"""Threads of the front that read requests: more of them on one descriptor wake each other up for nothing."""
_CAP_SYS_ADMIN = 21


def why_not() -> str | None:
    """Why the native front cannot serve a mount here; None: it can."""
    import tierfs_native

    missing = tierfs_native.why_missing()
    if missing is not None:
        return f"the native front is not built: {missing}"
    if not _has_capability(_CAP_SYS_ADMIN):
        return "the native front mounts by itself, which needs root (CAP_SYS_ADMIN)"
    if tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2]) < OLDEST_KERNEL:
        return f"the native front needs Linux {OLDEST_KERNEL[0]}.{OLDEST_KERNEL[1]} or newer"
    return None


def _has_capability(number: int) -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> number & 1)
    return False


def become_front(settings: Settings, *, report: int | None = None, announcement: str = "none") -> NoReturn:
    """Turn this process into the front of that mount. ``report``: where the engine says how it went.

    ``announcement``: what the engine prints when it is ready. Raises ``MountError``.
    """
    import tierfs_native

    front = tierfs_native.front_path()
    if front is None:
        raise MountError("the native front is not built")
    os.environ[ANNOUNCEMENT] = announcement
    _find_this_package_again()
    remembered.write(settings)
    arguments = [str(front), "--state-dir", settings.state_dir, "--workers", str(WORKERS)]
    if report is not None:
        os.set_inheritable(report, True)
        arguments += ["--report", str(report)]
    arguments += ["--", sys.executable, "-m", "tierfs.cli.native", settings.state_dir]
    try:
        os.execv(front, arguments)
    except OSError as error:
        raise MountError(f"{front}: {error.strerror}") from error


def _find_this_package_again() -> None:
    """Let the engine import the same package, also if it is in a checkout."""
    import tierfs

    parent = Path(tierfs.__file__).parents[1]
    if parent.name not in ("site-packages", "dist-packages"):
        known = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(parent), *([known] if known else [])])


def main(arguments: Sequence[str]) -> int:
    """The engine under a front; returns the exit status."""
    from tierfs.cli import launch

    report = _report()
    announcement = os.environ.pop(ANNOUNCEMENT, "none")
    try:
        settings = remembered.read(arguments[0])

        def on_ready(decided: dict[str, Any]) -> None:
            launch.remember(settings)
            notify.sd_notify(
                f"READY=1\nMAINPID={os.getppid()}\nSTATUS={settings.source} on {settings.mountpoint}"
            )
            if report is not None:
                launch.tell(report, {"ready": decided})
                os.close(report)
            if decided["front"]["engine_starts"] == 1:
                launch.announce(settings, decided, cast(launch.Announcement, announcement))

        if report is not None:
            launch.tell(report, {"pid": os.getpid()})
        return launch.serve_engine(settings, on_ready, stderr=False, under_front=True)
    except TierfsError as error:
        code = exit_codes.code_of(error)
        if report is not None:
            launch.tell(report, {"error": str(error), "code": code})
        else:
            print(f"tierfs: {error}", file=sys.stderr)
        return code


def _report() -> int | None:
    try:
        os.fstat(REPORT_FD)
    except OSError:
        return None
    os.set_inheritable(REPORT_FD, False)
    return REPORT_FD


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
