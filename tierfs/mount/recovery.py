"""What an earlier run left behind, put right before the first request.

After a crash the namespace and the write tier may disagree by what was in flight:

* a staging file that no inode names: its name was never acknowledged, or its upload had been recorded
  already. It is dropped.
* an inode whose size and times are older than its staging file: the file is the truth (they are recorded at
  flush, fsync and close).
* an inode that says its bytes are here while the tier has none (the directory was removed by hand): it
  goes back to the version in the store if there is one; the loss is logged.
* inodes without a name that were open: they are reaped, unless a front says that they still are.
* multipart uploads that were running: aborted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import structlog
import trio

from tierfs.cache.area import DirtyContent
from tierfs.errors import NotFound
from tierfs.fs.handles import DirectoryHandle, FileHandle
from tierfs.fs.snapshots import is_snapshot
from tierfs.mount.channel import OpenHandle
from tierfs.mount.parts import Parts
from tierfs.namespace import publish, records, schema, tree
from tierfs.namespace.transaction import WriteTransaction
from tierfs.types import NO_CONTENT, ContentId, Inode, content_id_of_object

log = structlog.get_logger(__name__)

BATCH = 1000


async def recover(
    parts: Parts, open_handles: Sequence[OpenHandle] = (), *, opens_untold: bool = False
) -> dict[str, int]:
    """Returns what is resumed: ``files`` and ``bytes`` that are still to be published.

    ``open_handles``: what applications have open since an earlier engine; those inodes live on also without a
    name. ``opens_untold``: others may be open as well; what has no name lives until the kernel forgets it.
    """
    if opens_untold:
        kept = _keep_orphans(parts)
    else:
        kept = await _reap_orphans(parts, {handle.ino for handle in open_handles})
    staged = {content.content_id: content for content in parts.cache.dirty_contents()}
    named = kept | await _reconcile_sizes(parts, staged)
    for content_id in staged.keys() - named:
        staging = await parts.cache.open_staging(content_id)
        if staging is not None:
            await staging.discard()
    if not parts.settings.read_only:
        await trio.to_thread.run_sync(parts.unfinished.abort_all)
    left = parts.publisher.backlog.totals()
    if left.files:
        log.info("resuming what is not in the store yet", files=left.files, bytes=left.bytes)
    return {"files": left.files, "bytes": left.bytes}


async def restore_handles(
    parts: Parts, open_handles: Sequence[OpenHandle], passed_files: Mapping[int, tuple[int, int]]
) -> None:
    """Give applications back what they had open, under the same numbers.

    ``passed_files``: inode -> (device, inode) of the file to which its opens are passed through.
    """
    parts.cache.remove_lives_but(passed_files.keys())
    services = parts.services
    for known in open_handles:
        if known.is_fronts:
            services.orphans.update(_nameless(parts, known.ino))
            continue
        if known.is_directory:
            services.handles.restore_directory(known.number, DirectoryHandle(known.ino))
            continue
        if is_snapshot(known.ino):
            services.snapshots.restore(known.number, known.ino)
            continue
        try:
            content = await parts.contents.acquire(known.ino)
        except NotFound:
            log.warning("an open file is not known any more", ino=known.ino)
            continue
        with parts.db.read() as txn:
            inode = tree.get(txn, known.ino)
        content.unlinked = inode.nlink == 0
        content.linkable = content.unlinked and bool(inode.flags & schema.LINKABLE)
        if content.unlinked:
            services.orphans.add(known.ino)
        handle = FileHandle(content, known.flags, known.uid, known.passthrough)
        content.writers += handle.can_write
        content.passed_through += known.passthrough
        if known.passthrough:
            if handle.can_write:
                parts.contents.passthrough.note_direct_writer(content)
            if content.live is None:
                content.live = parts.cache.find_live(known.ino)
            content.passed_file = passed_files.get(known.ino, content.passed_file)
            await parts.contents.passthrough.keep_passed(content)
        services.handles.restore_file(known.number, handle)


def _nameless(parts: Parts, ino: int) -> set[int]:
    with parts.db.read() as txn:
        inode = records.find_inode(txn, ino)
    return {ino} if inode is not None and not inode.nlink else set()


def _keep_orphans(parts: Parts) -> set[ContentId]:
    kept: set[ContentId] = set()
    after = 0
    with parts.db.read() as txn:
        while orphans := tree.orphans(txn, after):
            after = orphans[-1]
            kept |= {tree.get(txn, ino).content_id for ino in orphans}
            parts.services.orphans.update(orphans)
    return kept


async def _reap_orphans(parts: Parts, open_inos: set[int]) -> set[ContentId]:
    """Returns the contents of inodes that are open without a name."""
    kept: set[ContentId] = set()
    after = 0
    while True:
        with parts.db.read() as txn:
            orphans = tree.orphans(txn, after)
            if not orphans:
                return kept
            after = orphans[-1]
            kept |= {tree.get(txn, ino).content_id for ino in orphans if ino in open_inos}
        orphans = [ino for ino in orphans if ino not in open_inos]

        def reap(txn: WriteTransaction, orphans: list[int] = orphans) -> list[Inode | None]:
            return [tree.reap(txn, ino) for ino in orphans]

        for inode in await parts.db.commit(reap):
            if inode is not None and inode.content_id != NO_CONTENT:
                await parts.cache.forget(inode.content_id)


async def _reconcile_sizes(parts: Parts, staged: dict[ContentId, DirtyContent]) -> set[ContentId]:
    """Bring inode records in line with the staging files; returns the contents that have a name."""
    named: set[ContentId] = set()
    inos, _ = parts.publisher.backlog.inodes()
    for start in range(0, len(inos), BATCH):
        changed: list[Inode] = []
        with parts.db.read() as txn:
            for ino in inos[start : start + BATCH]:
                inode = tree.get(txn, ino)
                if not inode.is_regular or not inode.flags & schema.DATA_LOCAL:
                    continue
                named.add(inode.content_id)
                content = staged.get(inode.content_id)
                if content is not None:
                    changed += _as_on_disk(inode, content)
                elif inode.size_bytes:
                    changed.append(_without_bytes(inode, publish.object_of(txn, ino)))
        if changed:

            def record(txn: WriteTransaction, changed: list[Inode] = changed) -> None:
                for inode in changed:
                    schema.put_inode(txn, inode)

            await parts.db.commit(record)
    return named


def _as_on_disk(inode: Inode, content: DirtyContent) -> list[Inode]:
    """The inode with size and times of its staging file, if they are newer than the record."""
    # Whoever records an mtime gives the file the same (``Cache.note_mtime``).
    written_later = content.mtime_ns not in (0, inode.mtime_ns)
    if content.size_bytes == inode.size_bytes and not written_later:
        return []
    mtime_ns = content.mtime_ns if written_later else inode.mtime_ns
    ctime_ns = max(inode.ctime_ns, content.mtime_ns)
    return [schema.replace_inode(inode, size_bytes=content.size_bytes, mtime_ns=mtime_ns, ctime_ns=ctime_ns)]


def _without_bytes(inode: Inode, current: schema.ObjectRow | None) -> Inode:
    """The local bytes are gone: back to what the store has, or to an empty file."""
    log.error(
        "the write tier lost bytes that were not in the store yet",
        ino=inode.ino,
        size_bytes=inode.size_bytes,
        in_store=current is not None,
    )
    if current is None:
        return schema.replace_inode(inode, size_bytes=0)
    content_id = content_id_of_object(current.key, current.etag, current.size_bytes, current.version_id)
    return schema.replace_inode(
        inode, size_bytes=current.size_bytes, content_id=content_id, flags=inode.flags & ~schema.DATA_LOCAL
    )
