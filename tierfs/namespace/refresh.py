"""When to ask the bucket: what is believed, for how long, and what a question costs.

The hot path is ``lookup_local``: no await, no request, whenever the answer is still valid. The rest:

* A positive answer is believed for ``ttl_s``, and longer if it is only here (dirty, not yet published).
* A negative one, from a complete directory, for ``negative_ttl_s`` after its listing; in a directory whose
  listing took long for ten times that, at most ``ttl_s``.
* A directory that was never listed is asked for with one LIST without a delimiter: if that is all there is,
  its whole subtree is known. If not, a name is looked up by itself (LIST below it, HEAD), until that has
  cost as much as a listing would; then the directory is listed.
* An expired directory of up to ``SMALL_ENTRIES`` entries is listed again, whatever was asked; of a larger
  one single names are asked for, by the same rule.
* One question at a time about the same thing: whoever else needs the answer waits for it. A caller that
  is cancelled leaves the question running.
* While the store fails, what was known before is served, names that were never known raise the store's
  error (never "not found"; in a directory that was once listed completely a name that was not there is
  still not there), and after a failure the store is left alone for ``questions.PAUSE_S``. Names in a
  directory made here, in which nobody else's entry has ever been seen, are simply not there.

Called on the trio thread only.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import trio

from tierfs.config import Settings
from tierfs.errors import NameTooLong, NotFound, TransientStoreError
from tierfs.namespace import publish, records, schema
from tierfs.namespace.crawl import Crawler
from tierfs.namespace.crawl import ImportResult as ImportResult
from tierfs.namespace.db import Database
from tierfs.namespace.lister import DirectoryMoved, Lister
from tierfs.namespace.listing import Defaults
from tierfs.namespace.listing import Invalidation as Invalidation
from tierfs.namespace.questions import Questions
from tierfs.namespace.schema import EPOCH_0, NUL_EPOCH_0, pack_u64, unpack_inode
from tierfs.namespace.transaction import ReadTransaction
from tierfs.store.base import LIST_PAGE_KEYS, ObjectStore
from tierfs.types import ROOT_INO, Inode, ObjectInfo

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

SMALL_ENTRIES = 2000
FREE_POINT_LOOKUPS = 4
PATIENCE_S = 5.0
"""How long a request that could be answered with stale knowledge waits for the store."""
PATIENCE_DURING_OUTAGE_S = 0.1
"""The same while the last answer of the store was a transient failure."""
LISTING_PATIENCE_S = 1.0
"""How long a look-up waits for the listing of a large directory before it asks for its name alone."""
NEGATIVE_PER_LISTING_TIME = 10
COUNT_LIMIT = 100 * LIST_PAGE_KEYS
MAX_REMEMBERED = 20_000
"""Directories and absent names remembered in memory; what is forgotten costs a request."""
_ATTEMPTS = 5


@dataclass(slots=True)
class _Directory:
    """What is remembered about one directory while the mount lives."""

    narrow: bool | None = None
    """Whether one LIST without a delimiter reached the end of it; None: not tried."""
    point_lookups: int = 0
    points_since_ns: int = 0
    listing_ns: int = 0
    """How long its last complete listing took."""
    entries: int = 0
    """Counted at ``counted_ns``, no further than ``COUNT_LIMIT``."""
    counted_ns: int = 0


class Refresher:
    """See the module docstring. ``on_invalidate`` gets the names that mean something else now.

    It is called after the commit, on the trio thread, possibly from inside a request, and must not block.
    The inodes that lost their last name are orphans then: who is told reaps those that nobody uses.
    """

    def __init__(
        self,
        db: Database,
        store: ObjectStore,
        settings: Settings,
        prefix: str,
        now_ns: Callable[[], int],
        on_invalidate: Callable[[Sequence[Invalidation]], None],
    ) -> None:
        self._db = db
        self._store = store
        self._now_ns = now_ns
        db.tables.prefix = prefix
        db.tables.ttl_ns = self._ttl_ns = int(settings.ttl_s * 1e9)
        self._negative_ttl_ns = min(int(settings.negative_ttl_s * 1e9), self._ttl_ns)
        defaults = Defaults(settings.uid, settings.gid, settings.file_mode, settings.dir_mode)
        self._lister = Lister(db, store, defaults, now_ns, on_invalidate)
        self.counts = self._lister.counts
        self._questions = Questions(now_ns)
        self._crawler = Crawler(db, self.listed, self.learn, self.counts, now_ns)
        self._directories: dict[int, _Directory] = {}
        self._absent: dict[tuple[int, bytes], int] = {}

    @property
    def store_failing(self) -> bool:
        """The last question to the store ended in a transient error."""
        return self._questions.failing

    # -- without asking -------------------------------------------------------------------------------

    def lookup_local(self, parent: int, name: bytes) -> Inode | None:
        """The inode of a name if that is still valid; None: ask (``lookup``).

        Raises ``NotFound`` if it is known not to be there, ``NotADirectory``, ``NameTooLong``.
        """
        if len(name) > schema.NAME_MAX_BYTES:
            raise NameTooLong(f"name of {len(name)} bytes")
        with self._db.read() as txn:
            tables = txn.tables
            raw = txn.get(pack_u64(parent) + name + NUL_EPOCH_0, None, tables.dirent)
            now_ns = self._now_ns()
            if raw is not None:
                record = txn.get(raw[7::-1] + EPOCH_0, None, tables.inode)
                if record is None:
                    raise records.missing_inode(txn, parent, name)
                inode = unpack_inode(record)
                if inode.valid_until_ns > now_ns:
                    return inode
                return inode if records.get_inode(txn, parent).listed_until_ns > now_ns else None
            directory = records.get_directory(txn, parent)
            if self._negative_until_ns(directory) > now_ns or self._known_absent(parent, name, now_ns):
                raise NotFound(name.decode("utf-8", "backslashreplace"))
        return None

    def is_listed(self, ino: int) -> bool:
        """Whether everything in this directory is known and still valid."""
        with self._db.read() as txn:
            return records.get_directory(txn, ino).listed_until_ns > self._now_ns()

    # -- asking ---------------------------------------------------------------------------------------

    async def lookup(self, parent: int, name: bytes) -> Inode:
        """The inode of a name, asking the bucket if need be. Raises ``NotFound``, ``StoreError``."""
        found = self.lookup_local(parent, name)
        if found is not None:
            return found
        with self._db.read() as txn:
            # A name that a complete listing did not have is stale knowledge too: without it nothing could
            # be created during an outage. Conditional uploads notice what another node made meanwhile.
            stale = (
                records.find_entry(txn, parent, name) is not None
                or records.get_directory(txn, parent).listed_until_ns > 0
                or self._is_only_ours(parent)
            )
        try:
            with trio.move_on_after(self._patience_s() if stale else math.inf):
                for _ in range(_ATTEMPTS):
                    if await self._learn(parent, name):
                        break
        except TransientStoreError:
            if not stale:
                raise
        return self._known(parent, name)

    def _patience_s(self) -> float:
        failing = self.store_failing or getattr(self._store, "failure", None) is not None
        return PATIENCE_DURING_OUTAGE_S if failing else PATIENCE_S

    async def listed(self, ino: int) -> None:
        """Everything in this directory is known and valid when this returns, as far as the store can say.

        While the store fails what was complete before will do. Raises ``NotFound``, ``StoreError``.
        """
        for _ in range(_ATTEMPTS):
            with self._db.read() as txn:
                directory = records.get_directory(txn, ino)
            if directory.listed_until_ns > self._now_ns():
                return
            try:
                with trio.move_on_after(self._patience_s() if directory.listed_until_ns else math.inf):
                    await self._list(ino)
                return
            except TransientStoreError:
                if not directory.listed_until_ns:
                    raise
                return
            except DirectoryMoved:
                continue

    async def revalidate(self, ino: int) -> Inode:
        """Ask the bucket about this inode now, whatever is believed.

        Returns the inode that its name means afterwards. Raises ``NotFound``, ``StoreError``.
        """
        with self._db.read() as txn:
            inode = records.get_inode(txn, ino)
            found = records.first_name(txn, ino)
        if inode.is_dir:
            await self._questions.ask(("list", ino), partial(self._list_now, ino))
            with self._db.read() as txn:
                return records.get_directory(txn, ino)
        if found is None:
            raise NotFound(f"inode {ino} has no name")
        parent, name = found
        await self._questions.ask(("name", parent, name), partial(self._ask_for_name, parent, name, True))
        return self._known(parent, name)

    async def complete_subtree(self, ino: int, jobs: int = 8) -> None:
        """``listed`` for a directory and all below it (before it is renamed).

        Directories made here, in which nothing was ever seen or published, are not asked for.
        """
        await self._crawler.complete(ino, jobs)

    async def import_prefix(
        self,
        path: bytes | str,
        jobs: int,
        progress: Callable[[int, int], None] | None = None,
        *,
        metadata: bool = False,
    ) -> ImportResult:
        """List everything at and below a path of the mount, ``jobs`` requests at once.

        ``metadata``: also ask for the user metadata of every object that has been listed only, one HEAD
        each: modes, owners and symbolic links, as they were before the state directory was lost.
        ``progress(entries, directories)`` is called now and then. Raises ``NotFound``, ``StoreError``.
        """
        names = path.encode("utf-8", "surrogateescape") if isinstance(path, str) else path
        with self._db.read() as txn:
            inode = records.get_directory(txn, ROOT_INO)
        for name in filter(None, names.split(b"/")):
            inode = await self.lookup(inode.ino, name)
        return await self._crawler.import_below(inode.ino, jobs, progress, metadata=metadata)

    async def adopt(self, path: bytes, files: Mapping[bytes, ObjectInfo]) -> None:
        """Somebody who knows says which objects are in directory ``path``: by name, no request is made.

        They are believed like a listing of this moment. Names that are known are left as they are. Raises
        ``NotADirectory``; ``NotFound`` if the directory has just been removed here.
        """
        await self._lister.adopt(path, files)

    # -- one step towards an answer -----------------------------------------------------------------------

    async def _learn(self, parent: int, name: bytes) -> bool:
        """Ask one thing. True: what is recorded now is the answer."""
        with self._db.read() as txn:
            directory = records.get_directory(txn, parent)
            if self._is_decided_here(txn, parent, name):
                return True
            entry = records.find_entry(txn, parent, name)
            listed = directory.listed_until_ns > 0
            known = self._remembered(parent)
            small = listed and self._count(txn, parent, known) <= SMALL_ENTRIES
        try:
            if small:
                await self._list(parent)
                return True
            if listed or known.narrow is False:
                await self._ask_by_cost(parent, name, known, entry)
                return True
            if await self._questions.ask(("tree", parent), partial(self._begin_tree, parent)):
                return True
        except DirectoryMoved:
            return False
        with self._db.read() as txn:
            # Only part of the directory is known: if the name was in it, that is the answer.
            return self._is_valid(txn, parent, name)

    async def _ask_by_cost(
        self, parent: int, name: bytes, known: _Directory, entry: tuple[int, int, int] | None
    ) -> None:
        """Ask for one name, until that has cost as much as listing the directory; then list it."""
        now_ns = self._now_ns()
        if now_ns - known.points_since_ns > self._ttl_ns:
            known.points_since_ns, known.point_lookups = now_ns, 0
        known.point_lookups += 1
        if known.point_lookups > max(FREE_POINT_LOOKUPS, known.entries // LIST_PAGE_KEYS):
            with trio.move_on_after(LISTING_PATIENCE_S):
                await self._list(parent)
                return
        file_first = entry is not None and entry[2] != stat.S_IFDIR
        ask = partial(self._ask_for_name, parent, name, file_first)
        await self._questions.ask(("name", parent, name), ask)

    async def _ask_for_name(self, parent: int, name: bytes, file_first: bool) -> None:
        if not await self._lister.look_up(parent, name, file_first=file_first):
            _make_room(self._absent)
            self._absent[parent, name] = self._now_ns() + self._negative_ttl_ns

    async def _list(self, ino: int) -> None:
        await self._questions.ask(("list", ino), partial(self._list_now, ino))

    async def _list_now(self, ino: int) -> None:
        known = self._remembered(ino)
        with self._db.read() as txn:
            first_time = records.get_directory(txn, ino).listed_until_ns == 0
        if (known.narrow or (known.narrow is None and first_time)) and await self._questions.ask(
            ("tree", ino), partial(self._begin_tree, ino)
        ):
            return
        began_ns = self._now_ns()
        await self._lister.list_directory(ino)
        known.listing_ns = self._now_ns() - began_ns
        known.point_lookups = 0

    async def _begin_tree(self, ino: int) -> bool:
        known = self._remembered(ino)
        known.narrow = await self._lister.list_tree(ino)
        return known.narrow

    async def learn(self, ino: int) -> None:
        """Ask for the user metadata of one file or directory. Raises ``NotFound``, ``StoreError``."""
        with self._db.read() as txn:
            inode = records.get_inode(txn, ino)
            found = records.first_name(txn, ino)
        if inode.is_dir:
            await self._questions.ask(("marker", ino), partial(self._lister.look_at_marker, ino))
        elif found is not None:
            ask = partial(self._ask_for_name, found[0], found[1], True)
            await self._questions.ask(("name", *found), ask)

    # -- what is known --------------------------------------------------------------------------------

    def _known(self, parent: int, name: bytes) -> Inode:
        with self._db.read() as txn:
            found = records.find_entry(txn, parent, name)
            if found is None:
                records.get_directory(txn, parent)
                raise NotFound(name.decode("utf-8", "backslashreplace"))
            return records.get_inode(txn, found[0])

    def _is_valid(self, txn: ReadTransaction, parent: int, name: bytes) -> bool:
        found = records.find_entry(txn, parent, name)
        if found is None:
            return False
        inode = records.find_inode(txn, found[0])
        return inode is not None and inode.valid_until_ns > self._now_ns()

    def _is_decided_here(self, txn: ReadTransaction, parent: int, name: bytes) -> bool:
        """Whether the bucket has no say about this name: dirty, deleted here, or beyond what keys can be."""
        found = records.find_entry(txn, parent, name)
        if found is not None:
            return publish.is_dirty(txn, found[0])
        if not publish.doomed_count(txn):
            return False
        path = records.path_of(txn, parent)
        key = publish.key_of_path(txn, path + b"/" + name if path else name, False)
        return publish.doomed_row(txn, key) is not None or publish.covering_prefix(txn, key + "/") is not None

    def _is_only_ours(self, ino: int) -> bool:
        with self._db.read() as txn:
            flags = records.get_directory(txn, ino).flags
        return bool(flags & schema.DIR_LOCAL) and not flags & schema.DIR_SEEN

    def _negative_until_ns(self, directory: Inode) -> int:
        """Until when a name that is not in a complete directory is believed not to be there."""
        if not directory.listed_until_ns:
            return 0
        known = self._directories.get(directory.ino)
        negative_ttl_ns = self._negative_ttl_ns
        if known is not None and known.listing_ns:
            slow = NEGATIVE_PER_LISTING_TIME * known.listing_ns
            negative_ttl_ns = max(negative_ttl_ns, min(slow, self._ttl_ns))
        return directory.listed_until_ns - self._ttl_ns + negative_ttl_ns

    def _known_absent(self, parent: int, name: bytes, now_ns: int) -> bool:
        until_ns = self._absent.get((parent, name))
        if until_ns is None:
            return False
        if until_ns > now_ns:
            return True
        del self._absent[parent, name]
        return False

    def _count(self, txn: ReadTransaction, ino: int, known: _Directory) -> int:
        """Entries of a directory; of a large one a number that may be a TTL old, for counting takes time."""
        now_ns = self._now_ns()
        believed_ns = self._ttl_ns if known.entries > SMALL_ENTRIES else 0
        if now_ns - known.counted_ns >= believed_ns:
            known.entries = records.count_entries(txn, ino, COUNT_LIMIT)
            known.counted_ns = now_ns
        return known.entries

    def _remembered(self, ino: int) -> _Directory:
        known = self._directories.get(ino)
        if known is None:
            _make_room(self._directories)
            known = self._directories[ino] = _Directory()
        return known


def _make_room(remembered: dict[K, V]) -> None:
    """Forget the older half once there are too many."""
    if len(remembered) >= MAX_REMEMBERED:
        for key in list(remembered)[: MAX_REMEMBERED // 2]:
            del remembered[key]
