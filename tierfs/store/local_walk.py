"""Listing a directory store page by page, in time linear in what is listed.

A walk visits names in byte order, depth first, and can be continued in two ways. Usually the live walk of
the previous page is still kept under its token, and nothing is read twice. If it has expired, or the token
comes from another process, a new walk is started behind the last key of the token; that costs one more
scan of each directory on the way. Keeping a cursor of the operating system open instead would be cheaper
still, but cannot be resumed, and telldir cookies are not stable across changes on every file system.

Names of one directory are kept as one bytes object (about 10 MB for half a million names), not as a list.

Symbolic links to files inside the store are objects; all other links, and special files, are not listed.
"""

from __future__ import annotations

import itertools
import os
import secrets
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tierfs.store.base import ListPage
from tierfs.store.keys import decode_key, encode_path
from tierfs.types import ObjectInfo

HIDDEN_DIR = b".tierfs"
RESERVED = frozenset({b"tmp", b"uploads", b"meta", b"lock"})
"""What this store itself keeps below ``.tierfs/``; everything else there is an ordinary object."""

_KEPT_WALKS = 64
_KEPT_S = 120.0
_FILE, _DIR, _LINK = 70, 68, 76  # "F", "D", "L": the byte before each name

StatLink = Callable[[bytes], os.stat_result | None]
MarkerOf = Callable[[bytes], ObjectInfo | None]


def etag_of(status: os.stat_result) -> str:
    """Identity of a file's content: another inode, time or size is another version."""
    if stat.S_ISDIR(status.st_mode):
        return f"d-{status.st_ino:x}"
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"


def info_of(key: str, status: os.stat_result) -> ObjectInfo:
    size_bytes = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
    return ObjectInfo(key, size_bytes, etag_of(status), status.st_mtime_ns)


class _Kept(NamedTuple):
    """A walk between two pages; ``pending`` was read to know that there is another page."""

    deadline: float
    pending: ObjectInfo | str | None
    walk: Iterator[ObjectInfo | str]


class Walker:
    """Answers ``list_page`` for one directory; thread-safe.

    ``marker_of(path)`` says whether a directory (relative, ending in ``/``) is an object of its own.
    ``stat_link(path)`` is the status of what a symbolic link leads to, if that is a file inside the store.
    ``on_skipped(path, reason)`` hears of directories that could not be read.
    """

    def __init__(self, root: bytes, *, marker_of: MarkerOf, stat_link: StatLink,
                 on_skipped: Callable[[bytes, str], None],
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._marker_of = marker_of
        self._stat_link = stat_link
        self._on_skipped = on_skipped
        self._clock = clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._lock = threading.Lock()

    def page(self, prefix: str, recursive: bool, token: str | None, limit: int) -> ListPage:
        """Raises OSError if the directory of the prefix itself cannot be read."""
        kept = self._take(token)
        if kept is None:
            after = None if token is None else token.partition(":")[2]
            kept = _Kept(0.0, None, self._walk(prefix, recursive, after))
        objects: list[ObjectInfo] = []
        prefixes: list[str] = []
        last = ""
        walk = kept.walk if kept.pending is None else itertools.chain((kept.pending,), kept.walk)
        for entry in walk:
            if len(objects) + len(prefixes) == limit:
                return ListPage(objects, prefixes, self._keep(entry, kept.walk, last))
            if isinstance(entry, str):
                prefixes.append(entry)
                last = entry
            else:
                objects.append(entry)
                last = entry.key
        return ListPage(objects, prefixes, None)

    def _take(self, token: str | None) -> _Kept | None:
        if token is None:
            return None
        with self._lock:
            kept = self._kept.pop(token.partition(":")[0], None)
        return kept if kept is not None and kept.deadline > self._clock() else None

    def _keep(self, pending: ObjectInfo | str, walk: Iterator[ObjectInfo | str], last: str) -> str:
        name = secrets.token_hex(8)
        now = self._clock()
        with self._lock:
            self._kept[name] = _Kept(now + _KEPT_S, pending, walk)
            while len(self._kept) > _KEPT_WALKS or next(iter(self._kept.values())).deadline <= now:
                self._kept.popitem(last=False)
        return f"{name}:{last}"

    def _walk(self, prefix: str, recursive: bool, after: str | None) -> Iterator[ObjectInfo | str]:
        """Entries below ``prefix`` whose key is past ``after`` in walk order."""
        base_key = prefix[: prefix.rfind("/") + 1]
        base = decode_key(base_key)
        if base is None or (base and not _is_real_directory(self._root, base)):
            return iter(())
        names = _scan(self._root, base)  # raises here, on the first page, not in the middle
        return self._top(base, names, recursive, prefix[len(base_key):],
                         None if after is None else after[len(base_key):])

    def _top(self, directory: bytes, names: bytes, recursive: bool, starts_with: str,
             after: str | None) -> Iterator[ObjectInfo | str]:
        if directory and not starts_with and after is None:
            marker = self._marker_of(directory)
            if marker is not None:
                yield marker
        yield from self._entries(directory, names, recursive, starts_with, after or "")

    def _entries(self, directory: bytes, names: bytes, recursive: bool, starts_with: str,
                 after: str) -> Iterator[ObjectInfo | str]:
        """``starts_with`` filters names of this directory; ``after`` is relative to it, "" for all."""
        key = encode_path(directory)
        skip_until = decode_key(after) or b""
        skip_name, _, skip_below = skip_until.partition(b"/")
        for kind, name in _names(names):
            if skip_name and name < skip_name:
                continue
            here_before = name == skip_name
            if starts_with and not encode_path(name).startswith(starts_with):
                continue
            if kind == _DIR:
                if here_before and not recursive:
                    continue
                below = directory + name + b"/"
                if not recursive:
                    if below != HIDDEN_DIR + b"/" or _has_public_names(self._root):
                        yield key + encode_path(name) + "/"
                    continue
                yield from self._subtree(below, encode_path(skip_below) if here_before else None)
                continue
            if here_before:
                continue
            status = self._status(directory + name, kind)
            if status is not None:
                yield info_of(key + encode_path(name), status)

    def _subtree(self, below: bytes, after: str | None) -> Iterator[ObjectInfo | str]:
        """A directory met on a recursive walk; ``after`` None: not yet begun."""
        if after is None:
            marker = self._marker_of(below)
            if marker is not None:
                yield marker
        try:
            names = _scan(self._root, below)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            self._on_skipped(below, error.strerror or "unreadable")
            return
        yield from self._entries(below, names, True, "", after or "")

    def _status(self, path: bytes, kind: int) -> os.stat_result | None:
        if kind == _LINK:
            return self._stat_link(path)
        try:
            status = os.stat(self._root + b"/" + path, follow_symlinks=False)
        except OSError:
            return None  # removed since the scan
        return status if stat.S_ISREG(status.st_mode) else None


def _scan(root: bytes, directory: bytes) -> bytes:
    """The sorted names of a directory, each behind its kind and ended by NUL."""
    found: list[bytes] = []
    in_hidden = directory == HIDDEN_DIR + b"/"
    with os.scandir(root + b"/" + directory) as entries:
        for entry in entries:
            if in_hidden and entry.name in RESERVED:
                continue
            if entry.is_file(follow_symlinks=False):
                found.append(entry.name + b"\0F")
            elif entry.is_dir(follow_symlinks=False):
                found.append(entry.name + b"\0D")
            elif entry.is_symlink():
                found.append(entry.name + b"\0L")
    found.sort()
    return b"\0".join(found)


def _names(names: bytes) -> Iterator[tuple[int, bytes]]:
    start = 0
    while start < len(names):
        end = names.index(b"\0", start)
        yield names[end + 1], names[start:end]
        start = end + 3


def _has_public_names(root: bytes) -> bool:
    try:
        return bool(_scan(root, HIDDEN_DIR + b"/"))
    except OSError:
        return False


def _is_real_directory(root: bytes, directory: bytes) -> bool:
    """False if a component is missing, is no directory, or is a symbolic link."""
    path = root
    for part in directory.rstrip(b"/").split(b"/"):
        path += b"/" + part
        try:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                return False
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True
