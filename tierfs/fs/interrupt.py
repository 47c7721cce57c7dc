"""FUSE INTERRUPT: a signal ends a request that waits for the store.

When a process that waits gets a signal, the kernel tells the daemon and goes on waiting for its answer;
libfuse keeps a flag per request (``fuse_req_interrupted``). pyfuse3 offers no way to that flag, so it is
asked through ctypes: the request pointer is a field of pyfuse3's request object, which is found from the
waiting task's coroutine. Its offset follows from the size of that object. Where that does not hold
(another machine, another pyfuse3) ``available`` is False: requests then end when the store answers or its
timeout is over.

Only requests that wait are looked at, ten times a second, and only while there are any: a hit pays nothing.
"""

from __future__ import annotations

import ctypes
import gc
import platform
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio

from tierfs.errors import Interrupted

T = TypeVar("T")
POLL_INTERVAL_S = 0.1

_HEADER_BYTES = 16
_BYTES_WITHOUT_FILE_INFO = _HEADER_BYTES + 8 + 8 + 8 + 8 + 4 + 4 + 8 + 8 + 144 + 8
"""Of pyfuse3's request object on x86-64: rdev, ino, parent, req, flags, mode, off, size, stat, fh."""
_KNOWN_FILE_INFO_BYTES = (40, 48, 56, 64)
"""``struct fuse_file_info`` of libfuse 3.0 to 3.17."""


class InterruptWatch:
    """Runs slow requests so that a signal ends them. Trio thread only; ``run`` is a task of the mount."""

    def __init__(self) -> None:
        self._libfuse = _load_libfuse()
        self._waiting: dict[trio.lowlevel.Task, trio.CancelScope] = {}
        self._interrupted: set[trio.lowlevel.Task] = set()
        """Told by ``interrupt``; libfuse knows of the others itself."""
        self._wake = trio.Event()

    @property
    def available(self) -> bool:
        return self._libfuse is not None

    async def guard(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Await ``function(*args)``; raises ``Interrupted`` if the caller got a signal meanwhile.

        What ``function`` awaits must bear being cancelled.
        """
        task = trio.lowlevel.current_task()
        with trio.CancelScope() as scope:
            self._waiting[task] = scope
            self._wake.set()
            if task in self._interrupted:
                scope.cancel()
            try:
                return await function(*args)
            finally:
                del self._waiting[task]
        raise Interrupted("interrupted by a signal")

    def interrupt(self, task: trio.lowlevel.Task) -> None:
        """The caller of the request that ``task`` answers got a signal. ``forget`` the task when it ends."""
        self._interrupted.add(task)
        scope = self._waiting.get(task)
        if scope is not None:
            scope.cancel()

    def forget(self, task: trio.lowlevel.Task) -> None:
        self._interrupted.discard(task)

    async def run(self) -> None:
        """Look at waiting requests until cancelled."""
        if self._libfuse is None:
            return
        while True:
            if not self._waiting:
                self._wake = trio.Event()
                await self._wake.wait()
            await trio.sleep(POLL_INTERVAL_S)
            for task, scope in list(self._waiting.items()):
                request = _request_of(task)
                if request is not None and self._libfuse.fuse_req_interrupted(request):
                    scope.cancel()


def _load_libfuse() -> ctypes.CDLL | None:
    if platform.machine() != "x86_64" or platform.python_implementation() != "CPython":
        return None
    try:
        library = ctypes.CDLL("libfuse3.so.3")
        library.fuse_req_interrupted.argtypes = (ctypes.c_void_p,)
        library.fuse_req_interrupted.restype = ctypes.c_int
    except (OSError, AttributeError):
        return None
    return library


def _request_of(task: trio.lowlevel.Task) -> int | None:
    """The address of the libfuse request that the suspended ``task`` works on, or None."""
    coroutine: Any = task.coro
    while coroutine is not None:
        name = getattr(coroutine, "__name__", None) or ""
        if name.startswith("fuse_") and name.endswith("_async"):
            return _address_in(coroutine)
        if type(coroutine).__name__ == "coroutine_wrapper":
            inner = [found for found in gc.get_referents(coroutine) if hasattr(found, "cr_await")]
            coroutine = inner[0] if inner else None
        else:
            coroutine = getattr(coroutine, "cr_await", None)
    return None


def _address_in(coroutine: Any) -> int | None:
    for scope in gc.get_referents(coroutine):
        for candidate in gc.get_referents(scope):
            if type(candidate).__name__ != "_Container":
                continue
            file_info_bytes = type(candidate).__basicsize__ - _BYTES_WITHOUT_FILE_INFO
            if file_info_bytes not in _KNOWN_FILE_INFO_BYTES:
                return None
            offset = _HEADER_BYTES + 8 + file_info_bytes + 16
            return ctypes.c_void_p.from_address(id(candidate) + offset).value
    return None
