"""The test infrastructure itself: what it must notice, it notices."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import pytest

from tests.support.mount import Mounted, MountFactory, mount_entry, wait_until
from tests.support.posix import as_user, errno_of
from tests.support.sequence import RandomOperations, Replica, tree_state


@pytest.fixture
def plain(base_dir: Path) -> Mounted:
    return Mounted(base_dir / "m", front="plain")


def test_traceback_in_the_log_is_noticed_once(plain: Mounted) -> None:
    plain.log_path.write_text("all is well\n")
    plain.check_log()
    with open(plain.log_path, "a") as log:
        log.write("Traceback (most recent call last):\n  File x\nValueError: oops\n")
    with pytest.raises(AssertionError, match="oops"):
        plain.check_log()
    plain.check_log()


def test_traceback_in_the_log_file_of_a_detached_engine_is_noticed(plain: Mounted) -> None:
    plain.state_dir.mkdir()
    (plain.state_dir / "tierfs.log").write_text("unexpected exception request=read\n")
    with pytest.raises(AssertionError, match="request=read"):
        plain.check_log()


def test_announced_traceback_is_allowed(plain: Mounted) -> None:
    plain.expect_log("No space left")
    plain.log_path.write_text("Traceback (most recent call last):\nOSError: No space left on device\n")
    plain.check_log()


def test_closing_fails_for_a_traceback(base_dir: Path) -> None:
    factory = MountFactory(base_dir, "plain")
    mounted = factory()
    mounted.log_path.write_text("Traceback (most recent call last):\n")
    with pytest.raises(AssertionError, match="traceback"):
        factory.close()


def test_engine_that_does_not_start_is_a_failure_with_its_words(base_dir: Path) -> None:
    mounted = Mounted(base_dir / "m", front="python", source="nonsense://x")
    with pytest.raises(AssertionError, match="before it was ready"):
        mounted.start()
    mounted.close()
    assert mount_entry(mounted.path) is None


def test_mount_entry() -> None:
    assert mount_entry(Path("/proc")) is not None
    assert mount_entry(Path("/nonexistent")) is None


def test_wait_until_gives_up() -> None:
    with pytest.raises(AssertionError, match="the moon"):
        wait_until(lambda: False, "the moon", 0.05)


@pytest.mark.skipif(os.geteuid() != 0, reason="acting as another user needs root")
def test_as_user_changes_one_thread_only(base_dir: Path) -> None:
    base_dir.chmod(0o777)
    as_user(12345, 12346, lambda: (base_dir / "f").write_bytes(b""))
    found = os.stat(base_dir / "f")
    assert (found.st_uid, found.st_gid) == (12345, 12346)
    assert os.geteuid() == 0
    os.chmod(base_dir / "f", 0)
    assert as_user(12346, 12346, lambda: errno_of((base_dir / "f").read_bytes)) == 13


def test_one_seed_is_one_sequence() -> None:
    first, again, other = (list(map(str, islice(RandomOperations(seed), 200))) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_tree_state_sees_every_kind_of_difference(base_dir: Path) -> None:
    replicas = []
    for name in ("a", "b"):
        (base_dir / name).mkdir()
        replicas.append(Replica(base_dir / name))
        for operation in islice(RandomOperations(7), 200):
            replicas[-1].perform(operation)
        replicas[-1].close_handles()
        (base_dir / name / "file").write_bytes(b"0123")
        (base_dir / name / "other").write_bytes(b"0123")
    state = tree_state(base_dir / "a")
    assert state == tree_state(base_dir / "b")
    path = base_dir / "b" / "file"
    changes = [
        lambda: path.write_bytes(b"0124"),
        lambda: os.chmod(path, 0o600),
        lambda: os.utime(path, ns=(10**18, 10**18 + 1)),
        lambda: os.setxattr(path, "user.x", b"1"),
        lambda: (path.unlink(), os.link(base_dir / "b" / "other", path)),
        lambda: (path.unlink(), os.symlink("x", path)),
    ]
    for change in changes:
        before = tree_state(base_dir / "b")
        change()
        assert tree_state(base_dir / "b") != before
