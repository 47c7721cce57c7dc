"""``read_many`` and ``open_many``: what is local directly, the rest through the mount."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Literal, Self, overload

from tierfs.batch import mounted, places
from tierfs.batch.mounted import AnyPath
from tierfs.batch.places import Places
from tierfs.errors import TierfsError
from tierfs.mountpoint import canonical

ALIGNMENT_BYTES = 64
"""Files in one buffer begin at multiples of this."""
ITERATION_BYTES = 64 * 1024 * 1024
"""How much ``OpenFiles`` reads at a time while it is iterated over."""

Errors = Literal["raise", "return"]
Slot = memoryview | int | OSError | None
"""What is known of one path: its bytes, an outcome of the extension, an error, or nothing yet."""
BY_DESCRIPTOR = -1
"""In place of an outcome: not to be asked for by name."""


class Target:
    """The caller's buffer while it is filled: what is local first, in order, then the rest."""

    def __init__(self, buffer: object, count: int) -> None:
        view = memoryview(buffer)  # type: ignore[arg-type]
        if view.readonly or not view.c_contiguous:
            raise ValueError("the buffer must be writable and contiguous")
        self.view = view.cast("B") if view.nbytes else view
        self.end = 0
        self.reserved: list[tuple[int, int] | None] = [None] * count
        """(place, size) of files that were local when places were given out, and then were not."""

    def put(self, position: int, data: memoryview) -> memoryview:
        """Copy what came through the mount to its place. Raises ``ValueError`` if there is none."""
        start, size = self.reserved[position] or (0, -1)
        if len(data) > size:
            start = -(-self.end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            self.end = start + len(data)
            if self.end > len(self.view):
                raise ValueError(f"the buffer has {len(self.view)} bytes, and {self.end} are needed")
        self.view[start : start + len(data)] = data
        return self.view[start : start + len(data)]


@overload
def read_many(paths: Iterable[AnyPath], *, buffer: object = None) -> list[memoryview]: ...
@overload
def read_many(
    paths: Iterable[AnyPath], *, errors: Literal["raise"], buffer: object = None
) -> list[memoryview]: ...
@overload
def read_many(
    paths: Iterable[AnyPath], *, errors: Errors, buffer: object = None
) -> Sequence[memoryview | OSError]: ...
def read_many(
    paths: Iterable[AnyPath], *, errors: Errors = "raise", buffer: object = None
) -> Sequence[memoryview | OSError]:
    """The bytes of all files, in the order of ``paths``; a path that comes twice is read twice.

    The views are writable and independent of the files. Those of one call share memory, which is used again
    for a later call when the last of them is gone: copy (``bytes(view)``) what is kept for longer.

    ``buffer``: any writable buffer of bytes (a pinned tensor's ``numpy()``) to read into instead, each file
    at a multiple of 64 bytes; ``ValueError`` if it is too small.
    ``errors``: ``raise`` the first error (``FileNotFoundError``, ``IsADirectoryError``... with the path), or
    ``return`` it in place of the bytes. Only regular files are read.
    """
    if isinstance(paths, str | bytes):
        raise TypeError("paths is one path; a list of them is wanted")
    wanted = list(paths)
    results: list[Slot] = [None] * len(wanted)
    here = places.current()
    target = None if buffer is None else Target(buffer, len(wanted))
    if _read_directly(here, wanted, results, target) != len(wanted):
        _read_the_rest(here, results, target, lambda position: mounted.read_file(wanted[position]))
    return _deliver(results, errors)


def open_many(paths: Iterable[AnyPath]) -> OpenFiles:
    """Look all files up, to know their sizes before their bytes are wanted. Close it, or use it in ``with``.

    Raises ``OSError``, with the path, for the first file that cannot be opened.
    """
    if isinstance(paths, str | bytes):
        raise TypeError("paths is one path; a list of them is wanted")
    return OpenFiles(list(paths))


class OpenFiles:
    """Files that were looked up. ``sizes``: in bytes, in the order of ``paths``.

    ``read`` and iteration give what a file holds when it is read. A name that means another file by then is
    ESTALE: ``read_many`` would give the new one. Files that were not local at the look-up are kept open, so
    their number is limited as that of open files is. Not to be used by several threads at once, nor after a
    fork in parent and child.
    """

    def __init__(self, paths: list[AnyPath]) -> None:
        self.paths = tuple(paths)
        self._descriptors: dict[int, int] = {}
        self._inodes = [0] * len(paths)
        self.sizes = [0] * len(paths)
        here = places.current()
        found: list[object] = [None] * len(paths)
        _look_up(here, paths, found)
        for position, answer in enumerate(found):
            if isinstance(answer, tuple):
                self._inodes[position], self.sizes[position] = answer
        missing = [position for position, answer in enumerate(found) if not isinstance(answer, tuple)]
        failure: OSError | None = None
        opened = mounted.in_parallel(lambda position: mounted.open_file(paths[position]), missing)
        for position, file in zip(missing, opened, strict=True):
            if isinstance(file, OSError):
                failure = failure or file
            else:
                self._descriptors[position], info = file
                self.sizes[position] = info.st_size
        if failure is not None:
            self.close()
            raise failure

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def buffer_bytes(self) -> int:
        """How large a buffer for ``read()`` of all files has to be."""
        return sum(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in self.sizes)

    @overload
    def read(self, positions: Iterable[int] | None = None, *, buffer: object = None) -> list[memoryview]: ...
    @overload
    def read(
        self, positions: Iterable[int] | None = None, *, errors: Errors, buffer: object = None
    ) -> Sequence[memoryview | OSError]: ...
    def read(
        self,
        positions: Iterable[int] | None = None,
        *,
        errors: Errors = "raise",
        buffer: object = None,
    ) -> Sequence[memoryview | OSError]:
        """The bytes of all files, or of those at ``positions`` in ``paths``. As ``read_many``."""
        chosen = list(range(len(self.paths)) if positions is None else positions)
        here = places.current()
        target = None if buffer is None else Target(buffer, len(chosen))
        inodes = [self._inodes[position] for position in chosen]
        # What was not local when it was opened is read through its descriptor, so that it is that very file.
        results: list[Slot] = [None if ino else BY_DESCRIPTOR for ino in inodes]
        paths = [self.paths[position] for position in chosen]
        if _read_directly(here, paths, results, target, inodes) != len(chosen):
            _read_the_rest(here, results, target, lambda at: self._read_one(chosen[at]))
        return _deliver(results, errors)

    def _read_one(self, position: int) -> memoryview:
        path, known = self.paths[position], self._descriptors.get(position)
        if known is not None:
            return mounted.read_descriptor(known, os.fstat(known).st_size, path)
        descriptor, info = mounted.open_file(path)
        try:
            if info.st_ino != self._inodes[position]:
                raise OSError(errno.ESTALE, "another file has this name now", os.fsdecode(path))
            return mounted.read_descriptor(descriptor, info.st_size, path)
        finally:
            os.close(descriptor)

    def __iter__(self) -> Iterator[memoryview]:
        """The bytes of each file in turn; a bounded part of them is read ahead."""
        position = 0
        while position < len(self.paths):
            chosen, total = [position], self.sizes[position]
            while chosen[-1] + 1 < len(self.paths) and total < ITERATION_BYTES:
                chosen.append(chosen[-1] + 1)
                total += self.sizes[chosen[-1]]
            yield from self.read(chosen)
            position = chosen[-1] + 1

    def close(self) -> None:
        """Views that were returned stay valid. Idempotent."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _look_up(here: Places, paths: list[AnyPath], found: list[object]) -> None:
    """Replace None by (inode number, size) or an outcome where a mount can be asked directly."""
    readers = here.readers()
    names = paths
    for again in (True, False):
        for reader in readers:
            try:
                reader.look_up(names, found)
            except OSError as error:
                here.give_up(reader, error)
        names = _without_links(here, paths, found) if again and readers else []
        if not names:
            break


def _read_directly(here: Places, paths: list[AnyPath], results: list[Slot], target: Target | None,
                   inodes: list[int] | None = None) -> int:
    """Fill in what can be read directly; returns how many files that was."""
    local = 0
    readers = here.readers()
    names = paths
    for again in (True, False):
        for reader in readers:
            if local == len(paths):
                break
            try:
                if target is None:
                    _, found = reader.read(names, results, inodes=inodes)
                else:
                    target.end, found = reader.read(
                        names, results, target.view, target.end, inodes, target.reserved)
            except OSError as error:
                here.give_up(reader, error)
                continue
            local += found
        names = _without_links(here, paths, results) if again and readers and local < len(paths) else []
        if not names:
            break
    here.files["local"] += local
    return local


def _without_links(here: Places, paths: list[AnyPath], results: Sequence[object]) -> list[AnyPath]:
    """The paths that nobody answered for, made absolute and without the links above a mountpoint.

    Empty if that changes nothing. A path with ``..`` is left as it is: links inside decide what it means.
    """
    names: list[AnyPath] = list(paths)
    directories: dict[str, str] = {}
    changed = False
    for position, result in enumerate(results):
        if result is not None:
            continue
        path = os.fsdecode(paths[position])
        directory, name = os.path.split(path)
        if not name or name in {".", ".."} or ".." in directory.split("/"):
            continue
        found = directories.get(directory)
        if found is None:
            try:
                found = canonical(directory or ".", here.mounts)
            except (OSError, TierfsError):  # no current directory, or links that lead to themselves
                found = directory
            directories[directory] = found
        resolved = os.path.join(found, name)
        changed = changed or resolved != path
        names[position] = resolved
    return names if changed else []


def _read_the_rest(here: Places, results: list[Slot], target: Target | None,
                   read: Callable[[int], memoryview]) -> None:
    """Through the mount: ``read`` of every position that has no bytes yet."""
    rest = [position for position, result in enumerate(results) if not isinstance(result, memoryview)]
    for position in rest:
        here.files[_reason(here, results[position])] += 1
    for position, answer in zip(rest, mounted.in_parallel(read, rest), strict=True):
        if target is not None and isinstance(answer, memoryview):
            answer = target.put(position, answer)
        results[position] = answer


def _reason(here: Places, result: Slot) -> str:
    if result == BY_DESCRIPTOR:
        return "opened"
    if isinstance(result, int) and here.extension is not None:
        return here.extension.OUTCOMES[result]
    return "outside"


def _deliver(results: list[Slot], errors: Errors) -> list[memoryview]:
    """The results, all of them settled. With ``errors`` "return" some are ``OSError``."""
    if errors not in {"raise", "return"}:
        raise ValueError(f'errors is {errors!r}, not "raise" or "return"')
    if errors == "raise":
        for result in results:
            if isinstance(result, OSError):
                raise result
    return results  # type: ignore[return-value]
