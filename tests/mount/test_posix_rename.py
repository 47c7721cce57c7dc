"""rename(2) and renameat2(2): every combination of kinds, flags, open files and errors."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from tests.support.posix import RENAME_EXCHANGE, RENAME_NOREPLACE, RENAME_WHITEOUT, errno_of, renameat2


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("kind", ["file", "symlink", "fifo", "directory"])
def test_rename_moves_any_kind_and_keeps_the_inode(workdir: Path, kind: str) -> None:
    make = {
        "file": lambda p: write(p, b"x"),
        "symlink": lambda p: os.symlink("t", p),
        "fifo": os.mkfifo,
        "directory": os.mkdir,
    }
    make[kind](workdir / "a")
    os.mkdir(workdir / "d")
    before = os.lstat(workdir / "a")
    os.rename(workdir / "a", workdir / "d" / "b")
    after = os.lstat(workdir / "d" / "b")
    assert (after.st_ino, after.st_mode, after.st_nlink) == (before.st_ino, before.st_mode, before.st_nlink)
    assert sorted(os.listdir(workdir)) == ["d"]
    assert os.listdir(workdir / "d") == ["b"]


def test_replacing_a_file(workdir: Path) -> None:
    write(workdir / "a", b"new")
    write(workdir / "b", b"old")
    os.link(workdir / "b", workdir / "c")
    os.rename(workdir / "a", workdir / "b")
    assert (workdir / "b").read_bytes() == b"new"
    assert (workdir / "c").read_bytes() == b"old"
    assert os.stat(workdir / "c").st_nlink == 1
    assert sorted(os.listdir(workdir)) == ["b", "c"]


def test_replacing_an_empty_directory(workdir: Path) -> None:
    os.makedirs(workdir / "a" / "x")
    os.mkdir(workdir / "b")
    os.rename(workdir / "a", workdir / "b")
    assert os.listdir(workdir / "b") == ["x"]
    assert os.listdir(workdir) == ["b"]


def test_errors(workdir: Path) -> None:
    write(workdir / "f", b"")
    os.makedirs(workdir / "d" / "e")
    os.makedirs(workdir / "full" / "x")
    rename = os.rename
    assert errno_of(lambda: rename(workdir / "no", workdir / "x")) == errno.ENOENT
    assert errno_of(lambda: rename(workdir / "f", workdir / "no" / "x")) == errno.ENOENT
    assert errno_of(lambda: rename(workdir / "f", workdir / "d")) == errno.EISDIR
    assert errno_of(lambda: rename(workdir / "d", workdir / "f")) == errno.ENOTDIR
    assert errno_of(lambda: rename(workdir / "d", workdir / "full")) == errno.ENOTEMPTY
    assert errno_of(lambda: rename(workdir / "d", workdir / "d" / "e" / "x")) == errno.EINVAL
    assert errno_of(lambda: rename(workdir / "d" / "e", workdir / "d")) == errno.ENOTEMPTY
    assert errno_of(lambda: rename(workdir / "f", workdir / "f" / "x")) == errno.ENOTDIR
    assert errno_of(lambda: rename(workdir / "f", workdir / ("n" * 256))) == errno.ENAMETOOLONG
    assert sorted(os.listdir(workdir)) == ["d", "f", "full"]


def test_rename_to_itself_and_to_another_link_of_itself_do_nothing(workdir: Path) -> None:
    write(workdir / "a", b"1")
    os.link(workdir / "a", workdir / "b")
    os.rename(workdir / "a", workdir / "a")
    os.rename(workdir / "a", workdir / "b")
    assert sorted(os.listdir(workdir)) == ["a", "b"]
    assert os.stat(workdir / "a").st_nlink == 2


def test_link_counts_of_parents(workdir: Path) -> None:
    os.makedirs(workdir / "p" / "d")
    os.mkdir(workdir / "q")
    os.rename(workdir / "p" / "d", workdir / "q" / "d")
    assert (os.stat(workdir / "p").st_nlink, os.stat(workdir / "q").st_nlink) == (2, 3)
    os.mkdir(workdir / "p" / "d")
    os.rename(workdir / "p" / "d", workdir / "q" / "d")
    assert (os.stat(workdir / "p").st_nlink, os.stat(workdir / "q").st_nlink) == (2, 3)


def test_dotdot_follows_a_moved_directory(workdir: Path) -> None:
    os.makedirs(workdir / "p" / "d")
    os.mkdir(workdir / "q")
    handle = os.open(workdir / "p" / "d", os.O_RDONLY)
    os.rename(workdir / "p" / "d", workdir / "q" / "d")
    assert os.stat("..", dir_fd=handle).st_ino == os.stat(workdir / "q").st_ino
    os.close(handle)


def test_times(workdir: Path) -> None:
    os.mkdir(workdir / "p")
    os.mkdir(workdir / "q")
    write(workdir / "p" / "f", b"1")
    for name in ("p", "q"):
        os.utime(workdir / name, ns=(10**18, 10**18))
    os.utime(workdir / "p" / "f", ns=(10**18, 10**18))
    os.rename(workdir / "p" / "f", workdir / "q" / "f")
    assert os.stat(workdir / "p").st_mtime_ns > 10**18
    assert os.stat(workdir / "q").st_mtime_ns > 10**18
    assert os.stat(workdir / "q" / "f").st_mtime_ns == 10**18


def test_deep_tree_moves_whole(workdir: Path) -> None:
    for i in range(20):
        os.makedirs(workdir / "t" / f"d{i % 4}" / f"e{i}")
        write(workdir / "t" / f"d{i % 4}" / f"e{i}" / "f", str(i).encode())
    os.rename(workdir / "t", workdir / "moved")
    assert not (workdir / "t").exists()
    for i in range(20):
        assert (workdir / "moved" / f"d{i % 4}" / f"e{i}" / "f").read_bytes() == str(i).encode()
        assert not (workdir / "t" / f"d{i % 4}" / f"e{i}" / "f").exists()


def test_open_file_follows_its_rename(workdir: Path) -> None:
    with open(workdir / "tmp", "w+b", buffering=0) as file:
        file.write(b"one")
        os.rename(workdir / "tmp", workdir / "final")
        file.write(b"two")
        os.fchmod(file.fileno(), 0o600)
        assert os.fstat(file.fileno()).st_ino == os.stat(workdir / "final").st_ino
    assert (workdir / "final").read_bytes() == b"onetwo"
    assert stat.S_IMODE(os.stat(workdir / "final").st_mode) == 0o600


@pytest.mark.semantics(
    "S-MOVE-3", "A reader of a file that was replaced by `rename` reads the old bytes to the end."
)
def test_reader_of_a_replaced_file_keeps_the_old_bytes(workdir: Path) -> None:
    old, new = os.urandom(700_000), os.urandom(300_000)
    write(workdir / "f", old)
    with open(workdir / "f", "rb", buffering=0) as reader:
        assert reader.read(1000) == old[:1000]
        write(workdir / "tmp", new)
        os.replace(workdir / "tmp", workdir / "f")
        rest = b"".join(iter(lambda: reader.read(100_000), b""))
        assert old[:1000] + rest == old
        assert os.fstat(reader.fileno()).st_nlink == 0
    assert (workdir / "f").read_bytes() == new


def test_writer_of_a_replaced_file_does_not_touch_the_new_one(workdir: Path) -> None:
    write(workdir / "f", b"old")
    with open(workdir / "f", "r+b", buffering=0) as writer:
        write(workdir / "tmp", b"new")
        os.replace(workdir / "tmp", workdir / "f")
        writer.write(b"LATE WRITE")
    assert (workdir / "f").read_bytes() == b"new"


@pytest.mark.semantics("S-MOVE-2", "RENAME_NOREPLACE and RENAME_EXCHANGE work.")
def test_noreplace(workdir: Path) -> None:
    write(workdir / "a", b"a")
    write(workdir / "b", b"b")
    assert errno_of(lambda: renameat2(workdir / "a", workdir / "b", RENAME_NOREPLACE)) == errno.EEXIST
    assert (workdir / "b").read_bytes() == b"b"
    renameat2(workdir / "a", workdir / "c", RENAME_NOREPLACE)
    assert sorted(os.listdir(workdir)) == ["b", "c"]


@pytest.mark.parametrize("kinds", ["ff", "fd", "df", "dd", "fs"])
@pytest.mark.semantics("S-MOVE-2", "RENAME_NOREPLACE and RENAME_EXCHANGE work.")
def test_exchange(workdir: Path, kinds: str) -> None:
    for directory in ("p", "q"):
        os.mkdir(workdir / directory)
    paths = (workdir / "p" / "a", workdir / "q" / "b")
    for path, kind in zip(paths, kinds, strict=True):
        if kind == "f":
            write(path, path.name.encode())
        elif kind == "s":
            os.symlink("target", path)
        else:
            os.mkdir(path)
            write(path / "inside", path.name.encode())
    before = [os.lstat(path) for path in paths]
    renameat2(paths[0], paths[1], RENAME_EXCHANGE)
    after = [os.lstat(path) for path in paths]
    assert [s.st_ino for s in after] == [s.st_ino for s in reversed(before)]
    assert [s.st_mode for s in after] == [s.st_mode for s in reversed(before)]
    assert os.stat(workdir / "p").st_nlink == 2 + (kinds[1] == "d")
    assert os.stat(workdir / "q").st_nlink == 2 + (kinds[0] == "d")
    if kinds[0] == "d":
        assert (paths[1] / "inside").read_bytes() == b"a"
    if kinds[0] == "f":
        assert paths[1].read_bytes() == b"a"


def test_exchange_errors(workdir: Path) -> None:
    write(workdir / "a", b"")
    os.makedirs(workdir / "d" / "e")
    assert errno_of(lambda: renameat2(workdir / "a", workdir / "no", RENAME_EXCHANGE)) == errno.ENOENT
    assert errno_of(lambda: renameat2(workdir / "d", workdir / "d" / "e", RENAME_EXCHANGE)) == errno.EINVAL
    assert errno_of(lambda: renameat2(workdir / "d" / "e", workdir / "d", RENAME_EXCHANGE)) == errno.EINVAL
    both = RENAME_EXCHANGE | RENAME_NOREPLACE
    assert errno_of(lambda: renameat2(workdir / "a", workdir / "d", both)) == errno.EINVAL
    assert errno_of(lambda: renameat2(workdir / "a", workdir / "b", RENAME_WHITEOUT | 64)) == errno.EINVAL


@pytest.mark.semantics(
    "S-MOVE-1",
    "`rename` is atomic in the mount: at every moment the target name means the old or the new file.",
)
def test_rename_back_and_forth_under_a_reader_never_shows_nothing(workdir: Path) -> None:
    """A name that is replaced over and over is there at every moment, with one of its contents."""
    write(workdir / "f", b"0" * 100)
    wrong: list[object] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            try:
                data = (workdir / "f").read_bytes()
            except FileNotFoundError as error:
                wrong.append(error)
                return
            if len(data) != 100 or len(set(data)) != 1:
                wrong.append(data)
                return

    thread = threading.Thread(target=watch)
    thread.start()
    for i in range(150):
        write(workdir / "tmp", str(i % 10).encode() * 100)
        os.replace(workdir / "tmp", workdir / "f")
    done.set()
    thread.join()
    assert not wrong
