"""What several processes of one test run share, and what it does about those that die."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import run
from tests.support.mount import wait_until

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def another_run(tmp_path: Path) -> Iterator[Path]:
    """This process takes part in another run for the time of the test."""
    before = run.directory(), run._part
    run.join(tmp_path, "gw9")
    yield tmp_path
    run.join(*before)


def test_alone_waits_for_the_others_and_nobody_begins_before_it_has_ended(another_run: Path) -> None:
    order: list[str] = []
    one_runs, one_may_end = threading.Event(), threading.Event()

    def one() -> None:
        with run.machine(alone=False):
            one_runs.set()
            one_may_end.wait(30)
            order.append("one")

    def alone() -> None:
        with run.machine(alone=True):
            order.append("alone")

    def another() -> None:
        with run.machine(alone=False):
            order.append("another")

    threads = [threading.Thread(target=one)]
    threads[0].start()
    assert one_runs.wait(30)
    with run.machine(alone=False):
        pass  # those that are not alone do not wait for each other
    for body, waits_for in ((alone, "machine.lock"), (another, "gate.lock")):
        threads.append(threading.Thread(target=body))
        threads[-1].start()
        wait_until(
            lambda name=waits_for: waiters(another_run / name) == 1, f"somebody who waits for {waits_for}"
        )
    one_may_end.set()
    for thread in threads:
        thread.join(30)
    assert order == ["one", "alone", "another"]


def waiters(path: Path) -> int:
    """How many wait for a lock of this file."""
    inode = f":{path.stat().st_ino} "
    return sum("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines())


def test_clearing_up_ends_processes_and_says_which(tmp_path: Path) -> None:
    code = "import sys; print(flush=True); sys.stdin.read()"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"SOME_DIRECTORY": directory},
        )
        for arguments, directory in (
            ([str(tmp_path / "x")], ""),
            ([], str(tmp_path / "y")),
            ([], f"{tmp_path}-other"),
        )
    ]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        found = run.clear(tmp_path)
        assert [f"process {child.pid}:" in "\n".join(found) for child in children] == [True, True, False]
        assert [run.is_running(child.pid) for child in children] == [False, False, True]
    finally:
        for child in children:
            child.kill()
            child.communicate()
    assert run.clear(tmp_path) == []


CASES = """
import os, subprocess, sys
from pathlib import Path
import pytest
from tests.support import run

def test_leaves_a_process_behind():
    if os.environ.get("SUITE_CASE") == "leaves":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", str(run.own_directory() / "x")],
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

def test_dies():
    if os.environ.get("SUITE_CASE") == "dies":
        os._exit(3)

@pytest.mark.alone
def test_ends(session_dir):
    assert session_dir.parent == run.directory()
"""


@pytest.mark.limit_s(320)
@pytest.mark.parametrize(
    ("case", "workers", "status", "said"),
    [
        ("leaves", "0", 1, "left behind, process"),
        ("leaves", "2", 1, "left behind, process"),
        ("dies", "2", 1, "crashed while running"),
    ],
)
def test_a_run_fails_for_what_no_test_notices(
    tmp_path: Path, case: str, workers: str, status: int, said: str
) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", REPOSITORY / "pyproject.toml", "--rootdir", tmp_path, "-p",
         "no:cacheprovider", "-n", workers, "--dist", "worksteal", tmp_path],
        cwd=REPOSITORY, env={**os.environ, "SUITE_CASE": case, "TIERFS_TEST_DIR": str(tmp_path)}, text=True,
        capture_output=True, stdin=subprocess.DEVNULL, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    assert said in done.stdout
    assert [path.name for path in tmp_path.glob("tierfs-test-*")] == []
