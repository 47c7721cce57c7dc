"""``tierfs upgrade``: another engine under a running mount."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import IO

import pytest

from tests.support.mount import Mounted, native_missing

pytestmark = [
    pytest.mark.needs_fuse,
    pytest.mark.skipif(
        bool(native_missing()) and not os.environ.get("TIERFS_NEED_NATIVE"), reason=str(native_missing())
    ),
]


def test_applications_notice_nothing(base_dir: Path) -> None:
    mounted = Mounted(base_dir / "m", front="native").start()
    failures: list[Exception] = []
    stop = threading.Event()

    def work(open_file: IO[bytes]) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                path = mounted.path / f"f{number % 7}"
                path.write_bytes(b"%d" % number)
                assert path.read_bytes() == b"%d" % number
                open_file.write(b"x")
            except Exception as error:
                failures.append(error)
                return

    try:
        with (mounted.path / "open").open("wb", buffering=0) as open_file:
            worker = threading.Thread(target=work, args=[open_file])
            worker.start()
            try:
                before = json.loads(mounted.cli("status", "--json", str(mounted.path)).stdout)
                said = json.loads(mounted.cli("upgrade", "--json", str(mounted.path)).stdout)
                after = json.loads(mounted.cli("status", "--json", str(mounted.path)).stdout)
            finally:
                stop.set()
                worker.join(30)
            written = os.fstat(open_file.fileno()).st_size
        assert failures == []
        assert before["front"]["pid"] == after["front"]["pid"]
        assert said["pid"] != before["front"]["pid"]
        assert (before["front"]["engine_starts"], after["front"]["engine_starts"]) == (1, 2)
        mounted.umount()
        assert (mounted.store_dir / "open").read_bytes() == b"x" * written
    finally:
        mounted.close()


def test_the_python_front_says_that_it_cannot(base_dir: Path) -> None:
    mounted = Mounted(base_dir / "m", front="python").start()
    try:
        answer = mounted.cli("upgrade", str(mounted.path), check=False)
        assert answer.returncode != 0
        assert "native front" in answer.stderr
        assert mounted.path.is_mount()
    finally:
        mounted.close()
