"""Random changes of whole files and of ranges, with remounts, uploads, evictions and killed engines between.

``TIERFS_RANGE_STEPS=5000`` lengthens it. On a plain directory it tests itself.
"""

from __future__ import annotations

import errno
import os
import random

import pytest

from tests.support.front import kill_engine
from tests.support.mount import Mounted, MountFactory, files_below
from tests.support.posix import KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE, errno_of, fallocate

BLOCK = 128 * 1024
PUNCH = PUNCH_HOLE | KEEP_SIZE
STEPS = int(os.environ.get("TIERFS_RANGE_STEPS", "400"))


class Mixer:
    """Random changes of a few files, each applied to a bytearray as well, and all of it compared."""

    def __init__(self, mounted: Mounted, seed: int) -> None:
        self.chance = random.Random(seed)
        self.mounted = mounted
        self.expected: dict[str, bytearray] = {}
        self.handles: dict[str, int] = {}
        self.did: list[str] = []

    def where(self) -> int:
        edge = self.chance.choice([0, 4096, BLOCK, 2 * BLOCK, 4 * BLOCK, 8 << 20])
        return max(0, edge + self.chance.choice([0, 0, -1, 1, self.chance.randrange(-5000, 5000)]))

    def length(self) -> int:
        return max(1, self.chance.choice([1, 100, 4096, BLOCK, 3 * BLOCK]) + self.chance.choice([0, 0, -1, 1, 77]))

    def open(self, name: str) -> int:
        if name not in self.handles:
            self.handles[name] = os.open(self.mounted.path / name, os.O_RDWR | os.O_CREAT, 0o644)
            self.expected.setdefault(name, bytearray())
        return self.handles[name]

    def close(self, name: str) -> None:
        os.close(self.handles.pop(name))

    def close_all(self) -> None:
        for name in list(self.handles):
            self.close(name)

    def put(self, name: str, offset: int, data: bytes) -> None:
        known = self.expected[name]
        if offset > len(known):
            known += bytes(offset - len(known))
        known[offset : offset + len(data)] = data

    def step(self) -> None:
        name = self.chance.choice("abc")
        handle, known = self.open(name), self.expected[name]
        offset, length = self.where(), self.length()
        kinds = {
            "write": 4, "truncate": 1, "allocate": 1, "keep": 1, "punch": 3, "zero": 2, "zero keep": 1,
            "copy": 3, "read": 3, "seek": 2, "close": 1, "sync": 1, "replace": 1,
        }  # fmt: skip
        kind = self.chance.choices(list(kinds), list(kinds.values()))[0]
        self.did.append(f"{kind} {name} {offset} {length}")
        if kind == "write":
            data = self.chance.randbytes(length)
            os.pwrite(handle, data, offset)
            self.put(name, offset, data)
        elif kind == "truncate":
            os.ftruncate(handle, offset)
            del known[offset:]
            known += bytes(offset - len(known))
        elif kind in ("allocate", "keep"):
            fallocate(handle, KEEP_SIZE if kind == "keep" else 0, offset, length)
            if kind == "allocate" and offset + length > len(known):
                known += bytes(offset + length - len(known))
        elif kind in ("punch", "zero", "zero keep"):
            mode = {"punch": PUNCH, "zero": ZERO_RANGE, "zero keep": ZERO_RANGE | KEEP_SIZE}[kind]
            fallocate(handle, mode, offset, length)
            if kind == "zero" and offset + length > len(known):
                known += bytes(offset + length - len(known))
            end = min(offset + length, len(known))
            if end > offset:
                known[offset:end] = bytes(end - offset)
        elif kind == "copy":
            self.copy(name, offset, length)
        elif kind == "read":
            assert os.pread(handle, length, offset) == known[offset : offset + length], self.did[-30:]
        elif kind == "seek":
            self.seek(handle, known, offset)
        elif kind == "close":
            self.close(name)
        elif kind == "sync":
            os.fsync(handle)
        else:
            self.close(name)
            os.rename(self.mounted.path / name, self.mounted.path / "c2")
            self.expected["c2"] = self.expected.pop(name)
        if name in self.handles:
            assert os.fstat(self.handles[name]).st_size == len(known), self.did[-30:]

    def copy(self, target: str, at: int, length: int) -> None:
        source = self.chance.choice("abc")
        start = self.where()
        self.open(source)
        if source == target and start < at + length and at < start + length:
            return
        copied = os.copy_file_range(self.handles[source], self.handles[target], length, start, at)
        self.did.append(f"copied {source} {start} to {target} {at}: {copied} of {length}")
        data = bytes(self.expected[source][start : start + length])
        assert 0 < copied <= len(data) or copied == len(data) == 0, self.did[-30:]
        if copied:
            self.put(target, at, data[:copied])

    def seek(self, handle: int, known: bytearray, offset: int) -> None:
        """A hole holds zeros; data may."""
        try:
            data_at = os.lseek(handle, offset, os.SEEK_DATA)
        except OSError as error:
            assert error.errno == errno.ENXIO
            data_at = len(known)
        assert not any(known[offset:data_at]), self.did[-30:]
        if offset < len(known):
            assert offset <= os.lseek(handle, offset, os.SEEK_HOLE) <= len(known), self.did[-30:]
        else:
            assert errno_of(lambda: os.lseek(handle, offset, os.SEEK_HOLE)) == errno.ENXIO

    def disturb(self) -> None:
        """What no application may notice."""
        mounted = self.mounted
        events = ["remount", "flush", "evict", "evict"] + ["kill"] * 2 * (mounted.front == "native")
        kind = self.chance.choice(events)
        self.did.append(kind)
        if mounted.is_plain:
            return
        if kind == "kill":
            kill_engine(mounted)
        elif kind == "flush":
            mounted.cli("flush", str(mounted.path), check=False)  # says no while files are open for writing
        elif kind == "evict":
            self.close_all()
            mounted.flush()
            mounted.cli("evict", str(mounted.path))
        else:
            self.close_all()
            mounted.remount()

    def compare(self) -> None:
        for name, known in self.expected.items():
            assert (self.mounted.path / name).read_bytes() == known, (name, self.did[-60:])


@pytest.mark.limit_s(120 + STEPS * 0.5)
@pytest.mark.parametrize("seed", [1, 2])
def test_mixed_with_everything_else(mount_factory: MountFactory, front: str, seed: int) -> None:
    if front == "python":
        pytest.skip("pyfuse3 does not know these calls: with the Python front they are refused")
    mounted = mount_factory(options=("--upload-delay", "0.3"))
    mixer = Mixer(mounted, seed)
    try:
        for number in range(1, STEPS + 1):
            mixer.step()
            if number % 25 == 0:
                mixer.disturb()
            if number % 100 == 0:
                mixer.compare()
    finally:
        mixer.close_all()
    mixer.compare()
    if mounted.is_plain:
        return
    mounted.umount()
    assert files_below(mounted.store_dir) == mixer.expected
    mounted.cli("meta", "check", "--state-dir", str(mounted.state_dir))
