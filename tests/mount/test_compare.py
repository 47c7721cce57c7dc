"""The comparison from end to end, as small as it gets: tierfs and a plain directory, one round, a real S3 server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.compare.measures import METRICS, MOUNT, STORED
from benchmarks.compare.processes import MARK
from tests.support.mount import native_missing
from tests.support.weed import weed_missing

ROOT = Path(__file__).parents[2]
LIMIT_S = 140.0

pytestmark = [
    pytest.mark.needs_fuse,
    pytest.mark.limit_s(LIMIT_S + 60),
    pytest.mark.skipif(weed_missing() is not None, reason=str(weed_missing())),
]


def processes_with_a_mark_below(directory: Path) -> list[str]:
    """Command lines of what a run in this directory has left behind."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes()
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if MARK.encode() in environment and os.fsencode(directory) in command:
            found.append(command.replace(b"\0", b" ").decode(errors="replace"))
    return found


def test_tierfs_and_a_directory_are_compared_and_nothing_is_left(base_dir: Path) -> None:
    name = "tierfs-python" if native_missing() else "tierfs"
    values = base_dir / "values.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.compare", "--tiny", "--no-far", "--rounds", "1", "--peers", name,
         "--work-dir", str(base_dir), "--json", str(values), "--minutes", "2"],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(values.read_text())
    assert result["failures"] == []
    found = {(value["peer"], value["metric"]): value for value in result["values"]}
    for metric in METRICS:
        assert (name, metric.key) in found, metric.key
        assert (("plain", metric.key) in found) == (metric not in (MOUNT, STORED)), metric.key
    assert all(value["value"] > 0 for value in result["values"])
    cold = found[name, "cold-large"]
    assert cold["done"]["bytes"] == 4 << 20
    assert cold["cpu_s"]["server"] > 0 or cold["cpu_s"]["machine"] > 0
    assert found[name, "mount"]["cpu_s"]["daemon"] > 0
    assert cold["resident_bytes"] > 1 << 20
    about = next(peer for peer in result["peers"] if peer["name"] == name)
    assert "mount" in about["command"]
    assert about["version"]
    assert "At a glance" in done.stdout
    assert "Where tierfs is behind" in done.stdout
    assert [path for path in base_dir.iterdir() if path != values] == []
    assert str(base_dir) not in Path("/proc/self/mounts").read_text()
    assert processes_with_a_mark_below(base_dir) == []
