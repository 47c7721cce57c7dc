"""How requests reach the native front: through /dev/fuse, or through io_uring, and why."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from tierfs.config import Settings
from tierfs.mount.channel import FrontCounts

PARAMETER = Path("/sys/module/fuse/parameters/enable_uring")


def is_ring_wanted(settings: Settings) -> bool:
    """``auto`` is /dev/fuse: see ``benchmarks/front/transport.py``, and why in ``ARCHITECTURE.md``."""
    return settings.fuse_uring == "on"


def kind_of(counts: FrontCounts) -> str:
    """``io_uring`` or ``device``."""
    return "io_uring" if counts.ring else "device"


def why(settings: Settings, counts: FrontCounts) -> str:
    """The reason, for a person."""
    if counts.ring:
        return f"--fuse-uring on; {counts.ring_depth} requests at a time on each CPU"
    if settings.fuse_uring == "off":
        return "--fuse-uring off"
    if settings.fuse_uring == "auto":
        return "--fuse-uring auto: in io_uring what waits for the store holds up what is local"
    if counts.ring_errno == errno.EOPNOTSUPP:
        return f"this kernel does not offer io_uring: {_state_of_parameter()}"
    if counts.ring_errno == errno.E2BIG:
        return "this machine has too many CPUs: the payloads of so many queues would take too much memory"
    if counts.ring_errno:
        return f"io_uring could not be set up: {os.strerror(counts.ring_errno)}"
    return "the kernel has not answered yet"


def _state_of_parameter() -> str:
    try:
        return f"{PARAMETER} is {PARAMETER.read_text().strip()}"
    except OSError:
        return "it is older than Linux 6.14, or built without it"
