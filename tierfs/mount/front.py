"""Who answers the kernel: pyfuse3 on ``/dev/fuse`` itself, or on a socket to the native front.

Both have the same methods. The native front was there before this process, and starts another one should it
die: see ``tierfs_native/src/front_supervisor.h``. Trio thread only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import select
import struct
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import pyfuse3
import structlog
import trio

from tierfs import mountpoint
from tierfs.cache.tier import Tier
from tierfs.config import Settings
from tierfs.errors import MountError
from tierfs.fs.extra import ExtraRequests
from tierfs.fs.ops import TierfsOperations
from tierfs.mount import channel, transport
from tierfs.mount.channel import Channel, FrontCounts, Kind, OpenHandle

log = structlog.get_logger(__name__)

REQUESTS_FD = 3
CHANNEL_FD = 4
REPORT_FD = 5
NAMES_FD = 6
"""Descriptors that a front gives to its engine (``tierfs_native/src/engine.h``)."""
CONNECTION_POLL_S = 0.25
LAST_REQUESTS_S = 0.5
MNT_DETACH = 2
PASSTHROUGH_KERNEL = (6, 9)
_INO = struct.Struct("<Q")
COUNTS_TIMEOUT_S = 1.0
_MOUNT_FLAGS = {
    "ro": 1, "nosuid": 2, "nodev": 4, "noexec": 8, "sync": 16, "dirsync": 128, "noatime": 1024,
    "nodiratime": 2048, "relatime": 1 << 21, "strictatime": 1 << 24, "lazytime": 1 << 25,
}  # fmt: skip
_OPPOSITES = {
    "rw": "ro",
    "suid": "nosuid",
    "dev": "nodev",
    "exec": "noexec",
    "atime": "noatime",
    "async": "sync",
}
"""Source: mount(8), mount(2), include/uapi/linux/mount.h."""


def kernel_options(settings: Settings) -> set[str]:
    options = {"default_permissions", *settings.kernel_options}
    if settings.allow_other:
        options.add("allow_other")
    if settings.read_only:
        options.add("ro")
    return options


class PythonFront:
    """pyfuse3 reads ``/dev/fuse``; the mount ends with this process."""

    kind = "python"
    open_handles: Sequence[OpenHandle] = ()
    passed_files: Mapping[int, tuple[int, int]] = MappingProxyType({})
    is_reattached = False
    opens_untold = False

    def __init__(self, why: str) -> None:
        self.why = why
        self._mounted = False

    async def mount(self, operations: TierfsOperations, settings: Settings, tiers: Sequence[Tier]) -> None:
        """From now on requests arrive, once ``pyfuse3.main`` runs. Raises ``MountError``."""
        name = {f"fsname={mountpoint.fsname_of(settings.source)}", "subtype=tierfs"}
        try:
            pyfuse3.init(operations, settings.mountpoint, kernel_options(settings) | name)
        except RuntimeError as error:
            raise MountError(
                f"{settings.mountpoint}: the kernel refused the mount ({error}); 'tierfs doctor' says more"
            ) from None
        self._mounted = True

    async def watch(self, scope: trio.CancelScope) -> None:
        """End requests that still wait for the store when the kernel has let go of the mount.

        pyfuse3 waits for every request before it returns; nobody is left to hear their answers. A lazily
        unmounted file system keeps its connection until the last file is closed.
        """
        descriptor = _fuse_descriptor()
        if descriptor is None:
            return
        poller = select.poll()
        poller.register(descriptor, 0)
        while not any(event & select.POLLERR for _, event in poller.poll(0)):  # noqa: ASYNC110 - no event to wait for
            await trio.sleep(CONNECTION_POLL_S)
        await trio.sleep(LAST_REQUESTS_S)
        scope.cancel()

    passthrough = "no (only the native front can)"
    """Whether reads of complete large files go to the tier's file without asking, for a person."""

    @property
    def processes(self) -> dict[str, int]:
        """For status: which process holds the mount, and how many engines it has had."""
        return {"pid": os.getpid(), "engine_starts": 1}

    async def counts(self) -> FrontCounts | None:
        """See ``NativeFront.counts``."""
        return None

    def ready(self, settings: Settings) -> None:
        """Every part works."""

    def stopping(self) -> None:
        """The engine ends on purpose."""

    async def unmount(self) -> None:
        if self._mounted:
            self._mounted = False
            pyfuse3.close(unmount=True)


def _fuse_descriptor() -> int | None:
    """The descriptor of /dev/fuse that pyfuse3 has opened: the only one of this process."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == "/dev/fuse":
                return int(name)
        except OSError:
            continue
    return None


class NativeFront:
    """The front process holds the mount; requests that it cannot answer come over a socket."""

    kind = "native"

    def __init__(self) -> None:
        # What this process starts must not hold on to the sockets: the front could not see our end.
        for descriptor in (REQUESTS_FD, CHANNEL_FD):
            fcntl.fcntl(descriptor, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        self._channel = Channel(CHANNEL_FD)
        self._gone = trio.Event()
        self._answers: dict[int, list[trio.MemorySendChannel[channel.Message]]] = {}
        self._initialised = False
        self._open_mode = "ask"
        self.extra: ExtraRequests | None = None
        """Takes what pyfuse3 does not know. Set before ``mount``."""
        self.on_touched: Callable[[Sequence[int]], None] = lambda inos: None
        """Called with inodes that the front has read without asking."""
        self.on_unknown: Callable[[int], None] = lambda ino: None
        """Called with an inode that the kernel was told to have changed, and does not know."""
        self.open_handles: list[OpenHandle] = []
        self.passed_files: dict[int, tuple[int, int]] = {}
        """Inode -> (device, inode) of the file to which an earlier engine has passed its opens through."""
        self.is_reattached = False
        self.opens_untold = False
        """Files may be open that are not in ``open_handles``."""
        self.why = "the native front holds the mount"
        self.pid = 0
        self.place_mark = b""
        """What an answer begins with that says where the bytes are; empty: the front takes none."""
        self.engine_starts = 0

    async def greet(self) -> None:
        """Read what the front says first: once, before anything else. Raises ``MountError``."""
        while True:
            message = await self._channel.receive()
            if message is None:
                raise MountError("the front has ended")
            if message.kind == Kind.HELLO:
                self.pid, self.engine_starts, self.place_mark = channel.unpack_hello(message.body)
                self.is_reattached = bool(message.value & channel.HELLO_REATTACHED)
                self.opens_untold = bool(message.value & channel.HELLO_UNTOLD)
            elif message.kind == Kind.HANDLES:
                self.open_handles += channel.unpack_handles(message.body)
            elif message.kind == Kind.PASSED:
                self.passed_files.update(channel.unpack_passed(message.body))
            elif message.kind == Kind.HELLO_END:
                return

    async def run(self) -> None:
        """A task of the mount: hear what the front says, until cancelled."""
        while True:
            message = await self._channel.receive()
            if message is None:
                # Nothing can be answered any more, and the next mount waits for the state directory.
                log.error("the front is gone; what is not in the store is kept for the next mount")
                os._exit(1)
            if message.kind == Kind.TOUCHED:
                self.on_touched([ino for (ino,) in _INO.iter_unpack(message.body)])
            elif message.kind == Kind.UNKNOWN:
                self.on_unknown(message.value)
            elif message.kind == Kind.GONE:
                self._gone.set()
            elif message.kind == Kind.EXTRA and self.extra is not None:
                self.extra.take(message.body)
            elif message.kind == Kind.EXTRA_INTERRUPT and self.extra is not None:
                self.extra.interrupt(message.value)
            else:
                for waiting in self._answers.pop(message.kind, []):
                    waiting.send_nowait(message)

    async def _ask(self, kind: Kind, answer: Kind, value: int = 0, body: bytes = b"") -> channel.Message:
        sender, receiver = trio.open_memory_channel[channel.Message](1)
        self._answers.setdefault(answer, []).append(sender)
        self._channel.send(kind, value, body)
        return await receiver.receive()

    async def answer_extra(self, unique: int, error: int, body: bytes) -> None:
        """The answer to a request that went to ``extra``. Raises ``OSError`` if the front is gone."""
        await self._channel.send_waiting(Kind.EXTRA_REPLY, unique, channel.pack_extra_reply(error, body))

    async def mount(self, operations: TierfsOperations, settings: Settings, tiers: Sequence[Tier]) -> None:
        """See ``PythonFront.mount``."""
        try:
            pyfuse3.init(operations, f"/dev/fd/{REQUESTS_FD}", kernel_options(settings))
        except RuntimeError as error:
            raise MountError(f"pyfuse3 does not take the front's socket ({error})") from None
        self._initialised = True
        self._open_mode = settings.open_mode if settings.read_only else "ask"
        self._channel.send(Kind.VIEW, body=_view_settings(settings, tiers))
        if self.is_reattached:
            self._channel.send(Kind.ATTACH)
            return
        flags, options = mount_flags(kernel_options(settings))
        name = mountpoint.fsname_of(settings.source)
        body = b"".join(os.fsencode(part) + b"\0" for part in (settings.mountpoint, name, options))
        answer = await self._ask(Kind.MOUNT, Kind.MOUNTED, flags, body)
        if answer.value:
            raise MountError(
                f"{settings.mountpoint}: the kernel refused the mount ({os.strerror(answer.value)}); "
                "'tierfs doctor' says more"
            )

    async def watch(self, scope: trio.CancelScope) -> None:
        """See ``PythonFront.watch``."""
        await self._gone.wait()
        pyfuse3.terminate()
        await trio.sleep(LAST_REQUESTS_S)
        scope.cancel()

    @property
    def passthrough(self) -> str:
        """See ``PythonFront.passthrough``."""
        release = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
        if release < PASSTHROUGH_KERNEL:
            return "no (it needs Linux {}.{} or newer)".format(*PASSTHROUGH_KERNEL)
        if self._open_mode == "none":
            return "no (files are opened without asking: --open-mode none)"
        if self._open_mode == "auto":
            return "yes, for files that are complete in a tier, until many small ones are read (--open-mode)"
        return "yes, for files that are complete in a tier, and new ones"

    @property
    def processes(self) -> dict[str, int]:
        """See ``PythonFront.processes``."""
        return {"pid": self.pid, "engine_starts": self.engine_starts}

    def ready(self, settings: Settings) -> None:
        """From now on a dead engine is replaced."""
        self._channel.send(Kind.READY)

    def stopping(self) -> None:
        """This engine ends on purpose: the front does not start another."""
        with contextlib.suppress(OSError):
            self._channel.send(Kind.STOPPING)

    def lend(self, ino: int, descriptor: int) -> bool:
        """Give the front a file that holds all bytes of ``ino``, before the open is answered. Never waits."""
        try:
            self._channel.send(Kind.BACKING, ino, descriptor=descriptor)
        except OSError:
            return False
        return True

    def hold_writers(self, yes: bool) -> None:
        """See ``writeback.throttle``. Never waits."""
        with contextlib.suppress(OSError):
            self._channel.send(Kind.HOLD, int(yes))

    async def counts(self) -> FrontCounts | None:
        """What the front has done so far; None if it does not say."""
        with trio.move_on_after(COUNTS_TIMEOUT_S):
            return channel.unpack_counts((await self._ask(Kind.COUNT, Kind.COUNTS)).body)
        return None

    async def unmount(self) -> None:
        if not self._initialised:
            return
        self._initialised = False
        await self._ask(Kind.UNMOUNT, Kind.UNMOUNTED, MNT_DETACH)
        pyfuse3.close(unmount=False)


def _view_settings(settings: Settings, tiers: Sequence[Tier]) -> bytes:
    """With what the front looks names up, and from which directories it reads small files."""
    roots = b"".join(
        (b"m" if tier.setting.volatile else b"d") + os.fsencode(tier.root) + b"\0" for tier in tiers
    )
    return (
        channel.pack_view_settings(
            ttl_ns=int(settings.ttl_s * 1e9),
            negative_ttl_ns=int(settings.negative_ttl_s * 1e9),
            uid=settings.uid,
            gid=settings.gid,
            file_mode=settings.file_mode,
            dir_mode=settings.dir_mode,
            read_only=settings.read_only,
            answers=True,
            open_mode=settings.open_mode,
            close_waits=settings.write_through,
            through_ring=transport.is_ring_wanted(settings),
        )
        + roots
    )


def mount_flags(options: set[str]) -> tuple[int, str]:
    """Flags for mount(2), and the options that go to the file system as text."""
    flags = _MOUNT_FLAGS["nosuid"] | _MOUNT_FLAGS["nodev"]
    rest = []
    for option in sorted(options):
        if option in _MOUNT_FLAGS:
            flags |= _MOUNT_FLAGS[option]
        elif option in _OPPOSITES:
            flags &= ~_MOUNT_FLAGS[_OPPOSITES[option]]
        else:
            rest.append(option)
    return flags, ",".join(rest)


Front = PythonFront | NativeFront
