"""What making a snapshot costs, by the number of entries: ``python -m benchmarks.snapshots [DIR]
[COUNT...]``.

One namespace for each number of entries, in DIR (default: a temporary directory; on a real disk the sync of a
durable commit is most of it). In every round each namespace makes one snapshot and deletes it again, in turn,
so that what else the machine does meets all of them alike. Printed: median and quartiles in microseconds, of
the commit as ``tierfs snapshot create`` makes it, and of a durable commit that changes nothing but one
number; and the bytes by which the database grew meanwhile. What restoring and cloning cost: ``rebuilds``.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tierfs.namespace import schema, snapshots, sweep, tree
from tierfs.namespace.db import Database
from tierfs.namespace.transaction import WriteTransaction
from tierfs.types import ROOT_INO

COUNTS = (10, 10_000, 1_000_000)
ROUNDS = 40
FILES_PER_DIRECTORY = 1000
DIRECTORIES_PER_COMMIT = 5


def fill(db: Database, count: int) -> None:
    """``count`` files, at most 1,000 in a directory."""
    left = count
    number = 0
    while left:
        sizes = []
        while left and len(sizes) < DIRECTORIES_PER_COMMIT:
            sizes.append(min(left, FILES_PER_DIRECTORY))
            left -= sizes[-1]
        db.commit_now(lambda txn, sizes=sizes, number=number: _make(txn, number, sizes))
        number += len(sizes)


def _make(txn: WriteTransaction, number: int, sizes: list[int]) -> None:
    for offset, size in enumerate(sizes):
        name = b"d%06d" % (number + offset)
        directory = tree.create(txn, ROOT_INO, name, mode=0o040755, uid=0, gid=0, now_ns=1)
        for file in range(size):
            tree.create(txn, directory.ino, b"f%06d" % file, mode=0o100644, uid=0, gid=0, now_ns=1)


def once(db: Database, number: int) -> tuple[float, float]:
    """(seconds for a snapshot, seconds for a commit of the same kind that makes none)"""
    name = b"s%d" % number
    started = time.perf_counter()
    db.commit_now(lambda txn: snapshots.create(txn, name, ROOT_INO, now_ns=number), durable=True)
    made_s = time.perf_counter() - started
    started = time.perf_counter()
    db.commit_now(lambda txn: txn.put(b"benchmark", b"%d" % number, db=txn.tables.meta), durable=True)
    other_s = time.perf_counter() - started
    db.commit_now(lambda txn: snapshots.delete(txn, name))
    with db.snapshot() as txn:
        place = sweep.begin(txn)
    while place is not None:
        place = db.commit_now(lambda txn, at=place: sweep.step(txn, at, 1000, number))
    return made_s, other_s


def main(arguments: list[str]) -> None:
    directory = Path(arguments[0]) if arguments else None
    counts = [int(text) for text in arguments[1:]] or list(COUNTS)
    with ExitStack() as stack:
        root = directory or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tierfs-snapshots-")))
        databases: list[tuple[int, Database]] = []
        for count in counts:
            db = stack.enter_context(Database.open(root / f"n{count}"))
            fill(db, count)
            databases.append((count, db))
        sizes = {count: db.size_bytes() for count, db in databases}
        taken: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
        for number in range(ROUNDS):
            for count, db in databases if number % 2 else reversed(databases):
                taken[count].append(once(db, number))
        print(f"{'entries':>10} {'snapshot us':>28} {'other commit us':>28} {'grew':>10}")
        for count, db in databases:
            made, other = zip(*taken[count], strict=True)
            grew_bytes = db.size_bytes() - sizes[count]
            print(f"{count:>10} {_quartiles(made):>28} {_quartiles(other):>28} {grew_bytes:>10}")
        with databases[-1][1].read() as txn:
            assert schema.unpack_u64(txn.get(schema.META_EPOCH, None, txn.tables.meta))[0] == ROUNDS


def _quartiles(seconds: tuple[float, ...]) -> str:
    low, median, high = statistics.quantiles([second * 1e6 for second in seconds], n=4)
    return f"{median:.0f} ({low:.0f} to {high:.0f})"


if __name__ == "__main__":
    main(sys.argv[1:])
