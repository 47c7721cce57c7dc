"""Which bytes are local: the facade of the cache. Trio thread only."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Container, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import trio

from tierfs.cache import device, lending, live, opening, upkeep
from tierfs.cache.area import DirtyContent, Drain, Staged, StagingArea
from tierfs.cache.fetch import Fetcher
from tierfs.cache.index import IndexWriteFailed
from tierfs.cache.live import LiveFile
from tierfs.cache.placement import Placement
from tierfs.cache.reading import Place, Reader
from tierfs.cache.spares import Spare
from tierfs.cache.staging import Staging
from tierfs.cache.tier import Tier
from tierfs.config import Settings
from tierfs.errors import InvalidArgument, TierFull
from tierfs.metrics import Metrics
from tierfs.store.base import ObjectStore
from tierfs.types import ContentId, ObjectRef

_PIN_ROUNDS = 4

__all__ = ["Cache", "DirtyContent", "Drain", "Staged", "TierStatus"]


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One tier as ``status`` shows it. Bytes on the device, not of files."""

    name: str
    path: str
    volatile: bool
    capacity_bytes: int
    used_bytes: int
    """File data on the device, clean and dirty, what is just being fetched or removed included."""
    overhead_bytes: int
    """Its own index and directories; part of what the capacity limits."""
    clean_bytes: int
    dirty_bytes: int
    pinned_bytes: int
    hits: int
    misses: int
    hit_bytes: int
    state: str
    """``ok``, ``full`` (bypassed for lack of space) or ``failing`` (bypassed after an I/O error)."""
    reason: str
    """Why it is not ``ok``; empty if it is."""


class Cache:
    """See the package docstring."""

    def __init__(self, tiers: list[Tier], write_tier: Tier, store: ObjectStore, metrics: Metrics,
                 settings: Settings) -> None:
        self._tiers = tiers
        self._placement = Placement(tiers)
        self._fetcher = Fetcher(store, metrics, self._placement.tiers_for,
                                concurrency=settings.fetch_concurrency,
                                memory_budget_bytes=settings.memory_budget_bytes)
        self._reader = Reader(tiers, self._placement, self._fetcher, metrics)
        self._area = StagingArea(write_tier, self, dirty_limit_bytes=settings.dirty_limit_bytes)
        self._all_tiers = tiers if write_tier in tiers else [*tiers, write_tier]
        self._read_only = settings.read_only
        self._lent: dict[ContentId, list[Callable[[], None]]] = {}
        opening.register_gauges(metrics, self._all_tiers)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Every tier, as in ``status``."""
        return tuple(self._all_tiers)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: Settings,
        store: ObjectStore,
        metrics: Metrics,
        mount_id: str,
        *,
        now_ns: Callable[[], int] = time.time_ns,
        keep_volatile: bool = False,
    ) -> AsyncIterator[Cache]:
        """Open every tier, run the cache's background tasks, and close it all again on the way out.

        Raises ``FormatError`` for a tier of a newer version, ``TierFailed`` if the write tier cannot be
        used or belongs to a running mount. Any other tier that cannot be used is bypassed.
        ``keep_volatile``: leave RAM tiers behind on a clean exit (they are dropped otherwise).
        """
        tiers, write_tier = await opening.open_tiers(settings, mount_id, now_ns)
        cache = cls(tiers, write_tier, store, metrics, settings)
        try:
            await cache._area.recover()
            async with trio.open_nursery() as nursery:
                for tier in cache._all_tiers:
                    tier.evictor.start(nursery)
                    await upkeep.look_at_device(tier)
                    nursery.start_soon(upkeep.run, tier)
                cache._fetcher.start(nursery)
                cache._placement.start(nursery)
                try:
                    yield cache
                finally:
                    with trio.CancelScope(shield=True):
                        await cache._fetcher.close()
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            # The nursery is ours alone; who uses the cache sees the exception that was raised in its block.
            if len(group.exceptions) == 1:
                raise group.exceptions[0] from None
            raise
        finally:
            with trio.CancelScope(shield=True):
                await cache._area.close()
                await opening.close_tiers(cache._all_tiers, keep_volatile=keep_volatile)

    # reading

    def read_nowait(self, ref: ObjectRef, offset_bytes: int, length_bytes: int) -> bytes | None:
        """The bytes (clipped at the size), or None if they cannot be had without waiting."""
        end = min(offset_bytes + length_bytes, ref.size_bytes)
        if end <= offset_bytes:
            return b""
        return self._reader.read_nowait(ref, offset_bytes, end)

    async def read(self, ref: ObjectRef, offset_bytes: int, length_bytes: int) -> bytes:
        """Exactly the bytes, clipped at ``ref.size_bytes``; what is not local is fetched.

        Raises ``StaleContent`` if that version of the object is gone, or another ``StoreError``. Trouble
        with a tier is never an error here.
        """
        end = min(offset_bytes + length_bytes, ref.size_bytes)
        if end <= offset_bytes:
            await trio.lowlevel.checkpoint()
            return b""
        return await self._reader.read(ref, offset_bytes, end)

    def place(self, ref: ObjectRef, offset_bytes: int, length_bytes: int) -> Place | None:
        """Where those bytes (clipped at the size) can be read now, by whoever checks them against the sums.

        None if they are not whole blocks in one file. They may be evicted at any time.
        """
        end = min(offset_bytes + length_bytes, ref.size_bytes)
        return self._reader.place(ref, offset_bytes, end) if end > offset_bytes else None

    async def bring(self, ref: ObjectRef, offset_bytes: int, length_bytes: int) -> None:
        """Wait until those bytes have been fetched, unless no tier takes them. Raises as ``read`` does."""
        await self._reader.bring(ref, offset_bytes, min(offset_bytes + length_bytes, ref.size_bytes))

    async def prefetch(self, ref: ObjectRef, offset_bytes: int, length_bytes: int) -> int:
        """Make a range local; returns the bytes fetched for it by this call. Behind every ``read``.

        What is local or being fetched already is not fetched again; what is being fetched is waited for.
        If no tier takes it, no more is fetched than the transit buffer holds. Raises what ``read`` raises.
        """
        end = min(offset_bytes + length_bytes, ref.size_bytes)
        if end <= offset_bytes:
            await trio.lowlevel.checkpoint()
            return 0
        return await self._reader.prefetch(ref, offset_bytes, end)

    # what is local

    def resident_bytes(self, content: ObjectRef | ContentId) -> dict[str, int]:
        """Bytes of that content by tier name; tiers with none are left out. Dirty contents included."""
        content_id = content.content_id if isinstance(content, ObjectRef) else content
        found = {}
        for tier in self._tiers:
            nbytes = tier.presence.resident_bytes(content_id)
            if nbytes:
                found[tier.name] = nbytes
        dirty = self._area.dirty.allocated_bytes(content_id)
        if dirty:
            found[self._area.tier.name] = dirty
        return found

    def is_complete(self, content_id: ContentId) -> bool:
        """All bytes of that content are local, in one tier or in several. False for an empty content."""
        return self._reader.is_complete(content_id)

    async def pin(self, ref: ObjectRef, tier: str | None = None) -> None:
        """Fetch all of it into that tier (None: the fastest that can hold it) and keep it there.

        Raises ``TierFull`` if it cannot fit, ``InvalidArgument`` if there is no such tier, and what
        ``read`` raises. A pin survives restarts.
        """
        target = self._tier_to_pin(ref, tier)
        target.set_pinned(ref.content_id, True)
        try:
            await self._bring_into(target, ref)
        except BaseException:
            target.set_pinned(ref.content_id, False)
            raise
        await target.commit()

    def _tier_to_pin(self, ref: ObjectRef, name: str | None) -> Tier:
        if name is not None:
            for tier in self._tiers:
                if tier.name == name:
                    return tier
            raise InvalidArgument(f"no tier is called {name!r}; there are {[t.name for t in self._tiers]}")
        for tier in self._tiers:
            needed = ref.size_bytes - tier.presence.resident_bytes(ref.content_id)
            if tier.takes_clean and tier.ledger.can_make_room(needed):
                return tier
        raise TierFull(f"{ref.key}: no tier has room for {ref.size_bytes} bytes that are not to be evicted")

    async def _bring_into(self, tier: Tier, ref: ObjectRef) -> None:
        self._fetcher.transit.forget(ref.content_id)
        for _ in range(_PIN_ROUNDS):
            if ref.size_bytes:
                await self._reader.prefetch(ref, 0, ref.size_bytes, only=tier)
            if not ref.size_bytes or tier.presence.is_complete(ref.content_id):
                return
        raise TierFull(f"{ref.key}: tier {tier.name} could not take all {ref.size_bytes} bytes")

    async def unpin(self, content_id: ContentId) -> None:
        """Undo ``pin`` in every tier; the bytes stay until they are evicted."""
        for tier in self._tiers:
            if content_id in tier.presence.pins:
                tier.set_pinned(content_id, False)
                await tier.commit()
        await trio.lowlevel.checkpoint()

    async def evict(self, content_id: ContentId) -> int:
        """Drop clean, unpinned bytes of that content everywhere; returns how many. Dirty or lent: 0."""
        freed = 0
        if content_id in self._lent:
            await trio.lowlevel.checkpoint()
            return 0
        self._fetcher.transit.forget(content_id)
        for tier in self._tiers:
            if content_id in tier.presence.pins or tier.is_being_removed(content_id):
                continue
            idle = tier.presence.idle_units(content_id)
            if idle:
                freed += tier.evictor.evict(idle, keep_copy=False)
                await tier.evictor.settled()
        await trio.lowlevel.checkpoint()
        return freed

    def touch(self, content_id: ContentId, size_bytes: int) -> None:
        """All of a small content has just been read from a tier by somebody else."""
        for tier in self._tiers:
            if tier.presence.resident_bytes(content_id):
                tier.count_hit(content_id, 0, size_bytes)
                return

    def lend(
        self, ref: ObjectRef, *, again: bool = False, identity: tuple[int, int] | None = None
    ) -> int | None:
        """A descriptor of a tier's file that holds exactly the bytes of ``ref``; the caller closes it.

        ``identity``: (device, inode) of the file; None: any. They stay there until ``give_back``, once for
        every call without ``again``. None if they are spread over several files, packed with others, not all
        here, or not verified or recorded yet. Blocks for as long as open(2) takes.
        """
        for tier in self._lending_tiers():
            descriptor = lending.open_whole(tier, ref)
            if descriptor is not None and identity not in (None, device.identity(descriptor)):
                os.close(descriptor)
                continue
            if descriptor is not None:
                # Nobody sees the reads that follow: an open counts for all of them.
                tier.count_hit(ref.content_id, 0, ref.size_bytes)
                if not again:
                    self._lent.setdefault(ref.content_id, []).append(lending.hold(tier, ref.content_id))
                return descriptor
        return None

    def _lending_tiers(self) -> list[Tier]:
        """Who writes has to get the file that readers have: one that can become a staging or a live file."""
        if self._read_only:
            return self._tiers
        return [tier for tier in self._tiers if tier is self._area.tier or live.can_be_live(tier)]

    @contextmanager
    def whole_file(self, ref: ObjectRef) -> Iterator[int | None]:
        """A descriptor of a tier's file that holds exactly the bytes of ``ref``, which stay there meanwhile.

        None as for ``lend``.
        """
        for tier in self._tiers:
            descriptor = lending.open_whole(tier, ref, recorded=False)
            if descriptor is not None:
                tier.count_hit(ref.content_id, 0, ref.size_bytes)
                let_go = lending.hold(tier, ref.content_id)
                try:
                    yield descriptor
                finally:
                    let_go()
                    os.close(descriptor)
                return
        yield None

    async def hold(self, ref: ObjectRef, identity: tuple[int, int] | None) -> tuple[int, int] | None:
        """Keep a file that was lent by another engine, or for another content, until ``give_back``.

        ``identity``: (device, inode) of the file; None: any. Returns it, None if there is none.
        """
        for tier in self._lending_tiers():
            descriptor = lending.open_whole(tier, ref, recorded=False)
            if descriptor is not None:
                found = device.identity(descriptor)
                os.close(descriptor)
                if identity not in (None, found):
                    continue
                self._lent.setdefault(ref.content_id, []).append(lending.hold(tier, ref.content_id))
                with contextlib.suppress(IndexWriteFailed):  # logged; the next commit tries again
                    await tier.commit()
                return found
        await trio.lowlevel.checkpoint()
        return None

    async def take_live(self, content_id: ContentId, identity: tuple[int, int], ino: int) -> LiveFile | None:
        """A writer comes to a file that was lent from a RAM tier; None: it was not. See ``live``."""
        return await live.take(self._tiers, content_id, identity, ino)

    def find_live(self, ino: int) -> LiveFile | None:
        """The live file that an earlier engine has left for an inode that is still open."""
        return live.find(self._tiers, ino)

    def remove_lives_but(self, inos: Container[int]) -> None:
        """At the start, when it is known which inodes are open."""
        live.remove_all_but(self._tiers, inos)

    def give_back(self, content_id: ContentId) -> None:
        """Undo one ``lend``."""
        holds = self._lent.get(content_id)
        if holds:
            holds.pop()()
            if not holds:
                del self._lent[content_id]

    async def forget(self, content_id: ContentId) -> None:
        """The content will not be asked for again: drop its clean bytes, pinned or not. Dirty ones stay."""
        self._fetcher.transit.forget(content_id)
        for tier in self._tiers:
            if tier.has_file(content_id) or tier.has_fills(content_id):
                tier.evictor.forget(content_id)
        await trio.lowlevel.checkpoint()

    def status(self) -> list[TierStatus]:
        """Every tier, fast to slow. With no tier configured, the staging area alone."""
        return [
            TierStatus(
                name=tier.name, path=tier.root, volatile=tier.setting.volatile,
                capacity_bytes=tier.ledger.capacity_bytes if tier.keeps_clean else tier.ledger.limit_bytes,
                used_bytes=tier.ledger.data_bytes,
                overhead_bytes=tier.ledger.overhead_bytes,
                clean_bytes=tier.ledger.clean_bytes, dirty_bytes=tier.ledger.dirty_bytes,
                pinned_bytes=tier.ledger.policy.pinned_bytes, hits=tier.hits, misses=tier.misses,
                hit_bytes=tier.hit_bytes, state=tier.health.state, reason=tier.health.reason,
            )
            for tier in self._all_tiers
        ]

    def files_in_tiers(self) -> dict[str, int]:
        """Contents of which each tier has at least the beginning, dirty ones included. Walks them all."""
        found = {tier.name: tier.ledger.policy.content_count for tier in self._all_tiers}
        found[self._area.tier.name] += len(self._area.dirty.entries)
        return found

    # what is written here

    @property
    def takes_direct_writes(self) -> bool:
        """Whether the file of a dirty content may be given to somebody who writes without passing here."""
        return self._area.dirty.takes_direct_writes

    @property
    def keeps_what_was_written(self) -> bool:
        """The file of a dirty content is kept when the store has its bytes: who has it open goes on."""
        return self._area.tier.keeps_clean

    @property
    def dirty_over_limit(self) -> bool:
        """There is so much dirty data that writers have to slow down."""
        return self._area.dirty.over_limit

    async def wait_below_dirty_limit(self) -> bool:
        """As writers do; False: nothing drains."""
        return await self._area.dirty.wait_below_limit()

    async def make_room_for_dirty(self) -> None:
        """Evict what has to go because dirty contents have grown by themselves."""
        if self._area.tier.ledger.excess_bytes > 0:
            await self._area.tier.evictor.make_room()

    @property
    def buffer_bytes(self) -> int:
        """File data in the engine's own memory: fetches under way, and blocks that no tier took."""
        return self._fetcher.budget.used_bytes + self._fetcher.transit.used_bytes

    def set_drain(self, drain: Drain, ease: Drain | None = None) -> None:
        """How a writer waits for room when the write tier is full of dirty data. Given by write-back.

        ``ease``: how it waits above the dirty limit, where there is room; default: the same.
        """
        self._area.dirty.drain, self._area.dirty.ease = drain, ease or drain

    async def create_staging(self, content_id: ContentId) -> Staging:
        """A new, empty dirty content. Raises ``TierFull``, ``TierFailed``, ``AlreadyExists``."""
        return await self._area.create(content_id)

    def take_spare(self) -> Spare | None:
        """An empty file for a new content that may be written without passing here; any thread."""
        return self._area.spares.take()

    def give_back_spare(self, spare: Spare) -> None:
        """It was not needed; any thread."""
        self._area.spares.give_back(spare)

    def adopt_spare(self, spare: Spare, mtime_ns: int) -> Staging:
        """A spare has become the dirty content of an inode. It had that mtime when it was empty."""
        return self._area.adopt(spare, mtime_ns)

    async def make_spares(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """A task, for a front that can pass writes through: until cancelled. Started: some are there."""
        await self._area.spares.run(task_status)

    def look_at_spares(self) -> None:
        """Dirty contents have grown."""
        self._area.spares.look()

    async def convert(self, ref: ObjectRef, content_id: ContentId) -> Staging:
        """A new dirty content that starts with the bytes of ``ref`` (its ``base``), without copying them.

        The local file of ``ref`` in the write tier becomes the staging file: its clean copy there is gone.
        Raises ``TierFull``, ``TierFailed``, ``AlreadyExists``.
        """
        return await self._area.convert(ref, content_id)

    async def open_staging(self, content_id: ContentId) -> Staging | None:
        """The dirty content of that id, or None if there is none."""
        return await self._area.open(content_id)

    async def keep_sealed(self, ref: ObjectRef, path: str) -> None:
        """For the staging area: ``path`` holds all bytes of ``ref`` and is about to go."""
        await self._placement.take_file(ref, path)

    def note_mtime(self, content_id: ContentId, mtime_ns: int) -> None:
        """The namespace is about to record this mtime for a dirty content: give its file the same.

        After a crash a file with another mtime than its record has been written since.
        """
        self._area.note_mtime(content_id, mtime_ns)

    def staged(self) -> Staged:
        """How far dirty contents have come on this node."""
        return self._area.staged()

    def is_unsynced(self, content_id: ContentId) -> bool:
        """A dirty content has been written since it was synced last."""
        entry = self._area.dirty.entries.get(content_id)
        return entry is not None and entry.unsynced

    def dirty_contents(self) -> list[DirtyContent]:
        """Every dirty content: after a restart, what is still to be published (or discarded)."""
        return self._area.contents()
