"""What outside test suites found about extended attributes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.support.posix import as_user, errno_of

CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")
"""``security.capability`` in version 2: cap_net_bind_service, permitted and effective."""

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root")


@needs_root
def test_security_attributes_of_files_and_links(workdir: Path) -> None:
    """(LTP lgetxattr01, listxattr01)"""
    path, link = workdir / "f", workdir / "l"
    path.write_bytes(b"")
    link.symlink_to("f")
    os.setxattr(path, "security.ltptest", b"file")
    os.setxattr(link, "security.ltptest", b"link", follow_symlinks=False)
    assert os.getxattr(path, "security.ltptest") == b"file"
    assert os.getxattr(link, "security.ltptest", follow_symlinks=False) == b"link"
    assert "security.ltptest" in os.listxattr(path)
    assert (
        errno_of(lambda: as_user(1234, 1234, lambda: os.setxattr(path, "security.ltptest", b"x")))
        == errno.EPERM
    )
    os.removexattr(path, "security.ltptest")
    assert errno_of(lambda: os.getxattr(path, "security.ltptest")) == errno.ENODATA


@needs_root
@pytest.mark.skipif(os.path.exists("/sys/fs/selinux/enforce"), reason="the kernel answers for labels itself")
def test_labels(workdir: Path, front: str) -> None:
    """They are kept, but where there is none the answer is that of a file system without them (ls -l)."""
    path, other = workdir / "f", workdir / "g"
    path.write_bytes(b"")
    other.write_bytes(b"")
    os.setxattr(path, "user.a", b"1")
    os.setxattr(other, "security.selinux", b"label")
    assert os.getxattr(other, "security.selinux") == b"label"
    os.removexattr(other, "security.selinux")
    for unlabelled in (path, other, workdir):
        code = errno_of(lambda unlabelled=unlabelled: os.getxattr(unlabelled, "security.selinux"))  # type: ignore[misc]
        assert code == (errno.EOPNOTSUPP if front != "plain" else errno.ENODATA)


@needs_root
@pytest.mark.parametrize("change", ["write", "chown"])
def test_a_file_that_changes_loses_its_capabilities(workdir: Path, change: str) -> None:
    path = workdir / "f"
    path.write_bytes(b"program")
    path.chmod(0o755)
    os.setxattr(path, "security.capability", CAPABILITY)
    assert os.getxattr(path, "security.capability") == CAPABILITY
    if change == "write":
        path.write_bytes(b"another")
    else:
        os.chown(path, 1234, 1234)
    assert errno_of(lambda: os.getxattr(path, "security.capability")) == errno.ENODATA


@needs_root
def test_only_root_is_shown_trusted_attributes(workdir: Path) -> None:
    path = workdir / "f"
    path.write_bytes(b"")
    os.setxattr(path, "trusted.a", b"1")
    os.setxattr(path, "user.b", b"2")
    assert {"trusted.a", "user.b"} <= set(os.listxattr(path))
    seen = as_user(1234, 1234, lambda: os.listxattr(path))
    assert "user.b" in seen
    assert "trusted.a" not in seen
