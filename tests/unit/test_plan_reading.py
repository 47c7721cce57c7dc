"""The planner's reading: what is kept, against the policy itself and against the best possible; and how long."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import msgspec
import pytest
from simpy import Environment

from tierfs.cache.policy import EvictionPolicy, Unit
from tierfs.plan import setups
from tierfs.plan.epochs import EpochResult, Scale, read_epochs
from tierfs.plan.loader import Pace, Training
from tierfs.plan.node import Node, Read
from tierfs.plan.scenario import GIB, KIB, MIB, Scenario
from tierfs.plan.tiers import Kept, PageCache, Tiers
from tierfs.plan.trace import DataSet, interleaved
from tierfs.types import ContentId

Visits = Sequence[tuple[Unit, int]]
LARGE = 100e12
SMALL_JOB = Scenario(
    gpus=2,
    gpus_per_node=2,
    workers=2,
    dataset_bytes=2 * GIB,
    shard_bytes=64 * MIB,
    samples_per_s=400.0,
    ram_bytes=0,
    nvme_bytes=1 * GIB,
    epochs=3,
    store_latency_p99_s=0.03,
    mount_latency_s=0.0,
)
"""32 shards in one node, half of which fit."""


def changed(scenario: Scenario, **fields: object) -> Scenario:
    return msgspec.structs.replace(scenario, **fields).check()


def simulated(scenario: Scenario, setup: str = setups.TIERFS, *, whole: bool = False) -> list[EpochResult]:
    keep, build = partial(setups.keep, scenario, setup), partial(setups.build, scenario, setup)
    return read_epochs(scenario, keep, build, scale=Scale.whole() if whole else None)


def unit(number: int) -> Unit:
    return ContentId(number.to_bytes(16, "big")), 0


def trace(units: int, epochs: int, *, shuffled: bool) -> list[tuple[Unit, int]]:
    numbers = list(range(units))
    visits: list[tuple[Unit, int]] = []
    for epoch in range(epochs):
        if shuffled:
            random.Random(epoch).shuffle(numbers)
        visits += [(unit(number), MIB) for number in numbers]
    return visits


def hits(kept: Kept, visits: Visits) -> int:
    return sum(size for each, size in visits if kept.read(each, size) is not None)


def policy_hits(capacity_bytes: int, visits: Visits) -> int:
    """The protocol that ``cache.policy`` states, without anything of the planner."""
    policy, found = EvictionPolicy(capacity_bytes), 0
    for each, size in visits:
        if each in policy:
            policy.touch(each)
            found += size
        elif policy.admit(each, size):
            for victim in policy.victims(policy.excess_bytes):
                policy.remove(victim)
    return found


def belady_hits(capacity_units: int, visits: Visits) -> int:
    """The most that any cache of units of one size can hit (Belady 1966), bypass included: drop what is needed last."""
    places = defaultdict(list)
    for index, (each, _) in enumerate(visits):
        places[each].append(index)
    kept: set[Unit] = set()
    found = 0

    def next_use(each: Unit) -> float:
        return places[each][0] if places[each] else float("inf")

    for each, size in visits:
        places[each].pop(0)
        found += size if each in kept else 0
        kept.add(each)
        if len(kept) > capacity_units:
            kept.remove(max(kept, key=next_use))
    return found


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("capacity_units", [10, 60, 99])
def test_a_tier_hits_what_the_policy_hits_and_never_more_than_belady(
    capacity_units: int, shuffled: bool
) -> None:
    visits = trace(100, 5, shuffled=shuffled)
    found = hits(Tiers([capacity_units * MIB]), visits)
    assert found == policy_hits(capacity_units * MIB, visits)
    assert 0 < found <= belady_hits(capacity_units, visits)


def test_belady_on_a_trace_that_can_be_followed_by_hand() -> None:
    """2 places: a b c a b d a; a and b are kept, c and d pass by."""
    visits = [(unit(number), 1) for number in (0, 1, 2, 0, 1, 3, 0)]
    assert belady_hits(2, visits) == 3


def test_a_page_cache_loses_everything_in_a_loop_that_is_a_little_too_large() -> None:
    visits = trace(100, 3, shuffled=False)
    assert hits(PageCache(99 * MIB), visits) == 0
    assert hits(PageCache(100 * MIB), visits) == 200 * MIB


@pytest.mark.parametrize("kept", [Tiers([40 * MIB]), Tiers([10 * MIB, 40 * MIB]), PageCache(40 * MIB)])
def test_bytes_requested_are_hits_and_misses(kept: Kept) -> None:
    visits = trace(100, 4, shuffled=True)
    assert hits(kept, visits) == kept.hit_bytes
    assert kept.hit_bytes + kept.missed_bytes == 400 * MIB


def test_two_tiers_keep_about_as_much_as_one_of_their_size() -> None:
    visits = trace(200, 6, shuffled=True)
    two, one = hits(Tiers([30 * MIB, 90 * MIB]), visits), hits(Tiers([120 * MIB]), visits)
    assert hits(Tiers([90 * MIB]), visits) < two < 1.1 * one


def test_dirty_data_takes_room_from_the_data_set() -> None:
    tiers = Tiers([100 * MIB])
    hits(tiers, trace(100, 1, shuffled=False))
    tiers.set_dirty(60 * MIB)
    assert tiers.ledgers[0].policy.used_bytes <= 40 * MIB
    assert sum(each in tiers for each, _ in trace(100, 1, shuffled=False)) == 40


def test_with_time_the_same_is_hit_as_without() -> None:
    """One reader: the simulation visits units in the order of the files, read-ahead and all."""
    scenario = changed(SMALL_JOB, gpus=1, gpus_per_node=1, workers=1)
    data, tiers = DataSet(scenario), Tiers([scenario.nvme_bytes])
    for result in simulated(scenario, whole=True):
        before = tiers.hit_bytes
        hits(tiers, list(interleaved(data, data.order(0, result.number), 1)))
        assert result.hit_rate * scenario.dataset_bytes == pytest.approx(tiers.hit_bytes - before)


@pytest.mark.parametrize("setup", setups.SETUPS)
@pytest.mark.parametrize("layout", ["shards", "files"])
def test_an_epoch_visits_every_byte_once_with_or_without_a_window(setup: str, layout: str) -> None:
    scenario = changed(
        SMALL_JOB, layout=layout, sample_bytes=768 * KIB, samples_per_s=60.0, ram_bytes=512 * MIB
    )
    scenario = changed(scenario, dataset_bytes=scenario.sample_bytes * 1200)
    made: list[Kept] = []

    def keep(data: DataSet) -> Kept:
        made.append(setups.keep(scenario, setup, data))
        return made[-1]

    for number in range(1, 3):
        made.clear()
        once = changed(scenario, epochs=number)
        read_epochs(once, keep, partial(setups.build, once, setup), windows={1})
        data = DataSet(once)
        assert made[0].hit_bytes + made[0].missed_bytes == number * data.node_contents * data.content_bytes


def test_the_same_seed_gives_the_same_answer_and_another_one_another() -> None:
    assert simulated(SMALL_JOB) == simulated(SMALL_JOB)
    assert simulated(SMALL_JOB) != simulated(changed(SMALL_JOB, seed=2))


@pytest.mark.parametrize("order", ["sequential", "shuffled"])
def test_more_nvme_never_lowers_the_hit_rate(order: str) -> None:
    rates = []
    for size in (256 * MIB, 512 * MIB, 1024 * MIB, 1536 * MIB, 2048 * MIB, 4096 * MIB):
        scenario = changed(SMALL_JOB, order=order, nvme_bytes=size)
        kept, data = Tiers([size]), DataSet(scenario)
        for epoch in range(1, 5):
            before = kept.hit_bytes
            hits(kept, list(interleaved(data, data.order(0, epoch), 4)))
        rates.append((kept.hit_bytes - before) / scenario.dataset_bytes)
    assert all(more >= less - 0.01 for less, more in itertools.pairwise(rates))
    assert rates[0] < 0.2
    assert rates[-1] == 1.0


@pytest.mark.parametrize("setup", [setups.STORE, setups.TIERFS])
def test_a_faster_store_never_raises_the_stall(setup: str) -> None:
    job = changed(SMALL_JOB, samples_per_s=2000.0, nvme_bytes=256 * MIB, epochs=1, mount_rate=LARGE)
    stalls = [
        simulated(changed(job, store_read_rate=rate * MIB), setup)[0].stall_s or 0.0
        for rate in (50.0, 100.0, 200.0, 400.0, 800.0)
    ]
    assert stalls == sorted(stalls, reverse=True)
    assert stalls[0] > 2 * stalls[-1]


@pytest.mark.parametrize("setup", [setups.STORE, setups.TIERFS, setups.NFS])
def test_the_stall_of_a_starved_job_is_what_division_says(setup: str) -> None:
    """500 MiB/s are wanted and 100 MiB/s come: a step of 1 s takes 5 s."""
    rates = {"store_read_rate": 100.0 * MIB, "nfs_read_rate": 100.0 * MIB, "store_stream_rate": LARGE}
    job = changed(
        SMALL_JOB, samples_per_s=2000.0, epochs=1, dataset_bytes=64 * GIB, mount_rate=LARGE, **rates
    )
    assert simulated(job, setup)[0].stall_s == pytest.approx(4.0, rel=0.12)


def test_what_was_read_ahead_at_the_start_does_not_hide_that_a_job_is_starved() -> None:
    """300 MiB/s are wanted and 250 MiB/s come: 0.2 s for each step in the end, whatever was in the buffers."""
    job = changed(SMALL_JOB, gpus=16, gpus_per_node=8, workers=4, samples_per_s=300.0, epochs=1, ram_bytes=64 * GIB,
                  dataset_bytes=1024 * GIB, shard_bytes=256 * MIB, store_read_rate=500.0 * MIB, mount_rate=LARGE)  # fmt: skip
    assert simulated(job, setups.STORE)[0].stall_s == pytest.approx(0.2, rel=0.1)
    assert simulated(job, setups.TIERFS)[0].stall_s == pytest.approx(0.2, rel=0.2)


def test_the_latency_of_small_files_is_what_division_says() -> None:
    """Each of 4 loaders waits 40 ms for a file, so 100 files/s come where 200 are wanted."""
    job = changed(SMALL_JOB, layout="files", sample_bytes=64 * KIB, dataset_bytes=2 * GIB, samples_per_s=100.0,
                  epochs=1, store_latency_s=0.04, store_latency_p99_s=0.04, store_stream_rate=LARGE)  # fmt: skip
    for setup in (setups.STORE, setups.TIERFS):
        assert simulated(job, setup)[0].stall_s == pytest.approx(1.0, rel=0.1)


def test_nobody_waits_where_everything_is_fast() -> None:
    for setup in setups.SETUPS:
        assert simulated(changed(SMALL_JOB, samples_per_s=10.0, epochs=1), setup)[0].stall_s == pytest.approx(
            0, abs=1e-6
        )


def test_read_ahead_hides_the_latency_of_a_far_store() -> None:
    """One stream, 200 ms away: read piece by piece 1 MiB takes more than that; ahead, many are under way."""
    far = changed(SMALL_JOB, gpus=1, gpus_per_node=1, workers=1, samples_per_s=400.0, epochs=1, dataset_bytes=4 * GIB,
                  nvme_bytes=16 * GIB, store_latency_s=0.2, store_latency_p99_s=0.2)  # fmt: skip
    with_it = simulated(far)[0].stall_s or 0.0
    without = simulated(changed(far, read_ahead_bytes=0))[0].stall_s or 0.0
    assert with_it < 0.5
    assert without > 5.0


def test_sequential_shards_are_foretold() -> None:
    """Shards of 2 MiB in the order of their names: the one that is opened next is on its way already."""
    job = changed(SMALL_JOB, gpus=1, gpus_per_node=1, workers=1, shard_bytes=2 * MIB, samples_per_s=100.0, epochs=1,
                  nvme_bytes=16 * GIB, dataset_bytes=GIB, store_latency_s=0.3, store_latency_p99_s=0.3)  # fmt: skip
    in_turn = simulated(changed(job, order="sequential"))[0].stall_s or 0.0
    at_random = simulated(job)[0].stall_s or 0.0
    assert in_turn < at_random / 4


def test_a_part_of_its_own_is_kept_where_a_new_deal_is_not() -> None:
    """Eight nodes, each with room for its eighth of the data."""
    job = changed(SMALL_JOB, gpus=16, dataset_bytes=64 * GIB, nvme_bytes=10 * GIB, shard_bytes=16 * MIB)
    dealt, own = simulated(job), simulated(changed(job, partition="fixed"))
    assert own[1].hit_rate == 1.0
    assert dealt[1].hit_rate == pytest.approx(1 / 8, abs=0.04)


def test_a_window_that_is_cut_to_size_says_the_same() -> None:
    """A node that is simulated in part, with steps in pieces, stalls as long as a whole one."""
    job = changed(SMALL_JOB, gpus=4, gpus_per_node=4, samples_per_s=2000.0, dataset_bytes=64 * GIB, epochs=1,
                  store_read_rate=400.0 * MIB, nvme_bytes=GIB)  # fmt: skip
    keep, build = partial(setups.keep, job, setups.TIERFS), partial(setups.build, job, setups.TIERFS)
    stalls = [
        read_epochs(job, keep, build, scale=scale)[0].stall_s
        for scale in (Scale(1.0, 1, 4, 8), Scale(0.25, 1, 4, 8), Scale(1.0, 4, 16, 32))
    ]
    assert stalls == pytest.approx([stalls[0]] * 3, rel=0.1)


class InstantNode:
    """Has everything at hand."""

    arrived_bytes = 0

    def __init__(self) -> None:
        self.read_bytes = 0

    def read(self, content: int, offset: int, length: int) -> Read:
        self.read_bytes += length
        return Read(None, length)


def test_a_training_loop_takes_its_batches_and_ends_with_the_files() -> None:
    node = InstantNode()
    pace = Pace(gpus=2, workers=2, prefetch_batches=1, batch_bytes=1.5 * MIB, step_s=1.0)
    environment = Environment()
    nodes: list[Node] = [node]  # type: ignore[list-item]
    training = Training(environment, pace, nodes, [iter(range(10))], 3 * MIB)
    assert not training.run(1000)
    assert training.stalls_s == [0.0] * len(training.stalls_s)
    assert len(training.stalls_s) == environment.now
    assert 8 <= len(training.stalls_s) <= 10
    assert node.read_bytes == 30 * MIB
