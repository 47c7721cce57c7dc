"""Two epochs and a checkpoint through a mountpoint, checked and measured.

``python run.py MOUNTPOINT MANIFEST --tierfs PROGRAM``: the data set of the manifest is there already, and
none of it is local yet. Exit status 0 only if every byte was right.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import console
from checkpoint import Ranks
from data import Entry, load_manifest
from engine import CommandFailed, Engine
from epochs import Damaged, EpochReader
from report import Checkpoint, Pass, table
from workers import WorkerFailed

EPOCHS = 2


def read_epochs(mountpoint: Path, entries: list[Entry], engine: Engine) -> list[Pass]:
    passes = []
    with EpochReader(mountpoint, entries) as reader:
        for number in range(1, EPOCHS + 1):
            before = engine.status()
            with console.progress() as progress:
                epoch = reader.read(number, progress)
            passes.append(Pass(epoch, before, engine.status()))
    return passes


def save_and_restore(mountpoint: Path, engine: Engine) -> Checkpoint:
    directory = mountpoint / "checkpoints" / "step-000100"
    with Ranks(directory) as ranks, console.progress() as progress:
        saved, shards = ranks.save(progress)
        returned = time.monotonic()
        task = progress.add_task("checkpoint: upload", total=None)
        engine.flush(directory)
        stored_s = saved.seconds + time.monotonic() - returned
        progress.update(task, total=saved.size_bytes, completed=saved.size_bytes)
        local = ranks.restore(shards, progress, "checkpoint: restore, tiers")
        engine.evict(directory)
        remote = ranks.restore(shards, progress, "checkpoint: restore, store")
    return Checkpoint(saved, stored_s, local, remote)


def main() -> int:
    parser = argparse.ArgumentParser(description="Two epochs and a checkpoint through a mountpoint.")
    parser.add_argument("mountpoint", type=Path)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--tierfs", type=Path, required=True)
    arguments = parser.parse_args()
    console.stop_on_signals()
    engine = Engine(arguments.tierfs, arguments.mountpoint)
    try:
        entries = load_manifest(arguments.manifest)
        passes = read_epochs(arguments.mountpoint, entries, engine)
        files_in_tiers = engine.files_in_tiers(entry.path for entry in entries)
        checkpoint = save_and_restore(arguments.mountpoint, engine)
        status = engine.status()
    except (CommandFailed, Damaged, WorkerFailed, OSError) as error:
        sys.stderr.write(f"demo: {error}\n")
        return 1
    if status.failures:
        sys.stderr.write(f"demo: not uploaded: {'; '.join(status.failures)}\n")
        return 1
    console.OUT.print()
    console.OUT.print(table(passes, files_in_tiers, checkpoint))
    console.say(f"\nEvery byte was checked. Front: {status.front}. Store: {status.store_url}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
