"""The loops of ``tierfs bench``: what they read and count, that they end, and that they leave nothing behind."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from tierfs.bench import loops, processes
from tierfs.bench.files import Content, FileSet, large_files, make_files, share, small_files
from tierfs.bench.processes import Loop, Recorder, call_in_child, delayed, run_groups, run_together
from tierfs.errors import BenchFailed, ConfigError

MIB = 1024**2


def three_files(tmp_path: Path) -> FileSet:
    return make_files(large_files(str(tmp_path / "data"), 3, 2 * MIB + 4096))


def sizes(files: FileSet) -> list[int]:
    return [size for _, size in files.entries]


def test_bytes_and_operations_of_all_processes_are_added(tmp_path: Path) -> None:
    files = three_files(tmp_path)
    outcome = run_together(
        [loops.read_files([path], [size]) for path, size in zip(files.paths(), sizes(files), strict=True)]
    )
    assert (outcome.operations, outcome.bytes) == (3, files.total_bytes)
    assert outcome.latency.count == 3
    assert sum(outcome.timeline.amounts) == files.total_bytes
    assert outcome.timeline.count_of == "bytes"
    assert [amount for _, amount in outcome.each] == sizes(files)
    assert 0 < outcome.seconds < 60
    assert not outcome.cut


@pytest.mark.parametrize("way", loops.WAYS)
def test_a_stream_reads_every_byte_once_in_blocks(tmp_path: Path, way: str) -> None:
    files = three_files(tmp_path)
    task = loops.read_streams(files.paths(), sizes(files), block_bytes=MIB, way=way)
    outcome = run_together([task])
    assert outcome.bytes == files.total_bytes
    assert outcome.operations == 9, "two whole blocks and a rest, three times"
    part = run_together([loops.read_stream(files.paths()[0], MIB, offset=MIB, block_bytes=MIB // 2)])
    assert (part.operations, part.bytes) == (2, MIB)


@pytest.mark.parametrize("way", loops.WAYS)
def test_random_reads_end_after_their_number(tmp_path: Path, way: str) -> None:
    files = three_files(tmp_path)
    task = loops.read_random(files.paths(), sizes(files), block_bytes=4096, way=way, reads=50, chain=3)
    outcome = run_together([task, task])
    assert (outcome.operations, outcome.bytes) == (100, 100 * 3 * 4096)


def test_a_loop_that_repeats_ends_when_time_is_over(tmp_path: Path) -> None:
    files = three_files(tmp_path)
    outcome = run_together(
        [
            loops.read_files(files.paths(), sizes(files), repeat=True),
            loops.read_streams(files.paths(), sizes(files), repeat=True),
            loops.read_random(files.paths(), sizes(files)),
        ],
        limit_s=0.05,
    )
    assert outcome.seconds >= 0.05
    assert not outcome.cut


def test_work_that_the_time_did_not_suffice_for_is_said_to_be_cut(tmp_path: Path) -> None:
    files = three_files(tmp_path)
    outcome = run_together([loops.read_files(files.paths(), sizes(files))], limit_s=0.0)
    assert outcome.cut
    assert outcome.operations == 1


def test_a_file_that_is_too_short_fails_the_measurement(tmp_path: Path) -> None:
    files = three_files(tmp_path)
    os.truncate(files.paths()[1], 10)
    for task in (
        loops.read_files(files.paths(), sizes(files)),
        loops.read_streams(files.paths(), sizes(files)),
        loops.read_random([files.paths()[1]], [4096], reads=1),
    ):
        with pytest.raises(BenchFailed, match="shard-00001"):
            run_together([task])


def test_one_failure_is_told_and_the_others_are_ended(tmp_path: Path) -> None:
    good = loops.read_files(*_pair(three_files(tmp_path)))
    with pytest.raises(BenchFailed, match=r"nothing-here: No such file"):
        run_together([good, loops.read_files([str(tmp_path / "nothing-here")], [1]), good])
    assert not multiprocessing.active_children()


def test_a_failure_before_the_start_is_told_and_nobody_waits_for_it() -> None:
    def broken() -> Loop:
        raise ConfigError("no such thing")

    with pytest.raises(BenchFailed, match="no such thing"):
        run_together([broken, _nothing, _nothing])


def test_a_process_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PREPARE_LIMIT_S", 0.3)

    def hangs() -> Loop:
        return lambda recorder: time.sleep(1000)

    with pytest.raises(BenchFailed, match="1 of 2"):
        run_together([hangs, _nothing], limit_s=0.1, hang_s=0.1)
    assert not multiprocessing.active_children()


def test_a_process_that_dies_is_told() -> None:
    def dies() -> Loop:
        def loop(recorder: Recorder) -> None:
            os._exit(3)

        return loop

    with pytest.raises(BenchFailed, match="died"):
        run_together([dies])
    with pytest.raises(BenchFailed, match="died"):
        call_in_child(lambda: os._exit(3))


def test_groups_begin_together_and_are_told_apart(tmp_path: Path) -> None:
    files = three_files(tmp_path)
    reads, saves = run_groups(
        [
            [loops.read_files(files.paths(), sizes(files), repeat=True)],
            [delayed(loops.write_file(str(tmp_path / "saved"), 3 * MIB), 0.25)],
        ],
        limit_s=0.5,
    )
    assert (saves.operations, saves.bytes) == (1, 3 * MIB)
    assert (tmp_path / "saved").stat().st_size == 3 * MIB
    assert saves.timeline.amounts[:2] == [0, 0], "its course begins when that of the others does"
    assert sum(saves.timeline.amounts) == 3 * MIB
    assert reads.bytes % (2 * MIB + 4096) == 0


def test_trees_and_names(tmp_path: Path) -> None:
    files = make_files(small_files(str(tmp_path / "tree"), 25, low_bytes=1, high_bytes=100, per_directory=10))
    assert len(files.directories()) == 3
    outcome = run_together([loops.walk_tree(files.root), loops.walk_tree(files.root)])
    assert (outcome.operations, outcome.bytes) == (2 * 28, 0)
    assert outcome.timeline.count_of == "operations"
    assert sum(outcome.timeline.amounts) == 56
    names = [str(tmp_path / f"n{number}") for number in range(5)]
    for operation in ("create", "stat", "open", "unlink"):
        assert run_together([loops.on_each(names, operation)]).operations == 5
    with pytest.raises(BenchFailed, match="n0: No such file"):
        run_together([loops.on_each(names, "unlink")])


def test_a_call_in_a_child_returns_what_it_found_and_raises_what_failed() -> None:
    assert call_in_child(lambda: [os.getppid()]) == [os.getpid()]
    with pytest.raises(BenchFailed, match="ZeroDivisionError"):
        call_in_child(lambda: 1 // 0)


def test_nothing_to_run_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="nothing"):
        run_together([])


def test_files_are_the_same_for_a_seed_and_differ_without(tmp_path: Path) -> None:
    one = make_files(small_files(str(tmp_path / "a"), 9, low_bytes=10, high_bytes=5000, seed=1))
    same = make_files(small_files(str(tmp_path / "b"), 9, low_bytes=10, high_bytes=5000, seed=1))
    other = make_files(small_files(str(tmp_path / "c"), 9, low_bytes=10, high_bytes=5000, seed=2))
    contents = [[Path(path).read_bytes() for path in files.paths()] for files in (one, same, other)]
    assert contents[0] == contents[1] != contents[2]
    assert len(set(contents[0])) == 9
    assert [len(content) for content in contents[0]] == [size for _, size in one.entries]
    assert one.at(str(tmp_path / "b")).paths() == same.paths()
    assert sorted(one.order(1)) == list(range(9))
    assert one.order(1) == same.order(1) != one.order(2)


def test_pieces_add_up_to_the_whole() -> None:
    content = Content(3)
    whole = content.whole(5, 2 * MIB + 7)
    assert len(whole) == 2 * MIB + 7
    assert whole == content.piece(5, 0, MIB) + content.piece(5, MIB, MIB) + content.piece(5, 2 * MIB, 7)
    assert content.piece(5, 0, MIB) != content.piece(5, MIB, MIB) != content.piece(6, MIB, MIB)


def test_making_stops_when_time_is_over_and_says_how_far_it_came(tmp_path: Path) -> None:
    wanted = small_files(str(tmp_path / "a"), 9, low_bytes=10, high_bytes=50)
    assert make_files(wanted, stop_s=time.monotonic() - 1) == wanted.first(1)
    large = make_files(large_files(str(tmp_path / "b"), 2, 3 * MIB), stop_s=time.monotonic() - 1)
    assert large.entries == (("shard-00000.bin", MIB),), "as long as it is on the disk"
    assert os.stat(large.paths()[0]).st_size == MIB


def test_a_save_ends_when_time_is_over(tmp_path: Path) -> None:
    outcome = run_together([loops.write_file(str(tmp_path / "a"), 5 * MIB)], limit_s=0.0)
    assert outcome.cut
    assert (outcome.operations, outcome.bytes) == (1, MIB)
    assert os.stat(tmp_path / "a").st_size == MIB


def test_work_is_dealt_out_completely() -> None:
    assert share([1, 2, 3, 4, 5], 2) == [[1, 3, 5], [2, 4]]
    assert share([1], 3) == [[1]]


def _pair(files: FileSet) -> tuple[list[str], list[int]]:
    return files.paths(), sizes(files)


def _nothing() -> Loop:
    return lambda recorder: None
