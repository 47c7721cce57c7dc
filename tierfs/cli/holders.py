"""Which processes use a mount: for "busy" to say by whom.

Read from ``/proc`` alone: the links of ``cwd``, ``root``, ``exe`` and ``fd/*`` and the paths in ``maps`` are
text that the kernel keeps, so that a dead mount cannot hang the search.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from tierfs.mountpoint import is_below, mounts

MAX_USES = 3


@dataclass(frozen=True, slots=True)
class Holder:
    """One process. ``uses``: how, for example ``cwd /mnt/data/x``, a few of them."""

    pid: int
    command: str
    uses: tuple[str, ...]


def holders_of(mountpoint: str) -> list[Holder]:
    """Processes with anything of the mount open, but not this one. Another user's show only to root."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        uses = []
        for use in _uses(f"/proc/{name}", mountpoint):
            uses.append(use)
            if len(uses) == MAX_USES:
                break
        if uses:
            found.append(Holder(int(name), _command(name), tuple(uses)))
    return found


def mounts_below(mountpoint: str) -> list[str]:
    """Mountpoints below the mount: they keep it busy too."""
    return [mount.path for mount in mounts() if mount.path != mountpoint and is_below(mount.path, mountpoint)]


def _uses(process: str, mountpoint: str) -> Iterator[str]:
    for kind in ("cwd", "root", "exe"):
        path = _link(f"{process}/{kind}")
        if path is not None and is_below(path, mountpoint):
            yield f"{kind} {path}"
    try:
        descriptors = os.listdir(f"{process}/fd")
    except OSError:
        descriptors = []
    for descriptor in descriptors:
        path = _link(f"{process}/fd/{descriptor}")
        if path is not None and is_below(path, mountpoint):
            yield f"open {path}"
    yield from _mapped(process, mountpoint)


def _link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _mapped(process: str, mountpoint: str) -> Iterator[str]:
    seen = set()
    try:
        with open(f"{process}/maps", "rb") as file:
            for line in file:
                fields = line.split(None, 5)
                if len(fields) < 6 or not fields[5].startswith(b"/"):
                    continue
                path = os.fsdecode(fields[5].rstrip(b"\n").replace(b"\\012", b"\n"))
                if path not in seen and is_below(path, mountpoint):
                    seen.add(path)
                    yield f"mapped {path}"
    except OSError:
        return


def _command(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "?"
