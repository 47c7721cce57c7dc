"""``tierfs checkpoint``: what ``keep`` chooses, and what ``restore --into`` copies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash

from tierfs.checkpoint import ranks
from tierfs.checkpoint.saving import Saving
from tierfs.cli import checkpoint_copy
from tierfs.cli.checkpoint import to_remove
from tierfs.control.protocol import CheckpointEntry, Progress
from tierfs.errors import CheckpointError, ConfigError


def entry(path: str, step: int | None, state: str = "in the store", created_ns: int = 0) -> CheckpointEntry:
    return CheckpointEntry(path=path, step=step, state=state, created_ns=created_ns)


def removed(entries: list[CheckpointEntry], last: int) -> list[str]:
    gone, kept = to_remove(entries, last)
    assert {found.path for found in gone} | {found.path for found in kept} == {
        found.path for found in entries
    }
    return [found.path for found in gone]


def test_the_highest_steps_are_kept() -> None:
    entries = [entry("a", 10), entry("b", 9), entry("c", 200), entry("d", 30)]
    assert removed(entries, 1) == ["b", "a", "d"]
    assert removed(entries, 3) == ["b"]
    assert removed(entries, 4) == []
    assert removed(entries, 9) == []


def test_without_a_step_age_decides() -> None:
    entries = [entry("a", 900, created_ns=1), entry("b", None, created_ns=2), entry("c", 1, created_ns=3)]
    assert removed(entries, 1) == ["a", "b"]


def test_what_is_not_whole_in_the_store_does_not_count() -> None:
    entries = [entry("old damaged", 1, "damaged"), entry("a", 2), entry("b", 3),
               entry("damaged", 4, "damaged"), entry("local", 5, "local")]  # fmt: skip
    assert removed(entries, 2) == ["old damaged"]
    assert removed(entries, 1) == ["old damaged", "a"]
    assert removed(entries, 3) == [], "there are no three whole ones: nothing is removed"


def test_a_copy_appears_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "c" / "d").mkdir(parents=True)
    data = {"a": os.urandom(100), "d/b": b"", "d/c": os.urandom(5_000_000)}
    for name, content in data.items():
        (tmp_path / "c" / name).write_bytes(content)
    sums = {name: xxhash.xxh3_128(content).hexdigest() for name, content in data.items()}
    seen: list[int] = []

    def update(state: Progress) -> None:
        seen.append(state.done_bytes)

    into = str(tmp_path / "out")
    checkpoint_copy.check(into)
    assert checkpoint_copy.copy(str(tmp_path / "c"), into, sums, 1, update) == []
    assert {name: (tmp_path / "out" / name).read_bytes() for name in data} == data
    assert seen[-1] == 5_000_100
    with pytest.raises(ConfigError, match="exists"):
        checkpoint_copy.check(into)
    (failed,) = checkpoint_copy.copy(str(tmp_path / "c"), into + "2", {**sums, "a": "0" * 32}, 1, update)
    assert failed.path == "a"
    assert "have the checksum" in failed.message
    assert not (tmp_path / "out2").exists()


def test_ranks_from_arguments_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert ranks.find(None, None) == ranks.Ranks(0, 1)
    assert ranks.find(2, 3) == ranks.Ranks(2, 3)
    for rank, world_size in ((3, 3), (-1, 2), (0, None), (None, 1)):
        with pytest.raises(ConfigError):
            ranks.find(rank, world_size)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert ranks.find(None, None) == ranks.Ranks(1, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(CheckpointError, match=r"torch\.distributed"):
        ranks.find(None, None)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ConfigError, match="WORLD_SIZE='many'"):
        ranks.find(None, None)


def test_a_process_that_has_ended_is_gone() -> None:
    assert not ranks.is_gone(ranks.process())
    pid = os.fork()
    if not pid:
        os._exit(0)
    told = {**ranks.process(), "pid": pid}
    os.waitpid(pid, 0)
    assert ranks.is_gone(told)
    assert not ranks.is_gone({**told, "ns": "pid:[1]"}), "it cannot be seen from here"


def test_names_of_shards_stay_in_the_directory() -> None:
    saving = Saving("/c", 0, 1)
    assert saving.shard("d/x.pt") == Path("/c/d/x.pt")
    assert os.fspath(saving) == "/c"
    for name in ("../x", "/x", "", "a/../../x"):
        with pytest.raises(ConfigError):
            saving.shard(name)
    assert saving.files == ["d/x.pt"]
