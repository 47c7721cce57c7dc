"""The store is down, throttles, hangs, lies; the mount goes on, and recovers by itself."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support.mount import Mounted, MountFactory, wait_until
from tests.support.posix import errno_of

pytestmark = pytest.mark.usefixtures("needs_mount")

OUTAGE = {"kind": "outage"}
STORE_ERRORS = (errno.EIO, errno.ETIMEDOUT)


@pytest.fixture
def mounted(mount_factory: MountFactory) -> Mounted:
    """Short time-to-lives and timeouts, and some content in the store."""
    options = ("--store-timeout", "2", "--ttl", "1", "--negative-ttl", "0.1", "--upload-delay", "0.1")
    mounted = mount_factory.prepare(options=options)
    chance = random.Random(11)
    for i in range(6):
        (mounted.store_dir / f"f{i}").write_bytes(chance.randbytes(400_000 + i))
    (mounted.store_dir / "d").mkdir()
    (mounted.store_dir / "d" / "below").write_bytes(b"below")
    return mounted.start()


def content(mounted: Mounted, name: str) -> bytes:
    return (mounted.store_dir / name).read_bytes()


@pytest.mark.semantics(
    "S-READ-4", "What a tier holds is read without the store, also while the store cannot be reached."
)
@pytest.mark.semantics(
    "S-SEE-5",
    "While the store fails, what its last complete listing said is served, missing names included (so that files can be created); a name in a directory that was never listed gives the store's error.",
)
@pytest.mark.semantics(
    "S-FAIL-1",
    'While the store fails, requests that need it are tried again for `--store-timeout` and then fail with EIO or ETIMEDOUT; a failure is never taken for "does not exist".',
)
def test_outage_after_reading(mounted: Mounted) -> None:
    assert (mounted.path / "f0").read_bytes() == content(mounted, "f0")
    mounted.fail(OUTAGE)
    for _ in range(2):
        assert (mounted.path / "f0").read_bytes() == content(mounted, "f0")
        assert os.stat(mounted.path / "f1").st_size == 400_001
        time.sleep(1.1)  # past the time-to-live
    assert errno_of((mounted.path / "f1").read_bytes) in STORE_ERRORS
    assert errno_of(lambda: os.stat(mounted.path / "unknown")) == errno.ENOENT


def test_outage_and_a_directory_that_was_never_listed(mount_factory: MountFactory) -> None:
    mounted = mount_factory.prepare(options=("--store-timeout", "1", "--ttl", "1", "--negative-ttl", "0.1"))
    for i in range(1100):  # too many for the first answer to hold what is below the directories
        (mounted.store_dir / f"f{i}").write_bytes(b"")
    (mounted.store_dir / "z").mkdir()
    (mounted.store_dir / "z" / "below").write_bytes(b"there")
    mounted.start()
    os.stat(mounted.path / "z")
    mounted.fail(OUTAGE)
    for name in ("below", "unknown"):
        assert errno_of(lambda name=name: os.stat(mounted.path / "z" / name)) in STORE_ERRORS
    assert errno_of(lambda: os.listdir(mounted.path / "z")) in STORE_ERRORS
    mounted.heal()
    wait_until(lambda: errno_of(lambda: os.listdir(mounted.path / "z")) == 0, "recovery", 10)
    assert os.listdir(mounted.path / "z") == ["below"]


@pytest.mark.semantics(
    "S-FAIL-2", "After the store is back, everything works again without a remount, open files included."
)
def test_open_files_recover(mounted: Mounted) -> None:
    handle = os.open(mounted.path / "f2", os.O_RDONLY)
    assert os.pread(handle, 10, 0) == content(mounted, "f2")[:10]
    mounted.fail(OUTAGE)
    other = os.open(mounted.path / "f3", os.O_RDONLY)
    assert errno_of(lambda: os.pread(other, 10, 200_000)) in STORE_ERRORS
    mounted.heal()
    assert os.pread(other, 10, 200_000) == content(mounted, "f3")[200_000:200_010]
    assert os.pread(handle, 400_002, 0) == content(mounted, "f2")
    assert sorted(os.listdir(mounted.path)) == ["d", "f0", "f1", "f2", "f3", "f4", "f5"]
    os.close(handle)
    os.close(other)


@pytest.mark.semantics(
    "S-WRITE-8",
    "What could not be uploaded is kept, shown by `tierfs status`, and uploaded when the store is back or at the next mount.",
)
def test_writes_during_an_outage(mounted: Mounted) -> None:
    os.listdir(mounted.path)
    mounted.fail(OUTAGE)
    written = {f"new{i}": os.urandom(100_000) for i in range(5)}
    for name, data in written.items():
        handle = os.open(mounted.path / name, os.O_CREAT | os.O_WRONLY)
        os.write(handle, data)
        os.fsync(handle)
        os.close(handle)
        assert (mounted.path / name).read_bytes() == data
    assert mounted.status()["backlog"]["files"] >= 5
    mounted.heal()
    mounted.flush()
    assert {name: content(mounted, name) for name in written} == written
    assert mounted.status()["backlog"]["files"] == 0


def test_backlog_of_an_outage_is_uploaded_at_the_next_mount(mounted: Mounted) -> None:
    os.listdir(mounted.path)
    mounted.fail({"kind": "outage", "operation": "put"})
    (mounted.path / "new").write_bytes(b"kept")
    mounted.kill9()
    mounted.heal()
    mounted.start()
    mounted.flush()
    assert content(mounted, "new") == b"kept"


def test_mount_during_an_outage_fails_with_the_reason(mount_factory: MountFactory) -> None:
    mounted = mount_factory.prepare(options=("--store-timeout", "1"))
    mounted.fail(OUTAGE)
    with pytest.raises(AssertionError, match="outage"):
        mounted.start()
    mounted.heal()
    mounted.start()


@pytest.mark.parametrize("kind", ["throttle", "outage", "short_body", "lost_answer", "wrong_etag"])
def test_storm(mount_factory: MountFactory, kind: str) -> None:
    """A third of all requests go wrong; nobody notices, but for the time it takes."""
    mounted = mount_factory.prepare(options=("--upload-delay", "0", "--ttl", "0.5"))
    chance = random.Random(3)
    old = {f"f{i}": chance.randbytes(200_000) for i in range(10)}
    for name, data in old.items():
        (mounted.store_dir / name).write_bytes(data)
    mounted.start()
    probability = 0.33
    if kind == "wrong_etag":  # a read pinned to a version that nobody has cannot succeed: no promise but life
        mounted.fail({"kind": kind, "operation": "head", "probability": probability})
    else:
        mounted.fail({"kind": kind, "probability": probability})
    assert sorted(os.listdir(mounted.path)) == sorted(old)
    new = {}
    for i in range(10):
        assert (mounted.path / f"f{i}").read_bytes() == old[f"f{i}"]
        new[f"g{i}"] = chance.randbytes(50_000)
        (mounted.path / f"g{i}").write_bytes(new[f"g{i}"])
    os.rename(mounted.path / "f0", mounted.path / "moved")
    os.unlink(mounted.path / "f1")
    mounted.flush()
    mounted.heal()
    mounted.umount()
    expected = {**old, **new, "moved": old["f0"]}
    del expected["f0"], expected["f1"]
    found = {p.name: p.read_bytes() for p in mounted.store_dir.iterdir() if p.is_file()}
    assert found == expected


@pytest.mark.semantics(
    "S-READ-3",
    "A body that is shorter than the store announced reaches neither the application nor a tier; it is fetched again, and a read fails with EIO rather than end early.",
)
def test_short_bodies_for_ever(mounted: Mounted) -> None:
    mounted.fail({"kind": "short_body", "operation": "get"})
    assert errno_of((mounted.path / "f4").read_bytes) in STORE_ERRORS
    mounted.heal()
    assert (mounted.path / "f4").read_bytes() == content(mounted, "f4")
    mounted.fail(OUTAGE)
    assert (mounted.path / "f4").read_bytes() == content(mounted, "f4")


def test_hanging_requests_do_not_stop_others(mounted: Mounted) -> None:
    assert (mounted.path / "f0").read_bytes() == content(mounted, "f0")
    mounted.fail({"kind": "hang", "operation": "get", "seconds": 5})
    failures: list[int] = []
    threads = [
        threading.Thread(target=lambda n=n: failures.append(errno_of((mounted.path / f"f{n}").read_bytes)))
        for n in range(1, 6)
    ]
    for thread in threads:
        thread.start()
    for _ in range(50):
        assert (mounted.path / "f0").read_bytes() == content(mounted, "f0")
        (mounted.path / "new").write_bytes(b"x")
        os.stat(mounted.path / "d")
    mounted.heal()
    for thread in threads:
        thread.join()
    assert len(failures) == 5
    assert set(failures) <= {0, *STORE_ERRORS}


def test_interrupted_reader_returns_at_once(mounted: Mounted) -> None:
    """A process that waits for a block can be killed, and so can the wait be ended by a signal."""
    os.stat(mounted.path / "f1")
    mounted.fail({"kind": "hang", "operation": "get", "seconds": 60})
    command = [sys.executable, "-c", "import sys; print('go', flush=True); open(sys.argv[1], 'rb').read()"]
    reader = subprocess.Popen([*command, str(mounted.path / "f1")], stdout=subprocess.PIPE)
    assert reader.stdout is not None
    assert reader.stdout.readline() == b"go\n"
    with pytest.raises(subprocess.TimeoutExpired):
        reader.wait(1)
    reader.kill()
    reader.wait(10)
    reader.stdout.close()
    assert (mounted.path / "d" / "below").stat().st_size == 5
    mounted.umount(timeout_s=30)  # nor does the request that still hangs hold up the end of the mount


def test_denied_access_is_eacces(mounted: Mounted) -> None:
    os.listdir(mounted.path)
    mounted.fail({"kind": "access_denied", "operation": "get", "key": "f5"})
    assert errno_of((mounted.path / "f5").read_bytes) == errno.EACCES
    assert (mounted.path / "f4").read_bytes() == content(mounted, "f4")


def test_upload_that_is_refused_is_reported(mounted: Mounted) -> None:
    """The file stays readable, ``status`` names it with the reason, ``flush`` fails; later it goes through."""
    os.listdir(mounted.path)
    mounted.fail({"kind": "access_denied", "operation": "put", "key": "refused"})
    (mounted.path / "refused").write_bytes(b"data")
    answer = mounted.cli("flush", str(mounted.path), check=False)
    assert answer.returncode != 0
    wait_until(lambda: bool(mounted.status()["backlog"]["failed"]), "a failure in status")
    assert "refused" in str(mounted.status()["backlog"]["failed"])
    assert (mounted.path / "refused").read_bytes() == b"data"
    mounted.heal()
    mounted.flush()
    assert content(mounted, "refused") == b"data"


@pytest.mark.semantics(
    "S-WRITE-5",
    "With `--write-through`, `close` returns when the object is in the store, and gives the error when it cannot be put there.",
)
def test_write_through(mount_factory: MountFactory) -> None:
    mounted = mount_factory(options=("--write-through", "--store-timeout", "1"))
    (mounted.path / "f").write_bytes(b"here at once")
    assert (mounted.store_dir / "f").read_bytes() == b"here at once"
    mounted.fail({"kind": "outage", "operation": "put"})
    handle = os.open(mounted.path / "g", os.O_CREAT | os.O_WRONLY)
    os.write(handle, b"kept")
    assert errno_of(lambda: os.close(handle)) in STORE_ERRORS
    mounted.heal()
    mounted.flush()
    assert (mounted.store_dir / "g").read_bytes() == b"kept"


@pytest.mark.semantics("S-WRITE-6", "With `--fsync remote`, `fsync` returns when the object is in the store.")
def test_remote_fsync(mount_factory: MountFactory) -> None:
    mounted = mount_factory(options=("--fsync", "remote", "--store-timeout", "1"))
    handle = os.open(mounted.path / "f", os.O_CREAT | os.O_RDWR)
    for i in range(3):
        os.pwrite(handle, b"%d" % i * 1000, i * 1000)
        os.fsync(handle)
        assert (mounted.store_dir / "f").read_bytes() == os.pread(handle, 10_000, 0)
    mounted.fail(OUTAGE)
    os.pwrite(handle, b"more", 0)
    assert errno_of(lambda: os.fsync(handle)) in STORE_ERRORS
    mounted.heal()
    os.fsync(handle)
    assert (mounted.store_dir / "f").read_bytes()[:4] == b"more"
    os.close(handle)


def test_unmount_during_an_outage_keeps_the_backlog_and_says_so(mounted: Mounted, base_dir: Path) -> None:
    os.listdir(mounted.path)
    mounted.fail(OUTAGE)
    (mounted.path / "left").write_bytes(b"left over")
    answer = mounted.cli("umount", "--force", str(mounted.path), check=False, timeout_s=100)
    said = answer.stdout + answer.stderr
    assert "left" in said or "1 file" in said
    assert mounted.process is not None
    mounted.process.wait(60)
    mounted.process = None
    mounted.heal()
    mounted.start()
    mounted.flush()
    assert content(mounted, "left") == b"left over"
