"""A process that changes a namespace one step after the other, until it is killed. For the power cut test.

Step ``n`` makes the name ``n`` and removes the one made ``KEPT`` steps before, in one commit. A line is printed
for each that was acknowledged: ``lazy N`` (a power cut may undo it) or ``durable N``.
"""

from __future__ import annotations

import random
import stat
import sys
from pathlib import Path

from tierfs.errors import NotFound
from tierfs.namespace import tree
from tierfs.namespace.db import Database, WriteTransaction
from tierfs.types import ROOT_INO

KEPT = 5


def step(txn: WriteTransaction, number: int) -> None:
    tree.create(txn, ROOT_INO, b"%d" % number, mode=stat.S_IFREG | 0o644, uid=0, gid=0, now_ns=1)
    try:
        tree.reap(txn, tree.unlink(txn, ROOT_INO, b"%d" % (number - KEPT), now_ns=1).ino)
    except NotFound:
        return  # the first ones


def main() -> None:
    directory, seed, first = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    with Database.open(directory) as db:
        number = first
        while True:
            durable = chance.random() < 0.02
            db.commit_now(lambda txn, n=number: step(txn, n), lazy=not durable)  # type: ignore[misc]
            print("durable" if durable else "lazy", number, flush=True)
            number += 1


if __name__ == "__main__":
    main()
