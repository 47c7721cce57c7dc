"""The native parts, built once a run with sanitizers, outside the work tree.

``TIERFS_BUILD_DIR`` names a directory that is kept, so that a developer's next run builds only what changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import run
from tests.support.mount import MountFactory
from tierfs.cli import native

SOURCE = Path(__file__).parents[2] / "tierfs_native"


def _tool(name: str) -> str | None:
    """cmake and ninja come with the test requirements; a system's own do as well."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(name)


def _missing() -> str | None:
    """What keeps native code from being built here; None if nothing does."""
    if not any(shutil.which(name) for name in (os.environ.get("CC", "cc").split()[0], "gcc", "clang")):
        return "no C compiler (apt-get install gcc libc6-dev)"
    return next((f"no {name} (pip install {name})" for name in ("cmake", "ninja") if not _tool(name)), None)


class NativeBuild:
    """A configured build directory. Targets are built when they are asked for, so one that fails fails alone.

    All processes of a run use the same one, one at a time.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._cmake = _tool("cmake") or "cmake"
        self._built: set[str] = set()
        configured = run.directory() / "native.configured"
        with run.lock("native"):
            if not configured.exists():
                self._configure()
                configured.touch()

    def _configure(self) -> None:
        directory = self.directory
        self._run(
            "-S", str(SOURCE), "-B", str(directory), "-G", "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}", "-DCMAKE_BUILD_TYPE=Debug",
            f"-DPython_EXECUTABLE={sys.executable}", "-DTIERFS_SANITIZE=address;undefined",
            "-DTIERFS_WERROR=ON", "-DTIERFS_TESTS=ON", "-DTIERFS_FUZZ=ON",
        )  # fmt: skip

    def executable(self, target: str) -> Path:
        """Build one target (``test_view``, ``answer-tool``, ``tierfs-front``...) and say where it lies."""
        if target not in self._built:
            with run.lock("native"):
                self._run("--build", str(self.directory), "--target", target)
            self._built.add(target)
        return self.directory / target

    def _run(self, *arguments: str) -> None:
        environment = os.environ | {"TIERFS_NATIVE": "1"}  # what is missing fails here, with its name
        done = subprocess.run(
            [self._cmake, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            check=False,
        )
        if done.returncode != 0:
            pytest.fail(f"cmake {' '.join(arguments)}\n{done.stdout}", pytrace=False)


@pytest.fixture(scope="session")
def native_build() -> NativeBuild:
    """Skips only where nothing could be built, and neither CI nor ``TIERFS_NEED_NATIVE`` insists on it."""
    missing = _missing()
    if missing:
        if os.environ.get("CI") or os.environ.get("TIERFS_NEED_NATIVE"):
            pytest.fail(f"the native parts cannot be tested: {missing}", pytrace=False)
        pytest.skip(f"the native parts cannot be tested: {missing}")
    directory = Path(os.environ.get("TIERFS_BUILD_DIR") or run.directory() / "native")
    directory.mkdir(parents=True, exist_ok=True)
    return NativeBuild(directory)


@pytest.fixture
def native_mounts(base_dir: Path) -> Iterator[MountFactory]:
    """Mounts with the native front, whatever ``--front`` says. Skips only where CI does not insist on it."""
    missing = native.why_not()
    if missing:
        if os.environ.get("CI") or os.environ.get("TIERFS_NEED_NATIVE"):
            pytest.fail(f"the native front cannot be tested: {missing}", pytrace=False)
        pytest.skip(f"the native front cannot be tested: {missing}")
    factory = MountFactory(base_dir, "native")
    yield factory
    factory.close()
