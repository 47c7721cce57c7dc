"""Paths as the control channel has them: bytes relative to the mountpoint (empty: the mountpoint itself)."""

from __future__ import annotations

from tierfs.errors import InvalidArgument
from tierfs.mount.parts import Parts
from tierfs.namespace import schema, tree
from tierfs.types import Inode


async def resolve(parts: Parts, path: bytes) -> Inode:
    """The inode of a path, asking the bucket if need be. Raises ``NotFound``, ``StoreError``."""
    with parts.db.read() as txn:
        inode = tree.resolve(txn, b"")
    for name in filter(None, path.split(b"/")):
        inode = await parts.refresher.lookup(inode.ino, name)
    return inode


def outside_reserved(path: bytes, refusal: str) -> bytes:
    """``path`` without empty parts and dots. Raises ``InvalidArgument``: below .tierfs with ``refusal``."""
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise InvalidArgument("a path with .. in it")
    if parts and parts[0] == schema.RESERVED_NAME:
        raise InvalidArgument(refusal)
    return b"/".join(parts)


def text(path: bytes) -> str:
    """For an answer, a message or the log."""
    return path.decode("utf-8", "backslashreplace")
