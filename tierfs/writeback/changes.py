"""What the engine itself changes of a file's bytes: write(2) and truncate(2) that came here.

The file becomes local first (``local_copy``), and whoever has it open through the kernel sees the change
too (``passthrough``). Only in memory, as far as this goes: ``size_and_times`` records it, ``publisher``
uploads it.

Trio thread only; the caller has counted a use of the content, and with a handle a writer. While the content
is about to become clean (``sealing``) a change waits for the lock of the content; else it takes none. No
await between the end of a change and ``touch``.

Raises ``ObjectTooLarge`` before anything has changed; what ``Staging.write`` and ``LocalCopies.begin``
raise.
"""

from __future__ import annotations

from collections.abc import Callable

from tierfs.writeback.content import FileContent, check_size
from tierfs.writeback.local_copy import LocalCopies
from tierfs.writeback.passthrough import Passthrough


class Changes:
    """See the module docstring. ``now_ns``: the time that a changed file gets."""

    def __init__(
        self, local_copies: LocalCopies, passthrough: Passthrough, now_ns: Callable[[], int]
    ) -> None:
        self._local_copies = local_copies
        self._passthrough = passthrough
        self._now_ns = now_ns

    async def write(self, content: FileContent, offset: int, data: bytes) -> int:
        """Write into the local copy, making one first if need be. Returns the bytes written.

        Raises ``ObjectTooLarge`` for what no object could hold.
        """
        check_size(offset + len(data))
        staging = await self._local_copies.make_writable(content)
        if not staging.write_nowait(offset, data):
            await staging.write(offset, data)
        self.touch(content, staging.size_bytes)
        return len(data)

    async def truncate(self, content: FileContent, size_bytes: int) -> None:
        """Set the size; what is cut off is gone, what is added reads as zeros. Same size: nothing happens."""
        check_size(size_bytes)
        self._passthrough.notice_direct_writes(content)
        if size_bytes == content.size_bytes:
            return
        # truncate(2) has no handle, and what it waits for must not become a clean copy meanwhile.
        content.writers += 1
        try:
            await self._passthrough.pull(content)
            if content.staging is None or content.sealing:
                await self._local_copies.begin(content, keep=size_bytes > 0)
            await self._passthrough.take_live(content)
            staging = content.staging
            assert staging is not None
            if staging.size_bytes != size_bytes:
                await staging.truncate(size_bytes)
                await self._passthrough.push(content, 0, 0)
            self.touch(content, staging.size_bytes)
        finally:
            content.writers -= 1

    def touch(self, content: FileContent, size_bytes: int) -> None:
        """The bytes have changed just now."""
        content.size_bytes = size_bytes
        content.mtime_ns = content.ctime_ns = self._now_ns()
        content.unsaved = True
        content.kept_for_readers = None
