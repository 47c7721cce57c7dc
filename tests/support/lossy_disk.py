"""A directory that forgets, at a power cut, all that was not synced: a FUSE file system in a process of its own.

::

    disk = LossyDisk(mountpoint)        # an empty file system, mounted
    ...                                 # mount tierfs with its state and tier below ``mountpoint``, write
    kill tierfs
    disk.cut(seed=7)                    # what a device could have, mounted again at the same place
    disk.close()

What survives is drawn by ``lossy_image``, which says what is durable when. The cut comes after whoever uses the
directory was killed: what they were doing had not been acknowledged, and nothing that they do then is synced.

Everything lies in memory. Reads go through the kernel's page cache, so that LMDB's maps work; writes arrive at
once. What FUSE does not pass on (``syncfs``, stores into shared mappings before they are written back) makes
nothing durable here: that is on the safe side.
"""

from __future__ import annotations

import errno
import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pyfuse3
import trio

from tests.support.lossy_image import PAGE_BYTES, LossyImage, Node

TIMEOUT_S = 60.0
CAPACITY_BYTES = 8 << 30
_REPOSITORY = Path(__file__).resolve().parents[2]


class LossyDisk:
    """See the module docstring. Raises ``AssertionError`` if its process does not do what it should."""

    def __init__(self, mountpoint: Path) -> None:
        self.mountpoint = mountpoint
        self._image = mountpoint.with_name(mountpoint.name + ".image")
        self._process: subprocess.Popen[bytes] | None = None
        mountpoint.mkdir(exist_ok=True)
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.lossy_disk", str(self.mountpoint), str(self._image)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_REPOSITORY,
            start_new_session=True,
        )
        self._expect(b"ready")

    def _expect(self, word: bytes) -> None:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line == word, f"the lossy disk said {line!r}, not {word!r}"

    def cut(self, seed: int) -> None:
        """Power off and on again."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.write(b"cut %d\n" % seed)
        process.stdin.flush()
        self._expect(b"cut")
        self._stop()
        self._start()

    def _stop(self) -> None:
        process, self._process = self._process, None
        subprocess.run(["umount", "-l", str(self.mountpoint)], check=False, capture_output=True)
        if process is None:
            return
        with process:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()

    def close(self) -> None:
        self._stop()
        self._image.unlink(missing_ok=True)


class _Operations(pyfuse3.Operations):
    def __init__(self, image: LossyImage) -> None:
        super().__init__()
        self.image = image

    def _node(self, number: int) -> Node:
        found = self.image.nodes.get(number)
        if found is None:
            raise pyfuse3.FUSEError(errno.ESTALE)
        return found

    def _entry(self, parent: int, name: bytes) -> Node:
        number = self._node(parent).entries.get(name)
        if number is None:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return self._node(number)

    def _attributes(self, node: Node) -> pyfuse3.EntryAttributes:
        found = pyfuse3.EntryAttributes()
        found.st_ino = pyfuse3.InodeT(node.number)
        found.generation = 1
        found.entry_timeout, found.attr_timeout = 300.0, 0.0
        found.st_mode, found.st_nlink = pyfuse3.ModeT(node.mode), node.nlink
        found.st_uid, found.st_gid, found.st_rdev = node.uid, node.gid, 0
        found.st_size = len(node.current)
        found.st_blksize, found.st_blocks = PAGE_BYTES, -(-len(node.current) // PAGE_BYTES) * 8
        found.st_atime_ns = found.st_mtime_ns = found.st_ctime_ns = node.mtime_ns
        return found

    async def getattr(self, inode, ctx):  # type: ignore[no-untyped-def]
        return self._attributes(self._node(inode))

    async def lookup(self, parent_inode, name, ctx):  # type: ignore[no-untyped-def]
        return self._attributes(self._entry(parent_inode, name))

    async def setattr(self, inode, attr, fields, fh, ctx):  # type: ignore[no-untyped-def]
        node = self._node(inode)
        if fields.update_size:
            self.image.truncate(inode, attr.st_size)
        if fields.update_mode:
            node.mode = stat.S_IFMT(node.mode) | stat.S_IMODE(attr.st_mode)
        if fields.update_uid:
            node.uid = attr.st_uid
        if fields.update_gid:
            node.gid = attr.st_gid
        if fields.update_mtime:
            node.mtime_ns = attr.st_mtime_ns
        return self._attributes(node)

    async def mknod(self, parent_inode, name, mode, rdev, ctx):  # type: ignore[no-untyped-def]
        return self._attributes(self.image.add(parent_inode, name, mode, ctx.uid, ctx.gid))

    async def mkdir(self, parent_inode, name, mode, ctx):  # type: ignore[no-untyped-def]
        return self._attributes(self.image.add(parent_inode, name, mode | stat.S_IFDIR, ctx.uid, ctx.gid))

    async def symlink(self, parent_inode, name, target, ctx):  # type: ignore[no-untyped-def]
        mode = stat.S_IFLNK | 0o777
        return self._attributes(self.image.add(parent_inode, name, mode, ctx.uid, ctx.gid, target))

    async def readlink(self, inode, ctx):  # type: ignore[no-untyped-def]
        return bytes(self._node(inode).current)

    async def create(self, parent_inode, name, mode, flags, ctx):  # type: ignore[no-untyped-def]
        node = self.image.add(parent_inode, name, mode | stat.S_IFREG, ctx.uid, ctx.gid)
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(node.number), keep_cache=True), self._attributes(node)

    async def link(self, inode, new_parent_inode, new_name, ctx):  # type: ignore[no-untyped-def]
        self.image.link(inode, new_parent_inode, new_name)
        return self._attributes(self._node(inode))

    async def unlink(self, parent_inode, name, ctx):  # type: ignore[no-untyped-def]
        self._entry(parent_inode, name)
        self.image.remove(parent_inode, name)

    async def rmdir(self, parent_inode, name, ctx):  # type: ignore[no-untyped-def]
        if self._entry(parent_inode, name).entries:
            raise pyfuse3.FUSEError(errno.ENOTEMPTY)
        self.image.remove(parent_inode, name)

    async def rename(self, parent_inode_old, name_old, parent_inode_new, name_new, flags, ctx):  # type: ignore[no-untyped-def]
        self._entry(parent_inode_old, name_old)
        there = name_new in self._node(parent_inode_new).entries
        if flags & pyfuse3.RENAME_EXCHANGE:
            self._entry(parent_inode_new, name_new)
            self.image.exchange(parent_inode_old, name_old, parent_inode_new, name_new)
            return
        if there and flags & pyfuse3.RENAME_NOREPLACE:
            raise pyfuse3.FUSEError(errno.EEXIST)
        self.image.rename(parent_inode_old, name_old, parent_inode_new, name_new)

    async def open(self, inode, flags, ctx):  # type: ignore[no-untyped-def]
        if flags & os.O_TRUNC:
            self.image.truncate(inode, 0)
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(inode), keep_cache=True)

    async def read(self, fh, off, size):  # type: ignore[no-untyped-def]
        return bytes(self._node(fh).current[off : off + size])

    async def write(self, fh, off, buf):  # type: ignore[no-untyped-def]
        self.image.write(fh, off, bytes(buf))
        return len(buf)

    async def fsync(self, fh, datasync):  # type: ignore[no-untyped-def]
        self.image.sync_file(fh)

    async def fsyncdir(self, fh, datasync):  # type: ignore[no-untyped-def]
        self.image.sync_directory(fh)

    async def flush(self, fh):  # type: ignore[no-untyped-def]
        pass  # close(2) promises nothing

    async def release(self, fh):  # type: ignore[no-untyped-def]
        pass

    async def opendir(self, inode, ctx):  # type: ignore[no-untyped-def]
        return pyfuse3.FileHandleT(inode)

    async def releasedir(self, fh):  # type: ignore[no-untyped-def]
        pass

    async def readdir(self, fh, start_id, token):  # type: ignore[no-untyped-def]
        # By number, so that names that come and go move no other.
        entries = sorted((number, name) for name, number in self._node(fh).entries.items())
        for number, name in entries:
            if number > start_id:
                attributes = self._attributes(self._node(number))
                if not pyfuse3.readdir_reply(token, name, attributes, number):
                    return

    async def statfs(self, ctx):  # type: ignore[no-untyped-def]
        used = sum(len(node.current) for node in self.image.nodes.values() if node.nlink)
        found = pyfuse3.StatvfsData()
        found.f_bsize = found.f_frsize = PAGE_BYTES
        found.f_blocks = CAPACITY_BYTES // PAGE_BYTES
        found.f_bfree = found.f_bavail = max(0, CAPACITY_BYTES - used) // PAGE_BYTES
        found.f_files, found.f_ffree, found.f_favail, found.f_namemax = 1 << 20, 1 << 19, 1 << 19, 255
        return found


async def _obey(operations: _Operations, image_path: Path) -> None:
    """Commands on standard input, until it ends."""
    pending = b""
    while True:
        await trio.lowlevel.wait_readable(0)
        data = os.read(0, 4096)
        if not data:
            pyfuse3.terminate()
            return
        pending += data
        while b"\n" in pending:
            line, _, pending = pending.partition(b"\n")
            image_path.write_bytes(pickle.dumps(operations.image.cut(int(line.split()[1]))))
            print("cut", flush=True)


async def _serve(operations: _Operations, image_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_obey, operations, image_path)
        print("ready", flush=True)
        await pyfuse3.main()
        nursery.cancel_scope.cancel()


def main(arguments: Sequence[str]) -> None:
    mountpoint, image_path = Path(arguments[0]), Path(arguments[1])
    image = LossyImage()
    if image_path.exists():
        image = pickle.loads(image_path.read_bytes())
    operations = _Operations(image)
    options = {*pyfuse3.default_options, "fsname=lossy", "subtype=lossy", "allow_other"}
    pyfuse3.init(operations, str(mountpoint), options)
    try:
        trio.run(_serve, operations, image_path)
    finally:
        with suppress(Exception):
            pyfuse3.close(unmount=False)


if __name__ == "__main__":
    main(sys.argv[1:])
