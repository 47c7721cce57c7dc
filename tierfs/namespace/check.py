"""Whether the tables of a namespace agree with each other. Reads only, on a snapshot.

Runs beside a live engine too. Memory does not grow with the namespace; a million entries take about half a
minute.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from itertools import chain

from tierfs.errors import DamagedRecord, NotFound
from tierfs.namespace import loans, objects, past, publish, records, schema, snapshots
from tierfs.namespace.schema import DIRENT, DIRSEQ, unpack_u64
from tierfs.namespace.transaction import ReadTransaction
from tierfs.types import ROOT_INO, Inode

MANY_KEYS = 100
"""Names of one file from which on its keys are remembered."""


def problems(txn: ReadTransaction) -> Iterator[str]:
    """One sentence for each thing that is wrong; nothing if all is well."""
    return chain(
        _check_dirents(txn),
        _check_dirseqs(txn),
        _check_parents(txn),
        _check_inodes(txn),
        _check_attachments(txn),
        _check_objects(txn),
        _check_object_keys(txn),
        _check_dirty(txn),
        _check_snapshots(txn),
        _check_loans(txn),
    )


def _check_dirents(txn: ReadTransaction) -> Iterator[str]:
    next_id = unpack_u64(txn.get(schema.META_NEXT_ID, bytes(8), txn.tables.meta))[0]
    for key, value in _rows(txn, txn.tables.dirent):
        parent, name = unpack_u64(key[:8])[0], key[8:-9]
        what = f"entry {name!r} of directory {parent}"
        if len(key) < 18 or key[-9:] != schema.NUL_EPOCH_0 or len(value) != DIRENT.size:
            yield f"{what}: malformed"
            continue
        ino, seq, kind, _ = DIRENT.unpack(value)
        inode = _inode(txn, ino)
        if inode is None:
            yield f"{what}: inode {ino} is missing or damaged"
        elif stat.S_IFMT(inode.mode) != kind:
            yield f"{what}: type {kind:#o}, but inode {ino} has mode {inode.mode:#o}"
        directory = _inode(txn, parent)
        if directory is None or not directory.is_dir:
            yield f"{what}: there is no such directory"
        if txn.get(schema.pack_u64_pair(parent, seq), None, txn.tables.dirseq) != (
            DIRSEQ.pack(ino, kind, 0) + name
        ):
            yield f"{what}: table dirseq does not have it under cookie {seq}"
        if txn.get(schema.parent_key(ino, parent, name), None, txn.tables.parent) is None:
            yield f"{what}: table parent does not have it"
        if max(ino, seq) >= next_id:
            yield f"{what}: numbers {ino}, {seq} have not been given out (next is {next_id})"


def _check_dirseqs(txn: ReadTransaction) -> Iterator[str]:
    for key, value in _rows(txn, txn.tables.dirseq):
        parent, seq = schema.U64_PAIR.unpack(key)
        name = value[DIRSEQ.size :]
        found = records.find_entry(txn, parent, name)
        if found is None or found[:2] != (DIRSEQ.unpack_from(value)[0], seq):
            yield f"cookie {seq} of directory {parent}: {name!r} is not in table dirent like that"


def _check_parents(txn: ReadTransaction) -> Iterator[str]:
    for key, _ in _rows(txn, txn.tables.parent):
        ino, parent, name = unpack_u64(key[:8])[0], unpack_u64(key[8:16])[0], key[16:]
        found = records.find_entry(txn, parent, name)
        if found is None or found[0] != ino:
            yield f"inode {ino}: its name {name!r} in directory {parent} is not in table dirent"


def _check_inodes(txn: ReadTransaction) -> Iterator[str]:
    for key, value in _rows(txn, txn.tables.inode):
        ino = unpack_u64(key[:8])[0]
        try:
            inode = schema.unpack_inode(value)
        except DamagedRecord as error:
            yield f"inode {ino}: {error}"
            continue
        if inode.ino != ino:
            yield f"inode {ino}: the record says {inode.ino}"
        yield from _check_links(txn, inode)
        if stat.S_ISLNK(inode.mode):
            target = txn.get(schema.pack_u64(ino), None, txn.tables.symlink)
            if target is None or len(target) != inode.size_bytes:
                yield f"inode {ino}: the target of the symbolic link is missing or of another length"


def _check_links(txn: ReadTransaction, inode: Inode) -> Iterator[str]:
    ino = inode.ino
    is_orphan = txn.get(schema.pack_u64(ino), None, txn.tables.orphan) is not None
    names = len(records.names_of(txn, ino))
    if is_orphan != (inode.nlink == 0):
        yield f"inode {ino}: link count {inode.nlink}, but table orphan says otherwise"
    if not inode.is_dir:
        if names != inode.nlink:
            yield f"inode {ino}: link count {inode.nlink}, but {names} names"
        return
    below = sum(1 for *_, kind in records.iter_entries(txn, ino) if kind == stat.S_IFDIR)
    if inode.nlink and inode.nlink != 2 + below:
        yield f"directory {ino}: link count {inode.nlink}, but {below} directories in it"
    # A clone that is being made has no name yet.
    tops = [ROOT_INO, *(job.target_ino for job in snapshots.jobs(txn) if job.is_clone)]
    is_hidden = not names and ino in tops
    if names != (1 if inode.nlink and ino != ROOT_INO and not is_hidden else 0):
        yield f"directory {ino}: {names} names"
    elif inode.nlink:
        try:
            if not any(records.is_ancestor(txn, top, ino) for top in tops):
                yield f"directory {ino}: not below the root"
        except DamagedRecord as error:
            yield f"directory {ino}: {error}"
    if not inode.nlink and records.has_entries(txn, ino):
        yield f"directory {ino}: removed, but not empty"


def _check_attachments(txn: ReadTransaction) -> Iterator[str]:
    for table, what in (
        (txn.tables.symlink, "target"),
        (txn.tables.xattr, "extended attribute"),
        (txn.tables.object, "object row"),
        (txn.tables.dirty, "dirty row"),
        (txn.tables.orphan, "orphan row"),
    ):
        for key, _ in _rows(txn, table):
            inode = _inode(txn, unpack_u64(key[:8])[0])
            if inode is None:
                yield f"{what} of inode {unpack_u64(key[:8])[0]}: there is no such inode"
            elif what == "extended attribute" and not inode.flags & schema.HAS_XATTR:
                yield f"inode {inode.ino}: has extended attributes, but not the flag"


def _check_objects(txn: ReadTransaction) -> Iterator[str]:
    for key, _ in _rows(txn, txn.tables.object):
        ino = unpack_u64(key)[0]
        inode = _inode(txn, ino)
        try:
            row = objects.object_of(txn, ino)
        except DamagedRecord as error:
            yield str(error)
            continue
        if row is None or inode is None or not inode.nlink:
            continue
        for object_key, _ in row.all_keys():
            owner = objects.owner_of_key(txn, object_key)
            if owner != ino:
                yield f"inode {ino}: its object {object_key!r} is owned by {owner}"


def _check_object_keys(txn: ReadTransaction) -> Iterator[str]:
    many: dict[int, set[bytes]] = {}
    for key, value in _rows(txn, txn.tables.objkey):
        ino = unpack_u64(value)[0]
        if key in many.get(ino, ()):
            continue
        held: list[str] = []
        try:
            row = objects.object_of(txn, ino)
            dirty = publish.dirty_row(txn, ino)
        except DamagedRecord:
            continue
        if row is not None:
            held += [known for known, _ in row.all_keys()]
        if dirty is not None:
            held += dirty.claims
        digests = {schema.object_key_digest(known) for known in held}
        if len(digests) > MANY_KEYS:
            # Decoding such a row for each of its keys would take for ever.
            many[ino] = digests
        if key not in digests:
            yield f"object key {key!r}: owned by inode {ino}, which does not say so"


def _check_dirty(txn: ReadTransaction) -> Iterator[str]:
    for key, value in _rows(txn, txn.tables.dirty):
        ino = unpack_u64(key)[0]
        inode = _inode(txn, ino)
        try:
            row = schema.decode_dirty(value)
        except ValueError as error:
            yield f"dirty row of inode {ino}: {error}"
            continue
        if row.ino != ino or (inode is not None and inode.valid_until_ns != schema.FOREVER_NS):
            yield f"dirty row of inode {ino}: the inode is valid only for a time, or is another"


def _check_snapshots(txn: ReadTransaction) -> Iterator[str]:
    rows = snapshots.every(txn)
    frontier = txn.get(schema.META_FRONTIER, None, txn.tables.meta)
    if bool(rows) != (frontier is not None):
        yield f"{len(rows)} snapshots, but the note of the newest one says otherwise"
    elif rows and unpack_u64(frontier[:8])[0] < rows[-1].epoch:
        yield "the note of the newest snapshot is older than the newest snapshot"
    for row in rows:
        try:
            past.inode(txn, row, row.root_ino)
        except (DamagedRecord, NotFound) as error:
            yield f"snapshot {row.name!r}: its directory: {error}"
    if txn.tables.oldobject is None:
        return
    for key, value in _rows(txn, txn.tables.oldobject):
        if not value:
            continue
        digest = schema.object_key_digest(schema.decode_object(value).key)
        if txn.get(digest + b"\0" + key, None, txn.tables.oldkey) is None:
            yield f"old object row of inode {unpack_u64(key[:8])[0]}: table oldkey does not have it"
    for key, _ in _rows(txn, txn.tables.oldkey):
        if not txn.get(key[-16:], b"", txn.tables.oldobject):
            yield f"table oldkey: inode {unpack_u64(key[-16:-8])[0]} has no such old object row"


def _check_loans(txn: ReadTransaction) -> Iterator[str]:
    table = txn.tables.loan
    if table is None:
        return
    for key, value in _rows(txn, table):
        if key[:1] == b"e":
            epoch, ino = schema.U64_PAIR.unpack(key[1:])
            known = loans.loan_of(txn, ino)
            if known is None or known.epoch != epoch:
                yield f"inode {ino}: has no loan from snapshot {epoch}, which says so"
            continue
        ino, loan = unpack_u64(key[1:])[0], schema.decode_loan(value)
        if txn.get(b"e" + schema.pack_u64_pair(loan.epoch, ino), None, table) is None:
            yield f"inode {ino}: snapshot {loan.epoch} does not know of its loan"
        if snapshots.find_kept(txn, loan.epoch) is None:
            yield f"inode {ino}: its bytes are on loan from snapshot {loan.epoch}, which is gone"
        inode = _inode(txn, ino)
        if inode is None or not inode.is_regular:
            yield f"inode {ino}: bytes are on loan to it, but it is no regular file"


def _rows(txn: ReadTransaction, table: object) -> Iterator[tuple[bytes, bytes]]:
    return iter(txn.cursor(table).iternext(True, True))


def _inode(txn: ReadTransaction, ino: int) -> Inode | None:
    try:
        return records.find_inode(txn, ino)
    except DamagedRecord:
        return None
