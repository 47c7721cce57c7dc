"""Snapshots of an engine without a kernel: asked for as the control channel does, and looked at."""

from __future__ import annotations

import os

import trio

from tests.support.engine import ROOT_CALLER, Engine, drained
from tierfs.control.protocol import SnapshotCreateRequest, SnapshotDeleteRequest, SnapshotListRequest
from tierfs.mount.snapshots import SnapshotHandlers
from tierfs.types import ROOT_INO, Inode


async def make_snapshot(engine: Engine, name: str, path: str = "", **options: object) -> None:
    request = SnapshotCreateRequest(name=name.encode(), path=path.encode(), **options)  # type: ignore[arg-type]
    with trio.fail_after(60):
        await SnapshotHandlers(engine.parts).create(request, lambda progress: None)


async def delete_snapshot(engine: Engine, name: str) -> None:
    """It is deleted, and so is all that was kept for it."""
    handlers = SnapshotHandlers(engine.parts)
    await handlers.delete(SnapshotDeleteRequest(name=name.encode()), lambda progress: None)
    with trio.fail_after(60):
        while (await handlers.list_all(SnapshotListRequest(), lambda progress: None)).is_sweeping:
            await trio.sleep(0.01)
    await drained(engine)


async def find_in_snapshots(engine: Engine, path: str) -> Inode:
    """Below the directory of snapshots."""
    inode = await engine.names.lookup(ROOT_INO, b".tierfs")
    for name in ("snapshots", *path.split("/")):
        inode = await engine.names.lookup(inode.ino, name.encode())
    return inode


async def read_in_snapshots(engine: Engine, path: str) -> bytes:
    return await engine.read_file((await find_in_snapshots(engine, path)).ino)


async def overwrite(engine: Engine, inode: Inode, data: bytes) -> None:
    number = await engine.files.open(inode.ino, os.O_RDWR | os.O_TRUNC, ROOT_CALLER)
    await engine.files.write(number, 0, data)
    await engine.files.flush(number)
    await engine.files.release(number)


def kept_objects(engine: Engine) -> list[bytes]:
    """Bytes of the objects that are kept for snapshots."""
    below = engine.bucket / ".tierfs" / "snapshots"
    return sorted(path.read_bytes() for path in below.iterdir()) if below.is_dir() else []
