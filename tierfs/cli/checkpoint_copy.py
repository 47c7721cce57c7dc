"""``tierfs checkpoint restore --into``: copy a checkpoint from the mount, with its checksums checked."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tierfs.errors import ConfigError

if TYPE_CHECKING:
    from tierfs.control.protocol import Failure, Progress

THREADS = 8
CHUNK_BYTES = 4 * 1024 * 1024
DRAFT = ".partial"


def check(into: str) -> None:
    """Raises ``ConfigError`` if the copy would meet something that is there."""
    for path in (into, into.rstrip("/") + DRAFT):
        if os.path.lexists(path):
            raise ConfigError(f"--into: {path} exists; give a directory that does not")
    if not os.path.isdir(os.path.dirname(os.path.abspath(into))):
        raise ConfigError(f"--into: {os.path.dirname(os.path.abspath(into))} is no directory")


def copy(
    directory: str, into: str, sums: Mapping[str, str], total_bytes: int, update: Callable[[Progress], None]
) -> list[Failure]:
    """Copy these files; returns what failed. ``into`` appears as a whole, or, if anything failed, not at all.

    ``sums``: xxh3-128 by path below ``directory``, as keys have it.
    """
    from tierfs.control.protocol import Failure, Progress
    from tierfs.store.keys import decode_key

    draft = into.rstrip("/") + DRAFT
    os.mkdir(draft)
    state = Progress(phase="copy", total_files=len(sums), total_bytes=total_bytes)
    lock = threading.Lock()

    def on_bytes(count: int) -> None:
        with lock:
            state.done_bytes += count
            update(state)

    def one(file: str) -> Failure | None:
        name = os.fsdecode(decode_key(file) or b"")
        try:
            found = _copy_file(os.path.join(directory, name), os.path.join(draft, name), on_bytes)
        except OSError as error:
            return Failure(path=name, message=error.strerror or str(error))
        with lock:
            state.done_files += 1
        if found != sums[file]:
            return Failure(path=name, message=f"its bytes have the checksum {found}, not {sums[file]}")
        return None

    with ThreadPoolExecutor(THREADS) as pool:
        failed = [failure for failure in pool.map(one, sums) if failure is not None]
    if not failed:
        os.rename(draft, into)
    return failed


def _copy_file(source: str, target: str, on_bytes: Callable[[int], None]) -> str:
    """Returns the xxh3-128 of what was copied."""
    import xxhash

    digest = xxhash.xxh3_128()
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(source, "rb", buffering=0) as reading, open(target, "xb", buffering=0) as writing:
        while chunk := reading.read(CHUNK_BYTES):
            digest.update(chunk)
            writing.write(chunk)
            on_bytes(len(chunk))
        os.fsync(writing.fileno())
    return digest.hexdigest()
