"""Which processes are a peer's, what they used, and how work that hangs is given up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.compare import processes
from benchmarks.compare.guard import Hung, WorkFailed, guarded
from benchmarks.compare.processes import MARK, Stopwatch, Usage, new_mark, parse_busy, parse_stat
from tierfs.errors import BenchFailed

LIMIT_S = 30.0
BURN = "import time\nend = time.process_time() + {seconds}\nwhile time.process_time() < end: pass\n"
# A daemon as daemons are: its parent ends at once, it has a session of its own, and no relation to us.
RUN_AWAY = (
    "import os, sys, time\n"
    "if os.fork(): os._exit(0)\n"
    "os.setsid()\n"
    "sys.stdout.write(str(os.getpid()) + '\\n'); sys.stdout.flush()\n"
    "time.sleep(600)\n"
)


@pytest.fixture
def mark() -> Iterator[str]:
    mark = new_mark("test")
    yield mark
    processes.end(mark, grace_s=1.0)
    assert processes.marked(mark) == []


def start(mark: str, code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, MARK: mark}, text=True, stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
    )


def close(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    process.wait(LIMIT_S)


def test_a_daemon_that_ran_away_is_found_and_ended(mark: str) -> None:
    parent = start(mark, RUN_AWAY)
    assert parent.stdout is not None
    daemon = int(parent.stdout.readline())
    close(parent)
    assert processes.marked(mark) == [daemon]
    assert processes.find([mark, "other"]) == {mark: [daemon], "other": []}
    assert processes.end(mark) == 0
    assert processes.state(daemon) in processes.ENDED


def test_one_that_does_not_listen_is_killed(mark: str) -> None:
    code = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('on', flush=True)\ntime.sleep(600)"
    process = start(mark, code)
    assert process.stdout is not None
    assert process.stdout.readline() == "on\n"
    assert processes.end(mark, grace_s=0.1) >= 1
    close(process)
    assert process.returncode == -signal.SIGKILL


def test_nobody_elses_process_is_touched(mark: str) -> None:
    other = new_mark("other")
    process = start(other, "input()")
    processes.end(mark, grace_s=0.1)
    assert process.poll() is None
    close(process)


def test_cpu_time_of_children_counts_once(mark: str) -> None:
    """A child that has ended, and one that began and ended in between, are in their parent's time."""
    code = (
        "import subprocess, sys\n"
        f"burn = {BURN.format(seconds=0.1)!r}\n"
        "print('ready', flush=True)\n"
        "input()\n"
        "subprocess.run([sys.executable, '-c', burn], check=True)\n"
        "subprocess.run([sys.executable, '-c', burn], check=True)\n"
        "print('done', flush=True)\n"
        "input()\n"
    )
    process = start(mark, code)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    watch = Stopwatch({"daemon": [mark], "nobody": ["no such mark"]})
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"
    used = watch.stop()
    close(process)
    assert used["daemon"] >= 0.2
    assert used["nobody"] == 0.0
    assert set(used) == {"daemon", "nobody", "machine"}


def test_usage_is_a_difference_of_sums() -> None:
    before = Usage({1: 5.0, 2: 3.0})
    assert Usage({1: 9.5}).since(before) == pytest.approx(1.5)  # 2 has ended; 1 inherited its time
    assert Usage({1: 5.0, 2: 3.0, 3: 0.5}).since(before) == pytest.approx(0.5)
    assert Usage({}).since(before) == 0.0


def test_stat_of_a_process_with_an_odd_name() -> None:
    line = "17 (a b) c) S 1 17 17 0 -1 4194304 1 2 3 4 250 50 30 20 20 0 1 0"
    fields = parse_stat(line)
    assert fields[0] == "S"
    assert fields[11:15] == ["250", "50", "30", "20"]


def test_busy_time_leaves_out_idle_waiting_and_guests() -> None:
    line = "cpu  100 20 30 4000 500 6 7 8 90 10"
    assert parse_busy(line) == pytest.approx((100 + 20 + 30 + 6 + 7 + 8) * processes.TICK_S)


def test_resident_memory_grows_with_use(mark: str) -> None:
    process = start(mark, "x = b'x' * (64 << 20)\nprint('on', flush=True)\ninput()")
    assert process.stdout is not None
    assert process.stdout.readline() == "on\n"
    now, peak = processes.resident(mark)
    close(process)
    assert peak >= now > 64 << 20
    assert processes.resident(mark) == (0, 0)


def test_guarded_work_returns_what_it_returned() -> None:
    assert guarded(lambda: {"pid": os.getppid()}, LIMIT_S, give_up=lambda: None) == {"pid": os.getpid()}


def test_guarded_work_of_a_megabyte_comes_back_whole() -> None:
    assert guarded(lambda: b"x" * (3 << 20), LIMIT_S, give_up=lambda: None) == b"x" * (3 << 20)


def test_guarded_work_that_fails_says_why(tmp_path: Path) -> None:
    def missing() -> None:
        (tmp_path / "absent").read_bytes()

    def wrong() -> None:
        raise BenchFailed("wrong bytes at 17")

    def dies() -> None:
        os._exit(3)

    for work, words in ((missing, "absent"), (wrong, "BenchFailed: wrong bytes at 17"), (dies, "died")):
        with pytest.raises(WorkFailed, match=words):
            guarded(work, LIMIT_S, give_up=lambda: None)


def test_guarded_work_that_hangs_is_given_up_with_all_it_started(mark: str) -> None:
    read_end, write_end = os.pipe()
    order: list[str] = []

    def hang() -> None:
        os.environ[MARK] = mark  # for its child, by which the test finds it
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        os.write(write_end, b"started")
        time.sleep(600)

    def give_up() -> None:
        assert os.read(read_end, 7) == b"started"
        order.append("given up")

    with pytest.raises(Hung, match="given up"):
        guarded(hang, 0.05, give_up)
    assert order == ["given up"]
    assert processes.wait_until_gone(mark, LIMIT_S)
    os.close(read_end)
    os.close(write_end)


def test_guarded_work_may_leave_a_process_behind_that_holds_the_pipe() -> None:
    def leave() -> int:
        pid = os.fork()
        if not pid:
            time.sleep(600)
            os._exit(0)
        return pid

    left = guarded(leave, LIMIT_S, give_up=lambda: None)
    try:
        assert processes.state(left) in ("R", "S")
    finally:
        os.kill(left, signal.SIGKILL)
