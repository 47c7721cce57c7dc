"""Questions to the bucket: LIST and HEAD in worker threads, answers into the namespace in small commits.

When to ask is ``refresh``'s business. Every commit checks that the directory is still where it was when the
question was asked; if it was renamed meanwhile, ``DirectoryMoved`` ends the attempt and nothing is lost.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import outcome
import structlog
import trio

from tierfs.errors import NamespaceError, NotFound, ObjectNotFound
from tierfs.namespace import adoption, point, publish, records
from tierfs.namespace.db import Database
from tierfs.namespace.listing import (
    Changes,
    Defaults,
    Invalidation,
    Listing,
    apply_entries,
    finish,
    resolve_deferred,
    sweep,
)
from tierfs.namespace.pages import DirectoryEntries, ParsedPages, parse_page
from tierfs.namespace.subtree import remove_directory
from tierfs.namespace.transaction import ReadTransaction, WriteTransaction
from tierfs.store.base import MAX_KEY_BYTES, ListPage, ObjectStore
from tierfs.store.keys import encode_path, key_size_bytes
from tierfs.types import ROOT_INO, Inode, ObjectInfo

log = structlog.get_logger(__name__)

T = TypeVar("T")

REQUESTS_AT_ONCE = 32
SWEEP_ENTRIES = 4000


class DirectoryMoved(NamespaceError):
    """The directory was renamed or removed while the bucket was asked about it."""


@dataclass(slots=True)
class ListerCounts:
    """Since the mount was made. ``hidden_keys``: met without a POSIX path, once per listing."""

    requests: int = 0
    entries: int = 0
    hidden_keys: int = 0
    shadowed_keys: int = 0


@dataclass(frozen=True, slots=True)
class _Unfinished:
    """A directory whose pages have been applied and that still has to be swept."""

    ino: int
    prefix: str
    marker: ObjectInfo | None
    deferred: list[tuple[bytes, ObjectInfo]]


class Lister:
    """Trio thread only. ``report`` is called with what changed, after its commit; it must not block."""

    def __init__(
        self,
        db: Database,
        store: ObjectStore,
        defaults: Defaults,
        now_ns: Callable[[], int],
        report: Callable[[list[Invalidation]], None],
    ) -> None:
        self._db = db
        self._store = store
        self._defaults = defaults
        self._now_ns = now_ns
        self._report = report
        self._limiter = trio.CapacityLimiter(REQUESTS_AT_ONCE)
        self.counts = ListerCounts()

    # -- whole directories ----------------------------------------------------------------------------

    async def list_directory(self, ino: int) -> None:
        """All pages of one directory; afterwards it is complete. Raises ``StoreError``, ``NotFound``."""
        prefix = self._prefix_of(ino)
        if prefix is None:
            await self._finish_unasked(ino)
            return
        deferred: list[tuple[bytes, ObjectInfo]] = []
        marker: ObjectInfo | None = None
        with self._begin() as first:
            page: ListPage | None = await self._page(prefix, recursive=False, token=None)
            while page is not None:
                parsed = self._parse(page, prefix, ino)
                marker = parsed.top.marker or marker
                token = page.next_token
                page = await self._apply_beside_next(ino, prefix, parsed.top, deferred, token, first)
            await self._complete(ino, prefix, marker, deferred, first)

    async def list_tree(self, ino: int) -> bool:
        """One page of everything below a directory. True: that was all, the whole subtree is complete.

        False: only some of it is known now; nothing was removed.
        """
        prefix = self._prefix_of(ino)
        if prefix is None:
            await self._finish_unasked(ino)
            return True
        with self._begin() as first:
            page = await self._page(prefix, recursive=True, token=None)
            await self._apply_tree(ino, prefix, page, first)
        return page.next_token is None

    # -- single names ---------------------------------------------------------------------------------

    async def look_up(self, dir_ino: int, name: bytes, *, file_first: bool) -> bool:
        """Whether the bucket has ``name`` in that directory, as a file or as a directory; applied.

        Two requests at most: HEAD of the key, and a LIST of one page below it, which also brings what a
        small directory holds. ``file_first``: the name was a file when we last looked.
        """
        prefix = self._prefix_of(dir_ino)
        if prefix is None:
            return False
        key = prefix + encode_path(name)
        if key_size_bytes(key) > MAX_KEY_BYTES:
            return False
        with self._begin() as listing:
            return await self._ask_for(dir_ino, prefix, name, key, listing, file_first=file_first)

    async def _ask_for(
        self, dir_ino: int, prefix: str, name: bytes, key: str, listing: Listing, *, file_first: bool
    ) -> bool:
        if file_first and await self._look_for_file(dir_ino, prefix, name, key, listing):
            return True
        if await self._look_for_directory(dir_ino, prefix, name, key + "/", listing):
            return True
        await self._remove_directory_called(dir_ino, name, listing)
        if not file_first and await self._look_for_file(dir_ino, prefix, name, key, listing):
            return True

        def absent(txn: WriteTransaction) -> Changes:
            return point.apply_absence(txn, self._check(txn, dir_ino, prefix), prefix, name, listing)

        await self._commit(absent)
        return False

    async def adopt(self, path: bytes, files: Mapping[bytes, ObjectInfo]) -> None:
        """See ``Refresher.adopt``."""
        names = list(files)
        for start in range(0, max(len(names), 1), SWEEP_ENTRIES):
            some = {name: files[name] for name in names[start : start + SWEEP_ENTRIES]}
            with self._begin() as listing:
                await self._commit(partial(adoption.adopt, path=path, files=some, listing=listing))

    async def look_at_marker(self, ino: int) -> None:
        """The user metadata of a directory's own object, if it has one."""
        with self._db.read() as txn:
            row = publish.object_of(txn, ino)
        if row is None:
            return
        try:
            self.counts.requests += 1
            info = await self._in_thread(partial(self._store.head, row.key))
        except ObjectNotFound:
            return
        await self._db.commit(lambda txn: point.apply_marker(txn, ino, info))

    async def _remove_directory_called(self, dir_ino: int, name: bytes, listing: Listing) -> None:
        """There is nothing below that name any more; a file may take it."""
        with self._db.read() as txn:
            entry = records.find_entry(txn, dir_ino, name)
        if entry is not None and entry[2] == stat.S_IFDIR:
            await self._remove_directories([entry[0]], listing)

    async def _look_for_file(
        self, dir_ino: int, prefix: str, name: bytes, key: str, listing: Listing
    ) -> bool:
        try:
            self.counts.requests += 1
            info = await self._in_thread(partial(self._store.head, key))
        except ObjectNotFound:
            return False
        target: bytes | None = None
        if point.needs_target(info):
            self.counts.requests += 1
            body = partial(self._store.get_range, key, 0, info.size_bytes, if_match=info.etag)
            target = await self._in_thread(body)

        def found(txn: WriteTransaction) -> Changes:
            directory = self._check(txn, dir_ino, prefix)
            return point.apply_object(txn, directory, prefix, name, info, target, listing)

        await self._commit(found)
        return True

    async def _look_for_directory(
        self, dir_ino: int, prefix: str, name: bytes, key: str, listing: Listing
    ) -> bool:
        page = await self._page(key, recursive=True, token=None)
        if not page.objects:
            return False

        def found(txn: WriteTransaction) -> Changes:
            directory = self._check(txn, dir_ino, prefix)
            return apply_entries(txn, directory, prefix, [name], (), listing)

        await self._commit(found)
        with self._db.read() as txn:
            entry = records.find_entry(txn, dir_ino, name)
        if entry is None or entry[2] != stat.S_IFDIR:
            return True
        await self._apply_tree(entry[0], key, page, listing)
        return True

    # -- applying -------------------------------------------------------------------------------------

    async def _apply_top(
        self,
        ino: int,
        prefix: str,
        entries: DirectoryEntries,
        deferred: list[tuple[bytes, ObjectInfo]],
        first: Listing,
    ) -> None:
        listing = self._later(first)

        def apply(txn: WriteTransaction) -> Changes:
            directory = self._check(txn, ino, prefix)
            return apply_entries(txn, directory, prefix, entries.dirs, entries.files.items(), listing)

        changes = await self._commit(apply)
        deferred += changes.deferred

    async def _apply_beside_next(
        self,
        ino: int,
        prefix: str,
        entries: DirectoryEntries,
        deferred: list[tuple[bytes, ObjectInfo]],
        token: str | None,
        first: Listing,
    ) -> ListPage | None:
        """Apply one page while the next one is on its way."""
        answer: outcome.Outcome[ListPage] | None = None

        async def ask(token: str) -> None:
            nonlocal answer
            answer = await outcome.acapture(partial(self._page, prefix, recursive=False, token=token))

        async with trio.open_nursery() as nursery:
            if token is not None:
                nursery.start_soon(ask, token)
            applied = await outcome.acapture(self._apply_top, ino, prefix, entries, deferred, first)
        applied.unwrap()
        return None if answer is None else answer.unwrap()

    async def _apply_tree(self, ino: int, prefix: str, page: ListPage, first: Listing) -> None:
        """Apply a recursive page; if it is all there is, also complete every directory in it."""
        parsed = self._parse(page, prefix, ino)
        complete = page.next_token is None
        if not complete:
            _drop_doubtful_files(parsed, max((info.key for info in page.objects), default=""), prefix)
        last = self._later(first)

        def apply(txn: WriteTransaction) -> tuple[Changes, list[_Unfinished]]:
            total = Changes()
            unfinished: list[_Unfinished] = []
            inos: dict[bytes, int] = {b"": ino}
            # By depth: a directory is there before what is in it.
            for path in sorted(parsed.directories, key=lambda path: path.count(b"/") + bool(path)):
                above, _, name = path.rpartition(b"/")
                if path:
                    # Not there: its parent is not shown, or a local file has its name.
                    entry = records.find_entry(txn, inos[above], name) if above in inos else None
                    if entry is None or entry[2] != stat.S_IFDIR:
                        continue
                    inos[path] = entry[0]
                dir_prefix = prefix + encode_path(path) + "/" if path else prefix
                directory = self._check(txn, inos[path], dir_prefix)
                entries = parsed.directories[path]
                changes = apply_entries(
                    txn, directory, dir_prefix, entries.dirs, entries.files.items(), last
                )
                if complete:
                    todo = _Unfinished(directory.ino, dir_prefix, entries.marker, changes.deferred)
                    if not _finish_at_once(txn, todo, changes, first, last):
                        unfinished.append(todo)
                total.extend(changes)
            return total, unfinished

        total, unfinished = await self._db.commit(apply)
        self._note(total)
        await self._remove_directories(total.gone_directories, first)
        for todo in unfinished:
            await self._complete(todo.ino, todo.prefix, todo.marker, todo.deferred, first)

    async def _complete(
        self,
        ino: int,
        prefix: str,
        marker: ObjectInfo | None,
        deferred: list[tuple[bytes, ObjectInfo]],
        first: Listing,
    ) -> None:
        """All pages have been applied: remove what they did not show, then mark the directory complete."""
        last = self._later(first)
        position: int | None = 0
        while position is not None:

            def step(txn: WriteTransaction, after: int = position) -> tuple[Changes, int | None]:
                directory = self._check(txn, ino, prefix)
                if publish.covering_prefix(txn, prefix) is not None:
                    changes, following = Changes(), None
                else:
                    changes, following = sweep(txn, directory, prefix, first, after, SWEEP_ENTRIES)
                if following is None and not changes.gone_directories and not deferred:
                    finish(txn, ino, marker, last)
                return changes, following

            changes, position = await self._db.commit(step)
            self._note(changes)
            await self._remove_directories(changes.gone_directories, first)
            if position is None and (changes.gone_directories or deferred):
                await self._finish(ino, prefix, marker, deferred, last)

    async def _finish(
        self,
        ino: int,
        prefix: str,
        marker: ObjectInfo | None,
        deferred: list[tuple[bytes, ObjectInfo]],
        listing: Listing,
    ) -> None:
        def step(txn: WriteTransaction) -> Changes:
            changes = resolve_deferred(txn, self._check(txn, ino, prefix), deferred, listing)
            finish(txn, ino, marker, listing)
            return changes

        await self._commit(step)

    async def _finish_unasked(self, ino: int) -> None:
        """Nothing of this directory can be in the bucket: what is recorded is all there is."""
        listing = self._listing()
        await self._db.commit(lambda txn: finish(txn, ino, None, listing))

    async def _remove_directories(self, inos: list[int], listing: Listing) -> None:
        for ino in inos:
            done = False
            while not done:

                def step(txn: WriteTransaction, ino: int = ino) -> tuple[Changes, bool]:
                    return remove_directory(txn, ino, listing, SWEEP_ENTRIES)

                changes, done = await self._db.commit(step)
                self._note(changes)

    async def _commit(self, fn: Callable[[WriteTransaction], Changes]) -> Changes:
        changes = await self._db.commit(fn)
        self._note(changes)
        return changes

    def _note(self, changes: Changes) -> None:
        if changes.shadowed:
            self.counts.shadowed_keys += len(changes.shadowed)
            log.warning(
                "an object and a directory have the same name; the directory is shown",
                keys=len(changes.shadowed),
                example=changes.shadowed[0],
            )
        if changes.invalidations:
            self._report(changes.invalidations)

    # -- asking ---------------------------------------------------------------------------------------

    def _listing(self) -> Listing:
        now_ns = self._now_ns()
        keeps_markers = self._store.capabilities.keeps_directory_markers
        return Listing(now_ns, now_ns + self._db.tables.ttl_ns, now_ns, self._defaults, keeps_markers)

    @contextmanager
    def _begin(self) -> Iterator[Listing]:
        """Around the first request and all that is made of the answers."""
        with self._db.tables.departures.listing() as began:
            yield replace(self._listing(), began=began)

    def _later(self, first: Listing) -> Listing:
        """The same listing, believed from now on; what it says is as old as before."""
        return replace(self._listing(), started_ns=first.started_ns, began=first.began)

    def _prefix_of(self, ino: int) -> str | None:
        """The key of a directory, or None if nothing that the bucket has below it may be shown.

        Raises ``NotFound``.
        """
        with self._db.read() as txn:
            records.get_directory(txn, ino)
            prefix = _key_of_directory(txn, ino)
            if prefix and not prefix.endswith("/"):
                return None  # longer than a key may be
            if publish.covering_prefix(txn, prefix) is not None:
                return None  # still holds what was there before a rename
            return prefix

    def _check(self, txn: WriteTransaction, ino: int, prefix: str) -> Inode:
        inode = records.find_inode(txn, ino)
        if inode is None or not inode.nlink or _key_of_directory(txn, ino) != prefix:
            raise DirectoryMoved(f"directory {ino} is not at {prefix!r} any more")
        return inode

    def _parse(self, page: ListPage, prefix: str, ino: int) -> ParsedPages:
        parsed = parse_page(page, prefix, is_root=ino == ROOT_INO)
        self.counts.entries += len(page.objects) + len(page.prefixes)
        if parsed.hidden:
            self.counts.hidden_keys += len(parsed.hidden)
            log.warning(
                "keys without a POSIX path are not shown",
                prefix=prefix,
                keys=len(parsed.hidden),
                example=parsed.hidden[0][:200],
            )
        return parsed

    async def _page(self, prefix: str, *, recursive: bool, token: str | None) -> ListPage:
        self.counts.requests += 1
        return await self._in_thread(partial(self._store.list_page, prefix, recursive=recursive, token=token))

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(call, limiter=self._limiter, abandon_on_cancel=True)


def _finish_at_once(
    txn: WriteTransaction, todo: _Unfinished, changes: Changes, first: Listing, last: Listing
) -> bool:
    """Sweep and finish a directory in the transaction that applied its page, if that is little work."""
    directory = records.get_inode(txn, todo.ino)
    following: int | None = None
    if publish.covering_prefix(txn, todo.prefix) is None:
        swept, following = sweep(txn, directory, todo.prefix, first, 0, SWEEP_ENTRIES)
        changes.extend(swept)
    if following is not None or changes.gone_directories or todo.deferred:
        return False
    finish(txn, todo.ino, todo.marker, last)
    return True


def _drop_doubtful_files(parsed: ParsedPages, last_key: str, prefix: str) -> None:
    """After a page that is not the last: forget files ``x`` of which ``x/y`` may still follow.

    Keys mostly come in byte order, and "0" is next to "/".
    """
    for path, entries in parsed.directories.items():
        dir_prefix = prefix + encode_path(path) + "/" if path else prefix
        doubtful = [name for name in entries.files if dir_prefix + encode_path(name) + "0" > last_key]
        for name in doubtful:
            del entries.files[name]


def _key_of_directory(txn: ReadTransaction, ino: int) -> str:
    """Raises ``NotFound`` for a directory that has been removed."""
    keys = publish.key_of(txn, ino)
    if not keys:
        raise NotFound(f"directory {ino} has no name")
    return keys[0]
