"""One engine: from settings to a served mount and back. See the package docstring."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pyfuse3
import structlog
import trio

from tierfs import mountpoint, notify
from tierfs.config import Settings
from tierfs.control import registry
from tierfs.control.server import ControlServer
from tierfs.errors import StoreError, TierfsError
from tierfs.fs import direct
from tierfs.fs.extra import ExtraRequests
from tierfs.fs.ops import TierfsOperations
from tierfs.mount import gauges
from tierfs.mount.checkpoints import CheckpointHandlers
from tierfs.mount.front import NAMES_FD, Front, NativeFront, PythonFront
from tierfs.mount.handlers import Handlers
from tierfs.mount.parts import Parts, open_parts
from tierfs.mount.rebuilds import RebuildHandlers
from tierfs.mount.recovery import recover, restore_handles
from tierfs.mount.snapshots import SnapshotHandlers
from tierfs.namespace import repeats
from tierfs.types import ROOT_INO
from tierfs.writeback.throttle import DirectWriteThrottle

log = structlog.get_logger(__name__)

MAX_REQUEST_TASKS = 2000
KERNEL_READ_AHEAD_BYTES = 1024 * 1024
"""As much as one request may be: requests of the kernel cost the same whatever their size."""
REPLICA_GRACE_S = 10.0
"""How long the end of a mount waits for the replica at most; what is left there the next start removes."""
READ_AHEAD_PAUSES_S = (0.0, 0.02, 0.1, 0.5, 2.0)
"""The kernel goes back to its own value when it takes the answer to INIT, which may be after we spoke."""
"""Requests in progress at once; each may wait for the store, and none may keep another from starting."""
MALLOC_SETTINGS = (
    (-3, 256 * 1024 * 1024),  # M_MMAP_THRESHOLD
    (-1, 256 * 1024 * 1024),  # M_TRIM_THRESHOLD
    (-2, 16 * 1024 * 1024),  # M_TOP_PAD
    (-8, 4),  # M_ARENA_MAX
)
GC_THRESHOLDS = (20_000, 20, 50)
OnReady = Callable[[dict[str, Any]], None]


def run(settings: Settings, *, on_ready: OnReady, under_front: bool = False, why: str = "") -> int:
    """Serve one mount until it is unmounted or the process is told to stop; returns the exit code.

    ``on_ready`` is called once, when the root can be listed, with what was decided. ``under_front``: a native
    front has started this process; else pyfuse3 drives the mount, and ``why`` says why. Raises a
    ``TierfsError`` that says why if it cannot mount; then there is no mount.
    """
    os.makedirs(settings.state_dir, mode=0o700, exist_ok=True)
    with registry.hold_state_dir(Path(settings.state_dir)):
        _tune_process()
        try:
            return trio.run(Engine(settings, on_ready, under_front=under_front, why=why).serve)
        except BaseExceptionGroup as group:
            raise _only(group) from None


def _tune_process() -> None:
    """Settings of the C allocator and of the garbage collector for buffers of megabytes that come and go.

    By default glibc gives every large buffer back to the kernel, which then has to zero its pages anew: half
    of the system time of a cold read (mallopt(3)). What the collector finds at start lives as long as the
    process, and cycles are rare in what comes later.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in MALLOC_SETTINGS:
            mallopt(parameter, value)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


class Engine:
    """The parts that live as long as the mount, and the order in which they start and stop."""

    def __init__(self, settings: Settings, on_ready: OnReady, *, under_front: bool, why: str) -> None:
        self._settings = settings
        self._on_ready = on_ready
        self._serving = False
        self._stop_asked = False
        self._last_drain: trio.CancelScope | None = None
        self.front: Front = NativeFront() if under_front else PythonFront(why)
        self.grace_s = math.inf
        """How long the last drain may take; set by an ``unmount`` notice."""

    async def serve(self) -> int:
        front = self.front
        if isinstance(front, NativeFront):
            await front.greet()
        open_handles = front.open_handles
        async with AsyncExitStack() as stack:
            parts = await open_parts(self._settings, stack, is_reattached=front.is_reattached)
            resumed = await recover(parts, open_handles, opens_untold=front.opens_untold)
            await restore_handles(parts, open_handles, front.passed_files)
            if isinstance(front, NativeFront):
                parts.services.handles.number_from(front.engine_starts)
            if not front.is_reattached:
                await parts.db.commit(repeats.forget_all)
            await self._list_root(parts)
            nursery = await stack.enter_async_context(trio.open_nursery())
            stack.callback(nursery.cancel_scope.cancel)
            await nursery.start(self._watch_signals)
            nursery.start_soon(parts.kernel.run)
            nursery.start_soon(parts.publisher.run)
            parts.start(nursery)
            gauges.register(parts)
            record = registry.record_for(
                self._settings,
                front=front.kind,
                front_pid=front.pid if isinstance(front, NativeFront) else 0,
            )
            server = ControlServer(Path(record.socket_path), owner_uid=os.getuid())
            Handlers(parts, self, nursery).register(server)
            CheckpointHandlers(parts, nursery).register(server)
            snapshot_handlers = SnapshotHandlers(parts)
            snapshot_handlers.register(server)
            RebuildHandlers(parts, snapshot_handlers).register(server)
            await nursery.start(server.serve)
            if self._settings.metrics_address:
                await nursery.start(parts.serve_metrics, self._settings.metrics_address)
            if isinstance(front, NativeFront):
                nursery.start_soon(front.run)
                parts.services.lend = front.lend
                parts.services.place_mark = front.place_mark
                writes = DirectWriteThrottle(
                    parts.db, parts.cache, parts.contents, self._settings.mountpoint, front.hold_writers
                )
                parts.services.hold_write = writes.wait_for_room
                nursery.start_soon(writes.run)
                await nursery.start(parts.cache.make_spares)
                front.extra = ExtraRequests(parts.services)
                nursery.start_soon(front.extra.run, front.answer_extra)
                names = direct.listen(
                    parts.services, front.extra, NAMES_FD, may_be_repeated=front.is_reattached
                )
                nursery.start_soon(names.run)
                front.on_touched = parts.note_touched
            operations = TierfsOperations(parts.services)
            if isinstance(front, NativeFront):

                def forget(ino: int) -> None:
                    if ino in parts.services.orphans:
                        nursery.start_soon(operations.forget, [(pyfuse3.InodeT(ino), 1)])

                front.on_unknown = forget
            await front.mount(operations, self._settings, parts.cache.tiers)
            try:
                registry.write(record)
                stack.callback(registry.remove, record)
                async with trio.open_nursery() as serving:
                    self._serving = True
                    serving.start_soon(self._serve_requests, serving.cancel_scope)
                    serving.start_soon(front.watch, serving.cancel_scope)
                    serving.start_soon(self._widen_read_ahead)
                    front.ready(self._settings)
                    self._on_ready(self._decided(parts, resumed))
                    if self._stop_asked:
                        pyfuse3.terminate()
                front.stopping()
            finally:
                self._serving = False
                with trio.CancelScope(shield=True):
                    await front.unmount()
                    await self._finish(parts)
        return 0

    async def _list_root(self, parts: Parts) -> None:
        """A mount that cannot list its root is refused; one that is there waits for the store."""
        try:
            await parts.refresher.listed(ROOT_INO)
        except StoreError as error:
            if not self.front.is_reattached:
                raise
            log.warning("the store does not answer yet", reason=str(error))

    async def _serve_requests(self, scope: trio.CancelScope) -> None:
        await pyfuse3.main(max_tasks=MAX_REQUEST_TASKS)
        scope.cancel()

    async def _widen_read_ahead(self) -> None:
        if not self._settings.tiers:
            return  # what the kernel reads around a page fault, and nobody keeps, comes from the store again
        size_bytes = min(self._settings.read_ahead_bytes, KERNEL_READ_AHEAD_BYTES)
        for pause_s in READ_AHEAD_PAUSES_S if size_bytes else ():
            await trio.sleep(pause_s)
            if not await trio.to_thread.run_sync(
                mountpoint.set_read_ahead, self._settings.mountpoint, size_bytes
            ):
                return

    def _decided(self, parts: Parts, resumed: dict[str, int]) -> dict[str, Any]:
        return {
            "front": {"kind": self.front.kind, "why": self.front.why, **self.front.processes},
            "passthrough": self.front.passthrough,
            "tiers": [
                {"name": tier.name, "path": tier.path, "capacity_bytes": tier.capacity_bytes}
                for tier in parts.cache.status()
            ],
            "resumed": resumed,
            "store": parts.store.url,
            "pid": os.getpid(),
        }

    async def _finish(self, parts: Parts) -> None:
        """After the last request: save what open files had, then give the backlog its time."""
        notify.sd_notify("STOPPING=1")
        parts.services.settle()
        written: set[int] = set()
        for handle in parts.services.handles.files():
            content = handle.content
            with contextlib.suppress(TierfsError):
                await parts.contents.passthrough.pull(content, always=handle.can_write)
            await parts.contents.size_and_times.save(content)
            if handle.can_write and content.passed_through:
                written.add(content.ino)
            elif handle.can_write:
                content.writers = 0
        parts.nobody_reads()
        with trio.move_on_after(self.grace_s) as self._last_drain:
            await parts.publisher.draining.drain(self._tell_systemd)
            for ino in written:
                # Whoever has it open writes on after this process: so it stays dirty, for the next mount.
                with contextlib.suppress(TierfsError):
                    await parts.publisher.publish_now(ino)
            await parts.commits.finish()
        if parts.replicator is not None:
            with trio.move_on_after(min(self.grace_s, REPLICA_GRACE_S)):
                await parts.replicator.settle()
            parts.replicator.stop_retrying()
        parts.store.stop_retrying()
        left = parts.publisher.backlog.totals()
        if left.files:
            log.warning(
                "stopped before everything was in the store; the rest is kept for the next mount",
                files=left.files,
                bytes=left.bytes,
                time_up=self._last_drain.cancelled_caught,
            )

    def _tell_systemd(self, files: int, size_bytes: int) -> None:
        notify.sd_notify(
            f"STATUS=draining: {files} files, {size_bytes} bytes left\nEXTEND_TIMEOUT_USEC=30000000"
        )

    async def _watch_signals(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for number in signals:
                if self._stop_asked:
                    log.warning("told twice to stop: the backlog is kept for the next mount")
                    self.set_grace(0.0)
                    continue
                log.info("told to stop", signal=signal.Signals(number).name)
                self.stop(math.inf)

    def set_grace(self, grace_s: float) -> None:
        """How long the last drain may take from now on, also when it is running already."""
        self.grace_s = grace_s
        if self._last_drain is not None:
            self._last_drain.deadline = trio.current_time() + grace_s

    def stop(self, grace_s: float) -> None:
        """End the mount: no more requests, then a drain of at most ``grace_s`` seconds."""
        self._stop_asked = True
        self.set_grace(grace_s)
        if self._serving:
            self.front.stopping()
            pyfuse3.terminate()


def _only(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one exception inside a nest of groups; the group itself if there are several."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
