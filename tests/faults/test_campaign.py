"""A few strikes of each kind, with every check; ``make faults`` does it for longer, with other seeds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.support.campaign.history import History
from tests.support.campaign.run import Episode, run_episode
from tests.support.campaign.strikes import KINDS, PLAIN, STRIKES
from tests.support.mount import files_below, native_missing, wait_until

REPOSITORY = Path(__file__).parents[2]


# -- the check itself


def has_calls(log: Path, count: int) -> bool:
    return log.exists() and log.read_bytes().count(b"\n") > 2 * count


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What a writer left in a plain directory when it was killed, and its log."""
    base = tmp_path_factory.mktemp("written")
    directory, log = base / "d", base / "d.log"
    directory.mkdir()
    command = [sys.executable, "-m", "tests.support.campaign.writer", str(directory), str(log), "3", "names"]
    writer = subprocess.Popen(command, cwd=REPOSITORY)
    calls = 150
    try:
        while True:
            wait_until(partial(has_calls, log, calls), f"{calls} calls")
            writer.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, writer.pid, os.WSTOPPED | os.WNOWAIT)
            sizes = [len(data) for data in files_below(directory).values()]
            if len(sizes) > 1 and max(sizes) > 8192:
                break
            writer.send_signal(signal.SIGCONT)
            calls += 10
    finally:
        writer.kill()
        writer.wait()
    return directory, log


def test_a_local_file_system_passes(written: tuple[Path, Path]) -> None:
    history = History(written[1])
    found = files_below(written[0])
    assert history.problems(found) == []
    assert history.problems(found, power_cut=True) == []
    assert all(history.whole_at_some_time(data) for data in found.values())


def biggest(found: dict[str, bytes]) -> str:
    return max(found, key=lambda name: len(found[name]))


@pytest.mark.parametrize(
    "damage", ["gone", "short", "foreign", "zeros", "another place", "appeared", "swapped"]
)
def test_damage_is_found(written: tuple[Path, Path], damage: str) -> None:
    history, found = History(written[1]), files_below(written[0])
    name = biggest(found)
    data = found[name]
    assert len(data) > 8192
    match damage:
        case "gone":
            del found[name]
        case "short":
            found[name] = data[:-1]
        case "foreign":
            found[name] = data[:100] + b"?" + data[101:]
        case "zeros":
            found[name] = bytes(len(data))
        case "another place":
            found[name] = data[64:] + data[:64]
        case "appeared":
            found["new"] = data
        case "swapped":
            other = next(n for n in found if n != name)
            found[name], found[other] = found[other], data
    assert history.problems(found)
    if damage in ("foreign", "another place"):
        assert not history.whole_at_some_time(found[name])


def test_what_was_synced_has_to_survive_a_power_cut(tmp_path: Path) -> None:
    log = tmp_path / "w.log"
    calls = [
        '{"n":1,"do":"create","name":"a","file":"w.1"}', '{"n":1,"ok":true}',
        '{"n":2,"do":"write","file":"w.1","offset":0,"length":64}', '{"n":2,"ok":true}',
        '{"n":3,"do":"fsync","file":"w.1"}', '{"n":3,"ok":true}',
        '{"n":4,"do":"write","file":"w.1","offset":64,"length":64}', '{"n":4,"ok":true}',
        '{"n":5,"do":"rename","name":"a","new_name":"b"}', '{"n":5,"ok":true}',
        '{"n":6,"do":"unlink","name":"b"}',
    ]  # fmt: skip
    log.write_text("".join(line + "\n" for line in calls))
    history = History(log)
    first, second = history.files["w.1"].at("w.1", 3), history.files["w.1"].at("w.1", 4)
    assert (len(first), len(second)) == (64, 128)
    for found in ({"a": first}, {"b": first}, {"a": second}, {"b": first + bytes(64)}, {}):
        assert history.problems(found, power_cut=True) == []
    for found in ({"a": b""}, {"a": bytes(64)}, {"c": first}, {"a": first, "b": first}, {"b": first + first}):
        assert history.problems(found, power_cut=True)
    for found in ({"b": second}, {}):  # the last call may have happened
        assert history.problems(found) == []
    for found in ({"a": second}, {"b": first}):
        assert history.problems(found)


# -- the campaign


def strike(
    base: Path,
    *strikes: str,
    kind: str = "plain",
    front: str = "",
    options: tuple[str, ...] = (),
    profile: str = "names",
    seed: int = 1,
) -> None:
    chosen = front or ("python" if native_missing() else "native")
    for _ in run_episode(Episode(seed, kind, chosen, options, profile, strikes), base):
        pass


def test_every_strike_belongs_to_an_arena() -> None:
    assert sorted(STRIKES) == sorted([*PLAIN, *(name for names in KINDS.values() for name in names)])


@pytest.mark.semantics(
    "S-DUR-1",
    "Whichever process is killed, every call that had returned has happened; the one that was under way has happened, has not, or in part.",
)
@pytest.mark.needs_fuse
@pytest.mark.limit_s(300)
def test_processes_are_killed(base_dir: Path) -> None:
    strike(
        base_dir,
        "kill engine",
        "kill front",
        "kill applications",
        options=("--upload-delay", "0"),
    )


@pytest.mark.semantics(
    "S-DUR-4",
    "Whichever requests the store fails or leaves without an answer, every object holds all of what its file was at one moment, and within a minute after the store is back everything is there.",
)
@pytest.mark.needs_fuse
@pytest.mark.limit_s(300)
def test_the_store_fails(base_dir: Path) -> None:
    strike(
        base_dir,
        "resets",
        "outage",
        "second node",
        front="python",
        options=("--upload-delay", "0"),
    )


@pytest.mark.semantics(
    "S-DUR-3",
    "What a full disk has no room for is refused by `write`, `fsync`, `close` or the change of a name; everything that was acknowledged stays.",
)
@pytest.mark.needs_fuse
@pytest.mark.limit_s(300)
def test_the_disk_is_full(base_dir: Path) -> None:
    options = ("--upload-delay", "0", "--store-timeout", "1", "--part-size", "64M")
    strike(base_dir, *KINDS["small"], kind="small", front="python", profile="names fill", options=options)


@pytest.mark.semantics(
    "S-DUR-2",
    "After a power cut the names are those of some moment since the last `fsync` returned, and every page of a file is as the last `fsync` of that file left it, or newer.",
)
@pytest.mark.needs_fuse
@pytest.mark.limit_s(300)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_power_is_cut(base_dir: Path, seed: int) -> None:
    strike(base_dir, "power cut", kind="lossy", options=("--upload-delay", "0.1"), seed=seed)


@pytest.mark.semantics(
    "S-DUR-5",
    "With `--write-through` what `close` has acknowledged, and with `--fsync remote` what `fsync` has, is still in the store when the node is lost with its disks.",
)
@pytest.mark.needs_fuse
@pytest.mark.limit_s(300)
@pytest.mark.parametrize("options", [("--write-through",), ("--fsync", "remote")])
def test_the_node_is_lost(base_dir: Path, options: tuple[str, ...]) -> None:
    strike(base_dir, "node lost", kind="remote", profile="plain", options=options)
