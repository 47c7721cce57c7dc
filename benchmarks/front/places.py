"""What is measured on: one set of files as a plain directory, and mounts of that directory.

The plain directory is the store of the mounts (a directory store), and lies on the same disk as their tier:
two copies of the same bytes on one file system are compared, one opened directly and one through the front.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.mounted import Mounted, fresh_mount
from tierfs.bench import daemons
from tierfs.bench.files import FileSet, large_files, make_files, small_files
from tierfs.errors import BenchFailed

MIB = 1024 * 1024
KEPT = ("--ttl", "86400", "--front", "native")
"""What the bucket said is believed for longer than a run takes."""
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
SHARED_MEMORY = Path("/dev/shm")
LOCAL_LIMIT_S = 120.0
FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_TOPDIR_FL = 0x80086601, 0x40086602, 0x00020000
"""Source: Linux ``include/uapi/linux/fs.h``, 64 bits."""


@dataclass(frozen=True)
class Scale:
    """How much is measured, and for how long at most."""

    rounds: int = 5
    limit_s: float = 1200.0
    large_bytes: int = 1024 * MIB
    random_reads: int = 8000
    fio_s: float = 1.0
    small_count: int = 20_000
    stat_count: int = 10_000
    listed_count: int = 100_000
    made_count: int = 4000
    shards: int = 8
    shard_bytes: int = 256 * MIB
    hits_s: float = 2.0
    cost_s: float = 1.0
    namespace_counts: tuple[int, ...] = (1000, 10_000, 100_000, 1_000_000, 10_000_000)
    namespace_samples: int = 20_000
    transport_calls: int = 20_000
    pause_s: float = 1.0


QUICK = Scale(
    rounds=2,
    limit_s=180.0,
    large_bytes=256 * MIB,
    random_reads=2000,
    fio_s=0.3,
    small_count=4000,
    stat_count=4000,
    listed_count=20_000,
    made_count=800,
    shards=4,
    shard_bytes=64 * MIB,
    hits_s=1.0,
    cost_s=0.3,
    namespace_counts=(1000, 10_000, 100_000),
    namespace_samples=5000,
    transport_calls=4000,
    pause_s=0.3,
)
TINY = Scale(
    rounds=1,
    limit_s=600.0,
    large_bytes=4 * MIB,
    random_reads=50,
    fio_s=0.1,
    small_count=40,
    stat_count=20,
    listed_count=60,
    made_count=16,
    shards=2,
    shard_bytes=MIB,
    hits_s=0.1,
    cost_s=0.05,
    namespace_counts=(1000,),
    namespace_samples=50,
    transport_calls=100,
    pause_s=0.0,
)


@dataclass(frozen=True)
class Data:
    """The files, as they lie in the plain directory; ``at(mountpoint)`` is the same through a mount."""

    large: FileSet
    small: FileSet
    listed: FileSet

    def at(self, root: Path) -> Data:
        return Data(
            self.large.at(str(root / "large")),
            self.small.at(str(root / "small")),
            self.listed.at(str(root / "listed")),
        )


def make_data(scale: Scale, plain: Path) -> Data:
    """Write all of it. Raises OSError."""
    large = large_files(str(plain / "large"), 1, scale.large_bytes)
    small = small_files(
        str(plain / "small"), scale.small_count, low_bytes=4 * 1024, high_bytes=100 * 1024, per_directory=200
    )
    listed = small_files(
        str(plain / "listed"), scale.listed_count, low_bytes=0, high_bytes=0, per_directory=1000
    )
    for files in (large, small, listed):
        make_files(files, sync=False)
    os.sync()
    return Data(large, small, listed)


@dataclass(frozen=True)
class Place:
    """A mount that is up, and the files seen through it."""

    mounted: Mounted
    data: Data
    front_pid: int
    engine_pid: int

    def cpu_s(self) -> float:
        """Processor time of front and engine so far."""
        return sum(daemons.cpu_s(pid) or 0.0 for pid in (self.front_pid, self.engine_pid))


@contextlib.contextmanager
def mounted(
    data: Data,
    plain: Path,
    work_dir: Path,
    *,
    tier_bytes: int,
    options: Sequence[str] = (),
    local: Sequence[str] = (),
) -> Iterator[Place]:
    """A new mount of the plain directory, with these of its directories in the tier."""
    work_dir.mkdir(parents=True, exist_ok=True)
    with fresh_mount(
        str(plain), work_dir / "mnt", work_dir, tier_bytes=tier_bytes, options=(*KEPT, *options)
    ) as mount:
        status = mount.status()
        place = Place(
            mount, data.at(mount.mountpoint), int(status["front"]["pid"]), int(status["engine"]["pid"])
        )
        for name in local:
            make_local(place, name)
        yield place


def make_local(place: Place, name: str) -> None:
    """Bring a directory into the tier, and wait until the store is not asked for it any more.

    Raises BenchFailed.
    """
    place.mounted.command("prefetch", str(place.mounted.mountpoint / name), "--wait")
    paths = (place.data.large if name == "large" else place.data.small).paths()
    give_up_s = time.monotonic() + LOCAL_LIMIT_S
    while True:
        before = _fetched_bytes(place)
        for path in paths:
            with open(path, "rb", buffering=0) as file:
                while file.read(MIB):
                    pass
        time.sleep(0.3)  # a file that was just completed is passed through from its next open on
        if _fetched_bytes(place) == before:
            return
        if time.monotonic() > give_up_s:
            raise BenchFailed(f"{name} does not become local: the store is still asked for it")


def _fetched_bytes(place: Place) -> int:
    return int(place.mounted.status()["store"]["bytes_read"])


def may_drop() -> bool:
    """Dropping the kernel's caches needs root."""
    return os.geteuid() == 0


def drop() -> None:
    """Data, dentries and inodes, of everybody; what is not written back stays.

    Raises BenchFailed where that is not allowed.
    """
    if not may_drop():
        raise BenchFailed("dropping the caches of the kernel needs root")
    DROP_CACHES.write_text("3\n")


@contextlib.contextmanager
def unused_groups(work_dir: Path) -> Iterator[Path]:
    """A new directory whose subdirectories ext4 puts far from others: nothing was removed there lately.

    For minutes after a file was removed ext4 does not use its inode again, and looks at each of those for
    every file that is created in the same block group (``recently_deleted``, Linux ``fs/ext4/ialloc.c``).
    After a few thousand, creating a file takes 500 instead of 20 microseconds of processor time, in a plain
    directory as in a tier. Other file systems have no such flag, and need none.
    """
    directory = Path(tempfile.mkdtemp(prefix="changes-", dir=work_dir))
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            flags = bytearray(8)
            fcntl.ioctl(descriptor, FS_IOC_GETFLAGS, flags)
            wanted = int.from_bytes(flags, sys.byteorder) | FS_TOPDIR_FL
            fcntl.ioctl(descriptor, FS_IOC_SETFLAGS, wanted.to_bytes(8, sys.byteorder))
        except OSError:
            pass  # not ext4
        finally:
            os.close(descriptor)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def on_tmpfs() -> Iterator[Path]:
    """A new directory on a tmpfs."""
    with tempfile.TemporaryDirectory(prefix="tierfs-front-", dir=SHARED_MEMORY) as directory:
        yield Path(directory)
