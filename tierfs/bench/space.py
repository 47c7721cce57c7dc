"""Is there room for what would be written?"""

from __future__ import annotations

import os

from tierfs.errors import ConfigError

FREE_SHARE = 0.9
"""Never more than this share of what is free: a full disk measures nothing and hurts others."""


def check(path: str, needed_bytes: int) -> None:
    """Raises ConfigError, with both figures. A file system that tells no size is believed to have room."""
    try:
        stat = os.statvfs(path)
    except OSError as error:
        raise ConfigError(f"TARGET: {path}: {error.strerror}") from error
    free_bytes = stat.f_bavail * stat.f_frsize
    if stat.f_blocks and needed_bytes > free_bytes * FREE_SHARE:
        raise ConfigError(
            f"TARGET: {path} has {free_bytes / 1024**2:,.0f} MiB free, and up to "
            f"{needed_bytes / 1024**2:,.0f} MiB would be written: give --size"
        )
