"""The training loads without their libraries: how scripts are run and given up, and what a report makes of them."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.sources import DirectorySource
from benchmarks.training import driver, pictures, rounds
from benchmarks.training.__main__ import parse
from benchmarks.training.driver import LoadFailed, call, versions
from benchmarks.training.plan import Figure, Load, loads
from benchmarks.training.result import MOUNT, PLAIN, TrainingResult, Value
from benchmarks.training.rounds import Rounds
from tierfs.bench.result import Machine
from tierfs.report import render_text

PYTHON = Path(sys.executable)
LIMIT_S = 60.0
SCRIPT = """
import json, os, sys, time
from pathlib import Path
verb, directory, scale = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
if verb == "make":
    (directory / "a").mkdir(parents=True)
    (directory / "a" / "data").write_bytes(b"x" * scale["bytes"])
    (directory / "empty").mkdir()
    print("RESULT {}")
else:
    size = (directory / "a" / "data").stat().st_size
    print("some warning of a library")
    print("RESULT " + json.dumps({"cold": size, "slow_s": 2.0 if "plain" in str(directory) else 1.0}))
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    scripts = tmp_path / "loads"
    scripts.mkdir()
    (scripts / "small.py").write_text(SCRIPT)
    (scripts / "fails.py").write_text("import sys\nprint('half way')\nsys.exit('the tensor is wrong')\n")
    (scripts / "hangs.py").write_text("import time\nprint('on', flush=True)\ntime.sleep(600)\n")
    (scripts / "silent.py").write_text("print('done')\n")
    monkeypatch.setattr(driver, "LOADS", scripts)
    monkeypatch.setattr(rounds, "drop_kernel_caches", lambda: None)
    figures = (Figure("cold", "size", "bytes"), Figure("slow_s", "how slow", "s", higher_is_better=False))
    return Load("small", "a small load", "small", figures, {"bytes": 100})


def other(load: Load, script: str) -> Load:
    return Load(script, script, script, load.figures, load.scale)


def empty_result() -> TrainingResult:
    machine = Machine(processor="x", cores=2, memory_bytes=1 << 30, kernel="6", system="Debian", load=0.0)
    return TrainingResult(started="2026-01-01T00:00:00+00:00", command="python", machine=machine)


def test_a_script_is_run_and_its_last_result_is_read(load: Load, tmp_path: Path) -> None:
    place = tmp_path / "data"
    assert call(PYTHON, load, "make", place, LIMIT_S, lambda: None) == {}
    assert call(PYTHON, load, "run", place, LIMIT_S, lambda: None) == {"cold": 100, "slow_s": 1.0}
    assert driver.parse("x\nRESULT {\"a\": 1}\nRESULT {\"a\": 2}\nbye\n") == {"a": 2}


def test_a_script_that_fails_says_why(load: Load, tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="exit code 1: the tensor is wrong\nhalf way"):
        call(PYTHON, other(load, "fails"), "run", tmp_path, LIMIT_S, lambda: None)
    with pytest.raises(LoadFailed, match="no result: done"):
        call(PYTHON, other(load, "silent"), "run", tmp_path, LIMIT_S, lambda: None)


def test_a_script_that_hangs_is_given_up_first_and_then_killed(load: Load, tmp_path: Path) -> None:
    given_up: list[bool] = []
    with pytest.raises(LoadFailed, match="no end within 0 s; given up"):
        call(PYTHON, other(load, "hangs"), "run", tmp_path, 0.2, lambda: given_up.append(True))
    assert given_up == [True]


def test_versions_of_what_is_installed() -> None:
    found = versions(PYTHON, ["pytest", "no-such-package"])
    assert found == {"pytest": pytest.__version__}


def test_every_load_has_its_script_and_one_name() -> None:
    known = loads()
    assert len({load.name for load in known}) == len(known)
    for load in known:
        assert (driver.LOADS / f"{load.script}.py").is_file()
        assert load.needs
    smaller = {load.name: load for load in loads(0.01)}
    assert smaller["files"].scale["files"] == 20


def test_wrong_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--interpreter", "python", "--loads", "files,tapes"])
    assert "no load 'tapes'; there are shards, files, models" in capsys.readouterr().err
    _, wanted = parse(["--interpreter", "python", "--loads", "models,files"])
    assert [load.name for load in wanted] == ["files", "models"]


class OnDirectories(Rounds):
    """Both targets are directories: the store itself is the mount."""

    order: list[str]

    def _on_mount(self, load: Load) -> dict[str, float]:
        self.order.append(MOUNT)
        assert isinstance(self.source, DirectorySource)
        return call(self.interpreter, load, "run", self.source.directory / load.name, LIMIT_S, lambda: None)

    def _on_directory(self, load: Load) -> dict[str, float]:
        self.order.append(PLAIN)
        return super()._on_directory(load)


def conduct(tmp_path: Path, deadline_s: float) -> OnDirectories:
    store = tmp_path / "store"
    store.mkdir()
    conductor = OnDirectories(PYTHON, DirectorySource(store), tmp_path, empty_result(), deadline_s, lambda text: None)
    conductor.order = []
    return conductor


def test_the_store_gets_the_same_data_and_targets_alternate(load: Load, tmp_path: Path) -> None:
    conductor = conduct(tmp_path, time.monotonic() + 100)
    conductor.run([other(load, "fails"), load], 2)
    assert conductor.order == [PLAIN, MOUNT, MOUNT, PLAIN]
    result = conductor.result
    assert result.rounds == 2
    assert [(each.load, each.target) for each in result.failures] == [("fails", "making its data")]
    assert (tmp_path / "store" / "small" / "a" / "data").read_bytes() == b"x" * 100
    assert (tmp_path / "store" / "small" / "empty").is_dir()
    assert rounds.objects_of(tmp_path / PLAIN / "small") == {"small/a/data": b"x" * 100, "small/empty/": b""}
    size, slow = load.figures
    times = result.times(load, slow)
    assert times is not None
    assert (times.median, times.count) == (2.0, 2)  # half the time is twice as good
    lines = render_text(pictures.report(result, [load])).splitlines()
    line = next(line for line in lines if "how slow" in line)
    assert line.split()[-1] == "2.00"
    assert any("Nowhere in this run" in line for line in lines)
    assert any("the tensor is wrong" in line for line in lines)
    assert result.summary(load, size, MOUNT) is not None


def test_nothing_is_begun_after_the_deadline(load: Load, tmp_path: Path) -> None:
    conductor = conduct(tmp_path, time.monotonic() - 1)
    conductor.run([load], 2)
    assert conductor.order == []
    assert conductor.result.rounds == 0


def test_where_the_mount_is_behind_is_said(load: Load) -> None:
    result = empty_result()
    for target, value in ((PLAIN, 100.0), (MOUNT, 25.0)):
        result.values.append(Value(load=load.name, figure="cold", target=target, round=0, value=value))
    lines = render_text(pictures.report(result, [load])).splitlines()
    at = lines.index("Where the mount is behind the directory")
    assert any(line.split()[-2:] == ["size", "0.25"] for line in lines[at:])


def test_the_index_of_records_says_where_each_begins(tmp_path: Path) -> None:
    records = tmp_path / "records"
    bodies = [b"a" * 5, b"", b"b" * 300]
    records.write_bytes(b"".join(struct.pack("<QI", len(body), 0) + body + b"\0" * 4 for body in bodies))
    index = tmp_path / "index"
    subprocess.run([sys.executable, str(driver.TOOLS / "tfrecord2idx"), str(records), str(index)], check=True)
    assert index.read_text() == "0 21\n21 16\n37 316\n"
    assert os.access(driver.TOOLS / "tfrecord2idx", os.X_OK)


def test_samples_know_when_a_byte_of_them_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(driver.__file__).parent / "loads"))
    import _protocol  # type: ignore[import-not-found]

    data = _protocol.sealed(7, b"content")
    assert _protocol.opened(data) == 7
    with pytest.raises(ValueError, match="wrong checksum"):
        _protocol.opened(data[:9] + b"?" + data[10:])
    _protocol.expect([2, 0, 1], 3)
    for wrong in ([0, 1], [0, 1, 1], [0, 1, 2, 3]):
        with pytest.raises(ValueError, match="instead of 3"):
            _protocol.expect(wrong, 3)
