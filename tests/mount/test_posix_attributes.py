"""chmod, chown, utimensat, truncate and the rules by which mtime and ctime change."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.posix import errno_of

OLD = 10**18 + 123_456_789
"""A time long ago, with nanoseconds."""


def write(path: Path, data: bytes = b"") -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("mode", [0o0, 0o111, 0o644, 0o1755, 0o2755, 0o4755, 0o7777])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_chmod(workdir: Path, mode: int, kind: str) -> None:
    path = workdir / "x"
    path.mkdir() if kind == "directory" else write(path)
    os.chmod(path, mode)
    assert stat.S_IMODE(os.stat(path).st_mode) == mode
    assert stat.S_ISDIR(os.stat(path).st_mode) == (kind == "directory")


def test_chmod_of_an_open_unlinked_file(workdir: Path) -> None:
    handle = os.open(workdir / "f", os.O_CREAT | os.O_RDWR)
    os.unlink(workdir / "f")
    os.fchmod(handle, 0o421)
    assert stat.S_IMODE(os.fstat(handle).st_mode) == 0o421
    os.close(handle)


@pytest.mark.skipif(os.geteuid() != 0, reason="chown needs root")
def test_chown(workdir: Path) -> None:
    write(workdir / "f")
    os.symlink("f", workdir / "s")
    os.chown(workdir / "s", 4_000_000_000, 7)
    assert (os.stat(workdir / "f").st_uid, os.stat(workdir / "f").st_gid) == (4_000_000_000, 7)
    assert os.lstat(workdir / "s").st_uid == 0
    os.lchown(workdir / "s", 8, 9)
    assert (os.lstat(workdir / "s").st_uid, os.lstat(workdir / "s").st_gid) == (8, 9)
    os.chown(workdir / "f", -1, 5)
    assert (os.stat(workdir / "f").st_uid, os.stat(workdir / "f").st_gid) == (4_000_000_000, 5)
    os.chown(workdir / "f", 3, -1)
    assert (os.stat(workdir / "f").st_uid, os.stat(workdir / "f").st_gid) == (3, 5)


@pytest.mark.parametrize("when", [0, 1, OLD, 2**31 * 10**9 + 5, 2**33 * 10**9 + 999_999_999, -1_000_000_001])
def test_utime_keeps_nanoseconds(workdir: Path, when: int) -> None:
    write(workdir / "f")
    os.utime(workdir / "f", ns=(when, when + 7))
    found = os.stat(workdir / "f")
    assert (found.st_atime_ns, found.st_mtime_ns) == (when, when + 7)


def test_utime_of_symlink_directory_and_now(workdir: Path) -> None:
    os.symlink("nowhere", workdir / "s")
    os.utime(workdir / "s", ns=(OLD, OLD), follow_symlinks=False)
    assert os.lstat(workdir / "s").st_mtime_ns == OLD
    os.mkdir(workdir / "d")
    os.utime(workdir / "d", ns=(OLD, OLD))
    assert os.stat(workdir / "d").st_mtime_ns == OLD
    os.utime(workdir / "d")
    assert abs(os.stat(workdir / "d").st_mtime_ns - time.time_ns()) < 60 * 10**9
    assert errno_of(lambda: os.utime(workdir / "no")) == errno.ENOENT


def test_utime_through_an_open_handle_after_writing(workdir: Path) -> None:
    """cp -p and rsync: write, set the times through the handle, close. The close must not undo them."""
    with open(workdir / "f", "wb", buffering=0) as file:
        file.write(b"x" * 5000)
        os.utime(file.fileno(), ns=(OLD, OLD))
    assert os.stat(workdir / "f").st_mtime_ns == OLD
    assert (workdir / "f").read_bytes() == b"x" * 5000
    assert os.stat(workdir / "f").st_mtime_ns == OLD


def times(path: Path) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_mtime_ns, found.st_ctime_ns


CHANGES: dict[str, tuple[Callable[[Path], object], bool, bool]] = {
    # what is done to the file: (does mtime change, does ctime change)
    "write": (lambda p: _append(p), True, True),
    "truncate": (lambda p: os.truncate(p, 1), True, True),
    "grow": (lambda p: os.truncate(p, 1000), True, True),
    "open-trunc": (lambda p: os.close(os.open(p, os.O_WRONLY | os.O_TRUNC)), True, True),
    "chmod": (lambda p: os.chmod(p, 0o640), False, True),
    "link": (lambda p: os.link(p, p.with_name("other")), False, True),
    "rename": (lambda p: _there_and_back(p), False, True),
    "setxattr": (lambda p: os.setxattr(p, "user.a", b"1"), False, True),
    "read": (lambda p: p.read_bytes(), False, False),
    "open-close": (lambda p: os.close(os.open(p, os.O_RDWR)), False, False),
    "stat": (os.stat, False, False),
}


def _append(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"more")


def _there_and_back(path: Path) -> None:
    os.rename(path, path.with_name("moved"))
    os.rename(path.with_name("moved"), path)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.semantics("S-META-4", "`ctime` and `mtime` change when POSIX says so, and not otherwise.")
def test_file_times(workdir: Path, change: str) -> None:
    work, mtime_changes, ctime_changes = CHANGES[change]
    path = write(workdir / "f", b"some bytes")
    os.utime(path, ns=(OLD, OLD))
    before = times(path)
    time.sleep(0.03)  # longer than the tick that file systems stamp times with
    work(path)
    after = times(path)
    assert (after[0] != before[0], after[1] != before[1]) == (mtime_changes, ctime_changes)
    if mtime_changes:
        assert after[0] == after[1]


PARENT_CHANGES: dict[str, tuple[Callable[[Path], object], bool]] = {
    "create": (lambda d: write(d / "new"), True),
    "mkdir": (lambda d: os.mkdir(d / "new"), True),
    "symlink": (lambda d: os.symlink("x", d / "new"), True),
    "mkfifo": (lambda d: os.mkfifo(d / "new"), True),
    "link": (lambda d: os.link(d / "f", d / "new"), True),
    "unlink": (lambda d: os.unlink(d / "f"), True),
    "rmdir": (lambda d: os.rmdir(d / "sub"), True),
    "rename": (lambda d: os.rename(d / "f", d / "new"), True),
    "write": (lambda d: write(d / "f", b"x"), False),
    "chmod-child": (lambda d: os.chmod(d / "f", 0o600), False),
    "list": (os.listdir, False),
    "exclusive-create-that-fails": (lambda d: errno_of(lambda: os.mkdir(d / "f")), False),
}


@pytest.mark.parametrize("change", PARENT_CHANGES)
def test_directory_times(workdir: Path, change: str) -> None:
    work, changes = PARENT_CHANGES[change]
    write(workdir / "f")
    os.mkdir(workdir / "sub")
    os.utime(workdir, ns=(OLD, OLD))
    before = times(workdir)
    time.sleep(0.03)
    work(workdir)
    after = times(workdir)
    assert (after[0] != before[0], after[1] != before[1]) == (changes, changes)


def test_failed_calls_change_no_ctime(workdir: Path, other_user: tuple[int, int]) -> None:
    from tests.support.posix import as_user

    write(workdir / "f", b"1")
    before = times(workdir / "f")
    time.sleep(0.03)
    assert as_user(*other_user, lambda: errno_of(lambda: os.chmod(workdir / "f", 0o777))) == errno.EPERM
    assert as_user(*other_user, lambda: errno_of(lambda: os.truncate(workdir / "f", 0))) == errno.EACCES
    assert times(workdir / "f") == before


def test_truncate(workdir: Path) -> None:
    write(workdir / "f", b"0123456789")
    os.truncate(workdir / "f", 4)
    assert (workdir / "f").read_bytes() == b"0123"
    os.truncate(workdir / "f", 8)
    assert (workdir / "f").read_bytes() == b"0123\0\0\0\0"
    os.truncate(workdir / "f", 0)
    assert (workdir / "f").read_bytes() == b""
    assert errno_of(lambda: os.truncate(workdir, 0)) == errno.EISDIR
    assert errno_of(lambda: os.truncate(workdir / "no", 0)) == errno.ENOENT
    assert errno_of(lambda: os.truncate(workdir / "f", -1)) == errno.EINVAL


@pytest.mark.parametrize("size", [1, 4095, 4096, 131_071, 131_072, 131_073, 1_000_000])
@pytest.mark.semantics(
    "S-READ-6",
    "Holes read as zeros, and so does what a truncate cut off and a later write or truncate brought back into range.",
)
def test_truncated_tail_does_not_come_back(workdir: Path, size: int) -> None:
    """Bytes cut off by a truncate read as zeros after the file grew again."""
    write(workdir / "f", b"\xaa" * 1_100_000)
    os.truncate(workdir / "f", size)
    os.truncate(workdir / "f", 1_100_000)
    data = (workdir / "f").read_bytes()
    assert data == b"\xaa" * size + b"\0" * (1_100_000 - size)


def test_ftruncate_on_an_open_file(workdir: Path) -> None:
    with open(workdir / "f", "w+b", buffering=0) as file:
        file.write(b"0123456789")
        file.truncate(3)
        assert os.fstat(file.fileno()).st_size == 3
        file.seek(0)
        assert file.read() == b"012"
    read_only = os.open(workdir / "f", os.O_RDONLY)
    assert errno_of(lambda: os.ftruncate(read_only, 0)) == errno.EINVAL
    os.close(read_only)


def test_size_in_blocks_is_plausible(workdir: Path) -> None:
    write(workdir / "f", b"x" * 1_000_000)
    os.sync()
    found = os.stat(workdir / "f")
    assert 1_000_000 <= found.st_blocks * 512 < 1_500_000
    assert found.st_blksize >= 512


@pytest.mark.semantics(
    "S-META-7", "`statfs` never reports a full or a negative file system while something can be written."
)
def test_statfs_tells_the_truth(workdir: Path) -> None:
    found = os.statvfs(workdir)
    assert found.f_namemax == 255
    assert found.f_blocks >= found.f_bfree >= found.f_bavail > 0
    assert found.f_frsize > 0
    assert found.f_ffree > 0


def test_a_chown_takes_the_privileges_of_all_but_directories(workdir: Path) -> None:
    (workdir / "file").touch()
    (workdir / "dir").mkdir()
    os.mkfifo(workdir / "fifo")
    for name in ("file", "dir", "fifo"):
        os.chmod(workdir / name, 0o6555)
        os.chown(workdir / name, 65534, 65533)
    modes = {name: stat.S_IMODE(os.stat(workdir / name).st_mode) for name in ("file", "dir", "fifo")}
    assert modes == {"file": 0o555, "dir": 0o6555, "fifo": 0o555}
