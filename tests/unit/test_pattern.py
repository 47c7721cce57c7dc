"""Read pattern detector: what is fetched ahead of which sequences of requests."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierfs.prefetch.pattern import (
    FIRST_WINDOW_BYTES,
    MAX_STREAMS,
    MIB,
    UNHURRIED_WINDOW_BYTES,
    PatternDetector,
    Range,
)

KIB = 1024
LIMIT = 64 * MIB


class Fetched:
    """Which bytes have been returned as ranges, in units of 4 KiB."""

    PAGE = 4 * KIB

    def __init__(self, size_bytes: int) -> None:
        self.pages = bytearray(-(-size_bytes // self.PAGE))
        self.size_bytes = size_bytes
        self.total_bytes = 0

    def add(self, ranges: Iterable[Range]) -> None:
        for found in ranges:
            assert found.length_bytes > 0
            assert found.offset_bytes >= 0
            assert found.end_bytes <= self.size_bytes
            self.total_bytes += found.length_bytes
            first, end = found.offset_bytes // self.PAGE, -(-found.end_bytes // self.PAGE)
            self.pages[first:end] = b"\1" * (end - first)

    @property
    def unique_bytes(self) -> int:
        return sum(self.pages) * self.PAGE

    def has(self, offset: int, length: int) -> bool:
        return all(self.pages[offset // self.PAGE : -(-(offset + length) // self.PAGE)])


def run(detector: PatternDetector, requests: Iterable[tuple[int, int]]) -> tuple[Fetched, int, int]:
    """Feed requests whose reader always waits; returns (fetched, requests foreseen, bytes asked directly)."""
    fetched = Fetched(detector.size_bytes)
    foreseen = direct = 0
    for offset, length in requests:
        if fetched.has(offset, length):
            foreseen += 1
        else:
            direct += length
        fetched.add(detector.observe(offset, length, waiting=True))
    return fetched, foreseen, direct


def sequential(start: int, end: int, step: int) -> list[tuple[int, int]]:
    return [(offset, min(step, end - offset)) for offset in range(start, end, step)]


def interleaved(streams: list[list[tuple[int, int]]], seed: int) -> list[tuple[int, int]]:
    """The streams' requests in a random mixture that keeps the order within each."""
    order = [number for number, stream in enumerate(streams) for _ in stream]
    random.Random(seed).shuffle(order)
    iterators = [iter(stream) for stream in streams]
    return [next(iterators[number]) for number in order]


@pytest.mark.parametrize("step", [4 * KIB, 128 * KIB, MIB])
def test_sequential_file_is_fetched_once_and_to_its_end(step: int) -> None:
    size = 300 * MIB + 12345
    fetched, foreseen, direct = run(PatternDetector(size, LIMIT), sequential(0, size, step))
    requests = -(-size // step)
    assert requests - foreseen <= 2
    assert fetched.total_bytes + direct == size


def test_large_first_request_at_the_start_reads_ahead_at_once() -> None:
    ranges = PatternDetector(100 * MIB, LIMIT).observe(0, MIB)
    assert ranges == [Range(MIB, MIB)]


def test_small_read_in_the_middle_reads_nothing_ahead() -> None:
    detector = PatternDetector(100 * MIB, LIMIT)
    assert detector.observe(50 * MIB, 128 * KIB) == []
    assert detector.observe(50 * MIB + 128 * KIB, 128 * KIB) == []
    assert detector.observe(50 * MIB + 256 * KIB, 128 * KIB) != []


def test_window_doubles_up_to_the_limit_while_the_reader_waits() -> None:
    detector = PatternDetector(1024 * MIB, LIMIT)
    windows = []
    ahead = 0
    for offset, length in sequential(0, 80 * MIB, 128 * KIB):
        for found in detector.observe(offset, length, waiting=True):
            ahead = found.end_bytes
        windows.append(ahead - offset - length)
    assert max(windows[:2]) <= FIRST_WINDOW_BYTES
    assert max(windows[:8]) <= 4 * FIRST_WINDOW_BYTES
    assert 32 * MIB < windows[len(windows) // 2] <= LIMIT
    assert max(windows) <= LIMIT
    assert min(windows[-100:]) >= LIMIT - 4 * MIB
    read_until_full = next(i for i, window in enumerate(windows) if window > LIMIT - 4 * MIB) * 128 * KIB
    assert read_until_full <= 12 * MIB


def test_a_reader_that_never_waits_keeps_a_small_window() -> None:
    detector = PatternDetector(1024 * MIB, LIMIT)
    ahead = 0
    for offset, length in sequential(0, 200 * MIB, 128 * KIB):
        for found in detector.observe(offset, length):
            ahead = found.end_bytes
        assert ahead - offset - length <= UNHURRIED_WINDOW_BYTES


def test_what_is_in_flight_of_a_full_window_is_enough_for_a_fast_link() -> None:
    detector = PatternDetector(1024 * MIB, LIMIT)
    pieces = [
        found
        for offset, length in sequential(0, 200 * MIB, 128 * KIB)
        for found in detector.observe(offset, length, waiting=True)
    ]
    assert {found.length_bytes for found in pieces[-20:]} == {4 * MIB}
    assert all(found.offset_bytes % (4 * MIB) == 0 for found in pieces[-20:])


@pytest.mark.parametrize("step", [4 * KIB, 64 * KIB, 256 * KIB])
def test_c21_four_processes_share_one_descriptor(step: int) -> None:
    size = 256 * MIB
    quarter = size // 4
    streams = [sequential(number * quarter, (number + 1) * quarter, step) for number in range(4)]
    requests = interleaved(streams, seed=step)
    fetched, foreseen, direct = run(PatternDetector(size, LIMIT), requests)
    assert foreseen >= 0.99 * len(requests)
    assert fetched.unique_bytes + direct <= 1.1 * size
    assert fetched.total_bytes <= 1.25 * size
    assert all(fetched.pages[quarter // Fetched.PAGE * number + 1000] for number in range(4))


def test_as_many_streams_as_are_kept() -> None:
    size = MAX_STREAMS * 16 * MIB
    part = size // MAX_STREAMS
    streams = [sequential(number * part, (number + 1) * part, 128 * KIB) for number in range(MAX_STREAMS)]
    requests = interleaved(streams, seed=1)
    fetched, foreseen, direct = run(PatternDetector(size, LIMIT), requests)
    assert foreseen >= 0.85 * len(requests)
    assert fetched.unique_bytes + direct <= 1.1 * size
    assert fetched.total_bytes <= 1.25 * size


def test_streams_share_the_limit() -> None:
    detector = PatternDetector(4096 * MIB, LIMIT)
    ahead = [number * 512 * MIB for number in range(8)]
    for offset, length in sequential(0, 100 * MIB, 128 * KIB):
        for number in range(8):
            start = number * 512 * MIB + offset
            for found in detector.observe(start, length, waiting=True):
                ahead[number] = found.end_bytes
    over = sum(end - (number * 512 + 100) * MIB for number, end in enumerate(ahead))
    assert over <= LIMIT
    assert detector.sequential_streams == 8


def test_requests_of_one_kernel_read_ahead_in_any_order() -> None:
    size = 128 * MIB
    requests = sequential(0, size, 128 * KIB)
    mixer = random.Random(3)
    shuffled = [
        request for start in range(0, len(requests), 8)
        for request in mixer.sample(requests[start : start + 8], 8)
    ]  # fmt: skip
    fetched, foreseen, direct = run(PatternDetector(size, LIMIT), shuffled)
    assert foreseen >= 0.97 * len(requests)
    assert fetched.total_bytes + direct <= 1.02 * size


def test_pages_that_the_kernel_has_are_skipped_without_losing_the_stream() -> None:
    size = 128 * MIB
    requests = [request for number, request in enumerate(sequential(0, size, 128 * KIB)) if number % 7]
    _, foreseen, _ = run(PatternDetector(size, LIMIT), requests)
    assert foreseen >= 0.98 * len(requests)


@pytest.mark.parametrize("step", [4 * KIB, 128 * KIB])
@pytest.mark.parametrize("seed", range(5))
def test_c22_random_reads_fetch_what_was_asked_for(step: int, seed: int) -> None:
    size = 100 * MIB
    chooser = random.Random(seed)
    requests = [(chooser.randrange(size // step) * step, step) for _ in range(2 * size // (128 * KIB))]
    fetched, _, _ = run(PatternDetector(size, LIMIT), requests)
    assert fetched.total_bytes <= 0.1 * step * len(requests)


def test_every_block_once_in_random_order_fetches_next_to_nothing() -> None:
    size = 100 * MIB
    requests = random.Random(5).sample(sequential(0, size, 128 * KIB), size // (128 * KIB))
    fetched, _, _ = run(PatternDetector(size, LIMIT), requests)
    assert fetched.total_bytes <= 0.1 * size


def test_one_stream_is_found_among_random_reads() -> None:
    size = 512 * MIB
    chooser = random.Random(2)
    stream = sequential(0, 128 * MIB, 128 * KIB)
    noise = [(chooser.randrange(256 * MIB, size - 4096), 4096) for _ in stream]
    detector = PatternDetector(size, LIMIT)
    fetched = Fetched(size)
    foreseen = 0
    for request, other in zip(stream, noise, strict=True):
        foreseen += fetched.has(*request)
        fetched.add(detector.observe(*request, waiting=True))
        fetched.add(detector.observe(*other))
    assert foreseen >= 0.95 * len(stream)


def test_strided_reads_fetch_the_next_places_and_nothing_between() -> None:
    size = 400 * MIB
    requests = [(offset, 64 * KIB) for offset in range(0, size, 3 * MIB)]
    fetched, foreseen, direct = run(PatternDetector(size, LIMIT), requests)
    assert foreseen >= len(requests) - 3
    assert fetched.total_bytes + direct == 64 * KIB * len(requests)


def test_backwards() -> None:
    size = 100 * MIB
    requests = [(offset, 128 * KIB) for offset in range(size - 128 * KIB, -1, -128 * KIB)]
    fetched, foreseen, direct = run(PatternDetector(size, LIMIT), requests)
    assert foreseen >= len(requests) - 4
    assert fetched.total_bytes + direct == size


def test_small_steps_backwards_are_fetched_in_large_ranges() -> None:
    size = 16 * MIB
    detector = PatternDetector(size, LIMIT)
    ranges = [
        found
        for offset in range(size - 4096, -1, -4096)
        for found in detector.observe(offset, 4096, waiting=True)
    ]
    assert sum(found.length_bytes for found in ranges) / len(ranges) >= 256 * KIB
    assert sum(found.length_bytes for found in ranges) <= size


def test_the_same_block_again_and_again_is_no_stream() -> None:
    detector = PatternDetector(100 * MIB, LIMIT)
    assert [found for _ in range(100) for found in detector.observe(10 * MIB, 128 * KIB)] == []


def test_second_pass_over_the_file_is_read_ahead_of_too() -> None:
    size = 32 * MIB
    detector = PatternDetector(size, LIMIT)
    run(detector, sequential(0, size, 128 * KIB))
    _, foreseen, _ = run(detector, sequential(0, size, 128 * KIB))
    assert foreseen >= 0.98 * size // (128 * KIB)


def test_dropped_ranges_are_asked_for_again() -> None:
    size = 64 * MIB
    detector = PatternDetector(size, LIMIT)
    fetched = Fetched(size)
    for number, (offset, length) in enumerate(sequential(0, size, 128 * KIB)):
        ranges = detector.observe(offset, length, waiting=True)
        if number % 3:
            for lost in ranges:
                detector.dropped(lost)
        else:
            fetched.add(ranges)
    assert sum(fetched.pages) >= 0.9 * len(fetched.pages)


def test_what_is_left_of_the_window_at_the_end_of_the_file() -> None:
    size = 80 * MIB
    detector = PatternDetector(size, LIMIT)
    for offset, length in sequential(0, size, 128 * KIB):
        detector.observe(offset, length, waiting=True)
        spare = detector.spare_bytes(offset)
        assert spare == 0 or offset + length + LIMIT >= size
    assert spare == LIMIT
    assert PatternDetector(size, LIMIT).spare_bytes(0) == 0


def test_no_read_ahead_with_a_limit_of_zero() -> None:
    detector = PatternDetector(100 * MIB, 0)
    assert [
        found for request in sequential(0, 10 * MIB, 128 * KIB) for found in detector.observe(*request)
    ] == []


@given(
    size=st.integers(1, 64 * MIB),
    limit=st.sampled_from([0, 300_000, 2 * MIB, LIMIT]),
    data=st.data(),
)
def test_ranges_lie_inside_the_file_whatever_is_asked(size: int, limit: int, data: st.DataObject) -> None:
    detector = PatternDetector(size, limit)
    fetched = Fetched(size)
    offset = 0
    for _ in range(data.draw(st.integers(1, 40))):
        if data.draw(st.booleans()):
            offset = data.draw(st.integers(0, size - 1))
        length = data.draw(st.integers(1, MIB))
        ranges = detector.observe(offset, length, waiting=data.draw(st.booleans()))
        fetched.add(ranges)
        for lost in ranges:
            if data.draw(st.booleans()):
                detector.dropped(lost)
        offset = min(offset + length, size - 1)
        assert len(detector._streams) <= MAX_STREAMS
        assert detector.spare_bytes(offset) >= 0
