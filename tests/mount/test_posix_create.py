"""Making and removing things: open flags, mknod, mkdir, symlink, link, unlink, rmdir and their errors."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

import pytest

from tests.support.posix import errno_of


def write(path: Path, data: bytes = b"") -> Path:
    path.write_bytes(data)
    return path


def open_errno(path: Path, flags: int, mode: int = 0o666) -> int:
    def work() -> None:
        os.close(os.open(path, flags, mode))

    return errno_of(work)


@pytest.fixture(autouse=True)
def no_umask() -> object:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.parametrize("mode", [0o000, 0o400, 0o644, 0o755, 0o1777, 0o4755, 0o2755, 0o7777])
def test_open_creates_with_the_mode_asked_for(workdir: Path, mode: int) -> None:
    os.close(os.open(workdir / "f", os.O_CREAT | os.O_WRONLY, mode))
    found = os.stat(workdir / "f")
    assert stat.S_IMODE(found.st_mode) == mode
    assert stat.S_ISREG(found.st_mode)
    assert (found.st_size, found.st_nlink, found.st_uid, found.st_gid) == (0, 1, os.geteuid(), os.getegid())


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o777])
def test_umask_is_applied(workdir: Path, umask: int) -> None:
    os.umask(umask)
    os.close(os.open(workdir / "f", os.O_CREAT | os.O_WRONLY, 0o666))
    os.mkdir(workdir / "d", 0o777)
    os.mkfifo(workdir / "p", 0o666)
    assert stat.S_IMODE(os.stat(workdir / "f").st_mode) == 0o666 & ~umask
    assert stat.S_IMODE(os.stat(workdir / "d").st_mode) == 0o777 & ~umask
    assert stat.S_IMODE(os.stat(workdir / "p").st_mode) == 0o666 & ~umask


def test_exclusive_create(workdir: Path) -> None:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    assert open_errno(workdir / "f", flags) == 0
    assert open_errno(workdir / "f", flags) == errno.EEXIST
    os.symlink("nowhere", workdir / "dangling")
    assert open_errno(workdir / "dangling", flags) == errno.EEXIST
    assert not (workdir / "nowhere").exists()
    os.mkdir(workdir / "d")
    assert open_errno(workdir / "d", flags) == errno.EEXIST


def test_create_through_dangling_symlink_makes_the_target(workdir: Path) -> None:
    os.symlink("target", workdir / "link")
    write(workdir / "link", b"x")
    assert (workdir / "target").read_bytes() == b"x"
    assert (workdir / "link").is_symlink()


def test_open_errors(workdir: Path) -> None:
    write(workdir / "f")
    os.mkdir(workdir / "d")
    os.symlink("loop", workdir / "loop")
    assert open_errno(workdir / "missing", os.O_RDONLY) == errno.ENOENT
    assert open_errno(workdir / "missing" / "x", os.O_CREAT | os.O_WRONLY) == errno.ENOENT
    assert open_errno(workdir / "f" / "x", os.O_CREAT | os.O_WRONLY) == errno.ENOTDIR
    assert open_errno(workdir / "d", os.O_WRONLY) == errno.EISDIR
    assert open_errno(workdir / "d", os.O_RDWR | os.O_CREAT) == errno.EISDIR
    assert open_errno(workdir / "f", os.O_RDONLY | os.O_DIRECTORY) == errno.ENOTDIR
    assert open_errno(workdir / "loop", os.O_RDONLY) == errno.ELOOP
    assert open_errno(workdir / "loop", os.O_RDONLY | os.O_NOFOLLOW) == errno.ELOOP
    assert open_errno(workdir / ("n" * 256), os.O_CREAT | os.O_WRONLY) == errno.ENAMETOOLONG
    assert open_errno(workdir / ("n" * 255), os.O_CREAT | os.O_WRONLY) == 0


def test_o_trunc_empties_and_keeps_the_inode(workdir: Path) -> None:
    write(workdir / "f", b"something")
    os.utime(workdir / "f", ns=(10**18, 10**18))
    before = os.stat(workdir / "f")
    os.close(os.open(workdir / "f", os.O_WRONLY | os.O_TRUNC))
    after = os.stat(workdir / "f")
    assert (after.st_size, after.st_ino) == (0, before.st_ino)
    assert after.st_mtime_ns > before.st_mtime_ns
    assert (workdir / "f").read_bytes() == b""


@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFREG, stat.S_IFCHR, stat.S_IFBLK])
def test_mknod(workdir: Path, kind: int) -> None:
    if kind in (stat.S_IFCHR, stat.S_IFBLK) and os.geteuid() != 0:
        pytest.skip("device nodes need root")
    device = os.makedev(7, 13) if kind in (stat.S_IFCHR, stat.S_IFBLK) else 0
    os.mknod(workdir / "n", kind | 0o640, device)
    found = os.lstat(workdir / "n")
    assert stat.S_IFMT(found.st_mode) == kind
    assert stat.S_IMODE(found.st_mode) == 0o640
    assert found.st_rdev == device
    assert found.st_nlink == 1
    assert errno_of(lambda: os.mknod(workdir / "n", kind | 0o640, device)) == errno.EEXIST
    os.unlink(workdir / "n")
    assert os.listdir(workdir) == []


def test_fifo_carries_bytes(workdir: Path) -> None:
    os.mkfifo(workdir / "p", 0o600)
    reader = os.open(workdir / "p", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(workdir / "p", os.O_WRONLY | os.O_NONBLOCK)
    os.write(writer, b"through")
    assert os.read(reader, 100) == b"through"
    os.close(writer)
    os.close(reader)


def test_unix_socket_can_be_bound_and_reached(workdir: Path) -> None:
    here = os.open(workdir, os.O_RDONLY)
    name = f"/proc/self/fd/{here}/s"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(name)
        server.listen(1)
        client.connect(name)
        peer, _ = server.accept()
        with peer:
            client.sendall(b"hello")
            assert peer.recv(10) == b"hello"
    os.close(here)
    assert stat.S_ISSOCK(os.stat(workdir / "s").st_mode)


def test_mkdir_and_link_counts(workdir: Path) -> None:
    before = os.stat(workdir)
    os.mkdir(workdir / "d", 0o750)
    assert os.stat(workdir).st_nlink == before.st_nlink + 1
    found = os.stat(workdir / "d")
    assert (stat.S_IMODE(found.st_mode), found.st_nlink) == (0o750, 2)
    os.mkdir(workdir / "d" / "e")
    assert os.stat(workdir / "d").st_nlink == 3
    os.rmdir(workdir / "d" / "e")
    assert os.stat(workdir / "d").st_nlink == 2
    assert errno_of(lambda: os.mkdir(workdir / "d")) == errno.EEXIST
    write(workdir / "f")
    assert errno_of(lambda: os.mkdir(workdir / "f")) == errno.EEXIST
    assert errno_of(lambda: os.mkdir(workdir / "f" / "x")) == errno.ENOTDIR
    assert errno_of(lambda: os.mkdir(workdir / "no" / "x")) == errno.ENOENT
    assert errno_of(lambda: os.mkdir(workdir / ("n" * 256))) == errno.ENAMETOOLONG


def test_rmdir_errors(workdir: Path) -> None:
    os.makedirs(workdir / "d" / "e")
    write(workdir / "f")
    os.symlink("d", workdir / "s")
    assert errno_of(lambda: os.rmdir(workdir / "d")) == errno.ENOTEMPTY
    assert errno_of(lambda: os.rmdir(workdir / "f")) == errno.ENOTDIR
    assert errno_of(lambda: os.rmdir(workdir / "s")) == errno.ENOTDIR
    assert errno_of(lambda: os.rmdir(workdir / "no")) == errno.ENOENT
    assert errno_of(lambda: os.rmdir(bytes(workdir / "d") + b"/.")) == errno.EINVAL
    assert errno_of(lambda: os.rmdir(bytes(workdir / "d" / "e") + b"/..")) == errno.ENOTEMPTY
    os.rmdir(workdir / "d" / "e")
    os.rmdir(workdir / "d")
    assert not (workdir / "d").exists()


def test_removed_directory_that_is_still_open(workdir: Path) -> None:
    os.mkdir(workdir / "d")
    handle = os.open(workdir / "d", os.O_RDONLY)
    os.rmdir(workdir / "d")
    assert os.fstat(handle).st_nlink == 0
    assert errno_of(lambda: os.close(os.open("x", os.O_CREAT | os.O_WRONLY, dir_fd=handle))) == errno.ENOENT
    assert errno_of(lambda: os.mkdir("x", dir_fd=handle)) == errno.ENOENT
    assert os.listdir(handle) == []
    os.close(handle)
    os.mkdir(workdir / "d")
    assert os.listdir(workdir / "d") == []


@pytest.mark.parametrize("length", [1, 60, 255, 1000, 4095])
def test_symlink_target_is_kept_byte_for_byte(workdir: Path, length: int) -> None:
    target = (b"/\xff a" * length)[:length]
    os.symlink(target, bytes(workdir / "s"))
    assert os.readlink(bytes(workdir / "s")) == target
    found = os.lstat(workdir / "s")
    assert stat.S_ISLNK(found.st_mode)
    assert (found.st_size, stat.S_IMODE(found.st_mode)) == (length, 0o777)


def test_symlink_errors(workdir: Path) -> None:
    write(workdir / "f")
    assert errno_of(lambda: os.symlink("x", workdir / "f")) == errno.EEXIST
    assert errno_of(lambda: os.symlink("", workdir / "e")) == errno.ENOENT
    assert errno_of(lambda: os.readlink(workdir / "f")) == errno.EINVAL
    assert errno_of(lambda: os.symlink("x", workdir / "f" / "y")) == errno.ENOTDIR


def test_symlink_is_followed_and_unlinked_by_name(workdir: Path) -> None:
    os.mkdir(workdir / "d")
    write(workdir / "d" / "f", b"1")
    os.symlink("d", workdir / "s")
    assert (workdir / "s" / "f").read_bytes() == b"1"
    os.unlink(workdir / "s")
    assert (workdir / "d" / "f").read_bytes() == b"1"


def test_hard_links_are_one_file(workdir: Path) -> None:
    write(workdir / "a", b"1")
    os.mkdir(workdir / "d")
    os.link(workdir / "a", workdir / "b")
    os.link(workdir / "b", workdir / "d" / "c")
    found = {os.stat(p).st_ino for p in (workdir / "a", workdir / "b", workdir / "d" / "c")}
    assert len(found) == 1
    assert os.stat(workdir / "a").st_nlink == 3
    write(workdir / "d" / "c", b"through another name")
    assert (workdir / "a").read_bytes() == b"through another name"
    os.chmod(workdir / "b", 0o600)
    assert stat.S_IMODE(os.stat(workdir / "a").st_mode) == 0o600
    os.unlink(workdir / "a")
    assert os.stat(workdir / "b").st_nlink == 2
    assert (workdir / "b").read_bytes() == b"through another name"
    os.unlink(workdir / "b")
    assert os.stat(workdir / "d" / "c").st_nlink == 1


def test_link_errors(workdir: Path) -> None:
    write(workdir / "f")
    os.mkdir(workdir / "d")
    assert errno_of(lambda: os.link(workdir / "d", workdir / "e")) == errno.EPERM
    assert errno_of(lambda: os.link(workdir / "no", workdir / "e")) == errno.ENOENT
    assert errno_of(lambda: os.link(workdir / "f", workdir / "d")) == errno.EEXIST
    assert errno_of(lambda: os.link(workdir / "f", workdir / "f")) == errno.EEXIST
    assert errno_of(lambda: os.link(workdir / "f", workdir / "f" / "x")) == errno.ENOTDIR
    assert errno_of(lambda: os.link(workdir / "f", workdir / ("n" * 256))) == errno.ENAMETOOLONG
    assert os.stat(workdir / "f").st_nlink == 1


def test_link_to_a_symlink_itself(workdir: Path) -> None:
    os.symlink("nowhere", workdir / "s")
    os.link(workdir / "s", workdir / "t", follow_symlinks=False)
    assert os.readlink(workdir / "t") == "nowhere"
    assert os.lstat(workdir / "s").st_nlink == 2


def test_hard_links_of_a_fifo(workdir: Path) -> None:
    os.mkfifo(workdir / "p")
    os.link(workdir / "p", workdir / "q")
    assert os.stat(workdir / "p").st_ino == os.stat(workdir / "q").st_ino
    assert stat.S_ISFIFO(os.stat(workdir / "q").st_mode)


def test_unlink_errors(workdir: Path) -> None:
    os.mkdir(workdir / "d")
    write(workdir / "f")
    assert errno_of(lambda: os.unlink(workdir / "d")) in (errno.EISDIR, errno.EPERM)
    assert errno_of(lambda: os.unlink(workdir / "no")) == errno.ENOENT
    assert errno_of(lambda: os.unlink(workdir / "f" / "x")) == errno.ENOTDIR


def test_touch_remove_list(workdir: Path) -> None:
    write(workdir / "f")
    os.unlink(workdir / "f")
    assert os.listdir(workdir) == []
    assert errno_of(lambda: os.stat(workdir / "f")) == errno.ENOENT
    write(workdir / "f", b"again")
    assert (workdir / "f").read_bytes() == b"again"


def test_unlinked_file_lives_until_its_last_close(workdir: Path) -> None:
    handle = os.open(workdir / "f", os.O_CREAT | os.O_RDWR, 0o600)
    os.write(handle, b"before")
    os.unlink(workdir / "f")
    assert os.fstat(handle).st_nlink == 0
    os.write(handle, b" after")
    assert os.pread(handle, 100, 0) == b"before after"
    os.fchmod(handle, 0o640)
    os.ftruncate(handle, 6)
    os.fsync(handle)
    assert (os.fstat(handle).st_size, stat.S_IMODE(os.fstat(handle).st_mode)) == (6, 0o640)
    write(workdir / "f", b"another file")
    assert os.pread(handle, 100, 0) == b"before"
    assert os.fstat(handle).st_ino != os.stat(workdir / "f").st_ino
    os.close(handle)
    assert (workdir / "f").read_bytes() == b"another file"


def test_unlinked_file_can_be_opened_again_through_proc(workdir: Path) -> None:
    handle = os.open(workdir / "f", os.O_CREAT | os.O_RDWR, 0o600)
    os.write(handle, b"still here")
    os.unlink(workdir / "f")
    again = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY)
    assert os.read(again, 100) == b"still here"
    os.close(again)
    os.close(handle)


def test_unlink_of_one_name_while_open(workdir: Path) -> None:
    write(workdir / "a", b"12")
    os.link(workdir / "a", workdir / "b")
    with open(workdir / "a", "r+b") as file:
        os.unlink(workdir / "a")
        file.write(b"34")
    assert (workdir / "b").read_bytes() == b"34"
    assert os.stat(workdir / "b").st_nlink == 1


def test_inode_numbers_are_not_reused_at_once(workdir: Path) -> None:
    seen = set()
    for _ in range(50):
        write(workdir / "f")
        seen.add(os.stat(workdir / "f").st_ino)
        os.unlink(workdir / "f")
    if os.stat(workdir).st_dev == os.stat("/").st_dev:
        pytest.skip("a promise of tierfs, not of every local file system")
    assert len(seen) == 50


def test_o_tmpfile_is_refused_or_works(workdir: Path) -> None:
    code = open_errno(workdir, os.O_TMPFILE | os.O_RDWR, 0o600)
    assert code in (0, errno.EOPNOTSUPP, errno.EISDIR)
