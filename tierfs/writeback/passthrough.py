"""Opens that are passed through: the kernel reads and writes the tier's file, and nobody passes here.

Owns what a ``FileContent`` says of them: ``passed_through`` (how many there are), ``lent`` and
``passed_file`` (which file the kernel has; while there are any opens it takes no other), ``live``,
``written_directly``. What is lent:

* of a clean content the file in the tier, which is kept from eviction meanwhile (``cache.lending``);
* of a local one the staging file, also for writing;
* should a writer come to what is lent from a RAM tier, the same file still, which becomes a *live* one
  (``cache.live``): the staging file gets its bytes (``pull``), and what the engine changes there it changes
  here as well (``push``).

Such writes are noticed afterwards, from size and mtime of the file. Whoever answers, records or uploads
anything that depends on them calls ``notice_direct_writes`` first, and ``pull`` if it needs the bytes.

Trio thread only; ``lend`` and ``notice_direct_writes`` block for as long as open(2) and fstat(2) take. No
await between ``notice_direct_writes`` and the use of what it found out.

Raises ``TierFailed`` where the file that applications have is gone, and what ``Staging.write`` raises from
``pull``.
"""

from __future__ import annotations

import os
from contextlib import suppress

import trio

from tierfs.cache import direct_writes
from tierfs.cache.residency import Cache
from tierfs.errors import TierFailed
from tierfs.writeback.content import FileContent
from tierfs.writeback.local_copy import LocalCopies

NO_FILE = (0, 0)


class Passthrough:
    """See the module docstring."""

    def __init__(self, cache: Cache, local_copies: LocalCopies) -> None:
        self._cache = cache
        self._local_copies = local_copies
        self._direct: set[FileContent] = set()
        self.direct_writes_began = trio.Event()
        """Set while ``written_directly`` may name some."""

    # which file the kernel gets

    def lend(self, content: FileContent) -> int | None:
        """A descriptor of a file that holds all bytes, and does until the last user of ``content`` is gone.

        None if there is no such file. The caller closes it. Blocks for as long as open(2) takes.
        """
        if content.local or content.ref is None or not content.size_bytes or content.live is not None:
            return None
        # While it is passed through the kernel takes no other file.
        known = content.passed_file if content.passed_through else None
        descriptor = self._cache.lend(content.ref, again=content.lent is not None, identity=known)
        if descriptor is not None:
            content.lent = content.content_id
            info = os.stat(descriptor)
            content.passed_file = info.st_dev, info.st_ino
        return descriptor

    async def lend_dirty(self, content: FileContent, *, writes: bool) -> int | None:
        """A descriptor of the staging file, if it can be read (``writes``: and written) without passing here.

        The caller closes it. With ``writes`` it is counted in ``content.writers``, so that the file does not
        become a clean copy meanwhile. For a reader nothing is waited for.
        """
        if content.sealing or content.live is not None or not self._cache.keeps_what_was_written:
            return None
        if not content.passed_through:
            if writes and not self._cache.takes_direct_writes:
                return None
            if not writes and (content.staging is None or content.writers or not content.size_bytes):
                return None
        staging = content.staging or await self._local_copies.make_writable(content)
        descriptor = direct_writes.lend(staging, content.mtime_ns)
        if descriptor is not None:
            content.passed_file = direct_writes.identity(staging)
        return descriptor

    def count_passed(self, content: FileContent, *, writes: bool) -> None:
        """One more open passes through."""
        content.passed_through += 1
        if writes:
            self.note_direct_writer(content)

    def note_direct_writer(self, content: FileContent) -> None:
        """An open for writing passes through; it is counted in ``passed_through`` and ``writers``."""
        self._direct.add(content)
        self.direct_writes_began.set()

    def end_passing(self, content: FileContent) -> None:
        """The last open that passed through is over."""
        self._drop_live(content)
        if content.lent is not None:
            self._cache.give_back(content.lent)
        content.lent = content.passed_file = None

    def _drop_live(self, content: FileContent) -> None:
        """Nobody has it open any more, and all of it has been pulled."""
        if content.live is not None:
            content.live.remove()
            content.live = content.passed_file = None

    async def keep_passed(self, content: FileContent) -> None:
        """Keep the file that applications have in its place: what is known of it is out of date.

        An upload has turned the staging file into a clean copy, or it was lent by an engine that is dead.
        """
        if content.lent is not None:
            self._cache.give_back(content.lent)
            content.lent = None
        if not content.passed_through:
            return
        found: tuple[int, int] | None
        if content.live is not None:
            found = content.live.identity
        elif content.staging is not None:
            found = direct_writes.identity(content.staging)
            base = content.staging.base
            if base is not None and content.passed_file not in (None, found):
                content.lent = base.content_id
                if await self._cache.hold(base, content.passed_file) is None:
                    content.lent = None
        elif content.ref is not None:
            content.lent = content.content_id
            found = await self._cache.hold(content.ref, content.passed_file)
            if found is None:
                content.lent = None
        else:
            found = None
        if content.passed_file is None:
            content.passed_file = found or NO_FILE

    # what is written into it

    async def begin_direct_write(self, content: FileContent) -> None:
        """Somebody is about to write into the tier's file of a content that is passed through.

        Raises ``TierFailed`` if that file is not the one that applications have.
        """
        if content.staging is None or content.sealing:
            await self._local_copies.begin(content, keep=True)
        await self.take_live(content)
        if content.live is not None:
            return
        await self._local_copies.make_independent(content)
        staging = content.staging
        if staging is None:
            return
        if content.passed_file not in (None, direct_writes.identity(staging)):
            raise TierFailed(f"inode {content.ino}: the file that applications have is gone from the tier")
        direct_writes.begin(staging, content.mtime_ns)
        self.notice_direct_writes(content)

    def notice_direct_writes(self, content: FileContent) -> None:
        """Take in what was written without passing here. Blocks for as long as fstat(2) takes."""
        staging = content.staging
        if staging is None or not content.passed_through:
            return
        if content.live is not None:
            change = content.live.notice()
            size_bytes, mtime_ns = change or (0, None)
        else:
            mtime_ns = direct_writes.notice(staging, content.mtime_ns)
            size_bytes = staging.size_bytes
        if mtime_ns is not None:
            content.written_directly = True
            content.kept_for_readers = None
            content.size_bytes = size_bytes
            content.mtime_ns = content.ctime_ns = mtime_ns
            content.unsaved = True

    def written_directly(self) -> list[FileContent]:
        """Contents into whose staging files somebody may be writing without passing here."""
        found = [content for content in self._direct if content.passed_through and content.writers]
        self._direct = set(found)
        if not found:
            self.direct_writes_began = trio.Event()
        return found

    def ahead_of_staging(self) -> list[FileContent]:
        """Contents whose newest bytes are in a live file alone."""
        return [content for content in self._direct if content.live is not None and content.live.is_behind]

    # live files

    async def take_live(self, content: FileContent) -> None:
        """Before bytes of a local content change: what is lent from a RAM tier becomes a live file."""
        if not content.passed_through or content.passed_file is None:
            return
        async with content.lock:
            staging = content.staging
            if content.live is not None or staging is None:
                return
            if content.passed_file == direct_writes.identity(staging):
                return
            lent = content.lent
            if staging.base is not None:
                lent = staging.base.content_id  # also if an earlier engine has lent it
            if lent is not None:
                content.live = await self._cache.take_live(lent, content.passed_file, content.ino)
            if content.live is not None:
                with suppress(OSError):
                    content.live.set_mtime(content.mtime_ns)

    async def pull(self, content: FileContent, *, always: bool = False) -> None:
        """Bring what was written into a live file to where it lasts.

        ``always``: also stores into a mapping, which nobody sees. Raises what ``Staging.write`` raises.
        """
        self.notice_direct_writes(content)
        live, staging = content.live, content.staging
        if live is not None and staging is not None and (live.is_behind or always):
            await live.pull(staging)

    async def push(self, content: FileContent, offset: int, end: int) -> None:
        """What the engine has changed in the staging file is seen by who has the live file open."""
        if content.live is not None and content.staging is not None:
            await content.live.push(content.staging, offset, end)
