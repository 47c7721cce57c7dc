"""Exactly once: the engine commits a change and dies before it can say so; the application sees success.

Without the numbers of ``tierfs.fs.repeats`` each of these would be a false EEXIST or ENOENT, or done twice.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.front import engine_pid, kill_engine
from tests.support.mount import Mounted, MountFactory, wait_until
from tests.support.posix import RENAME_EXCHANGE, RENAME_NOREPLACE, renameat2

pytestmark = pytest.mark.needs_fuse

Change = Callable[[Path], None]
Check = Callable[[Path], object]


def make(path: Path, flags: int = 0) -> None:
    """open(2) that creates, write, close: the handle of the repeated request has to work."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | flags, 0o640)
    try:
        assert os.write(descriptor, b"made") == 4
        assert os.pread(descriptor, 9, 0) == b"made"
    finally:
        os.close(descriptor)


def unlink_open(directory: Path) -> None:
    descriptor = os.open(directory / "f", os.O_RDONLY)
    try:
        os.unlink(directory / "f")
        assert os.fstat(descriptor).st_nlink == 0
        assert os.read(descriptor, 9) == b"F"
    finally:
        os.close(descriptor)


CASES: dict[str, tuple[Change, Check, object]] = {
    # what the application does, what it looks at then, what it must see. There are f (F), g (G) and an empty d.
    "mknod": (lambda d: os.mknod(d / "new", 0o010640), lambda d: (d / "new").stat().st_mode, 0o010640),
    "mkdir": (lambda d: os.mkdir(d / "new"), lambda d: ((d / "new").is_dir(), d.stat().st_nlink), (True, 4)),
    "symlink": (lambda d: os.symlink("f", d / "new"), lambda d: os.readlink(d / "new"), "f"),
    "link": (lambda d: os.link(d / "f", d / "new"), lambda d: (d / "new").stat().st_nlink, 2),
    "unlink": (lambda d: os.unlink(d / "f"), lambda d: sorted(os.listdir(d)), ["d", "g"]),
    "unlink, open": (unlink_open, lambda d: sorted(os.listdir(d)), ["d", "g"]),
    "rmdir": (lambda d: os.rmdir(d / "d"), lambda d: (sorted(os.listdir(d)), d.stat().st_nlink), (["f", "g"], 2)),
    "rename": (
        lambda d: os.rename(d / "f", d / "new"), lambda d: (sorted(os.listdir(d)), (d / "new").read_bytes()),
        (["d", "g", "new"], b"F"),
    ),
    "rename over": (
        lambda d: os.rename(d / "f", d / "g"), lambda d: (sorted(os.listdir(d)), (d / "g").read_bytes()),
        (["d", "g"], b"F"),
    ),
    "rename of a directory": (
        lambda d: os.rename(d / "d", d / "e"), lambda d: sorted(os.listdir(d)), ["e", "f", "g"],
    ),
    "rename, no replacing": (
        lambda d: renameat2(d / "f", d / "new", RENAME_NOREPLACE), lambda d: sorted(os.listdir(d)), ["d", "g", "new"],
    ),
    "exchange": (
        lambda d: renameat2(d / "f", d / "g", RENAME_EXCHANGE),
        lambda d: ((d / "f").read_bytes(), (d / "g").read_bytes()), (b"G", b"F"),
    ),
    "create": (lambda d: make(d / "new"), lambda d: ((d / "new").read_bytes(), oct((d / "new").stat().st_mode)),
               (b"made", oct(stat.S_IFREG | 0o640))),
    "create, exclusive": (lambda d: make(d / "new", os.O_EXCL), lambda d: (d / "new").read_bytes(), b"made"),
    "create, truncating": (lambda d: make(d / "new", os.O_TRUNC), lambda d: (d / "new").read_bytes(), b"made"),
    "removexattr": (lambda d: os.removexattr(d / "f", "user.a"), lambda d: os.listxattr(d / "f"), []),
}  # fmt: skip


def prepare(mounted: Mounted, case: str) -> Path:
    directory = mounted.path / case.replace(" ", "-")
    (directory / "d").mkdir(parents=True)
    for name in "fg":
        (directory / name).write_bytes(name.upper().encode())
        os.setxattr(directory / name, "user.a", b"1")
    return directory


@pytest.mark.limit_s(300)
def test_done_once(native_mounts: MountFactory, base_dir: Path) -> None:
    """Every kind of change, in one mount. A second change right behind it, of the same kind, is done as well."""
    trigger = base_dir / "die"
    mounted = native_mounts(environment={"TIERFS_TEST_DIE_AFTER_COMMIT": str(trigger)})
    for number, (case, (change, check, expected)) in enumerate(CASES.items()):
        directory = prepare(mounted, case)
        trigger.touch()
        change(directory)
        assert not trigger.exists(), f"{case}: the engine was not killed"
        assert check(directory) == expected, case
        again = prepare(mounted, f"{case} again")
        change(again)
        assert check(again) == expected, case
        front = mounted.status()["front"]
        assert front["engine_starts"] == number + 2
        assert front["repeated"] >= number + 1
    mounted.umount()
    mounted.cli("meta", "check", "--state-dir", str(mounted.state_dir))
    mounted.start()
    for case, (_, check, expected) in CASES.items():
        assert check(mounted.path / case.replace(" ", "-")) == expected, f"{case}, in the store"


@pytest.mark.parametrize("case", ["mkdir", "unlink", "create, exclusive"])
def test_errors_stay_errors(native_mounts: MountFactory, base_dir: Path, case: str) -> None:
    """What fails is not called a success because an engine died since the last change."""
    trigger = base_dir / "die"
    mounted = native_mounts(environment={"TIERFS_TEST_DIE_AFTER_COMMIT": str(trigger)})
    directory = prepare(mounted, case)
    trigger.touch()
    change = CASES[case][0]
    change(directory)
    with pytest.raises((FileExistsError, FileNotFoundError)):
        change(directory)


def test_killed_twice_over_one_request(native_mounts: MountFactory, base_dir: Path) -> None:
    """The engine that is to get the repeat dies as well, before it has said anything."""
    trigger = base_dir / "die"
    mounted = native_mounts(environment={"TIERFS_TEST_DIE_AFTER_COMMIT": str(trigger)})
    (mounted.path / "f").write_bytes(b"F")
    trigger.touch()

    first = engine_pid(mounted)

    def kill_the_next() -> None:
        wait_until(lambda: not trigger.exists() and engine_pid(mounted) not in (None, first), "the next engine")
        kill_engine(mounted)

    killer = threading.Thread(target=kill_the_next)
    killer.start()
    os.rename(mounted.path / "f", mounted.path / "new")
    killer.join()
    assert os.listdir(mounted.path) == ["new"]
    assert mounted.status()["front"]["engine_starts"] == 3
