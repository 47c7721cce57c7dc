"""``read_many`` and ``open_many``: what is local directly, the rest through the mount."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Literal, Self, overload

from tierfs.batch import mounted, native, places
from tierfs.batch.mounted import AnyPath
from tierfs.batch.places import Places
from tierfs.mountpoint import canonical

ALIGNMENT_BYTES = 64
"""Files in one buffer begin at multiples of this."""
ITERATION_BYTES = 64 * 1024 * 1024
"""How much ``OpenFiles`` reads at a time while it is iterated over."""

Errors = Literal["raise", "return"]
Slot = memoryview | int | OSError | None
"""What is known of one path: its bytes, an outcome of the extension, an error, or nothing yet."""


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
    target = _as_bytes(buffer)
    end, local = _read_directly(here, wanted, results, target)
    if local != len(wanted):
        _read_through_mount(here, wanted, results, target, end)
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
        chosen = list(range(len(self.paths))) if positions is None else list(positions)
        results: list[Slot] = [None] * len(chosen)
        here = places.current()
        target = _as_bytes(buffer)
        # What was not local when it was opened is read through its descriptor, so that it is that very file.
        direct = [at for at, position in enumerate(chosen) if self._inodes[position]]
        read: list[Slot] = [None] * len(direct)
        inodes = [self._inodes[chosen[at]] for at in direct]
        end, _ = _read_directly(here, [self.paths[chosen[at]] for at in direct], read, target, inodes)
        for at, result in zip(direct, read, strict=True):
            results[at] = result
        rest = [at for at, result in enumerate(results) if not isinstance(result, memoryview)]
        for at in rest:
            here.files[_reason(here, results[at])] += 1
        answers = mounted.in_parallel(lambda at: self._read_one(chosen[at]), rest)
        _settle(dict(zip(rest, answers, strict=True)), results, target, end)
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


def _as_bytes(buffer: object) -> memoryview | None:
    if buffer is None:
        return None
    view = memoryview(buffer)  # type: ignore[arg-type]
    if view.readonly or not view.c_contiguous:
        raise ValueError("the buffer must be writable and contiguous")
    return view.cast("B") if view.nbytes else view


def _look_up(here: Places, paths: list[AnyPath], found: list[object]) -> None:
    """Replace None by (inode number, size) or an outcome where a mount can be asked directly."""
    for reader in here.readers():
        try:
            reader.look_up(paths, found)
        except OSError as error:
            here.give_up(reader, error)


def _read_directly(here: Places, paths: list[AnyPath], results: list[Slot], target: memoryview | None,
                   inodes: list[int] | None = None) -> tuple[int, int]:
    """Fill in what can be read directly; (end of it in ``target``, how many files)."""
    end = local = 0
    readers = here.readers()
    for attempt in (paths, None):
        if local == len(paths) or not readers:
            break
        names = attempt if attempt is not None else _without_links(here, paths, results)
        if names is None:
            break
        for reader in readers:
            try:
                end, found = reader.read(names, results, target, end if target is not None else 0, inodes)
            except OSError as error:
                here.give_up(reader, error)
                continue
            local += found
            if local == len(paths):
                break
    here.files["local"] += local
    return end, local


def _without_links(here: Places, paths: list[AnyPath], results: list[Slot]) -> list[AnyPath] | None:
    """The paths that nobody answered for, made absolute and without the links above a mountpoint.

    None if there are none. A path with ``..`` is left as it is: what that means depends on links inside.
    """
    names = list(paths)
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
            found = directories[directory] = canonical(directory or ".", here.mounts)
        resolved = os.path.join(found, name)
        changed = changed or resolved != path
        names[position] = resolved
    return names if changed else None


def _reason(here: Places, result: Slot) -> str:
    if isinstance(result, int) and here.extension is not None:
        return here.extension.OUTCOMES[result]
    return native.OUTSIDE


def _read_through_mount(here: Places, paths: list[AnyPath], results: list[Slot], target: memoryview | None,
                        end: int) -> None:
    rest = [position for position, result in enumerate(results) if not isinstance(result, memoryview)]
    for position in rest:
        here.files[_reason(here, results[position])] += 1
    answers = mounted.in_parallel(lambda position: mounted.read_file(paths[position]), rest)
    _settle(dict(zip(rest, answers, strict=True)), results, target, end)


def _settle(answers: dict[int, memoryview | OSError], results: list[Slot], target: memoryview | None,
            end: int) -> None:
    """Put what came through the mount into the results, and into the caller's buffer behind ``end``."""
    for position, answer in answers.items():
        if target is not None and isinstance(answer, memoryview):
            start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            end = start + len(answer)
            if end > len(target):
                raise ValueError(f"the buffer has {len(target)} bytes, and at least {end} are needed")
            target[start:end] = answer
            answer = target[start:end]
        results[position] = answer


def _deliver(results: list[Slot], errors: Errors) -> list[memoryview]:
    """The results, all of them settled. With ``errors`` "return" some are ``OSError``."""
    if errors not in {"raise", "return"}:
        raise ValueError(f'errors is {errors!r}, not "raise" or "return"')
    if errors == "raise":
        for result in results:
            if isinstance(result, OSError):
                raise result
    return results  # type: ignore[return-value]
