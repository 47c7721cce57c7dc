"""The promises about snapshots, on a mount."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.mount import Mounted, MountFactory, files_below, opened
from tests.support.posix import errno_of

semantics = pytest.mark.semantics
needs_mount = pytest.mark.usefixtures("needs_mount")


def snapshot(mounted: Mounted, name: str, directory: str = "") -> Path:
    reply = mounted.json("snapshot", "create", str(mounted.path / directory), "--name", name)
    assert reply["not_in_store"] == 0
    return Path(reply["snapshot"]["location"])


@needs_mount
@semantics(
    "S-SNAP-1",
    "A snapshot shows the names, attributes, link targets and extended attributes of its moment, whatever happens afterwards.",
)
def test_names_and_attributes(mount_factory: MountFactory) -> None:
    mounted = mount_factory()
    top = mounted.path
    os.makedirs(top / "d" / "e")
    (top / "d" / "f").write_bytes(b"bytes")
    os.link(top / "d" / "f", top / "second")
    os.symlink("d/f", top / "link")
    os.setxattr(top / "d" / "f", "user.a", b"old")
    os.chmod(top / "d" / "f", 0o640)
    os.utime(top / "d" / "f", ns=(1, 1_234_567_890))
    os.mkdir(top / "many")
    for number in range(120):
        os.symlink("x", top / "many" / f"{number:0>250}")
    here = snapshot(mounted, "one")
    os.setxattr(top / "d" / "f", "user.a", b"new")
    os.chmod(top / "d" / "f", 0o600)
    os.unlink(top / "link")
    os.rename(top / "d", top / "moved")
    os.rmdir(top / "moved" / "e")
    (top / "later").write_bytes(b"")
    for number in range(120):
        os.unlink(top / "many" / f"{number:0>250}")
    for _ in range(2):
        assert sorted(os.listdir(here)) == ["d", "link", "many", "second"]
        assert sorted(map(int, os.listdir(here / "many"))) == list(range(120))
        assert sorted(os.listdir(here / "d")) == ["e", "f"]
        assert os.readlink(here / "link") == "d/f"
        assert os.getxattr(here / "d" / "f", "user.a") == b"old"
        assert os.listxattr(here / "d" / "f") == ["user.a"]
        found = os.stat(here / "d" / "f")
        assert (found.st_mode & 0o777, found.st_mtime_ns, found.st_nlink) == (0o640, 1_234_567_890, 2)
        assert found.st_ino == os.stat(here / "second").st_ino
        assert found.st_ino != os.stat(top / "second").st_ino
        assert (here / "link").read_bytes() == b"bytes"
        assert ".tierfs" not in os.listdir(top)
        mounted.flush()


@needs_mount
@semantics(
    "S-SNAP-2",
    "A file in a snapshot has the bytes that had been written when `tierfs snapshot create` was called, open files included, and keeps them when the file is overwritten, renamed or removed; a file that is written during the call has those of a moment during it.",
)
def test_bytes(mount_factory: MountFactory) -> None:
    mounted = mount_factory()
    top = mounted.path
    written = {
        name: os.urandom(300_000) for name in ("d/overwritten", "d/removed", "d/moved", "d/patched", "d/same")
    }
    os.mkdir(top / "d")
    for name, data in written.items():
        (top / name).write_bytes(data)
    with opened(top / "d" / "open", os.O_RDWR | os.O_CREAT) as fd:
        os.write(fd, b"before")
        here = snapshot(mounted, "one", "d")
        os.pwrite(fd, b"after!", 0)
    (top / "d" / "overwritten").write_bytes(b"new")
    os.unlink(top / "d" / "removed")
    os.rename(top / "d" / "moved", top / "elsewhere")
    with opened(top / "d" / "patched", os.O_RDWR) as fd:
        os.pwrite(fd, b"patch", 1000)
    mounted.flush()
    expected = {name.removeprefix("d/"): data for name, data in written.items()} | {"open": b"before"}
    assert files_below(here) == expected
    assert (top / "d" / "open").read_bytes() == b"after!"
    subprocess.run(["cp", "-a", here, top / "copy"], check=True)
    assert files_below(top / "copy") == expected
    reply = mounted.json("snapshot", "diff", str(top), "--name", "one")
    assert {(entry["change"], entry["path"]) for entry in reply["differences"]} == {
        ("changed", "overwritten"),
        ("changed", "patched"),
        ("changed", "open"),
        ("removed", "removed"),
        ("removed", "moved"),
    }


@needs_mount
@semantics(
    "S-SNAP-3",
    "Nothing below `.tierfs/snapshots/` can be changed: every attempt fails with EROFS.",
)
def test_read_only(mount_factory: MountFactory) -> None:
    mounted = mount_factory()
    (mounted.path / "f").write_bytes(b"bytes")
    os.mkdir(mounted.path / "d")
    here = snapshot(mounted, "one")
    file, folder = here / "f", here / "d"
    attempts: list[Callable[[], object]] = [
        lambda: (folder / "x").write_bytes(b""),
        lambda: os.mkdir(folder / "x"),
        lambda: os.mkdir(here.parent / "x"),
        lambda: os.symlink("x", folder / "x"),
        lambda: os.link(mounted.path / "f", folder / "x"),
        lambda: os.open(file, os.O_WRONLY),
        lambda: os.truncate(file, 0),
        lambda: os.unlink(file),
        lambda: os.rmdir(folder),
        lambda: os.rename(file, here / "g"),
        lambda: os.rename(file, mounted.path / "g"),
        lambda: os.rename(mounted.path / "f", here / "g"),
        lambda: os.chmod(file, 0o777),
        lambda: os.utime(file),
        lambda: os.setxattr(file, "user.x", b"1"),
        lambda: os.removexattr(file, "user.x"),
    ]
    assert [errno.errorcode[errno_of(attempt)] for attempt in attempts] == ["EROFS"] * len(attempts)
    assert files_below(here) == {"f": b"bytes"}


@needs_mount
@semantics("S-SNAP-8", "Snapshots survive a killed engine, and what is open in one stays readable.")
def test_a_killed_engine(mount_factory: MountFactory) -> None:
    mounted = mount_factory()
    (mounted.path / "f").write_bytes(b"old" * 100_000)
    here = snapshot(mounted, "one")
    (mounted.path / "f").write_bytes(b"new")
    mounted.flush()
    if mounted.status()["front"]["kind"] == "native":
        with opened(here / "f") as fd:
            os.kill(mounted.status()["engine"]["pid"], 9)
            assert os.pread(fd, 3, 150_000) == b"old"
        assert (here / "f").read_bytes() == b"old" * 100_000
    else:
        mounted.crash_and_restart()
        assert (here / "f").read_bytes() == b"old" * 100_000
    listed = mounted.json("snapshot", "list", str(mounted.path))
    assert [entry["name"] for entry in listed["snapshots"]] == ["one"]
    mounted.json("snapshot", "delete", str(mounted.path), "--name", "one")
    assert mounted.json("snapshot", "list", str(mounted.path))["snapshots"] == []
    assert errno_of(lambda: os.stat(mounted.path / ".tierfs")) == errno.ENOENT
