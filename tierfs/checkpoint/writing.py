"""The requests and checksums of a commit: sums of local bytes, parts of other nodes, the manifest itself.

Trio thread only; what blocks runs in worker threads. Raises ``StoreError``, ``ManifestDamaged``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import structlog
import trio
import xxhash

from tierfs.cache.residency import Cache
from tierfs.checkpoint import manifest
from tierfs.checkpoint.manifest import Manifest, Shard
from tierfs.checkpoint.pending import Pending
from tierfs.checkpoint.shards import Ready
from tierfs.errors import ManifestDamaged, ObjectNotFound, StoreError
from tierfs.store.base import ObjectStore
from tierfs.store.keys import encode_path
from tierfs.types import ContentId, ObjectRef

log = structlog.get_logger(__name__)

T = TypeVar("T")
CHUNK_BYTES = 4 * 1024 * 1024
REQUESTS_AT_ONCE = 8


class ManifestWriter:
    """See the module docstring."""

    def __init__(self, store: ObjectStore, cache: Cache, prefix: str) -> None:
        self._store = store
        self._cache = cache
        self._prefix = prefix
        self._limiter = trio.CapacityLimiter(REQUESTS_AT_ONCE)

    async def shards(self, ready: Sequence[Ready], sums: dict[ContentId, str]) -> list[Shard]:
        """With the checksum of each, made from its local bytes unless it is in ``sums``, and put there."""
        for found in ready:
            if found.ref.content_id not in sums:
                sums[found.ref.content_id] = await self._sum(found.ref)
        return [
            Shard(
                file=found.file, key=found.ref.key, size_bytes=found.ref.size_bytes, etag=found.ref.etag,
                xxh3_128=sums[found.ref.content_id], mtime_ns=found.mtime_ns, rank=found.rank,
            )
            for found in ready
        ]  # fmt: skip

    async def parts(self, pending: Pending, path: bytes) -> list[Shard] | int:
        """The shards of all other nodes; or the number of the first node that has not put its part yet."""
        shards: list[Shard] = []
        for node in self._others(pending):
            key = manifest.part_key(self._prefix, pending.save_id, node)
            try:
                body = await self.fetch(key)
            except ObjectNotFound:
                return node
            part = manifest.decode(body, key, self._prefix, path)
            if part.save_id != pending.save_id:
                raise ManifestDamaged(f"manifest {key}: it is about another save")
            shards += part.shards
        return shards

    async def put(self, pending: Pending, path: bytes, shards: Sequence[Shard]) -> None:
        """The manifest; of a node but the first, its part of it."""
        written = Manifest(
            format=manifest.FORMAT, name=encode_path(path), save_id=pending.save_id,
            created_ns=pending.created_ns, step=pending.step, world_size=pending.world_size,
            shards=manifest.in_rank_order(shards),
        )  # fmt: skip
        key = manifest.manifest_key(self._prefix, path)
        if pending.node:
            key = manifest.part_key(self._prefix, pending.save_id, pending.node)
        await self._call(partial(self._store.put, key, manifest.encode(written)))
        log.info("checkpoint is in the store", manifest=key, shards=len(shards), bytes=written.size_bytes)
        for node in self._others(pending):
            part_key = manifest.part_key(self._prefix, pending.save_id, node)
            try:
                await self._call(partial(self._store.delete, part_key))
            except StoreError as error:
                log.warning("left behind", key=part_key, reason=str(error))

    async def fetch(self, key: str) -> bytes:
        """A manifest's bytes: one HEAD, one GET. Raises ``ObjectNotFound`` too."""

        def get() -> bytes:
            info = self._store.head(key)
            if info.size_bytes > manifest.MAX_MANIFEST_BYTES:
                raise ManifestDamaged(f"manifest {key}: {info.size_bytes} bytes are too many for a manifest")
            if not info.size_bytes:
                raise ManifestDamaged(f"manifest {key}: empty")
            return self._store.get_range(key, 0, info.size_bytes, if_match=info.etag)

        return await self._call(get)

    def key_of(self, path: bytes) -> str:
        """Where the manifest of the checkpoint at ``path`` lies. Raises ``InvalidArgument``."""
        return manifest.manifest_key(self._prefix, path)

    async def exists(self, path: bytes) -> bool:
        """Whether there is a manifest of the checkpoint at ``path``. Raises ``InvalidArgument`` too."""
        try:
            await self._call(partial(self._store.head, manifest.manifest_key(self._prefix, path)))
        except ObjectNotFound:
            return False
        return True

    async def delete(self, path: bytes) -> None:
        """There is no manifest of the checkpoint at ``path`` when this returns."""
        await self._call(partial(self._store.delete, manifest.manifest_key(self._prefix, path)))

    @staticmethod
    def _others(pending: Pending) -> range:
        return range(1, pending.nodes) if pending.node == 0 else range(0)

    async def _sum(self, ref: ObjectRef) -> str:
        """xxh3-128 of all bytes, from a tier; what has been evicted is fetched."""
        digest = xxhash.xxh3_128()
        with self._cache.whole_file(ref) as descriptor:
            if descriptor is not None:
                await trio.to_thread.run_sync(_sum_file, digest, descriptor, ref.size_bytes)
                return digest.hexdigest()
        for offset in range(0, ref.size_bytes, CHUNK_BYTES):
            digest.update(await self._cache.read(ref, offset, CHUNK_BYTES))
        return digest.hexdigest()

    async def _call(self, request: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(request, limiter=self._limiter, abandon_on_cancel=True)


def _sum_file(digest: Any, descriptor: int, size_bytes: int) -> None:
    for offset in range(0, size_bytes, CHUNK_BYTES):
        digest.update(os.pread(descriptor, min(CHUNK_BYTES, size_bytes - offset), offset))
