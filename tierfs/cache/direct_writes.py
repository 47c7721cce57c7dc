"""A staging file that others write into without passing here: it is lent, and looked at afterwards.

Built on ``Staging``. The kernel passes writes through to the file, so nobody tells of them. What has been
written is seen in size and mtime of the file, compared with those of the last look (``Staging.seen``); all
of the file counts as changed then. It is up to the caller to look before every answer that depends on it.
After a sync a store into a shared mapping shows in the mtime as well.

Trio thread only; ``is_open_elsewhere`` looks in a worker, all else blocks for as long as open(2), stat(2)
or utime(2) take. No await between a look and the use of what it found.

Raises ``OSError`` where it says so; a file that has gone is no change.
"""

from __future__ import annotations

import os

import trio

from tierfs.cache import device
from tierfs.cache.staging import Staging

_TICK_NS = 10_000_000


def identity(staging: Staging) -> tuple[int, int] | None:
    """(device, inode) of the file; None if it has gone. Blocks for as long as stat(2) takes."""
    try:
        return device.identity(_file(staging))
    except FileNotFoundError:
        return None


def lend(staging: Staging, mtime_ns: int) -> int | None:
    """A descriptor of the file, into which others may write from now on; None: it has not got all bytes.

    The caller closes it. It is not for writing, so that ``device.is_open_for_writing`` sees who writes.
    ``mtime_ns``: of the content, which the file gets. Blocks for as long as open(2) takes.
    """
    if staging.is_closed:
        return None
    if staging.overlay is not None and staging.overlay.any_absent(0, staging.size_bytes):
        return None
    try:
        begin(staging, mtime_ns)
        return device.open_to_lend(staging.dirty.path_of(staging.content_id))
    except OSError:
        return None


async def is_open_elsewhere(staging: Staging) -> bool:
    """Whether a file of an earlier run is open for writing: through a mount that died.

    May say so by mistake while another request uses the file. Raises ``TierFailed``.
    """
    entry = staging.dirty.entries[staging.content_id]
    if not entry.is_found:
        await trio.lowlevel.checkpoint()
        return False
    fd = staging.dirty.files.detach(staging.content_id)
    path = staging.dirty.path_of(staging.content_id)
    entry.is_found = await staging.dirty.call(device.close_and_look_for_writers, fd, path)
    return entry.is_found


def begin(staging: Staging, mtime_ns: int) -> None:
    """Others may write from now on. Raises ``OSError``."""
    if staging.is_direct:
        return
    file = _file(staging)
    os.utime(file, ns=(mtime_ns, mtime_ns))
    info = os.stat(file)
    staging.is_direct = True
    staging.seen = info.st_size, info.st_mtime_ns


def note_begun(staging: Staging, mtime_ns: int) -> None:
    """Others write already, into a file that was empty and had that mtime."""
    staging.is_direct = True
    staging.seen = 0, mtime_ns


def set_mtime(staging: Staging, mtime_ns: int) -> None:
    """Of the file. Raises ``OSError``."""
    if staging.seen is None or staging.seen[1] != mtime_ns:
        file = _file(staging)
        os.utime(file, ns=(mtime_ns, mtime_ns))
        if staging.seen is not None:
            # Should somebody have written just now, it cannot be seen any more.
            staging.doubt()
            staging.seen = staging.seen[0], os.stat(file).st_mtime_ns


def measure(staging: Staging) -> None:
    """What the file takes on the device by now. Blocks for as long as fstat(2) takes."""
    try:
        info = os.stat(_file(staging))
    except OSError:
        return  # gone, or trouble that the next request about it reports
    if (info.st_size, info.st_mtime_ns) != staging.seen:
        staging.dirty.note_written(staging.content_id)
    staging.dirty.set_allocated(staging.content_id, info.st_blocks * 512)


def notice(staging: Staging, mtime_ns: int) -> int | None:
    """Take in what others have written into the file.

    ``mtime_ns``: what is known of the content; a file that an earlier engine lent may have another.
    Returns its mtime if it has been changed since the last look, else None. All of it counts as changed.
    """
    if staging.is_closed:
        return None
    staging.is_direct = True
    try:
        info = os.stat(_file(staging))
    except FileNotFoundError:
        return None
    known = staging.seen or (staging.size_bytes, mtime_ns)
    staging.seen = info.st_size, info.st_mtime_ns
    if known == staging.seen:
        return None
    staging.note_rewritten(info.st_size, info.st_blocks * 512)
    if 0 < mtime_ns - info.st_mtime_ns < _TICK_NS:
        # The kernel's clock for files may be a tick behind ours: no reason for time to go backwards.
        return mtime_ns
    return info.st_mtime_ns


def _file(staging: Staging) -> int | str:
    """What stat(2) takes: a descriptor if there is one."""
    fd = staging.dirty.files.get(staging.content_id)
    return staging.dirty.path_of(staging.content_id) if fd is None else fd
