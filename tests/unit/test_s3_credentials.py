"""Naming the source of credentials without showing them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierfs.config import Settings
from tierfs.errors import ConfigError
from tierfs.log import redact
from tierfs.store.s3_credentials import describe_credentials

SECRET = "wJalrXUtnFEMI/K7MDENG"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    return tmp_path


def settings(profile: str | None = None) -> Settings:
    return Settings(source="s3://bucket", mountpoint="/mnt/x", state_dir="/state", profile=profile)


def test_none_at_all(home: Path) -> None:
    assert describe_credentials(settings()) is None


def test_from_the_environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE1234")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    found = describe_credentials(settings())
    assert found == "from the environment (AWS_ACCESS_KEY_ID), key id ...1234"
    assert SECRET not in redact(f"oops {SECRET}")


def test_from_a_profile_and_from_one_that_does_not_exist(home: Path) -> None:
    (home / "credentials").write_text(
        f"[models]\naws_access_key_id = AKIAEXAMPLE9876\naws_secret_access_key = {SECRET}\n"
    )
    assert (
        describe_credentials(settings("models")) == "from ~/.aws/credentials, profile models, key id ...9876"
    )
    with pytest.raises(ConfigError, match="absent"):
        describe_credentials(settings("absent"))
