"""Runs one script of ``loads/`` in the other environment, with a limit, and reads what it prints."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from benchmarks.compare.processes import MARK
from benchmarks.training.plan import Load

RESULT = "RESULT "
LOADS = Path(__file__).parent / "loads"
TOOLS = Path(__file__).parent / "tools"


class LoadFailed(Exception):
    """A script failed or did not end in time; the message is the end of what it said."""


def call(
    interpreter: Path, load: Load, verb: str, directory: Path, limit_s: float, give_up: Callable[[], None]
) -> dict[str, float]:
    """``make`` or ``run`` a load. ``give_up`` has to make hanging calls return. Raises LoadFailed."""
    environment = {
        **os.environ, **load.environment, "HF_HUB_OFFLINE": "1", "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join((str(TOOLS), str(interpreter.parent), os.environ.get("PATH", os.defpath))),
    }  # fmt: skip
    environment.pop(MARK, None)
    command = [str(interpreter), str(LOADS / f"{load.script}.py"), verb, str(directory)]
    process = subprocess.Popen(
        [*command, json.dumps(dict(load.scale))], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit_s)
    except BaseException as error:
        give_up()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=10)
        if isinstance(error, subprocess.TimeoutExpired):
            raise LoadFailed(f"no end within {limit_s:.0f} s; given up") from None
        raise
    if process.returncode:
        raise LoadFailed(f"exit code {process.returncode}: {last_words(output)}")
    return parse(output)


def parse(output: str) -> dict[str, float]:
    """The numbers in the last line that begins with ``RESULT``. Raises LoadFailed if there is none."""
    for line in reversed(output.splitlines()):
        if line.startswith(RESULT):
            found: dict[str, float] = json.loads(line.removeprefix(RESULT))
            return found
    raise LoadFailed(f"it printed no result: {last_words(output)}")


def last_words(output: str) -> str:
    """The last line that says something, with the rest of the end below it."""
    lines = [line for line in output.splitlines() if line.strip()]
    return "\n".join([*lines[-1:], *lines[-12:-1]])


def versions(interpreter: Path, packages: list[str]) -> dict[str, str]:
    """What is installed there; packages that are not are left out."""
    code = (
        "import importlib.metadata as m, json, sys\n"
        "found = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))\n"
    )
    done = subprocess.run(
        [str(interpreter), "-c", code, *packages], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    if done.returncode:
        raise LoadFailed(f"{interpreter} does not run: {last_words(done.stderr)}")
    found: dict[str, str] = json.loads(done.stdout)
    return found
