"""Changes of a tier's index that are not committed yet: what happened to each content since the last one.

A ``Batch`` is filled and looked at on the trio thread; ``apply`` writes it inside a transaction, in a
worker. By then nobody changes that batch any more (``TierIndex.take_batch`` begins another). One that could
not be committed is merged with what came later, and tried again.

Nothing is awaited; raises what LMDB raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tierfs.cache import record
from tierfs.types import ContentId

KEY_BYTES = 20
"""Content id, extent number (big endian)."""


@dataclass(slots=True)
class Change:
    """What happened to one content since the last commit: all gone first (or not), then these extents."""

    dropped: bool = False
    extents: dict[int, bytes | None] = field(default_factory=dict)
    pin: bool | None = None


Batch = dict[ContentId, Change]


def merge(batch: Batch, content_id: ContentId, change: Change) -> None:
    """``change`` happened after what ``batch`` says."""
    old = batch.get(content_id)
    if old is None or change.dropped:
        if old is not None and change.pin is None:
            change.pin = old.pin
        batch[content_id] = change
        return
    old.extents.update(change.extents)
    if change.pin is not None:
        old.pin = change.pin


def apply(txn: Any, extent_table: Any, pin_table: Any, content_id: ContentId, change: Change) -> int:
    """Write it; returns by how many bytes on the device the committed records have grown."""
    table, delta = extent_table, 0
    if change.dropped:
        for key in list(keys_of(txn, content_id, table)):
            old = txn.pop(key, db=table)
            delta -= record.allocated_in(old, int.from_bytes(key[16:], "big"))
    for number, value in change.extents.items():
        key = content_id + number.to_bytes(4, "big")
        if value is None:
            old = txn.pop(key, db=table)
        else:
            old = txn.get(key, db=table)
            txn.put(key, value, db=table)
            delta += record.allocated_in(value, number)
        if old is not None:
            delta -= record.allocated_in(old, number)
    if change.pin is True:
        txn.put(content_id, b"", db=pin_table)
    elif change.pin is False:
        txn.delete(content_id, db=pin_table)
    return delta


def keys_of(txn: Any, content_id: ContentId, table: Any = None) -> Iterator[bytes]:
    """Keys of all committed records of that content, in order; of the default table without ``table``."""
    cursor = txn.cursor(db=table) if table is not None else txn.cursor()
    if cursor.set_range(content_id):
        for key in cursor.iternext(keys=True, values=False):
            if bytes(key[:16]) != content_id:
                return
            if len(key) == KEY_BYTES:
                yield bytes(key)
