"""What the bucket has of checkpoints: which there are, and whether each is what its manifest says.

Trio thread only; requests to the store run in worker threads, some at a time. Raises ``StoreError``,
``CheckpointError``, ``ManifestDamaged``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import trio
import xxhash

from tierfs.checkpoint import manifest
from tierfs.checkpoint.manifest import Manifest, Shard
from tierfs.errors import CheckpointError, ManifestDamaged, ObjectNotFound, PreconditionFailed, TierfsError
from tierfs.store.base import ObjectStore
from tierfs.store.keys import encode_path
from tierfs.types import ObjectInfo

T = TypeVar("T")
REQUESTS_AT_ONCE = 16
SUMS_AT_ONCE = 4
CHUNK_BYTES = 8 * 1024 * 1024
OnShard = Callable[[Shard, int], None]
"""Called with a shard and how many of its bytes have been looked at since the last call."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One shard that is not what the manifest says, and how."""

    file: str
    message: str


@dataclass(slots=True)
class Found:
    """One manifest. ``manifest`` None: it cannot be read (``damage`` says why)."""

    path: bytes
    manifest: Manifest | None
    damage: list[Damage] = field(default_factory=list)


class Catalog:
    """See the module docstring. ``fetch`` gets the bytes of a manifest."""

    def __init__(self, store: ObjectStore, prefix: str, fetch: Callable[[str], Awaitable[bytes]]) -> None:
        self._store = store
        self._prefix = prefix
        self._fetch = fetch
        self._limiter = trio.CapacityLimiter(REQUESTS_AT_ONCE)

    async def load(self, path: bytes) -> Manifest:
        """One HEAD, one GET. Raises ``CheckpointError`` if there is none."""
        key = manifest.manifest_key(self._prefix, path)
        try:
            body = await self._fetch(key)
        except ObjectNotFound:
            text = path.decode("utf-8", "backslashreplace")
            raise CheckpointError(
                f"{text}: no checkpoint is in the store under this name (no {key})"
            ) from None
        return manifest.decode(body, key, self._prefix, path)

    async def find(self, below: bytes) -> list[Found]:
        """Every checkpoint at or below a path, by path. A LIST of its shards tells what is damaged."""
        paths = await self._paths(below)
        found: dict[bytes, Found] = {}

        async def look(path: bytes) -> None:
            try:
                known = await self.load(path)
            except ManifestDamaged as error:
                found[path] = Found(path, None, [Damage("", str(error))])
                return
            except CheckpointError:
                return  # removed meanwhile
            found[path] = Found(path, known, await self._compare(known))

        await _each(look, paths, REQUESTS_AT_ONCE)
        return [found[path] for path in sorted(found)]

    async def verify(self, known: Manifest, *, full: bool, on_shard: OnShard) -> list[Damage]:
        """Sizes and ETags, one HEAD a shard; ``full``: also the sums of all bytes, read from the store."""
        damage: list[Damage] = []

        async def look(shard: Shard) -> None:
            try:
                info = await self._call(partial(self._store.head, shard.key))
                message = _difference(shard, info)
                if message is None and full:
                    message = await self._check_sum(shard, on_shard)
            except ObjectNotFound:
                message = "missing"
            except PreconditionFailed:
                message = "replaced while it was read"
            on_shard(shard, 0)
            if message is not None:
                damage.append(Damage(shard.file, message))

        await _each(look, known.shards, SUMS_AT_ONCE if full else REQUESTS_AT_ONCE)
        order = {shard.file: number for number, shard in enumerate(known.shards)}
        return sorted(damage, key=lambda found: order[found.file])

    async def _check_sum(self, shard: Shard, on_shard: OnShard) -> str | None:
        digest = xxhash.xxh3_128()
        for offset in range(0, shard.size_bytes, CHUNK_BYTES):
            length = min(CHUNK_BYTES, shard.size_bytes - offset)
            get = partial(self._store.get_range, shard.key, offset, length, if_match=shard.etag)
            digest.update(await self._call(get))
            on_shard(shard, length)
        if digest.hexdigest() != shard.xxh3_128:
            return f"its bytes have the checksum {digest.hexdigest()}, not {shard.xxh3_128}"
        return None

    async def _paths(self, below: bytes) -> list[bytes]:
        start = self._prefix + manifest.MANIFESTS
        paths = []
        wanted = start + encode_path(below) + "/" if below else start
        async for info in self._listed(wanted):
            path = manifest.path_of_manifest(self._prefix, info.key)
            if path is not None:
                paths.append(path)
        if below:
            try:
                await self._call(partial(self._store.head, manifest.manifest_key(self._prefix, below)))
                paths.append(below)
            except ObjectNotFound:
                pass
        return paths

    async def _compare(self, known: Manifest) -> list[Damage]:
        there = {info.key: info async for info in self._listed(f"{self._prefix}{known.name}/")}
        damage = []
        for shard in known.shards:
            info = there.get(shard.key)
            message = "missing" if info is None else _difference(shard, info)
            if message is not None:
                damage.append(Damage(shard.file, message))
        return damage

    async def _listed(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        token: str | None = None
        while True:
            page = await self._call(partial(self._store.list_page, prefix, recursive=True, token=token))
            for info in page.objects:
                yield info
            token = page.next_token
            if token is None:
                return

    async def _call(self, request: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(request, limiter=self._limiter, abandon_on_cancel=True)


def _difference(shard: Shard, info: ObjectInfo) -> str | None:
    if info.size_bytes != shard.size_bytes:
        return f"has {info.size_bytes} bytes, not {shard.size_bytes}"
    if info.etag != shard.etag:
        return f"replaced: its ETag is {info.etag}, not {shard.etag}"
    return None


async def _each(act: Callable[[T], Awaitable[None]], items: Sequence[T], at_once: int) -> None:
    """All of them, some at a time. The first error ends it and is raised alone."""
    waiting = list(reversed(items))
    failures: list[TierfsError] = []

    async def work() -> None:
        while waiting and not failures:
            try:
                await act(waiting.pop())
            except TierfsError as error:
                failures.append(error)

    async with trio.open_nursery() as nursery:
        for _ in range(min(at_once, len(items))):
            nursery.start_soon(work)
    if failures:
        raise failures[0]
