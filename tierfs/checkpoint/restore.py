"""A checkpoint comes back: its manifest is all that has to be known.

``adopt`` puts the names of all shards into the namespace, as the manifest has them: no listing is needed, and
an application can open and read any of them from then on. What is fetched is pinned to the ETag of the
manifest, so that a shard that was replaced is an error and never other bytes. Trio thread only.
"""

from __future__ import annotations

from collections import defaultdict

from tierfs.checkpoint.manifest import Manifest, Shard
from tierfs.errors import CheckpointError, NotFound, TierfsError
from tierfs.namespace import publish, schema, tree
from tierfs.namespace.db import Database
from tierfs.namespace.refresh import Refresher
from tierfs.prefetch.job import PrefetchTarget
from tierfs.store.keys import decode_key
from tierfs.types import Inode, ObjectInfo, ObjectRef


class Restorer:
    """See the module docstring."""

    def __init__(self, db: Database, refresher: Refresher) -> None:
        self._db = db
        self._refresher = refresher

    async def adopt(self, path: bytes, known: Manifest) -> None:
        """The shards have names in the mount when this returns. Raises ``NotFound``, ``NotADirectory``."""
        directories: defaultdict[bytes, dict[bytes, ObjectInfo]] = defaultdict(dict)
        for shard in known.shards:
            above, _, name = (path + b"/" + (decode_key(shard.file) or b"")).rpartition(b"/")
            info = ObjectInfo(shard.key, shard.size_bytes, shard.etag, shard.mtime_ns)
            directories[above][name] = info
        for above, files in directories.items():
            await self._refresher.adopt(above, files)

    async def target(self, path: bytes, shard: Shard) -> PrefetchTarget:
        """What is to be fetched for one shard. Raises ``CheckpointError`` if that is something else."""
        name = path + b"/" + (decode_key(shard.file) or b"")
        inode, ref = self._look(name)
        if inode is not None and not _is(shard, inode, ref):
            # What is known may be old: the bucket is asked about this one.
            try:
                await self._refresher.revalidate(inode.ino)
            except NotFound:
                pass
            inode, ref = self._look(name)
        if inode is None:
            raise CheckpointError("is not in the store any more")
        if not _is(shard, inode, ref):
            raise CheckpointError("has been written or replaced since the checkpoint was committed")
        return PrefetchTarget(name, inode.size_bytes, ref)

    def _look(self, name: bytes) -> tuple[Inode | None, ObjectRef | None]:
        with self._db.read() as txn:
            try:
                inode = tree.resolve(txn, name)
            except TierfsError:
                return None, None
            return inode, publish.ref_of(txn, inode)


def _is(shard: Shard, inode: Inode, ref: ObjectRef | None) -> bool:
    """Whether an inode has the bytes that the manifest speaks of."""
    if not inode.is_regular or inode.size_bytes != shard.size_bytes or inode.flags & schema.DATA_LOCAL:
        return False
    return (ref.etag == shard.etag and ref.key == shard.key) if ref is not None else not shard.size_bytes
