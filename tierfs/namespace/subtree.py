"""A directory that the bucket does not show any more: everything below goes, except what is only here."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from tierfs.namespace import publish, records
from tierfs.namespace.listing import Changes, Listing, forget_name, is_removable, keep, key_in, note_changed
from tierfs.namespace.transaction import WriteTransaction

_BATCH = 256


@dataclass(slots=True)
class _Level:
    ino: int
    prefix: str
    after_seq: int = 0


def remove_directory(txn: WriteTransaction, ino: int, listing: Listing, limit: int) -> tuple[Changes, bool]:
    """Remove a directory that ``listing`` did not show, looking at no more than ``limit`` entries.

    False: call again. What is dirty, on its way to another key, or confirmed by the store after the listing
    began stays, and so do the directories above it.
    """
    changes = Changes()
    inode = records.find_inode(txn, ino)
    if inode is None or not inode.nlink or inode.valid_until_ns >= listing.valid_until_ns:
        return changes, True
    stack = [_Level(ino, publish.key_of(txn, ino)[0])]
    looked_at = 0
    while stack:
        level = stack[-1]
        entries = list(islice(records.iter_entries(txn, level.ino, level.after_seq), _BATCH))
        if not entries:
            stack.pop()
            _remove_if_empty(txn, level, listing, changes)
            continue
        for seq, name, child_ino, _ in entries:
            if looked_at >= limit:
                return changes, False
            looked_at += 1
            level.after_seq = seq
            child = records.find_inode(txn, child_ino)
            if child is None:
                continue
            key = key_in(level.prefix, name, child.is_dir)
            if child.is_dir:
                stack.append(_Level(child_ino, key))
                break
            if child.valid_until_ns < listing.valid_until_ns:
                if is_removable(txn, child, key, listing):
                    forget_name(txn, level.ino, name, seq, child, listing, changes)
                else:
                    keep(txn, child, listing)
    return changes, True


def _remove_if_empty(txn: WriteTransaction, level: _Level, listing: Listing, changes: Changes) -> None:
    inode = records.find_inode(txn, level.ino)
    found = records.first_name(txn, level.ino)
    if inode is None or found is None or inode.valid_until_ns >= listing.valid_until_ns:
        return
    if records.has_entries(txn, level.ino) or not is_removable(txn, inode, level.prefix, listing):
        keep(txn, inode, listing)
        return
    parent_ino, name = found
    entry = records.find_entry(txn, parent_ino, name)
    if entry is not None:
        forget_name(txn, parent_ino, name, entry[1], inode, listing, changes)
        note_changed(txn, parent_ino, listing, -1)
