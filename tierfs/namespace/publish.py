"""What the bucket should hold against what it holds: the tables object, objkey, dirty and doomed.

Publishing is state-based. What should be is derived from names (``key_of``); what is, stands in the object
rows, one per inode, and in ``objkey``, which says for every key that we know to exist which inode its
bytes belong to. ``dirty`` lists inodes where the two may differ, ``doomed`` lists keys that nobody owns any
more. Doing any step twice does no harm.

Rules that keep a crash from becoming a loss:

* A key that another inode owns (``owner_of_key``) is not overwritten before that inode has been moved.
* ``claim_keys`` before any request that writes: should the process die in between, the keys are known, and
  dooming the inode or moving it takes care of them; a listing meanwhile does not take our own upload for
  somebody else's file. So every key that we may have written is owned or doomed, at any time.
* ``set_object`` after the store acknowledged. It takes the key out of ``doomed``.
* A doomed key is deleted only if ``is_key_needed`` says no: a live name will overwrite it, and its ETag is
  the version that the overwrite expects (``expected_etag``).
* Renaming a directory moves nothing here: one dirty row for the directory, one doomed prefix.
  ``next_moved_children`` finds in batches what still lies under old keys, and ``is_prefix_needed`` when
  that is over.

Functions of a transaction, see the package docstring. Nothing here raises but ``NotFound`` where said, and
``DamagedRecord``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from tierfs.errors import DamagedRecord
from tierfs.namespace import loans, records, schema
from tierfs.namespace.loans import ref_of as ref_of
from tierfs.namespace.moved import MoveCursor as MoveCursor
from tierfs.namespace.moved import is_prefix_needed as is_prefix_needed
from tierfs.namespace.moved import next_moved_children as next_moved_children
from tierfs.namespace.moved import owners_below as owners_below
from tierfs.namespace.objects import RESERVED_PREFIX as RESERVED_PREFIX
from tierfs.namespace.objects import disown_key
from tierfs.namespace.objects import keep_object as keep_object
from tierfs.namespace.objects import key_of as key_of
from tierfs.namespace.objects import key_of_path as key_of_path
from tierfs.namespace.objects import keys_agree as keys_agree
from tierfs.namespace.objects import live_inode_at as live_inode_at
from tierfs.namespace.objects import mark_in_store as mark_in_store
from tierfs.namespace.objects import object_of as object_of
from tierfs.namespace.objects import owner_of_key as owner_of_key
from tierfs.namespace.objects import parked_key as parked_key
from tierfs.namespace.objects import put_object_row as put_object_row
from tierfs.namespace.schema import DirtyRow as DirtyRow
from tierfs.namespace.schema import DoomedRow as DoomedRow
from tierfs.namespace.schema import ObjectRow as ObjectRow
from tierfs.namespace.schema import pack_u64, unpack_u64
from tierfs.namespace.transaction import ReadTransaction as ReadTransaction
from tierfs.namespace.transaction import WriteTransaction as WriteTransaction
from tierfs.types import ROOT_INO, ObjectInfo

_REASONS = {name: bit for bit, name in schema.REASON_NAMES.items()}

# -- objects ------------------------------------------------------------------------------------------


def set_object(
    txn: WriteTransaction, ino: int, info: ObjectInfo, links: Sequence[ObjectInfo], now_ns: int
) -> bool:
    """The store acknowledged: ``info`` (and ``links``, for further names) now hold this inode.

    What the row had before, or the inode had claimed, and is not among these loses its owner and is doomed.
    If the inode has no name any more, what was written is doomed instead and the result is False.
    """
    tables = txn.tables
    inode = records.find_inode(txn, ino)
    row = ObjectRow(
        key=info.key, etag=info.etag, version_id=info.version_id, size_bytes=info.size_bytes,
        mtime_ns=info.mtime_ns, confirmed_ns=now_ns, also=tuple((link.key, link.etag) for link in links),
    )  # fmt: skip
    dirty = dirty_row(txn, ino)
    if dirty is not None and dirty.claims:
        _put_dirty(txn, msgspec.structs.replace(dirty, claims=()))
    if inode is None or inode.flags & schema.DATA_LOCAL:
        # Else the same bytes have moved or are labelled anew: snapshots that see them follow.
        keep_object(txn, ino)
    written = {key for key, _ in row.all_keys()}
    named = inode is not None and inode.nlink > 0
    for key, etag in _held_keys(txn, ino, dirty).items():
        owner = owner_of_key(txn, key)
        disown_key(txn, key, ino)
        if named and key not in written and owner in (None, ino):
            doom(txn, key, etag, now_ns, ino=ino)
    if inode is None or not inode.nlink:
        if inode is not None:
            txn.put(pack_u64(ino), schema.encode_row(row), db=tables.object)
        for key, etag in row.all_keys():
            if owner_of_key(txn, key) is None:
                doom(txn, key, etag, now_ns, ino=ino)
        return False
    for key, _ in row.all_keys():
        owner = owner_of_key(txn, key)
        if owner is not None and owner != ino:
            _take_key(txn, owner, key, now_ns)
    put_object_row(txn, ino, row)
    loans.give_back(txn, ino)
    wanted = key_of(txn, ino)
    for key, _ in row.all_keys():
        txn.delete(schema.doomed_table_key(key, False), tables.doomed)
        if key not in wanted:
            _hide_stray_prefix(txn, key, ino, now_ns)
    if inode.flags & schema.UNPUBLISHED:
        schema.put_inode(txn, schema.replace_inode(inode, flags=inode.flags & ~schema.UNPUBLISHED))
    mark_in_store(txn, ino)
    return True


def file_system_id(txn: ReadTransaction) -> str:
    """Names this namespace among all that write to the bucket (32 hex digits)."""
    raw: bytes = txn.get(schema.META_UUID, None, txn.tables.meta)
    return raw.hex()


def disown(txn: WriteTransaction, ino: int, key: str) -> None:
    """``key`` holds somebody else's object now: the inode does not own it any more."""
    keep_object(txn, ino)
    disown_key(txn, key, ino)
    dirty = dirty_row(txn, ino)
    if dirty is not None and key in dirty.claims:
        # Else the next claim would doom the key, and with it what is somebody else's.
        kept_claims = tuple(claim for claim in dirty.claims if claim != key)
        _put_dirty(txn, msgspec.structs.replace(dirty, claims=kept_claims))
    row = object_of(txn, ino)
    if row is None:
        return
    kept = [(other, etag) for other, etag in row.all_keys() if other != key]
    if not kept:
        txn.delete(pack_u64(ino), txn.tables.object)
    elif row.key == key:
        key, etag = kept[0]
        row = msgspec.structs.replace(row, key=key, etag=etag, version_id=None, also=tuple(kept[1:]))
        put_object_row(txn, ino, row)
    else:
        put_object_row(txn, ino, msgspec.structs.replace(row, also=tuple(kept[1:])))


def give_up_object(txn: WriteTransaction, ino: int, now_ns: int) -> None:
    """The inode needs nothing of what it has in the bucket: all that is doomed, and it is published anew."""
    for key, etag in _held_keys(txn, ino, dirty_row(txn, ino)).items():
        if owner_of_key(txn, key) in (None, ino):
            doom(txn, key, etag, now_ns, ino=ino)
        disown(txn, ino, key)
    mark_dirty(txn, ino, schema.MOVED, now_ns)


def move_orphan(txn: WriteTransaction, ino: int, info: ObjectInfo) -> None:
    """The object of an inode without a name has been copied to a doomed key, for those who have it open."""
    row = object_of(txn, ino)
    inode = records.find_inode(txn, ino)
    if row is not None and inode is not None and not inode.nlink:
        row = msgspec.structs.replace(row, key=info.key, etag=info.etag, version_id=info.version_id, also=())
        txn.put(pack_u64(ino), schema.encode_row(row), db=txn.tables.object)


def expected_etag(txn: ReadTransaction, ino: int, key: str) -> str | None:
    """The ETag that ``key`` should have before this inode is written to it; None: nothing is there.

    Empty: an upload of ours that never ended may have left something there: write without a condition.
    """
    row = object_of(txn, ino)
    if row is not None:
        for known, etag in row.all_keys():
            if known == key:
                return etag
    doomed = doomed_row(txn, key)
    return doomed.etag if doomed is not None else None


def object_is_current(txn: ReadTransaction, ino: int) -> bool:
    """Whether names and object rows of this inode agree and nothing waits to be published."""
    if dirty_row(txn, ino) is not None:
        return False
    return keys_agree(txn, ino)


# -- dirty --------------------------------------------------------------------------------------------


def mark_dirty(txn: WriteTransaction, ino: int, reason: int | str, now_ns: int) -> None:
    """This inode must be (re)published. ``reason``: ``schema.CONTENT`` and so on, or the word for it.

    The local state is now ahead of the bucket: the inode record becomes valid for good. Write a changed
    inode record before calling this, not after. The root is never published.
    """
    if ino == ROOT_INO:
        return
    bits = _REASONS[reason] if isinstance(reason, str) else reason
    known = dirty_row(txn, ino)
    # Generations also grow across rows that came and went: LMDB's transaction ids only grow.
    generation = txn.raw.id() << 20
    if known is None:
        row = DirtyRow(ino, now_ns, generation, bits)
    else:
        row = DirtyRow(
            ino, known.since_ns, max(known.generation + 1, generation), known.reasons | bits, known.claims
        )
    _put_dirty(txn, row)
    inode = records.find_inode(txn, ino)
    if inode is not None and inode.valid_until_ns != schema.FOREVER_NS:
        schema.put_inode(txn, schema.replace_inode(inode, valid_until_ns=schema.FOREVER_NS))


def mark_created(txn: WriteTransaction, ino: int, now_ns: int) -> None:
    """``mark_dirty(CREATED)`` for an inode that has just been made: there is no row yet."""
    _put_dirty(txn, DirtyRow(ino, now_ns, txn.raw.id() << 20, schema.CREATED))


def dirty_row(txn: ReadTransaction, ino: int) -> DirtyRow | None:
    raw = txn.get(pack_u64(ino), None, txn.tables.dirty)
    return None if raw is None else _decode_dirty(raw, ino)


def is_dirty(txn: ReadTransaction, ino: int) -> bool:
    return txn.get(pack_u64(ino), None, txn.tables.dirty) is not None


def dirty_entries(txn: ReadTransaction, after_ino: int = 0, limit: int = 1000) -> list[DirtyRow]:
    """The next rows in inode order."""
    rows: list[DirtyRow] = []
    for row in iter_dirty(txn, after_ino):
        if len(rows) >= limit:
            break
        rows.append(row)
    return rows


def iter_dirty(txn: ReadTransaction, after_ino: int = 0) -> Iterator[DirtyRow]:
    """Every row in inode order; inside one transaction."""
    cursor = txn.cursor(txn.tables.dirty)
    if cursor.set_range(pack_u64(after_ino + 1)):
        for key, value in cursor.iternext(True, True):
            yield _decode_dirty(value, unpack_u64(key)[0])


def dirty_count(txn: ReadTransaction) -> int:
    """Constant time."""
    return txn.entries(txn.tables.dirty)


def dirty_totals(txn: ReadTransaction) -> tuple[int, int]:
    """(inodes, bytes of file data that only we have); walks all rows: about 3 us each."""
    count = size_bytes = 0
    for row in iter_dirty(txn):
        inode = records.find_inode(txn, row.ino)
        if inode is not None:
            count += 1
            if inode.flags & schema.DATA_LOCAL:
                size_bytes += inode.size_bytes
    return count, size_bytes


def forget_dirty(txn: WriteTransaction, ino: int, generation: int) -> bool:
    """The inode as it was at ``generation`` is in the bucket. False: it has changed since, publish again.

    Also False when the object lies under another key than the inode's names say (a directory above was
    renamed meanwhile); the row stays. Otherwise the flags ``DATA_LOCAL`` and ``UNPUBLISHED`` go, and the
    inode is believed for a TTL from when the store last confirmed it: do not write an inode record that
    was read before.
    """
    row = dirty_row(txn, ino)
    if row is None:
        return True
    if row.generation != generation:
        return False
    inode = records.find_inode(txn, ino)
    if inode is not None and inode.nlink:
        if not keys_agree(txn, ino):
            _put_dirty(txn, msgspec.structs.replace(row, reasons=row.reasons | schema.MOVED))
            return False
        held = object_of(txn, ino)
        if held is not None:
            flags = inode.flags & ~(schema.DATA_LOCAL | schema.UNPUBLISHED)
            valid_until_ns = held.confirmed_ns + txn.tables.ttl_ns
            schema.put_inode(txn, schema.replace_inode(inode, flags=flags, valid_until_ns=valid_until_ns))
    _give_up_claims(txn, row, (), row.since_ns)
    txn.delete(pack_u64(ino), txn.tables.dirty)
    return True


def claim_keys(txn: WriteTransaction, ino: int, keys: Sequence[str], now_ns: int) -> bool:
    """Requests that write this inode to ``keys``, all those of its names, are about to start.

    False: another inode owns one of them, the inode is not dirty, or its names say something else by now;
    then do not start. A directory takes the key of its marker from another directory, which needs it for
    nothing: it has moved, and gets a new marker. The claim ends with ``set_object``. One left behind by a
    crash is replaced by the next; what it may have written is doomed.
    """
    row = dirty_row(txn, ino)
    inode = records.find_inode(txn, ino)
    if row is None or inode is None or key_of(txn, ino) != list(keys):
        return False
    others: list[tuple[int, str]] = []
    for key in keys:
        owner = owner_of_key(txn, key)
        if owner is not None and owner != ino:
            if not (inode.is_dir and _is_directory(txn, owner)):
                return False
            others.append((owner, key))
    for owner, key in others:
        _take_key(txn, owner, key, now_ns)
    left = _give_up_claims(txn, row, keys, now_ns)
    _put_dirty(txn, msgspec.structs.replace(row, claims=(*keys, *left)))
    for key in keys:
        txn.put(schema.object_key_digest(key), pack_u64(ino), db=txn.tables.objkey)
    mark_in_store(txn, ino)
    return True


def drop_claims(txn: WriteTransaction, ino: int, now_ns: int) -> None:
    """No request is writing this inode now: what earlier ones may have left at claimed keys is doomed."""
    row = dirty_row(txn, ino)
    if row is not None and row.claims:
        left = _give_up_claims(txn, row, (), now_ns)
        _put_dirty(txn, msgspec.structs.replace(row, claims=left))


# -- doomed -------------------------------------------------------------------------------------------


def doom(
    txn: WriteTransaction, key: str, etag: str, now_ns: int, *, ino: int = 0, prefix: bool = False
) -> None:
    """No name maps to this object (or prefix) any more: it has to go from the bucket."""
    row = DoomedRow(key, etag, now_ns, prefix, ino)
    txn.put(schema.doomed_table_key(key, prefix), schema.encode_row(row), db=txn.tables.doomed)


def doomed_row(txn: ReadTransaction, key: str, *, prefix: bool = False) -> DoomedRow | None:
    raw = txn.get(schema.doomed_table_key(key, prefix), None, txn.tables.doomed)
    return None if raw is None else schema.decode_doomed(raw)


def doomed_entries(
    txn: ReadTransaction, cursor: bytes | None = None, limit: int = 1000
) -> tuple[list[DoomedRow], bytes | None]:
    """The next rows, keys before prefixes, and where to go on (None: that was the end)."""
    position = txn.cursor(txn.tables.doomed)
    found = position.set_range(cursor) if cursor is not None else position.first()
    rows: list[DoomedRow] = []
    if found:
        for key, value in position.iternext(True, True):
            if len(rows) >= limit:
                return rows, key
            rows.append(schema.decode_doomed(value))
    return rows, None


def doomed_count(txn: ReadTransaction) -> int:
    """Constant time."""
    return txn.entries(txn.tables.doomed)


def forget_doomed(txn: WriteTransaction, row: DoomedRow) -> bool:
    """The object is gone from the bucket (or the prefix is no longer needed).

    A key that a live name will overwrite stays doomed until that has happened (``set_object``): if the
    name went away before, the old object would come back to life. False: it stays.
    """
    if not row.prefix and owner_of_key(txn, row.key) is None and live_inode_at(txn, row.key) is not None:
        return False
    return txn.delete(schema.doomed_table_key(row.key, row.prefix), txn.tables.doomed)


def note_deleted(txn: WriteTransaction, row: DoomedRow) -> None:
    """The store has deleted the row's object: a listing that began before must not bring it back."""
    txn.tables.departures.note(row.key, prefix=row.prefix)


def is_key_needed(txn: ReadTransaction, key: str) -> bool:
    """Whether an inode owns this key, or a live name maps to it (and will overwrite what is there)."""
    return owner_of_key(txn, key) is not None or live_inode_at(txn, key) is not None


def covering_prefix(txn: ReadTransaction, key: str) -> DoomedRow | None:
    """The doomed prefix that ``key`` (or a prefix ending in ``/``) lies under, if there is one."""
    if not txn.entries(txn.tables.doomed):
        return None
    end = len(txn.tables.prefix)
    while (end := key.find("/", end) + 1) > 0:
        row = doomed_row(txn, key[:end], prefix=True)
        if row is not None:
            return row
    return None


# -- private ------------------------------------------------------------------------------------------


def release(txn: WriteTransaction, ino: int, now_ns: int) -> None:
    """The last name of an inode is gone: doom its objects, drop its dirty row.

    The object row stays with the orphan, so that whoever has it open can read on.
    """
    keep_object(txn, ino)
    dirty = dirty_row(txn, ino)
    for key, etag in _held_keys(txn, ino, dirty).items():
        # The key may be another inode's by now (claimed over it); then that one takes care of it.
        if owner_of_key(txn, key) in (None, ino):
            doom(txn, key, etag, now_ns, ino=ino)
        disown_key(txn, key, ino)
    if dirty is not None:
        txn.delete(pack_u64(ino), txn.tables.dirty)


def _held_keys(txn: ReadTransaction, ino: int, dirty: DirtyRow | None) -> dict[str, str]:
    """Key -> ETag of what the inode has or may have in the store. Empty: any upload of ours may be there."""
    row = object_of(txn, ino)
    held = dict(row.all_keys()) if row is not None else {}
    if dirty is not None:
        held.update(dict.fromkeys(dirty.claims, ""))
    return held


def _take_key(txn: WriteTransaction, owner: int, key: str, now_ns: int) -> None:
    """``key`` is overwritten although ``owner`` had something there: that one has to be published anew."""
    disown(txn, owner, key)
    if records.find_inode(txn, owner) is not None:
        mark_dirty(txn, owner, schema.MOVED, now_ns)


def _is_directory(txn: ReadTransaction, ino: int) -> bool:
    inode = records.find_inode(txn, ino)
    return inode is not None and inode.is_dir


def _give_up_claims(
    txn: WriteTransaction, row: DirtyRow, kept: Sequence[str], now_ns: int
) -> tuple[str, ...]:
    """Uploads to claimed keys may have ended without a record of it: then those objects have to go.

    Returns the claims, besides ``kept``, of keys that the inode owns by its object row: they stay claimed
    until that row changes, for what lies there may be newer than the row says.
    """
    held = object_of(txn, row.ino)
    held_keys = {key for key, _ in held.all_keys()} if held is not None else set()
    left: list[str] = []
    for claim in row.claims:
        if claim in kept:
            continue
        if claim in held_keys:
            left.append(claim)
        elif owner_of_key(txn, claim) in (None, row.ino):
            disown_key(txn, claim, row.ino)
            doom(txn, claim, "", now_ns, ino=row.ino)
    return tuple(left)


def _put_dirty(txn: WriteTransaction, row: DirtyRow) -> None:
    txn.put(pack_u64(row.ino), schema.encode_row(row), db=txn.tables.dirty)


def _decode_dirty(raw: bytes, ino: int) -> DirtyRow:
    try:
        return schema.decode_dirty(raw)
    except msgspec.DecodeError as error:
        raise DamagedRecord(f"table dirty, key {ino}: {error}") from None


def _hide_stray_prefix(txn: WriteTransaction, key: str, ino: int, now_ns: int) -> None:
    """An object landed under a directory that has been renamed meanwhile: listings must not show that
    directory again. Doom the first prefix of the key that is no live directory."""
    if key.startswith(txn.tables.prefix + RESERVED_PREFIX):
        return
    end = len(txn.tables.prefix)
    while (end := key.find("/", end) + 1) > 0:
        if live_inode_at(txn, key[:end]) is None:
            doom(txn, key[:end], "", now_ns, ino=ino, prefix=True)
            return
