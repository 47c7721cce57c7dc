"""What ``tierfs_native`` says about what was built, and what was not."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import pytest

import tierfs_native


@pytest.fixture
def directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Two empty directories in place of those of the package, as an editable install has them."""
    found = (tmp_path / "source", tmp_path / "installed")
    for directory in found:
        directory.mkdir()
    monkeypatch.setattr(tierfs_native, "__path__", [str(directory) for directory in found])
    monkeypatch.setattr(sys, "meta_path", [PathFinder])  # without the finder of an editable install
    monkeypatch.delattr(tierfs_native, "_batch", raising=False)
    loaded = sys.modules.pop("tierfs_native._batch", None)
    yield found
    sys.modules.pop("tierfs_native._batch", None)
    if loaded is not None:
        sys.modules["tierfs_native._batch"] = loaded


def make(path: Path, *, mtime_s: int, mode: int = 0o755) -> Path:
    path.write_text("#!/bin/sh\n")
    path.chmod(mode)
    os.utime(path, (mtime_s, mtime_s))
    return path


def test_nothing_was_built(directories: tuple[Path, Path]) -> None:
    assert tierfs_native.front_path() is None
    assert tierfs_native.batch() is None
    for reason in (tierfs_native.why_missing(), tierfs_native.why_missing("batch")):
        assert reason == tierfs_native.NEVER_BUILT


def test_the_reason_that_the_build_noted(directories: tuple[Path, Path]) -> None:
    (directories[1] / "_why_missing.txt").write_text("front: no compiler: none at all\n")
    assert tierfs_native.why_missing() == "no compiler: none at all"
    assert tierfs_native.why_missing("batch") == tierfs_native.NEVER_BUILT


@pytest.mark.parametrize("name", ["failed", "skipped"])
def test_reasons_that_are_installed_without_a_build(name: str, directories: tuple[Path, Path]) -> None:
    package = Path(tierfs_native.__file__).parent
    text = (package / "reasons" / f"{name}.txt").read_text()
    (directories[1] / "_why_missing.txt").write_text(text)
    assert "tierfs was installed" in str(tierfs_native.why_missing())
    assert "tierfs was installed" in str(tierfs_native.why_missing("batch"))


def test_the_newest_front_is_taken(directories: tuple[Path, Path]) -> None:
    by_hand = make(directories[0] / "tierfs-front", mtime_s=1000)
    assert tierfs_native.front_path() == by_hand
    assert tierfs_native.why_missing() is None
    by_pip = make(directories[1] / "tierfs-front", mtime_s=2000)
    assert tierfs_native.front_path() == by_pip
    by_pip.chmod(0o644)
    assert tierfs_native.front_path() == by_hand


def test_batch_reads_that_cannot_be_loaded(directories: tuple[Path, Path]) -> None:
    (directories[0] / "_batch.py").write_text("raise ImportError('liblmdb.so.0: not found')\n")
    assert tierfs_native.batch() is None
    assert tierfs_native.why_missing("batch") == "it cannot be loaded: liblmdb.so.0: not found"


def test_batch_reads_that_are_there(directories: tuple[Path, Path]) -> None:
    (directories[0] / "_batch.py").write_text("")
    assert isinstance(tierfs_native.batch(), ModuleType)
    assert tierfs_native.why_missing("batch") is None
