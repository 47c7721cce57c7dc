"""Mode, owner and time in an object's user metadata, under the names that s3fs and rclone use.

``mode`` (decimal, with the file type), ``uid``, ``gid``, ``mtime`` (seconds, with or without a fraction).
Untrusted: what does not parse is as if it were not there.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass

from tierfs.types import Inode

_TYPES = frozenset(
    (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK)
)
_TIME = re.compile(r"(\d{1,10})(?:\.(\d{1,12}))?")


@dataclass(frozen=True, slots=True)
class Attributes:
    """None: the metadata do not say. ``mode`` has a file type (a regular file where none was given)."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    mtime_ns: int | None = None


def attributes_of(metadata: Mapping[str, str] | None) -> Attributes:
    """What user metadata (lower-case names) say about a file."""
    if not metadata:
        return Attributes()
    mode = _number(metadata.get("mode"), 0o177777)
    if mode is not None:
        kind = stat.S_IFMT(mode) or stat.S_IFREG
        mode = kind | stat.S_IMODE(mode) if kind in _TYPES else None
    return Attributes(
        mode=mode,
        uid=_number(metadata.get("uid"), 2**32 - 2),
        gid=_number(metadata.get("gid"), 2**32 - 2),
        mtime_ns=_time_ns(metadata.get("mtime")),
    )


def metadata_of(inode: Inode) -> dict[str, str]:
    """What ``attributes_of`` reads back."""
    seconds, nanoseconds = divmod(inode.mtime_ns, 1_000_000_000)
    return {
        "mode": str(inode.mode),
        "uid": str(inode.uid),
        "gid": str(inode.gid),
        "mtime": f"{seconds}.{nanoseconds:09d}",
    }


def _number(text: str | None, highest: int) -> int | None:
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 10:
        return None
    number = int(text)
    return number if number <= highest else None


def _time_ns(text: str | None) -> int | None:
    match = _TIME.fullmatch(text) if text is not None else None
    if match is None:
        return None
    return int(match[1]) * 1_000_000_000 + int((match[2] or "").ljust(9, "0")[:9])
