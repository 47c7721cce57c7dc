"""What the front takes records for is what the namespace writes: same offsets, sizes, flags and limits."""

from __future__ import annotations

import re
import struct
import subprocess

import pytest

from tests.native.conftest import NativeBuild
from tierfs.namespace import schema
from tierfs.types import Inode

TOKEN = re.compile(r"(\d*)([a-zA-Z])")


def layout(record: struct.Struct, names: list[str]) -> dict[str, tuple[int, int]]:
    """Field -> (offset, size) of a format string without implicit padding; pad bytes are ``reserved``."""
    assert record.format.startswith("<")
    fields: dict[str, tuple[int, int]] = {}
    offset = 0
    left = iter([*names, "reserved"])
    for count, kind in TOKEN.findall(record.format):
        repeats = 1 if kind in "sx" or not count else int(count)
        size = struct.calcsize(f"<{count}{kind}") // repeats
        for _ in range(repeats):
            fields[next(left)] = (offset, size)
            offset += size
    assert offset == record.size
    return fields


@pytest.fixture(scope="session")
def c_layout(native_build: NativeBuild) -> list[str]:
    tool = native_build.executable("record-layout")
    return subprocess.run([tool], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


@pytest.mark.parametrize(
    ("name", "record", "fields"),
    [
        ("tierfs_dirent", schema.DIRENT, ["ino", "seq", "type"]),
        ("tierfs_dirseq", schema.DIRSEQ, ["ino", "type"]),
        ("tierfs_inode", schema.INODE, list(Inode.__struct_fields__)),
    ],
)
def test_layout(name: str, record: struct.Struct, fields: list[str], c_layout: list[str]) -> None:
    in_c = {
        field: (int(offset), int(size))
        for struct_name, field, offset, size in (
            line.split() for line in c_layout if re.fullmatch(r"\w+ \w+ \d+ \d+", line)
        )
        if struct_name == name
    }
    assert in_c == layout(record, fields)
    assert f"{name} = {record.size}" in c_layout


def test_constants(c_layout: list[str]) -> None:
    constants = dict(
        line.split(" = ") for line in c_layout if " = " in line and not line.startswith("tierfs_")
    )
    assert len(constants) == 6
    for name, value in constants.items():
        assert getattr(schema, name) == int(value), name
