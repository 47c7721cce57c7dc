"""Which processes belong to a peer, what CPU time they have used, and what memory they hold.

File systems run away from whoever started them: they fork, start sessions of their own, and are adopted by
the first process. What stays is the environment: everything that is started for a peer carries ``MARK``
with a value of its own, inherited by all its descendants, and is found by it. Nothing else is ever
signalled.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MARK = "TIERFS_COMPARE_MARK"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
POLL_S = 0.02
LONGEST_POLL_S = 0.3
ENDED = ("Z", "X", "")


def new_mark(name: str) -> str:
    """A value that no other run uses."""
    return f"{name}-{os.getpid()}-{secrets.token_hex(4)}"


def find(marks: Iterable[str]) -> dict[str, list[int]]:
    """The living processes that carry each of these marks, with one look at all processes."""
    wanted = {f"{MARK}={mark}".encode(): mark for mark in marks}
    found: dict[str, list[int]] = {mark: [] for mark in wanted.values()}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{name}/environ").read_bytes()
            if MARK.encode() not in environment:
                continue
            for entry in environment.split(b"\0"):
                if entry in wanted and state(int(name)) not in ENDED:
                    found[wanted[entry]].append(int(name))
    return found


def marked(mark: str) -> list[int]:
    """The living processes that carry this mark."""
    return find([mark])[mark]


def state(pid: int) -> str:
    """The one-letter state of a process; empty if it is gone."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, with that of its children that have ended; 0 if it is gone.

    A child's time moves to its parent when the parent takes note of its end. Over a whole family the sum
    therefore never falls, and differences of it are what was used.
    """
    fields = _stat(pid)
    return sum(int(each) for each in fields[11:15]) * TICK_S if fields else 0.0


def parse_stat(text: str) -> list[str]:
    """The fields of /proc/PID/stat behind the name, which may hold parentheses; the state first."""
    return text.rpartition(")")[2].split()


def _stat(pid: int) -> list[str]:
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text(errors="replace"))
    except OSError:
        return []


def memory_bytes(pid: int) -> tuple[int, int]:
    """Resident memory now, and the most there has been; zeros if it is gone."""
    now = peak = 0
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name == "VmRSS":
                now = int(value.split()[0]) * 1024
            elif name == "VmHWM":
                peak = int(value.split()[0]) * 1024
    return now, peak


@dataclass(slots=True)
class Usage:
    """CPU seconds by process, at one moment."""

    by_pid: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, pids: Iterable[int]) -> Usage:
        return cls({pid: cpu_seconds(pid) for pid in pids})

    def since(self, before: Usage) -> float:
        """What was used between two looks.

        The difference of sums, so that a child's time, which its parent inherits, counts once. A process
        that began in between counts in full. Never below zero, also where one ended that nobody of the
        family waited for.
        """
        used = sum(self.by_pid.values()) - sum(before.by_pid.values())
        return max(0.0, used)


class Stopwatch:
    """CPU seconds of groups of processes over a piece of work: ``groups`` maps a role to its marks."""

    def __init__(self, groups: Mapping[str, Sequence[str]]) -> None:
        self._groups = groups
        self._before = self._look()
        self._busy = machine_busy_seconds()

    def stop(self) -> dict[str, float]:
        """CPU seconds per role; ``machine`` is everything that ran on it, whoever it was."""
        busy = machine_busy_seconds()
        now = self._look()
        used = {role: now[role].since(self._before[role]) for role in self._groups}
        used["machine"] = max(0.0, busy - self._busy)
        return used

    def _look(self) -> dict[str, Usage]:
        found = find({mark for marks in self._groups.values() for mark in marks})
        return {
            role: Usage.of(pid for mark in marks for pid in found[mark])
            for role, marks in self._groups.items()
        }


def machine_busy_seconds() -> float:
    """CPU seconds that all cores together were not idle, since the machine started."""
    with open("/proc/stat") as file:
        return parse_busy(file.readline())


def parse_busy(line: str) -> float:
    """The same from the first line of /proc/stat: all but idle and waiting; guests are in user time."""
    values = [int(each) for each in line.split()[1:9]]
    return (sum(values) - values[3] - values[4]) * TICK_S


def resident(mark: str) -> tuple[int, int]:
    """Resident bytes of all processes with this mark: now, and the sum of what each had at most."""
    both = [memory_bytes(pid) for pid in marked(mark)]
    return sum(now for now, _ in both), sum(peak for _, peak in both)


def wait_until_gone(mark: str, limit_s: float) -> bool:
    """Whether all processes with this mark have ended within the limit."""
    limit = time.monotonic() + limit_s
    pause_s = POLL_S
    while marked(mark):
        if time.monotonic() > limit:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_POLL_S)  # each look is one at every process of the machine
    return True


def end(mark: str, grace_s: float = 5.0) -> int:
    """End all processes with this mark; returns how many did not listen and were killed."""
    for pid in marked(mark):
        _signal(pid, signal.SIGTERM)
    if wait_until_gone(mark, grace_s):
        return 0
    killed = 0
    limit = time.monotonic() + grace_s
    while (left := marked(mark)) and time.monotonic() < limit:
        for pid in left:
            killed += _signal(pid, signal.SIGKILL)
        time.sleep(POLL_S)
    return killed


def _signal(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
