"""Pages of a listing as directory entries. Keys are untrusted text; pages come in any order.

Pure functions, callable from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tierfs.namespace.objects import RESERVED_PREFIX
from tierfs.store.base import ListPage
from tierfs.store.keys import decode_key
from tierfs.types import ObjectInfo


@dataclass(slots=True)
class DirectoryEntries:
    """What a listing shows of one directory. A name may be in both: then the directory wins."""

    files: dict[bytes, ObjectInfo] = field(default_factory=dict)
    dirs: set[bytes] = field(default_factory=set)
    marker: ObjectInfo | None = None
    """The object whose key is the directory's own, ``dir/``."""


@dataclass(slots=True)
class ParsedPages:
    """By path relative to the listed directory (b"": itself). Parents are always there.

    ``hidden``: keys that have no POSIX path, or do not belong to what was asked for.
    """

    directories: dict[bytes, DirectoryEntries] = field(default_factory=lambda: {b"": DirectoryEntries()})
    hidden: list[str] = field(default_factory=list)

    @property
    def top(self) -> DirectoryEntries:
        return self.directories[b""]


def parse_page(page: ListPage, prefix: str, *, is_root: bool) -> ParsedPages:
    """One page, with or without delimiter, below ``prefix`` (empty, or ending in ``/``).

    ``is_root``: this is the mount's root, where ``.tierfs/`` is not shown.
    """
    parsed = ParsedPages()
    for info in page.objects:
        _add_object(parsed, info, prefix, is_root)
    for shared in page.prefixes:
        _add_prefix(parsed, shared, prefix, is_root)
    return parsed


def _add_object(parsed: ParsedPages, info: ObjectInfo, prefix: str, is_root: bool) -> None:
    key = info.key
    if not key.startswith(prefix) or info.size_bytes < 0:
        parsed.hidden.append(key)
        return
    rest = key[len(prefix) :]
    if not rest:
        parsed.top.marker = info
        return
    if is_root and (rest.startswith(RESERVED_PREFIX) or rest == RESERVED_PREFIX[:-1]):
        return
    path = decode_key(rest)
    if path is None:
        parsed.hidden.append(key)
        _add_visible_parents(parsed, rest)
        return
    if path.endswith(b"/"):
        _directory(parsed, path[:-1]).marker = info
        return
    above, _, name = path.rpartition(b"/")
    _directory(parsed, above).files[name] = info


def _add_prefix(parsed: ParsedPages, shared: str, prefix: str, is_root: bool) -> None:
    rest = shared[len(prefix) :]
    if is_root and rest == RESERVED_PREFIX:
        return
    path = decode_key(rest) if shared.startswith(prefix) and rest.endswith("/") else None
    if not path or b"/" in path[:-1]:
        parsed.hidden.append(shared)
        return
    parsed.top.dirs.add(path[:-1])


def _directory(parsed: ParsedPages, path: bytes) -> DirectoryEntries:
    """The entries of that directory; it and those above are there afterwards."""
    found = parsed.directories.get(path)
    if found is None:
        found = parsed.directories[path] = DirectoryEntries()
        above, _, name = path.rpartition(b"/")
        _directory(parsed, above).dirs.add(name)
    return found


def _add_visible_parents(parsed: ParsedPages, rest: str) -> None:
    """``a/b//c`` has no path, but ``a/b/`` has: a listing with a delimiter would show it."""
    end = rest.rfind("/")
    while end > 0:
        path = decode_key(rest[:end])
        if path is not None and not path.endswith(b"/"):
            _directory(parsed, path)
            return
        end = rest.rfind("/", 0, end)
