"""A mount with a replica, its loss, and the recovery."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.support.mount import Mounted, MountFactory, run_cli, wait_until

OUTAGE = {"kind": "outage"}
QUICK = ("--upload-delay", "0.1", "--store-timeout", "2", "--part-size", "5M")


def replica_of(mounted: Mounted) -> Path:
    return mounted.base / "replica"


def mount(factory: MountFactory, *options: str) -> Mounted:
    mounted = factory.prepare(options=QUICK)
    mounted.options += ("--replica", str(replica_of(mounted)), *options)
    return mounted.start()


def told(mounted: Mounted) -> dict[str, Any]:
    told: dict[str, Any] = mounted.status()["replica"]
    return told


def wait_for_replica(mounted: Mounted, held_files: int) -> None:
    wait_until(
        lambda: (told(mounted)["held_files"], told(mounted)["waiting_files"]) == (held_files, 0),
        f"{held_files} files in the replica",
    )


def lose(mounted: Mounted) -> None:
    """The node, with its state and its tiers."""
    mounted.kill9()
    mounted.close()
    for directory in (mounted.state_dir, mounted.base / "tier"):
        os.rename(directory, directory.with_name(f"lost-{directory.name}"))


def recover(mounted: Mounted, *options: str, code: int = 0) -> dict[str, Any]:
    environment = {**mounted.process_environment(), "TIERFS_FAULTS": ""}
    done = run_cli(
        "recover", str(replica_of(mounted)), str(mounted.store_dir), "--json", *options,
        environment=environment,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
