"""Which run of the machine this is: what was not synced is only believed within one run.

``TIERFS_BOOT_ID`` in the environment takes its place, so that a test can follow a simulated power cut by
"another boot" without one. The native front knows only the kernel's: with another one it leaves reading of
tiers to the engine.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

ENVIRONMENT: Final = "TIERFS_BOOT_ID"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> bytes:
    """Names this boot of the kernel."""
    told = os.environ.get(ENVIRONMENT)
    if told:
        return told.encode()
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return b"unknown"
