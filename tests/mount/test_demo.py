"""``deploy/demo.sh`` as a user starts it. Only in ``.venv``, which ``deploy/install.sh`` has made: it installs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 240

pytestmark = [
    pytest.mark.needs_fuse,
    pytest.mark.limit_s(LIMIT_S + 30),
    pytest.mark.skipif(
        Path(sys.prefix) != ROOT / ".venv", reason="not in the environment of deploy/install.sh"
    ),
]


def start(base: Path) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TIERFS_", "AWS_"))}
    return subprocess.Popen(
        ["sh", ROOT / "deploy" / "demo.sh"],
        cwd="/",
        env={**kept, "TMPDIR": str(base), "TIERFS_INSTALL_LINKS": "no"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def nothing_is_left(base: Path) -> bool:
    mounted = str(base) in Path("/proc/self/mountinfo").read_text()
    return not mounted and not list(base.glob("tierfs-demo*"))


def test_the_demo_ends_with_a_table_and_leaves_nothing(tmp_path: Path) -> None:
    process = start(tmp_path)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    for row in ("tier ram", "tier nvme", "epoch 1", "epoch 2", "writers blocked", "in the store after"):
        assert row in output
    assert "Every byte was checked" in output
    assert nothing_is_left(tmp_path)


@pytest.mark.parametrize("step", ["== tierfs mount", "epoch 1"])
def test_an_interrupted_demo_leaves_nothing(tmp_path: Path, step: str) -> None:
    process = start(tmp_path)
    assert process.stdout is not None
    seen = ""
    while step not in seen:
        line = process.stdout.readline()
        assert line, seen
        seen += line
    time.sleep(0.3)  # into the middle of the next step; any moment must do
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, seen + output
    assert nothing_is_left(tmp_path)
