"""Cases C25 to C28: who may read, honest warm-up, honest numbers, busy unmounts."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.support.mount import Mounted, MountFactory, mount_entry, wait_until
from tests.support.posix import as_user, errno_of

MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("needs_mount")
OWNER, STRANGER = (23001, 23002), (23003, 23004)


@pytest.mark.semantics(
    "S-META-6",
    "Objects without a mode appear as 0644, directories as 0755, of the user who mounted, less the mask given with `--umask`.",
)
def test_c25_owner_group_and_mask_as_configured(mount_factory: MountFactory) -> None:
    if os.geteuid() != 0:
        pytest.skip("acting as other users needs root")
    options = ("--allow-other", "--uid", str(OWNER[0]), "--gid", str(OWNER[1]), "--umask", "027")
    mounted = mount_factory.prepare(options=options)
    (mounted.store_dir / "d").mkdir()
    (mounted.store_dir / "d" / "f").write_bytes(b"content")
    mounted.start()
    for path, mode in ((mounted.path / "d", 0o750), (mounted.path / "d" / "f", 0o640)):
        found = os.stat(path) if path.name == "d" else as_user(*OWNER, lambda path=path: os.stat(path))
        assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (*OWNER, mode)

    def as_owner() -> None:
        here = mounted.path / "d"
        assert (here / "f").read_bytes() == b"content"
        (here / "new").write_bytes(b"1")
        os.utime(here / "f", ns=(10**18, 10**18))
        os.chmod(here / "f", 0o600)
        os.mkdir(here / "sub")
        shutil.copy2(here / "f", here / "copy")
        assert os.stat(here / "copy").st_mtime_ns == 10**18

    as_user(*OWNER, as_owner)
    assert as_user(*STRANGER, lambda: errno_of(lambda: os.listdir(mounted.path / "d"))) == errno.EACCES
    assert as_user(*STRANGER, lambda: errno_of((mounted.path / "d" / "new").read_bytes)) == errno.EACCES
    assert as_user(*STRANGER, lambda: errno_of(lambda: os.mkdir(mounted.path / "d" / "x"))) == errno.EACCES


def test_c25_defaults_without_options(mount_factory: MountFactory) -> None:
    mounted = mount_factory.prepare()
    (mounted.store_dir / "d").mkdir()
    (mounted.store_dir / "d" / "f").write_bytes(b"x")
    mounted.start()
    assert stat.S_IMODE(os.stat(mounted.path / "d" / "f").st_mode) == 0o644
    assert stat.S_IMODE(os.stat(mounted.path / "d").st_mode) == 0o755
    assert os.stat(mounted.path / "d" / "f").st_uid == os.geteuid()
    if os.geteuid() == 0:
        assert as_user(*STRANGER, (mounted.path / "d" / "f").read_bytes) == b"x"
        assert as_user(*STRANGER, lambda: errno_of(lambda: os.mkdir(mounted.path / "x"))) == errno.EACCES


def prefetch(mounted: Mounted, *arguments: str) -> tuple[int, dict[str, object]]:
    answer = mounted.cli("prefetch", *arguments, "--wait", "--json", check=False)
    assert answer.stdout, answer.stderr
    return answer.returncode, json.loads(answer.stdout)


def check_sum(report: dict[str, object]) -> None:
    parts = [report[name] for name in ("cached_bytes", "failed_bytes", "evicted_bytes", "skipped_bytes")]
    assert sum(parts) == report["total_bytes"]  # type: ignore[arg-type]


def make_files(mounted: Mounted, count: int, size: int) -> None:
    (mounted.store_dir / "p").mkdir()
    for i in range(count):
        (mounted.store_dir / "p" / f"f{i:03}").write_bytes(bytes([i % 256]) * size)


def test_c26_what_is_reported_cached_is_read_with_the_network_off(mount_factory: MountFactory) -> None:
    mounted = mount_factory.prepare(options=("--store-timeout", "1"))
    make_files(mounted, 20, 500_000)
    mounted.start()
    code, report = prefetch(mounted, str(mounted.path / "p"))
    assert code == 0
    assert report["cached_bytes"] == report["total_bytes"] == 20 * 500_000
    assert report["total_files"] == 20
    mounted.fail({"kind": "outage"})
    for i in range(20):
        assert (mounted.path / "p" / f"f{i:03}").read_bytes() == bytes([i]) * 500_000


def test_c26_prefix_larger_than_the_tier(mount_factory: MountFactory) -> None:
    mounted = mount_factory.prepare()
    mounted.tiers = (f"{mounted.base / 'tier'}:16M",)
    make_files(mounted, 40, MIB)
    mounted.start()
    _, report = prefetch(mounted, str(mounted.path / "p"))
    check_sum(report)
    assert report["total_bytes"] == 40 * MIB
    assert int(str(report["cached_bytes"])) <= 16 * MIB


def test_c26_missing_path_and_failing_gets(mount_factory: MountFactory) -> None:
    mounted = mount_factory.prepare(options=("--store-timeout", "1"))
    make_files(mounted, 20, 300_000)
    mounted.start()
    answer = mounted.cli("prefetch", str(mounted.path / "nowhere"), "--wait", check=False)
    assert answer.returncode != 0
    assert "nowhere" in answer.stdout + answer.stderr
    mounted.fail({"kind": "access_denied", "operation": "get", "key": "p/f00[37]"})
    code, report = prefetch(mounted, str(mounted.path / "p"))
    assert code != 0
    check_sum(report)
    assert report["failed_bytes"] == 2 * 300_000


def test_c27_numbers_stay_true_after_many_overwrites(mount_factory: MountFactory) -> None:
    mounted = mount_factory(options=("--upload-delay", "0"))
    size = 4 * MIB
    for i in range(12):
        (mounted.path / "f").write_bytes(bytes([i]) * size)
        mounted.flush()
    (tier,) = mounted.status()["tiers"]
    on_disk = sum(
        p.stat().st_blocks * 512
        for p in (mounted.base / "tier").rglob("*")
        if p.is_file() and ".lmdb" not in p.parent.name and not p.name.endswith((".mdb", "lock"))
    )
    assert tier["used_bytes"] <= size + MIB
    assert abs(tier["used_bytes"] - on_disk) <= 128 * 1024 + 8192
    assert tier["dirty_bytes"] == 0
    found = os.statvfs(mounted.path)
    assert 0 < found.f_bavail <= found.f_bfree <= found.f_blocks
    os.unlink(mounted.path / "f")
    mounted.flush()
    wait_until(lambda: mounted.status()["tiers"][0]["used_bytes"] == 0, "the tier to be empty", 20)


def test_c28_busy_unmount_and_what_is_left_of_it(mounted: Mounted) -> None:
    """A shell that sits in the mount is named; ``--lazy`` detaches; no process stays."""
    shell = subprocess.Popen(["sleep", "600"], cwd=mounted.path)
    try:
        answer = mounted.cli("umount", str(mounted.path), check=False)
        assert answer.returncode != 0
        assert str(shell.pid) in answer.stdout + answer.stderr
        assert mount_entry(mounted.path) is not None
        mounted.cli("umount", "--lazy", str(mounted.path))
        assert mount_entry(mounted.path) is None
    finally:
        shell.kill()
        shell.wait()
    assert mounted.process is not None
    assert mounted.process.wait(60) == 0
    mounted.process = None


def test_c28_store_that_is_down_leaves_no_mount(mount_factory: MountFactory) -> None:
    mounted = mount_factory.prepare(options=("--store-timeout", "1"))
    mounted.fail({"kind": "outage"})
    answer = subprocess.run(
        mounted.arguments(),
        env=mounted.process_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert answer.returncode != 0
    assert answer.stderr.strip()
    assert mount_entry(mounted.path) is None
    assert not list(Path(mounted.base / "run").glob("*.json"))
