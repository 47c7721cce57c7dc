"""A process that changes a namespace as fast as it can, until it is killed. For the crash test.

Prints one line for each name that was acknowledged: ``N`` (committed) or ``D`` (durable). Names are made,
renamed and removed by several tasks at once.
"""

from __future__ import annotations

import os
import random
import stat
import sys
from functools import partial
from pathlib import Path

import trio

from tierfs.errors import NamespaceError
from tierfs.namespace import publish, tree
from tierfs.namespace.db import Database, WriteTransaction
from tierfs.types import ROOT_INO, ObjectInfo, new_content_id

TASKS = 8


async def change(db: Database, task: int, seed: int) -> None:
    """Each task works in its own directory and knows what must be there."""
    draw = random.Random(seed * 1000 + task)
    name = f"task{task}".encode()

    def open_directory(txn: WriteTransaction) -> int:
        try:
            return tree.lookup(txn, ROOT_INO, name).ino
        except NamespaceError:
            return tree.create(txn, ROOT_INO, name, mode=stat.S_IFDIR | 0o755, uid=0, gid=0, now_ns=1).ino

    directory = await db.commit(open_directory)
    serial = 0
    while True:
        serial += 1
        file = f"{seed}-{serial}".encode()

        def step(txn: WriteTransaction, file: bytes = file, serial: int = serial) -> None:
            inode = tree.create(
                txn, directory, file + b".tmp", mode=stat.S_IFREG | 0o644, uid=0, gid=0,
                content_id=new_content_id(), now_ns=serial,
            )  # fmt: skip
            if draw.random() < 0.5:
                key = publish.key_of(txn, inode.ino)[0]
                publish.claim_keys(txn, inode.ino, [key], 1)
                publish.set_object(txn, inode.ino, ObjectInfo(key, 1, "e", 1), [], 1)
            tree.rename(txn, directory, file + b".tmp", directory, file, now_ns=serial)

        durable = draw.random() < 0.1
        await db.commit(step, durable=durable)
        print("D" if durable else "N", task, file.decode(), flush=True)
        if draw.random() < 0.3:
            print("R", task, file.decode(), flush=True)  # from here on it may be gone
            await db.commit(partial(tree.unlink, parent=directory, name=file, now_ns=1))


async def main() -> None:
    directory, seed = Path(sys.argv[1]), int(sys.argv[2])
    with Database.open(directory) as db:
        print("READY", os.getpid(), flush=True)
        async with trio.open_nursery() as nursery:
            for task in range(TASKS):
                nursery.start_soon(change, db, task, seed)


if __name__ == "__main__":
    trio.run(main)
