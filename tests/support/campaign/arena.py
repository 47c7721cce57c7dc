"""What an episode takes place in: a fake S3 server, disks for state and tier, one mount, and the writers.

``kind`` says where state and tier lie: ``plain`` (an ordinary directory), ``small`` (a tmpfs of little more than
the tier's size), ``lossy`` (``lossy_disk``: a power cut takes what was not synced).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

from tests.support.campaign.history import History
from tests.support.fake_s3 import FakeS3, fake_s3
from tests.support.front import engine_pid, is_gone
from tests.support.lossy_disk import LossyDisk
from tests.support.mount import Mounted, files_below, wait_until
from tierfs.boot import ENVIRONMENT as BOOT_ID

SMALL_DISK_MIB = 40
TIER = "16M"
LARGE_TIER = "512M"
MINUTE_S = 60.0
_REPOSITORY = Path(__file__).resolve().parents[3]


class Failed(AssertionError):
    """A promise was broken; the message says how."""


class Writer:
    """One running writer, its directory in the mount, and its log."""

    def __init__(self, directory: Path, log: Path, seed: int, profile: str) -> None:
        self.directory = directory
        self.log = log
        self.is_killed = False
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.support.campaign.writer",
                str(directory),
                str(log),
                str(seed),
                profile,
            ],
            cwd=_REPOSITORY,
            stdin=subprocess.DEVNULL,
        )

    def history(self) -> History:
        return History(self.log)

    def lines(self) -> int:
        """How much it has logged: two lines for each call."""
        return self.log.read_bytes().count(b"\n") if self.log.exists() else 0

    def stop(self) -> None:
        """After the call that it is in. Raises ``Failed`` if it failed by itself, or that call hangs."""
        if self.is_killed:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(2 * MINUTE_S)
        except subprocess.TimeoutExpired:
            raise Failed(f"{self.directory.name}: a call did not return in two minutes") from None
        # By the signal, if that came when it was ending by itself.
        if code not in (0, -signal.SIGTERM):
            raise Failed(f"{self.directory.name}: the writer ended with {code}, see its traceback above")

    def kill(self) -> None:
        self.is_killed = True
        self.process.kill()
        self.process.wait(20)


class Arena:
    """See the module docstring. A context manager."""

    def __init__(
        self,
        base: Path,
        *,
        kind: str = "plain",
        front: str = "python",
        options: Sequence[str] = (),
        profile: str = "names",
    ) -> None:
        self.base = base
        self.kind = kind
        self.front = front
        self.profile = profile
        self.options = tuple(options)
        self.token = 1
        self._boots = 0
        self._rounds = 0
        self._stack = ExitStack()
        self.writers: list[Writer] = []
        self.frozen: dict[str, dict[str, bytes]] = {}
        """Directory -> what was found there when it was checked: nothing of it may change any more."""
        self.removed: set[str] = set()
        """Directories that were frozen and have been removed since."""

    def __enter__(self) -> Arena:
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _open(self) -> None:
        self.server: FakeS3 = self._stack.enter_context(fake_s3())
        self.disk = self.base / "disk"
        self.disk.mkdir()
        self.lossy: LossyDisk | None = None
        if self.kind == "lossy":
            self.lossy = LossyDisk(self.disk)
            self._stack.callback(self.lossy.close)
        elif self.kind == "small":
            size = f"size={SMALL_DISK_MIB}m"
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tierfs-test", str(self.disk)], check=True)
            self._stack.callback(subprocess.run, ["umount", "-l", str(self.disk)], check=False)
        self.credentials = self.base / "credentials"
        self.renew_credentials()
        self.mounted = Mounted(
            self.base / "m",
            front=self.front,
            source=self.server.source,
            tiers=(f"{self.disk / 'tier'}:{TIER if self.kind == 'small' else LARGE_TIER}",),
            options=("--part-size", "5M", "--store-timeout", "3", "--ttl", "600", *self.options),
            environment={
                **{
                    k: v
                    for k, v in self.server.environment.items()
                    if not k.endswith(("ACCESS_KEY_ID", "ACCESS_KEY"))
                },
                "AWS_SHARED_CREDENTIALS_FILE": str(self.credentials),
            },
        )
        self.mounted.state_dir = self.disk / "state"
        self._stack.callback(self._stop_mount)
        self._stack.callback(self._kill_writers)
        self.mounted.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._stack.close()
            return
        # The end of a mount that is broken is no news.
        with suppress(AssertionError):
            self._stack.close()

    def _stop_mount(self) -> None:
        self.heal()
        self.mounted.close()

    def _kill_writers(self) -> None:
        for writer in self.writers:
            try:
                writer.kill()
            except subprocess.TimeoutExpired:
                self.mounted.break_off()  # it waits in the kernel for a mount that does not answer
                writer.kill()
        self.writers.clear()

    # -- the store

    def renew_credentials(self) -> None:
        """Write the credentials file anew, with what the server takes now."""
        keys = self.server.environment
        draft = self.credentials.with_suffix(".new")
        draft.write_text(
            f"[default]\naws_access_key_id={keys['AWS_ACCESS_KEY_ID']}\n"
            f"aws_secret_access_key={keys['AWS_SECRET_ACCESS_KEY']}\naws_session_token=token{self.token}\n"
        )
        draft.rename(self.credentials)
        self.server.required_token = f"token{self.token}"

    def heal(self) -> None:
        """The store works again."""
        self.server.clear_faults()
        self.server.clock_ahead_s = 0.0
        self.renew_credentials()
        if not self.is_store_up:
            self.server.start()

    @property
    def is_store_up(self) -> bool:
        return self.server.is_running

    def objects(self) -> dict[str, bytes]:
        """Every object that is no directory marker and not tierfs's own."""
        bucket = self.server.bucket
        with bucket.lock:
            all_keys = bucket.keys()
            keys = [key for key in all_keys if not key.endswith("/") and not key.startswith(".tierfs/")]
            return {key: bucket.body(key) for key in keys}

    # -- processes

    def kill(self, what: str) -> None:
        """SIGKILL to ``engine``, ``front`` or ``both``. With the Python front both are one process."""
        if self.front == "python":
            self.mounted.kill9()
            return
        engine = engine_pid(self.mounted)
        if what in ("engine", "both") and engine is not None:
            os.kill(engine, signal.SIGKILL)
        if what in ("front", "both"):
            self.mounted.kill9()
            if engine is not None:
                wait_until(lambda: is_gone(engine), "the end of the engine")

    @property
    def is_mounted(self) -> bool:
        return self.mounted.process is not None

    def start_again(self) -> None:
        """Mount again if the mount is gone."""
        if not self.is_mounted:
            self.mounted.start()

    def cut_power(self, seed: int) -> None:
        """Everything of the mount dies, and the disk forgets; the machine starts again as another boot."""
        assert self.lossy is not None, "only the lossy disk forgets"
        if self.is_mounted:
            self.kill("both")
        subprocess.run(["umount", "-l", str(self.mounted.path)], check=False, capture_output=True)
        self.lossy.cut(seed)
        self._boots += 1
        self.mounted.environment[BOOT_ID] = f"boot-{self._boots}"

    # -- writers

    def start_writers(self, count: int, seed: int) -> None:
        self._rounds += 1
        for i in range(count):
            name = f"r{self._rounds}w{i}"
            (self.mounted.path / name).mkdir()
            directory, log = self.mounted.path / name, self.base / f"{name}.log"
            self.writers.append(Writer(directory, log, seed * 100 + i, self.profile))
        # So that their directories are there whatever happens: the first calls are not about that.
        handle = os.open(self.mounted.path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def let_write(self, calls: int) -> None:
        """Wait until every writer that still runs has logged so many calls more."""
        goals = [(writer, writer.lines() + 2 * calls) for writer in self.writers]
        wait_until(
            lambda: all(w.lines() >= goal or w.process.poll() is not None for w, goal in goals),
            "writers going on",
        )

    def stop_writers(self) -> None:
        for writer in self.writers:
            writer.stop()

    # -- checks

    def remove_old(self, kept: int) -> None:
        """Remove all frozen directories but the last few."""
        for name in list(self.frozen)[:-kept]:
            shutil.rmtree(self.mounted.path / name)
            del self.frozen[name]
            self.removed.add(name)

    def check_objects(self) -> None:
        """Every object in the store is all of what some file was at one moment."""
        objects = self.objects()
        # Later than the objects: each call is logged before it is made.
        histories = {writer.directory.name: writer.history() for writer in self.writers}
        for key, data in objects.items():
            directory = key.split("/")[0]
            if directory in histories and not histories[directory].whole_at_some_time(data):
                raise Failed(f"object {key}: its {len(data)} bytes are not what any file was at one moment")

    def check_here(self, *, power_cut: bool = False) -> None:
        """What the mount shows now is what the writers were told. Their directories are frozen then."""
        problems = []
        for writer in self.writers:
            found = files_below(writer.directory)
            wrong = writer.history().problems(found, power_cut=power_cut)
            problems += [f"{writer.directory.name}/{text}" for text in wrong]
            self.frozen[writer.directory.name] = found
        for name, expected in self.frozen.items():
            found = files_below(self.mounted.path / name)
            if found != expected:
                different = sorted(
                    n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n)
                )
                problems.append(f"{name}: changed since it was checked: {different}")
        if problems:
            raise Failed("in the mount:\n" + "\n".join(problems))
        self.writers.clear()

    def check_store(self, *, patiently: bool = False) -> None:
        """Within a minute the store holds what the mount shows, nothing else, and no upload is left open.

        ``patiently``: nobody asks for it before.
        """
        if not patiently:
            self._flush()
        try:
            # A flush does not wait for the deletion of what the kernel may still know: it has not told yet.
            wait_until(lambda: not self._differences(), "everything in the store", MINUTE_S)
        except AssertionError:
            raise Failed(f"a minute after the store was back: {self._differences()}") from None
        self._flush()
        if wrong := self._differences():
            raise Failed("in the store:\n" + "\n".join(wrong))
        if self.server.bucket.uploads:
            # What could not be aborted when it failed is aborted at the next start.
            self.mounted.remount()
        left = [upload.key for upload in self.server.bucket.uploads.values()]
        if self.kind == "lossy":
            # Their notes are not synced: what a power cut leaves is for the bucket's life cycle rule.
            self.server.bucket.uploads.clear()
        elif left:
            raise Failed(f"uploads left open after the next start: {left}")

    def _flush(self) -> None:
        """For a minute: one gives up when all that is left has failed, perhaps with a request from before."""
        until_s = time.monotonic() + MINUTE_S
        command = ("flush", "--timeout", f"{MINUTE_S:g}", str(self.mounted.path))
        while (answer := self.mounted.cli(*command, check=False)).returncode:
            if time.monotonic() > until_s:
                raise Failed(
                    f"not in the store a minute after it was back: {answer.stdout}{answer.stderr}"
                )
            time.sleep(0.5)

    def _differences(self) -> list[str]:
        """Between the frozen directories and their objects, and what is left of removed ones."""
        expected = {
            f"{name}/{file}": data for name, files in self.frozen.items() for file, data in files.items()
        }
        found = {key: data for key, data in self.objects().items() if key.split("/")[0] in self.frozen}
        wrong = [
            f"{key}: {_told(found.get(key))} in the store, {_told(expected.get(key))} here"
            for key in sorted(found.keys() | expected.keys())
            if found.get(key) != expected.get(key)
        ]
        removed = [key for key in self.objects() if key.split("/")[0] in self.removed]
        return [*wrong, *(f"{key}: in the store, removed here" for key in removed)]


def _told(data: bytes | None) -> str:
    return "nothing" if data is None else f"{len(data)} bytes"
