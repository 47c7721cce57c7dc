"""What cloning and restoring a snapshot costs, by the number of entries.

``python -m benchmarks.rebuilds [DIR [COUNT...]]``

One engine without a kernel for each number of entries, in DIR (default: a temporary directory). Up to 10,000
entries are files of 4 KiB in a bucket that is a directory; then it is also measured how long it takes until
every file of a clone has an object, and the bytes that this reads from and sends to the store. More are only
in the namespace, with objects that nobody asks for: what is printed of these ends when the tree is visible.

Seconds, and in parentheses those of processor time. Of each: a clone of everything; a restore after one entry
in a hundred was removed, with the survey that precedes it; and a restore when all were.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import trio

from tierfs.config import Settings
from tierfs.control import protocol as p
from tierfs.mount.parts import Parts, open_parts
from tierfs.mount.rebuilds import RebuildHandlers
from tierfs.mount.snapshots import SnapshotHandlers
from tierfs.namespace import publish, records, schema, snapshots, tree
from tierfs.namespace.schema import FOREVER_NS, ObjectRow, pack_u64
from tierfs.namespace.transaction import WriteTransaction
from tierfs.types import ROOT_INO, new_content_id

COUNTS = (10, 10_000, 1_000_000)
MOST_IN_A_BUCKET = 10_000
FILES_PER_DIRECTORY = 1000
SIZE_BYTES = 4096


class Watch:
    """Seconds since it was made, and of processor time."""

    def __init__(self) -> None:
        self._since = time.perf_counter(), time.process_time()

    def __str__(self) -> str:
        wall, processor = self._since
        return f"{time.perf_counter() - wall:.2f} ({time.process_time() - processor:.2f})"


def fill_bucket(bucket: Path, count: int) -> None:
    for number in range(count):
        directory = bucket / "data" / f"d{number // FILES_PER_DIRECTORY:06d}"
        if not number % FILES_PER_DIRECTORY:
            directory.mkdir(parents=True)
        (directory / f"f{number:06d}").write_bytes(b"%06d" % number * (SIZE_BYTES // 6))


def fill_namespace(parts: Parts, count: int) -> None:
    """The same names, each with an object that is not there."""
    data = parts.db.commit_now(
        lambda txn: tree.create(txn, ROOT_INO, b"data", mode=0o040755, uid=0, gid=0, now_ns=1)
    )
    for first in range(0, count, FILES_PER_DIRECTORY):
        numbers = range(first, min(first + FILES_PER_DIRECTORY, count))
        parts.db.commit_now(lambda txn, numbers=numbers: _make(txn, data.ino, numbers))


def _make(txn: WriteTransaction, parent: int, numbers: range) -> None:
    name = b"d%06d" % (numbers.start // FILES_PER_DIRECTORY)
    directory = tree.create(txn, parent, name, mode=0o040755, uid=0, gid=0, now_ns=1)
    for number in numbers:
        file = b"f%06d" % number
        inode = tree.create(txn, directory.ino, file, mode=0o100644, uid=0, gid=0, now_ns=1)
        inode = schema.replace_inode(
            inode, size_bytes=SIZE_BYTES, content_id=new_content_id(), flags=schema.META_KNOWN,
            valid_until_ns=FOREVER_NS,
        )  # fmt: skip
        schema.put_inode(txn, inode)
        key = f"data/{name.decode()}/{file.decode()}"
        publish.put_object_row(txn, inode.ino, ObjectRow(key, f"e{number}", None, SIZE_BYTES, 1, 1))
        txn.delete(pack_u64(inode.ino), txn.tables.dirty)


def remove_files(parts: Parts, every: int) -> int:
    """One file in ``every`` of each directory goes; returns how many went."""
    with parts.db.read() as txn:
        data = tree.resolve(txn, b"data").ino
        directories = [ino for _, _, ino, _ in records.iter_entries(txn, data)]
    removed = 0
    for ino in directories:
        removed += parts.db.commit_now(lambda txn, ino=ino: _remove(txn, ino, every))
    return removed


def _remove(txn: WriteTransaction, directory: int, every: int) -> int:
    names = [name for _, name, _, _ in list(records.iter_entries(txn, directory))[::every]]
    for name in names:
        inode = tree.unlink(txn, directory, name, now_ns=2)
        tree.reap(txn, inode.ino)
    return len(names)


async def measure(root: Path, count: int) -> list[str]:
    """One line of the table."""
    in_bucket = count <= MOST_IN_A_BUCKET
    (root / "bucket").mkdir(parents=True)
    if in_bucket:
        fill_bucket(root / "bucket", count)
    settings = Settings(
        source=f"file://{root}/bucket", mountpoint=f"{root}/mnt", state_dir=f"{root}/state", tiers=(),
        upload_delay_s=0.0,
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        parts = await open_parts(settings, stack)
        if not in_bucket:
            await trio.to_thread.run_sync(fill_namespace, parts, count)
        async with trio.open_nursery() as nursery:
            parts.start(nursery)
            if in_bucket:
                nursery.start_soon(parts.publisher.run)
            line = await _measure(parts, in_bucket)
            nursery.cancel_scope.cancel()
    return [str(count), *line]


async def _measure(parts: Parts, in_bucket: bool) -> list[str]:
    made = SnapshotHandlers(parts)
    handlers = RebuildHandlers(parts, made)
    await made.create(
        p.SnapshotCreateRequest(name=b"one", path=b"data", flush=in_bucket, complete=in_bucket), _quiet
    )
    counts = parts.store.counts
    before = counts.bytes_read, counts.bytes_written, counts.by_operation.get("copy", 0)
    watch = Watch()
    await handlers.clone(p.SnapshotCloneRequest(name=b"one", path=b"copy"), _quiet)
    cloned = str(watch)
    in_store, moved = "", ""
    if in_bucket:
        assert await parts.publisher.draining.drain()
        in_store = str(watch)
        copies = counts.by_operation.get("copy", 0) - before[2]
        moved = f"{counts.bytes_read - before[0]}+{counts.bytes_written - before[1]} ({copies} copies)"
    while _is_at_work(parts):  # noqa: ASYNC110 - no event tells
        await trio.sleep(0.01)
    restored = []
    for every in (100, 1):
        removed = remove_files(parts, every)
        watch = Watch()
        reply = await handlers.restore(
            p.SnapshotRestoreRequest(name=b"one", path=b"data", backup=False), _quiet
        )
        restored.append(str(watch))
        assert (reply.made, reply.missing_count) == (removed, 0)
    return [cloned, in_store, moved, *restored]


def _is_at_work(parts: Parts) -> bool:
    with parts.db.read() as txn:
        return bool(snapshots.jobs(txn))


def _quiet(progress: p.Progress) -> None:
    return None


def main(arguments: list[str]) -> None:
    counts = [int(text) for text in arguments[1:]] or list(COUNTS)
    with tempfile.TemporaryDirectory(
        prefix="tierfs-rebuilds-", dir=arguments[0] if arguments else None
    ) as at:
        head = ("entries", "clone s", "in store s", "bytes read+sent", "restore 1 % s", "restore all s")
        print("".join(f"{word:>26}" for word in head))
        for count in counts:
            line = trio.run(measure, Path(at) / f"n{count}", count)
            print("".join(f"{word:>26}" for word in line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
