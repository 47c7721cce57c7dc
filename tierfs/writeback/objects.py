"""What one inode looks like in the bucket, and how it gets there.

A regular file is one object per name; a symbolic link is an object whose body is the target; a directory
made here is a zero-byte marker ``dir/``; a fifo, socket or device is an empty object. Mode, owner and
mtime travel as user metadata under the names that s3fs and rclone use (``mode``, ``uid``, ``gid``,
``mtime``), so that other tools, and a rebuilt namespace, can have them back. ``tierfs-content`` names the
node and the content that was written: it tells our own upload from somebody else's.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NoReturn, TypeVar

import structlog

from tierfs.cache.residency import Cache
from tierfs.errors import NotFound, ObjectNotFound, PreconditionFailed, StoreError, TierFailed, TierfsError
from tierfs.namespace import publish, schema, tree
from tierfs.namespace.db import Database
from tierfs.namespace.metadata import metadata_of
from tierfs.namespace.transaction import WriteTransaction
from tierfs.store.base import Condition, ObjectStore
from tierfs.types import ContentId, Inode, ObjectInfo, ObjectRef
from tierfs.writeback.claims import KeyClaims, NotYet
from tierfs.writeback.content import ContentTable, FileContent
from tierfs.writeback.upload import Uploader

log = structlog.get_logger(__name__)

T = TypeVar("T")
CONTENT_METADATA = "tierfs-content"


def object_metadata(inode: Inode, tag: str) -> dict[str, str]:
    """The user metadata of the object for ``inode``; ``tag`` names the content."""
    return {**metadata_of(inode), CONTENT_METADATA: tag}


class ObjectWriter:
    """Publishes one inode. Trio thread only; never two calls for one inode at a time."""

    def __init__(
        self,
        db: Database,
        store: ObjectStore,
        cache: Cache,
        contents: ContentTable,
        uploader: Uploader,
        claims: KeyClaims,
        now_ns: Callable[[], int],
        on_renamed: Callable[[int, bytes, bytes], None],
    ) -> None:
        with db.read() as txn:
            self._node = publish.file_system_id(txn)
        self._db = db
        self._store = store
        self._cache = cache
        self._contents = contents
        self._uploader = uploader
        self._claims = claims
        self._now_ns = now_ns
        self._on_renamed = on_renamed
        self.conflicts = 0

    async def publish_file(self, inode: Inode, row: schema.DirtyRow, *, force: bool) -> None:
        """Make the objects of a file, link or special file what they should be."""
        with self._db.read() as txn:
            keys = publish.key_of(txn, inode.ino)
            current = publish.object_of(txn, inode.ino)
        if not keys:
            raise NotFound(f"inode {inode.ino} has no name")
        await self._claims.claim(keys[0], inode.ino)
        if inode.is_regular and inode.flags & schema.DATA_LOCAL:
            await self._publish_content(inode, row, keys, force=force)
            return
        if not inode.is_regular and current is None:
            info = await self._put_special(inode, keys[0])
        elif (
            inode.is_regular
            and inode.size_bytes
            and (current is None or current.size_bytes != inode.size_bytes)
        ):
            info = await self._put_cached(inode, keys[0])
        elif current is None:
            info = await self._put_empty(inode, keys[0])
        else:
            info = await self._copy(inode, current, keys[0])
        links = await self._copy_links(inode, info, keys[1:])
        await self._db.commit(partial(self._record, inode=inode, row=row, info=info, links=links))
        content = self._contents.peek(inode.ino)
        if content is not None:
            self._contents.refresh_ref(content)

    async def _publish_content(
        self, inode: Inode, row: schema.DirtyRow, keys: list[str], *, force: bool
    ) -> None:
        content = await self._contents.acquire(inode.ino)
        try:
            if content.writers and not force:
                return
            await self._contents.make_independent(content)
            staging = content.staging
            generation = staging.generation if staging is not None else 0
            size = staging.size_bytes if staging is not None else 0
            if staging is None and content.size_bytes:
                raise TierFailed(f"{keys[0]}: its {content.size_bytes} bytes are not here any more")

            def unchanged() -> bool:
                if content.staging is not staging:
                    return False
                return staging is None or staging.generation == generation

            async def read(offset: int, length: int) -> bytes:
                return await staging.read(offset, length) if staging is not None else b""

            tag = self._tag(content.content_id)
            inode = self._contents.overlay(inode)
            info = await self._put_conditionally(
                inode,
                keys[0],
                tag,
                lambda condition: self._uploader.upload(
                    keys[0], size, read, unchanged, object_metadata(inode, tag), condition
                ),
            )
            links = await self._copy_links(inode, info, keys[1:])
            await self._finish(content, inode, row, info, links, unchanged)
        finally:
            await self._contents.release(content)

    async def _finish(
        self,
        content: FileContent,
        inode: Inode,
        row: schema.DirtyRow,
        info: ObjectInfo,
        links: list[ObjectInfo],
        unchanged: Callable[[], bool],
    ) -> None:
        """Record the upload; if nobody wrote in the meantime the local copy becomes a clean one."""
        # A clean inode's record has to tell its size before anything else is published for it.
        await self._contents.save(content)
        async with content.lock:
            same_size = info.size_bytes == content.size_bytes
            content.sealing = final = content.writers == 0 and unchanged() and same_size
            try:
                still_dirty = await self._db.commit(
                    partial(self._record, inode=inode, row=row, info=info, links=links, final=final)
                )
                if not final or still_dirty:
                    return
                ref = ObjectRef(content.content_id, info.key, info.etag, info.size_bytes, info.version_id)
                staging = content.staging

                def turn_clean() -> None:
                    content.local, content.staging, content.ref = False, None, ref

                if staging is None or staging.base is not None:
                    # Blocks that are not here would come from the version that has just been replaced.
                    turn_clean()
                if staging is not None:
                    try:
                        if not await staging.seal(ref, on_clean=turn_clean):
                            raise TierFailed(f"it is not what has been uploaded to {info.key}")
                    except (TierfsError, OSError) as error:
                        # The bytes are in the store: losing the local copy costs a fetch, nothing else.
                        log.warning("local copy not kept after upload", key=info.key, reason=str(error))
                        turn_clean()
                        await staging.discard()
            finally:
                content.sealing = False

    def _record(
        self,
        txn: WriteTransaction,
        *,
        inode: Inode,
        row: schema.DirtyRow,
        info: ObjectInfo,
        links: list[ObjectInfo],
        final: bool = True,
    ) -> bool:
        """Commit what the store acknowledged. Returns True when there is more to publish."""
        now_ns = self._now_ns()
        previous = publish.object_of(txn, inode.ino)
        if not publish.set_object(txn, inode.ino, info, links, now_ns):
            return True
        if previous is not None:
            for key, etag in previous.all_keys():
                if publish.owner_of_key(txn, key) is None:
                    publish.doom(txn, key, etag, now_ns, ino=inode.ino)
        return not (final and publish.forget_dirty(txn, inode.ino, row.generation))

    async def _put_conditionally(
        self, inode: Inode, key: str, tag: str, put: Callable[[Condition], Awaitable[ObjectInfo]]
    ) -> ObjectInfo:
        """Upload under the condition that the key still holds what we last knew of it.

        ``NotYet``: somebody else's object is there; ours lives under a conflict name now, to be published.
        """
        with self._db.read() as txn:
            expected = publish.expected_etag(txn, inode.ino, key)
        condition = Condition(if_match=expected) if expected else Condition(if_absent=True)
        for _ in range(3):
            try:
                return await put(condition)
            except (PreconditionFailed, ObjectNotFound):
                found = await self._head(key)
            if found is None:
                condition = Condition(if_absent=True)
            elif (found.metadata or {}).get(CONTENT_METADATA) == tag:
                return found
            elif (found.metadata or {}).get(CONTENT_METADATA, "").startswith(self._node):
                # An earlier upload of ours, whose answer was lost or whose file has gone since.
                condition = Condition(if_match=found.etag)
            elif condition.if_match == found.etag:
                raise StoreError(f"{key}: the store refuses a condition that holds")
            else:
                await self._move_aside(inode, key)
        raise StoreError(f"{key}: the object keeps changing while it is uploaded")

    def _tag(self, content_id: ContentId) -> str:
        """Names this node, the content, and this attempt."""
        return f"{self._node}-{content_id.hex()}-{os.urandom(4).hex()}"

    async def _head(self, key: str) -> ObjectInfo | None:
        try:
            return await self._run(partial(self._store.head, key))
        except ObjectNotFound:
            return None

    async def _move_aside(self, inode: Inode, key: str) -> NoReturn:
        """Keep both versions: ours gets a conflict name beside the one that another node wrote."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._now_ns() / 1e9))
        suffix = f".conflict-{socket.gethostname()}-{stamp}-{os.urandom(2).hex()}".encode()

        def rename(txn: WriteTransaction) -> tuple[int, bytes, bytes]:
            names = tree.names_of(txn, inode.ino)
            if not names:
                raise NotYet(f"{key}: unlinked during the upload")
            parent, name = names[0]
            new_name = name[: 255 - len(suffix)] + suffix
            publish.disown(txn, inode.ino, key)
            tree.rename(txn, parent, name, parent, new_name, now_ns=self._now_ns())
            return parent, name, new_name

        parent, name, new_name = await self._db.commit(rename)
        self.conflicts += 1
        log.error(
            "another node wrote the same object; both are kept",
            key=key,
            ours=new_name.decode("utf-8", "backslashreplace"),
        )
        self._on_renamed(parent, name, new_name)
        raise NotYet(f"{key}: taken by another node")

    async def _copy(self, inode: Inode, current: schema.ObjectRow, key: str) -> ObjectInfo:
        """Move or re-label an object on the server; its bytes stay there."""
        metadata = object_metadata(inode, self._tag(inode.content_id))
        try:
            return await self._run(partial(self._store.copy, current.info, key, metadata=metadata))
        except (PreconditionFailed, ObjectNotFound):
            with self._db.read() as txn:
                if publish.object_of(txn, inode.ino) != current:
                    # Parked meanwhile, to make way for another inode: go on from where it is now.
                    raise NotYet(f"{current.key}: has been moved") from None
            found = await self._head(current.key)
            if found is None or not self._is_ours(found, inode, current):
                raise
        # The answer to an earlier attempt, which gave it this version, was lost in a crash.
        return await self._run(partial(self._store.copy, found, key, metadata=metadata))

    def _is_ours(self, found: ObjectInfo, inode: Inode, current: schema.ObjectRow) -> bool:
        """Whether this node put that object there, with the content of that inode."""
        tag = (found.metadata or {}).get(CONTENT_METADATA, "")
        return (
            tag.startswith(f"{self._node}-{inode.content_id.hex()}-")
            and found.size_bytes == current.size_bytes
        )

    async def _copy_links(self, inode: Inode, info: ObjectInfo, keys: list[str]) -> list[ObjectInfo]:
        """Further names of a hard-linked file are further objects, copied on the server."""
        copies: list[ObjectInfo] = []
        for key in keys:
            if key != info.key:
                await self._claims.make_free(key, inode.ino)
                copies.append(await self._run(partial(self._store.copy, info, key)))
        return copies

    async def _put_cached(self, inode: Inode, key: str) -> ObjectInfo:
        """Upload a clean content whose object was given up; never an empty object in its stead."""
        if not self._cache.is_complete(inode.content_id):
            raise TierFailed(f"{key}: its {inode.size_bytes} bytes are neither here nor in the store")
        ref = ObjectRef(inode.content_id, key, "", inode.size_bytes)
        metadata = object_metadata(inode, self._tag(inode.content_id))
        return await self._put_conditionally(
            inode,
            key,
            metadata[CONTENT_METADATA],
            lambda condition: self._uploader.upload(
                key, inode.size_bytes, partial(self._cache.read, ref), lambda: True, metadata, condition
            ),
        )

    async def _put_empty(self, inode: Inode, key: str) -> ObjectInfo:
        return await self._put_body(inode, key, b"")

    async def _put_special(self, inode: Inode, key: str) -> ObjectInfo:
        body = b""
        if inode.is_symlink:
            with self._db.read() as txn:
                body = tree.readlink(txn, inode.ino)
        return await self._put_body(inode, key, body)

    async def _put_body(self, inode: Inode, key: str, body: bytes) -> ObjectInfo:
        metadata = object_metadata(inode, self._tag(inode.content_id))
        return await self._run(lambda: self._store.put(key, body, metadata=metadata))

    async def publish_marker(self, ino: int, row: schema.DirtyRow) -> None:
        """Put the zero-byte ``dir/`` object of a directory that was made, moved or changed here."""
        with self._db.read() as txn:
            inode = tree.get(txn, ino)
            keys = publish.key_of(txn, ino)
        if not keys or not keys[0].rstrip("/"):
            await self._db.commit(lambda txn: publish.forget_dirty(txn, ino, row.generation))
            return
        await self._claims.claim(keys[0], ino)
        info = await self._put_body(inode, keys[0], b"")
        await self._db.commit(partial(self._record, inode=inode, row=row, info=info, links=[]))

    async def _run(self, function: Callable[[], T]) -> T:
        return await self._uploader.call(function)
