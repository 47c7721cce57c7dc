"""A bucket as target, through tierfs's own store client and nothing else: what a mount could get at best.

Everything that talks to the store happens in forked processes, each with a client of its own: a client has
threads, and a process with threads cannot be forked safely.
"""

from __future__ import annotations

import os
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from tierfs.bench import result, space
from tierfs.bench.files import PIECE_BYTES, Content, FileSet, share
from tierfs.bench.processes import Loop, Recorder, Task, call_in_child, run_together
from tierfs.bench.target import PLACE_PREFIX, STORE, Tick
from tierfs.config import Settings
from tierfs.errors import BenchFailed, ConfigError, StoreError
from tierfs.store import ObjectStore, open_store, part_size_for
from tierfs.types import ObjectInfo

MARKER = "made-by-tierfs-bench"
SINGLE_PUT_BYTES = 16 * 1024 * 1024
STORE_TIMEOUT_S = 20.0
"""How long a request is repeated; a mount repeats for longer, a measurement wants to know."""
WRITERS = 4


class BucketTarget:
    """See ``BenchTarget``."""

    def __init__(self, settings: Settings) -> None:
        self._settings = msgspec.structs.replace(
            settings, store_timeout_s=min(settings.store_timeout_s, STORE_TIMEOUT_S)
        )
        if settings.source.startswith("s3://"):
            import tierfs.store.s3  # noqa: F401  # once, and not in every process; it starts no thread
        self.kind = STORE
        self.cold = ""
        self.ways: tuple[str, ...] = ()
        self._place: str | None = None
        self._written: list[FileSet] = []

    @property
    def place(self) -> str:
        assert self._place is not None, "not opened"
        return self._place

    def open(self, needed_bytes: int) -> list[str]:
        settings = self._settings
        if os.path.isdir(settings.source):
            space.check(settings.source, needed_bytes)

        def make_place() -> str:
            store, prefix = open_store(settings)
            try:
                store.check()
                place = f"{prefix}{PLACE_PREFIX}{secrets.token_hex(6)}"
                store.put(f"{place}/{MARKER}", f"started {time.time():.0f}\n".encode())
                return place
            finally:
                store.close()

        try:
            self._place = call_in_child(make_place)
        except BenchFailed as error:
            raise ConfigError(f"TARGET: {error}") from None
        return []

    def describe(self) -> result.Target:
        endpoint = self._settings.endpoint_url or ""
        return result.Target(
            name=self._settings.source, kind=self.kind, details={"endpoint": endpoint} if endpoint else {}
        )

    def make(self, files: FileSet, *, stop_s: float, tick: Tick) -> FileSet:
        self._written.append(files)
        made = run_together(
            [
                self._write_many(files, indices, number)
                for number, indices in enumerate(share(range(len(files.entries)), WRITERS))
            ],
            limit_s=max(stop_s - time.monotonic(), 0.1),
            tick=tick,
        )
        if not made.cut:
            return files
        # Each process got as far as it got: what is there is asked for, not computed.
        settings, place = self._settings, files.root

        def present() -> dict[str, int]:
            store, _ = open_store(settings)
            try:
                return {
                    found.key.removeprefix(f"{place}/"): found.size_bytes
                    for found in _below(store, f"{place}/")
                }
            finally:
                store.close()

        there = call_in_child(present, tick=tick)
        entries = tuple((name, there[name]) for name, _ in files.entries if name in there)
        return FileSet(files.root, entries, files.seed)

    def remove(self, files: FileSet, *, tick: Tick) -> None:
        self._delete([f"{files.root}/{name}" for name, _ in files.entries], tick)
        self._written = [known for known in self._written if known.root != files.root]

    def settle(self, *, limit_s: float, tick: Tick) -> str | None:
        return None

    def make_cold(self, files: FileSet, *, limit_s: float, tick: Tick) -> str | None:
        return None

    def cpu_s(self) -> dict[str, float]:
        return {}

    def close(self, tick: Tick) -> list[str]:
        if self._place is None:
            return []
        try:
            for files in list(self._written):
                self.remove(files, tick=tick)
            self._delete([f"{self._place}/{MARKER}"], tick)
        except (BenchFailed, ConfigError) as error:
            return [f"what lies below {self._place}/ stays: {error}"]
        self._place = None
        return []

    # -- tasks

    def read_files(self, files: FileSet, which: Sequence[int], *, repeat: bool = False) -> Task:
        chosen = [files.entries[index] for index in which]

        def body(store: ObjectStore, recorder: Recorder) -> None:
            began = time.monotonic_ns()
            while True:
                for name, size in chosen:
                    store.get_range(f"{files.root}/{name}", 0, size)
                    began = recorder.done(began, size)
                    if began >= recorder.stop_ns:
                        recorder.cut = not repeat
                        return
                if not repeat:
                    return

        return self._task(body)

    def read_streams(
        self, files: FileSet, which: Sequence[int], *, block_bytes: int, way: str, repeat: bool = False
    ) -> Task:
        chosen = [files.entries[index] for index in which]

        def body(store: ObjectStore, recorder: Recorder) -> None:
            began = time.monotonic_ns()
            while True:
                for name, size in chosen:
                    for offset in range(0, size, block_bytes):
                        length = min(block_bytes, size - offset)
                        store.get_range(f"{files.root}/{name}", offset, length)
                        began = recorder.done(began, length)
                        if began >= recorder.stop_ns:
                            recorder.cut = not repeat
                            return
                if not repeat:
                    return

        return self._task(body)

    def read_random(self, files: FileSet, *, block_bytes: int, way: str, seed: int, chain: int = 1) -> Task:
        def body(store: ObjectStore, recorder: Recorder) -> None:
            chosen = random.Random(seed)
            usable = [(name, size // block_bytes) for name, size in files.entries if size >= block_bytes]
            began = time.monotonic_ns()
            while began < recorder.stop_ns:
                for _ in range(chain):
                    name, blocks = chosen.choice(usable)
                    place = chosen.randrange(blocks) * block_bytes
                    store.get_range(f"{files.root}/{name}", place, block_bytes)
                began = recorder.done(began, block_bytes * chain)

        return self._task(body)

    def write_file(self, files: FileSet, which: int) -> Task:
        if files not in self._written:
            self._written.append(files)
        name, size = files.entries[which]
        content = Content(files.seed)

        def body(store: ObjectStore, recorder: Recorder) -> None:
            _put(store, f"{files.root}/{name}", content, which, size, recorder)

        return self._task(body)

    def walk(self, files: FileSet) -> Task:
        """List every prefix with a delimiter, as a mount does; attributes come with it."""

        def body(store: ObjectStore, recorder: Recorder) -> None:
            began = time.monotonic_ns()
            while True:
                waiting = [f"{files.root}/"]
                while waiting:
                    prefix = waiting.pop()
                    token = None
                    while True:
                        page = store.list_page(prefix, token=token)
                        waiting += page.prefixes
                        began = recorder.several(began, max(len(page.objects) + len(page.prefixes), 1))
                        if began >= recorder.stop_ns:
                            return
                        token = page.next_token
                        if token is None:
                            break

        return self._task(body)

    def _task(self, body: Callable[[ObjectStore, Recorder], None]) -> Task:
        settings = self._settings

        def prepare() -> Loop:
            store, _ = open_store(settings)
            store.check()  # connects, so that the first operation does not

            def loop(recorder: Recorder) -> None:
                try:
                    body(store, recorder)
                except StoreError as error:
                    raise BenchFailed(str(error)) from error

            return loop

        return prepare

    def _write_many(self, files: FileSet, which: Sequence[int], number: int) -> Task:
        content = Content(files.seed)

        def body(store: ObjectStore, recorder: Recorder) -> None:
            for position, index in enumerate(which):
                # The first file is written whatever the time, so that there is something to measure.
                if (position or number) and time.monotonic_ns() >= recorder.stop_ns:
                    recorder.cut = True
                    return
                name, size = files.entries[index]
                _put(store, f"{files.root}/{name}", content, index, size, recorder)

        return self._task(body)

    def _delete(self, keys: Sequence[str], tick: Tick) -> None:
        settings, place = self._settings, f"{self.place}/"
        assert all(key.startswith(place) for key in keys), "only what was made here"

        def delete() -> None:
            store, _ = open_store(settings)
            try:
                for unfinished in store.list_unfinished_uploads(place):
                    store.abort_multipart(unfinished.key, unfinished.upload_id)
                failed = store.delete_many(list(keys))
            finally:
                store.close()
            if failed:
                raise BenchFailed(f"{len(failed)} objects were not deleted: {failed[0].message}")

        call_in_child(delete, tick=tick)


def _below(store: ObjectStore, prefix: str) -> Iterator[ObjectInfo]:
    token = None
    while True:
        page = store.list_page(prefix, recursive=True, token=token)
        yield from page.objects
        token = page.next_token
        if token is None:
            return


def _put(store: ObjectStore, key: str, content: Content, number: int, size: int, recorder: Recorder) -> None:
    """In one request, or in parts, as a mount uploads. An operation is the object.

    When time is over, the rest of its parts is left out.
    """
    began = time.monotonic_ns()
    if size <= SINGLE_PUT_BYTES:
        store.put(key, content.whole(number, size))
        recorder.moved(size)
        recorder.finished(began)
        return
    part_bytes = part_size_for(size, SINGLE_PUT_BYTES)
    upload = store.start_multipart(key)
    try:
        parts = []
        for index, offset in enumerate(range(0, size, part_bytes), start=1):
            end = min(offset + part_bytes, size)
            body = b"".join(
                content.piece(number, place, min(PIECE_BYTES, end - place))
                for place in range(offset, end, PIECE_BYTES)
            )
            parts.append(store.upload_part(key, upload, index, body))
            if recorder.moved(end - offset) >= recorder.stop_ns and end < size:
                recorder.cut = True
                break
        store.complete_multipart(key, upload, parts)
    except BaseException:
        store.abort_multipart(key, upload)
        raise
    recorder.finished(began)
