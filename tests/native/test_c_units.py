"""The tests and fuzzers in C, each as one test here, under the address and undefined behaviour sanitizers.

A longer run of the fuzzers: ``make fuzz``.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.native.conftest import SOURCE, NativeBuild

UNITS = sorted(path.stem for path in (SOURCE / "tests").glob("test_*.c"))
FUZZERS = sorted(path.stem for path in (SOURCE / "fuzz").glob("fuzz_*.c"))
FUZZ_RUNS = int(os.environ.get("TIERFS_FUZZ_RUNS", "20000"))
FUZZ_LIMIT_S = 40
SLOW_FUZZERS = {"fuzz_placed": 20, "fuzz_relay": 5, "fuzz_small": 20}
"""How much longer an input takes than usual: they get fewer of them."""


def run(command: list[str | Path], directory: Path) -> None:
    """Run it in a directory of its own; anything but a clean end fails, with what was said."""
    environment = os.environ | {
        "TMPDIR": str(directory),
        "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    done = subprocess.run(
        command,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=120,
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(f"{command[0]}: exit status {done.returncode}\n{done.stdout[-20000:]}", pytrace=False)


@pytest.mark.parametrize("name", UNITS)
def test_unit(name: str, native_build: NativeBuild, tmp_path: Path) -> None:
    run([native_build.executable(name)], tmp_path)


@pytest.mark.parametrize("name", FUZZERS)
def test_fuzzer_finds_nothing_in_a_short_seeded_run(
    name: str, native_build: NativeBuild, tmp_path: Path
) -> None:
    """A bound in runs keeps it the same every time; one in seconds keeps a slow machine from waiting.

    It begins from nothing; ``make fuzz`` has inputs that a mount has made. libFuzzer writes into the directory.
    """
    (tmp_path / "found").mkdir()
    command: list[str | Path] = [
        native_build.executable(name),
        f"-runs={FUZZ_RUNS // SLOW_FUZZERS.get(name, 1)}",
        "-seed=1",
        f"-max_total_time={FUZZ_LIMIT_S}",
        "found",
    ]
    run(command, tmp_path)
