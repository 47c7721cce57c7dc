"""The write-back in a few lines, one step at a time, by the rules of ``namespace.publish``.

For model tests: the bytes of an inode are its number, so that what ends under a key says whose it is.
"""

from __future__ import annotations

import stat
from functools import partial

from tests.support.namespace import Namespace
from tierfs.namespace import publish, records, schema
from tierfs.namespace.db import WriteTransaction
from tierfs.types import Inode, ObjectInfo


def dirty_inos(ns: Namespace) -> list[int]:
    with ns.db.read() as txn:
        return [row.ino for row in publish.iter_dirty(txn)]


def publish_one(ns: Namespace, ino: int, *, crash: bool = False) -> bool:
    """Publish one dirty inode if the rules allow it now; False: it has to wait for another.

    With ``crash`` the process dies between the answer of the store and the record of it.
    """
    with ns.db.read() as txn:
        row = publish.dirty_row(txn, ino)
        inode = records.find_inode(txn, ino)
        if row is None or inode is None:
            return True
        keys = publish.key_of(txn, ino)
        held = publish.object_of(txn, ino)
    if inode.is_dir and not _mark_moved_children(ns, ino):
        return False
    infos: list[ObjectInfo] = []
    if not ns.change(partial(publish.claim_keys, ino=ino, keys=keys, now_ns=ns.clock.ns)):
        return False
    for key in keys:
        with ns.db.read() as txn:
            expected = publish.expected_etag(txn, ino, key)
        current = ns.store.info(key) if key in ns.store else None
        if current is not None and current.etag != expected and expected != "":
            # Only what we wrote ourselves before a crash may be there instead.
            assert ns.store.body(key) == _body(inode), f"{key} would be overwritten"
        if held is not None and not inode.flags & schema.DATA_LOCAL and not inode.is_dir:
            infos.append(ns.store.copy(held.info, key))
        else:
            infos.append(ns.store.put(key, _body(inode)))
        if crash:
            return True

    def record(txn: WriteTransaction) -> None:
        publish.set_object(txn, ino, infos[0], infos[1:], ns.clock.ns)
        publish.forget_dirty(txn, ino, row.generation)

    ns.change(record)
    return True


def _body(inode: Inode) -> bytes:
    return b"" if inode.is_dir else b"%d" % inode.ino


def _mark_moved_children(ns: Namespace, ino: int) -> bool:
    """Make what lies under old keys below a directory dirty itself; True once there is nothing left."""
    cursor = None
    while True:
        with ns.db.read() as txn:
            batch, cursor = publish.next_moved_children(txn, ino, cursor, 2)
            waiting = [child for child in batch if not publish.is_dirty(txn, child)]

        def mark(txn: WriteTransaction, waiting: list[int] = waiting) -> None:
            for child in waiting:
                publish.mark_dirty(txn, child, schema.MOVED, ns.clock.ns)

        ns.change(mark)
        if cursor is None:
            return True


def delete_doomed(ns: Namespace) -> None:
    """One pass over the doomed rows: delete what nobody needs."""
    with ns.db.read() as txn:
        rows, _ = publish.doomed_entries(txn)
    for row in rows:
        with ns.db.read() as txn:
            needed = (
                publish.is_prefix_needed(txn, row.key) if row.prefix else publish.is_key_needed(txn, row.key)
            )
        if needed:
            continue
        if not row.prefix:
            ns.store.delete(row.key)
        ns.change(partial(publish.forget_doomed, row=row))


def park_one(ns: Namespace) -> bool:
    """Break a cycle of files that exchanged names: park the object of one of them."""
    for ino in dirty_inos(ns):
        with ns.db.read() as txn:
            row = publish.object_of(txn, ino)
            inode = records.get_inode(txn, ino)
            parked_key = publish.parked_key(ns.db, ino)
            if row is None or row.key == parked_key or inode.is_dir or publish.keys_agree(txn, ino):
                continue
        parked = ns.store.copy(row.info, parked_key)

        def record(txn: WriteTransaction, ino: int = ino, parked: ObjectInfo = parked) -> None:
            publish.set_object(txn, ino, parked, [], ns.clock.ns)

        ns.change(record)
        return True
    return False


def drain(ns: Namespace) -> None:
    """Until the bucket holds what the names say and nothing else."""
    for _ in range(200):
        before = dirty_inos(ns)
        for ino in before:
            publish_one(ns, ino)
        delete_doomed(ns)
        with ns.db.read() as txn:
            left = publish.dirty_count(txn), publish.doomed_count(txn)
        if left == (0, 0):
            return
        if dirty_inos(ns) == before:
            park_one(ns)
    raise AssertionError(f"does not drain: {left}")


def expected_keys(ns: Namespace) -> dict[str, bytes]:
    """What the bucket should hold: key -> body, from the names alone."""
    expected: dict[str, bytes] = {}
    with ns.db.read() as txn:
        waiting = [records.get_inode(txn, 1)]
        while waiting:
            directory = waiting.pop()
            for _, _, ino, kind in records.iter_entries(txn, directory.ino):
                inode = records.get_inode(txn, ino)
                for key in publish.key_of(txn, ino):
                    expected[key] = b"" if kind == stat.S_IFDIR else b"%d" % ino
                if inode.is_dir:
                    waiting.append(inode)
    return expected
