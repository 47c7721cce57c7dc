"""Work that may hang is done in a process that can be given up.

A process that waits for a mountpoint whose daemon hangs cannot even be killed: it waits in the kernel until
the daemon answers or is gone. So the order is: first end the daemon, then the process.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from tierfs.errors import TierfsError

T = TypeVar("T")
REAP_LIMIT_S = 10.0
HEAD_BYTES = 8


class Hung(Exception):
    """The work was given up."""


class WorkFailed(Exception):
    """The work raised; the message is its error."""


def guarded(work: Callable[[], T], limit_s: float, give_up: Callable[[], None]) -> T:
    """Do this in a process of its own and return what it returned (which has to pickle).

    After ``limit_s`` ``give_up`` is called, which has to make hanging calls return; then the process and
    all that it started are killed. Raises Hung or WorkFailed.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        _work(work, writing)
    os.close(writing)
    answer = None
    try:
        answer = _receive(reading, limit_s)
    finally:
        os.close(reading)
        if answer is None:  # it took too long, or this process is interrupted
            give_up()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        _reap(pid)
    if answer is None:
        raise Hung(f"no end within {limit_s:.0f} s; given up")
    if not answer:
        raise WorkFailed("the process that did it died")
    succeeded, value = pickle.loads(answer)
    if not succeeded:
        raise WorkFailed(value)
    result: T = value
    return result


def _work(work: Callable[[], Any], writing: int) -> None:
    """In the child; does not return."""
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gives it up
        try:
            answer = (True, work())
        except TierfsError as error:
            answer = (False, f"{type(error).__name__}: {error}")
        except OSError as error:
            answer = (False, f"{type(error).__name__}: {error}")
        except BaseException:
            answer = (False, traceback.format_exc(limit=-4))
        body = pickle.dumps(answer)
        with open(writing, "wb") as pipe:
            pipe.write(len(body).to_bytes(HEAD_BYTES, "little") + body)
    finally:
        os._exit(0)


def _receive(reading: int, limit_s: float) -> bytes | None:
    """The whole answer; empty if the other end was closed before it was complete; None if it takes too long.

    Its length comes first: processes that the work has left behind may hold the other end open.
    """
    limit = time.monotonic() + limit_s
    received = b""
    while len(received) < HEAD_BYTES or len(received) < _wanted(received):
        ready, _, _ = select.select([reading], [], [], max(0.0, limit - time.monotonic()))
        if not ready:
            return None
        piece = os.read(reading, 1 << 16)
        if not piece:
            return b""
        received += piece
    return received[HEAD_BYTES:]


def _wanted(received: bytes) -> int:
    return HEAD_BYTES + int.from_bytes(received[:HEAD_BYTES], "little")


def _reap(pid: int) -> None:
    """Wait for the end of the process, but not for ever: one that hangs in the kernel is left behind."""
    limit = time.monotonic() + REAP_LIMIT_S
    while time.monotonic() < limit:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                time.sleep(0.01)
                continue
        return
