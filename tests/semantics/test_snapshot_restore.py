"""The promises about restoring and cloning snapshots, on a mount."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.mount import Mounted, MountFactory, files_below, opened, tierfs_command, wait_until
from tests.support.sequence import tree_state

semantics = pytest.mark.semantics
needs_mount = pytest.mark.usefixtures("needs_mount")


def snapshot(mounted: Mounted, name: str, directory: str = "") -> Path:
    made = mounted.json("snapshot", "create", str(mounted.path / directory), "--name", name)
    return Path(made["snapshot"]["location"])


def restore(mounted: Mounted, name: str, directory: str = "", *options: str) -> dict[str, Any]:
    reply: dict[str, Any] = mounted.json(
        "snapshot", "restore", str(mounted.path / directory), "--name", name, *options
    )
    return reply


def requests(mounted: Mounted) -> dict[str, int]:
    found: dict[str, int] = mounted.status()["store"]["requests"]
    return found


def make_tree(top: Path) -> None:
    """One of everything."""
    os.makedirs(top / "d" / "e")
    (top / "d" / "f").write_bytes(b"bytes" * 1000)
    (top / "d" / "e" / "g").write_bytes(os.urandom(300_000))
    (top / "same").write_bytes(b"same")
    (top / "empty").write_bytes(b"")
    os.link(top / "d" / "f", top / "second")
    os.symlink("d/f", top / "link")
    os.mkfifo(top / "fifo")
    os.setxattr(top / "d" / "f", "user.a", b"old")
    os.chmod(top / "d" / "f", 0o640)
    os.chown(top / "d" / "e" / "g", 12, 34)
    os.chmod(top / "d" / "e", 0o700)
    os.utime(top / "d" / "f", ns=(10**18 + 1, 10**18 + 2))
    os.utime(top / "d" / "e", ns=(10**18 + 3, 10**18 + 4))


def times(top: Path) -> dict[str, int]:
    return {str(path.relative_to(top)): os.lstat(path).st_mtime_ns for path in sorted([top, *top.rglob("*")])}


@needs_mount
@semantics(
    "S-SNAP-9",
    "`tierfs snapshot restore` gives a directory, or the mount, the names, types, bytes, modes, owners, times, extended attributes, link targets and hard links again that it had when the snapshot was made; change times are those of the restore, what is the same keeps its inode, and what was there before is the snapshot `before-restore-...`, unless `--no-backup` says otherwise.",
)
def test_a_restored_directory(mount_factory: MountFactory) -> None:
    mounted = mount_factory()
    top = mounted.path
    make_tree(top)
    before, mtimes = tree_state(top), times(top)
    same = os.stat(top / "same").st_ino
    snapshot(mounted, "one")
    os.unlink(top / "link")
    os.symlink("elsewhere", top / "link")
    os.setxattr(top / "d" / "f", "user.a", b"new")
    os.setxattr(top / "same", "user.b", b"new")
    os.chmod(top / "same", 0o600)
    os.rename(top / "d" / "e", top / "moved")
    os.unlink(top / "second")
    (top / "second").mkdir()
    (top / "second" / "below").write_bytes(b"below")
    (top / "empty").write_bytes(b"not empty")
    changed = tree_state(top)
    reply = restore(mounted, "one")
    assert tree_state(top) == before
    assert times(top) == mtimes
    assert os.stat(top / "same").st_ino == same
    assert reply["missing_count"] == 0
    mounted.flush()
    assert tree_state(top) == before
    assert tree_state(top / ".tierfs" / "snapshots" / reply["backup"]) == changed
    again = restore(mounted, "one")
    assert [again[name] for name in ("made", "replaced", "removed", "changed", "backup")] == [
        0,
        0,
        0,
        0,
        None,
    ]
    (top / "same").write_bytes(b"other")
    assert restore(mounted, "one", "", "--no-backup")["backup"] is None
    names = [found["name"] for found in mounted.json("snapshot", "list", str(top))["snapshots"]]
    assert names == ["one", reply["backup"]]
    mounted.flush()
    assert (mounted.store_dir / "d" / "e" / "g").read_bytes() == (top / "d" / "e" / "g").read_bytes()
    assert not (mounted.store_dir / "moved").exists()
    mounted.remount()
    assert tree_state(top) == before


@needs_mount
@semantics(
    "S-SNAP-10",
    "A restore that changes at most 1,000 names and attributes becomes visible at one moment, a larger one name by name; at any time a file is the old one or the new one as a whole, and who has one open keeps the bytes that it had.",
)
def test_what_is_seen_of_a_restore(mount_factory: MountFactory) -> None:
    mounted = mount_factory()
    top = mounted.path
    for number in range(20):
        (top / f"f{number}").write_bytes(b"old" * 50_000)
    snapshot(mounted, "one")
    for number in range(20):
        (top / f"f{number}").write_bytes(b"newer" * 50_000)
    mounted.flush()
    with opened(top / "f1") as fd:
        assert os.pread(fd, 5, 0) == b"newer"
        reply = restore(mounted, "one")
        assert (reply["replaced"], reply["atomic"]) == (20, True)
        assert os.pread(fd, 250_000, 0) == b"newer" * 50_000
        mounted.flush()
        assert os.pread(fd, 250_000, 0) == b"newer" * 50_000
        assert (top / "f1").read_bytes() == b"old" * 50_000
    with opened(top / "f2", os.O_RDWR) as fd:
        os.pwrite(fd, b"x", 0)
        refused = mounted.cli("snapshot", "restore", str(top), "--name", "one", check=False)
        assert refused.returncode == 4
        assert "1 files are open for writing (/f2)" in refused.stderr
        restore(mounted, "one", "", "--force")
    assert (top / "f2").read_bytes() == b"old" * 50_000


@needs_mount
@semantics(
    "S-SNAP-11",
    "`tierfs snapshot clone` makes a copy that appears at one moment, complete, and can be written; no change of the copy is seen in the snapshot or in the original, nor the other way round.",
)
def test_a_clone(mount_factory: MountFactory) -> None:
    mounted = mount_factory()
    top = mounted.path
    os.mkdir(top / "top")
    make_tree(top / "top")
    before = tree_state(top / "top")
    here = snapshot(mounted, "one", "top")
    mounted.json("snapshot", "clone", "one", str(top / "copy"))
    assert tree_state(top / "copy") == before
    assert stat.S_IMODE(os.stat(top / "copy").st_mode) == stat.S_IMODE(os.stat(top / "top").st_mode)
    with opened(top / "copy" / "d" / "e" / "g", os.O_RDWR) as fd:
        os.pwrite(fd, b"patched", 100_000)
    (top / "top" / "same").write_bytes(b"changed")
    (top / "copy" / "new").write_bytes(b"new")
    os.unlink(top / "copy" / "second")
    for _ in range(2):
        assert tree_state(here) == before
        assert (top / "copy" / "same").read_bytes() == b"same"
        assert (top / "top" / "d" / "e" / "g").read_bytes()[100_000:100_007] != b"patched"
        assert not (top / "top" / "new").exists()
        mounted.flush()
    taken = mounted.cli("snapshot", "clone", "one", str(top / "copy"), check=False)
    assert taken.returncode == 1
    assert "/copy exists already" in taken.stderr
    mounted.json("snapshot", "clone", "one/d/e", str(top / "part"))
    assert files_below(top / "part") == files_below(here / "d" / "e")


@needs_mount
@semantics(
    "S-SNAP-12",
    "Restoring and cloning move no file data through the node: the files can be read through the mount at once, and get objects of their own under their own paths by copies on the server, in the background.",
)
def test_no_data_move(mount_factory: MountFactory) -> None:
    mounted = mount_factory()
    top = mounted.path
    os.mkdir(top / "d")
    data = {f"f{number}": os.urandom(200_000) for number in range(8)}
    for name, content in data.items():
        (top / "d" / name).write_bytes(content)
    snapshot(mounted, "one")
    for name in data:
        os.unlink(top / "d" / name)
    mounted.flush()
    earlier = requests(mounted)
    mounted.json("snapshot", "restore", str(top), "--name", "one")
    mounted.json("snapshot", "clone", "one", str(top / "copy"))
    mounted.flush()
    later = requests(mounted)
    assert later["copy"] - earlier.get("copy", 0) >= 16
    assert {name: later.get(name, 0) - earlier.get(name, 0) for name in later if "get" in name} in (
        {},
        {"get": 0},
    )
    assert files_below(mounted.store_dir / "d") == files_below(mounted.store_dir / "copy" / "d") == data
    assert files_below(top / "d") == files_below(top / "copy" / "d") == data


@needs_mount
@semantics(
    "S-SNAP-14",
    "Deleting a snapshot takes nothing away from what was restored or cloned from it; what is kept in the bucket for that alone goes when it is not needed any more.",
)
def test_a_deleted_snapshot(mount_factory: MountFactory) -> None:
    mounted = mount_factory(options=("--upload-delay", "3600"))
    top = mounted.path
    (top / "f").write_bytes(b"bytes" * 50_000)
    snapshot(mounted, "one")
    mounted.json("snapshot", "clone", "one", str(top / "copy"))
    os.unlink(top / "f")
    mounted.json("snapshot", "delete", str(top), "--name", "one")
    assert mounted.json("snapshot", "list", str(top))["snapshots"] == []
    assert (top / "copy" / "f").read_bytes() == b"bytes" * 50_000
    mounted.flush()
    assert files_below(mounted.store_dir / "copy") == {"f": b"bytes" * 50_000}
    kept = mounted.store_dir / ".tierfs" / "snapshots"
    mounted.remount()

    def is_gone() -> bool:
        mounted.flush()
        return not kept.is_dir() or not list(kept.iterdir())

    wait_until(is_gone, "the kept objects to go")
    assert (top / "copy" / "f").read_bytes() == b"bytes" * 50_000


@needs_mount
def test_what_the_kernel_has_never_heard_of_goes_from_the_store_as_well(mount_factory: MountFactory) -> None:
    """There is no FORGET of such an inode, for which files that are open in a native front wait."""
    mounted = mount_factory(options=("--ttl", "0.2"))
    (mounted.path / "f").write_bytes(b"bytes")
    snapshot(mounted, "one")
    for number in range(300):
        (mounted.store_dir / f"g{number}").write_bytes(b"from outside")
    removed: list[int] = []

    def is_restored() -> bool:
        removed.append(restore(mounted, "one", "", "--no-backup")["removed"])
        return sum(removed) == 300

    wait_until(is_restored, "the mount to see what was put into the bucket")
    wait_until(lambda: not list(mounted.store_dir.glob("g*")), "the objects to go")


@needs_mount
def test_an_interrupted_command_and_a_killed_engine(mount_factory: MountFactory) -> None:
    """Whenever they strike, the clone is not there or complete, and the command again makes it so."""
    mounted = mount_factory()
    top = mounted.path
    os.mkdir(top / "d")
    for number in range(150):
        (top / "d" / f"f{number}").write_bytes(b"%d" % number)
    before = files_below(top / "d")
    snapshot(mounted, "one", "d")
    command = subprocess.Popen(
        [*tierfs_command(), "snapshot", "clone", "one", str(top / "copy")],
        env=mounted.process_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    jobs = mounted.state_dir / "namespace.lmdb" / "data.mdb"
    size = jobs.stat().st_mtime_ns
    wait_until(lambda: jobs.stat().st_mtime_ns != size or command.poll() is not None, "the clone to begin")
    command.send_signal(signal.SIGINT)
    command.wait()
    if mounted.status()["front"]["kind"] == "native":
        os.kill(mounted.status()["engine"]["pid"], signal.SIGKILL)
    else:
        mounted.crash_and_restart()

    def is_there() -> bool:
        # It says that there is no engine, that it exists already, or waits for what has begun.
        mounted.cli("snapshot", "clone", "one", str(top / "copy"), check=False)
        return (top / "copy").exists()

    wait_until(is_there, "the clone")
    assert files_below(top / "copy") == before
    mounted.flush()
    assert files_below(mounted.store_dir / "copy") == before
