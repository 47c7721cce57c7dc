"""The log: one line per event, private, without secrets, never raising."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierfs import log


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    root = logging.getLogger()
    before = (list(root.handlers), root.level, logging.raiseExceptions)
    for handler in before[0]:
        root.removeHandler(handler)
    yield tmp_path / "state" / "tierfs.log"
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    for handler in before[0]:
        root.addHandler(handler)
    root.setLevel(before[1])
    logging.raiseExceptions = before[2]
    logging.captureWarnings(False)
    logging.getLogger("tierfs").setLevel(logging.NOTSET)


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines()


def test_a_logger_made_before_configure_writes_to_the_private_file(file: Path) -> None:
    logger = log.get_logger("tierfs.cache.tier")
    log.configure(level="info", file=file, stderr=False)
    logger.info("tier opened", tier="nvme", used_bytes=5, path="/a b")
    logger.debug("not shown")
    (line,) = lines(file)
    assert line.endswith('info     tier opened  tier=nvme used_bytes=5 path="/a b"  [tierfs.cache.tier]')
    assert os.stat(file).st_mode & 0o777 == 0o600
    assert os.stat(file.parent).st_mode & 0o777 == 0o700


def test_an_exception_comes_with_its_stack_indented(file: Path) -> None:
    log.configure(level="info", file=file, stderr=False)
    try:
        raise ValueError("broken")
    except ValueError:
        log.get_logger("tierfs.fs").exception("request failed", inode=7)
    first, *rest = lines(file)
    assert "error" in first
    assert "inode=7" in first
    assert rest[0] == "    Traceback (most recent call last):"
    assert rest[-1] == "    ValueError: broken"


def test_a_name_from_the_bucket_cannot_forge_a_line(file: Path) -> None:
    log.configure(level="info", file=file, stderr=False)
    log.get_logger("tierfs.x").warning("odd key", key="a\n2030-01-01 error forged\x1b[31m\udcff")
    (line,) = lines(file)
    assert "\\n2030" in line
    assert "\x1b" not in line


def test_secrets_never_appear(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG")
    log.configure(level="info", file=file, stderr=False)
    log.add_secret("token-0123456789")
    logger = log.get_logger("tierfs.store")
    logger.warning("retry", url="https://h/k?X-Amz-Signature=abcdef0123&X-Amz-Date=1", session_token="zzz")
    logger.warning("proxy", url="http://user:hunter2@host/")
    logging.getLogger("botocore").warning("sent wJalrXUtnFEMI/K7MDENG and token-0123456789")
    try:
        raise ValueError("key wJalrXUtnFEMI/K7MDENG")
    except ValueError:
        logger.exception("failed")
    text = file.read_text()
    for secret in ("wJalrXUtnFEMI", "token-0123456789", "abcdef0123", "zzz", "hunter2"):
        assert secret not in text
    assert "X-Amz-Date=1" in text


def test_other_libraries_are_heard_from_warning_up(file: Path) -> None:
    log.configure(level="debug", file=file, stderr=False)
    logging.getLogger("botocore").info("chatter")
    logging.getLogger("botocore").warning("something %s", "odd")
    (line,) = lines(file)
    assert line.endswith("something odd  [botocore]")


def test_a_percent_sign_is_only_a_percent_sign(file: Path) -> None:
    log.configure(level="info", file=file, stderr=False)
    log.get_logger("tierfs.x").info("100% of %s", path="%d")
    assert "100% of %s  path=%d" in lines(file)[0]


def test_a_state_is_logged_once_per_change(file: Path) -> None:
    log.configure(level="info", file=file, stderr=False)
    state = log.StateLog(log.get_logger("tierfs.cache"), "tier nvme")
    assert not state.change("ok")
    for _ in range(1000):
        state.change("bypassed", reason="ENOSPC")
    assert state.change("ok", level="info")
    assert [line.split("  [")[0].split("Z ")[1] for line in lines(file)] == [
        "warning  tier nvme is bypassed  before=ok reason=ENOSPC",
        "info     tier nvme is ok  before=bypassed",
    ]
