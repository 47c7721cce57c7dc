"""store.open: SOURCE in, store and prefix out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.stores import environment
from tierfs.config import Settings
from tierfs.errors import ConfigError, StoreUnavailable
from tierfs.store import open_store
from tierfs.store.faulty import FAULTS_ENVIRONMENT, Faults, FaultyStore, Rule
from tierfs.store.local import LocalStore
from tierfs.store.s3 import S3Store


def settings(source: str, **options: object) -> Settings:
    return Settings(source=source, mountpoint="/m", state_dir="/s", **options)  # type: ignore[arg-type]


def test_a_directory(tmp_path: Path) -> None:
    for source in (str(tmp_path), f"file://{tmp_path}"):
        store, prefix = open_store(settings(source))
        assert prefix == ""
        assert isinstance(store.inner, LocalStore)
        assert store.url == f"file://{tmp_path}"
        store.close()


def test_nothing_in_a_path_is_decoded(tmp_path: Path) -> None:
    directory = tmp_path / "100%25 #1?"
    directory.mkdir()
    store, _ = open_store(settings(f"file://{directory}"))
    store.put("f", b"")
    assert (directory / "f").exists()
    store.close()


@pytest.mark.parametrize(
    ("source", "prefix", "url"),
    [("s3://bucket", "", "s3://bucket"), ("s3://bucket/", "", "s3://bucket"),
     ("s3://bucket/a/b", "a/b/", "s3://bucket/a/b"), ("s3://bucket/a/", "a/", "s3://bucket/a"),
     ("s3://bucket/a b%20?#", "a b%20?#/", "s3://bucket/a b%20?#")],
)
def test_buckets(source: str, prefix: str, url: str) -> None:
    store, found = open_store(settings(source))
    assert isinstance(store.inner, S3Store)
    assert (found, store.url) == (prefix, url)
    store.close()


@pytest.mark.parametrize(
    "source",
    ["", "/no/such/directory", "file://host/x", "file:relative", "s3://", "s3:///x", "s3://b", "s3://bucket/a//b",
     "s3://bucket/../b", "s3://key:secret@bucket/x", "https://user:secret@example.org/b", "gs://bucket"],
)
def test_what_is_no_source(source: str) -> None:
    with pytest.raises(ConfigError, match="SOURCE") as caught:
        open_store(settings(source))
    assert "secret" not in str(caught.value)


def test_a_file_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"")
    with pytest.raises(ConfigError, match="not a directory"):
        open_store(settings(str(tmp_path / "f")))


@pytest.mark.parametrize(
    ("options", "named"),
    [({"endpoint_url": "localhost:9000"}, "endpoint_url"), ({"endpoint_url": "ftp://x"}, "endpoint_url"),
     ({"endpoint_url": "https://user:secret@host"}, "endpoint_url"), ({"profile": "no-such-profile"}, "profile")],
)
def test_bad_s3_settings_are_named(options: dict[str, str], named: str, tmp_path: Path) -> None:
    with environment({"AWS_CONFIG_FILE": str(tmp_path / "none"), "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path)}):
        with pytest.raises(ConfigError, match=named) as caught:
            open_store(settings("s3://bucket", **options))
    assert "secret" not in str(caught.value)


def test_faults_can_be_put_between(tmp_path: Path) -> None:
    faults = Faults(Rule(kind="outage", count=1))
    store, _ = open_store(settings(str(tmp_path)), wrap=lambda inner: FaultyStore(inner, faults))
    store.check()
    assert faults.struck == {"outage": 1}
    store.close()


def test_faults_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "faults.json"
    file.write_text(json.dumps({"rules": [{"kind": "outage"}]}))
    with environment({FAULTS_ENVIRONMENT: str(file)}):
        store, _ = open_store(settings(str(tmp_path), store_timeout_s=0.0))
    with pytest.raises(StoreUnavailable):
        store.head("k")
    store.close()
