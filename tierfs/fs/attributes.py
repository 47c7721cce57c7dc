"""Requests about attributes: getattr, setattr, extended attributes, statfs."""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass
from typing import Any

from tierfs.errors import NoAttribute, NotPermitted, NotSupported, ReadOnly, TierfsError
from tierfs.fs import repeats
from tierfs.fs.files import mode_without_privileges
from tierfs.fs.services import Caller, Services
from tierfs.fs.snapshots import is_snapshot
from tierfs.namespace import publish, schema, tree
from tierfs.namespace.transaction import WriteTransaction
from tierfs.types import Inode

VIRTUAL_PREFIX = b"user.tierfs."
CHECKPOINT = b"user.tierfs.checkpoint"
XATTR_NAMESPACES = (b"user.", b"trusted.", b"security.")
"""The kernel checks who may set which, and removes ``security.capability`` when a file changes."""
PRIVILEGES = b"security.capability"
"""What the kernel asks for before a write (see ``writeback.throttle``)."""
LABEL = b"security.selinux"
"""What ls(1) asks for; see ``Attributes.get_xattr``."""
BLOCK_SIZE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class AttributeChange:
    """What setattr asks for; None leaves a field alone. Times in nanoseconds, size in bytes."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size_bytes: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Space:
    """statfs(2): blocks of 4 KiB, and inodes."""

    total_blocks: int
    free_blocks: int
    total_inodes: int
    free_inodes: int


class Attributes:
    """See the module docstring."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._db = services.db

    def get(self, ino: int) -> Inode:
        """The attributes of an inode, with what an open file has not saved yet."""
        if is_snapshot(ino):
            return self._services.snapshots.get(ino)
        with self._db.read() as txn:
            inode = tree.get(txn, ino)
        return self._services.view(inode)

    async def set(self, ino: int, change: AttributeChange, caller: Caller) -> Inode:
        """Apply a change; permission has been checked by the kernel (``default_permissions``)."""
        self._check_writable(ino)
        if change.size_bytes is not None:
            await self._set_size(ino, change.size_bytes)
        now_ns = self._services.now_ns()
        # Also when the size stays the same, as on ext4.
        mtime_ns = now_ns if change.mtime_ns is None and change.size_bytes is not None else change.mtime_ns
        owner_changes = change.uid is not None or change.gid is not None

        def apply(txn: WriteTransaction) -> Inode:
            inode = self._services.view(tree.get(txn, ino))
            mode = change.mode
            if mode is not None:
                mode = stat.S_IFMT(inode.mode) | stat.S_IMODE(mode)
            elif owner_changes or (change.size_bytes is not None and caller.uid != 0):
                mode = mode_without_privileges(inode.mode)
            # The first change makes the defaults of this mount the attributes of this inode.
            settles = not inode.flags & schema.META_KNOWN
            if settles and mode is None:
                mode = inode.mode
            return tree.set_attributes(
                txn,
                ino,
                mode=mode,
                uid=inode.uid if change.uid is None and settles else change.uid,
                gid=inode.gid if change.gid is None and settles else change.gid,
                atime_ns=change.atime_ns,
                mtime_ns=mtime_ns,
                now_ns=now_ns,
            )

        content = self._services.contents.peek(ino)
        if content is not None:
            self._services.contents.passthrough.notice_direct_writes(content)
            # The kernel stamps what it passes through by a finer clock: the write is not to be the newer one.
            now_ns = max(now_ns, content.ctime_ns)
            if change.mode is not None:
                content.written_directly = False
            if content.unsaved and change.mtime_ns is None:
                await self._services.contents.size_and_times.save(content)
        if mtime_ns is not None and content is not None:
            self._services.contents.size_and_times.note_mtime(content, mtime_ns)
        elif mtime_ns is not None:
            self._note_mtime(ino, mtime_ns)
        before_ns = content.mtime_ns if content is not None else 0
        if content is not None and mtime_ns is not None:
            # Now, not after the commit: who records the content meanwhile, at its last close perhaps, would
            # bring back the time of the write.
            content.mtime_ns = mtime_ns
        try:
            inode = await self._db.commit(apply, lazy=True)
        except TierfsError:
            if content is not None and content.mtime_ns == mtime_ns:
                content.mtime_ns = before_ns
            raise
        if content is not None:
            content.mtime_ns, content.ctime_ns = inode.mtime_ns, inode.ctime_ns
        self._services.publisher.schedule.note(ino)
        return self._services.view_now(inode)

    def _note_mtime(self, ino: int, mtime_ns: int) -> None:
        with self._db.read() as txn:
            inode = tree.get(txn, ino)
        if inode.is_regular and inode.flags & schema.DATA_LOCAL:
            self._services.cache.note_mtime(inode.content_id, mtime_ns)

    async def _set_size(self, ino: int, size_bytes: int) -> None:
        content = await self._services.contents.acquire(ino)
        try:
            await self._services.contents.changes.truncate(content, size_bytes)
            await self._services.contents.size_and_times.save(content)
        finally:
            await self._services.contents.release(content)
            self._services.background_sync.note(ino)

    async def get_xattr(self, ino: int, name: bytes) -> bytes:
        """Raises ``NoAttribute``; ``user.tierfs.*`` tell the state of the file.

        ``NotSupported`` for a label that no file has unless one is set: ls(1), which asks for that of every
        file, asks no more when it hears so.
        """
        try:
            return await self._get_xattr(ino, name)
        except NoAttribute as error:
            if name == LABEL:
                raise NotSupported(str(error)) from None
            raise

    async def _get_xattr(self, ino: int, name: bytes) -> bytes:
        if is_snapshot(ino):
            if name.startswith(b"system."):
                raise NotSupported("access control lists are not supported")
            return self._services.snapshots.get_xattr(ino, name)
        if name == CHECKPOINT:
            return await self._services.interrupts.guard(self._services.commits.attribute_of, ino)
        if name.startswith(VIRTUAL_PREFIX):
            return self._virtual(ino, name[len(VIRTUAL_PREFIX) :])
        if name == PRIVILEGES and self._services.hold_write is not None:
            await self._services.interrupts.guard(self._services.hold_write, ino)
        if not name.startswith(XATTR_NAMESPACES):
            # Also system.posix_acl_*: "not supported" would make ls and cp print warnings.
            if name.startswith(b"system."):
                raise NotSupported("access control lists are not supported")
            raise NoAttribute(name.decode("utf-8", "backslashreplace"))
        with self._db.read() as txn:
            return tree.get_xattr(txn, ino, name)

    async def set_xattr(self, ino: int, name: bytes, value: bytes) -> None:
        """``user.tierfs.checkpoint`` asks for a manifest, see ``checkpoint``; others are kept."""
        if name == CHECKPOINT and not is_snapshot(ino):
            await self._services.commits.take_attribute(ino, value)
            return
        self._check_writable(ino)
        self._check_xattr_name(name)
        now_ns = self._services.now_ns()
        await self._db.commit(lambda txn: tree.set_xattr(txn, ino, name, value, now_ns=now_ns), lazy=True)

    async def remove_xattr(self, ino: int, name: bytes) -> None:
        self._check_writable(ino)
        self._check_xattr_name(name)
        now_ns = self._services.now_ns()
        await repeats.commit(self._db, lambda txn: tree.remove_xattr(txn, ino, name, now_ns=now_ns))

    def list_xattrs(self, ino: int, caller: Caller) -> list[bytes]:
        """Stored names only: the virtual ones are not listed, so that ``cp -a`` does not copy them.

        ``trusted.*`` is shown to root alone, see xattr(7).
        """
        if is_snapshot(ino):
            names = sorted(self._services.snapshots.xattrs(ino))
        else:
            with self._db.read() as txn:
                names = tree.list_xattrs(txn, ino)
        return names if caller.uid == 0 else [name for name in names if not name.startswith(b"trusted.")]

    def _check_writable(self, ino: int) -> None:
        if self._services.settings.read_only:
            raise ReadOnly("mounted read-only")
        if is_snapshot(ino):
            raise ReadOnly("a snapshot cannot be changed")

    def _check_xattr_name(self, name: bytes) -> None:
        if name.startswith(VIRTUAL_PREFIX):
            raise NotPermitted("user.tierfs.* attributes are read-only")
        if not name.startswith(XATTR_NAMESPACES):
            raise NotSupported("only user.*, trusted.* and security.* extended attributes are kept")

    def _virtual(self, ino: int, name: bytes) -> bytes:
        state = self.state_of(ino)
        if name == b"state":
            return json.dumps(state).encode()
        value = state.get(name.decode("ascii", "replace"))
        if value is None:
            raise NoAttribute("user.tierfs." + name.decode("utf-8", "backslashreplace"))
        return str(value).lower().encode() if isinstance(value, bool) else str(value).encode()

    def state_of(self, ino: int) -> dict[str, Any]:
        """What ``user.tierfs.*`` says: object key, ETag, dirty, resident bytes in all and per tier."""
        with self._db.read() as txn:
            inode = tree.get(txn, ino)
            current = publish.object_of(txn, ino)
            dirty = publish.dirty_row(txn, ino) is not None
        resident = self._services.cache.resident_bytes(inode.content_id)
        state: dict[str, Any] = {"dirty": dirty, "resident": sum(resident.values())}
        if inode.flags & schema.DATA_LOCAL:
            state["resident"] = self.get(ino).size_bytes
        state["tiers"] = json.dumps(resident)
        if current is not None:
            state["key"], state["etag"] = current.info.key, current.info.etag
        return state

    def space(self) -> Space:
        """Total and free space of the store; never zero free, never negative."""
        total_bytes, free_bytes = self._services.store_space()
        total = max(total_bytes // BLOCK_SIZE_BYTES, 2)
        free = min(max(free_bytes // BLOCK_SIZE_BYTES, 1), total)
        with self._db.read() as txn:
            used_inodes = tree.inode_count(txn)
        total_inodes = max(1 << 40, 2 * used_inodes)
        return Space(total, free, total_inodes, total_inodes - used_inodes)
