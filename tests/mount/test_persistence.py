"""What survives a clean unmount, a killed engine, and the loss of all local state."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import stat
from pathlib import Path

import pytest

from tests.support.mount import Mounted, MountFactory, wait_until
from tests.support.sequence import tree_state
from tierfs.control.client import ControlClient
from tierfs.control.protocol import EvictRequest, FlushRequest

pytestmark = pytest.mark.usefixtures("needs_mount")


def close_dead(handle: int) -> None:
    """Close a file of a mount that has died: the flush of it finds nobody."""
    with contextlib.suppress(OSError):
        os.close(handle)


def pretend_unclean_reboot(tier: Path) -> None:
    """The tier of an ended mount looks as if the machine had lost power under it."""
    import lmdb

    with lmdb.open(str(tier / "index.lmdb"), max_dbs=8) as index:
        table = index.open_db(b"meta")
        with index.begin(write=True) as txn:
            txn.put(b"boot", b"another boot", db=table)
            txn.put(b"clean", b"0", db=table)


def populate(top: Path) -> None:
    """Some of everything."""
    for i in range(3):
        os.makedirs(top / f"d{i}" / "sub")
        for j in range(5):
            path = top / f"d{i}" / f"f{j}"
            path.write_bytes(os.urandom([0, 1, 4096, 131_072, 700_001][j]))
            os.chmod(path, [0o644, 0o600, 0o755, 0o4755, 0o444][j])
            os.utime(path, ns=(10**18 + j, 10**18 + 1000 + j))
    os.symlink("d0/f1", top / "link")
    os.symlink("nowhere", top / "dangling")
    os.link(top / "d0" / "f2", top / "d1" / "hard")
    os.mkfifo(top / "fifo", 0o640)
    os.mknod(top / "sock", stat.S_IFSOCK | 0o600)
    os.setxattr(top / "d0" / "f1", "user.colour", b"blue\0green")
    os.setxattr(top / "d0", "user.dir", b"1")
    os.truncate(top / "d2" / "f4", 5_000_000)
    if os.geteuid() == 0:
        os.chown(top / "d2", 1234, 5678)
        os.chown(top / "d2" / "f1", 1234, 5678)
    os.chmod(top / "d2", 0o2750)


def numbers(top: Path) -> dict[str, int]:
    found = {str(p.relative_to(top)): os.lstat(p) for p in top.rglob("*")}
    return {name: s.st_ino for name, s in found.items()}


def times(top: Path) -> dict[str, tuple[int, int]]:
    found = {str(p.relative_to(top)): os.lstat(p) for p in top.rglob("*")}
    return {name: (s.st_mtime_ns, s.st_ctime_ns) for name, s in found.items()}


@pytest.mark.parametrize("how", ["remount", "crash_and_restart", "flush_and_crash", "sigterm"])
@pytest.mark.semantics(
    "S-WRITE-2", "What was written and closed before the engine was killed is there after the next mount."
)
@pytest.mark.semantics("S-NAME-4", "Inode numbers are the same after every remount.")
@pytest.mark.semantics("S-META-3", "Extended attributes in the `user.` namespace survive a remount.")
def test_everything_survives(mounted: Mounted, how: str) -> None:
    populate(mounted.path)
    before = tree_state(mounted.path), numbers(mounted.path), times(mounted.path)
    if how == "flush_and_crash":
        mounted.flush()
        mounted.crash_and_restart()
    elif how == "sigterm":
        assert mounted.terminate() == 0
        mounted.start()
    else:
        getattr(mounted, how)()
    assert tree_state(mounted.path) == before[0]
    assert numbers(mounted.path) == before[1]
    assert times(mounted.path) == before[2]


def test_second_remount_changes_nothing_either(mounted: Mounted) -> None:
    populate(mounted.path)
    before = tree_state(mounted.path)
    for _ in range(2):
        mounted.remount()
        assert tree_state(mounted.path) == before
    mounted.crash_and_restart()
    assert tree_state(mounted.path) == before


@pytest.mark.semantics(
    "S-WRITE-3",
    "After its last close a file becomes one object at the same path, with the file's bytes and nothing else.",
)
def test_the_store_holds_plain_files(mounted: Mounted) -> None:
    """One file is one object at the same path; any other tool reads it."""
    populate(mounted.path)
    mounted.umount()
    for path in ("d0/f0", "d0/f1", "d1/f3", "d2/f4", "d1/f4"):
        ours = (mounted.store_dir / path).read_bytes()
        assert len(ours) in (0, 1, 131_072, 700_001, 5_000_000)
    mounted.start()
    for path in ("d0/f0", "d0/f1", "d1/f3", "d2/f4", "d1/f4"):
        assert (mounted.path / path).read_bytes() == (mounted.store_dir / path).read_bytes()


@pytest.mark.semantics(
    "S-META-1",
    "Mode, owner, group and modification time with nanoseconds survive a remount; once flushed, `tierfs import --metadata` brings them back after the loss of all local state.",
)
@pytest.mark.semantics("S-META-2", "Symbolic links, fifos, sockets and device nodes survive in the same way.")
def test_metadata_comes_back_from_the_store_alone(mount_factory: MountFactory) -> None:
    first = mount_factory()
    populate(first.path)
    before = tree_state(first.path)
    first.umount()
    second = mount_factory(source=first.source)
    second.cli("import", "--metadata", str(second.path))
    after = tree_state(second.path)
    assert set(after) == set(before)
    for name in ("d0/f1", "d1/f2", "d2", "d2/f1", "link", "dangling", "d0/f3", "fifo", "sock"):
        ours, theirs = after[name], before[name]
        assert (ours[0][0], *ours[0][2:]) == (theirs[0][0], *theirs[0][2:]), name  # all but the link count
        assert ours[1] == theirs[1], name
    for i in range(3):
        for j in range(5):
            assert os.stat(second.path / f"d{i}" / f"f{j}").st_mtime_ns in (
                10**18 + 1000 + j,
                os.stat(second.path / "d2" / "f4").st_mtime_ns,
            )


def test_orphans_are_cleaned_at_the_next_start(mounted: Mounted) -> None:
    handles = []
    for i in range(5):
        handle = os.open(mounted.path / f"f{i}", os.O_CREAT | os.O_RDWR)
        os.write(handle, os.urandom(300_000))
        os.unlink(mounted.path / f"f{i}")
        handles.append(handle)
    mounted.kill9()
    for handle in handles:
        close_dead(handle)
    mounted.start()
    assert os.listdir(mounted.path) == []
    status = mounted.status()
    assert sum(tier["dirty_bytes"] for tier in status["tiers"]) == 0
    assert status["backlog"]["files"] == 0
    mounted.umount()
    assert [p for p in mounted.store_dir.rglob("*") if p.is_file() and ".tierfs" not in p.parts] == []
    mounted.cli("meta", "check", "--state-dir", str(mounted.state_dir))


def test_fsynced_bytes_survive_a_kill_while_the_file_is_open(mounted: Mounted) -> None:
    data = os.urandom(1_500_000)
    handle = os.open(mounted.path / "f", os.O_CREAT | os.O_RDWR)
    os.write(handle, data)
    os.fsync(handle)
    mounted.kill9()
    close_dead(handle)
    mounted.start()
    assert (mounted.path / "f").read_bytes() == data
    mounted.umount()
    assert (mounted.store_dir / "f").read_bytes() == data


@pytest.mark.parametrize("change", ["overwrite", "append", "truncate", "grow"])
def test_fsynced_change_of_an_uploaded_file_survives_a_kill(mounted: Mounted, change: str) -> None:
    old = os.urandom(1_000_000)
    (mounted.path / "f").write_bytes(old)
    mounted.flush()
    mounted.remount()
    handle = os.open(mounted.path / "f", os.O_RDWR)
    expected = bytearray(old)
    if change == "overwrite":
        os.pwrite(handle, b"N" * 5000, 400_000)
        expected[400_000:405_000] = b"N" * 5000
    elif change == "append":
        os.pwrite(handle, b"N" * 5000, len(old))
        expected += b"N" * 5000
    elif change == "truncate":
        os.ftruncate(handle, 300_001)
        del expected[300_001:]
    else:
        os.ftruncate(handle, 1_400_000)
        expected += bytes(400_000)
    os.fsync(handle)
    mounted.kill9()
    close_dead(handle)
    mounted.start()
    assert (mounted.path / "f").read_bytes() == bytes(expected)
    mounted.umount()
    assert (mounted.store_dir / "f").read_bytes() == bytes(expected)


@pytest.mark.semantics("S-MOUNT-5", "After a kill or a remount the cache is still there.")
def test_cached_bytes_survive(mount_factory: MountFactory) -> None:
    """After a kill and a remount, what had been read is still read without a request for data."""
    data = os.urandom(3_000_000)
    mounted = mount_factory.prepare()
    (mounted.store_dir / "f").write_bytes(data)
    mounted.start()
    assert (mounted.path / "f").read_bytes() == data
    assert mounted.status()["store"]["bytes_read"] >= len(data)
    mounted.remount()
    assert (mounted.path / "f").read_bytes() == data
    assert mounted.status()["store"]["bytes_read"] == 0
    mounted.crash_and_restart()
    assert (mounted.path / "f").read_bytes() == data
    assert mounted.status()["store"]["bytes_read"] == 0


@pytest.mark.semantics(
    "S-READ-5",
    "Blocks that tierfs reads from the device, and every block after an unclean reboot, are checked; one whose checksum does not match is dropped and fetched again. What the kernel reads by itself, with passthrough, is not.",
)
def test_damaged_block_is_fetched_again(mount_factory: MountFactory) -> None:
    """Bytes that rot in the tier are noticed where the engine reads them, dropped and fetched again."""
    data = os.urandom(1_000_000)
    mounted = mount_factory.prepare()
    (mounted.store_dir / "f").write_bytes(data)
    mounted.start()
    assert (mounted.path / "f").read_bytes() == data
    mounted.umount()
    (copy,) = [p for p in (mounted.base / "tier").rglob("*") if p.is_file() and p.stat().st_size == len(data)]
    with open(copy, "r+b") as file:
        file.seek(500_000)
        file.write(b"rot")
    pretend_unclean_reboot(mounted.base / "tier")
    mounted.start()
    assert (mounted.path / "f").read_bytes() == data
    mounted.remount()
    assert (mounted.path / "f").read_bytes() == data


def test_log_of_a_killed_engine_is_kept(mounted: Mounted) -> None:
    mounted.kill9()
    before = len(mounted.log())
    mounted.start()
    assert len(mounted.log()) >= before


def test_reader_blocked_in_a_dead_mount_gets_an_error(mounted: Mounted) -> None:
    (mounted.path / "f").write_bytes(b"x")
    handle = os.open(mounted.path / "f", os.O_RDONLY)
    os.kill(mounted.pid, signal.SIGKILL)
    mounted.kill9()
    with pytest.raises(OSError, match=r"not connected|abort|canceled"):
        os.stat(mounted.path / "g")
    close_dead(handle)


def test_removed_while_it_is_uploaded(mount_factory: MountFactory) -> None:
    """The kernel has forgotten it before the upload ends: its object goes all the same."""
    mounted = mount_factory(options=("--upload-delay", "0"))
    mounted.fail({"kind": "block", "operation": "put"})
    (mounted.path / "f").write_bytes(b"x" * 5000)
    wait_until(lambda: '"claims": ["f"]' in mounted.cli("meta", "dump", str(mounted.path)).stdout, "its upload")
    os.unlink(mounted.path / "f")
    mounted.heal()
    mounted.flush()
    wait_until(lambda: not (mounted.store_dir / "f").exists(), "the end of its object")
    wait_until(lambda: mounted.status()["backlog"]["deletes"] == 0, "nothing to be done")


def test_file_written_twice_uploads_the_last_content(mounted: Mounted) -> None:
    digests = set()
    for _ in range(5):
        data = os.urandom(200_000)
        (mounted.path / "f").write_bytes(data)
        digests.add(hashlib.sha256(data).hexdigest())
        mounted.flush()
        assert (mounted.store_dir / "f").read_bytes() == data
    assert len(digests) == 5


def test_what_has_just_been_flushed_can_be_evicted(mounted: Mounted) -> None:
    """Also while the last of it is being turned into a clean copy."""
    (socket_path,) = (mounted.base / "run").rglob("*.sock")
    for number in range(12):
        names = [b"%d-%d" % (number, index) for index in range(3)]
        paths = [mounted.path / os.fsdecode(name) for name in names]
        for path in paths:
            path.write_bytes(os.urandom(1_500_000))
        with ControlClient(socket_path) as engine:
            # Of a close the kernel tells a little later, and nobody waits for what is open.
            wait_until(lambda: engine.call("flush", FlushRequest()).remaining_files == 0, "the flush")
            assert engine.call("evict", EvictRequest(paths=names)).failed == []
        assert [os.getxattr(path, "user.tierfs.resident") for path in paths] == [b"0"] * len(paths)
