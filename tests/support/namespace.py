"""A namespace without a mount: an injected clock, a database, the bucket that it belongs to."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tests.support.memory_store import MemoryStore
from tierfs.config import Settings
from tierfs.namespace import tree
from tierfs.namespace.db import Database, WriteTransaction
from tierfs.namespace.listing import Invalidation
from tierfs.namespace.refresh import Refresher
from tierfs.types import NO_CONTENT, ROOT_INO, ContentId, Inode

T = TypeVar("T")
SECOND_NS = 10**9
START_NS = 1_700_000_000 * SECOND_NS
FILE = stat.S_IFREG | 0o644
DIRECTORY = stat.S_IFDIR | 0o755


@dataclass(slots=True)
class Clock:
    """Wall clock that stands still until somebody moves it."""

    ns: int = START_NS

    def __call__(self) -> int:
        return self.ns

    def advance(self, seconds: float) -> None:
        self.ns += int(seconds * SECOND_NS)


@dataclass(slots=True)
class Namespace:
    """A database with shorthands for one-step changes in the root directory."""

    db: Database
    clock: Clock
    store: MemoryStore
    invalidations: list[Invalidation] = field(default_factory=list)

    def change(self, fn: Callable[[WriteTransaction], T]) -> T:
        return self.db.commit_now(fn)

    def create(
        self,
        name: str | bytes,
        *,
        parent: int = ROOT_INO,
        mode: int = FILE,
        uid: int = 1000,
        gid: int = 1000,
        target: bytes | None = None,
        content_id: ContentId = NO_CONTENT,
        rdev: int = 0,
    ) -> Inode:
        raw = name.encode() if isinstance(name, str) else name
        return self.change(
            lambda txn: tree.create(
                txn, parent, raw, mode=mode, uid=uid, gid=gid, target=target, content_id=content_id,
                rdev=rdev, now_ns=self.clock.ns,
            )
        )  # fmt: skip

    def mkdir(self, name: str, parent: int = ROOT_INO) -> Inode:
        return self.create(name, parent=parent, mode=DIRECTORY)

    def get(self, ino: int) -> Inode:
        with self.db.read() as txn:
            return tree.get(txn, ino)

    def resolve(self, path: str) -> Inode:
        with self.db.read() as txn:
            return tree.resolve(txn, path.encode())

    def names(self, ino: int = ROOT_INO) -> list[str]:
        """Entries of a directory, in order of their cookies."""
        with self.db.read() as txn:
            return [name.decode() for name, _, _ in tree.readdir(txn, ino, 0, 10**6)]

    def refresher(self, **settings: object) -> Refresher:
        return Refresher(
            self.db,
            self.store,
            settings_with(**settings),
            self.db.tables.prefix,
            self.clock,
            self.invalidations.extend,
        )


def settings_with(**changes: object) -> Settings:
    """Settings with the defaults of a mount by uid 1000."""
    values: dict[str, object] = {
        "source": "s3://bucket",
        "mountpoint": "/nowhere",
        "state_dir": "/nowhere",
        "uid": 1000,
        "gid": 1000,
        **changes,
    }
    return Settings(**values)  # type: ignore[arg-type]


@contextmanager
def open_namespace(directory: Path, *, prefix: str = "", ttl_s: float = 60.0) -> Iterator[Namespace]:
    clock = Clock()
    store = MemoryStore(now_ns=clock)
    db = Database.open(directory, now_ns=clock, prefix=prefix, ttl_ns=int(ttl_s * SECOND_NS))
    try:
        yield Namespace(db, clock, store)
    finally:
        db.close()
