"""The engine may die at any moment, and nobody notices; the front may not, and everything fsynced survives.

``TIERFS_ENGINE_KILLS=100`` lengthens the first test.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.support.fake_s3 import BUCKET, fake_s3
from tests.support.front import engine_pid, is_gone, kill_engine, recovery_s
from tests.support.front_load import Load
from tests.support.mount import Mounted, MountFactory, MountFailed, files_below, tierfs_command, wait_until

pytestmark = pytest.mark.needs_fuse

KILLS = int(os.environ.get("TIERFS_ENGINE_KILLS", "20"))
RECOVERY_LIMIT_S = 5.0 if "TIERFS_ENGINE_KILLS" in os.environ else 60.0
"""Five seconds are wanted where nothing else runs, as in the long test; beside other tests it is to come back."""


def put_originals(mounted: Mounted, count: int = 60, seed: int = 1) -> dict[str, bytes]:
    """Files that are in the bucket before the mount."""
    chance = random.Random(seed)
    originals = {f"o{i:03}": chance.randbytes(chance.choice([300, 20_000, 200_000, 3_000_000])) for i in range(count)}
    for name, data in originals.items():
        (mounted.store_dir / name).write_bytes(data)
    return originals


@pytest.mark.limit_s(60 + 8 * KILLS)
def test_killed_again_and_again_under_load(native_mounts: MountFactory) -> None:
    mounted = native_mounts.prepare(options=("--upload-delay", "0.2"))
    originals = put_originals(mounted)
    mounted.start()
    (mounted.path / "load").mkdir()
    load = Load(mounted.path / "load", originals)
    load.start()
    chance = random.Random(5)
    times_s = []
    for number in range(KILLS):
        time.sleep(chance.uniform(0.1, 1.5))
        kill_engine(mounted)
        times_s.append(recovery_s(mounted, f"probe{number}"))
        if load.errors:
            break
    load.stop()
    print(f"recovered within {max(times_s):.2f} s, {sorted(times_s)[len(times_s) // 2]:.2f} s in the middle")
    print(f"longest read of an open file: {load.longest_gap_s * 1000:.0f} ms; steps: {load.steps}")
    assert not load.errors, "\n".join(load.errors)
    assert max(times_s) < RECOVERY_LIMIT_S
    assert min(load.steps.values()) > 0
    status = mounted.status()["front"]
    assert status["engine_starts"] == KILLS + 1
    assert status["pid"] == mounted.pid
    expected = {f"load/{name}": data for name, data in load.expected_files().items()} | originals
    assert files_below(mounted.path) == expected
    mounted.umount()
    assert files_below(mounted.store_dir) == expected
    mounted.cli("meta", "check", "--state-dir", str(mounted.state_dir))


def test_commands_wait_for_the_next_engine(native_mounts: MountFactory) -> None:
    mounted = native_mounts()
    (mounted.path / "f").write_bytes(b"here")
    for command in (("status",), ("flush",), ("umount",)):
        kill_engine(mounted)
        mounted.cli(*command, str(mounted.path))
    assert ended(mounted) == 0
    assert files_below(mounted.store_dir) == {"f": b"here"}


def test_killed_right_after_its_start_and_twice_in_a_row(native_mounts: MountFactory) -> None:
    mounted = native_mounts()
    (mounted.path / "f").write_bytes(b"here")
    for wait_s in (0.0, 0.05, 0.3):
        killed = kill_engine(mounted)
        wait_until(lambda killed=killed: engine_pid(mounted) not in (None, killed), "another engine")
        time.sleep(wait_s)
        kill_engine(mounted)
        assert recovery_s(mounted, "probe") < 2 * RECOVERY_LIMIT_S
        assert (mounted.path / "f").read_bytes() == b"here"
        time.sleep(1.2)  # it has been of use: the next death is a first one again
    assert mounted.status()["front"]["engine_starts"] == 7


@pytest.mark.parametrize("size", [40_000_000, 300])
def test_killed_while_uploading(native_mounts: MountFactory, size: int) -> None:
    mounted = native_mounts.prepare(options=("--upload-delay", "0", "--part-size", "5M"))
    mounted.fail({"kind": "latency", "operation": "*p*t*", "seconds": 0.3})
    mounted.start()
    contents = {f"f{i}": random.Random(i).randbytes(size + i) for i in range(3)}
    for name, data in contents.items():
        (mounted.path / name).write_bytes(data)
    for pause_s in (0.2, 0.5, 0.9):
        time.sleep(pause_s)
        kill_engine(mounted)
        recovery_s(mounted, "probe")
    mounted.heal()
    mounted.umount()
    assert files_below(mounted.store_dir) == contents


def test_killed_while_a_look_up_waits_for_a_slow_store(native_mounts: MountFactory) -> None:
    """The look-up waits on, and gets its answer from the next engine; other requests are not behind it."""
    mounted = native_mounts.prepare(options=("--ttl", "1", "--negative-ttl", "0"))
    (mounted.store_dir / "d").mkdir()
    (mounted.store_dir / "d" / "f").write_bytes(b"slow")
    mounted.start()
    mounted.fail({"kind": "latency", "operation": "list*", "seconds": 3}, {"kind": "latency", "operation": "head", "seconds": 3})
    time.sleep(1.1)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append((mounted.path / "d" / "f").read_bytes()))
    reader.start()
    time.sleep(0.3)
    kill_engine(mounted)
    mounted.heal()
    reader.join(30)
    assert found == [b"slow"]


def test_killed_while_many_wait(native_mounts: MountFactory) -> None:
    """More requests than the socket has room for wait at once; each is answered once."""
    mounted = native_mounts()
    stop_engine = engine_pid(mounted)
    assert stop_engine is not None
    os.kill(stop_engine, signal.SIGSTOP)
    data = random.Random(3).randbytes(1 << 20)
    failures: list[BaseException] = []

    def write(i: int) -> None:
        try:
            (mounted.path / f"d{i}").mkdir()
            with open(mounted.path / f"d{i}" / "f", "xb", buffering=0) as file:
                assert file.write(data) == len(data)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(60)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    os.kill(stop_engine, signal.SIGKILL)
    time.sleep(1.5)
    kill_engine(mounted)
    for thread in threads:
        thread.join(60)
    assert not failures
    assert files_below(mounted.path) == {f"d{i}/f": data for i in range(60)}


def ended(mounted: Mounted) -> int:
    """Wait for the front's end; nothing of the mount may be left."""
    assert mounted.process is not None
    code = mounted.process.wait(60)
    mounted.process = None
    assert not mounted.is_up()
    return code


def left_behind(mounted: Mounted) -> list[str]:
    """Control sockets and records."""
    run = mounted.base / "run"
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if not path.is_dir()) if run.exists() else []


def test_killed_while_it_is_stopping(native_mounts: MountFactory) -> None:
    """SIGTERM, and then the engine dies: the mount goes away, and nobody starts another engine."""
    mounted = native_mounts.prepare(options=("--upload-delay", "60"))
    mounted.start()
    (mounted.path / "f").write_bytes(b"kept")
    mounted.fail({"kind": "latency", "operation": "put", "seconds": 20})
    assert mounted.process is not None
    mounted.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    kill_engine(mounted)
    assert ended(mounted) != 0
    mounted.heal()
    mounted.start()
    assert (mounted.path / "f").read_bytes() == b"kept"
    mounted.umount()
    assert files_below(mounted.store_dir) == {"f": b"kept"}


def test_killed_at_the_moment_of_sigterm(native_mounts: MountFactory) -> None:
    mounted = native_mounts()
    pid = engine_pid(mounted)
    assert pid is not None
    assert mounted.process is not None
    os.kill(pid, signal.SIGSTOP)
    mounted.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    assert ended(mounted) != 0


@pytest.mark.parametrize("wait_s", [0.0, 0.1, 0.4])
def test_told_to_stop_between_two_engines(native_mounts: MountFactory, wait_s: float) -> None:
    """The next engine brings everything into the store, and then stops."""
    mounted = native_mounts(options=("--upload-delay", "60"))
    (mounted.path / "f").write_bytes(b"kept")
    killed = kill_engine(mounted)
    # To a front that has not seen the end yet this would be an engine that died while it was stopping.
    wait_until(lambda: not Path(f"/proc/{killed}").exists(), "its end")
    time.sleep(wait_s)
    assert mounted.process is not None
    mounted.process.send_signal(signal.SIGTERM)
    assert ended(mounted) == 0
    assert files_below(mounted.store_dir) == {"f": b"kept"}
    assert left_behind(mounted) == []


@pytest.mark.parametrize("moment", ["before", "right after"])
def test_killed_while_the_system_unmounts(native_mounts: MountFactory, moment: str) -> None:
    """What was not in the store is there after the next mount."""
    mounted = native_mounts(options=("--upload-delay", "60"))
    (mounted.path / "f").write_bytes(b"kept")
    if moment == "before":
        kill_engine(mounted)
    subprocess.run(["umount", str(mounted.path)], check=True)
    if moment == "right after" and (pid := engine_pid(mounted)) is not None:
        os.kill(pid, signal.SIGKILL)
    code = ended(mounted)
    if code == 0:
        assert files_below(mounted.store_dir) == {"f": b"kept"}
    mounted.start()
    mounted.umount()
    assert files_below(mounted.store_dir) == {"f": b"kept"}


def test_the_front_dies(native_mounts: MountFactory) -> None:
    mounted = native_mounts(options=("--upload-delay", "60"))
    (mounted.path / "f").write_bytes(b"not yet in the store")
    descriptor = os.open(mounted.path / "g", os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, b"x" * 100_000)
    os.fsync(descriptor)
    engine = engine_pid(mounted)
    assert engine is not None
    mounted.kill9()
    wait_until(lambda: is_gone(engine), "the end of the engine", limit_s=30)
    # ECANCELED: its io_uring (``TIERFS_FUSE_URING=on``) is being taken apart.
    gone = (errno.ENOTCONN, errno.ECANCELED)
    with pytest.raises(OSError) as caught:
        os.stat(mounted.path)
    assert caught.value.errno in gone
    try:
        os.close(descriptor)  # of a file that is passed through nobody is asked
    except OSError as error:
        assert error.errno in gone
    start = time.monotonic()
    mounted.start()
    assert time.monotonic() - start < 10
    assert (mounted.path / "g").read_bytes() == b"x" * 100_000
    assert (mounted.path / "f").read_bytes() == b"not yet in the store"
    mounted.umount()
    assert files_below(mounted.store_dir) == {"f": b"not yet in the store", "g": b"x" * 100_000}


@pytest.mark.parametrize("way", ["SIGTERM", "SIGINT", "tierfs umount", "umount", "umount -l, files open"])
def test_a_clean_end(native_mounts: MountFactory, way: str) -> None:
    mounted = native_mounts(options=("--upload-delay", "60"))
    assert len(left_behind(mounted)) >= 2
    data = os.urandom(2_000_000)
    (mounted.path / "f").write_bytes(data)
    engine, process = engine_pid(mounted), mounted.process
    assert engine is not None
    assert process is not None
    held = None
    if way.startswith("SIG"):
        held = os.open(mounted.path / "f", os.O_RDONLY)
        process.send_signal(getattr(signal, way))
    elif way == "tierfs umount":
        mounted.cli("umount", str(mounted.path))
    elif way == "umount":
        subprocess.run(["umount", str(mounted.path)], check=True)
    else:
        held = os.open(mounted.path / "f", os.O_RDWR)
        os.pwrite(held, b"last", 0)
        subprocess.run(["umount", "-l", str(mounted.path)], check=True)
        assert os.pread(held, 10, 0) == b"last" + data[4:10]
        data = b"last" + data[4:]
        os.close(held)
        held = None
    code = process.wait(60)
    mounted.process = None
    if held is not None:
        with contextlib.suppress(OSError):  # close(2) asks the file system, which is not there any more
            os.close(held)
    assert code == 0
    assert is_gone(engine)
    assert not mounted.is_up()
    assert left_behind(mounted) == []
    assert files_below(mounted.store_dir) == {"f": data}


def test_without_the_right_to_a_large_socket(
    native_mounts: MountFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container with CAP_SYS_ADMIN alone a request of 1 MiB does not fit: the kernel makes smaller ones."""
    monkeypatch.setenv(
        "TIERFS_COMMAND", " ".join(["setpriv --bounding-set=-net_admin --inh-caps=-net_admin", *tierfs_command()])
    )
    mounted = native_mounts.prepare(options=("--negative-ttl", "0"))
    data = random.Random(1).randbytes(3 << 20)
    (mounted.store_dir / "f").write_bytes(data)
    mounted.start()
    descriptor = os.open(mounted.path / "g", os.O_WRONLY | os.O_CREAT)
    assert os.write(descriptor, data) == len(data)
    os.close(descriptor)
    assert (mounted.path / "f").read_bytes() == data
    assert (mounted.path / "g").read_bytes() == data
    max_write = re.search(r"max_write=(\d+)", mounted.log())
    assert max_write is not None
    assert int(max_write.group(1)) <= 1 << 20
    mounted.umount()
    assert files_below(mounted.store_dir) == {"f": data, "g": data}


REFUSED: dict[str, tuple[str, str, str]] = {
    # source, what the fake server refuses, the reason
    "no such directory": ("/nonexistent/dir", "", "/nonexistent/dir"),
    "no such bucket": ("s3://absent", "", "absent"),
    "credentials refused": (f"s3://{BUCKET}", "*", "denied"),
    "root cannot be listed": (f"s3://{BUCKET}", "list*", "denied"),
}


@pytest.mark.parametrize("foreground", [True, False], ids=["foreground", "detached"])
@pytest.mark.parametrize("case", REFUSED)
def test_an_engine_that_cannot_start(native_mounts: MountFactory, case: str, foreground: bool) -> None:
    """The reason is told, and nothing is left: no mount, no process, no record."""
    source, denied, reason = REFUSED[case]
    with fake_s3() as server:
        if denied:
            server.fault("access_denied", operation=denied)
        mounted = native_mounts.prepare(
            source=source, options=("--store-timeout", "2"), environment=server.environment
        )
        if foreground:
            with pytest.raises(MountFailed) as failed:
                mounted.start()
            said = str(failed.value)
        else:
            answer = subprocess.run(
                mounted.arguments(),
                env=mounted.process_environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert answer.returncode not in (0, -signal.SIGABRT)
            said = answer.stderr
    assert reason in said.lower()
    assert not mounted.is_up()
    assert left_behind(mounted) == []
    wait_until(lambda: not processes_about(mounted), "the end of all processes")


def processes_about(mounted: Mounted) -> list[int]:
    """Fronts and engines of that mount: the state directory is on their command line."""
    wanted = os.fsencode(mounted.state_dir)
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def test_a_state_directory_that_is_damaged_meanwhile(native_mounts: MountFactory) -> None:
    """Engines that cannot start are tried with growing pauses; once it is mended, everything goes on."""
    mounted = native_mounts()
    (mounted.path / "f").write_bytes(b"here")
    settings = mounted.state_dir / "engine.json"
    told = settings.read_bytes()
    settings.write_bytes(b"{")
    kill_engine(mounted)
    time.sleep(8)
    pauses = [int(found) for found in re.findall(r"started again .* pause_ms=(\d+)", mounted.log())]
    assert pauses[:4] == [0, 0, 0, 1000]
    assert len(pauses) <= 7, pauses
    settings.write_bytes(told)
    assert (mounted.path / "f").read_bytes() == b"here"
    recovery_s(mounted, "probe")


def test_told_to_stop_while_no_engine_can_be_started(native_mounts: MountFactory) -> None:
    mounted = native_mounts()
    settings = mounted.state_dir / "engine.json"
    told = settings.read_bytes()
    settings.write_bytes(b"{")
    kill_engine(mounted)
    time.sleep(2)
    assert mounted.process is not None
    mounted.process.send_signal(signal.SIGTERM)
    assert ended(mounted) != 0
    settings.write_bytes(told)
