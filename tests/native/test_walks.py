"""A walk through a tree costs a request for each page of a directory, not one for each file."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import pytest

from tests.support.mount import MountFactory

pytestmark = pytest.mark.needs_fuse

FILES = 400


@pytest.mark.parametrize("command", [("find", "."), ("ls", "-lR", ".")], ids=["find", "ls"])
def test_no_request_for_each_file(native_mounts: MountFactory, command: Sequence[str]) -> None:
    """ls(1) asks for a label and for access rules of every file, until it hears that there are none here."""
    mounted = native_mounts.prepare()
    for number in range(FILES):
        path = mounted.store_dir / "d" / f"{number}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    mounted.start()
    before = mounted.status()["front"]
    listed = subprocess.run(command, cwd=mounted.path, check=True, capture_output=True, text=True).stdout
    after = mounted.status()["front"]
    assert listed.count("\n") >= FILES
    assert after["answered"] + after["relayed"] - before["answered"] - before["relayed"] < FILES // 2
