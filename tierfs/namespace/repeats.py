"""Numbers of requests whose change has been committed: a row each in table ``meta``, at most ``KEPT``.

Functions of a transaction, see the package docstring.
"""

from __future__ import annotations

import struct

from tierfs.namespace.transaction import ReadTransaction, WriteTransaction

KEPT = 1 << 16
"""More than requests that can wait for an answer at once."""
_PREFIX = b"done:"
_SLOT = struct.Struct(">H")
_NUMBER = struct.Struct(">I")


def _key(number: int) -> bytes:
    return _PREFIX + _SLOT.pack(number % KEPT)


def note_done(txn: WriteTransaction, number: int) -> None:
    """The change of request ``number`` is part of this transaction."""
    txn.put(_key(number), _NUMBER.pack(number), db=txn.tables.meta)


def is_done(txn: ReadTransaction, number: int) -> bool:
    raw: bytes | None = txn.get(_key(number), None, txn.tables.meta)
    return raw == _NUMBER.pack(number)


def forget_all(txn: WriteTransaction) -> None:
    """A new mount begins to count anew."""
    cursor = txn.cursor(txn.tables.meta)
    keys = []
    if cursor.set_range(_PREFIX):
        for key in cursor.iternext(True, False):
            if not key.startswith(_PREFIX):
                break
            keys.append(bytes(key))
    for key in keys:
        txn.delete(key, txn.tables.meta)
