"""GETs by threads in C: a body from its connection into a tier's file, and nothing of Python in between.

What a small file that is not local costs would else be mostly a worker thread: it has to be woken, to get the
GIL, and to wake the trio thread. Here the request is made on the trio thread (``store.prepared``), C does the
rest (``tierfs_native``'s ``transfer_get.h``), and one wake-up of the trio thread takes all that has ended.

Trio thread only. Anything but success is None: the store's own way knows what it means.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import outcome
import trio

import tierfs_native
from tierfs.cache.fill import Fill
from tierfs.log import get_logger
from tierfs.store.counting import RequestMeter
from tierfs.store.prepared import PreparedGet, PrepareGet
from tierfs.types import ObjectRef

_log = get_logger(__name__)

_MOST_THREADS = 256
_MOST_SERVERS = 4
"""As a rule there is one; another one after settings were read anew."""

Got = tuple[bytes | None, bytes]
"""(the bytes, if they were wanted, and the checksums of the blocks) of what is in the file now."""
Ended = Callable[[Got | None], None]


class NativeGets:
    """See the module docstring."""

    def __init__(self, prepare: PrepareGet | None, *, threads: int) -> None:
        """``prepare``: what makes the requests; None: nothing can be done here."""
        self._native: ModuleType | None = tierfs_native.transfer() if prepare is not None else None
        self._prepare = prepare
        self._threads = min(threads, _MOST_THREADS)
        self._servers: dict[tuple[str, int], _Server] = {}
        self._nursery: trio.Nursery | None = None

    def start(self, nursery: trio.Nursery) -> None:
        """Where the tasks run that take what has ended."""
        self._nursery = nursery

    def prepare(self, ref: ObjectRef, offset_bytes: int, length_bytes: int) -> PreparedGet | None:
        """The request for that range; None: it cannot be sent from here."""
        if self._native is None or self._prepare is None:
            return None
        try:
            return self._prepare(ref.key, offset_bytes, length_bytes, etag=ref.etag,
                                 version_id=ref.version_id)
        except ValueError:  # a key or ETag that has no form in a request; the store's way says so
            return None

    def begin(self, request: PreparedGet, etag: str, offset_bytes: int, length_bytes: int, fill: Fill,
              ended: Ended, *, wants_body: bool) -> bool:
        """Send the request for the bytes of ``fill``; ``ended`` is called later. False: it was not sent."""
        server = self._server(request)
        if server is None:
            return False
        try:
            number = server.getter.submit(request.message, etag.encode(), offset_bytes, length_bytes,
                                          fill.path, fill.create, fill.target_bytes, wants_body)
        except OSError as error:
            _log.warning("a small read was not taken", reason=str(error))
            return False
        fill.wrote = True
        request.meter.note("get")
        server.waiting[number] = (ended, request.meter, length_bytes)
        return True

    async def get(self, ref: ObjectRef, offset_bytes: int, length_bytes: int, fill: Fill, *,
                  wants_body: bool) -> Got | None:
        """Both for a task that waits. Cancelled, it goes on, and nobody hears of its end."""
        request = self.prepare(ref, offset_bytes, length_bytes)
        task: trio.lowlevel.Task | None = trio.lowlevel.current_task()

        def ended(result: Got | None) -> None:
            if task is not None:
                trio.lowlevel.reschedule(task, outcome.Value(result))

        def abort(_: object) -> trio.lowlevel.Abort:
            nonlocal task
            task = None
            return trio.lowlevel.Abort.SUCCEEDED

        if request is None or not self.begin(request, ref.etag, offset_bytes, length_bytes, fill, ended,
                                             wants_body=wants_body):
            return None
        found: Got | None = await trio.lowlevel.wait_task_rescheduled(abort)
        return found

    def _server(self, request: PreparedGet) -> _Server | None:
        server = self._servers.get((request.host, request.port))
        if server is None and len(self._servers) < _MOST_SERVERS and self._native and self._nursery:
            try:
                getter = self._native.Getter(
                    request.host, str(request.port), self._threads, int(request.connect_timeout_s * 1000),
                    int(request.read_timeout_s * 1000))
            except OSError as error:
                _log.warning("no threads in C for small reads", reason=str(error))
                self._native = None
                return None
            server = self._servers[(request.host, request.port)] = _Server(getter)
            self._nursery.start_soon(server.run)
        return server

    async def close(self) -> None:
        """Break off what is under way: when this returns, nothing writes any more, and all have been told."""
        servers = list(self._servers.values())
        self._servers.clear()
        self._native = None
        for server in servers:
            await server.close()


class _Server:
    """The threads for one address."""

    def __init__(self, getter: Any) -> None:
        self.getter = getter
        self.waiting: dict[int, tuple[Ended, RequestMeter, int]] = {}
        """By the number of the get: whom to tell of its end, and of how many bytes."""
        self._running = trio.CancelScope()
        self._stopped = trio.Event()

    async def run(self) -> None:
        """Take what has ended, until cancelled, or ``close``."""
        try:
            with self._running:
                while True:
                    await trio.lowlevel.wait_readable(self.getter)
                    self._take()
        finally:
            self._stopped.set()

    def _take(self) -> None:
        for number, error_no, sums, body in self.getter.take():
            ended, meter, length_bytes = self.waiting.pop(number)
            if not error_no:
                meter.note_read(length_bytes)
            ended(None if error_no else (body, sums))

    async def close(self) -> None:
        """See ``NativeGets.close``."""
        self._running.cancel()
        await self._stopped.wait()
        await trio.to_thread.run_sync(self.getter.close)
        while self.waiting:
            self.waiting.popitem()[1][0](None)
