"""Prefetch: bounded runner, read-ahead table, succession in a directory, explicit jobs with their account."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import pytest
import trio
import trio.testing

from tierfs.cache.residency import TierStatus
from tierfs.config import Settings, TierSetting
from tierfs.errors import StoreUnavailable
from tierfs.metrics import Metrics
from tierfs.prefetch.job import PrefetchJob, PrefetchProgress, PrefetchTarget
from tierfs.prefetch.pattern import MIB, Range
from tierfs.prefetch.readahead import WHOLE_FILE_BYTES, ReadAheadTable
from tierfs.prefetch.runner import PrefetchRunner
from tierfs.prefetch.succession import MAX_CURSORS, MAX_DEPTH, SuccessionDetector
from tierfs.types import ContentId, ObjectRef

KIB = 1024


def ref(number: int, size_bytes: int = 100 * MIB) -> ObjectRef:
    return ObjectRef(ContentId(number.to_bytes(16, "big")), f"key{number}", f"etag{number}", size_bytes)


class FakeCache:
    """Keeps whole ranges in mind, up to ``capacity_bytes``, oldest content out first."""

    def __init__(self, capacity_bytes: int = 1 << 40) -> None:
        self.capacity_bytes = capacity_bytes
        self.resident: dict[ContentId, int] = {}
        self.sizes: dict[ContentId, int] = {}
        self.calls: list[tuple[str, int, int]] = []
        self.fails: Callable[[ObjectRef], bool] = lambda _: False
        self.gate: trio.Event | None = None
        self.running = self.most_running = 0
        self.with_tiers = True

    async def prefetch(self, ref: ObjectRef, offset: int, length: int) -> int:
        self.calls.append((ref.key, offset, length))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await trio.lowlevel.checkpoint()
            if self.gate is not None:
                await self.gate.wait()
            if self.fails(ref):
                raise StoreUnavailable(f"{ref.key}: 503")
        finally:
            self.running -= 1
        if self.with_tiers:
            self.sizes[ref.content_id] = ref.size_bytes
            self.resident[ref.content_id] = self.resident.get(ref.content_id, 0) + length
            while sum(self.resident.values()) > self.capacity_bytes:
                self.resident.pop(next(iter(self.resident)))
        return length

    def is_complete(self, content_id: ContentId) -> bool:
        return self.resident.get(content_id, 0) >= self.sizes.get(content_id, 1)

    def resident_bytes(self, content: ContentId) -> dict[str, int]:
        return {"nvme": self.resident[content]} if content in self.resident else {}

    def status(self) -> list[TierStatus]:
        if not self.with_tiers:
            return []
        used = sum(self.resident.values())
        values: dict[str, object] = {found.name: 0 for found in dataclasses.fields(TierStatus)}
        values.update(name="nvme", state="ok", capacity_bytes=self.capacity_bytes, used_bytes=used)
        return [TierStatus(**values)]  # type: ignore[arg-type]


@functools.lru_cache
def some_settings(**changes: object) -> Settings:
    values: dict[str, object] = {
        "source": "file:///s", "mountpoint": "/m", "state_dir": "/d",
        "tiers": (TierSetting(name="nvme", path="/nvme", capacity_bytes=1 << 40, volatile=False),),
    }  # fmt: skip
    return Settings(**{**values, **changes})  # type: ignore[arg-type]


# Runner


async def test_runner_refuses_what_it_cannot_start_now(nursery: trio.Nursery) -> None:
    cache = FakeCache()
    cache.gate = trio.Event()
    metrics = Metrics()
    runner = PrefetchRunner(cache, task_limit=3, budget_bytes=8 * MIB, metrics=metrics)  # type: ignore[arg-type]
    assert not runner.hint(ref(1), Range(0, MIB))
    nursery.start_soon(runner.run)
    await trio.testing.wait_all_tasks_blocked()
    assert runner.hint(ref(1), Range(0, 3 * MIB))
    assert not runner.hint(ref(1), Range(3 * MIB, 2 * MIB)), "more than half of the budget for one content"
    assert runner.hint(ref(2), Range(0, 3 * MIB))
    assert not runner.hint(ref(3), Range(0, 3 * MIB)), "more than the budget"
    assert runner.hint(ref(3), Range(0, MIB))
    assert not runner.hint(ref(4), Range(0, MIB)), "more tasks than allowed"
    assert runner.in_flight_bytes == 7 * MIB
    await trio.testing.wait_all_tasks_blocked()
    assert cache.most_running == 3
    cache.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert runner.in_flight_bytes == runner.in_flight_tasks == 0
    assert runner.hint(ref(1), Range(0, 100 * MIB)), "alone, anything goes"
    values = {counter.name: counter.value for counter in metrics.counters()}
    assert values["tierfs_read_ahead_fetched_bytes_total"] == 7 * MIB
    assert values["tierfs_read_ahead_dropped_bytes_total"] == 7 * MIB


async def test_runner_knows_what_is_on_its_way(nursery: trio.Nursery) -> None:
    cache = FakeCache()
    cache.gate = trio.Event()
    runner = PrefetchRunner(cache, task_limit=3, budget_bytes=8 * MIB)  # type: ignore[arg-type]
    nursery.start_soon(runner.run)
    await trio.testing.wait_all_tasks_blocked()
    runner.hint(ref(1), Range(MIB, MIB))
    assert runner.is_fetching(ref(1).content_id, 2 * MIB - 1, 5)
    assert runner.is_fetching(ref(1).content_id, 0, MIB + 1)
    assert not runner.is_fetching(ref(1).content_id, 0, MIB)
    assert not runner.is_fetching(ref(1).content_id, 2 * MIB, MIB)
    assert not runner.is_fetching(ref(2).content_id, MIB, MIB)
    cache.gate.set()
    await trio.testing.wait_all_tasks_blocked()
    assert not runner.is_fetching(ref(1).content_id, MIB, MIB)


async def test_runner_survives_failures(nursery: trio.Nursery) -> None:
    cache = FakeCache()
    cache.fails = lambda ref: ref.key == "key1"
    metrics = Metrics()
    runner = PrefetchRunner(cache, task_limit=3, budget_bytes=8 * MIB, metrics=metrics)  # type: ignore[arg-type]
    nursery.start_soon(runner.run)
    await trio.testing.wait_all_tasks_blocked()
    runner.hint(ref(1), Range(0, MIB))
    runner.hint(ref(2), Range(0, MIB))
    await trio.testing.wait_all_tasks_blocked()
    assert cache.resident == {ref(2).content_id: MIB}
    assert {counter.name: counter.value for counter in metrics.counters()}[
        "tierfs_read_ahead_failures_total"
    ] == 1
    assert runner.in_flight_tasks == 0


# Read-ahead table


class LazyRefs(Sequence[ObjectRef]):
    """Many files of one size."""

    def __init__(self, count: int, size_bytes: int) -> None:
        self.count = count
        self.size_bytes = size_bytes

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> ObjectRef:  # type: ignore[override]
        return ref(number, self.size_bytes)


class FakeNeighbours:
    """File number n of the only directory is inode n."""

    def __init__(self, files: Sequence[ObjectRef]) -> None:
        self.files = files

    def after(self, ino: int, count: int) -> Sequence[int]:
        return range(ino + 1, min(len(self.files), ino + 1 + count))

    def ref_of(self, ino: int) -> ObjectRef | None:
        return self.files[ino]


async def running_table(
    nursery: trio.Nursery, cache: FakeCache, *, files: list[ObjectRef] | None = None, **changes: object
) -> ReadAheadTable:
    """A table over a directory whose file number n is inode n."""

    table = ReadAheadTable(
        cache,  # type: ignore[arg-type]
        some_settings(**changes),
        following=FakeNeighbours(files) if files else None,
    )
    nursery.start_soon(table.run)
    await trio.testing.wait_all_tasks_blocked()
    return table


async def read_file(table: ReadAheadTable, ino: int, ref: ObjectRef, step: int = 128 * KIB) -> None:
    for offset in range(0, ref.size_bytes, step):
        table.observe(ino, ref, offset, min(step, ref.size_bytes - offset))
        await trio.testing.wait_all_tasks_blocked()


async def test_sequential_reader_has_the_file_fetched(nursery: trio.Nursery) -> None:
    cache = FakeCache()
    table = await running_table(nursery, cache)
    await read_file(table, 5, ref(5))
    asked = sorted((offset, offset + length) for _, offset, length in cache.calls)
    assert asked[-1][1] == 100 * MIB
    assert asked[0][0] <= MIB
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(asked))


async def test_window_grows_while_the_store_is_slower_than_the_reader(nursery: trio.Nursery) -> None:
    cache = FakeCache()
    table = await running_table(nursery, cache, memory_budget_bytes=1 << 30)
    cache.gate = trio.Event()
    for offset in range(0, 24 * MIB, 128 * KIB):
        table.observe(5, ref(5, 1 << 30), offset, 128 * KIB)
    assert table.runner.in_flight_bytes >= 64 * MIB
    assert table.runner.in_flight_tasks >= 16


async def test_complete_and_local_files_cause_no_fetches(nursery: trio.Nursery) -> None:
    cache = FakeCache()
    cache.resident[ref(5).content_id] = cache.sizes[ref(5).content_id] = 100 * MIB
    table = await running_table(nursery, cache)
    await read_file(table, 5, ref(5))
    table.observe(6, None, 0, 128 * KIB)
    assert cache.calls == []


async def test_read_ahead_can_be_switched_off(nursery: trio.Nursery) -> None:
    cache = FakeCache()
    table = await running_table(nursery, cache, read_ahead_bytes=0)
    await read_file(table, 5, ref(5, 3 * MIB))
    assert cache.calls == []


async def test_small_file_is_fetched_whole_if_there_is_a_tier(nursery: trio.Nursery) -> None:
    cache = FakeCache()
    table = await running_table(nursery, cache)
    table.observe(1, ref(1, WHOLE_FILE_BYTES), 0, 4096)
    table.observe(2, ref(2, WHOLE_FILE_BYTES + 1), 0, 4096)
    table.observe(3, ref(3, WHOLE_FILE_BYTES), 4096, 4096)
    table.observe(4, ref(4, 4096), 0, 4096)
    await trio.testing.wait_all_tasks_blocked()
    assert cache.calls == [("key1", 0, WHOLE_FILE_BYTES)]
    bare = await running_table(nursery, cache, tiers=())
    bare.observe(5, ref(5, WHOLE_FILE_BYTES), 0, 4096)
    await trio.testing.wait_all_tasks_blocked()
    assert len(cache.calls) == 1


async def test_new_content_of_an_inode_starts_from_nothing(nursery: trio.Nursery) -> None:
    cache = FakeCache()
    table = await running_table(nursery, cache)
    for offset in range(0, 4 * MIB, 128 * KIB):
        table.observe(1, ref(1), offset, 128 * KIB)
    await trio.testing.wait_all_tasks_blocked()
    before = len(cache.calls)
    table.observe(1, ref(2), 4 * MIB, 128 * KIB)
    await trio.testing.wait_all_tasks_blocked()
    assert len(cache.calls) == before
    table.forget(1)
    table.forget(1)


async def test_files_in_name_order_are_fetched_before_they_are_opened(nursery: trio.Nursery) -> None:
    files = [ref(number, 40 * KIB) for number in range(200)]
    cache = FakeCache()
    table = await running_table(nursery, cache, files=files)
    foreseen = 0
    for ino, file in enumerate(files):
        foreseen += cache.is_complete(file.content_id)
        table.observe(ino, file, 0, file.size_bytes)
        table.forget(ino)
        await trio.testing.wait_all_tasks_blocked()
    assert foreseen >= 195
    assert len(cache.calls) == len(set(cache.calls))


async def test_files_in_name_order_shared_by_eight_readers(nursery: trio.Nursery) -> None:
    files = [ref(number, 40 * KIB) for number in range(400)]
    cache = FakeCache()
    table = await running_table(nursery, cache, files=files)
    order = [base + (number * 5) % 8 for base in range(0, 400, 8) for number in range(8)]
    foreseen = 0
    for ino in order:
        foreseen += cache.is_complete(files[ino].content_id)
        table.observe(ino, files[ino], 0, files[ino].size_bytes)
        await trio.testing.wait_all_tasks_blocked()
    assert foreseen >= 300


async def test_next_shard_is_begun_when_this_one_has_been_asked_for(nursery: trio.Nursery) -> None:
    files = [ref(number, 20 * MIB) for number in range(6)]
    cache = FakeCache()
    table = await running_table(nursery, cache, files=files)
    for ino in range(4):
        await read_file(table, ino, files[ino])
        table.forget(ino)
    fetched = {key: 0 for key, _, _ in cache.calls}
    for key, _, length in cache.calls:
        fetched[key] += length
    assert fetched["key4"] >= 8 * MIB - 2 * MIB
    assert "key5" not in fetched
    assert "key1" in fetched
    assert all(amount <= 20 * MIB for amount in fetched.values())


async def test_shards_in_random_order_are_not_foretold(nursery: trio.Nursery) -> None:
    files = [ref(number, 20 * MIB) for number in range(40)]
    cache = FakeCache()
    table = await running_table(nursery, cache, files=files)
    for step in range(10):
        ino = step * 17 % 40
        await read_file(table, ino, files[ino])
    assert {key for key, _, _ in cache.calls} == {f"key{step * 17 % 40}" for step in range(10)}


# Succession


def successors(count: int, size: int = 1000) -> FakeNeighbours:
    return FakeNeighbours(LazyRefs(count, size))


def opened(detector: SuccessionDetector, ino: int, *, local: bool = False) -> list[int]:
    return [successor.ino for successor in detector.opened(ino, local=local)]


def test_succession_foretells_twice_as_much_each_time() -> None:
    detector = SuccessionDetector(successors(1000), 1 << 30)
    assert [len(opened(detector, ino)) for ino in range(8)] == [0, 0, 0, 2, 4, 8, 16, MAX_DEPTH]
    for ino in range(8, 100):
        found = opened(detector, ino)
        assert found == list(range(ino + 1, ino + 1 + len(found)))
        assert MAX_DEPTH // 2 <= len(found) <= MAX_DEPTH


def test_succession_is_limited_in_bytes_but_never_to_nothing() -> None:
    detector = SuccessionDetector(successors(1000, size=100), 250)
    assert [len(opened(detector, ino)) for ino in range(6)] == [0, 0, 0, 2, 2, 2]
    detector = SuccessionDetector(successors(1000, size=1000), 250)
    assert [len(opened(detector, ino)) for ino in range(6)] == [0, 0, 0, 1, 1, 1]


def test_succession_ends_with_the_directory() -> None:
    detector = SuccessionDetector(successors(8), 1 << 30)
    found = [opened(detector, ino) for ino in range(8)]
    assert found[5] == [6, 7]
    assert found[6] == [7]
    assert found[7] == []
    assert not detector._by_ino


def test_local_files_move_a_cursor_but_begin_none() -> None:
    detector = SuccessionDetector(successors(100), 1 << 30)
    assert [opened(detector, ino, local=True) for ino in range(5)] == [[]] * 5
    assert not detector._by_ino
    opened(detector, 10)
    opened(detector, 11, local=True)
    opened(detector, 12, local=True)
    assert opened(detector, 13, local=True) == [14, 15]


def test_several_walks_through_one_directory() -> None:
    detector = SuccessionDetector(successors(10_000), 1 << 30)
    for step in range(7):
        found = [opened(detector, start + step) for start in (0, 1000, 2000, 3000)]
    assert all(len(numbers) == 16 for numbers in found)


def test_files_of_a_directory_in_random_order_are_not_foretold() -> None:
    detector = SuccessionDetector(successors(2500), 1 << 30)
    order = random.Random(4).sample(range(2500), 2500)
    assert sum(len(opened(detector, ino)) for ino in order) <= 25


def test_succession_state_is_bounded() -> None:
    detector = SuccessionDetector(successors(1_000_000), 1 << 30)
    for number in range(1000):
        assert opened(detector, number * 7919 % 900_000 + 5) == []
    assert len(detector._cursors) <= MAX_CURSORS
    assert len(detector._by_ino) <= MAX_CURSORS * MAX_DEPTH


# Explicit jobs


async def targets(refs: Iterable[ObjectRef]) -> AsyncIterator[PrefetchTarget]:
    for found in refs:
        yield PrefetchTarget(found.key.encode(), found.size_bytes, found)


def assert_adds_up(progress: PrefetchProgress, *, final: bool = True) -> None:
    done = progress.cached_bytes + progress.failed_bytes + progress.evicted_bytes + progress.skipped_bytes
    assert done + progress.pending_bytes == progress.total_bytes
    assert progress.pending_bytes >= 0
    files = progress.cached_files + progress.failed_files + progress.evicted_files + progress.skipped_files
    if final:
        assert progress.pending_bytes == 0
        assert files == progress.total_files


async def test_job_caches_everything() -> None:
    cache = FakeCache()
    job = PrefetchJob(cache, parallel_files=4)  # type: ignore[arg-type]
    progress = await job.run(targets([ref(number, number * 50 * MIB) for number in range(10)]))
    assert progress.cached_files == progress.total_files == 10
    assert progress.cached_bytes == progress.total_bytes == 45 * 50 * MIB
    assert_adds_up(progress)
    assert cache.most_running <= 4
    assert job.finished
    assert await job.wait() is progress


async def test_c26_failing_requests_and_missing_paths() -> None:
    cache = FakeCache()
    cache.fails = lambda ref: int(ref.key[3:]) % 10 == 3
    job = PrefetchJob(cache, parallel_files=3)  # type: ignore[arg-type]
    job.fail(b"no/such/path", "No such file or directory")
    progress = await job.run(targets([ref(number, MIB) for number in range(50)]))
    assert progress.failed_files == 6
    assert progress.failed_bytes == 5 * MIB
    assert progress.cached_bytes == 45 * MIB
    assert [failure.path for failure in progress.failures][:2] == [b"no/such/path", b"key3"]
    assert "503" in progress.failures[1].message
    assert_adds_up(progress)


async def test_c26_more_than_the_tier_can_hold() -> None:
    cache = FakeCache(capacity_bytes=10 * MIB)
    job = PrefetchJob(cache, parallel_files=3)  # type: ignore[arg-type]
    progress = await job.run(targets([ref(number, 3 * MIB) for number in range(8)]))
    assert progress.cached_bytes == 9 * MIB
    assert progress.skipped_bytes == 15 * MIB
    assert progress.evicted_bytes == 0
    assert_adds_up(progress)
    again = await PrefetchJob(cache, parallel_files=1).run(  # type: ignore[arg-type]
        targets([ref(number, 3 * MIB) for number in range(8)])
    )
    assert (again.cached_bytes, again.skipped_bytes) == (9 * MIB, 15 * MIB)


async def test_c26_what_was_evicted_meanwhile_is_not_reported_as_cached() -> None:
    cache = FakeCache(capacity_bytes=10 * MIB)
    job = PrefetchJob(cache, parallel_files=1)  # type: ignore[arg-type]

    async def disturbed() -> AsyncIterator[PrefetchTarget]:
        async for target in targets([ref(number, 2 * MIB) for number in range(4)]):
            yield target
        while job.progress.cached_files < 4:
            await trio.lowlevel.checkpoint()
        del cache.resident[ref(0).content_id]
        cache.resident[ref(1).content_id] = MIB

    progress = await job.run(disturbed())
    assert progress.cached_files == 2
    assert progress.evicted_files == 2
    assert progress.cached_bytes == 5 * MIB
    assert progress.evicted_bytes == 3 * MIB
    assert_adds_up(progress)


async def test_without_tiers_everything_is_skipped() -> None:
    cache = FakeCache()
    cache.with_tiers = False
    progress = await PrefetchJob(cache, parallel_files=1).run(targets([ref(1, MIB)]))  # type: ignore[arg-type]
    assert progress.skipped_bytes == MIB
    assert cache.calls == []
    assert_adds_up(progress)


async def test_local_and_empty_files_count_as_cached() -> None:
    async def both() -> AsyncIterator[PrefetchTarget]:
        yield PrefetchTarget(b"dirty", 500, None)
        yield PrefetchTarget(b"empty", 0, ref(1, 0))

    cache = FakeCache()
    progress = await PrefetchJob(cache, parallel_files=1).run(both())  # type: ignore[arg-type]
    assert (progress.cached_files, progress.cached_bytes) == (2, 500)
    assert cache.calls == []


async def test_cancelled_job_adds_up_at_every_moment(nursery: trio.Nursery) -> None:
    cache = FakeCache()
    job = PrefetchJob(cache, parallel_files=2)  # type: ignore[arg-type]
    original = cache.prefetch

    async def slow(ref: ObjectRef, offset: int, length: int) -> int:
        if ref.key == "key5":
            await trio.sleep_forever()
        assert_adds_up(job.progress, final=False)
        return await original(ref, offset, length)

    cache.prefetch = slow  # type: ignore[method-assign]
    nursery.start_soon(job.run, targets([ref(number, MIB) for number in range(5, 12)]))
    await trio.testing.wait_all_tasks_blocked()
    assert not job.finished
    assert job.progress.cached_bytes == 6 * MIB
    assert job.progress.pending_bytes == MIB
    job.cancel()
    progress = await job.wait()
    assert (progress.cached_bytes, progress.skipped_bytes) == (6 * MIB, MIB)
    assert_adds_up(progress)


async def test_unexpected_exception_fails_one_file() -> None:
    cache = FakeCache()

    def broken(ref: ObjectRef) -> bool:
        if ref.key == "key1":
            raise RuntimeError("bug")
        return False

    cache.fails = broken
    progress = await PrefetchJob(cache, parallel_files=1).run(  # type: ignore[arg-type]
        targets([ref(1, MIB), ref(2, MIB)])
    )
    assert (progress.failed_bytes, progress.cached_bytes) == (MIB, MIB)
    assert "bug" in progress.failures[0].message


async def test_error_of_the_walk_is_raised_and_the_account_closed() -> None:
    async def broken() -> AsyncIterator[PrefetchTarget]:
        yield PrefetchTarget(b"a", MIB, ref(1, MIB))
        raise StoreUnavailable("listing failed")

    job = PrefetchJob(FakeCache(), parallel_files=1)  # type: ignore[arg-type]
    with pytest.raises(StoreUnavailable):
        await job.run(broken())
    assert job.finished
    assert job.progress.cached_bytes == MIB
    assert_adds_up(job.progress)


def test_fake_is_used_as_the_cache_is() -> None:
    """The fake has what prefetch uses, under the names and with the parameters of the real one."""
    from inspect import signature

    from tierfs.cache.residency import Cache

    for name in ("prefetch", "is_complete", "resident_bytes", "status"):
        real, fake = signature(getattr(Cache, name)), signature(getattr(FakeCache, name))
        assert len(real.parameters) == len(fake.parameters), name
