"""From a path on the command line to the engine that serves it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from tierfs.cli.exit_codes import NoMount
from tierfs.errors import ControlError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierfs.control.client import ControlClient
    from tierfs.control.registry import Found

ANSWER_TIMEOUT_S = 30.0
"""How long a command that only asks waits for the engine."""
NEXT_ENGINE_TIMEOUT_S = 10.0
POLL_S = 0.05
BATCH_PATHS = 20_000
BATCH_BYTES = 2 * 1024 * 1024

MountArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[PATH]", help="The mountpoint or a path inside it; without, the only mount there is."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def find(path: str | None) -> Found:
    """The mount that ``path`` lies on; raises ``NoMount``. Waits for an engine that is being replaced."""
    from tierfs.control import registry

    deadline = time.monotonic() + NEXT_ENGINE_TIMEOUT_S
    try:
        found = registry.find(path)
        while found.record is not None and found.record.is_between_engines() and time.monotonic() < deadline:
            time.sleep(POLL_S)
            found = registry.find(path)
        return found
    except ControlError as error:
        raise NoMount(str(error)) from None


@contextmanager
def engine_of(found: Found, *, timeout_s: float | None = None) -> Iterator[ControlClient]:
    """A connection to the engine of a mount. ``timeout_s``: how long it may be silent; None: for ever."""
    from tierfs.control.client import ControlClient

    if found.record is None:
        raise NoMount(
            f"{found.mountpoint}: this user has no record of the engine that serves it; "
            "ask the user who mounted it, or root"
        )
    if not found.record.is_running():
        raise NoMount(
            f"{found.mountpoint}: its engine (pid {found.record.pid}) is gone; 'tierfs umount' or the next "
            f"'tierfs mount' clears the dead mount away; its log is {found.record.log_path}"
        )
    with ControlClient(found.record.socket_path, timeout_s=timeout_s) as client:
        yield client


def group(paths: Sequence[str]) -> list[tuple[Found, list[bytes]]]:
    """``paths`` by the mount they lie on, relative to its root."""
    mounts: dict[str, tuple[Found, list[bytes]]] = {}
    for path in paths:
        found = find(path)
        mounts.setdefault(found.mountpoint, (found, []))[1].append(found.relative)
    return list(mounts.values())


def batches(paths: Sequence[bytes]) -> Iterator[list[bytes]]:
    """``paths`` in parts that fit into one request."""
    batch: list[bytes] = []
    batch_bytes = 0
    for path in paths:
        if batch and (len(batch) >= BATCH_PATHS or batch_bytes + len(path) > BATCH_BYTES):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(path)
        batch_bytes += len(path)
    if batch:
        yield batch


def shown(found: Found, relative: bytes) -> str:
    """The path as the user would write it."""
    return os.path.join(found.mountpoint, os.fsdecode(relative)) if relative else found.mountpoint
