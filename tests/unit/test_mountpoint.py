"""Mountpoints from mountinfo, without touching what is mounted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierfs import mountpoint
from tierfs.errors import MountError

LINES = rb"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 22 0:40 / /mnt/data rw,nosuid,nodev shared:9 - fuse.tierfs s3://bucket/data rw,user_id=0,allow_other
41 22 0:41 / /mnt/with\040blank rw - fuse.tierfs s3://b\134x rw
42 22 0:42 / /mnt/sshfs rw - fuse.sshfs host: rw
43 40 0:43 / /mnt/data/inner rw - tmpfs tmpfs rw
44 22 0:44 / /mnt/covered rw - fuse.tierfs s3://low rw
45 44 0:45 / /mnt/covered rw master:1 propagate_from:2 - tmpfs tmpfs rw
garbage
"""
KNOWN = mountpoint.parse_mountinfo(LINES)


def test_lines_are_parsed_with_optional_fields_and_escapes() -> None:
    assert [mount.path for mount in KNOWN] == [
        "/", "/mnt/data", "/mnt/with blank", "/mnt/sshfs", "/mnt/data/inner", "/mnt/covered", "/mnt/covered",
    ]  # fmt: skip
    assert KNOWN[1].source == "s3://bucket/data"
    assert KNOWN[1].is_tierfs
    assert KNOWN[2].source == "s3://b\\x"
    assert not KNOWN[3].is_tierfs
    assert KNOWN[6].fstype == "tmpfs"


def test_only_mounts_on_top_count() -> None:
    assert [mount.path for mount in mountpoint.tierfs_mounts(KNOWN)] == ["/mnt/data", "/mnt/with blank"]
    top = mountpoint.mount_at("/mnt/covered", KNOWN)
    assert top is not None
    assert top.fstype == "tmpfs"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/mnt/data", "/mnt/data"),
        ("/mnt/data/a/b", "/mnt/data"),
        ("/mnt/database", None),
        ("/mnt/data/inner/x", None),
        ("/mnt/sshfs/x", None),
        ("/mnt/covered/x", None),
        ("/", None),
    ],
)
def test_a_path_belongs_to_the_deepest_mount_above_it(path: str, expected: str | None) -> None:
    found = mountpoint.mount_of(path, KNOWN)
    assert (found.path if found else None) == expected


def test_symbolic_links_are_resolved_up_to_a_tierfs_mount_and_not_below(tmp_path: Path) -> None:
    point = tmp_path / "point"
    (point / "below").mkdir(parents=True)
    (point / "link").symlink_to("below")
    (tmp_path / "to-point").symlink_to("point")
    known = [mountpoint.MountInfo(1, "0:1", str(point), mountpoint.FSTYPE, "s3://b", "rw")]
    assert mountpoint.canonical(tmp_path / "to-point" / "link", []) == str(point / "below")
    assert mountpoint.canonical(tmp_path / "to-point" / "link", known) == str(point / "link")
    assert mountpoint.canonical(tmp_path / "to-point" / "x" / ".." / "y", known) == str(point / "y")


def test_a_circle_of_links_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(MountError, match="symbolic links"):
        mountpoint.canonical(tmp_path / "a")


def test_a_living_directory_is_live(tmp_path: Path) -> None:
    assert mountpoint.probe(str(tmp_path), timeout_s=30) == "live"


def test_prepare_names_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(MountError, match="not a directory"):
        mountpoint.prepare(str(file))
    with pytest.raises(MountError, match="no such directory"):
        mountpoint.prepare(str(tmp_path / "absent"))
    with pytest.raises(MountError, match="type proc"):
        mountpoint.prepare("/proc")
    assert mountpoint.prepare(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize(("state", "word"), [("live", "unmount it first"), ("hung", "umount --force")])
def test_prepare_refuses_a_tierfs_mount_that_is_not_dead(
    monkeypatch: pytest.MonkeyPatch, state: str, word: str
) -> None:
    monkeypatch.setattr(mountpoint, "mounts", lambda: KNOWN)
    monkeypatch.setattr(mountpoint, "probe", lambda _path: state)
    with pytest.raises(MountError, match=word):
        mountpoint.prepare("/mnt/data")


def test_prepare_detaches_dead_mounts_of_our_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stack = [mountpoint.MountInfo(n, "0:1", str(tmp_path), mountpoint.FSTYPE, "s3://b", "rw") for n in (1, 2)]
    detached = []

    def unmount(path: str, *, lazy: bool) -> None:
        detached.append((path, lazy))
        stack.pop()

    monkeypatch.setattr(mountpoint, "mounts", lambda: stack)
    monkeypatch.setattr(mountpoint, "probe", lambda _path: "dead")
    monkeypatch.setattr(mountpoint, "unmount", unmount)
    assert mountpoint.prepare(str(tmp_path)) == str(tmp_path)
    assert detached == [(str(tmp_path), True)] * 2


def test_the_name_for_the_kernel_survives_libfuse() -> None:
    assert mountpoint.fsname_of("s3://b/a,b\\c\n") == "s3://b/a\\,b\\\\c?"
