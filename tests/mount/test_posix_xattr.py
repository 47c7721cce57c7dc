"""Extended attributes of every kind of file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.support.posix import as_user, errno_of

OWN = "user.tierfs."
"""Attributes in which tierfs tells its state; ``listxattr`` does not show them."""


def listed(path: Path | int) -> list[str]:
    return sorted(name for name in os.listxattr(path) if not name.startswith((OWN, "security.")))


@pytest.fixture(params=["file", "directory"])
def path(request: pytest.FixtureRequest, workdir: Path) -> Path:
    path = workdir / "x"
    path.mkdir() if request.param == "directory" else path.write_bytes(b"1")
    return path


@pytest.mark.parametrize("value", [b"", b"v", b"\0binary\xff", b"x" * 3000])
def test_set_get_list_remove(path: Path, value: bytes) -> None:
    os.setxattr(path, "user.a", value)
    os.setxattr(path, "user.b", b"other")
    assert os.getxattr(path, "user.a") == value
    assert listed(path) == ["user.a", "user.b"]
    os.removexattr(path, "user.a")
    assert listed(path) == ["user.b"]
    assert errno_of(lambda: os.getxattr(path, "user.a")) == errno.ENODATA
    assert errno_of(lambda: os.removexattr(path, "user.a")) == errno.ENODATA


def test_create_and_replace_flags(path: Path) -> None:
    assert errno_of(lambda: os.setxattr(path, "user.a", b"1", os.XATTR_REPLACE)) == errno.ENODATA
    os.setxattr(path, "user.a", b"1", os.XATTR_CREATE)
    assert errno_of(lambda: os.setxattr(path, "user.a", b"2", os.XATTR_CREATE)) == errno.EEXIST
    assert os.getxattr(path, "user.a") == b"1"
    os.setxattr(path, "user.a", b"2", os.XATTR_REPLACE)
    assert os.getxattr(path, "user.a") == b"2"


def test_no_attributes_at_first(path: Path) -> None:
    assert listed(path) == []


def test_name_limits_and_other_namespaces(path: Path) -> None:
    os.setxattr(path, "user." + "n" * 250, b"1")
    assert errno_of(lambda: os.setxattr(path, "user." + "n" * 251, b"1")) == errno.ERANGE
    code = errno_of(lambda: os.setxattr(path, "user.big", b"x" * 65537))
    assert code in (errno.E2BIG, errno.ENOSPC)
    assert errno_of(lambda: os.setxattr(path, "nonsense.a", b"1")) == errno.EOPNOTSUPP


def test_attributes_of_an_open_unlinked_file(workdir: Path) -> None:
    handle = os.open(workdir / "f", os.O_CREAT | os.O_RDWR)
    os.unlink(workdir / "f")
    os.setxattr(handle, "user.a", b"1")
    assert os.getxattr(handle, "user.a") == b"1"
    assert listed(handle) == ["user.a"]
    os.close(handle)


def test_attributes_follow_rename_and_hard_link(workdir: Path) -> None:
    (workdir / "f").write_bytes(b"")
    os.setxattr(workdir / "f", "user.a", b"1")
    os.link(workdir / "f", workdir / "g")
    os.rename(workdir / "f", workdir / "h")
    assert os.getxattr(workdir / "g", "user.a") == os.getxattr(workdir / "h", "user.a") == b"1"


def test_attributes_do_not_outlive_the_file(workdir: Path) -> None:
    (workdir / "f").write_bytes(b"")
    os.setxattr(workdir / "f", "user.a", b"1")
    os.unlink(workdir / "f")
    (workdir / "f").write_bytes(b"")
    assert listed(workdir / "f") == []


def test_user_attributes_are_not_for_symlinks_and_special_files(workdir: Path) -> None:
    os.symlink("nowhere", workdir / "s")
    os.mkfifo(workdir / "p")
    for name in ("s", "p"):
        code = errno_of(lambda name=name: os.setxattr(workdir / name, "user.a", b"1", follow_symlinks=False))
        assert code == errno.EPERM


def test_attributes_obey_permissions(workdir: Path, other_user: tuple[int, int]) -> None:
    (workdir / "f").write_bytes(b"")
    os.setxattr(workdir / "f", "user.a", b"1")
    os.chmod(workdir / "f", 0o644)
    read = as_user(*other_user, lambda: os.getxattr(workdir / "f", "user.a"))
    assert read == b"1"
    code = as_user(*other_user, lambda: errno_of(lambda: os.setxattr(workdir / "f", "user.a", b"2")))
    assert code == errno.EACCES
    os.chmod(workdir / "f", 0o600)
    assert (
        as_user(*other_user, lambda: errno_of(lambda: os.getxattr(workdir / "f", "user.a"))) == errno.EACCES
    )


def test_many_attributes(workdir: Path) -> None:
    (workdir / "f").write_bytes(b"")
    for i in range(30):
        os.setxattr(workdir / "f", f"user.k{i:03}", str(i).encode())
    assert listed(workdir / "f") == [f"user.k{i:03}" for i in range(30)]
    assert all(os.getxattr(workdir / "f", f"user.k{i:03}") == str(i).encode() for i in range(30))
