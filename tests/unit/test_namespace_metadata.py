"""Mode, owner and time in object metadata, as s3fs and rclone write them; untrusted."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tests.support.namespace import open_namespace
from tierfs.namespace.metadata import Attributes, attributes_of, metadata_of


def test_what_others_write() -> None:
    assert attributes_of({"mode": "33188", "uid": "0", "gid": "100", "mtime": "1700000000"}) == Attributes(
        stat.S_IFREG | 0o644, 0, 100, 1_700_000_000 * 10**9
    )
    assert attributes_of({"mtime": "1700000000.123456789"}).mtime_ns == 1_700_000_000_123_456_789
    assert attributes_of({"mtime": "1.5"}).mtime_ns == 1_500_000_000
    assert attributes_of({"mode": "420"}).mode == stat.S_IFREG | 0o644
    assert attributes_of({"mode": str(stat.S_IFLNK | 0o777)}).mode == stat.S_IFLNK | 0o777


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {},
        {"mode": ""},
        {"mode": "-1"},
        {"mode": "0x1ff"},
        {"mode": "99999999999999999999"},
        {"mode": str(0o030644)},
        {"mode": "٣"},
        {"uid": "4294967295"},
        {"mtime": "nan"},
        {"mtime": "-5"},
        {"mtime": "1e9"},
        {"mtime": "9" * 400},
        {"mtime": "1.5.5"},
    ],
)
def test_what_does_not_parse_is_not_there(metadata: dict[str, str] | None) -> None:
    assert attributes_of(metadata) == Attributes()


def test_round_trip(tmp_path: Path) -> None:
    with open_namespace(tmp_path) as ns:
        inode = ns.create("f", mode=stat.S_IFREG | 0o4711, uid=1, gid=2)
    assert attributes_of(metadata_of(inode)) == Attributes(inode.mode, 1, 2, inode.mtime_ns)
