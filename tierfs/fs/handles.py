"""Open files and directories. Trio thread only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import count

from tierfs.errors import InvalidArgument
from tierfs.writeback.content import FileContent

FOPEN_KEEP_CACHE = 1 << 1
FOPEN_MAY_PASS = 1 << 2
"""The open may be passed through (``TIERFS_OPEN_MAY_PASS``)."""
FOPEN_TELL_CLOSE = 1 << 0
"""If it is, FLUSH is for the engine (``TIERFS_OPEN_TELL_CLOSE``)."""
_NUMBERS_BITS = 40
"""Of a handle number: which handle of an engine; above them, which engine."""


@dataclass(slots=True, eq=False)
class FileHandle:
    """One open(2) of a regular file. ``uid`` is who opened it."""

    content: FileContent
    flags: int
    uid: int
    passed_through: bool = False
    """Reads, and perhaps writes, go to the file in the tier without passing here."""

    @property
    def can_read(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_WRONLY

    @property
    def can_write(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_RDONLY

    @property
    def tells_close(self) -> bool:
        """close(2) has to ask the engine, which makes up then for what writes past it have not done."""
        return self.passed_through and self.can_write and (self.uid != 0 or self.content.live is not None)

    @property
    def open_flags(self) -> int:
        """What the kernel, or a native front, is told about the open (FUSE_OPEN)."""
        return open_flags(passes=self.passed_through, tells_close=self.tells_close)


def open_flags(*, passes: bool, tells_close: bool) -> int:
    """An inode's bytes change only through this kernel (what others replace gets a new inode), so its page
    cache is always right. Flags that tierfs has no use for are words for the front, which clears them."""
    return FOPEN_KEEP_CACHE | (FOPEN_MAY_PASS if passes else 0) | (FOPEN_TELL_CLOSE if tells_close else 0)


@dataclass(slots=True, eq=False)
class DirectoryHandle:
    """One opendir(3). A position in a directory is a cookie of the namespace, so nothing is kept here."""

    ino: int


class HandleTable:
    """File handle numbers, never reused while the mount lives, whichever engine gave them out.

    A front repeats what an earlier engine has not answered, RELEASE too: that must not hit a later handle.
    """

    def __init__(self) -> None:
        self._numbers = count(1)
        self._files: dict[int, FileHandle] = {}
        self._directories: dict[int, DirectoryHandle] = {}

    @property
    def files_open(self) -> int:
        return len(self._files)

    @property
    def directories_open(self) -> int:
        return len(self._directories)

    def add_file(self, handle: FileHandle) -> int:
        number = self.new_number()
        self._files[number] = handle
        return number

    def add_directory(self, handle: DirectoryHandle) -> int:
        number = self.new_number()
        self._directories[number] = handle
        return number

    def new_number(self) -> int:
        """A number for ``put_file``. Any thread."""
        return next(self._numbers)

    def put_file(self, number: int, handle: FileHandle) -> None:
        """``number`` is from ``new_number``."""
        self._files[number] = handle

    def number_from(self, engine_starts: int) -> None:
        """Give out numbers that no earlier engine of this mount has given out."""
        self._go_on_after(engine_starts << _NUMBERS_BITS)

    def _go_on_after(self, number: int) -> None:
        self._numbers = count(max(next(self._numbers), number + 1))

    def restore_file(self, number: int, handle: FileHandle) -> None:
        """A file that was open under that number when an earlier engine died."""
        self._go_on_after(number)
        self._files[number] = handle

    def restore_directory(self, number: int, handle: DirectoryHandle) -> None:
        self._go_on_after(number)
        self._directories[number] = handle

    def file(self, number: int) -> FileHandle:
        try:
            return self._files[number]
        except KeyError:
            raise InvalidArgument(f"no open file has handle {number}") from None

    def find_file(self, number: int) -> FileHandle | None:
        return self._files.get(number)

    def directory(self, number: int) -> DirectoryHandle:
        try:
            return self._directories[number]
        except KeyError:
            raise InvalidArgument(f"no open directory has handle {number}") from None

    def remove_file(self, number: int) -> FileHandle:
        handle = self.file(number)
        del self._files[number]
        return handle

    def remove_directory(self, number: int) -> None:
        self._directories.pop(number, None)

    def files(self) -> list[FileHandle]:
        return list(self._files.values())
