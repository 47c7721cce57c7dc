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
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, TypeVar

import structlog
import trio

from tierfs.cache import direct_writes, sealing
from tierfs.cache.residency import Cache
from tierfs.cache.staging import Staging
from tierfs.errors import ObjectNotFound, PreconditionFailed, StoreError, TierFailed, TierfsError
from tierfs.namespace import loans, publish, schema, tree
from tierfs.namespace.db import Database
from tierfs.namespace.metadata import metadata_of
from tierfs.namespace.transaction import WriteTransaction
from tierfs.store.base import UNCONDITIONAL, Condition, ObjectStore
from tierfs.types import ContentId, Inode, ObjectInfo, ObjectRef
from tierfs.writeback.claims import KeyClaims
from tierfs.writeback.content import FileContent, check_size
from tierfs.writeback.content_table import ContentTable
from tierfs.writeback.equal_parts import EqualParts
from tierfs.writeback.in_flight import NotYet
from tierfs.writeback.upload import Uploader

log = structlog.get_logger(__name__)

T = TypeVar("T")
LOOKS = 25
LOOK_PAUSE_S = 0.02
CONTENT_METADATA = "tierfs-content"


def object_metadata(inode: Inode, tag: str) -> dict[str, str]:
    """The user metadata of the object for ``inode``; ``tag`` names the content."""
    return {**metadata_of(inode), CONTENT_METADATA: tag}


@dataclass(frozen=True, slots=True)
class _State:
    """One inode as it was at one moment: what is to be published of it, and what the bucket has of it."""

    inode: Inode
    row: schema.DirtyRow
    current: schema.ObjectRow | None
    is_on_loan: bool
    """Its bytes are those of a file in a snapshot."""

    @property
    def has_all_bytes(self) -> bool:
        """Whether the object holds as many bytes as the file has."""
        return self.current is not None and self.current.size_bytes == self.inode.size_bytes


class ObjectWriter:
    """Publishes one inode. Trio thread only; never two calls for one inode at a time."""

    def __init__(
        self,
        db: Database,
        store: ObjectStore,
        cache: Cache,
        contents: ContentTable,
        uploader: Uploader,
        equal_parts: EqualParts,
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
        self._equal_parts = equal_parts
        self._claims = claims
        self._now_ns = now_ns
        self._on_renamed = on_renamed
        self.conflicts = 0
        self.on_loan_ended: Callable[[], None] = lambda: None
        """Called when a file whose bytes were on loan has an object of its own."""
        self.uploading: dict[int, int] = {}
        """Inode -> bytes of the file; whose upload is under way."""
        self.uploaded_files = 0
        self.uploaded_bytes = 0
        """Files whose bytes came from here, each time that they were put into the store."""

    async def publish_file(self, ino: int, *, force: bool) -> None:
        """Make the objects of a file, link or special file what they should be.

        ``force``: also while it is open for writing. Raises ``NotYet``, ``ContentChanged``, ``StoreError``.
        """
        async with self._claims.held(ino) as keys:
            if not self._state(ino, keys).inode.is_regular:
                await self._publish_settled(ino, keys)
                return
            async with self._contents.used(ino) as content:
                if content.local:
                    if force or not content.writers:
                        await self._publish_local(content, keys, force=force)
                    return
                # Under the lock nobody begins to write, and so to depend on an object that is about to move.
                async with content.lock:
                    if content.local:
                        raise NotYet(f"{keys[0]}: somebody has begun to write")
                    await self._publish_settled(ino, keys)
                self._contents.refresh_ref(content)

    def _state(self, ino: int, keys: list[str]) -> _State:
        """What is to be published. Raises ``NotYet`` if the names do not map to ``keys`` any more."""
        with self._db.read() as txn:
            row = publish.dirty_row(txn, ino)
            if row is None or publish.key_of(txn, ino) != keys:
                raise NotYet(f"{keys[0]}: renamed meanwhile")
            is_on_loan = loans.loan_of(txn, ino) is not None
            return _State(tree.get(txn, ino), row, publish.object_of(txn, ino), is_on_loan)

    async def _publish_settled(self, ino: int, keys: list[str]) -> None:
        """What has no bytes that only we have: move it, re-label it, or put what the namespace knows."""
        state = self._state(ino, keys)
        inode, current = state.inode, state.current
        if current is None and state.is_on_loan:
            info = await self._copy_loan(inode, keys[0])
        elif inode.is_regular and inode.size_bytes and not state.has_all_bytes:
            info = await self._put_cached(inode, keys[0])
        elif current is None:
            info = await self._put_known(inode, keys[0])
        else:
            info = await self._copy(inode, current, keys[0])
        links = await self._copy_links(inode, info, keys[1:])
        await self._db.commit(partial(self._record, inode=inode, row=state.row, info=info, links=links))
        if state.is_on_loan:
            self.on_loan_ended()

    async def _publish_local(self, content: FileContent, keys: list[str], *, force: bool) -> None:
        await self._contents.passthrough.pull(content, always=content.writers > 0)
        await self._contents.local_copies.make_independent(content)
        staging = content.staging
        if staging is not None and content.passed_through and content.writers:
            # From now on also a store into a shared mapping changes the file's mtime.
            await staging.sync()
        elif staging is not None and not content.writers:
            await self._wait_for_earlier_writers(staging, keys[0])
        self._contents.passthrough.notice_direct_writes(content)
        generation = staging.generation if staging is not None else 0
        size = staging.size_bytes if staging is not None else 0
        if staging is None and content.size_bytes:
            raise TierFailed(f"{keys[0]}: its {content.size_bytes} bytes are not here any more")
        check_size(size)
        state = self._state(content.ino, keys)
        inode = self._contents.overlay(state.inode)

        def unchanged() -> bool:
            self._contents.passthrough.notice_direct_writes(content)
            if content.staging is not staging or content.unlinked:
                return False
            if content.live is not None and content.live.is_behind:
                return False
            return staging is None or staging.generation == generation

        async def read(offset: int, length: int) -> bytes:
            return await staging.read(offset, length) if staging is not None else b""

        async def sync() -> None:
            # A power cut may take the commit that notes the upload: what it left of bytes that nobody had
            # synced would then replace them in the store.
            if staging is not None:
                await staging.sync()

        tag = self._tag(content.content_id)
        plan = await self._equal_parts.plan(keys[0], inode.uid, size)
        self.uploading[inode.ino] = size
        try:
            info = await self._write_conditionally(
                inode.ino,
                keys[0],
                tag,
                lambda condition: self._uploader.upload(
                    plan, read, unchanged, object_metadata(inode, tag), condition, before_visible=sync
                ),
            )
        finally:
            del self.uploading[inode.ino]
        self.uploaded_files += 1
        self.uploaded_bytes += size
        await self._equal_parts.keep(plan, info)
        links = await self._copy_links(inode, info, keys[1:])
        await self._finish(content, inode, state.row, info, links, unchanged)

    async def _wait_for_earlier_writers(self, staging: Staging, key: str) -> None:
        """Who wrote through a mount that died can still write, and a clean copy may not change.

        The kernel closes a file a little after the last RELEASE. Raises ``TierFailed``.
        """
        for _ in range(LOOKS):
            if not await direct_writes.is_open_elsewhere(staging):
                return
            await trio.sleep(LOOK_PAUSE_S)
        raise TierFailed(f"{key}: somebody has it open for writing, through a mount that has ended")

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
        await self._contents.size_and_times.save(content)
        async with content.lock:
            same_size = info.size_bytes == content.size_bytes
            final = content.writers == 0 and unchanged() and same_size
            # An empty file is not kept; but who comes to write gets the one that readers have.
            has_to_stay = content.passed_through > 0 and content.live is None and not content.size_bytes
            content.kept_for_readers = row.generation if final and has_to_stay else None
            content.sealing = final = final and not has_to_stay
            try:
                # Durable before the staging file goes: a record that a power cut took back would speak of it.
                still_dirty = await self._db.commit(
                    partial(self._record, inode=inode, row=row, info=info, links=links, final=final),
                    durable=final and content.staging is not None,
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
                        if not await sealing.seal(staging, ref, on_clean=turn_clean):
                            await self._contents.local_copies.keep_local(content, staging)
                    except (TierfsError, OSError) as error:
                        # The bytes are in the store: losing the local copy costs a fetch, nothing else.
                        log.warning("local copy not kept after upload", key=info.key, reason=str(error))
                        if content.passed_through and not staging.is_closed:
                            await self._contents.local_copies.keep_local(content, staging)
                        else:
                            turn_clean()
                            await staging.discard()
                await self._contents.passthrough.keep_passed(content)
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
        if not publish.set_object(txn, inode.ino, info, links, self._now_ns()):
            return True
        return not (final and publish.forget_dirty(txn, inode.ino, row.generation))

    async def _write_conditionally(
        self, ino: int, key: str, tag: str, write: Callable[[Condition], Awaitable[ObjectInfo]]
    ) -> ObjectInfo:
        """Write under the condition that the key still holds what we last knew of it.

        ``NotYet``: somebody else's object is there; ours lives under a conflict name now, to be published.
        The store's own error when the condition is not what it minded (the source of a copy, perhaps).
        """
        with self._db.read() as txn:
            expected = publish.expected_etag(txn, ino, key)
        condition = Condition(if_match=expected) if expected else Condition(if_absent=True)
        for _ in range(3):
            try:
                return await write(condition)
            except (PreconditionFailed, ObjectNotFound):
                found = await self._head(key)
                if found is None:
                    following = Condition(if_absent=True)
                elif (found.metadata or {}).get(CONTENT_METADATA) == tag:
                    return found
                else:
                    following = Condition(if_match=found.etag)
                if following == condition:
                    raise
            if found is not None and not self._is_from_here(found):
                await self._move_aside(ino, key)
            # Nothing is there, or an earlier upload of ours: its answer was lost, or its file has gone since.
            condition = following
        raise StoreError(f"{key}: the object keeps changing while it is written")

    def _is_from_here(self, found: ObjectInfo) -> bool:
        """Whether this node wrote that object."""
        return (found.metadata or {}).get(CONTENT_METADATA, "").startswith(self._node)

    def _tag(self, content_id: ContentId) -> str:
        """Names this node, the content, and this attempt."""
        return f"{self._node}-{content_id.hex()}-{os.urandom(4).hex()}"

    async def _head(self, key: str) -> ObjectInfo | None:
        try:
            return await self._run(partial(self._store.head, key))
        except ObjectNotFound:
            return None

    async def _move_aside(self, ino: int, key: str) -> NoReturn:
        """Keep both versions: ours gets a conflict name beside the one that another node wrote."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._now_ns() / 1e9))
        suffix = f".conflict-{socket.gethostname()}-{stamp}-{os.urandom(2).hex()}".encode()

        def rename(txn: WriteTransaction) -> tuple[int, bytes, bytes]:
            for parent, name in tree.names_of(txn, ino):
                above = tree.path_of(txn, parent)
                if publish.key_of_path(txn, above + b"/" + name if above else name, False) == key:
                    break
            else:
                raise NotYet(f"{key}: unlinked or renamed during the upload")
            new_name = name[: 255 - len(suffix)] + suffix
            publish.disown(txn, ino, key)
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
        try:
            return await self._copy_from(current.info, inode, key)
        except (PreconditionFailed, ObjectNotFound):
            found = await self._head(current.key)
            if found is None or not self._is_ours(found, inode, current):
                raise
        # The answer to an earlier attempt, which gave it this version, was lost in a crash.
        return await self._copy_from(found, inode, key)

    async def _copy_loan(self, inode: Inode, key: str) -> ObjectInfo:
        """Copy bytes on loan, on the server, from wherever they are now."""
        failed: ObjectInfo | None = None
        while True:
            with self._db.read() as txn:
                source = loans.source_of(txn, inode.ino)
            if source is None or source == failed:
                break
            try:
                return await self._copy_from(source, inode, key)
            except (PreconditionFailed, ObjectNotFound):
                failed = source  # unless it has been moved, or kept, just now, others have replaced it
        if self._cache.is_complete(inode.content_id):
            return await self._put_cached(inode, key)
        where = "" if source is None else f": {source.key} was replaced or removed in the bucket by others"
        raise StoreError(f"{key}: its bytes, as a snapshot had them, are gone{where}")

    async def copy_object(self, source: ObjectInfo, inode: Inode, key: str) -> ObjectInfo:
        """Copy the bytes of ``inode`` from that version of an object to ``key``, which the caller holds.

        Raises ``NotYet``: somebody else's object is there; ``PreconditionFailed`` or ``ObjectNotFound``: the
        source is not that version any more; any other ``StoreError``.
        """
        info = await self._copy_from(source, inode, key)
        self._uploader.note_copied(info.size_bytes)
        return info

    async def _copy_from(self, source: ObjectInfo, inode: Inode, key: str) -> ObjectInfo:
        tag = self._tag(inode.content_id)

        async def copy(condition: Condition) -> ObjectInfo:
            return await self._uploader.copy(source, key, object_metadata(inode, tag), condition)

        if source.key == key:
            # The copy is pinned to the version that it replaces.
            return await copy(UNCONDITIONAL)
        return await self._write_conditionally(inode.ino, key, tag, copy)

    def _is_ours(self, found: ObjectInfo, inode: Inode, current: schema.ObjectRow) -> bool:
        """Whether this node put that object there, with the content of that inode."""
        tag = (found.metadata or {}).get(CONTENT_METADATA, "")
        return (
            tag.startswith(f"{self._node}-{inode.content_id.hex()}-")
            and found.size_bytes == current.size_bytes
        )

    async def _copy_links(self, inode: Inode, info: ObjectInfo, keys: list[str]) -> list[ObjectInfo]:
        """Further names of a hard-linked file are further objects, copied on the server."""
        return [await self._copy_from(info, inode, key) for key in keys]

    async def _put_cached(self, inode: Inode, key: str) -> ObjectInfo:
        """Upload a clean content whose object was given up; never an empty object in its stead."""
        if not self._cache.is_complete(inode.content_id):
            raise TierFailed(f"{key}: its {inode.size_bytes} bytes are neither here nor in the store")
        ref = ObjectRef(inode.content_id, key, "", inode.size_bytes)
        tag = self._tag(inode.content_id)
        plan = await self._equal_parts.plan(key, inode.uid, inode.size_bytes)
        info = await self._write_conditionally(
            inode.ino,
            key,
            tag,
            lambda condition: self._uploader.upload(
                plan, partial(self._cache.read, ref), lambda: True, object_metadata(inode, tag), condition
            ),
        )
        await self._equal_parts.keep(plan, info)
        return info

    async def _put_known(self, inode: Inode, key: str) -> ObjectInfo:
        """An empty file, a link or a special file: all of it stands in the namespace."""
        body = b""
        if inode.is_symlink:
            with self._db.read() as txn:
                body = tree.readlink(txn, inode.ino)
        tag = self._tag(inode.content_id)
        return await self._write_conditionally(
            inode.ino, key, tag, lambda condition: self._put(inode, key, tag, body, condition)
        )

    async def _put(self, inode: Inode, key: str, tag: str, body: bytes, condition: Condition) -> ObjectInfo:
        metadata = object_metadata(inode, tag)
        return await self._run(lambda: self._store.put(key, body, metadata=metadata, condition=condition))

    async def publish_marker(self, ino: int) -> None:
        """Put the zero-byte ``dir/`` object of a directory that was made, moved or changed here."""
        async with self._claims.held(ino) as keys:
            state = self._state(ino, keys)
            tag = self._tag(state.inode.content_id)
            info = await self._put(state.inode, keys[0], tag, b"", UNCONDITIONAL)
            await self._db.commit(
                partial(self._record, inode=state.inode, row=state.row, info=info, links=[])
            )

    async def _run(self, function: Callable[[], T]) -> T:
        return await self._uploader.call(function)
