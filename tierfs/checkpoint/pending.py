"""Checkpoints whose manifest is still to be written: one file each in the state directory.

A request is kept before it is answered, so that it outlives the process that made it, the engine, and the
mount. So are the directories that are being written, whose uploads had better wait until they have their
final name. Worker threads only; ``load`` before the mount is up.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

log = structlog.get_logger(__name__)

T = TypeVar("T", bound="Pending | Held")


class PendingFile(msgspec.Struct, frozen=True, kw_only=True):
    """``file``: path below the directory, as a key has it. ``rank``: who wrote it, if it said so."""

    file: str
    rank: int | None = None


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a manifest: these files of directory ``ino``, whatever else comes into it later.

    ``working_name``: while the name of the directory begins with it, it is not published (``working`` adds
    something before it is begun, and before it is removed); empty: it never had one.
    ``node`` of ``nodes``: which part of the checkpoint this is; the first writes the manifest.
    """

    save_id: str
    ino: int
    working_name: str
    step: int | None
    created_ns: int
    world_size: int
    files: tuple[PendingFile, ...]
    node: int = 0
    nodes: int = 1

    def is_published_as(self, name: str) -> bool:
        return not self.working_name or not name.startswith(self.working_name)


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A directory that is being written, as long as its name begins with that one."""

    ino: int
    working_name: str
    since_ns: int

    def is_named(self, name: str) -> bool:
        return name.startswith(self.working_name)


class PendingFiles:
    """See the module docstring. ``directory`` is private to one mount."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def load(self) -> tuple[list[Pending], list[Held]]:
        """What an earlier run has left."""
        return self._load("commit-", Pending), self._load("held-", Held)

    def _load(self, start: str, kind: type[T]) -> list[T]:
        found: list[T] = []
        for path in sorted(self._directory.glob(f"{start}*.json")):
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=kind))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                log.error("a note about a checkpoint cannot be read, and is left alone", path=str(path),
                          reason=str(error))  # fmt: skip
        return found

    def put(self, record: Pending | Held) -> None:
        """Durable when this returns. Raises ``OSError``."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._path(record)
        draft = path.with_suffix(".new")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        above = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(above)
        finally:
            os.close(above)

    def remove(self, record: Pending | Held) -> None:
        """It is done, or not wanted any more. A power cut may bring it back: doing it twice does no harm."""
        self._path(record).unlink(missing_ok=True)

    def _path(self, record: Pending | Held) -> Path:
        name = f"commit-{record.save_id}" if isinstance(record, Pending) else f"held-{record.ino}"
        return self._directory / f"{name}.json"
