"""Applications that must not notice that an engine dies: each a thread that knows what it should find.

``Load(root, originals)`` works below ``root``, in one directory per thread, and reads the files ``originals``,
which nobody changes. Every exception and every wrong byte is kept in ``errors``. ``expected_files()`` says, once
the load has been stopped, which bytes must be where.
"""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

Step = Callable[[], None]


class Load:
    """See the module docstring."""

    def __init__(self, root: Path, originals: Mapping[str, bytes], seed: int = 1) -> None:
        self.root = root
        self.originals = dict(originals)
        self.errors: list[str] = []
        self.steps: dict[str, int] = {}
        self.longest_gap_s = 0.0
        self._files: dict[str, bytes] = {}
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._closers: list[Step] = []
        self._seed = seed
        for kind in (
            self._stat, self._epoch, self._epoch, self._open_handles, self._churn, self._directories, self._links,
            self._exclusive, self._open_writer, self._unlinked, self._find,
        ):  # fmt: skip
            name = f"{kind.__name__.strip('_')}{len(self._threads)}"
            directory = root / name
            directory.mkdir()
            step = kind(directory, random.Random(f"{seed} {name}"))
            self._threads.append(threading.Thread(target=self._run, args=(name, step), name=name, daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            if thread.is_alive():
                self.errors.append(f"{thread.name} hangs")
        for close in self._closers:
            close()

    def expected_files(self) -> dict[str, bytes]:
        """By path below ``root``; the originals are not among them."""
        return dict(self._files)

    def _run(self, name: str, step: Step) -> None:
        self.steps[name] = 0
        while not self._stop.is_set():
            try:
                step()
            except Exception:
                self.errors.append(f"{name}, after {self.steps[name]} steps: {traceback.format_exc()}")
                return
            self.steps[name] += 1

    def _note(self, path: Path, data: bytes | None) -> None:
        name = str(path.relative_to(self.root))
        if data is None:
            self._files.pop(name, None)
        else:
            self._files[name] = data

    # -- each makes a step to be repeated

    def _stat(self, directory: Path, chance: random.Random) -> Step:
        names = sorted(self.originals)

        def step() -> None:
            name = chance.choice(names)
            assert os.stat(self.root.parent / name).st_size == len(self.originals[name])
            found = {entry for entry in os.listdir(self.root.parent) if entry in self.originals}
            assert found == set(names)
            assert not os.path.exists(directory / "absent")
            time.sleep(0.01)

        return step

    def _epoch(self, directory: Path, chance: random.Random) -> Step:
        """A data loader: every file once, in another order each time."""
        left: list[str] = []

        def step() -> None:
            if not left:
                left.extend(sorted(self.originals))
                chance.shuffle(left)
            name = left.pop()
            assert (self.root.parent / name).read_bytes() == self.originals[name], name
            time.sleep(0.002)

        return step

    def _open_handles(self, directory: Path, chance: random.Random) -> Step:
        """Files that are open all the time, and in a tier: nobody waits for an engine to read them."""
        handles = {}
        for name in sorted(self.originals)[:20]:
            (self.root.parent / name).read_bytes()
            handles[name] = os.open(self.root.parent / name, os.O_RDONLY)
            self._closers.append(lambda descriptor=handles[name]: os.close(descriptor))  # type: ignore[misc]
        names = sorted(handles)

        def step() -> None:
            name = chance.choice(names)
            data = self.originals[name]
            offset = chance.randrange(len(data))
            start = time.monotonic()
            assert os.pread(handles[name], 5000, offset) == data[offset : offset + 5000], name
            self.longest_gap_s = max(self.longest_gap_s, time.monotonic() - start)
            time.sleep(0.002)

        return step

    def _churn(self, directory: Path, chance: random.Random) -> Step:
        number = 0

        def step() -> None:
            nonlocal number
            number += 1
            path, data = directory / f"new{number}", chance.randbytes(chance.choice([0, 10, 5000, 300_000]))
            with open(path, "xb") as file:
                file.write(data[: len(data) // 2])
                if number % 3 == 0:
                    os.fsync(file.fileno())
                file.write(data[len(data) // 2 :])
            assert path.read_bytes() == data
            target = directory / f"f{chance.randrange(10)}"
            os.rename(path, target)
            self._note(target, data)
            assert not path.exists()
            assert target.read_bytes() == data
            victim = directory / f"f{chance.randrange(10)}"
            if str(victim.relative_to(self.root)) in self._files:
                os.unlink(victim)
                self._note(victim, None)
            assert not victim.exists()

        return step

    def _directories(self, directory: Path, chance: random.Random) -> Step:
        def step() -> None:
            os.mkdir(directory / "d")
            os.mkdir(directory / "d" / "e")
            os.rename(directory / "d" / "e", directory / "e")
            assert sorted(os.listdir(directory)) == ["d", "e"]
            os.rmdir(directory / "d")
            os.rmdir(directory / "e")
            assert os.listdir(directory) == []

        return step

    def _links(self, directory: Path, chance: random.Random) -> Step:
        (directory / "target").write_bytes(b"linked")
        self._note(directory / "target", b"linked")

        def step() -> None:
            os.link(directory / "target", directory / "hard")
            os.symlink("target", directory / "soft")
            assert os.readlink(directory / "soft") == "target"
            assert os.stat(directory / "soft").st_nlink == 2
            os.mknod(directory / "pipe", 0o010644)
            os.setxattr(directory / "target", "user.a", b"1")
            os.removexattr(directory / "target", "user.a")
            assert os.listxattr(directory / "target") == []
            for name in ("hard", "soft", "pipe"):
                os.unlink(directory / name)
            assert os.listdir(directory) == ["target"]

        return step

    def _exclusive(self, directory: Path, chance: random.Random) -> Step:
        """Locks made of files: nobody else makes them, so that none can exist already."""
        number = 0

        def step() -> None:
            nonlocal number
            number += 1
            os.close(os.open(directory / "lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            os.unlink(directory / "lock")
            os.close(os.open(directory / f"once{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            self._note(directory / f"once{number}", b"")
            time.sleep(0.05)

        return step

    def _open_writer(self, directory: Path, chance: random.Random) -> Step:
        descriptor = os.open(directory / "log", os.O_RDWR | os.O_CREAT)
        model = bytearray()

        def close() -> None:
            os.close(descriptor)
            self._note(directory / "log", bytes(model))

        self._closers.append(close)

        def step() -> None:
            offset, data = chance.randrange(min(len(model), 2_000_000) + 1), chance.randbytes(chance.choice([7, 9000]))
            assert os.pwrite(descriptor, data, offset) == len(data)
            model[offset : offset + len(data)] = data
            if chance.random() < 0.02:
                os.fsync(descriptor)
            assert os.fstat(descriptor).st_size == len(model)
            offset = chance.randrange(len(model))
            assert os.pread(descriptor, 4000, offset) == model[offset : offset + 4000]

        return step

    def _unlinked(self, directory: Path, chance: random.Random) -> Step:
        descriptor = os.open(directory / "gone", os.O_RDWR | os.O_CREAT)
        os.unlink(directory / "gone")
        self._closers.append(lambda: os.close(descriptor))
        model = bytearray()

        def step() -> None:
            if len(model) > 200_000:
                os.ftruncate(descriptor, 0)
                model.clear()
            data = chance.randbytes(3000)
            os.pwrite(descriptor, data, len(model))
            model.extend(data)
            assert os.pread(descriptor, len(model), 0) == model
            assert os.fstat(descriptor).st_nlink == 0
            time.sleep(0.01)

        return step

    def _find(self, directory: Path, chance: random.Random) -> Step:
        (directory / "a" / "b").mkdir(parents=True)
        for i in range(30):
            (directory / "a" / "b" / f"{i}").write_bytes(b"")
            self._note(directory / "a" / "b" / f"{i}", b"")

        def step() -> None:
            done = subprocess.run(
                ["find", directory, "-type", "f", "-size", "0"], capture_output=True, text=True, check=False
            )
            assert (done.returncode, done.stderr) == (0, "")
            assert len(done.stdout.splitlines()) == 30
            time.sleep(0.05)

        return step
