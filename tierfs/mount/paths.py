"""Paths as the control channel has them: bytes relative to the mountpoint (empty: the mountpoint itself)."""

from __future__ import annotations

from tierfs.mount.parts import Parts
from tierfs.namespace import tree
from tierfs.types import Inode


async def resolve(parts: Parts, path: bytes) -> Inode:
    """The inode of a path, asking the bucket if need be. Raises ``NotFound``, ``StoreError``."""
    with parts.db.read() as txn:
        inode = tree.resolve(txn, b"")
    for name in filter(None, path.split(b"/")):
        inode = await parts.refresher.lookup(inode.ino, name)
    return inode


def text(path: bytes) -> str:
    """For an answer, a message or the log."""
    return path.decode("utf-8", "backslashreplace")
