"""Others change the bucket at random; look-ups and listings must come to what it holds, page by page."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.memory_store import MemoryStore
from tests.support.namespace import Namespace, open_namespace
from tierfs.errors import NotFound
from tierfs.namespace import publish, records, refresh, tree
from tierfs.namespace.check import problems
from tierfs.namespace.refresh import Refresher
from tierfs.store.base import ListPage
from tierfs.types import ROOT_INO

PAGE_KEYS = 7
NAMES = ["a", "b", "c", "d", "e", "f", "x y", "\u00e9", "\uf7ff"]


class SmallPages(MemoryStore):
    """Pages of a few keys, so that small trees take many."""

    def list_page(
        self, prefix: str, *, recursive: bool = False, token: str | None = None, limit: int = 1000
    ) -> ListPage:
        return super().list_page(prefix, recursive=recursive, token=token, limit=min(limit, PAGE_KEYS))


def path_of(key: str) -> bytes:
    """U+F7FF stands for the byte 0xff; the other names are what they are."""
    return key.replace("\uf7ff", "\udcff").encode("utf-8", "surrogateescape")


def random_key(draw: random.Random) -> str:
    depth = draw.choice((1, 1, 2, 2, 2, 3, 4))
    key = "/".join(draw.choice(NAMES) for _ in range(depth))
    return key + draw.choice(("", "", "", "", "", "/"))


def disturb(draw: random.Random, store: MemoryStore) -> None:
    """What other clients do between two looks."""
    for _ in range(draw.randrange(12)):
        keys = store.keys()
        if keys and draw.random() < 0.45:
            store.remove(draw.choice(keys))
        elif keys and draw.random() < 0.2:
            prefix = draw.choice(keys).rpartition("/")[0]
            for key in keys:
                if key.startswith(prefix + "/"):
                    store.remove(key)
        else:
            store.set(random_key(draw), b"x" * draw.randrange(4))
    if draw.random() < 0.1:
        store.set(draw.choice(("a//b", "../x", "b/./c", "c/" + "n" * 256)))


def expected(store: MemoryStore) -> dict[bytes, int | None]:
    """Path -> size, None for a directory: what a mount of this bucket shows."""
    shown: dict[bytes, int | None] = {}
    for key in store.bodies():
        parts = key.split("/")
        path = b""
        for number, part in enumerate(parts):
            name = path_of(part)
            if part in ("", ".", "..") or len(name) > 255:
                break
            path = path + b"/" + name if path else name
            if number < len(parts) - 1:
                shown[path] = None
            elif shown.get(path, 0) is not None:
                shown[path] = store.info(key).size_bytes
    return shown


def found(ns: Namespace) -> dict[bytes, int | None]:
    shown: dict[bytes, int | None] = {}
    with ns.db.read() as txn:
        waiting = [(ROOT_INO, b"")]
        while waiting:
            directory, above = waiting.pop()
            for _, name, ino, _ in records.iter_entries(txn, directory):
                path = above + b"/" + name if above else name
                inode = tree.get(txn, ino)
                shown[path] = None if inode.is_dir else inode.size_bytes
                if inode.is_dir:
                    waiting.append((ino, path))
                else:
                    row = publish.object_of(txn, ino)
                    assert row is not None
                    assert ns.store.info(row.key).etag == row.etag
    return shown


def is_ambiguous(store: MemoryStore, path: bytes, shown: dict[bytes, int | None]) -> bool:
    """Whether the path, or one above it, is the name of an object and of a directory.

    One HEAD, which is all that a known file in a large directory costs, does not tell.
    """
    parts = path.split(b"/")
    above = [b"/".join(parts[: number + 1]) for number in range(len(parts))]
    objects = {path_of(key) for key in store.bodies()}
    return any(each in objects and shown.get(each, 0) is None for each in above)


async def look(refresher: Refresher, path: bytes) -> int | None:
    """Size of what a walk over names finds, None for a directory. Raises ``NotFound``."""
    ino, inode = ROOT_INO, None
    for name in path.split(b"/"):
        if inode is not None and not inode.is_dir:
            raise NotFound("a file above")
        inode = await refresher.lookup(ino, name)
        ino = inode.ino
    assert inode is not None
    return None if inode.is_dir else inode.size_bytes


@pytest.mark.parametrize("seed", range(10))
async def test_the_tree_comes_to_what_the_bucket_holds(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    small_entries = draw.choice((0, 3, 2000))
    monkeypatch.setattr(refresh, "SMALL_ENTRIES", small_entries)
    with open_namespace(tmp_path) as ns:
        ns.store = SmallPages(now_ns=ns.clock, in_order=draw.random() < 0.5)
        refresher = ns.refresher()
        for _ in range(25):
            disturb(draw, ns.store)
            ns.clock.advance(draw.choice((61, 61, 1000)))
            shown = expected(ns.store)
            paths = [*draw.sample(sorted(shown), min(4, len(shown))), path_of(random_key(draw).rstrip("/"))]
            for path in paths:
                if draw.random() < 0.5 or (small_entries < 2000 and is_ambiguous(ns.store, path, shown)):
                    continue
                try:
                    size_bytes = await look(refresher, path)
                except NotFound:
                    assert path not in shown, path
                else:
                    assert (path, size_bytes) in shown.items()
            if draw.random() < 0.6:
                ns.clock.advance(61)
                await refresher.import_prefix("", draw.choice((1, 4)))
                assert found(ns) == shown
            with ns.db.read() as txn:
                assert list(problems(txn)) == []
                orphans = tree.orphans(txn)
                assert publish.dirty_count(txn) == publish.doomed_count(txn) == 0
            assert set(orphans) <= {notice.old_ino for notice in ns.invalidations}
            if draw.random() < 0.5:
                ns.change(lambda txn, orphans=orphans: [tree.reap(txn, ino) for ino in orphans])
