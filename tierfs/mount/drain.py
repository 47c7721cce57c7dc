"""Bring what an earlier mount left behind into the store, without mounting anything."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import trio

from tierfs.config import Settings
from tierfs.control import registry
from tierfs.errors import ConfigError
from tierfs.mount.parts import Parts, open_parts
from tierfs.mount.recovery import recover
from tierfs.writeback.backlog import Failure, Totals

OnProgress = Callable[[int, int, int, int], None]
"""``(files before, bytes before, files left, bytes left)``"""


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """How it ended: what was waiting, what still is, and why."""

    files: int
    bytes: int
    remaining_files: int
    remaining_bytes: int
    remaining_deletes: int
    failures: list[Failure]


def drain(settings: Settings, *, timeout_s: float | None = None, on_progress: OnProgress) -> Drained:
    """Recover, publish, and stop again; nothing that fails is given up: it waits for the next mount.

    Blocks. Raises ``MountError`` if the file system is mounted or being drained, ``ConfigError`` if it was
    mounted read-only, and what ``open_parts`` raises if the store cannot be reached.
    """
    if settings.read_only:
        raise ConfigError(f"{settings.state_dir}: was mounted read-only, so there is nothing to drain")
    if not os.path.isdir(settings.state_dir):
        raise ConfigError(f"{settings.state_dir}: is not a directory")
    with registry.hold_state_dir(Path(settings.state_dir)):
        return trio.run(_drain, settings, timeout_s, on_progress)


async def _drain(settings: Settings, timeout_s: float | None, on_progress: OnProgress) -> Drained:
    async with AsyncExitStack() as stack:
        parts = await open_parts(settings, stack)
        await recover(parts)
        parts.nobody_reads()
        before = parts.publisher.backlog.totals()

        def progress(files: int, size_bytes: int) -> None:
            on_progress(before.files, before.bytes, files, size_bytes)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(parts.publisher.run)
            nursery.start_soon(parts.commits.run)
            nursery.start_soon(parts.rebuilder.run)
            with trio.move_on_after(float("inf") if timeout_s is None else timeout_s):
                await parts.rebuilder.finish()
                await parts.publisher.draining.drain(progress)
                await parts.commits.finish()
            # What is on its way cannot be waited for any longer.
            parts.store.stop_retrying()
            nursery.cancel_scope.cancel()
        return _result(parts, before)


def _unwritten(parts: Parts) -> list[Failure]:
    """Checkpoints of which the shards are in the store, and the manifest is not."""
    return [
        Failure(path.decode("utf-8", "backslashreplace"), f"no manifest yet: {message}", 1)
        for path, _, _, message in parts.commits.pending()
        if message
    ]


def _result(parts: Parts, before: Totals) -> Drained:
    left = parts.publisher.backlog.totals()
    return Drained(
        files=before.files,
        bytes=before.bytes,
        remaining_files=left.files,
        remaining_bytes=left.bytes,
        remaining_deletes=parts.deletions.pending(),
        failures=[*parts.publisher.failures.values(), *_unwritten(parts)],
    )
