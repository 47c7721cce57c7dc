"""Memory, the disk of the node, the store: how far written bytes have come, and what a power cut leaves of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.lossy_disk import LossyDisk
from tests.support.mount import Mounted, MountFactory, wait_until

pytestmark = pytest.mark.usefixtures("needs_mount")
MIB = 1024 * 1024
DATA = os.urandom(3 * MIB + 5)


@pytest.fixture
def disk(base_dir: Path) -> Iterator[LossyDisk]:
    disk = LossyDisk(base_dir / "lossy")
    yield disk
    disk.close()


def files_at(mounted: Mounted) -> dict[str, int]:
    stages: dict[str, Any] = mounted.status()["stages"]
    return {name: stages[name]["files"] for name in ("memory", "disk", "uploading")}


@pytest.mark.semantics(
    "S-DUR-7",
    "A file that has been closed is put on this node's disk within seconds, without `fsync` and whatever the store does; `tierfs status` says how much is only in memory.",
)
def test_closed_files_survive_a_power_cut_while_the_store_is_down(
    mount_factory: MountFactory, disk: LossyDisk
) -> None:
    mounted = mount_factory.prepare(options=("--upload-delay", "0.1", "--store-timeout", "1"))
    mounted.state_dir = disk.mountpoint / "state"
    mounted.tiers = (f"{disk.mountpoint / 'tier'}:1G",)
    mounted.start()
    mounted.fail({"kind": "outage"})
    (mounted.path / "a").write_bytes(DATA)
    (mounted.path / "b").write_bytes(b"small")
    os.rename(mounted.path / "b", mounted.path / "c")
    wait_until(lambda: files_at(mounted) == {"memory": 0, "disk": 2, "uploading": 0}, "both on the disk")
    log = os.open(mounted.path / "log", os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        for line in (b"line 1", b", line 2"):
            os.write(log, line)
            os.fsync(log)
        mounted.kill9()
    finally:
        with contextlib.suppress(OSError):  # the mount is dead
            os.close(log)
    disk.cut(seed=3)
    mounted.heal()
    mounted.start()
    assert (mounted.path / "a").read_bytes() == DATA
    assert (mounted.path / "c").read_bytes() == b"small"
    assert (mounted.path / "log").read_bytes() == b"line 1, line 2"
    mounted.flush()
    assert (mounted.store_dir / "a").read_bytes() == DATA
    assert (mounted.store_dir / "c").read_bytes() == b"small"
    mounted.umount()


def test_every_stage_is_told(mount_factory: MountFactory) -> None:
    mounted = mount_factory(options=("--upload-delay", "0.1"))
    (mounted.path / "warm").write_bytes(b"x")
    mounted.flush()
    assert mounted.status()["stages"]["store"] == {"files": 1, "bytes": 1}
    wait_until(lambda: files_at(mounted) == {"memory": 0, "disk": 0, "uploading": 0}, "the first to be clean")
    mounted.fail({"kind": "block", "operation": "put"})
    with open(mounted.path / "open", "wb", buffering=0) as file:
        writer = file.fileno()
        file.write(DATA)
        # What is passed through is noticed a moment later.
        wait_until(lambda: files_at(mounted)["memory"] == 1, "the write to be noticed")
        stages = mounted.status()["stages"]
        assert stages["memory"]["bytes"] >= len(DATA)
        assert stages["disk"] == {"files": 0, "bytes": 0}
        assert "only in memory (1 file)" in mounted.cli("status", str(mounted.path)).stdout
        os.fsync(writer)
        wait_until(
            lambda: files_at(mounted) == {"memory": 0, "disk": 1, "uploading": 0}, "the fsync to count"
        )
        os.pwrite(writer, b"again", 100)
        wait_until(lambda: files_at(mounted)["memory"] == 1, "the second write to be noticed")
    wait_until(lambda: files_at(mounted) == {"memory": 0, "disk": 1, "uploading": 1}, "the upload to hang")
    assert mounted.status()["stages"]["uploading"]["bytes"] == len(DATA)
    mounted.heal()
    mounted.flush()
    wait_until(lambda: files_at(mounted) == {"memory": 0, "disk": 0, "uploading": 0}, "all to be clean")
    assert mounted.status()["stages"]["store"] == {"files": 2, "bytes": 1 + len(DATA)}
    assert "stages" not in mounted.cli("status", str(mounted.path)).stdout
