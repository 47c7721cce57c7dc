"""``python -m benchmarks.front`` on a real mount, as little of it as there can be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mount import native_missing

ROOT = Path(__file__).parents[2]
PARTS = ("reads", "changes", "entries")


@pytest.mark.needs_fuse
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting with passthrough, and dropping caches, needs root")
def test_it_runs_and_writes_what_it_found(base_dir: Path) -> None:
    missing = native_missing()
    if missing:
        if os.environ.get("CI") or os.environ.get("TIERFS_NEED_NATIVE"):
            pytest.fail(missing, pytrace=False)
        pytest.skip(missing)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.front", "--tiny", "--only", *PARTS, "--work-dir", base_dir, "--json",
         base_dir / "found.json"],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=140, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((base_dir / "found.json").read_text())
    lines = {line["name"]: line for line in found["lines"]}
    both = [name for name, line in lines.items() if line["values"].get("plain")]
    assert len(both) >= 8
    assert all(line["medians"]["mount"] > 0 for name, line in lines.items() if name in both)
    assert all(line["verdict"] in ("met", "MISSED") for line in lines.values())
    changes = [line for line in lines.values() if "process" in line["name"] and line["section"].startswith("Names")]
    assert len(changes) == 4
    assert all(line["medians"]["null"] > 0 for line in changes)
    assert [size["entries"] for size in found["sizes"]] == [1000]
    assert "wanted" in done.stdout
    assert [path.name for path in base_dir.iterdir()] == ["found.json"]
