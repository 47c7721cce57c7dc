"""``tierfs bench`` on directories and stores: what it makes, what it removes, and what it never touches."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tierfs.bench import caches, result, run, scale, workloads
from tierfs.bench import directory as directories
from tierfs.bench.bucket import BucketTarget
from tierfs.bench.directory import MARKER, DirectoryTarget
from tierfs.bench.files import FileSet, large_files, small_files
from tierfs.bench.processes import Loop, run_together
from tierfs.bench.scale import MIB, Scale
from tierfs.bench.session import Session, Workload
from tierfs.bench.target import BenchTarget
from tierfs.config import load
from tierfs.errors import BenchFailed, ConfigError

FAR = 1e12


def tiny() -> Scale:
    """Small, and short; with so much time that it suffices on a busy machine too."""
    return scale.choose(quick=True, size_bytes=8 * MIB, limit_s=120.0, each_s=0.05, workers=2)


def nothing() -> None:
    pass


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """A directory with somebody's data in it."""
    path = tmp_path / "parent"
    (path / "theirs").mkdir(parents=True)
    (path / "theirs" / "file").write_text("precious")
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def bucket(path: Path) -> BucketTarget:
    return BucketTarget(
        load(
            {
                "source": f"file://{path}/theirs",
                "mountpoint": "/nonexistent/m",
                "state_dir": "/nonexistent/s",
            },
            environ={},
        )
    )


@pytest.fixture(params=["directory", "store"])
def target(request: pytest.FixtureRequest, parent: Path) -> BenchTarget:
    return DirectoryTarget(str(parent)) if request.param == "directory" else bucket(parent)


def test_what_was_made_is_removed_and_nothing_else(target: BenchTarget, parent: Path) -> None:
    before = contents(parent)
    assert target.open(MIB) == []
    small = small_files(f"{target.place}/small", 12, low_bytes=1, high_bytes=5000, per_directory=5)
    large = large_files(f"{target.place}/large", 2, MIB)
    for files in (small, large):
        assert target.make(files, stop_s=FAR, tick=nothing) == files
    saved = large_files(f"{target.place}/saved", 1, MIB)
    run_together([target.write_file(saved, 0)])
    assert len(contents(parent)) >= len(before) + 12 + 2 + 1
    target.remove(small, tick=nothing)
    assert target.close(nothing) == []
    after = {name: text for name, text in contents(parent).items() if ".tierfs" not in name}
    assert after == before
    assert target.close(nothing) == [], "twice does no harm"


def test_tasks_move_what_they_say(target: BenchTarget) -> None:
    target.open(MIB)
    small = small_files(f"{target.place}/small", 6, low_bytes=1, high_bytes=5000, per_directory=5)
    large = large_files(f"{target.place}/large", 2, MIB)
    for files in (small, large):
        target.make(files, stop_s=FAR, tick=nothing)
    way = "buffered"
    everything = range(6)
    assert run_together([target.read_files(small, everything)]).bytes == small.total_bytes
    stream = run_together([target.read_streams(large, [0, 1], block_bytes=MIB // 4, way=way)])
    assert (stream.operations, stream.bytes) == (8, 2 * MIB)
    again = target.read_streams(large, [0], block_bytes=MIB // 4, way=way, repeat=True)
    assert run_together([again], limit_s=0.1).operations >= 1
    queries = run_together(
        [target.read_random(large, block_bytes=4096, way=way, seed=1, chain=2)], limit_s=0.1
    )
    assert queries.bytes == queries.operations * 2 * 4096 > 0
    assert run_together([target.walk(small)], limit_s=0.05).operations >= 2, "directories, then files"
    assert target.make_cold(small, limit_s=1, tick=nothing) is None
    assert target.settle(limit_s=1, tick=nothing) is None
    assert target.cpu_s() == {}
    assert target.close(nothing) == []


def test_a_directory_in_which_somebody_else_put_something_stays(parent: Path) -> None:
    target = DirectoryTarget(str(parent))
    target.open(MIB)
    files = small_files(f"{target.place}/small", 3, low_bytes=1, high_bytes=10)
    target.make(files, stop_s=FAR, tick=nothing)
    foreign = Path(target.place) / "small" / "d0000" / "foreign"
    foreign.write_text("precious")
    (left,) = target.close(nothing)
    assert "not made here" in left
    assert "d0000" in left
    assert foreign.read_text() == "precious"
    assert list(foreign.parent.iterdir()) == [foreign]


def test_a_directory_that_a_killed_run_left_is_named_and_not_touched(parent: Path) -> None:
    dead = parent / "tierfs-bench-0123456789ab"
    dead.mkdir()
    (dead / MARKER).write_text("process 4194305, started 0\n")  # pids end before 2^22
    alive = parent / "tierfs-bench-ba9876543210"
    alive.mkdir()
    (alive / MARKER).write_text(f"process {os.getpid()}, started 0\n")
    target = DirectoryTarget(str(parent))
    (note,) = target.open(MIB)
    assert str(dead) in note
    assert target.close(nothing) == []
    assert (dead / MARKER).exists()
    assert (alive / MARKER).exists()


def test_what_cannot_be_measured_is_refused(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        DirectoryTarget(str(parent / "nowhere")).open(MIB)
    with pytest.raises(ConfigError, match="not a directory"):
        DirectoryTarget(str(parent / "theirs" / "file")).open(MIB)
    with pytest.raises(ConfigError, match=r"MiB free.*--size"):
        DirectoryTarget(str(parent)).open(1 << 60)
    with pytest.raises(ConfigError, match=r"MiB free.*--size"):
        bucket(parent).open(1 << 60)
    with pytest.raises(ConfigError, match="TARGET"):
        bucket(parent / "nowhere").open(MIB)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(directories.os, "mkdir", refuse)
    with pytest.raises(ConfigError, match="Permission denied"):
        DirectoryTarget(str(parent)).open(MIB)


def test_pages_are_dropped(tmp_path: Path) -> None:
    """``mincore`` says so, where the file system has a page cache."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(MIB))
    caches.write_back([str(path)])
    path.read_bytes()
    before = resident_pages(path)
    caches.drop([str(path)])
    if before == 0:
        pytest.skip("this file system keeps no pages")
    assert resident_pages(path) < before / 4


def resident_pages(path: Path) -> int:
    import ctypes
    import mmap

    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = len(mapped) // mmap.PAGESIZE
        found = (ctypes.c_ubyte * pages)()
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), found)
        return sum(byte & 1 for byte in found)


def test_a_run_measures_every_load_and_leaves_nothing(target: BenchTarget, parent: Path) -> None:
    said: list[str] = []
    found = run.run(
        target,
        tiny(),
        workloads.ALL,
        seed=3,
        watcher=lambda what, share: said.append(what),
        options={"seed": 3},
    )
    failed = [skipped for skipped in found.skipped if skipped.failed]
    assert not failed
    names = {load.name for load in workloads.ALL}
    missing = names - {one.workload for one in found.measurements}
    assert not missing, [one for one in found.skipped if one.workload in missing]
    for one in found.measurements:
        assert one.operations > 0, one.variant
        assert one.seconds > 0, one.variant
        assert one.bytes > 0 or one.workload == "metadata", one.variant
        assert one.latency is None or one.latency.count > 0
    assert found.options == {"seed": 3}
    assert found.loop_cost_ns > 0
    assert [line for line in said if line.startswith("mixed: ")]
    assert [path.name for path in parent.iterdir()] == ["theirs"]
    assert result.decode(result.encode(found)) == found
    kinds = {one.parameters.get("state") for one in found.measurements}
    assert ("cold" in kinds) == (target.kind == "directory")


def test_what_is_called_for_is_removed_after_ctrl_c(target: BenchTarget, parent: Path) -> None:
    def interrupted(session: Session) -> None:
        session.small()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.run(target, tiny(), [Workload("small-files", "", 1.0, interrupted)])
    assert [path.name for path in parent.iterdir()] == ["theirs"]


def test_a_load_that_fails_does_not_stop_the_others(parent: Path) -> None:
    def breaks(session: Session) -> None:
        raise BenchFailed("out of luck")

    def fails_inside(session: Session) -> None:
        def task() -> Loop:
            raise OSError(5, "Input/output error", "/somewhere")

        session.measure("variant", [task], operation="nothing", parameters={})
        session.small()

    def works(session: Session) -> None:
        session.measure(
            "v", [session.target.walk(session.small())], operation="entry", parameters={"workers": 1}
        )

    loads = [Workload("a", "", 1, breaks), Workload("b", "", 1, fails_inside), Workload("c", "", 1, works)]
    found = run.run(DirectoryTarget(str(parent)), tiny(), loads)
    assert [(one.workload, one.variant, one.failed) for one in found.skipped] == [
        ("a", "", True),
        ("b", "variant", True),
    ]
    assert [one.reason for one in found.skipped] == ["out of luck", "/somewhere: Input/output error"]
    assert [one.workload for one in found.measurements] == ["c"]


def test_what_there_was_no_time_for_is_named(parent: Path) -> None:
    def late(session: Session) -> None:
        session._load_stop_s = 0.0
        assert (
            session.measure("v", [session.target.walk(FileSet("/", ()))], operation="", parameters={}) is None
        )

    found = run.run(DirectoryTarget(str(parent)), tiny(), [Workload("a", "", 1, late)])
    assert [(one.variant, one.failed) for one in found.skipped] == [("v", False)]
    assert "--time" in found.skipped[0].reason


def test_variants_share_the_time_that_is_left(parent: Path) -> None:
    given: list[float] = []
    usual_s = 10.0

    def many(session: Session) -> None:
        session._load_stop_s = time.monotonic() + 55.0
        given.extend(session.each_s for _ in session.in_turn(range(10)))
        assert session.each_s == usual_s, "as before"
        session._load_stop_s = time.monotonic() + 5.0
        given.extend(session.each_s for _ in session.in_turn(range(10)))
        session._load_stop_s = time.monotonic() + 500.0
        given.extend(session.each_s for _ in session.in_turn(range(10)))

    wanted = scale.choose(quick=True, size_bytes=8 * MIB, limit_s=600.0, each_s=usual_s)
    found = run.run(DirectoryTarget(str(parent)), wanted, [Workload("a", "", 1, many)])
    assert found.skipped == []
    assert given[0] == pytest.approx(4.7, abs=0.4), "a tenth of the time, less what a start takes"
    assert given[10] == usual_s / 4, "not shorter than a quarter"
    assert given[20] == usual_s, "not longer than usual"


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("size_mib", [8, 100, 512, 4096])
@pytest.mark.parametrize("workers", [1, 3, 16])
def test_the_size_is_kept(quick: bool, size_mib: int, workers: int) -> None:
    chosen = scale.choose(quick=quick, size_bytes=size_mib * MIB, workers=workers)
    small_bytes = chosen.small_count * (chosen.small_low_bytes + chosen.small_high_bytes) // 2
    large_bytes = chosen.large_count * chosen.large_file_bytes
    saved_bytes = chosen.most * chosen.shard_bytes
    rounded_up = chosen.large_count * MIB + chosen.most * 65536
    assert small_bytes + large_bytes + saved_bytes <= size_mib * MIB + rounded_up
    assert chosen.workers[0] == 1
    assert chosen.workers[-1] == workers
    assert list(chosen.workers) == sorted(set(chosen.workers))


def test_quick_is_quick_and_small() -> None:
    chosen = scale.choose(quick=True)
    assert chosen.size_bytes <= 1024 * MIB
    assert chosen.limit_s < 60


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size_bytes": 5}, "--size"),
        ({"limit_s": 0.0}, "--time"),
        ({"each_s": 0.0}, "--each"),
        ({"workers": 0}, "--workers"),
    ],
)
def test_nonsense_is_refused(changes: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        scale.choose(quick=True, **changes)  # type: ignore[arg-type]


def test_loads_are_chosen_by_name() -> None:
    assert [load.name for load in workloads.chosen(["rag", "metadata"])] == ["metadata", "rag"]
    assert workloads.chosen([]) == list(workloads.ALL)
    with pytest.raises(ConfigError, match=r"'fast' is not known; there are small-files, "):
        workloads.chosen(["fast"])
