"""What every request may use: one value, built by ``mount`` and passed to the parts of the file system."""

from __future__ import annotations

import stat
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tierfs.cache.residency import Cache
from tierfs.checkpoint.commits import Commits
from tierfs.config import Settings
from tierfs.fs.expected import ExpectedCopies
from tierfs.fs.handles import HandleTable
from tierfs.fs.interrupt import InterruptWatch
from tierfs.fs.kernel import KernelCaches
from tierfs.fs.snapshots import Snapshots
from tierfs.namespace import records, schema
from tierfs.namespace.db import Database
from tierfs.namespace.refresh import Refresher
from tierfs.prefetch.readahead import ReadAheadTable
from tierfs.types import Inode
from tierfs.writeback.content_table import ContentTable
from tierfs.writeback.copying import StoreCopies
from tierfs.writeback.publisher import Publisher
from tierfs.writeback.syncing import BackgroundSync

SECTOR_BYTES = 512
DIRECTORY_SECTORS = 8
MAX_ORPHANS = 100_000
"""Inodes that lost their name in the bucket, of which the kernel may not know."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent the request. ``umask`` has already been applied to modes by the kernel."""

    uid: int
    gid: int
    pid: int


@dataclass(slots=True, eq=False)
class Services:
    """See the module docstring."""

    settings: Settings
    db: Database
    cache: Cache
    refresher: Refresher
    contents: ContentTable
    publisher: Publisher
    commits: Commits
    readahead: ReadAheadTable
    handles: HandleTable
    kernel: KernelCaches
    interrupts: InterruptWatch
    snapshots: Snapshots
    background_sync: BackgroundSync
    copies: StoreCopies
    now_ns: Callable[[], int]
    store_space: Callable[[], tuple[int, int]]
    """(total bytes, free bytes) of the store, as far as that means anything."""
    lend: Callable[[int, int], bool] | None = None
    """(inode, descriptor): let a native front pass reads of that inode through to that file. None: no such
    front."""
    settle: Callable[[], None] = lambda: None
    """Take in what was committed for a native front on another thread. To be called at the start of whatever
    looks at open files or orphans; ``contents`` does it by itself."""
    place_mark: bytes = b""
    """A native front with this mark may be told where the bytes of a READ lie; empty: none such."""
    hold_write: Callable[[int], Awaitable[None]] | None = None
    """(inode): return when a write that is passed through may go on. None: nothing is passed through."""
    expected_copies: ExpectedCopies = field(default_factory=ExpectedCopies)
    orphans: set[int] = field(default_factory=set)
    """Inodes without a name that the kernel may still know; reaped at FORGET."""

    def keep_orphan(self, ino: int) -> bool:
        """Whether an inode without a name waits for its FORGET: a native front may have it open."""
        if self.lend is None or len(self.orphans) >= MAX_ORPHANS:
            return False
        self.orphans.add(ino)
        return True

    def is_read(self, ino: int) -> bool:
        """Whether somebody may still need the object of an inode that has no name any more."""
        content = self.contents.peek(ino)
        if content is not None:
            return content.unlinked and not content.local and content.size_bytes > 0
        # With a native front files are open that are not open here, until the kernel forgets them.
        return self.lend is not None and ino in self.orphans

    def is_read_from_store(self, ino: int) -> bool:
        """The same, and not all of its bytes are here."""
        if not self.is_read(ino):
            return False
        with self.db.read() as txn:
            inode = records.find_inode(txn, ino)
        return inode is not None and inode.is_regular and not self.cache.is_complete(inode.content_id)

    def view_now(self, inode: Inode) -> Inode:
        """``view`` of an inode that was read before the caller waited for something.

        What was laid over the record then may be in the record by now, and laid over nothing any more.
        """
        with self.db.read() as txn:
            return self.view(records.find_inode(txn, inode.ino) or inode)

    def view(self, inode: Inode) -> Inode:
        """``inode`` as the application sees it: with what is not saved yet, and with today's defaults.

        Mode and owner of an object that carries none follow the options of this mount, not of the one
        that listed it first.
        """
        inode = self.contents.overlay(inode)
        if inode.flags & schema.META_KNOWN:
            return inode
        settings = self.settings
        permissions = settings.dir_mode if inode.is_dir else settings.file_mode
        mode = stat.S_IFMT(inode.mode) | permissions
        if (inode.mode, inode.uid, inode.gid) == (mode, settings.uid, settings.gid):
            return inode
        return schema.replace_inode(inode, mode=mode, uid=settings.uid, gid=settings.gid)

    def attr_timeout_s(self, inode: Inode) -> float:
        """How long the kernel may believe an entry and its attributes without asking."""
        left_s = (inode.valid_until_ns - self.now_ns()) / 1e9
        return min(max(left_s, 0.0), self.settings.ttl_s)

    def sectors_of(self, inode: Inode) -> int:
        """``st_blocks``: sectors of 512 bytes. Of a file that is only here, what it takes on disk."""
        if not stat.S_ISREG(inode.mode):
            return DIRECTORY_SECTORS if inode.is_dir else 0
        whole = -(-inode.size_bytes // SECTOR_BYTES)
        if not inode.flags & schema.DATA_LOCAL:
            return whole
        content = self.contents.peek(inode.ino)
        if content is not None:
            allocated = content.staging.allocated_bytes if content.staging is not None else 0
        else:
            allocated = sum(self.cache.resident_bytes(inode.content_id).values())
        return -(-allocated // SECTOR_BYTES)
