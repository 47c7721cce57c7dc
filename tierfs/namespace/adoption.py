"""Names and objects that are known without a listing, put into the namespace as a listing would have."""

from __future__ import annotations

import stat
from collections.abc import Mapping

from tierfs.errors import NotADirectory, NotFound
from tierfs.namespace import publish, records
from tierfs.namespace.listing import Changes, Listing, apply_entries
from tierfs.namespace.transaction import WriteTransaction
from tierfs.types import ROOT_INO, ObjectInfo


def adopt(txn: WriteTransaction, path: bytes, files: Mapping[bytes, ObjectInfo], listing: Listing) -> Changes:
    """Add what is not known yet of directory ``path``, the directories on the way, and these files in it.

    What is known stays as it is, valid or not. Raises ``NotADirectory``, ``NotFound`` where what lies in the
    bucket may not be shown, because the name was removed here and the bucket does not know yet.
    """
    total = Changes()
    directory = records.get_directory(txn, ROOT_INO)
    for name in filter(None, path.split(b"/")):
        prefix = _prefix_of(txn, directory.ino)
        found = records.find_entry(txn, directory.ino, name)
        if found is None:
            total.extend(apply_entries(txn, directory, prefix, [name], (), listing))
            found = records.find_entry(txn, directory.ino, name)
        text = path.decode("utf-8", "backslashreplace")
        if found is None:
            raise NotFound(f"{text}: was removed here, and is still to be removed from the bucket")
        if found[2] != stat.S_IFDIR:
            raise NotADirectory(f"{text}: there is a file in the way")
        directory = records.get_directory(txn, found[0])
    prefix = _prefix_of(txn, directory.ino)
    unknown = [
        (name, info) for name, info in files.items() if records.find_entry(txn, directory.ino, name) is None
    ]
    total.extend(apply_entries(txn, directory, prefix, (), unknown, listing))
    return total


def _prefix_of(txn: WriteTransaction, ino: int) -> str:
    key = publish.key_of(txn, ino)[0]
    if key and not key.endswith("/"):
        raise NotFound(f"{key}: the path is longer than a key may be")
    return key
