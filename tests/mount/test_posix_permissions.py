"""What other users may and may not do; sticky and set-id bits. Done as other users, so root is needed."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.posix import as_user, errno_of, renameat2

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="acting as other users needs root")

ALICE = (21001, 21001)
BOB = (21002, 21002)
TEAM = 21500


def alice(work: Callable[[], object]) -> int:
    return as_user(*ALICE, lambda: errno_of(work))


def bob(work: Callable[[], object]) -> int:
    return as_user(*BOB, lambda: errno_of(work))


def touch(path: Path) -> Path:
    path.write_bytes(b"")
    return path


def opened(path: Path, flags: int) -> Callable[[], None]:
    def work() -> None:
        os.close(os.open(path, flags))

    return work


@pytest.fixture
def open_dir(workdir: Path) -> Path:
    """A directory that everybody may write to."""
    workdir.chmod(0o777)
    return workdir


def test_new_files_belong_to_their_maker(open_dir: Path) -> None:
    as_user(*ALICE, lambda: touch(open_dir / "f"))
    as_user(*ALICE, lambda: os.mkdir(open_dir / "d"))
    as_user(*ALICE, lambda: os.symlink("x", open_dir / "s"))
    for name in ("f", "d", "s"):
        found = os.lstat(open_dir / name)
        assert (found.st_uid, found.st_gid) == ALICE


@pytest.mark.parametrize(
    ("mode", "allowed"),
    [(0o400, "r"), (0o200, "w"), (0o600, "rw"), (0o044, ""), (0o000, ""), (0o066, "")],
)
@pytest.mark.semantics(
    "S-META-5",
    "Permissions are checked by the kernel for every user, the sticky bit and set-ID rules included.",
)
def test_owner_bits_decide_for_the_owner(open_dir: Path, mode: int, allowed: str) -> None:
    os.chown(touch(open_dir / "f"), *ALICE)
    os.chmod(open_dir / "f", mode)
    assert alice(opened(open_dir / "f", os.O_RDONLY)) == (0 if "r" in allowed else errno.EACCES)
    assert alice(opened(open_dir / "f", os.O_WRONLY)) == (0 if "w" in allowed else errno.EACCES)
    assert alice(opened(open_dir / "f", os.O_RDWR)) == (0 if allowed == "rw" else errno.EACCES)


def test_group_bits_decide_for_a_supplementary_group(open_dir: Path) -> None:
    os.chown(touch(open_dir / "f"), 0, TEAM)
    os.chmod(open_dir / "f", 0o640)
    member = as_user(*BOB, lambda: errno_of(opened(open_dir / "f", os.O_RDONLY)), groups=[TEAM])
    assert member == 0
    assert as_user(*BOB, lambda: errno_of(opened(open_dir / "f", os.O_WRONLY)), groups=[TEAM]) == errno.EACCES
    assert bob(opened(open_dir / "f", os.O_RDONLY)) == errno.EACCES


def test_directory_bits(open_dir: Path) -> None:
    os.mkdir(open_dir / "d")
    touch(open_dir / "d" / "f")
    os.chmod(open_dir / "d" / "f", 0o666)
    os.chmod(open_dir / "d", 0o711)
    assert bob(lambda: os.listdir(open_dir / "d")) == errno.EACCES
    assert bob(opened(open_dir / "d" / "f", os.O_RDONLY)) == 0
    assert bob(lambda: touch(open_dir / "d" / "new")) == errno.EACCES
    assert bob(lambda: os.unlink(open_dir / "d" / "f")) == errno.EACCES
    os.chmod(open_dir / "d", 0o744)
    assert bob(lambda: os.listdir(open_dir / "d")) == 0
    assert bob(lambda: os.stat(open_dir / "d" / "f")) == errno.EACCES
    os.chmod(open_dir / "d", 0o733)
    assert bob(lambda: touch(open_dir / "d" / "new")) == 0


def test_execute_bit(open_dir: Path) -> None:
    (open_dir / "s").write_text("#!/bin/sh\nexit 0\n")
    os.chmod(open_dir / "s", 0o644)
    assert as_user(*BOB, lambda: os.access(open_dir / "s", os.X_OK)) is False
    os.chmod(open_dir / "s", 0o755)
    assert as_user(*BOB, lambda: os.access(open_dir / "s", os.X_OK)) is True


def test_chmod_and_chown_by_others(open_dir: Path) -> None:
    os.chown(touch(open_dir / "f"), *ALICE)
    assert bob(lambda: os.chmod(open_dir / "f", 0o777)) == errno.EPERM
    assert alice(lambda: os.chmod(open_dir / "f", 0o600)) == 0
    assert alice(lambda: os.chown(open_dir / "f", BOB[0], -1)) == errno.EPERM
    assert alice(lambda: os.chown(open_dir / "f", -1, BOB[1])) == errno.EPERM
    assert as_user(*ALICE, lambda: errno_of(lambda: os.chown(open_dir / "f", -1, TEAM)), groups=[TEAM]) == 0
    assert os.stat(open_dir / "f").st_gid == TEAM
    assert bob(lambda: os.chown(open_dir / "f", *BOB)) == errno.EPERM


def test_utime_by_others(open_dir: Path) -> None:
    os.chown(touch(open_dir / "f"), *ALICE)
    os.chmod(open_dir / "f", 0o666)
    assert bob(lambda: os.utime(open_dir / "f", (1, 1))) == errno.EPERM
    assert bob(lambda: os.utime(open_dir / "f")) == 0  # "now" is allowed to whoever may write
    assert alice(lambda: os.utime(open_dir / "f", (1, 1))) == 0
    os.chmod(open_dir / "f", 0o644)
    assert bob(lambda: os.utime(open_dir / "f")) == errno.EACCES


@pytest.mark.semantics(
    "S-META-5",
    "Permissions are checked by the kernel for every user, the sticky bit and set-ID rules included.",
)
def test_sticky_directory(open_dir: Path) -> None:
    os.chmod(open_dir, 0o1777)
    as_user(*ALICE, lambda: touch(open_dir / "f"))
    as_user(*ALICE, lambda: os.mkdir(open_dir / "d"))
    as_user(*BOB, lambda: touch(open_dir / "mine"))
    assert bob(lambda: os.unlink(open_dir / "f")) in (errno.EPERM, errno.EACCES)
    assert bob(lambda: os.rmdir(open_dir / "d")) in (errno.EPERM, errno.EACCES)
    assert bob(lambda: os.rename(open_dir / "f", open_dir / "g")) in (errno.EPERM, errno.EACCES)
    assert bob(lambda: os.rename(open_dir / "mine", open_dir / "f")) in (errno.EPERM, errno.EACCES)
    assert bob(lambda: renameat2(open_dir / "mine", open_dir / "f", 2)) in (errno.EPERM, errno.EACCES)
    assert bob(lambda: os.rename(open_dir / "mine", open_dir / "g")) == 0
    assert alice(lambda: os.unlink(open_dir / "f")) == 0
    os.chown(open_dir, *BOB)
    assert bob(lambda: os.rmdir(open_dir / "d")) == 0  # the owner of the directory may


def test_setgid_directory_hands_down_its_group(open_dir: Path) -> None:
    os.chown(open_dir, 0, TEAM)
    os.chmod(open_dir, 0o2777)
    as_user(*ALICE, lambda: touch(open_dir / "f"))
    as_user(*ALICE, lambda: os.mkdir(open_dir / "d"))
    assert os.stat(open_dir / "f").st_gid == TEAM
    assert os.stat(open_dir / "d").st_gid == TEAM
    assert os.stat(open_dir / "d").st_mode & stat.S_ISGID
    assert not os.stat(open_dir / "f").st_mode & stat.S_ISGID


@pytest.mark.parametrize("change", ["write", "truncate", "chown"])
@pytest.mark.semantics(
    "S-META-5",
    "Permissions are checked by the kernel for every user, the sticky bit and set-ID rules included.",
)
def test_set_id_bits_are_dropped_when_others_change_a_file(open_dir: Path, change: str) -> None:
    path = open_dir / "f"
    path.write_bytes(b"program")
    os.chown(path, ALICE[0], TEAM)
    os.chmod(path, 0o6777)

    def write() -> None:
        with open(path, "r+b") as file:
            file.write(b"x")

    if change == "write":
        assert bob(write) == 0
    elif change == "truncate":
        assert bob(lambda: os.truncate(path, 1)) == 0
    else:
        assert as_user(*ALICE, lambda: errno_of(lambda: os.chown(path, -1, TEAM)), groups=[TEAM]) == 0
    assert os.stat(path).st_mode & (stat.S_ISUID | stat.S_ISGID) == 0


def test_chmod_by_a_non_member_drops_setgid(open_dir: Path) -> None:
    os.chown(touch(open_dir / "f"), ALICE[0], TEAM)
    assert alice(lambda: os.chmod(open_dir / "f", 0o2755)) == 0
    assert stat.S_IMODE(os.stat(open_dir / "f").st_mode) == 0o755
    as_user(*ALICE, lambda: os.chmod(open_dir / "f", 0o2755), groups=[TEAM])
    assert stat.S_IMODE(os.stat(open_dir / "f").st_mode) == 0o2755


def test_mknod_of_a_device_needs_privilege(open_dir: Path) -> None:
    assert alice(lambda: os.mknod(open_dir / "c", stat.S_IFCHR | 0o666, os.makedev(1, 3))) == errno.EPERM
    assert alice(lambda: os.mkfifo(open_dir / "p")) == 0


def test_hard_links_and_renames_need_the_right_to_write(workdir: Path) -> None:
    os.mkdir(workdir / "closed")
    touch(workdir / "closed" / "f")
    os.mkdir(workdir / "open")
    os.chmod(workdir / "open", 0o777)
    assert bob(lambda: os.rename(workdir / "closed" / "f", workdir / "open" / "f")) == errno.EACCES
    as_user(*BOB, lambda: touch(workdir / "open" / "g"))
    assert bob(lambda: os.rename(workdir / "open" / "g", workdir / "closed" / "g")) == errno.EACCES
    assert bob(lambda: os.link(workdir / "open" / "g", workdir / "closed" / "g")) == errno.EACCES


def test_moving_a_directory_of_another_owner_needs_write_on_itself(open_dir: Path) -> None:
    os.mkdir(open_dir / "a")
    os.chmod(open_dir / "a", 0o777)
    os.mkdir(open_dir / "a" / "d")  # root's, 0755: its ".." would have to be rewritten
    os.mkdir(open_dir / "b")
    os.chmod(open_dir / "b", 0o777)
    assert bob(lambda: os.rename(open_dir / "a" / "d", open_dir / "b" / "d")) == errno.EACCES
    assert bob(lambda: os.rename(open_dir / "a" / "d", open_dir / "a" / "e")) == 0


def test_rights_are_checked_at_open_not_at_read(open_dir: Path) -> None:
    path = open_dir / "f"
    path.write_bytes(b"content")

    def work() -> bytes:
        handle = os.open(path, os.O_RDONLY)
        proceed()
        data = os.read(handle, 100)
        os.close(handle)
        return data

    def proceed() -> None:
        pass

    os.chmod(path, 0o444)
    handle = as_user(*BOB, lambda: os.open(path, os.O_RDONLY))
    os.chmod(path, 0o000)
    assert as_user(*BOB, lambda: os.read(handle, 100)) == b"content"
    os.close(handle)
    assert bob(work) == errno.EACCES


def test_create_with_read_only_mode_gives_a_writable_handle(open_dir: Path) -> None:
    def work() -> None:
        handle = os.open(open_dir / "f", os.O_CREAT | os.O_WRONLY, 0o444)
        os.write(handle, b"x")
        os.close(handle)

    assert alice(work) == 0
    assert (open_dir / "f").read_bytes() == b"x"
