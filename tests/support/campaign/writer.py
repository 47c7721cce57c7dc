"""A process that writes below one directory, and logs every call before and after.

Run as a program, it works until it gets SIGTERM, or the mount is gone::

    python -m tests.support.campaign.writer DIRECTORY LOG SEED PROFILE

A line of the log is JSON: what is about to be done, with a number (``{"n": 7, "do": "write", ...}``), then how that
ended (``{"n": 7, "ok": true}``, or ``"error"``: an errno). The log lies outside the mount, and one ``write`` each puts
its lines there: a line that is there was written before the next call began.

``PROFILE``, words: ``names`` also renames and removes; without it files are made, extended and overwritten, and keep
their names; with ``large`` some files are several parts long; with ``fill`` there are many, of megabytes.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.campaign.content import cells

GONE = frozenset({errno.ENOTCONN, errno.ECONNABORTED, errno.ECANCELED, errno.ENODEV, errno.ESHUTDOWN})
"""The mount is not there any more."""
SIZES = (0, 1, 700, 4096, 5000, 70_000, 131_072, 200_001)
LARGE_BYTES = 11_000_000
FILLING_SIZES = (1 << 20, 3_000_000)


class Ended(Exception):
    """Told to stop, or nothing can be written any more."""


class Writer:
    def __init__(self, directory: Path, log: Path, seed: int, profile: str) -> None:
        self._directory = directory
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._chance = random.Random(seed)
        self._tag = log.stem
        self._renames = "names" in profile
        self._large = "large" in profile
        self._sizes = FILLING_SIZES if "fill" in profile else SIZES
        self._all_names = [f"f{i}" for i in range(60 if "fill" in profile else 8)]
        self._number = 0
        self._files = 0
        self._names: dict[str, tuple[str, int]] = {}
        """name -> (file, size in bytes) as far as is certain."""
        self.stopped = False

    def run(self) -> None:
        while True:
            self._session()

    def _do(self, call: Callable[[], object], **what: object) -> bool:
        """Log, call, log. False: it failed. Raises ``Ended``."""
        if self.stopped:
            raise Ended
        self._number += 1
        self._say({"n": self._number, **what})
        try:
            call()
        except OSError as error:
            self._say({"n": self._number, "error": error.errno})
            if error.errno in GONE:
                raise Ended from None
            return False
        self._say({"n": self._number, "ok": True})
        return True

    def _say(self, what: dict[str, object]) -> None:
        os.write(self._log, json.dumps(what).encode() + b"\n")

    def _session(self) -> None:
        """Open a file, change it, close it; then perhaps rename or remove something."""
        chance = self._chance
        known = sorted(self._names)
        if known and chance.random() < 0.45:
            self._change(chance.choice(known))
        else:
            self._make(known)
        if self._renames and self._names:
            kind = chance.random()
            name = chance.choice(sorted(self._names))
            if kind < 0.15:
                if self._do(lambda: os.unlink(self._directory / name), do="unlink", name=name):
                    del self._names[name]
                else:
                    self._names.pop(name, None)
            elif kind < 0.4:
                self._rename(name, chance.choice(self._all_names))
        if chance.random() < 0.2:
            self._do(self._sync_directory, do="fsyncdir")

    def _make(self, known: list[str]) -> None:
        """A new file under a new name, or written beside and renamed over another."""
        chance = self._chance
        self._files += 1
        file = f"{self._tag}.{self._files}"
        free = [name for name in self._all_names if name not in self._names]
        replaces = self._renames and bool(known) and (not free or chance.random() < 0.5)
        if not free and not replaces:
            self._change(chance.choice(known))
            return
        name = f"tmp{self._files}" if replaces else chance.choice(free)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        handle: list[int] = []
        if not self._do(lambda: handle.append(os.open(self._directory / name, flags, 0o644)),
                        do="create", name=name, file=file):  # fmt: skip
            return
        size = self._fill(handle[0], file, 0)
        if size is None:
            return
        self._names[name] = (file, size)
        if replaces:
            self._rename(name, chance.choice(known))

    def _change(self, name: str) -> None:
        file, size = self._names[name]
        appends = self._chance.random() < 0.4
        flags = os.O_WRONLY | (os.O_APPEND if appends else 0)
        handle: list[int] = []
        if not self._do(lambda: handle.append(os.open(self._directory / name, flags)), do="open", name=name):
            return
        changed = self._fill(handle[0], file, size, appends=appends)
        if changed is None:
            self._names.pop(name, None)
        else:
            self._names[name] = (file, changed)

    def _fill(self, handle: int, file: str, size: int, *, appends: bool = False) -> int | None:
        """A few writes, perhaps an fsync in between; then close. The new size; None: not certain any more."""
        chance = self._chance
        certain = True
        for _ in range(chance.choice([1, 1, 2, 4])):
            length = chance.choice(self._sizes)
            if self._large and chance.random() < 0.03:
                length = LARGE_BYTES
            offset = size if appends or chance.random() < 0.5 else chance.randint(0, size)
            number = self._number + 1
            data = cells(file, number, offset, offset + length)
            if not self._do(lambda: _write_all(handle, data, None if appends else offset),  # noqa: B023 - called at once
                            do="write", file=file, offset=offset, length=length):  # fmt: skip
                certain = False
                break
            size = max(size, offset + length)
            if chance.random() < 0.4 and not self._do(lambda: os.fsync(handle), do="fsync", file=file):
                break
            if not appends and chance.random() < 0.1:
                size = chance.randint(0, size)
                if not self._do(lambda: os.ftruncate(handle, size), do="truncate", file=file, size=size):  # noqa: B023 - called at once
                    certain = False
                    break
        self._do(lambda: os.close(handle), do="close", file=file)
        return size if certain else None

    def _rename(self, name: str, new_name: str) -> None:
        if name == new_name:
            return
        done = self._do(
            lambda: os.rename(self._directory / name, self._directory / new_name),
            do="rename", name=name, new_name=new_name,
        )  # fmt: skip
        file = self._names.pop(name)
        self._names.pop(new_name, None)
        if done:
            self._names[new_name] = file

    def _sync_directory(self) -> None:
        handle = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _write_all(handle: int, data: bytes, offset: int | None) -> None:
    view = memoryview(data)
    while view:
        if offset is None:
            done = os.write(handle, view)
        else:
            done = os.pwrite(handle, view, offset)
            offset += done
        view = view[done:]


def main(arguments: Sequence[str]) -> None:
    writer = Writer(Path(arguments[0]), Path(arguments[1]), int(arguments[2]), arguments[3])

    def stop(*_: object) -> None:
        writer.stopped = True

    signal.signal(signal.SIGTERM, stop)
    try:
        writer.run()
    except Ended:
        return


if __name__ == "__main__":
    main(sys.argv[1:])
