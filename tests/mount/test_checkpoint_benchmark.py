"""``python -m benchmarks.checkpoint`` from end to end, as small as it gets, and nothing is left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mount.test_compare import processes_with_a_mark_below
from tests.support.mount import native_missing
from tests.support.weed import weed_missing

ROOT = Path(__file__).parents[2]
LIMIT_S = 400.0

pytestmark = [
    pytest.mark.needs_fuse,
    pytest.mark.limit_s(LIMIT_S + 60),
    pytest.mark.skipif(weed_missing() is not None, reason=str(weed_missing())),
]


def test_every_line_is_measured(base_dir: Path) -> None:
    values = base_dir / "values.json"
    front = "python" if native_missing() else "native"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.checkpoint", "--tiny", "--front", front, "--work-dir", str(base_dir),
         "--json", str(values)],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(values.read_text())
    targets = {name: set(metric["values"]) for name, metric in result["metrics"].items()}
    assert {"tierfs", "plain"} <= targets["pulse"]
    assert {"tierfs", "tierfs-ram", "plain"} <= targets["absorb"] <= {"tierfs", "tierfs-ram", "plain", "memory"}
    assert targets["second pulse"] == {"tierfs", "plain"}
    assert targets["over the limit"] == {"tierfs", "uploader"}
    assert targets["save"] == {"tierfs", "plain"}
    assert targets["drain"] == {"tierfs", "uploader"}
    assert targets["commit"] == {"tierfs"}
    assert targets["restore"] == {"tierfs", "raw"}
    assert {"tierfs", "raw"} <= targets["cold read"]
    assert all(
        value > 0
        for metric in result["metrics"].values()
        for values in metric["values"].values()
        for value in values
    )
    for said in ("machine", "mount ", "command", "pulse: ", "second pulse: ", "over the limit: ", "none failed"):
        assert said in done.stdout
    assert [path for path in base_dir.iterdir() if path != values] == []
    assert str(base_dir) not in Path("/proc/self/mounts").read_text()
    assert processes_with_a_mark_below(base_dir) == []
