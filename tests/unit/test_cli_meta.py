"""``tierfs meta dump|load|check|backlog|drain`` on a namespace without an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tierfs.cli import exit_codes
from tierfs.cli.app import run
from tierfs.control import registry
from tierfs.namespace import tree
from tierfs.namespace.db import Database
from tierfs.types import ROOT_INO


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "state"
    with Database.open(directory) as db:
        db.commit_now(
            lambda txn: tree.create(txn, ROOT_INO, b"odd\xff", mode=0o100640, uid=7, gid=8, now_ns=1)
        )
    return directory


def test_a_dump_can_be_loaded_and_says_the_same(
    state_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "dump"
    assert run(["meta", "dump", "--state-dir", str(state_dir), "--output", str(file)]) == 0
    assert file.stat().st_mode & 0o777 == 0o600
    assert "records" in capsys.readouterr().err
    copy = tmp_path / "copy"
    assert run(["meta", "load", str(file), "--state-dir", str(copy)]) == 0
    capsys.readouterr()
    assert run(["meta", "dump", "--state-dir", str(copy)]) == 0
    first, second = file.read_text().splitlines(), capsys.readouterr().out.splitlines()
    assert first[1:] == second[1:]
    assert any("odd\\udcff" in line for line in second)


def test_check_of_a_good_namespace(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["meta", "check", "--state-dir", str(state_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"problems": []}


def test_check_of_a_bad_one(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Database.open(state_dir) as db:

        def lose(txn):  # type: ignore[no-untyped-def]
            found = tree.lookup(txn, ROOT_INO, b"odd\xff")
            tree.records.delete_inode(txn, found.ino)

        db.commit_now(lose)
    assert run(["meta", "check", "--state-dir", str(state_dir)]) == exit_codes.FAILED
    assert "problem" in capsys.readouterr().out


def test_what_a_load_refuses(state_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "dump"
    run(["meta", "dump", "--state-dir", str(state_dir), "--output", str(file)])
    assert run(["meta", "load", str(file), "--state-dir", str(state_dir)]) == exit_codes.FAILED
    assert "exists" in capsys.readouterr().err
    assert run(["meta", "load", "/nonexistent", "--state-dir", str(tmp_path / "new")]) == exit_codes.USAGE
    file.write_text("rubbish\n")
    assert run(["meta", "load", str(file), "--state-dir", str(tmp_path / "new")]) == exit_codes.FAILED
    with registry.hold_state_dir(tmp_path / "held"):
        assert run(["meta", "load", str(file), "--state-dir", str(tmp_path / "held")]) == exit_codes.FAILED
    assert "in use" in capsys.readouterr().err


def test_a_state_directory_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["meta", "check", "--state-dir", str(tmp_path / "absent")]) == exit_codes.USAGE
    assert run(["meta", "check", "--state-dir", str(tmp_path)]) == exit_codes.FAILED
    capsys.readouterr()


def test_backlog_and_drain_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "state"
    with Database.open(directory, source="s3://bucket"):
        pass
    assert run(["meta", "backlog", str(directory), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"source": "s3://bucket", "uploads": [], "deletes": []}
    assert run(["meta", "drain", str(directory)]) == exit_codes.FAILED
    assert "engine.json" in capsys.readouterr().err
