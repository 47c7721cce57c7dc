"""What the figures were measured on, and with."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from tierfs.bench.result import Machine


def machine() -> Machine:
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        system=_system(),
        load=os.getloadavg()[0],
    )


def versions(*programs: str) -> dict[str, str]:
    """Of tierfs, Python, and of each of ``programs`` (``fio``...) that is installed."""
    from tierfs import __version__

    found = {"tierfs": __version__, "python": platform.python_version()}
    for program in programs:
        version = version_of(program)
        if version:
            found[program] = version
    return found


def version_of(program: str) -> str | None:
    """The first line of ``program --version``; None if it is not there or does not say."""
    path = shutil.which(program)
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=10,
            check=False,
            text=True,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = (done.stdout or done.stderr).splitlines()
    return lines[0].strip() if lines else None


def command_line() -> str:
    """The command as it was typed, as far as that can be known."""
    import shlex

    program = os.path.basename(sys.argv[0]) if sys.argv else ""
    if program in ("", "__main__.py"):
        program = "tierfs"
    return shlex.join([program, *sys.argv[1:]])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine() or "unknown"


def _system() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()
