"""Cases C01 to C08: versions, lengths, names, sparse files, visibility, directories, unlinked files."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import subprocess
import threading
from pathlib import Path

import pytest

from tests.support.mount import Mounted, MountFactory, wait_until
from tests.support.posix import errno_of

BLOCK = 128 * 1024
MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("needs_mount")


def replace(path: Path, data: bytes) -> None:
    """As another S3 client does: a new version under the same key."""
    draft = path.with_name(path.name + ".draft~")
    draft.write_bytes(data)
    draft.rename(path)


@pytest.mark.semantics(
    "S-SEE-2",
    "What others create, replace or delete in the store is seen by a new open or listing after the time-to-live (`--ttl`, 60 s) at the latest.",
)
def test_c01_object_grows_while_its_metadata_is_cached(mount_factory: MountFactory) -> None:
    mounted = mount_factory.prepare(options=("--ttl", "1"))
    (mounted.store_dir / "f").write_bytes(b"o" * 10)
    mounted.start()
    assert os.stat(mounted.path / "f").st_size == 10
    replace(mounted.store_dir / "f", b"n" * 100)

    def fresh_open() -> bytes:
        try:
            data = (mounted.path / "f").read_bytes()
        except OSError as error:
            assert error.errno == errno.ESTALE
            return b""
        assert data in (b"o" * 10, b"n" * 100), "neither version"
        return data

    wait_until(lambda: fresh_open() == b"n" * 100, "the new version", 30)
    assert os.stat(mounted.path / "f").st_size == 100


def test_c01_with_a_time_to_live_of_ever(mount_factory: MountFactory) -> None:
    """Inside the time-to-live a fresh open gives one version or ESTALE, never the old length with new bytes."""
    mounted = mount_factory.prepare(options=("--ttl", "100000"))
    (mounted.store_dir / "f").write_bytes(b"o" * 10)
    mounted.start()
    assert os.stat(mounted.path / "f").st_size == 10
    replace(mounted.store_dir / "f", b"n" * 100)
    for _ in range(3):
        try:
            assert (mounted.path / "f").read_bytes() in (b"o" * 10, b"n" * 100)
        except OSError as error:
            assert error.errno == errno.ESTALE
            break
    wait_until(lambda: errno_of((mounted.path / "f").read_bytes) == 0, "recovery from ESTALE", 30)


@pytest.mark.semantics(
    "S-READ-1",
    "Everything read through one open file is from one version of the object; two versions are never mixed.",
)
@pytest.mark.semantics(
    "S-READ-2",
    "A file that was open when others replaced its object keeps giving the old bytes while they can be had, and ESTALE when they cannot.",
)
@pytest.mark.parametrize("tiers", [None, ()], ids=["tier", "no tier"])
def test_c01_reader_of_a_replaced_object(mount_factory: MountFactory, tiers: tuple[str, ...] | None) -> None:
    size = 40 * MIB
    mounted = mount_factory.prepare(options=("--ttl", "0.5", "--read-ahead", "1M"), tiers=tiers)
    (mounted.store_dir / "f").write_bytes(b"o" * size)
    mounted.start()
    handle = os.open(mounted.path / "f", os.O_RDONLY)
    assert os.pread(handle, BLOCK, 0) == b"o" * BLOCK
    replace(mounted.store_dir / "f", b"n" * size)
    outcomes = set()
    for offset in range(0, size, 4 * MIB):
        try:
            data = os.pread(handle, 4 * MIB, offset)
            assert set(data) == {ord("o")}
            outcomes.add("old")
        except OSError as error:
            assert error.errno == errno.ESTALE
            outcomes.add("stale")
    os.close(handle)
    assert outcomes
    wait_until(lambda: errno_of((mounted.path / "f").read_bytes) == 0, "an end of ESTALE", 30)
    wait_until(lambda: (mounted.path / "f").read_bytes()[:1] == b"n", "the new version", 30)
    assert set((mounted.path / "f").read_bytes()) == {ord("n")}


@pytest.mark.parametrize("tiers", [None, ()], ids=["tier", "no tier"])
def test_c02_no_length_loses_its_tail(mount_factory: MountFactory, tiers: tuple[str, ...] | None) -> None:
    mounted = mount_factory.prepare(tiers=tiers, options=("--part-size", "5M", "--read-ahead", "1M"))
    chance = random.Random(2)
    sizes = [k * BLOCK + d for k in range(1, 7) for d in (-1, 0, 1, 976)]
    sizes += [base + d for base in (MIB, 5 * MIB, 8 * MIB, 20 * MIB) for d in (-1, 0, 1, 976)]
    digests = {}
    for size in sizes:
        data = chance.randbytes(size)
        (mounted.store_dir / f"s{size}").write_bytes(data)
        digests[size] = hashlib.sha256(data).hexdigest()
    mounted.start()
    for size in sizes:
        with open(mounted.path / f"s{size}", "rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == digests[size]
            assert file.tell() == size == os.fstat(file.fileno()).st_size


NAMES = [
    "a b",
    "a+b",
    "a%20b",
    "100%.csv",
    "folder#1#/x",
    "한글/x",
    "\u00e9",
    "e\u0301",
    "?q=1&r",
    "a\\b",
    "=",
    "~",
    "&amp;",
]


def test_c04_names_round_trip_both_ways(mount_factory: MountFactory) -> None:
    mounted = mount_factory.prepare()
    for name in NAMES:
        path = mounted.store_dir / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    mounted.start()

    def names_below(top: Path) -> list[str]:
        return sorted(str(p.relative_to(top)) for p in top.rglob("*") if p.is_file())

    assert names_below(mounted.path / "in") == sorted(NAMES)
    for name in NAMES:
        assert (mounted.path / "in" / name).read_bytes() == name.encode()
        path = mounted.path / "out" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    mounted.flush()
    assert names_below(mounted.store_dir / "out") == sorted(NAMES)


def test_c05_sparse_files(mounted: Mounted, base_dir: Path) -> None:
    source = base_dir / "s"
    with open(source, "wb") as file:
        file.truncate(1 << 30)
        file.seek((1 << 30) - 1)
        file.write(b"x")
    subprocess.run(["cp", "--sparse=always", str(source), str(mounted.path / "s")], check=True)
    assert os.stat(mounted.path / "s").st_size == 1 << 30
    with open(mounted.path / "s", "rb") as file:
        for offset in (0, 123 * MIB, 512 * MIB, (1 << 30) - 4097):
            assert os.pread(file.fileno(), 4096, offset) == bytes(4096)
        assert os.pread(file.fileno(), 10, (1 << 30) - 1) == b"x"
    used = sum(tier["used_bytes"] for tier in mounted.status()["tiers"])
    assert used < 100 * MIB
    os.unlink(mounted.path / "s")
    with open(mounted.path / "t", "w+b", buffering=0) as file:
        file.truncate(64 * MIB)
        for offset in (0, 20 * MIB + 5, 63 * MIB):
            os.pwrite(file.fileno(), b"data", offset)
    mounted.flush()
    data = (mounted.store_dir / "t").read_bytes()
    assert len(data) == 64 * MIB
    assert data.count(0) == 64 * MIB - 12
    assert data[20 * MIB + 5 :][:4] == b"data"


def test_c06_appended_lines_are_seen_by_another_mount(mount_factory: MountFactory) -> None:
    one = mount_factory(options=("--upload-delay", "0"))
    two = mount_factory(source=one.source, options=("--ttl", "0.5", "--negative-ttl", "0.1"))
    (one.path / "f").write_bytes(b"first line\n")
    one.flush()
    wait_until(lambda: errno_of((two.path / "f").read_bytes) == 0, "the file on the other mount", 30)
    with open(one.path / "f", "a") as file:
        for i in range(10_000):
            file.write(f"line {i}\n")
    one.flush()
    wait_until(lambda: (two.path / "f").read_bytes().count(b"\n") == 10_001, "all lines", 30)


def test_c06_slow_writer_never_shows_zeros(mount_factory: MountFactory) -> None:
    one = mount_factory(options=("--upload-delay", "0"))
    two = mount_factory(source=one.source, options=("--ttl", "0.1", "--negative-ttl", "0.05"))
    done = threading.Event()
    wrong: list[bytes] = []

    def watch() -> None:
        while not done.is_set():
            try:
                data = (two.path / "f").read_bytes()
            except OSError as error:
                assert error.errno in (errno.ENOENT, errno.ESTALE), error
                continue
            if data.strip(b"x"):
                wrong.append(data)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(40):
        with open(one.path / "f", "ab") as file:
            file.write(b"x" * 3000)
            file.flush()
            os.fsync(file.fileno())
    one.flush()
    wait_until(lambda: errno_of((two.path / "f").read_bytes) == 0, "the file on the other mount", 30)
    done.set()
    watcher.join()
    assert not wrong
    wait_until(lambda: (two.path / "f").read_bytes() == b"x" * 120_000, "all of it", 30)


def test_c07_creators_and_a_lister(workdir: Path) -> None:
    """700 entries; ten threads create and stat their own files while another lists."""
    names = {f"old{i}" for i in range(700)}
    for name in names:
        (workdir / name).write_bytes(b"")
    failures: list[BaseException] = []
    done = threading.Event()

    def create(worker: int) -> None:
        try:
            for i in range(40):
                path = workdir / f"w{worker}-{i}"
                path.write_bytes(b"x")
                assert path.stat().st_size == 1
                assert path.read_bytes() == b"x"
        except BaseException as error:
            failures.append(error)

    def list_all() -> None:
        try:
            while not done.is_set():
                seen = os.listdir(workdir)
                assert len(seen) == len(set(seen))
                assert names <= set(seen)
        except BaseException as error:
            failures.append(error)

    lister = threading.Thread(target=list_all)
    creators = [threading.Thread(target=create, args=(n,)) for n in range(10)]
    for thread in [lister, *creators]:
        thread.start()
    for thread in creators:
        thread.join()
    done.set()
    lister.join()
    assert not failures
    assert len(os.listdir(workdir)) == 700 + 400


@pytest.mark.semantics(
    "S-MOVE-4", "A removed file lives until its last close, and never reaches the store afterwards."
)
def test_c08_writes_to_an_unlinked_file_vanish(mount_factory: MountFactory) -> None:
    mounted = mount_factory(options=("--upload-delay", "0"))
    (mounted.path / "p").write_bytes(b"uploaded before")
    mounted.flush()
    for name in ("p", "q"):
        handle = os.open(mounted.path / name, os.O_CREAT | os.O_RDWR | os.O_APPEND)
        os.unlink(mounted.path / name)
        os.write(handle, b"x")
        os.fsync(handle)
        os.close(handle)
    mounted.flush()
    assert errno_of(lambda: os.stat(mounted.path / "p")) == errno.ENOENT
    assert not (mounted.store_dir / "p").exists()
    assert not (mounted.store_dir / "q").exists()
    mounted.umount()
    assert not (mounted.store_dir / "p").exists()
    mounted.start()
    assert os.listdir(mounted.path) == []


def test_c08_reader_keeps_the_replaced_version(mounted: Mounted) -> None:
    old, new = os.urandom(2 * MIB), os.urandom(MIB)
    (mounted.path / "v").write_bytes(old)
    mounted.flush()
    reader = os.open(mounted.path / "v", os.O_RDONLY)
    assert os.read(reader, 1000) == old[:1000]
    (mounted.path / "tmp").write_bytes(new)
    os.replace(mounted.path / "tmp", mounted.path / "v")
    assert (mounted.path / "v").read_bytes() == new
    mounted.flush()
    assert os.pread(reader, 2 * MIB, 0) == old
    os.close(reader)
    assert (mounted.store_dir / "v").read_bytes() == new
    assert not (mounted.store_dir / "tmp").exists()
