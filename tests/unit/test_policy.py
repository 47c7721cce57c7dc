"""Eviction policy: hit rates on simulated traces, and what must hold for any sequence of calls."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierfs.cache.policy import Admission, EvictionPolicy, Unit
from tierfs.types import ContentId

Access = tuple[Unit, int]
Epoch = Sequence[Access]

CAPACITY = 1_000_000
UNIT = 1_000


def data_set(name: str, total_bytes: int, sizes: Sequence[int] = (UNIT,)) -> list[Access]:
    """Units of the given sizes, in turn, until they sum up to ``total_bytes``."""
    accesses: list[Access] = []
    while total_bytes > 0:
        size = min(total_bytes, sizes[len(accesses) % len(sizes)])
        content_id = ContentId(f"{name}{len(accesses):015}".encode()[:16])
        accesses.append(((content_id, 0), size))
        total_bytes -= size
    return accesses


def shuffles(accesses: Epoch, epochs: int) -> list[Epoch]:
    return [random.Random(seed).sample(accesses, len(accesses)) for seed in range(epochs)]


def read(policy: EvictionPolicy, unit: Unit, size: int) -> bool:
    """What a tier does for one read; returns whether it was a hit."""
    if unit in policy:
        policy.touch(unit)
        return True
    if policy.admit(unit, size):
        for victim in policy.victims(policy.excess_bytes):
            policy.remove(victim)
    assert policy.used_bytes <= policy.capacity_bytes
    return False


def rates(hit: Callable[[Unit, int], bool], epochs: Sequence[Epoch]) -> list[float]:
    """Byte hit rate of each epoch."""
    return [
        sum(size for unit, size in epoch if hit(unit, size)) / sum(size for _, size in epoch)
        for epoch in epochs
    ]


def rates_of_policy(epochs: Sequence[Epoch], capacity: int = CAPACITY) -> list[float]:
    policy = EvictionPolicy(capacity)
    return rates(lambda unit, size: read(policy, unit, size), epochs)


def rates_of_queue(epochs: Sequence[Epoch], *, lru: bool) -> list[float]:
    """LRU or FIFO."""
    queue: OrderedDict[Unit, int] = OrderedDict()
    used = 0

    def hit(unit: Unit, size: int) -> bool:
        nonlocal used
        if unit in queue:
            if lru:
                queue.move_to_end(unit)
            return True
        queue[unit] = size
        used += size
        while used > CAPACITY:
            used -= queue.popitem(last=False)[1]
        return False

    return rates(hit, epochs)


def rates_of_belady(epochs: Sequence[Epoch]) -> list[float]:
    """The optimum for equal sizes: evict, or do not admit, what is used last."""
    trace = [unit for epoch in epochs for unit, _ in epoch]
    uses: dict[Unit, list[int]] = {}
    for position in range(len(trace) - 1, -1, -1):
        uses.setdefault(trace[position], []).append(position)
    resident: set[Unit] = set()

    def hit(unit: Unit, size: int) -> bool:
        uses[unit].pop()
        if unit in resident:
            return True
        resident.add(unit)
        if len(resident) * size > CAPACITY:
            resident.remove(max(resident, key=lambda u: uses[u][-1] if uses[u] else len(trace)))
        return False

    return rates(hit, epochs)


# What the cache is for


def test_c24_loop_in_the_same_order_hits_close_to_capacity_over_data() -> None:
    loop = data_set("a", CAPACITY * 12 // 10)
    assert min(rates_of_policy([loop] * 5)[1:]) >= 0.78
    assert max(rates_of_queue([loop] * 5, lru=True)) == 0.0


def test_c24_seeded_shuffles_hit_at_least_seven_tenths() -> None:
    epochs = shuffles(data_set("a", CAPACITY * 12 // 10), 6)
    assert min(rates_of_policy(epochs)[1:]) >= 0.75


@pytest.mark.parametrize(
    ("factor", "least"), [(1.0, 1.0), (1.1, 0.81), (1.5, 0.6), (2, 0.45), (3, 0.29), (5, 0.15)]
)
def test_loop_over_a_multiple_of_the_capacity(factor: float, least: float) -> None:
    loop = data_set("a", int(CAPACITY * factor))
    assert min(rates_of_policy([loop] * 5)[1:]) >= least


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.0])
@pytest.mark.parametrize("before", [0.8, 1.2])
def test_another_data_set_that_fits_is_cached_completely_by_its_third_epoch(
    factor: float, before: float
) -> None:
    old = data_set("a", int(CAPACITY * before))
    new = data_set("b", int(CAPACITY * factor))
    assert rates_of_policy([old] * 4 + [new] * 4)[6:] == [1.0, 1.0]


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.0])
def test_another_shuffled_data_set_after_a_larger_one_is_cached_by_its_third_epoch(factor: float) -> None:
    old = shuffles(data_set("a", CAPACITY * 12 // 10), 4)
    new = shuffles(data_set("b", int(CAPACITY * factor)), 4)
    assert rates_of_policy([*old, *new])[6:] == [1.0, 1.0]


def test_another_data_set_that_does_not_fit_reaches_its_rate_by_its_third_epoch() -> None:
    old = data_set("a", CAPACITY * 12 // 10)
    new = data_set("b", CAPACITY * 12 // 10)
    assert rates_of_policy([old] * 4 + [new] * 4)[6] >= 0.75


def test_hot_set_survives_scans() -> None:
    hot = data_set("h", CAPACITY // 2)
    epochs: list[Epoch] = [hot, hot]
    for number in range(6):
        epochs += [data_set(f"s{number}", CAPACITY), hot]
    assert rates_of_policy(epochs)[3::2] == [1.0] * 6


def test_hot_set_survives_a_scan_of_three_capacities_mixed_into_it() -> None:
    hot = data_set("h", CAPACITY * 3 // 10)
    scan = iter(data_set("s", 3 * CAPACITY))
    mixed = [
        access
        for _, hot_access in zip(range(3_000), hot * 10, strict=False)
        for access in (hot_access, next(scan))
    ]
    policy = EvictionPolicy(CAPACITY)
    rates(lambda unit, size: read(policy, unit, size), [hot])
    hits = [read(policy, unit, size) for unit, size in mixed]
    assert all(hits[::2])
    assert not any(hits[1::2])


def test_one_hit_scans_leave_a_loop_alone() -> None:
    loop = data_set("a", CAPACITY * 8 // 10)
    policy = EvictionPolicy(CAPACITY)
    rates(lambda unit, size: read(policy, unit, size), [loop, loop])
    for number in range(5):
        rates(lambda unit, size: read(policy, unit, size), [data_set(f"s{number}", CAPACITY // 2)])
        assert rates(lambda unit, size: read(policy, unit, size), [loop]) == [1.0]


def test_dead_data_gives_way_to_a_loop_that_does_not_fit_at_all() -> None:
    dead = data_set("a", CAPACITY * 12 // 10)
    loop = data_set("b", CAPACITY * 4)
    assert rates_of_policy([dead] * 4 + [loop] * 6)[-1] >= 0.2


def test_mixed_sizes_loop() -> None:
    loop = data_set("a", CAPACITY * 12 // 10, sizes=(400, 4_000, 90, 16_000, 1_700))
    assert min(rates_of_policy([loop] * 4)[1:]) >= 0.72
    assert min(rates_of_policy(shuffles(loop, 5))[1:]) >= 0.70


@pytest.mark.parametrize("largest", [30_000, 150_000])
def test_units_that_are_large_for_the_cache(largest: int) -> None:
    loop = data_set("a", CAPACITY * 12 // 10, sizes=(largest, 400, largest // 3, 7_000))
    share = (CAPACITY - max(CAPACITY // 20, largest)) / (CAPACITY * 1.2)
    assert min(rates_of_policy([loop] * 6)[1:]) >= 0.9 * share
    assert min(rates_of_policy(shuffles(loop, 6))[2:]) >= 0.8 * share


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("piece", [128 * 1024, 2 * 1024 * 1024])
def test_c24_extents_that_grow_in_a_small_tier(shuffled: bool, piece: int) -> None:
    """Files of 10 MB in extents of 8 MiB that fill piece by piece; room is made for a little more than asked."""
    capacity, file_size, extent = 200_000_000, 10_000_000, 8 * 1024 * 1024
    policy = EvictionPolicy(capacity)
    files = list(range(capacity * 12 // 10 // file_size))
    for epoch in range(6):
        hits = 0
        for number in random.Random(epoch).sample(files, len(files)) if shuffled else files:
            for offset in range(0, file_size, piece):
                part = (ContentId(number.to_bytes(16, "little")), offset // extent)
                length = min(piece, file_size - offset)
                if policy.size_bytes(part) >= offset % extent + length:
                    hits += length
                    policy.touch(part)
                    continue
                if part in policy:
                    policy.grow(part, length)
                else:
                    assert policy.admit(part, length)
                if policy.excess_bytes:
                    for victim in policy.victims(max(policy.excess_bytes, capacity // 64)):
                        policy.remove(victim)
        assert epoch == 0 or hits / (len(files) * file_size) >= 0.7


def test_blocks_of_units_read_in_turn_behave_like_whole_units() -> None:
    """Units of 16 blocks that fill block by block, four streams at once."""
    policy = EvictionPolicy(CAPACITY)
    loop = [unit for unit, _ in data_set("a", CAPACITY * 12 // 10, sizes=(8_000,))]
    for epoch in range(4):
        hits = blocks = 0
        for start in range(0, len(loop) - 3, 4):
            for block in range(1, 17):
                for part in loop[start : start + 4]:
                    blocks += 1
                    if policy.size_bytes(part) >= block * 500:
                        hits += 1
                        policy.touch(part)
                        continue
                    if part in policy:
                        policy.grow(part, 500)
                    else:
                        policy.admit(part, 500)
                    for victim in policy.victims(policy.excess_bytes):
                        policy.remove(victim)
        assert epoch == 0 or hits / blocks >= 0.74


def test_table_of_policies(capsys: pytest.CaptureFixture[str]) -> None:
    """Against LRU, FIFO and Belady's optimum; the table is printed (pytest -s)."""
    small = data_set("a", CAPACITY * 8 // 10)
    loop = data_set("a", CAPACITY * 12 // 10)
    wide = data_set("a", CAPACITY * 3)
    zipf = random.Random(7).choices(wide, weights=[1 / (rank + 1) for rank in range(len(wide))], k=12_000)
    other = data_set("b", CAPACITY * 8 // 10)
    traces: dict[str, list[Epoch]] = {
        "loop 0.8": [small] * 4,
        "loop 1.2": [loop] * 4,
        "shuffle 1.2": shuffles(loop, 4),
        "loop 3": [wide] * 4,
        "shuffle 3": shuffles(wide, 4),
        "zipf 3": [zipf[start : start + 3_000] for start in range(0, len(zipf), 3_000)],
        "switch 1.2 to 0.8": [loop, loop, other, other, other, other],
    }
    lines = [f"{'hit rate, epochs 2..':<20}{'tierfs':>8}{'LRU':>8}{'FIFO':>8}{'Belady':>8}"]
    for name, epochs in traces.items():
        row = [
            sum(found[1:]) / (len(epochs) - 1)
            for found in (
                rates_of_policy(epochs),
                rates_of_queue(epochs, lru=True),
                rates_of_queue(epochs, lru=False),
                rates_of_belady(epochs),
            )
        ]
        lines.append(f"{name:<20}" + "".join(f"{rate:8.3f}" for rate in row))
        ours, lru, fifo, best = row
        assert ours <= best + 1e-9
        if not name.startswith("switch"):
            assert ours >= max(lru, fifo) - 0.02, lines[-1]
    with capsys.disabled():
        print("", *lines, sep="\n")


# Single rules


def unit(number: int) -> Unit:
    return (ContentId(number.to_bytes(16, "little")), 0)


def test_admission_says_where_the_unit_went() -> None:
    policy = EvictionPolicy(1_000)
    assert policy.admit(unit(1), 50) is Admission.MAIN
    assert policy.admit(unit(2), 950) is Admission.PROBATION
    assert policy.admit(unit(3), 1_001) is Admission.REFUSED
    assert not Admission.REFUSED
    assert unit(3) not in policy
    with pytest.raises(ValueError, match="resident"):
        policy.admit(unit(1), 1)


def test_the_unit_that_room_is_made_for_is_the_last_victim() -> None:
    policy = EvictionPolicy(100)
    policy.admit(unit(1), 90)
    policy.admit(unit(2), 60)
    assert policy.excess_bytes == 50
    assert policy.victims(50) == [unit(1)]
    assert policy.victims(10**9) == [unit(1), unit(2)]


def test_main_gives_way_when_probation_holds_the_newcomer_only() -> None:
    policy = EvictionPolicy(100)
    for number in range(9):
        policy.admit(unit(number), 10)
    policy.admit(unit(9), 10)
    policy.admit(unit(10), 10)
    assert policy.victims(10) == [unit(9)]


def test_pinned_and_dirty_units_are_never_victims() -> None:
    policy = EvictionPolicy(100)
    for number in range(10):
        policy.admit(unit(number), 10)
    policy.pin(unit(0))
    policy.pin(unit(0))
    policy.set_dirty(unit(1))
    policy.set_dirty(unit(9))
    assert policy.pinned_bytes == 10
    assert policy.dirty_bytes == 20
    assert set(policy.victims(10**9)) == {unit(number) for number in range(2, 9)}
    policy.unpin(unit(0))
    assert unit(0) not in policy.victims(10**9)
    policy.unpin(unit(0))
    policy.clear_dirty(unit(1))
    assert {unit(0), unit(1)} <= set(policy.victims(10**9))
    assert policy.pinned_bytes == 0
    assert policy.dirty_bytes == 10


def test_dirty_data_is_refused_only_beyond_what_is_held() -> None:
    policy = EvictionPolicy(100)
    for number in range(10):
        policy.admit(unit(number), 10)
    assert policy.admit(unit(20), 80, dirty=True)
    for victim in policy.victims(policy.excess_bytes):
        policy.remove(victim)
    assert policy.used_bytes == 100
    assert policy.admit(unit(21), 21, dirty=True) is Admission.REFUSED
    assert policy.admit(unit(22), 21) is Admission.REFUSED
    assert policy.admit(unit(23), 20, dirty=True)


def test_a_checkpoint_that_has_been_uploaded_goes_before_what_was_read() -> None:
    loop = data_set("a", CAPACITY // 2)
    policy = EvictionPolicy(CAPACITY)
    rates(lambda u, size: read(policy, u, size), [loop, loop])
    checkpoint = data_set("c", CAPACITY * 4 // 10)
    for written, size in checkpoint:
        assert policy.admit(written, size, dirty=True)
    for written, _ in checkpoint:
        policy.clear_dirty(written)
    rates(lambda u, size: read(policy, u, size), [data_set("n", CAPACITY * 4 // 10)])
    assert rates(lambda u, size: read(policy, u, size), [loop]) == [1.0]
    assert sum(written in policy for written, _ in checkpoint) <= len(checkpoint) // 3


def test_unknown_units_are_errors_except_for_touch_and_remove() -> None:
    policy = EvictionPolicy(100)
    policy.touch(unit(1))
    assert policy.remove(unit(1)) == 0
    for call in (policy.pin, policy.unpin, policy.set_dirty, policy.clear_dirty):
        with pytest.raises(KeyError):
            call(unit(1))
    with pytest.raises(KeyError):
        policy.grow(unit(1), 5)
    policy.admit(unit(1), 5)
    with pytest.raises(ValueError, match="not pinned"):
        policy.unpin(unit(1))
    with pytest.raises(ValueError, match="below zero"):
        policy.grow(unit(1), -6)
    assert policy.used_bytes == 5


def test_loaded_units_are_resident_without_a_clock() -> None:
    policy = EvictionPolicy(100)
    for number in range(10):
        policy.load(unit(number), 10)
    policy.load(unit(3), 99)
    assert policy.used_bytes == 100
    assert len(policy) == 10
    policy.admit(unit(11), 10)
    assert policy.victims(10) == [unit(9)]


def test_a_smaller_capacity_shows_as_excess() -> None:
    policy = EvictionPolicy(100)
    policy.admit(unit(1), 60)
    policy.admit(unit(2), 30)
    policy.resize(50)
    assert policy.excess_bytes == 40
    for victim in policy.victims(policy.excess_bytes):
        policy.remove(victim)
    assert policy.used_bytes <= 50


def test_no_capacity_at_all() -> None:
    policy = EvictionPolicy(0)
    policy.load(unit(1), 10)
    assert policy.admit(unit(2), 1) is Admission.REFUSED
    assert policy.admit(unit(3), 0)
    policy.grow(unit(3), 5)
    for _ in range(3):
        policy.touch(unit(1))
        policy.touch(unit(3))
    assert policy.excess_bytes == 15
    assert sorted(policy.victims(15)) == [unit(1), unit(3)]


class PolicyMachine(RuleBasedStateMachine):
    """Any sequence of calls, against a dict."""

    CAPACITY = 200

    def __init__(self) -> None:
        super().__init__()
        self.policy = EvictionPolicy(self.CAPACITY)
        self.sizes: dict[Unit, int] = {}
        self.pins: dict[Unit, int] = {}
        self.dirty: set[Unit] = set()

    units = st.integers(0, 40).map(unit)

    def evict(self) -> None:
        excess = self.policy.excess_bytes
        victims = self.policy.victims(excess)
        assert len(victims) == len(set(victims))
        for victim in victims:
            assert victim not in self.dirty
            assert not self.pins.get(victim)
            assert self.policy.remove(victim) == self.sizes.pop(victim)
        assert self.policy.excess_bytes == 0 or self.policy.evictable_bytes == 0

    @rule(unit=units, size=st.integers(0, 80), dirty=st.booleans())
    def admit(self, unit: Unit, size: int, dirty: bool) -> None:
        if unit in self.sizes:
            return
        held = sum(size for unit, size in self.sizes.items() if self.pins.get(unit) or unit in self.dirty)
        admitted = self.policy.admit(unit, size, dirty=dirty)
        assert bool(admitted) == (size <= self.policy.capacity_bytes - held)
        if admitted:
            self.sizes[unit] = size
            if dirty:
                self.dirty.add(unit)
        self.evict()

    @rule(unit=units, size=st.integers(0, 80))
    def load(self, unit: Unit, size: int) -> None:
        self.policy.load(unit, size)
        self.sizes.setdefault(unit, size)

    @rule(unit=units)
    def touch(self, unit: Unit) -> None:
        self.policy.touch(unit)

    @precondition(lambda self: self.sizes)
    @rule(data=st.data(), added=st.integers(-20, 20))
    def grow(self, data: st.DataObject, added: int) -> None:
        unit = data.draw(st.sampled_from(sorted(self.sizes)))
        added = max(added, -self.sizes[unit])
        self.policy.grow(unit, added)
        self.sizes[unit] += added

    @precondition(lambda self: self.sizes)
    @rule(data=st.data(), remember=st.booleans())
    def remove(self, data: st.DataObject, remember: bool) -> None:
        unit = data.draw(st.sampled_from(sorted(self.sizes)))
        assert self.policy.remove(unit, remember=remember) == self.sizes.pop(unit)
        self.pins.pop(unit, None)
        self.dirty.discard(unit)

    @precondition(lambda self: self.sizes)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        unit = data.draw(st.sampled_from(sorted(self.sizes)))
        self.policy.pin(unit)
        self.pins[unit] = self.pins.get(unit, 0) + 1

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        unit = data.draw(st.sampled_from(sorted(unit for unit, count in self.pins.items() if count)))
        self.policy.unpin(unit)
        self.pins[unit] -= 1

    @precondition(lambda self: self.sizes)
    @rule(data=st.data(), dirty=st.booleans())
    def change_dirty(self, data: st.DataObject, dirty: bool) -> None:
        unit = data.draw(st.sampled_from(sorted(self.sizes)))
        if dirty:
            self.policy.set_dirty(unit)
            self.dirty.add(unit)
        else:
            self.policy.clear_dirty(unit)
            self.dirty.discard(unit)

    @rule(capacity=st.integers(0, 250))
    def resize(self, capacity: int) -> None:
        self.policy.resize(capacity)
        self.evict()

    @rule(nbytes=st.integers(0, 300))
    def look_at_victims(self, nbytes: int) -> None:
        victims = self.policy.victims(nbytes)
        freed = sum(self.sizes[victim] for victim in victims)
        assert freed >= min(nbytes, self.policy.evictable_bytes)
        if victims:
            assert freed - self.sizes[victims[-1]] < nbytes

    @invariant()
    def accounts_are_exact(self) -> None:
        policy = self.policy
        assert len(policy) == len(self.sizes)
        assert all(unit in policy and policy.size_bytes(unit) == size for unit, size in self.sizes.items())
        assert policy.used_bytes == sum(self.sizes.values())
        assert policy.pinned_bytes == sum(self.sizes[unit] for unit, count in self.pins.items() if count)
        assert policy.dirty_bytes == sum(self.sizes[unit] for unit in self.dirty)
        held = {unit for unit, count in self.pins.items() if count} | self.dirty
        assert policy.evictable_bytes == sum(size for unit, size in self.sizes.items() if unit not in held)
        assert set(policy.victims(10**9)) == set(self.sizes) - held


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def fresh_units() -> Iterator[Unit]:
    number = 0
    while True:
        number += 1
        yield unit(number)


def test_ghosts_are_bounded_and_known_for_two_capacities() -> None:
    policy = EvictionPolicy(4_000)
    units = fresh_units()
    for _ in range(50_000):
        read(policy, next(units), 1)
    ghosts = policy._ghosts
    slots = sum(len(table) for table in ghosts._generations)
    assert slots <= 2 * 2 * 4_000 * 2 + 16
    recent = [number for number in range(50_000 - 2 * 4_000, 50_000) if unit(number) not in policy]
    known = sum(ghosts.take(unit(number)) is not None for number in recent)
    assert known >= 0.97 * len(recent)
    assert ghosts.take(unit(recent[0])) is None
