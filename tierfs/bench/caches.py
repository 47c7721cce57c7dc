"""What the kernel has of a file, and making it forget.

``drop`` asks with ``posix_fadvise(POSIX_FADV_DONTNEED)`` for each file: no right is needed, and no other
program's pages go. Pages that are dirty, or that another process has mapped, stay.
"""

from __future__ import annotations

import os
from collections.abc import Iterable


def drop(paths: Iterable[str]) -> None:
    """Make the kernel forget the data of these files. Raises OSError."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def write_back(paths: Iterable[str]) -> None:
    """Wait until what was written to these files is on the device, so that it can be dropped."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
