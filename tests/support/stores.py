"""Stores to run a test against, by name."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator

from tierfs.store.base import ObjectStore
from tierfs.store.local import LocalStore

MIB = 1024 * 1024


def store_names() -> list[str]:
    return ["local", "local-sidecars"]


@contextlib.contextmanager
def open_named_store(name: str) -> Iterator[ObjectStore]:
    """An empty store of that kind."""
    with tempfile.TemporaryDirectory(prefix="tierfs-store-") as directory:
        store = LocalStore(directory, use_xattrs=name != "local-sidecars")
        try:
            yield store
        finally:
            store.close()
