"""The engine is killed at random moments under a writer that knows what was acknowledged."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.crash_writer import content_of, page_of, read_journal, verify
from tests.support.mount import Mounted, MountFactory, wait_until

REPOSITORY = Path(__file__).parents[2]


def start_writer(mounted: Mounted, journal: Path, seed: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.crash_writer", str(mounted.path), str(journal), str(seed)],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("loss", ["nothing", "old version", "torn page", "gone", "short"])
def test_the_check_itself_finds_losses(base_dir: Path, loss: str) -> None:
    """On a plain directory: a writer that is killed leaves no problem, damage by hand is found."""
    (base_dir / "d").mkdir()
    journal = base_dir / "journal"
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.support.crash_writer", str(base_dir / "d"), str(journal), "1"],
        cwd=REPOSITORY,
    )
    wait_until(lambda: {0, 1} <= read_journal(journal)[0].keys(), "two slots")
    writer.kill()
    writer.wait()
    slot0, slot1 = base_dir / "d" / "slot0", base_dir / "d" / "slot1"
    if loss == "old version":
        slot1.write_bytes(content_of(1, read_journal(journal)[0][1]) + b"x")
    elif loss == "torn page":
        with open(slot0, "r+b") as file:
            file.seek(8192)
            file.write(page_of(0, 999_999, 2))
    elif loss == "gone":
        slot1.unlink()
    elif loss == "short":
        os.truncate(slot0, 1000)
    assert bool(verify(base_dir / "d", journal).problems) == (loss != "nothing")


@pytest.mark.limit_s(300)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.semantics(
    "S-WRITE-1", "When `fsync` returns, the bytes, the size and the name of the file survive a killed engine."
)
@pytest.mark.usefixtures("needs_mount")
def test_nothing_acknowledged_is_lost(mount_factory: MountFactory, base_dir: Path, seed: int) -> None:
    mounted = mount_factory(options=("--upload-delay", "0.1"))
    journal = base_dir / "journal"
    chance = random.Random(seed)
    for round_number in range(8):
        writer = start_writer(mounted, journal, seed * 100 + round_number)
        time.sleep(0.2 + chance.uniform(0.05, 0.9))
        mounted.kill9()
        assert writer.wait(30) == 0
        mounted.start()
        verdict = verify(mounted.path, journal)
        assert not verdict.problems, f"round {round_number}: {verdict.problems}"
    assert verdict.acknowledged >= 3
    expected = {p.name: p.read_bytes() for p in mounted.path.glob("slot*")}
    mounted.umount()
    assert {p.name: p.read_bytes() for p in mounted.store_dir.glob("slot*")} == expected
    mounted.cli("meta", "check", "--state-dir", str(mounted.state_dir))


@pytest.mark.limit_s(300)
@pytest.mark.usefixtures("needs_mount")
def test_killed_while_the_store_is_down(mount_factory: MountFactory, base_dir: Path) -> None:
    """A crash in the middle of an outage: everything reaches the store once both are over."""
    mounted = mount_factory(options=("--upload-delay", "0.1", "--store-timeout", "2"))
    journal = base_dir / "journal"
    mounted.fail({"kind": "outage", "operation": "put"}, {"kind": "outage", "operation": "*multipart*"})
    writer = start_writer(mounted, journal, 77)
    time.sleep(1.5)
    mounted.kill9()
    assert writer.wait(30) == 0
    mounted.start()
    verdict = verify(mounted.path, journal)
    assert not verdict.problems
    assert mounted.status()["backlog"]["files"] > 0
    mounted.heal()
    mounted.flush()
    assert mounted.status()["backlog"]["files"] == 0
    for path in mounted.path.glob("slot*"):
        assert (mounted.store_dir / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("seed", [5, 6])
@pytest.mark.usefixtures("needs_mount")
def test_killed_during_upload_and_rename(mount_factory: MountFactory, seed: int) -> None:
    """Files are written, renamed, replaced and removed while uploads run; then the engine dies."""
    mounted = mount_factory(options=("--upload-delay", "0"))
    chance = random.Random(seed)
    model: dict[str, bytes] = {}
    for _ in range(5):
        for _ in range(30):
            name = f"f{chance.randrange(8)}"
            kind = chance.choice(["write", "write", "rename", "remove"])
            if kind == "write":
                model[name] = chance.randbytes(chance.choice([10, 5000, 200_000]))
                (mounted.path / name).write_bytes(model[name])
            elif name in model and kind == "rename":
                new = f"f{chance.randrange(8)}"
                os.rename(mounted.path / name, mounted.path / new)
                model[new] = model.pop(name)
            elif name in model:
                os.unlink(mounted.path / name)
                del model[name]
        mounted.crash_and_restart()
        assert {p.name: p.read_bytes() for p in mounted.path.iterdir()} == model
    mounted.umount()
    found = {p.name: p.read_bytes() for p in mounted.store_dir.iterdir() if p.is_file()}
    assert found == model
