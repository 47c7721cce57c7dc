"""What the store takes by itself: tierfs's store client, without a file system around it.

The client has threads, and a process with threads cannot be forked safely: each function is meant for a
process of its own (``guarded``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tierfs.config import Settings
from tierfs.store.base import ObjectStore, Part
from tierfs.store.open import open_store

PART_BYTES = 16 * 1024 * 1024


def upload(url: str, shards: int, shard_bytes: int, threads: int) -> float:
    """Seconds for the store client to put all shards, that many parts at a time. In a process of its own."""
    store, prefix = _open(url)
    body = os.urandom(min(PART_BYTES, shard_bytes))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda number: store.list_page(f"{prefix}{number}"), range(threads)))  # connections
        began = time.monotonic()
        keys = [f"{prefix}rank{rank}.pt" for rank in range(shards)]
        if shard_bytes <= PART_BYTES:
            list(pool.map(lambda key: store.put(key, body), keys))
        else:
            uploads = list(pool.map(store.start_multipart, keys))
            parts = list(pool.map(partial(_part, store, body), _parts_of(keys, uploads, shard_bytes)))
            for key, upload_id in zip(keys, uploads, strict=True):
                store.complete_multipart(key, upload_id, [part for owner, part in parts if owner == key])
        seconds = time.monotonic() - began
    store.close()
    return seconds


def _parts_of(
    keys: Sequence[str], uploads: Sequence[str], size_bytes: int
) -> Iterator[tuple[str, str, int, int]]:
    """(key, upload, number, length)"""
    for offset in range(0, size_bytes, PART_BYTES):
        for key, upload_id in zip(keys, uploads, strict=True):
            yield key, upload_id, offset // PART_BYTES + 1, min(PART_BYTES, size_bytes - offset)


def _part(store: ObjectStore, body: bytes, part: tuple[str, str, int, int]) -> tuple[str, Part]:
    key, upload_id, number, length = part
    return key, store.upload_part(key, upload_id, number, memoryview(body)[:length])


def remove(url: str) -> None:
    """Delete everything below a URL. In a process of its own."""
    store, prefix = _open(url)
    page = store.list_page(prefix, recursive=True)
    store.delete_many([found.key for found in page.objects])
    store.close()


def _open(url: str) -> tuple[ObjectStore, str]:
    return open_store(Settings(source=url, mountpoint="/", state_dir="/"))
