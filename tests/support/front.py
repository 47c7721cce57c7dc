"""The two processes of a mount with the native front: which they are, and how they are killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.support.mount import Mounted, wait_until


def engine_pid(mounted: Mounted) -> int | None:
    """The engine is the front's only child; None between two engines."""
    front = mounted.pid
    children = map(int, Path(f"/proc/{front}/task/{front}/children").read_text().split())
    return next((pid for pid in children if not is_gone(pid)), None)


def kill_engine(mounted: Mounted) -> int:
    """SIGKILL to the engine of now; returns which it was."""
    wait_until(lambda: engine_pid(mounted) is not None, "an engine")
    pid = engine_pid(mounted)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


def is_gone(pid: int) -> bool:
    """Ended, or a zombie that its parent has not looked at yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def recovery_s(mounted: Mounted, name: str) -> float:
    """How long a request takes that only an engine can answer: a directory is made and removed."""
    start = time.monotonic()
    path = mounted.path / name
    path.mkdir()
    took_s = time.monotonic() - start
    path.rmdir()
    return took_s
