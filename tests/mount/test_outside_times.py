"""What outside test suites found about times."""

from __future__ import annotations

import os
import time
from pathlib import Path

OLD_NS = 10**18


def test_a_touch_is_never_older_than_the_creation(workdir: Path) -> None:
    """The kernel stamps a touch, the file system a creation: both by one clock. (CPython: test_touch_common)"""
    for number in range(40):
        path = workdir / f"f{number}"
        path.touch()
        created = path.stat()
        os.utime(path, ns=(OLD_NS, OLD_NS))
        path.touch()
        touched = path.stat()
        assert touched.st_mtime_ns >= created.st_mtime_ns
        assert touched.st_ctime_ns >= created.st_ctime_ns
        time.sleep(0.001)


def test_a_write_is_never_older_than_a_creation_before_it(workdir: Path) -> None:
    for number in range(20):
        path = workdir / f"f{number}"
        path.touch()
        created_ns = path.stat().st_mtime_ns
        path.write_bytes(b"x")
        assert path.stat().st_mtime_ns >= created_ns
