"""The dirty files of the write tier: names, descriptors, accounting, and room for more.

Trio thread only; file system calls run in the tier's workers. ``staging`` is built on this, ``area`` on both.

What is dirty is told by the directory ``TIER/dirty`` alone, not by the index: a damaged or lost index costs
clean contents and no dirty one. Names:

``<hex>``         a content made here; all of it is in the file (holes are zeros)
``<hex>.base``    a content that was converted from an object version; see ``sidecar``
``<hex>.part``    its bytes, so far as they are not those of the base (may be missing: then none are)
``*.tmp``         never finished; removed at the next start

The durability protocol, step by step, stands in ``staging``.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol, TypeVar

import trio

from tierfs.cache import device
from tierfs.cache.blocks import EXTENT_SIZE_BYTES
from tierfs.cache.health import is_no_space
from tierfs.cache.tier import Tier
from tierfs.errors import NotSupported, ObjectTooLarge, TierFailed, TierFull
from tierfs.types import ContentId, ObjectRef

T = TypeVar("T")

Drain = Callable[[], Awaitable[bool]]
"""Waits until some dirty content became clean; False if nothing drains (store down, nothing to do)."""

_SEALERS = 2
_SLOW_WRITE_S = 0.005
_SLOW_PAUSE_S = 1.0
_DIRECT_ROOM_BYTES = 128 * 1024 * 1024


class BaseReader(Protocol):
    """Where the bytes of a base come from, and where those of a sealed content may go: the cache."""

    async def read(self, ref: ObjectRef, offset_bytes: int, length_bytes: int) -> bytes: ...

    async def keep_sealed(self, ref: ObjectRef, path: str) -> None:
        """The file ``path`` with all bytes of ``ref`` is about to go; copy it into a tier that wants it."""
        ...


class Entry:
    """One dirty content, open or not."""

    __slots__ = ("allocated_bytes", "base", "changes", "is_found", "named", "sidecar_bytes", "size_bytes",
                 "synced_changes")

    def __init__(self, size_bytes: int, allocated_bytes: int, base: ObjectRef | None, *, named: bool,
                 sidecar_bytes: int = 0) -> None:
        self.size_bytes = size_bytes
        """As it was when last closed."""
        self.allocated_bytes = allocated_bytes + sidecar_bytes
        self.sidecar_bytes = sidecar_bytes
        self.base = base
        self.named = named
        """Its name is durable."""
        self.is_found = False
        """An earlier run left it: somebody may have it open, through a mount that died."""
        self.changes = 0
        """Counts changes of the bytes."""
        self.synced_changes = 0
        """How many of them a sync that has ended is known to have seen."""

    @property
    def unsynced(self) -> bool:
        """Written since the last sync: a power cut may cost that."""
        return self.changes != self.synced_changes


class _Removal:
    """Files that are to go."""

    __slots__ = ("done", "error", "fd", "paths")

    def __init__(self, paths: list[str], fd: int | None) -> None:
        self.paths = paths
        self.fd = fd
        self.error: OSError | None = None
        self.done = trio.Event()


def staged_bytes(tier_paths: Iterable[str], content_id: ContentId) -> int | None:
    """Size of a dirty content's file, without an engine; None if there is none in these tiers."""
    for path in tier_paths:
        for suffix in ("", ".part"):
            with suppress(OSError):
                return os.stat(f"{path}/dirty/{content_id.hex()}{suffix}").st_size
    return None


class DirtyFiles:
    """See the module docstring."""

    def __init__(self, tier: Tier, reader: BaseReader, *, dirty_limit_bytes: int = 0) -> None:
        self.tier = tier
        self.reader = reader
        self.drain: Drain | None = None
        self.ease: Drain | None = None
        """As ``drain``, for who is only to be slowed down: what has failed before is not waited for."""
        self.directory = f"{tier.root}/dirty"
        self._sealers = trio.CapacityLimiter(_SEALERS)
        self.files = device.OpenFiles(self.path_of, write=True, never_blocks=tier.setting.volatile)
        self.entries: dict[ContentId, Entry] = {}
        self.unsynced_files = 0
        self.unsynced_bytes = 0
        """Of ``entries``: those that were written since they were synced last. Bytes on the device."""
        self._dirty_limit_bytes = dirty_limit_bytes
        self._no_nowait_until_s = 0.0
        self._removals: list[_Removal] = []

    def path_of(self, content_id: ContentId) -> str:
        """The data file."""
        entry = self.entries.get(content_id)
        suffix = ".part" if entry is not None and entry.base is not None else ""
        return f"{self.directory}/{content_id.hex()}{suffix}"

    def file_or_path(self, content_id: ContentId) -> int | str:
        """The data file for calls that take either: the descriptor if there is one."""
        fd = self.files.peek(content_id)
        return self.path_of(content_id) if fd is None else fd

    def sidecar_path(self, content_id: ContentId) -> str:
        return f"{self.directory}/{content_id.hex()}.base"

    async def call(self, function: Callable[..., T], *args: object) -> T:
        """Run in a worker. ``TierFull``, ``ObjectTooLarge`` or ``TierFailed`` for an ``OSError``."""
        return await self._call_with(self.tier.io, function, *args)

    async def call_sealer(self, function: Callable[..., T], *args: object) -> T:
        """The same in one of the few workers that read whole files."""
        return await self._call_with(self._sealers, function, *args)

    async def _call_with(self, limiter: trio.CapacityLimiter, function: Callable[..., T], *args: object) -> T:
        try:
            return await trio.to_thread.run_sync(function, *args, limiter=limiter)
        except OSError as error:
            raise self.failure(error) from error

    def failure(self, error: OSError) -> TierFull | TierFailed | ObjectTooLarge | NotSupported:
        """What a writer is told about that error; the tier's health knows of it then."""
        if error.errno == errno.EFBIG:
            return ObjectTooLarge(f"tier {self.tier.name}: a file of this size is not possible")
        if error.errno == errno.EOPNOTSUPP:
            return NotSupported(f"tier {self.tier.name}: its file system cannot do that")
        self.tier.health.failed(error)
        text = f"tier {self.tier.name}: {error.strerror or error}"
        return TierFull(text) if is_no_space(error) else TierFailed(text)

    async def with_file(self, content_id: ContentId, function: Callable[[int], T]) -> T:
        """Run ``function(fd)`` in a worker, with the data file open for reading and writing."""
        with self._holding(await self._descriptor(content_id)) as fd:
            return await self.call(function, fd)

    async def with_files(
            self, first: ContentId, second: ContentId, function: Callable[[int, int], T]) -> T:
        """The same with two files."""
        with self._holding(await self._descriptor(first)) as first_fd:
            with self._holding(await self._descriptor(second)) as second_fd:
                return await self.call(function, first_fd, second_fd)

    async def _descriptor(self, content_id: ContentId) -> int:
        fd = self.files.get(content_id)
        if fd is None:
            fd = self.files.add(content_id, await self.call(self.files.open_blocking, content_id))
        return fd

    @contextmanager
    def _holding(self, fd: int) -> Iterator[int]:
        self.files.hold(fd)
        try:
            yield fd
        finally:
            self.files.release(fd)

    # the end of a content

    async def remove(self, content_id: ContentId) -> None:
        """The bytes go."""
        entry = self.entries[content_id]
        paths = [self.path_of(content_id)]
        if entry.base is not None:
            paths.append(self.sidecar_path(content_id))
        fd = self.files.detach(content_id)
        self.drop(content_id)
        # While the file system frees it, it is neither dirty nor room for others.
        self.tier.ledger.freeing_bytes += entry.allocated_bytes
        try:
            with trio.CancelScope(shield=True):
                await self._remove_with_others(_Removal(paths, fd))
        finally:
            self.tier.ledger.freeing_bytes -= entry.allocated_bytes
            self.tier.note_change()

    async def _remove_with_others(self, removal: _Removal) -> None:
        """One worker removes all that have gathered: waking one up costs more than removing a small file."""
        self._removals.append(removal)
        if len(self._removals) > 1:
            await removal.done.wait()
        else:
            await trio.lowlevel.checkpoint()  # whoever runs in this round of the loop joins
            batch, self._removals = self._removals, []
            try:
                await self.call(_remove, batch)
            finally:
                for removed in batch:
                    removed.done.set()
        if removal.error is not None:
            raise self.failure(removal.error) from removal.error

    def drop(self, content_id: ContentId) -> None:
        """It is no dirty content any more; its file has gone or moved."""
        entry = self.entries.pop(content_id)
        self.tier.ledger.dirty_bytes -= entry.allocated_bytes
        if entry.unsynced:
            self.unsynced_files -= 1
            self.unsynced_bytes -= entry.allocated_bytes
        self.tier.note_change()

    def note_written(self, content_id: ContentId) -> None:
        """Its bytes have been changed: what is on the device is not all of it any more."""
        entry = self.entries.get(content_id)
        if entry is None:
            return
        if not entry.unsynced:
            self.unsynced_files += 1
            self.unsynced_bytes += entry.allocated_bytes
        entry.changes += 1

    def note_synced(self, content_id: ContentId, changes: int) -> None:
        """So many changes of its bytes are on the device, with its name."""
        entry = self.entries.get(content_id)
        if entry is None:
            return
        was_unsynced = entry.unsynced
        entry.synced_changes = max(entry.synced_changes, changes)
        if was_unsynced and not entry.unsynced:
            self.unsynced_files -= 1
            self.unsynced_bytes -= entry.allocated_bytes

    # room

    def allocated_bytes(self, content_id: ContentId) -> int:
        """Bytes on the device, the sidecar's included; 0 if there is no such dirty content."""
        entry = self.entries.get(content_id)
        return 0 if entry is None else entry.allocated_bytes

    def set_allocated(self, content_id: ContentId, file_bytes: int) -> None:
        """What the data file takes on the device now."""
        entry = self.entries.get(content_id)
        if entry is not None:
            allocated = file_bytes + entry.sidecar_bytes
            self.tier.ledger.dirty_bytes += allocated - entry.allocated_bytes
            if entry.unsynced:
                self.unsynced_bytes += allocated - entry.allocated_bytes
            entry.allocated_bytes = allocated

    @property
    def over_limit(self) -> bool:
        """There is so much dirty data that writers have to slow down."""
        ledger = self.tier.ledger
        return ledger.dirty_bytes + ledger.reserved_bytes > self._limit_bytes

    @property
    def _limit_bytes(self) -> int:
        return self._dirty_limit_bytes or self.tier.ledger.limit_bytes * 4 // 5

    @property
    def takes_direct_writes(self) -> bool:
        """It is so far to the limit that whoever writes without asking is noticed on the way there.

        And what has been written stays the same file when it becomes clean.
        """
        ledger = self.tier.ledger
        limit = self._limit_bytes
        used = ledger.dirty_bytes + ledger.reserved_bytes
        return (self.tier.takes_clean and used + max(_DIRECT_ROOM_BYTES, limit // 2) <= limit
                and ledger.can_make_room(_DIRECT_ROOM_BYTES))

    async def wait_below_limit(self) -> bool:
        """Until there is less dirty data than the limit; False: nothing can be published.

        The limit leaves room in the tier: while the store fails, writers use that instead of waiting for it.
        """
        while self.over_limit:
            if self.ease is None or not await self.ease():
                return False
        return True

    def try_reserve(self, nbytes: int) -> bool:
        """Room for a write, if nobody has to be moved or slowed down for it. Then ``release``."""
        if self.over_limit or not self.tier.ledger.has_room(nbytes):
            return False
        self.tier.ledger.reserved_bytes += nbytes
        return True

    async def reserve(self, nbytes: int) -> None:
        """Room for a write: evict, and wait for write-back. Then ``release``. Raises ``TierFull``."""
        await self.wait_below_limit()
        while True:
            self.tier.ledger.reserved_bytes += nbytes
            try:
                if await self.tier.evictor.make_room():
                    return
            except BaseException:
                self.release(nbytes)
                raise
            self.release(nbytes)
            if self.drain is None or not await self.drain():
                raise TierFull(f"tier {self.tier.name} is full of data that is not in the store yet")

    async def make_real_room(self, nbytes: int) -> bool:
        """The file system is full although the accounting is not: somebody else fills it. Give up clean data,
        then wait for write-back; False if there is nothing left to give up."""
        if self.tier.evictor.release(nbytes + EXTENT_SIZE_BYTES):
            await self.tier.evictor.settled()
            return True
        return self.drain is not None and await self.drain()

    def release(self, nbytes: int) -> None:
        self.tier.ledger.reserved_bytes -= nbytes
        self.tier.note_change()

    @contextmanager
    def releasing(self, nbytes: int) -> Iterator[None]:
        """Give a reservation back at the end."""
        try:
            yield
        finally:
            self.release(nbytes)

    # writing on the trio thread

    @property
    def may_write_now(self) -> bool:
        """The last writes into the page cache did not wait for the device (dirty page throttling)."""
        return self._no_nowait_until_s == 0.0 or time.monotonic() >= self._no_nowait_until_s

    def write_now(self, fd: int, data: bytes, offset_bytes: int) -> int:
        """pwrite on the trio thread; afterwards ``may_write_now`` may say no for a while."""
        before = time.monotonic()
        written = os.pwrite(fd, data, offset_bytes)
        self._note_duration(before)
        return written

    def create_now(self, content_id: ContentId) -> int | None:
        """The new data file, made on the trio thread; None: let a worker do it."""
        if not self.may_write_now:
            return None
        before = time.monotonic()
        try:
            return create_file(self.path_of(content_id))
        except OSError:
            return None
        finally:
            self._note_duration(before)

    def _note_duration(self, before_s: float) -> None:
        after_s = time.monotonic()
        self._no_nowait_until_s = after_s + _SLOW_PAUSE_S if after_s - before_s > _SLOW_WRITE_S else 0.0


def create_file(path: str) -> int:
    """A new, empty data file. Raises ``OSError``."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _remove(removals: list[_Removal]) -> None:
    """Worker thread."""
    for removal in removals:
        try:
            if removal.fd is not None:
                os.close(removal.fd)
            for path in removal.paths:
                device.unlink_if_there(path)
        except OSError as error:
            removal.error = error
