"""One real mount for a test: starts the command line program, waits until it is ready, and cleans up.

``Mounted`` owns a directory with everything that belongs to the mount::

    BASE/mnt      mountpoint            BASE/state    --state-dir
    BASE/store    source (a directory)  BASE/tier     the disk tier
    BASE/log      stderr of the engine, over all restarts

It signals only processes that it started itself. Whatever happens in the test, ``close`` leaves no mount and
no process behind, and it fails if the log holds a traceback that the test did not announce with
``expect_log``.

With front ``plain`` there is no mount: the mountpoint is an ordinary directory. That is how the tests of
POSIX behaviour are themselves tested: what they demand is what the local file system does.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import run

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 120.0
POLL_S = 0.02
FAULTS_CHECK_S = 0.15
"""A running store looks at its faults file at most every 0.1 s."""
TROUBLE = re.compile(
    r"Traceback \(most recent call last\)|[Uu]nexpected exception|: (Address|Leak|Thread)Sanitizer|: runtime error: "
)

_alive: set[Mounted] = set()
"""Every mount that is up now; the watchdog in conftest breaks them when a test hangs."""


class MountFailed(AssertionError):
    """The program did not mount, or did not stop. The message ends with the tail of its log."""


def fuse_missing() -> str | None:
    """Why no FUSE file system can be mounted here, or None if one can."""
    if not os.path.exists("/dev/fuse"):
        return "/dev/fuse does not exist (load the fuse module, or give the container the device)"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse cannot be opened: {error.strerror}"
    return None


def native_missing() -> str | None:
    """Why no native front can be started here, or None if one can."""
    from tierfs.cli import native

    return native.why_not()


def tierfs_command() -> list[str]:
    """The program under test: ``TIERFS_COMMAND``, the script beside this interpreter, or the module."""
    told = os.environ.get("TIERFS_COMMAND")
    if told:
        return told.split()
    script = Path(sys.executable).with_name("tierfs")
    return [str(script)] if script.exists() else [sys.executable, "-m", "tierfs"]


def mount_entry(path: Path) -> tuple[str, str] | None:
    """(device "major:minor", type) of the mount at exactly ``path``; never touches the mount itself."""
    wanted = os.fsencode(path)
    found = None
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        fields = line.split(b" ")
        here = re.sub(rb"\\(\d{3})", lambda m: bytes([int(m.group(1), 8)]), fields[4])
        if here == wanted:
            found = (fields[2].decode(), fields[fields.index(b"-") + 1].decode())
    return found


class Mounted:
    """See the module docstring. Use as a context manager, or through the fixtures of ``conftest``."""

    def __init__(
        self,
        base: Path,
        *,
        front: str = "python",
        source: str | None = None,
        tiers: Sequence[str] | None = None,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``tiers`` None: one disk tier of 1 GiB below ``base``; an empty sequence: ``--tier none``."""
        self.base = base
        self.front = front
        self.path = base / "mnt"
        self.state_dir = base / "state"
        self.store_dir = base / "store"
        self.log_path = base / "log"
        for directory in (base, self.path, self.store_dir):
            directory.mkdir(exist_ok=True)
            directory.chmod(0o755)
        self.source = source if source is not None else str(self.store_dir)
        self.tiers = tuple(tiers) if tiers is not None else (f"{base / 'tier'}:1G",)
        self.options = tuple(options)
        self.environment = dict(environment or {})
        self.process: subprocess.Popen[bytes] | None = None
        self._expected: list[re.Pattern[str]] = []
        self._checked: dict[Path, int] = {}
        self._connection: str | None = None

    # -- life cycle

    @property
    def is_plain(self) -> bool:
        return self.front == "plain"

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        assert self.process is not None
        return self.process.pid

    def arguments(self, *extra: str) -> list[str]:
        """The command line that mounts."""
        tiers = [word for tier in self.tiers for word in ("--tier", tier)] or ["--tier", "none"]
        return [
            *tierfs_command(),
            "mount",
            self.source,
            str(self.path),
            "--state-dir",
            str(self.state_dir),
            *tiers,
            "--front",
            self.front,
            *self.options,
            *extra,
        ]

    def process_environment(self) -> dict[str, str]:
        passed_on = {"TIERFS_FRONT_PATH", "TIERFS_FUSE_URING", "TIERFS_OPEN_MODE"}
        kept = {
            k: v for k, v in os.environ.items() if k in passed_on or not k.startswith(("TIERFS_", "AWS_"))
        }
        own = {
            "TIERFS_RUN_DIR": str(self.base / "run"),
            "TIERFS_FAULTS": str(self.base / "faults.json"),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
        }
        if len(tierfs_command()) > 1:  # not installed: the package of this work tree
            own["PYTHONPATH"] = str(Path(__file__).parents[2])
        return {**kept, **own, **self.environment}

    def start(self, *extra: str) -> Mounted:
        """Mount in the foreground and wait until ready. Raises ``MountFailed`` with the log."""
        if self.is_plain:
            return self
        assert self.process is None, "already mounted"
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                self.arguments("--foreground", *extra),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.process_environment(),
                cwd="/",
                start_new_session=True,
            )
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self.is_alive():
            if self.process.poll() is not None:
                code, self.process = self.process.returncode, None
                raise MountFailed(f"tierfs mount exited with {code} before it was ready\n{self.log_tail()}")
            if time.monotonic() > deadline:
                self._destroy()
                raise MountFailed(f"not ready after {READY_TIMEOUT_S} s\n{self.log_tail()}")
            time.sleep(POLL_S)
        _alive.add(self)
        return self

    def is_up(self) -> bool:
        """True if a FUSE file system stands at the mountpoint, dead or alive."""
        entry = mount_entry(self.path)
        if entry is None or not entry[1].startswith("fuse"):
            return False
        self._connection = entry[0].partition(":")[2]
        return True

    def is_alive(self) -> bool:
        """True if the mount answers. The dead mount of an engine that was killed does not."""
        if not self.is_up():
            return False
        try:
            os.listdir(self.path)
            device = os.stat(self.path).st_dev
        except OSError as error:
            if error.errno in (errno.ENOTCONN, errno.ECONNABORTED, errno.ECANCELED):
                return False
            raise
        # The dead mount may have been cleared away since: then this was the empty directory below it.
        entry = mount_entry(self.path)
        return entry is not None and entry[0] == f"{os.major(device)}:{os.minor(device)}"

    def umount(self, *options: str, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """A clean unmount through the command line; the engine must end with exit status 0."""
        if self.is_plain:
            return
        answer = self.cli("umount", *options, str(self.path), check=False, timeout_s=timeout_s)
        if answer.returncode != 0:
            raise MountFailed(f"umount exited with {answer.returncode}: {answer.stderr}\n{self.log_tail()}")
        self._reap(expected=0, timeout_s=timeout_s)
        assert not self.is_up(), "umount succeeded but the mount is still there"

    def terminate(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """SIGTERM to the engine; returns its exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self._reap(expected=None, timeout_s=timeout_s)

    def kill9(self) -> None:
        """SIGKILL to the engine. The dead mount stays, as after a crash."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)
        self.process = None
        _alive.discard(self)

    def crash_and_restart(self) -> None:
        """``kill9``, then a new mount at the same place, which has to clear the dead one away itself."""
        if self.is_plain:
            return
        self.kill9()
        self.start()

    def remount(self) -> None:
        """A clean unmount and a new mount."""
        if self.is_plain:
            return
        self.umount()
        self.start()

    def close(self) -> None:
        """Leave nothing behind, then fail if the mount died or wrote a traceback."""
        died = self.process is not None and self.process.poll() is not None
        complaint: str | None = None
        if died:
            assert self.process is not None
            complaint = f"the engine ended by itself with status {self.process.returncode}\n{self.log_tail()}"
            self._destroy()
        elif self.process is not None:
            # By signal, which drains as ``tierfs umount`` does and costs no start of the command line program.
            try:
                code = self.terminate()
                if code != 0 or self.is_up():
                    complaint = f"the mount did not end cleanly: status {code}\n{self.log_tail()}"
            except MountFailed as error:
                complaint = f"the mount could not be ended cleanly: {error}"
            if complaint:
                self._destroy()
        else:
            self._destroy()
        if complaint:
            raise MountFailed(complaint)
        self.check_log()

    def __enter__(self) -> Mounted:
        return self.start()

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.close()
        except AssertionError:
            if kind is None:
                raise
            sys.stderr.write(f"while cleaning up: {self.log_tail()}\n")

    def break_off(self) -> None:
        """Make every system call that hangs in this mount fail. For the watchdog; any thread."""
        process = self.process
        if process is not None:
            os.write(2, f"\nwatchdog: test hangs, killing engine {process.pid}\n{self.log_tail()}\n".encode())
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGABRT)  # faulthandler writes the stacks into the log
                time.sleep(1)
                process.kill()
        if self._connection:
            with contextlib.suppress(OSError):
                Path(f"/sys/fs/fuse/connections/{self._connection}/abort").write_text("1")

    def _reap(self, *, expected: int | None, timeout_s: float) -> int:
        assert self.process is not None
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise MountFailed(f"the engine did not end in {timeout_s} s\n{self.log_tail()}") from None
        self.process = None
        _alive.discard(self)
        if expected is not None and code != expected:
            raise MountFailed(f"the engine ended with status {code}, not {expected}\n{self.log_tail()}")
        return code

    def _destroy(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)
            self.process = None
        _alive.discard(self)
        for _ in range(8):
            if mount_entry(self.path) is None:
                return
            subprocess.run(["umount", "-l", str(self.path)], check=False, capture_output=True)

    # -- command line

    def cli(
        self, *arguments: str, check: bool = True, timeout_s: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run ``tierfs ARGUMENTS``; with ``check`` a non-zero exit status fails the test."""
        answer = run_cli(*arguments, environment=self.process_environment(), timeout_s=timeout_s)
        if check and answer.returncode != 0:
            said = f"{answer.stdout}\n{answer.stderr}"
            raise AssertionError(f"tierfs {' '.join(arguments)} exited with {answer.returncode}\n{said}")
        return answer

    def json(self, *arguments: str) -> Any:
        return json.loads(self.cli(*arguments, "--json").stdout)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.json("status", str(self.path))
        return status

    def flush(self, *paths: str) -> None:
        """Wait until everything written so far is in the store."""
        if not self.is_plain:
            self.cli("flush", *(paths or (str(self.path),)))

    # -- what goes wrong

    def fail(self, *rules: Mapping[str, Any], seed: int = 1) -> None:
        """From now on the store fails as these rules of ``tierfs.store.faulty`` say; none: it works again."""
        path = self.base / "faults.json"
        draft = path.with_suffix(".new")
        draft.write_text(json.dumps({"seed": seed, "rules": list(rules)}))
        draft.rename(path)
        time.sleep(FAULTS_CHECK_S)

    def heal(self) -> None:
        self.fail()

    # -- log

    def expect_log(self, pattern: str) -> None:
        """Tracebacks are allowed in this mount's log if a line of the 60 around them matches ``pattern``."""
        self._expected.append(re.compile(pattern))

    def log(self) -> str:
        """What the engine wrote in the foreground, then its log file."""
        return "".join(text for _, text in self._logs())

    def _logs(self) -> Iterator[tuple[Path, str]]:
        for path in (self.log_path, self.state_dir / "tierfs.log"):
            with contextlib.suppress(FileNotFoundError):
                yield path, path.read_text("utf-8", "replace")

    def log_tail(self, lines: int = 60) -> str:
        return "\n".join([f"--- {self.log_path}", *self.log().splitlines()[-lines:]])

    def check_log(self) -> None:
        """Fail on a traceback that came since the last call and was not expected."""
        for path, text in self._logs():
            lines = text[self._checked.get(path, 0) :].splitlines()
            self._checked[path] = len(text)
            for number, line in enumerate(lines):
                if not TROUBLE.search(line):
                    continue
                around = lines[max(0, number - 30) : number + 30]
                if not any(expected.search(other) for expected in self._expected for other in around):
                    raise AssertionError(f"the engine's log {path} holds a traceback:\n" + "\n".join(around))


class MountFactory:
    """Makes mounts (or what ``Mounted`` takes besides ``base``); all are closed, and checked, at the end."""

    def __init__(self, base: Path, front: str) -> None:
        self._base = base
        self._front = front
        self._made: list[Mounted] = []

    def __iter__(self) -> Iterator[Mounted]:
        return iter(self._made)

    def prepare(self, **settings: Any) -> Mounted:
        """A mount that is not up yet."""
        settings.setdefault("front", self._front)
        base = settings.pop("base", self._base / f"m{len(self._made)}")
        self._made.append(Mounted(base, **settings))
        return self._made[-1]

    def __call__(self, **settings: Any) -> Mounted:
        return self.prepare(**settings).start()

    def close(self) -> None:
        failures = []
        for mounted in reversed(self._made):
            try:
                mounted.close()
            except AssertionError as error:
                failures.append(error)
        if failures:
            raise failures[0]


@contextlib.contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """A descriptor of the file, closed in the end."""
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def run_cli(
    *arguments: str, environment: Mapping[str, str] | None = None, timeout_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Run ``tierfs ARGUMENTS`` outside any mount."""
    return subprocess.run(
        [*tierfs_command(), *arguments],
        env=dict(environment) if environment is not None else None,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
        check=False,
        cwd="/",
    )


@contextlib.contextmanager
def watchdog(limit_s: float) -> Iterator[None]:
    """Break every mount of this process when the body takes longer than ``limit_s``.

    A system call that waits for a FUSE answer cannot be interrupted, so a hung mount would hang the whole
    run; breaking the mount turns the hang into a failed test.
    """

    def bark() -> None:
        for mounted in list(_alive):
            mounted.break_off()

    timer = threading.Timer(limit_s, bark)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
    """Poll until ``condition`` holds; the test fails with ``what`` if it does not in ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s} s: {what}")
        time.sleep(POLL_S)


def files_below(root: Path) -> dict[str, bytes]:
    """Every regular file by its path; what tierfs keeps in the store for itself is left out."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and not path.is_symlink() and path.relative_to(root).parts[0] != ".tierfs"
    }


def remove_tree(path: Path) -> None:
    """Remove a directory that may hold mounts: they are detached first, nothing below them is touched."""
    for where in reversed(run.mounts_below(path)):
        subprocess.run(["umount", "-l", where], check=False, capture_output=True)
    try:
        shutil.rmtree(path)
    except OSError as error:
        if error.errno != errno.ENOENT:
            sys.stderr.write(f"left behind: {path}: {error}\n")
