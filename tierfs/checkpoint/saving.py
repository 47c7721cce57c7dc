"""``save`` and ``wait``: what a training process calls. Standard library only, see the package docstring."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tierfs.checkpoint import ranks, sessions, working
from tierfs.errors import CheckpointError, ConfigError

NAME_MAX_BYTES = 255
LOOK_S = 0.2


class Saving(os.PathLike[str]):
    """The directory that a rank writes into: ``os.fspath(it)``, or ``it / name``."""

    def __init__(self, path: str, rank: int, world_size: int) -> None:
        self.path = Path(path)
        self.rank = rank
        self.world_size = world_size
        self.files: list[str] = []
        """What ``shard`` was asked for."""

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str | os.PathLike[str]) -> Path:
        return self.path / name

    def shard(self, name: str) -> Path:
        """The path of a file that this rank is about to write; the manifest will name the rank."""
        parts = Path(name).parts
        if os.path.isabs(name) or not parts or ".." in parts:
            raise ConfigError(f"checkpoint: a shard's name is relative, without '..': {name!r}")
        self.files.append(os.path.join(*parts))
        return self.path / name


@contextmanager
def save(
    directory: str | os.PathLike[str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    step: int | None = None,
    replace: bool = False,
    fsync: bool = True,
    timeout_s: float = 1800.0,
) -> Iterator[Saving]:
    """Save a checkpoint that is to be called ``directory``, on a tierfs mount; every rank calls this once.

    What is written into the directory that it gives becomes visible under the final name as a whole, when
    every rank has left the block, or not at all. Then it returns, in every rank: the bytes are safe on this
    node (``fsync`` False: against everything but a power cut), and on their way to the store; see ``wait``.
    ``step`` is noted in the manifest. ``replace``: what has that name is exchanged for it in one step.
    ``timeout_s``: how long the ranks wait for each other.

    Raises ``FileExistsError``; ``CheckpointError`` in every rank that is left if one fails or is killed;
    ``OSError``, ``ConfigError``.
    """
    final = os.path.abspath(os.fspath(directory))
    name = os.fsencode(os.path.basename(final))
    if not name or len(name) + len(f"..partial{working.DRAFT}") > NAME_MAX_BYTES:
        raise ConfigError(f"checkpoint: {final} is no name for a checkpoint, or too long")
    who = ranks.find(rank, world_size)
    session = sessions.begin(sessions.Order(final, step, replace, fsync, timeout_s), who)
    saving = Saving(session.path, who.rank, who.world_size)
    try:
        yield saving
    except BaseException as error:
        session.fail(error)
        raise
    session.finish(saving.files)


def state(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """How far a checkpoint is: ``state`` is ``saving``, ``local``, ``failed`` or ``in the store``.

    ``left``: files that are not in the store yet. ``message``: what went wrong last. Raises ``OSError``
    (ENODATA: that directory is no checkpoint).
    """
    told: dict[str, Any] = json.loads(os.getxattr(directory, working.REQUEST))
    return told


def wait(directory: str | os.PathLike[str], timeout_s: float | None = None) -> None:
    """Return when the store has a checkpoint, manifest included. Raises ``CheckpointError``, ``OSError``."""
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        told = state(directory)
        if told["state"] == "in the store":
            return
        if told["state"] == "failed":
            raise CheckpointError(f"{os.fspath(directory)}: {told.get('message', '')}")
        if deadline_s is not None and time.monotonic() > deadline_s:
            raise CheckpointError(
                f"{os.fspath(directory)}: not in the store after {timeout_s:g} s: "
                f"{told.get('left', 0)} files left; {told.get('message', '')}"
            )
        time.sleep(LOOK_S)
