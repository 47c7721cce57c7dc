"""The parts of ``deploy/demo`` on a plain directory. ``tests/mount/test_demo.py`` runs all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "deploy" / "demo"


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python code that imports the demo's modules, in a process of its own: their names are common."""
    guarded = "if __name__ == '__main__':\n" + "\n".join("    " + line for line in script.splitlines())
    path = Path(arguments[0]) / "script.py"
    path.write_text("import sys\nfrom pathlib import Path\nroot = Path(sys.argv[1])\n" + guarded)
    return subprocess.run(
        [sys.executable, "-B", path, *arguments],
        env={"PYTHONPATH": str(DEMO), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


MAKE = """
import data
plan = data.Plan(samples=40, shards=2, members_per_shard=5, large_bytes=3 * data.MIB + 7)
entries = data.make(root / "set", plan)
"""


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    answers = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        script = MAKE + "print(__import__('json').dumps([[e.path, e.size_bytes, e.digest] for e in entries]))"
        done = run(script, tmp_path / name)
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout)
    assert answers[0] == answers[1]
    found = json.loads(answers[0])
    assert len(found) == 40 + 2 + 1
    for path, size_bytes, _ in found:
        assert (tmp_path / "one" / "set" / path).stat().st_size == size_bytes


READ = """
import console, epochs
with epochs.EpochReader(root / "set", entries) as reader, console.progress() as progress:
    for number in (1, 2):
        total = reader.read(number, progress).total
        assert total.files == 43, total
        assert total.size_bytes == sum(e.size_bytes for e in entries), total
"""


def test_an_epoch_reads_every_file_once(tmp_path: Path) -> None:
    done = run(MAKE + READ, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "damage",
    [
        "(root / 'set/samples/03/00003.bin').write_bytes(b'other')",
        "p = root / 'set/shards/train-0001.tar'; p.write_bytes(p.read_bytes()[:5000])",
        "p = root / 'set/large/embeddings.bin'; b = bytearray(p.read_bytes()); b[9] ^= 1; p.write_bytes(b)",
        "(root / 'set/samples/03/00003.bin').unlink()",
    ],
    ids=["replaced", "cut", "flipped", "missing"],
)
def test_damage_is_found(tmp_path: Path, damage: str) -> None:
    done = run(MAKE + damage + READ, tmp_path)
    assert done.returncode == 1
    assert "Damaged" in done.stderr or "WorkerFailed" in done.stderr, done.stderr


ORDERS = """
import loader
with loader.DataLoader(range(100), batch_size=7, worker_count=2, seed=1) as batches:
    epochs = [[tuple(batch) for batch in batches.epoch(number)] for number in (1, 1, 2)]
for epoch in epochs:
    assert sorted(index for batch in epoch for index in batch) == list(range(100))
assert set(epochs[0]) == set(epochs[1]) != set(epochs[2])
"""


def test_the_order_depends_on_seed_and_epoch(tmp_path: Path) -> None:
    done = run(ORDERS, tmp_path)
    assert done.returncode == 0, done.stderr


CHECKPOINT = """
import checkpoint, console
with checkpoint.Ranks(root / "step", 5 * checkpoint.MIB) as ranks, console.progress() as progress:
    saved, shards = ranks.save(progress)
    {damage}
    ranks.restore(shards, progress, "restore")
"""


def test_a_checkpoint_is_restored(tmp_path: Path) -> None:
    done = run(CHECKPOINT.format(damage="pass"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "step").iterdir())) == 8


def test_a_damaged_checkpoint_is_found(tmp_path: Path) -> None:
    done = run(CHECKPOINT.format(damage="(root / 'step' / shards[5].path).write_bytes(b'other')"), tmp_path)
    assert done.returncode == 1
    assert "shard-00005" in done.stderr
