"""Names of any bytes."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.support.mount import Mounted

NAMES = [
    b"plain",
    b" lead",
    b"trail ",
    b"a b",
    b"a+b",
    b"a%20b",
    b"100%.csv",
    b"#1#",
    b"?",
    b"*",
    b"a\\b",
    b"'",
    b'"',
    b"\n",
    b"\t",
    b"\x01",
    b"\x7f",
    b"-rf",
    b"...",
    b"..a",
    b".a",
    b"~",
    b"&<>;|`$()",
    b":",
    b"a:b",
    b"=",
    "\u00e9".encode(),
    "e\u0301".encode(),
    "\ud55c\uae00".encode(),
    "\U0001f600".encode(),
    "\u202e".encode(),
    "\ufeff".encode(),
    "\uf780".encode(),
    "\uf7ff".encode(),
    "\ufffd".encode(),
    "\ufffe".encode(),
    b"\xff",
    b"\x80",
    b"\xc3",
    b"\xc3\x28",
    b"a\xffb",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"\xc0\x80",
    b"n" * 255,
    "\u00e9".encode() * 127,
    b"\xff" * 255,
    b"UPPER",
    b"upper",
    b".tierfs-not",
    b"CON",
    b"aux.txt",
]


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_every_name_round_trips(workdir: Path, kind: str) -> None:
    here = bytes(workdir) + b"/"
    for name in NAMES:
        if kind == "directory":
            os.mkdir(here + name)
        else:
            with open(here + name, "wb") as file:
                file.write(name)
    assert sorted(os.listdir(bytes(workdir))) == sorted(NAMES)
    for name in NAMES:
        if kind == "file":
            with open(here + name, "rb") as file:
                assert file.read() == name
        else:
            assert os.listdir(here + name) == []


@pytest.mark.semantics(
    "S-NAME-1",
    "A name is 1 to 255 arbitrary bytes except `/` and NUL, and comes back byte for byte, also from the store.",
)
def test_random_names_survive_a_remount(mounted: Mounted) -> None:
    """Also after the objects are in the store and the names come back from its keys."""
    chance = random.Random(20240229)
    names: set[bytes] = set(NAMES)
    while len(names) < 150:
        name = bytes(chance.choice(range(1, 256)) for _ in range(chance.randrange(1, 40))).replace(b"/", b"_")
        if name not in (b".", b".."):
            names.add(name)
    here = bytes(mounted.path) + b"/"
    for name in names:
        with open(here + name, "wb") as file:
            file.write(b"content of " + name)
    mounted.remount()
    assert sorted(os.listdir(bytes(mounted.path))) == sorted(names)
    for name in names:
        with open(here + name, "rb") as file:
            assert file.read() == b"content of " + name


def test_deep_path(workdir: Path) -> None:
    here = os.open(workdir, os.O_RDONLY)
    top = here
    for i in range(100):
        os.mkdir(f"d{i}" + "x" * 50, dir_fd=here)
        below = os.open(f"d{i}" + "x" * 50, os.O_RDONLY, dir_fd=here)
        if here != top:
            os.close(here)
        here = below
    handle = os.open("deep", os.O_CREAT | os.O_WRONLY, dir_fd=here)
    os.write(handle, b"down here")
    os.close(handle)
    handle = os.open("deep", os.O_RDONLY, dir_fd=here)
    assert os.read(handle, 100) == b"down here"
    os.close(handle)
    os.close(here)
    os.close(top)
