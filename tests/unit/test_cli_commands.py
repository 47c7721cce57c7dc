"""Commands that ask a running engine: what they send, print, and exit with. The engine is a stub."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from tests.support.fake_s3 import fake_s3
from tests.support.stores import environment
from tierfs import mountpoint
from tierfs.cli import exit_codes, output, target
from tierfs.cli.app import run
from tierfs.config import Settings
from tierfs.control import protocol as p
from tierfs.control import registry
from tierfs.control.server import ControlServer, Report
from tierfs.errors import Busy, NotFound

POINT = "/nonexistent/tierfs-test"


class StubEngine:
    """Answers with what ``replies`` holds, and notes what it was asked."""

    def __init__(self, socket_path: Path) -> None:
        self.asked: list[Any] = []
        self.replies: dict[str, Any] = {}
        self._server = ControlServer(socket_path, owner_uid=os.getuid())
        for operation in p.OPERATIONS:
            if operation != "ping":
                self._server.register(operation, self._handler(operation))
        self._ready = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._main,))

    def _handler(self, operation: str) -> Callable[[Any, Report], Any]:
        async def handle(request: Any, report: Report) -> Any:
            self.asked.append(request)
            reply = self.replies[operation]
            if isinstance(reply, Exception):
                raise reply
            if reply == "silence":
                await trio.sleep_forever()
            report(p.Progress(phase=operation, done_files=1, total_files=2))
            return reply

        return handle

    async def _main(self) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self._server.serve)
            self._token = trio.lowlevel.current_trio_token()
            self._scope = nursery.cancel_scope
            self._ready.set()

    def __enter__(self) -> StubEngine:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._token.run_sync_soon(self._scope.cancel)
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture(autouse=True)
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has one tierfs mount, and this user its record."""
    monkeypatch.setenv("TIERFS_RUN_DIR", str(tmp_path / "run"))
    root = mountpoint.MountInfo(1, "0:1", "/", "ext4", "/dev/vda", "rw")
    point = replace(root, path=POINT, fstype=mountpoint.FSTYPE)
    monkeypatch.setattr(mountpoint, "mounts", lambda: [root, point])
    registry.write(a_record())


def a_record() -> registry.MountRecord:
    return registry.record_for(
        Settings(source="s3://bucket", mountpoint=POINT, state_dir="/nonexistent/state"), front="python"
    )


@pytest.fixture
def engine() -> Iterator[StubEngine]:
    with StubEngine(Path(a_record().socket_path)) as stub:
        yield stub


STATUS = p.StatusReply(
    version="1.2.3", uptime_s=3700, source="s3://bucket", mountpoint=POINT, mount_id="0" * 16,
    state_dir="/state", read_only=False, engine=p.EngineStatus(pid=4711, started_ns=1, rss_bytes=2**20),
    front=p.FrontStatus(kind="python", why="asked for"),
    tiers=[p.TierStatus(name="ram", path="/dev/shm/x", capacity_bytes=2**30, used_bytes=2**29, dirty_bytes=0,
                        pinned_bytes=0, hits=3, misses=1)],
    backlog=p.Backlog(files=2, bytes=5, oldest_s=61, deletes=1, failed=[p.Failure(path="a\x1b[1m", message="403")]),
    store=p.StoreStatus(url="s3://bucket", requests={"get": 2}),
    stages=p.Stages(memory=p.StageStatus(files=1, bytes=2**20), disk=p.StageStatus(files=3, bytes=2**30),
                    uploading=p.StageStatus(files=2, bytes=5), store=p.StageStatus(files=9, bytes=2**31)),
)  # fmt: skip


def test_status_for_people(engine: StubEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.replies["status"] = STATUS
    assert run(["status", f"{POINT}/some/file"]) == 0
    shown = capsys.readouterr().out
    for word in (
        "pid 4711",
        "1 h 1 min",
        "python (asked for)",
        "75.0 %",
        "512.0 MiB",
        "2 files (5 B)",
        "403",
        "1.0 MiB only in memory (1 file), 1.0 GiB on the disk (3 files); 2 files (5 B) being uploaded",
    ):
        assert word in shown
    assert "\x1b" not in shown


def test_status_as_json_names_what_scripts_rely_on(
    engine: StubEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.replies["status"] = STATUS
    assert run(["status", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["engine"]["pid"] == 4711
    assert shown["front"]["kind"] == "python"
    assert shown["front"]["why"] == "asked for"
    for name in ("source", "mountpoint", "state_dir", "version", "uptime_s", "open_handles", "hidden_keys"):
        assert name in shown
    assert {"name", "path", "capacity_bytes", "used_bytes", "dirty_bytes", "pinned_bytes", "hits", "misses",
            "state"} <= set(shown["tiers"][0])  # fmt: skip
    assert {"files", "bytes", "oldest_s", "failed", "deletes"} <= set(shown["backlog"])
    assert shown["stages"] == {
        "memory": {"files": 1, "bytes": 2**20},
        "disk": {"files": 3, "bytes": 2**30},
        "uploading": {"files": 2, "bytes": 5},
        "store": {"files": 9, "bytes": 2**31},
    }
    assert {"requests", "bytes_read", "bytes_written", "errors", "state"} <= set(shown["store"])


def test_a_path_on_no_mount(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "/proc"]) == exit_codes.NO_MOUNT
    assert "/proc" in capsys.readouterr().err


def test_an_engine_that_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status"]) == exit_codes.NO_MOUNT  # the process runs, nobody listens
    registry.write(msgspec.structs.replace(a_record(), pid_start_ticks=1))
    assert run(["flush"]) == exit_codes.NO_MOUNT
    assert "gone" in capsys.readouterr().err


def test_a_mount_of_somebody_else(capsys: pytest.CaptureFixture[str]) -> None:
    registry.remove(a_record())
    assert run(["status", POINT]) == exit_codes.NO_MOUNT
    assert "no record" in capsys.readouterr().err


def test_an_engine_that_does_not_answer(engine: StubEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.replies["status"] = "silence"
    monkeypatch.setattr(target, "ANSWER_TIMEOUT_S", 0.05)
    assert run(["status"]) == exit_codes.NO_ANSWER


def test_flush_sends_the_path_and_tells_what_is_left(
    engine: StubEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.replies["flush"] = p.FlushReply(
        flushed_files=2, flushed_bytes=9, remaining_files=0, remaining_bytes=0
    )
    assert run(["flush", f"{POINT}/a/b", "--timeout", "2m"]) == 0
    assert engine.asked == [p.FlushRequest(path=b"a/b", timeout_s=120.0)]
    assert "2 files (9 B) uploaded" in capsys.readouterr().out
    engine.replies["flush"] = p.FlushReply(
        flushed_files=0, flushed_bytes=0, remaining_files=1, remaining_bytes=7,
        failed=[p.Failure(path="a/b", message="access denied")],
    )  # fmt: skip
    assert run(["flush"]) == exit_codes.PARTLY
    told = capsys.readouterr().err
    assert "access denied" in told
    assert "1 file (7 B)" in told


def test_an_error_of_the_engine_is_the_message(
    engine: StubEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.replies["flush"] = NotFound("no such file: a/b")
    assert run(["flush", f"{POINT}/a/b"]) == exit_codes.FAILED
    assert capsys.readouterr().err == "tierfs: no such file: a/b\n"


def test_a_wrong_timeout_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["flush", "--timeout", "soon"]) == exit_codes.USAGE
    assert "--timeout" in capsys.readouterr().err


def test_import(engine: StubEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.replies["import"] = p.ImportReply(
        entries=10, directories=2, requests=3, hidden_keys=1, elapsed_s=0.5
    )
    assert run(["import", f"{POINT}/train", "--jobs", "4"]) == 0
    assert engine.asked == [p.ImportRequest(prefix=b"train", jobs=4)]
    shown = capsys.readouterr()
    assert "10 entries in 2 directories" in shown.out
    assert "1 keys" in shown.err


REPLY = p.PrefetchReply(
    total_files=2, total_bytes=100, cached_bytes=60, failed_bytes=10, evicted_bytes=20, skipped_bytes=10
)


def test_prefetch_reads_a_list_and_resolves_relative_paths(
    engine: StubEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = tmp_path / "list"
    listed.write_bytes(b"a/b\r\n\n" + POINT.encode() + b"/c\n\xff\n")
    engine.replies["prefetch"] = msgspec.structs.replace(REPLY, started=True)
    assert run(["prefetch", f"{POINT}/d", "--list", str(listed)]) == 0
    assert engine.asked == [p.PrefetchRequest(paths=[b"d", b"a/b", b"c", b"\xff"], wait=False)]
    listed.write_bytes(b"x\ny\0z\0")
    assert run(["prefetch", "--list", str(listed), "--null"]) == 0
    assert engine.asked[-1].paths == [b"x\ny", b"z"]


def test_prefetch_adds_up_over_requests_and_fails_if_anything_failed(
    engine: StubEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(target, "BATCH_PATHS", 2)
    engine.replies["prefetch"] = REPLY
    words = [f"{POINT}/{name}" for name in "abc"]
    assert run(["prefetch", "--wait", "--json", *words]) == exit_codes.PARTLY
    assert [request.paths for request in engine.asked] == [[b"a", b"b"], [b"c"]]
    total = json.loads(capsys.readouterr().out)
    assert total["total_bytes"] == 200
    parts = ("cached_bytes", "failed_bytes", "evicted_bytes", "skipped_bytes")
    assert sum(total[part] for part in parts) == total["total_bytes"]


def test_prefetch_of_a_path_that_does_not_exist_fails(
    engine: StubEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.replies["prefetch"] = p.PrefetchReply(
        total_files=0, total_bytes=0, cached_bytes=0, failed_bytes=0, evicted_bytes=0, skipped_bytes=0,
        failed_files=1, failed=[p.Failure(path="absent", message="no such file")],
    )  # fmt: skip
    assert run(["prefetch", "--wait", f"{POINT}/absent"]) == exit_codes.PARTLY
    assert "absent: no such file" in capsys.readouterr().err


def test_prefetch_of_nothing_is_a_usage_error() -> None:
    assert run(["prefetch"]) == exit_codes.USAGE


@pytest.mark.parametrize(
    ("words", "request_"),
    [
        (["pin", "--tier", "ram"], p.PinRequest(paths=[b"m"], tier="ram")),
        (["unpin"], p.UnpinRequest(paths=[b"m"])),
        (["evict"], p.EvictRequest(paths=[b"m"])),
    ],
)
def test_pin_unpin_evict(
    engine: StubEngine, words: list[str], request_: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.replies[words[0]] = p.PathsReply(files=1, bytes=2048)
    assert run([*words, f"{POINT}/m"]) == 0
    assert engine.asked == [request_]
    assert "1 file, 2.0 KiB" in capsys.readouterr().out
    engine.replies[words[0]] = p.PathsReply(files=0, bytes=0, failed=[p.Failure(path="m", message="dirty")])
    assert run([*words, f"{POINT}/m"]) == exit_codes.PARTLY
    assert "m: dirty" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["version", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert "tierfs" in shown
    assert shown["front"].startswith(("native", "python; native is not built: "))
    assert shown["batch"].startswith(("built", "not built: "))
    assert run(["--version"]) == 0
    assert run(["no-such-command"]) == exit_codes.USAGE
    capsys.readouterr()


COMMANDS = [
    "mount",
    "umount",
    "status",
    "flush",
    "import",
    "prefetch",
    "pin",
    "unpin",
    "evict",
    "upgrade",
    "meta",
]


@pytest.mark.parametrize("words", [[], ["doctor"], ["version"], *([name] for name in COMMANDS)])
def test_every_command_has_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*words, "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


def test_help_imports_nothing_heavy() -> None:
    import subprocess
    import sys

    code = (
        "import sys, tierfs.cli.app as app\n"
        "app.run(['--help'])\n"
        "heavy = ('trio', 'boto3', 'structlog', 'rich.console', 'lmdb', 'msgspec', 'pyfuse3', 'obstore')\n"
        "sys.exit([name for name in heavy if name in sys.modules] or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_sizes_and_times_for_people() -> None:
    assert [output.size(n) for n in (0, 1023, 1024, 4 * 2**30, 2**60)] == [
        "0 B", "1023 B", "1.0 KiB", "4.0 GiB", "1024.0 PiB",
    ]  # fmt: skip
    assert [output.duration(s) for s in (0.25, 61, 3700, 400000)] == [
        "0.2 s",
        "1 min 1 s",
        "1 h 1 min",
        "4 d 15 h",
    ]
    assert output.printable("a\nb\udcff\x1b") == "a\\nb\\udcff\\x1b"


@pytest.mark.parametrize("fault", ["", "not_implemented", "access_denied"])
def test_doctor_says_whether_parts_are_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    with fake_s3() as server, environment(server.environment):
        if fault:
            server.fault(fault, operation="copy_part")
        options = ["--endpoint-url", server.endpoint_url, "--state-dir", str(tmp_path / "state"), "--json"]
        run(["doctor", server.source, *options])
        checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
        assert checks["bucket"]["level"] == "ok"
        assert checks["part copy"]["level"] == ("note" if fault else "ok")
        assert ("sent whole" in checks["part copy"]["advice"]) == bool(fault)
        assert server.bucket.keys() == []
        assert server.bucket.uploads == {}


def test_doctor_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = ["--state-dir", str(tmp_path / "state")]
    source = tmp_path / "source"
    source.mkdir()
    run(["doctor", str(source), *state, "--json"])
    shown = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in shown["checks"]}
    assert checks["bucket"]["level"] == "ok"
    assert checks["part copy"]["level"] == "ok"
    assert list(source.iterdir()) == []
    assert checks["disk speed"]["found"]
    assert {
        "FUSE device",
        "kernel",
        "native front",
        "passthrough",
        "io_uring",
        "permissions",
        "free space",
    } <= set(checks)
    assert run(["doctor", str(tmp_path / "absent"), *state]) == exit_codes.FAILED
    told = capsys.readouterr()
    assert "blocks  bucket" in told.out
    assert "->" in told.out
    assert not (tmp_path / "state").exists()


RESTORED = p.SnapshotRestoreReply(
    path="d", name="one", backup="before-restore-x", entries=9, made=1, replaced=2, removed=3, changed=4
)


def test_snapshot_restore(engine: StubEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.replies["snapshot-restore"] = RESTORED
    assert run(["snapshot", "restore", f"{POINT}/d", "--name", "one"]) == 0
    assert engine.asked == [p.SnapshotRestoreRequest(path=b"d", name=b"one")]
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "what was there before is the snapshot before-restore-x" in shown.err
    assert "1 added, 2 replaced, 3 removed, 4 changed in mode, owner or time" in shown.err
    assert run(["snapshot", "restore", POINT, "--name", "one", "--no-backup", "--force", "--json"]) == 0
    assert engine.asked[1] == p.SnapshotRestoreRequest(path=b"", name=b"one", backup=False, force=True)
    assert json.loads(capsys.readouterr().out)["backup"] == "before-restore-x"


def test_snapshot_restore_that_lacks_something(
    engine: StubEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = [p.MissingFile(path="a\x1b[1m", reason="gone")]
    engine.replies["snapshot-restore"] = msgspec.structs.replace(RESTORED, missing=missing, missing_count=3)
    assert run(["snapshot", "restore", POINT, "--name", "one", "--force"]) == exit_codes.PARTLY
    shown = capsys.readouterr().err
    assert ": gone" in shown
    assert "... and 2 more" in shown
    assert "\x1b" not in shown
    engine.replies["snapshot-restore"] = Busy("2 files are open for writing")
    assert run(["snapshot", "restore", POINT, "--name", "one"]) == exit_codes.BUSY
    assert "2 files are open for writing" in capsys.readouterr().err


def test_snapshot_clone(engine: StubEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.replies["snapshot-clone"] = p.SnapshotCloneReply(path="copy", name="one", entries=7)
    assert run(["snapshot", "clone", "one/some/where", f"{POINT}/copy"]) == 0
    assert engine.asked == [p.SnapshotCloneRequest(name=b"one", below=b"some/where", path=b"copy")]
    assert "7 entries" in capsys.readouterr().err
    assert run(["snapshot", "clone", "one", f"{POINT}/copy", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["entries"] == 7
    assert run(["snapshot", "clone", "one", "/proc/x"]) == exit_codes.NO_MOUNT


def test_snapshot_list_says_what_is_under_way(engine: StubEngine, capsys: pytest.CaptureFixture[str]) -> None:
    job = p.SnapshotJob(kind="clone", path="copy", started_ns=1, number=1)
    engine.replies["snapshot-list"] = p.SnapshotListReply(snapshots=[], jobs=[job])
    assert run(["snapshot", "list", POINT]) == 0
    assert "a clone to /copy is under way" in capsys.readouterr().err
