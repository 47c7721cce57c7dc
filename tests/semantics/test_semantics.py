"""Promises of ``tierfs/SEMANTICS.md`` that no other test shows by the way."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.mount import Mounted, MountFactory, wait_until
from tests.support.posix import errno_of

semantics = pytest.mark.semantics
needs_mount = pytest.mark.usefixtures("needs_mount")


def stored(mounted: Mounted) -> dict[str, bytes]:
    """The objects of a directory store, without tierfs's own."""
    top = mounted.store_dir
    files = [p for p in top.rglob("*") if p.is_file() and p.relative_to(top).parts[0] != ".tierfs"]
    return {str(p.relative_to(top)): p.read_bytes() for p in files}


@needs_mount
@semantics("S-WRITE-4", "`tierfs flush` returns when everything written before it is in the store.")
def test_flush(mount_factory: MountFactory) -> None:
    mounted = mount_factory(options=("--upload-delay", "3600"))
    written = {f"f{i}": os.urandom(100_000) for i in range(10)}
    for name, data in written.items():
        (mounted.path / name).write_bytes(data)
    assert stored(mounted) == {}
    mounted.flush()
    assert stored(mounted) == written


@needs_mount
def test_flush_of_one_path(mount_factory: MountFactory) -> None:
    mounted = mount_factory(options=("--upload-delay", "3600"))
    os.makedirs(mounted.path / "d" / "e")
    for name in ("a", "b", "d/c", "d/e/f"):
        (mounted.path / name).write_bytes(name.encode())
    mounted.flush(str(mounted.path / "a"))
    assert stored(mounted)["a"] == b"a"
    assert "b" not in stored(mounted)
    mounted.flush(str(mounted.path / "d"))
    assert {"d/c", "d/e/f"} <= stored(mounted).keys()
    assert "b" not in stored(mounted)


@needs_mount
@semantics(
    "S-WRITE-9",
    "An object that somebody else put at the same path meanwhile is not overwritten, neither by an upload nor by a rename: both versions are kept, ours under a name with `.conflict-`.",
)
@pytest.mark.parametrize("known", [True, False], ids=["changed by others", "made by others"])
def test_conflict(mount_factory: MountFactory, known: bool) -> None:
    mounted = mount_factory(options=("--upload-delay", "3600", "--ttl", "3600"))
    if known:
        (mounted.path / "f").write_bytes(b"common ancestor")
        mounted.flush()
    (mounted.path / "f").write_bytes(b"ours")
    draft = mounted.store_dir / "draft~"
    draft.write_bytes(b"theirs")
    draft.rename(mounted.store_dir / "f")
    mounted.flush()
    wait_until(lambda: len(stored(mounted)) == 2, "both versions in the store", 30)
    found = stored(mounted)
    (conflict,) = [name for name in found if ".conflict-" in name]
    assert found == {"f": b"theirs", conflict: b"ours"}
    assert conflict.startswith("f.conflict-")
    assert (mounted.path / conflict).read_bytes() == b"ours"


@needs_mount
@semantics("S-NAME-7", "The prefix `.tierfs/` at the top of the source is tierfs's own and is not shown.")
def test_own_prefix(mount_factory: MountFactory) -> None:
    mounted = mount_factory.prepare()
    (mounted.store_dir / ".tierfs").mkdir()
    (mounted.store_dir / ".tierfs" / "x").write_bytes(b"internal")
    (mounted.store_dir / "d").mkdir()
    (mounted.store_dir / "d" / ".tierfs").mkdir()
    (mounted.store_dir / "d" / ".tierfs" / "x").write_bytes(b"anybody's")
    mounted.start()
    assert os.listdir(mounted.path) == ["d"]
    assert errno_of(lambda: os.stat(mounted.path / ".tierfs")) == errno.ENOENT
    assert errno_of(lambda: os.mkdir(mounted.path / ".tierfs")) != 0
    assert (mounted.path / "d" / ".tierfs" / "x").read_bytes() == b"anybody's"


@needs_mount
@semantics(
    "S-MOVE-5",
    "After a flush the object of a renamed file is at the new path and not at the old one, and the same holds for every file below a renamed directory.",
)
@pytest.mark.parametrize("uploaded", [True, False], ids=["uploaded before", "not yet uploaded"])
def test_rename_reaches_the_store(mount_factory: MountFactory, uploaded: bool) -> None:
    mounted = mount_factory(options=("--upload-delay", "3600"))
    os.makedirs(mounted.path / "d" / "e")
    for name in ("f", "d/a", "d/e/b", "x", "y"):
        (mounted.path / name).write_bytes(name.encode())
    if uploaded:
        mounted.flush()
    os.rename(mounted.path / "f", mounted.path / "g")
    os.rename(mounted.path / "d", mounted.path / "moved")
    # Two files exchange their names.
    os.rename(mounted.path / "x", mounted.path / "tmp")
    os.rename(mounted.path / "y", mounted.path / "x")
    os.rename(mounted.path / "tmp", mounted.path / "y")
    mounted.flush()
    expected = {"g": b"f", "moved/a": b"d/a", "moved/e/b": b"d/e/b", "x": b"y", "y": b"x"}
    assert stored(mounted) == expected
    mounted.remount()
    found = {str(p.relative_to(mounted.path)): p.read_bytes() for p in mounted.path.rglob("*") if p.is_file()}
    assert found == expected


@needs_mount
def test_rename_of_what_was_never_listed(mount_factory: MountFactory) -> None:
    """A directory that came from the bucket moves with all that is below it, also what nobody looked at."""
    mounted = mount_factory.prepare()
    for name in ("d/a", "d/e/b", "d/e/f/c"):
        path = mounted.store_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    mounted.start()
    os.rename(mounted.path / "d", mounted.path / "moved")
    assert (mounted.path / "moved" / "e" / "f" / "c").read_bytes() == b"d/e/f/c"
    assert not (mounted.path / "d").exists()
    mounted.flush()
    assert stored(mounted) == {"moved/a": b"d/a", "moved/e/b": b"d/e/b", "moved/e/f/c": b"d/e/f/c"}


@needs_mount
@semantics("S-MOVE-6", "After a flush a removed file has no object.")
def test_removal_reaches_the_store(mount_factory: MountFactory) -> None:
    mounted = mount_factory.prepare()
    for name in ("f", "d/a", "d/e/b", "keep"):
        path = mounted.store_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    mounted.start()
    os.unlink(mounted.path / "f")
    for name in ("d/e/b", "d/a"):
        os.unlink(mounted.path / name)
    os.rmdir(mounted.path / "d" / "e")
    os.rmdir(mounted.path / "d")
    (mounted.path / "short-lived").write_bytes(b"y")
    os.unlink(mounted.path / "short-lived")
    mounted.flush()
    assert stored(mounted) == {"keep": b"x"}
    assert not (mounted.store_dir / "d").exists()


@needs_mount
@semantics(
    "S-META-8", "Hard links are one file in the mount; each name is an object of its own in the store."
)
def test_hard_links_in_the_store(mounted: Mounted) -> None:
    (mounted.path / "a").write_bytes(b"first")
    os.link(mounted.path / "a", mounted.path / "b")
    mounted.flush()
    assert stored(mounted) == {"a": b"first", "b": b"first"}
    (mounted.path / "b").write_bytes(b"second")
    mounted.flush()
    assert stored(mounted) == {"a": b"second", "b": b"second"}
    os.unlink(mounted.path / "a")
    mounted.flush()
    assert stored(mounted) == {"b": b"second"}
    mounted.remount()
    assert (mounted.path / "b").read_bytes() == b"second"


@semantics("S-FAIL-3", "An unexpected error fails the one request with EIO; the mount goes on.")
async def test_unexpected_error(caplog: pytest.LogCaptureFixture) -> None:
    import pyfuse3

    from tierfs.fs.ops import answers

    @answers
    async def request(_self: object) -> None:
        raise ValueError("nobody thought of this")

    with pytest.raises(pyfuse3.FUSEError) as caught:
        await request(SimpleNamespace(services=SimpleNamespace(settle=lambda: None)))
    assert caught.value.errno == errno.EIO
    assert "nobody thought of this" in caplog.text  # with its stack
    assert "Traceback" in caplog.text


@needs_mount
def test_own_attributes_tell_the_state(mount_factory: MountFactory) -> None:
    mounted = mount_factory(options=("--upload-delay", "3600"))
    path: Path = mounted.path / "f"
    path.write_bytes(b"x" * 1000)
    assert os.getxattr(path, "user.tierfs.dirty") == b"true"
    mounted.flush()
    assert os.getxattr(path, "user.tierfs.dirty") == b"false"
    assert os.getxattr(path, "user.tierfs.key") == b"f"
    assert os.getxattr(path, "user.tierfs.etag")
