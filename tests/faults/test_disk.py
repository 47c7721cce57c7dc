"""Tiers on a disk that is full, too small, or filled by others. Needs root for a loop device."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mount import Mounted, MountFactory
from tests.support.posix import errno_of

MIB = 1 << 20
pytestmark = [pytest.mark.usefixtures("needs_mount")]


@pytest.fixture
def small_disk(base_dir: Path) -> Iterator[Path]:
    """An ext4 file system of 96 MiB."""
    if os.geteuid() != 0:
        pytest.skip("a loop device needs root")
    image, where = base_dir / "disk.img", base_dir / "disk"
    with open(image, "wb") as file:
        file.truncate(96 * MIB)
    where.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    mounted = subprocess.run(
        ["mount", "-o", "loop", str(image), str(where)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no loop device here: {mounted.stderr.decode().strip()}")
    yield where
    for options in ([], ["-l"]):
        if subprocess.run(["umount", *options, str(where)], check=False, capture_output=True).returncode == 0:
            return


def free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def fill(path: Path, *, leave_bytes: int = 0) -> Path:
    """Somebody else takes the rest of the disk."""
    hog = path / "hog"
    handle = os.open(hog, os.O_CREAT | os.O_WRONLY)
    with contextlib.suppress(OSError):
        while free_bytes(path) > leave_bytes:
            os.write(handle, b"h" * min(MIB, max(4096, free_bytes(path) - leave_bytes)))
    os.close(handle)
    return hog


def objects(mounted: Mounted, count: int, size: int) -> dict[str, str]:
    digests = {}
    for i in range(count):
        data = hashlib.sha256(str(i).encode()).digest() * (size // 32)
        (mounted.store_dir / f"f{i}").write_bytes(data)
        digests[f"f{i}"] = hashlib.sha256(data).hexdigest()
    return digests


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def used_by(path: Path) -> int:
    return sum(p.stat().st_blocks * 512 for p in path.rglob("*") if p.is_file())


@pytest.mark.semantics("S-FAIL-4", "A full tier or a full local disk does not fail a read.")
def test_reads_go_on_when_others_fill_the_disk(mount_factory: MountFactory, small_disk: Path) -> None:
    mounted = mount_factory.prepare(tiers=(f"{small_disk / 'tier'}:64M",))
    expected = objects(mounted, 20, 8 * MIB)
    mounted.start()
    handles = []
    for i, (name, want) in enumerate(expected.items()):
        if i == 8:
            fill(small_disk)
        handles.append(os.open(mounted.path / name, os.O_RDONLY))
        assert digest(mounted.path / name) == want
    for handle in handles:
        assert len(os.pread(handle, 4096, 4 * MIB)) == 4096
        os.close(handle)
    assert used_by(small_disk / "tier") <= 64 * MIB + MIB
    (small_disk / "hog").unlink()
    assert digest(mounted.path / "f19") == expected["f19"]
    # One line per change of state, not one per read.
    assert sum("bypass" in line.lower() for line in mounted.log().splitlines()) < 20


def test_capacity_is_obeyed(mount_factory: MountFactory) -> None:
    mounted = mount_factory.prepare()
    mounted.tiers = (f"{mounted.base / 'tier'}:32M",)
    expected = objects(mounted, 12, 8 * MIB)
    mounted.start()
    for name, want in expected.items():
        assert digest(mounted.path / name) == want
        assert used_by(mounted.base / "tier" / "objects") <= 32 * MIB + 128 * 1024
    (tier,) = mounted.status()["tiers"]
    assert tier["used_bytes"] <= tier["capacity_bytes"] == 32 * MIB


def test_tier_smaller_than_one_file(mount_factory: MountFactory) -> None:
    mounted = mount_factory.prepare()
    mounted.tiers = (f"{mounted.base / 'tier'}:16M",)
    expected = objects(mounted, 2, 40 * MIB)
    mounted.start()
    for _ in range(2):
        for name, want in expected.items():
            assert digest(mounted.path / name) == want


def test_written_data_more_than_the_tier(mount_factory: MountFactory) -> None:
    """A writer is slowed down to what the store takes, not refused."""
    mounted = mount_factory.prepare(options=("--upload-delay", "0"))
    mounted.tiers = (f"{mounted.base / 'tier'}:24M",)
    mounted.start()
    digests = {}
    for i in range(10):
        data = os.urandom(6 * MIB)
        (mounted.path / f"f{i}").write_bytes(data)
        digests[f"f{i}"] = hashlib.sha256(data).hexdigest()
    mounted.flush()
    for name, want in digests.items():
        assert digest(mounted.store_dir / name) == want
        assert digest(mounted.path / name) == want


@pytest.mark.semantics(
    "S-FAIL-5", "A write fails with ENOSPC only when nothing can be uploaded or evicted to make room."
)
def test_enospc_only_when_nothing_drains(mount_factory: MountFactory) -> None:
    mounted = mount_factory.prepare(options=("--upload-delay", "0", "--store-timeout", "1"))
    mounted.tiers = (f"{mounted.base / 'tier'}:16M",)
    mounted.start()
    mounted.fail({"kind": "outage"})
    written = 0
    code = 0
    for i in range(8):
        code = errno_of(lambda i=i: (mounted.path / f"f{i}").write_bytes(b"x" * (4 * MIB)))
        if code:
            break
        written += 1
    assert code == errno.ENOSPC
    assert written >= 2
    for i in range(written):
        assert (mounted.path / f"f{i}").stat().st_size == 4 * MIB
    mounted.heal()
    mounted.flush()
    (mounted.path / "again").write_bytes(b"y" * (4 * MIB))
    mounted.flush()
    for i in range(written):
        assert (mounted.store_dir / f"f{i}").stat().st_size == 4 * MIB


def test_state_directory_on_a_full_disk(mount_factory: MountFactory, small_disk: Path) -> None:
    """Changes fail with ENOSPC or EIO, reads go on, and after room is made everything works."""
    mounted = mount_factory.prepare()
    mounted.state_dir = small_disk / "state"
    expected = objects(mounted, 3, MIB)
    mounted.start()
    assert digest(mounted.path / "f0") == expected["f0"]
    hog = fill(small_disk)
    codes = {errno_of(lambda i=i: os.mkdir(mounted.path / (f"d{i}" * 20))) for i in range(30)}
    assert codes <= {0, errno.ENOSPC, errno.EIO}
    assert digest(mounted.path / "f0") == expected["f0"]
    hog.unlink()
    mounted.expect_log("ENOSPC|No space left")
    (mounted.path / "f").write_bytes(b"works again")
    mounted.remount()
    assert (mounted.path / "f").read_bytes() == b"works again"
