"""An engine without a kernel: every part built as for a mount, on a directory store, driven by calls."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio
import trio.testing

from tierfs.config import Settings, TierSetting
from tierfs.fs.attributes import Attributes
from tierfs.fs.files import Files
from tierfs.fs.names import Names
from tierfs.fs.services import Caller
from tierfs.mount.parts import Parts, open_parts
from tierfs.mount.recovery import recover
from tierfs.store.base import ObjectStore
from tierfs.types import ROOT_INO, Inode

ROOT_CALLER = Caller(uid=0, gid=0, pid=1)
MIB = 1024 * 1024


@dataclass(slots=True, eq=False)
class Engine:
    """The parts, and the three faces of the file system."""

    parts: Parts
    names: Names
    files: Files
    attributes: Attributes
    bucket: Path

    async def write_file(self, path: str, data: bytes, *, parent: int = ROOT_INO) -> Inode:
        """Create or replace a file in ``parent`` and close it."""
        number, inode = await self.files.create(parent, path.encode(), 0o644, 2, ROOT_CALLER)
        await self.files.write(number, 0, data)
        await self.files.flush(number)
        await self.files.release(number)
        return inode

    async def read_file(self, ino: int, length: int = 64 * MIB, offset: int = 0) -> bytes:
        number = await self.files.open(ino, 0, ROOT_CALLER)
        try:
            return await self.files.read(number, offset, length)
        finally:
            await self.files.release(number)


def settings_for(root: Path, **changes: object) -> Settings:
    """Settings for a bucket, a state directory and one tier below ``root``."""
    (root / "bucket").mkdir(exist_ok=True)
    values: dict[str, object] = {
        "source": f"file://{root}/bucket",
        "mountpoint": f"{root}/mnt",
        "state_dir": f"{root}/state",
        "tiers": (TierSetting(name="nvme", path=f"{root}/tier", capacity_bytes=256 * MIB, volatile=False),),
        "upload_delay_s": 0.0,
        "store_timeout_s": 1.0,
    }
    (root / "state").mkdir(mode=0o700, exist_ok=True)
    return Settings(**{**values, **changes})  # type: ignore[arg-type]


@asynccontextmanager
async def running_engine(
    settings: Settings, *, publishing: bool = True, wrap: Callable[[ObjectStore], ObjectStore] | None = None
) -> AsyncIterator[Engine]:
    """Everything of a mount but the kernel. ``publishing`` False: nothing is uploaded by itself."""
    async with AsyncExitStack() as stack:
        parts = await open_parts(settings, stack, wrap=wrap)
        await recover(parts)
        names = Names(parts.services)
        files = Files(parts.services, names)
        engine = Engine(
            parts, names, files, Attributes(parts.services), Path(settings.source.removeprefix("file://"))
        )
        async with trio.open_nursery() as nursery:
            if publishing:
                nursery.start_soon(parts.publisher.run)
            parts.start(nursery)
            # Else what a test writes first may be taken for what an earlier run left behind: published at once.
            await trio.testing.wait_all_tasks_blocked()
            yield engine
            nursery.cancel_scope.cancel()


def objects_in(bucket: Path) -> dict[str, bytes]:
    """Every object that is no directory marker and not tierfs's own, by key."""
    found: dict[str, bytes] = {}
    for directory, _, names in os.walk(bucket):
        for name in names:
            path = Path(directory) / name
            key = str(path.relative_to(bucket))
            if not key.startswith(".tierfs"):
                found[key] = path.read_bytes()
    return found


async def drained(engine: Engine) -> None:
    """Wait until everything is in the bucket, and nothing waits to be deleted."""
    with trio.fail_after(60):
        assert await engine.parts.publisher.draining.drain()
