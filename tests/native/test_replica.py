"""A dead engine's replica is the next one's."""

from __future__ import annotations

import os
import signal

from tests.support.lost_node import OUTAGE, lose, mount, recover, wait_for_replica
from tests.support.mount import MountFactory, files_below


def test_killed_engine_goes_on_with_its_replica(native_mounts: MountFactory) -> None:
    mounted = mount(native_mounts)
    mounted.fail(OUTAGE)
    (mounted.path / "f").write_bytes(b"first")
    wait_for_replica(mounted, 1)
    os.kill(mounted.status()["engine"]["pid"], signal.SIGKILL)
    (mounted.path / "f").write_bytes(b"again")
    (mounted.path / "g").write_bytes(b"new")
    wait_for_replica(mounted, 2)
    lose(mounted)
    assert recover(mounted)["files"] == 2
    assert files_below(mounted.store_dir) == {"f": b"again", "g": b"new"}
