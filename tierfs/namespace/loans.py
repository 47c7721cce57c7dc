"""Bytes on loan: files made from a snapshot have none of their own until they have been published.

Such an inode has a size and a content id, but no object. Its bytes are those of an inode in a snapshot, found
there by ``past`` wherever they are now: at their own key, moved, or in the copy that was made before they
were overwritten. The publisher copies them, on the server, to the key of the file; ``publish.set_object``
ends the loan. Until then the snapshot's records stay, also if it is deleted (``snapshots``), and so does
everything that it reads.

The content id is made from the identity of the object and the inode's number: no two inodes share bytes in a
tier, where one of them may be written in place, and whoever rebuilds a tree once more finds out that a file
has the right bytes already.
"""

from __future__ import annotations

import hashlib

from tierfs.errors import NotFound, StaleContent
from tierfs.namespace import past, schema, snapshots
from tierfs.namespace.objects import object_of
from tierfs.namespace.schema import LoanRow, ObjectRow, SnapshotRow, pack_u64, pack_u64_pair
from tierfs.namespace.transaction import ReadTransaction, WriteTransaction
from tierfs.types import NO_CONTENT, ContentId, Inode, ObjectInfo, ObjectRef


def lend(txn: WriteTransaction, ino: int, row: SnapshotRow, source_ino: int) -> None:
    """The bytes of ``ino`` are those of ``source_ino`` in that snapshot."""
    txn.put(b"i" + pack_u64(ino), schema.encode_row(LoanRow(row.epoch, source_ino)), db=txn.tables.loan)
    txn.put(b"e" + pack_u64_pair(row.epoch, ino), b"", db=txn.tables.loan)


def loan_of(txn: ReadTransaction, ino: int) -> LoanRow | None:
    table = txn.tables.loan
    raw = txn.get(b"i" + pack_u64(ino), None, table) if table is not None else None
    return None if raw is None else schema.decode_loan(raw)


def give_back(txn: WriteTransaction, ino: int) -> None:
    """The inode has an object of its own, or is gone. Nothing happens if it has no loan."""
    loan = loan_of(txn, ino)
    if loan is None:
        return
    txn.delete(b"i" + pack_u64(ino), txn.tables.loan)
    txn.delete(b"e" + pack_u64_pair(loan.epoch, ino), txn.tables.loan)
    snapshots.let_go(txn, loan.epoch)


def source_of(txn: ReadTransaction, ino: int) -> ObjectInfo | None:
    """The object that holds the bytes on loan now; None: there is no loan, or nobody knows any more."""
    loan = loan_of(txn, ino)
    row = snapshots.find_kept(txn, loan.epoch) if loan is not None else None
    if loan is None or row is None:
        return None
    try:
        ref = past.content(txn, row, loan.ino)
    except (NotFound, StaleContent):
        return None
    return None if ref is None else ObjectInfo(ref.key, ref.size_bytes, ref.etag, 0, ref.version_id)


def ref_of(txn: ReadTransaction, inode: Inode) -> ObjectRef | None:
    """Where the bytes of a regular file are in the bucket; None if only we have them, or there are none."""
    if inode.flags & schema.DATA_LOCAL or inode.content_id == NO_CONTENT:
        return None
    row = object_of(txn, inode.ino)
    held = row.info if row is not None else source_of(txn, inode.ino)
    if held is None:
        return None
    return ObjectRef(inode.content_id, held.key, held.etag, held.size_bytes, held.version_id)


def content_id_of_loan(ino: int, held: ObjectRow) -> ContentId:
    """Of an inode that gets the bytes of that object."""
    text = "\0".join(("loan", str(ino), held.key, held.etag, str(held.size_bytes), held.version_id or ""))
    return ContentId(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest())
