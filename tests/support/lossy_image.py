"""A file tree in memory that knows what of it a power cut would leave: the model below ``lossy_disk``.

What counts as durable, and when:

* ``fsync`` of a file: its bytes, size and mtime as they are then. Its name is not: POSIX does not say so.
* ``fsync`` of a directory: every change of names up to the last one in that directory, in their order, as a
  journal commits them.
* all else: perhaps. ``cut`` draws, from a seed, how much of it had reached the device by itself: of the names a
  part from the beginning, since journals keep their order and a rename whole; of each file any set of its
  writes, cut up into pages, since nothing orders those.

Numbers of inodes are never used again. No locks: one thread.
"""

from __future__ import annotations

import random
import stat
import time
from dataclasses import dataclass, field

ROOT = 1
PAGE_BYTES = 4096

Change = tuple[int, bytes] | tuple[int, None]
"""(offset, bytes written there), or (size, None): cut off or extended to that size."""
NameChange = list[tuple[int, bytes, int]]
"""One atomic change of names: (directory, name, inode; 0: the name goes)."""


@dataclass(slots=True)
class Node:
    """A file, a symbolic link (``current`` is its target) or a directory."""

    number: int
    mode: int
    mtime_ns: int
    uid: int = 0
    gid: int = 0
    nlink: int = 1
    parent: int = ROOT
    current: bytearray = field(default_factory=bytearray)
    entries: dict[bytes, int] = field(default_factory=dict)
    durable: bytearray = field(default_factory=bytearray)
    durable_mtime_ns: int = 0
    pending: list[Change] = field(default_factory=list)

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)


def _apply(content: bytearray, change: Change) -> None:
    place, data = change
    if data is None:
        if place < len(content):
            del content[place:]
        else:
            content.extend(bytes(place - len(content)))
        return
    if place > len(content):
        content.extend(bytes(place - len(content)))
    content[place : place + len(data)] = data


def _pages(change: Change) -> list[Change]:
    """The parts of one write that a device may have without the others."""
    place, data = change
    if data is None:
        return [change]
    parts: list[Change] = []
    at = 0
    while at < len(data):
        length = PAGE_BYTES - (place + at) % PAGE_BYTES
        parts.append((place + at, data[at : at + length]))
        at += length
    return parts


class LossyImage:
    """See the module docstring. The adapter looks at ``nodes`` and changes them by these methods only."""

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {ROOT: Node(ROOT, stat.S_IFDIR | 0o755, time.time_ns(), nlink=2)}
        self._last = ROOT
        self._durable_names: dict[int, dict[bytes, int]] = {ROOT: {}}
        self._log: list[NameChange] = []

    # -- names

    def add(self, parent: int, name: bytes, mode: int, uid: int, gid: int, target: bytes = b"") -> Node:
        self._last += 1
        now_ns = time.time_ns()
        node = Node(self._last, mode, now_ns, uid, gid, 2 if stat.S_ISDIR(mode) else 1, parent)
        node.current += target
        node.durable += target
        node.durable_mtime_ns = now_ns
        self.nodes[node.number] = node
        self._rename([(parent, name, node.number)])
        return node

    def link(self, number: int, parent: int, name: bytes) -> None:
        self.nodes[number].nlink += 1
        self._rename([(parent, name, number)])

    def remove(self, parent: int, name: bytes) -> None:
        self._lose(self.nodes[self.nodes[parent].entries[name]])
        self._rename([(parent, name, 0)])

    def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes) -> None:
        """Replaces what is there."""
        number = self.nodes[parent].entries[name]
        old = self.nodes[new_parent].entries.get(new_name)
        if old == number:
            return
        if old is not None:
            self._lose(self.nodes[old])
        self._rename([(parent, name, 0), (new_parent, new_name, number)])
        self.nodes[number].parent = new_parent

    def exchange(self, parent: int, name: bytes, new_parent: int, new_name: bytes) -> None:
        first, second = self.nodes[parent].entries[name], self.nodes[new_parent].entries[new_name]
        self._rename([(parent, name, second), (new_parent, new_name, first)])

    def _lose(self, node: Node) -> None:
        node.nlink = 0 if node.is_dir else node.nlink - 1

    def _rename(self, change: NameChange) -> None:
        for parent, name, number in change:
            entries = self.nodes[parent].entries
            if number:
                entries[name] = number
            else:
                del entries[name]
            self.nodes[parent].mtime_ns = time.time_ns()
        self._log.append(change)

    # -- bytes

    def write(self, number: int, offset: int, data: bytes) -> None:
        self._change(number, (offset, data))

    def truncate(self, number: int, size: int) -> None:
        self._change(number, (size, None))

    def _change(self, number: int, change: Change) -> None:
        node = self.nodes[number]
        _apply(node.current, change)
        node.pending.append(change)
        node.mtime_ns = time.time_ns()

    # -- durability

    def sync_file(self, number: int) -> None:
        node = self.nodes[number]
        for change in node.pending:
            _apply(node.durable, change)
        node.pending.clear()
        node.durable_mtime_ns = node.mtime_ns

    def sync_directory(self, number: int) -> None:
        last = max(
            (i for i, change in enumerate(self._log) if any(p == number for p, _, _ in change)), default=-1
        )
        for change in self._log[: last + 1]:
            _record(self._durable_names, change)
        del self._log[: last + 1]

    def cut(self, seed: int) -> LossyImage:
        """What is there after a power cut at this moment. This image is not used any more."""
        chance = random.Random(seed)
        kept = chance.choice([0, len(self._log), chance.randint(0, len(self._log))])
        for change in self._log[:kept]:
            _record(self._durable_names, change)
        after = LossyImage()
        after._last = self._last
        seen = {ROOT}
        waiting = [ROOT]
        while waiting:
            parent = waiting.pop()
            entries = dict(self._durable_names.get(parent, {}))
            after.nodes[parent].entries = entries
            after._durable_names[parent] = dict(entries)
            for number in entries.values():
                if number in seen:
                    after.nodes[number].nlink += 1
                    continue
                seen.add(number)
                after.nodes[number] = self._survivor(number, parent, chance)
                if after.nodes[number].is_dir:
                    waiting.append(number)
        return after

    def _survivor(self, number: int, parent: int, chance: random.Random) -> Node:
        old = self.nodes[number]
        content, mtime_ns = bytearray(old.durable), old.durable_mtime_ns
        part = chance.choice([0.0, 0.0, 0.5, 1.0, chance.random()])
        for change in old.pending:
            for page in _pages(change):
                if chance.random() < part:
                    _apply(content, page)
        if old.pending and part == 1.0:
            mtime_ns = old.mtime_ns
        nlink = 2 if old.is_dir else 1
        return Node(number, old.mode, mtime_ns, old.uid, old.gid, nlink, parent, content, {},
                    bytearray(content), mtime_ns)  # fmt: skip


def _record(names: dict[int, dict[bytes, int]], change: NameChange) -> None:
    for parent, name, number in change:
        if number:
            names.setdefault(parent, {})[name] = number
        else:
            names.setdefault(parent, {}).pop(name, None)
