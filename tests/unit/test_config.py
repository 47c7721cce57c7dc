"""Settings: syntax of values, precedence, defaults, errors that name the setting."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tierfs.config import Settings, load, tiers, values
from tierfs.config.fstab import parse, split
from tierfs.config.load import unknown_environment
from tierfs.errors import ConfigError

GIB = 1024**3


def loaded(command_line: dict[str, Any] | None = None, **more: Any) -> Settings:
    basis: dict[str, object] = {"source": "s3://bucket/data", "mountpoint": "/mnt/data", "tier": ["/nvme:1G"]}
    more.setdefault("environ", {})
    return load(basis | (command_line or {}), **more)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("0", 0),
        ("512", 512),
        ("1K", 1024),
        ("512M", 512 * 1024**2),
        ("4G", 4 * GIB),
        ("4g", 4 * GIB),
        ("4GiB", 4 * GIB),
        ("4GB", 4 * GIB),
        ("1.5T", 1536 * GIB),
        ("10T", 10 * 1024 * GIB),
        (" 7 M ", 7 * 1024**2),
        (4096, 4096),
    ],
)
def test_sizes_are_powers_of_1024(given: object, expected: int) -> None:
    assert values.size_bytes(given) == expected


@pytest.mark.parametrize("given", ["", "G", "4X", "-1", "4G4", "1e9", True, 1.5, None, -4])
def test_what_is_no_size_is_refused(given: object) -> None:
    with pytest.raises(ValueError):
        values.size_bytes(given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("60", 60.0),
        (60, 60.0),
        (0.5, 0.5),
        ("500ms", 0.5),
        ("5m", 300.0),
        ("1h", 3600.0),
        ("2d", 172800.0),
        ("0", 0.0),
    ],
)
def test_durations(given: object, expected: float) -> None:
    assert values.duration_s(given) == expected


def test_infinite_duration_stays_a_date_when_added_to_now() -> None:
    assert values.duration_s("inf") * 1e9 < 2**62


@pytest.mark.parametrize("given", ["", "-1", "soon", "1w", float("nan"), -1, True])
def test_what_is_no_duration_is_refused(given: object) -> None:
    with pytest.raises(ValueError):
        values.duration_s(given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("file:///data/x", "/data/x"),
        ("file:///data/x/", "/data/x"),
        ("file:///data/100%25%ff", "/data/100%\udcff"),
        ("/data/./x", "/data/x"),
        ("/data/100%25", "/data/100%25"),
    ],
)
def test_sources_have_one_canonical_form(given: str, expected: str) -> None:
    assert values.source(given) == expected
    assert values.source(expected) == expected


@pytest.mark.parametrize("given", ["", "s3://", "s3:///x", "s3://b/../c", "s3://b/a//c", "gs://bucket", "file://host/x",
                                   "s3://key:secret@bucket/x"])  # fmt: skip
def test_what_is_no_source_is_refused(given: str) -> None:
    with pytest.raises(ValueError):
        values.source(given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("ram:4G", (None, 4 * GIB)),
        ("/nvme:200G", ("/nvme", 200 * GIB)),
        ("/nvme", ("/nvme", None)),
        ("/with:colon/dir", ("/with:colon/dir", None)),
        ("/with:colon/dir:1G", ("/with:colon/dir", GIB)),
    ],
)
def test_tier_syntax(given: str, expected: tuple[str | None, int | None]) -> None:
    tier = values.tier(given)
    assert (tier.path, tier.size_bytes) == expected


@pytest.mark.parametrize("given", ["ram", "ram:lots", "nvme:4G", "/nvme:4X", "/nvme:0", ""])
def test_what_is_no_tier_is_refused(given: str) -> None:
    with pytest.raises(ValueError):
        values.tier(given)


@pytest.mark.parametrize(("given", "expected"), [("9100", "127.0.0.1:9100"), (9100, "127.0.0.1:9100"),
                                                 (":9100", "127.0.0.1:9100"), ("0.0.0.0:1", "0.0.0.0:1"),
                                                 ("[::1]:9100", "[::1]:9100")])  # fmt: skip
def test_metrics_address_is_loopback_unless_said(given: object, expected: str) -> None:
    assert values.listen_address(given) == expected


def test_command_line_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "mount.toml"
    file.write_text('ttl = 10\nnegative-ttl = 20\nregion = "file"\nfsync = "remote"\n')
    environ = {"TIERFS_TTL": "30", "TIERFS_REGION": "environment"}
    settings = loaded({"ttl": 40}, config_file=file, environ=environ)
    assert (settings.ttl_s, settings.region, settings.negative_ttl_s, settings.fsync) == (
        40.0,
        "environment",
        20.0,
        "remote",
    )
    assert settings.store_timeout_s == 60.0


def test_what_a_higher_layer_overrides_is_not_even_parsed() -> None:
    assert loaded({"ttl": 1}, environ={"TIERFS_TTL": "rubbish"}).ttl_s == 1.0


def test_every_setting_can_be_given_in_a_file_and_in_the_environment(tmp_path: Path) -> None:
    texts = {
        "source": "s3://other/p", "mountpoint": "/mnt/other", "state_dir": "/state", "front": "python",
        "read_only": "yes", "open_mode": "none", "ttl": "1m", "negative_ttl": "2s", "write_through": "true", "fsync": "remote",
        "endpoint_url": "http://localhost:9000", "region": "r", "profile": "p", "allow_other": "no",
        "uid": "7", "gid": "8", "umask": "027", "log_level": "debug", "metrics": "9100",
        "memory_budget": "256M", "fetch_concurrency": "3", "upload_concurrency": "4", "upload_delay": "0",
        "part_size": "8M", "dirty_limit": "1G", "read_ahead": "1M", "store_timeout": "5",
    }  # fmt: skip
    file = tmp_path / "all.toml"
    lines = [f'{name} = "{value}"' for name, value in texts.items()] + ['tier = ["/a:1G", "/b:2G"]']
    file.write_text("\n".join(lines))
    from_file = load({}, config_file=file, environ={})
    environ = {f"TIERFS_{name.upper()}": value for name, value in texts.items()} | {
        "TIERFS_TIER": "/a:1G,/b:2G"
    }
    assert load({}, environ=environ) == from_file
    assert load({}, environ={"TIERFS_CONFIG": str(file)}) == from_file
    assert from_file.uid == 7
    assert from_file.umask == 0o27
    assert from_file.file_mode == 0o640
    assert from_file.dir_mode == 0o750
    assert [tier.path for tier in from_file.tiers] == ["/a", "/b"]
    assert not from_file.allow_other


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('ttl = "soon"', ["ttl", "mount.toml", "soon"]),
        ("tll = 5", ["tll", "ttl"]),
        ("umask = 999", ["umask"]),
        ('tier = ["ram"]', ["tier", "ram"]),
        ("ttl = ", ["TOML"]),
        ('front = "rust"', ["front", "auto, native, python"]),
        ('memory_budget = "1M"', ["memory_budget", "32M"]),
        ('open_mode = "none"', ["open_mode", "--read-only"]),
        ('endpoint_url = "localhost:9000"', ["endpoint_url"]),
        ('endpoint_url = "http://me:pw@host"', ["endpoint_url"]),
    ],
)
def test_an_error_names_the_setting_and_where_it_came_from(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    file = tmp_path / "mount.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        loaded({"tier": None}, config_file=file)
    for word in words:
        assert word in str(caught.value)


def test_a_missing_file_and_a_missing_source_are_named() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere\.toml"):
        loaded(config_file="/nowhere.toml")
    with pytest.raises(ConfigError, match="source"):
        load({"mountpoint": "/mnt/x"}, environ={})


def test_a_toml_integer_is_an_umask_as_it_stands_and_a_string_is_octal(tmp_path: Path) -> None:
    assert values.mask("027") == values.mask(0o027) == values.mask("0o27") == 0o27


def test_defaults_of_root_and_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    root = loaded()
    assert root.allow_other
    assert root.state_dir == f"/var/cache/tierfs/{root.mount_id}"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "getegid", lambda: 1001)
    user = loaded(environ={"XDG_CACHE_HOME": "/home/me/cache"})
    assert not user.allow_other
    assert (user.uid, user.gid) == (1000, 1001)
    assert user.state_dir == f"/home/me/cache/tierfs/{user.mount_id}"
    assert (user.file_mode, user.dir_mode) == (0o644, 0o755)


def test_the_mount_id_depends_on_source_and_mountpoint_only() -> None:
    one = loaded()
    assert loaded({"ttl": 5}).mount_id == one.mount_id
    assert loaded({"mountpoint": "/mnt/data/"}).mount_id == one.mount_id
    assert loaded({"mountpoint": "/mnt/other"}).mount_id != one.mount_id
    assert loaded({"source": "s3://bucket/other"}).mount_id != one.mount_id


def test_without_a_tier_there_is_one_in_the_state_directory_sized_from_what_is_free(tmp_path: Path) -> None:
    settings = loaded({"tier": None, "state_dir": str(tmp_path / "state")})
    (tier,) = settings.tiers
    free_bytes = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert tier.name == "nvme"
    assert tier.path == str(tmp_path / "state" / "tier")
    assert not tier.volatile
    assert 0 < tier.capacity_bytes <= free_bytes * 0.9
    assert not (tmp_path / "state").exists()


def test_a_tier_full_of_our_own_data_does_not_shrink_at_the_next_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Disk:
        f_frsize = 1
        f_blocks = 100 * GIB
        f_bavail = 100 * GIB

    monkeypatch.setattr(os, "statvfs", lambda _path: Disk)
    given = {"tier": None, "state_dir": str(tmp_path)}
    before = loaded(given)
    assert before.tiers[0].capacity_bytes == 80 * GIB
    tiers.remember_capacities(before)
    Disk.f_bavail = 20 * GIB
    assert loaded(given).tiers[0].capacity_bytes == 80 * GIB
    Disk.f_blocks = 50 * GIB
    assert loaded(given).tiers[0].capacity_bytes == 49 * GIB
    (tmp_path / "capacity.json").write_text("rubbish")
    assert loaded(given).tiers[0].capacity_bytes == 16 * GIB


def test_a_full_disk_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Disk:
        f_frsize = 1
        f_blocks = 100 * GIB
        f_bavail = 0

    monkeypatch.setattr(os, "statvfs", lambda _path: Disk)
    with pytest.raises(ConfigError, match=r"tier.*--tier DIR:SIZE"):
        loaded({"tier": None, "state_dir": str(tmp_path)})


def test_tiers_are_named_and_ordered_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = loaded({"tier": ["ram:1M", "/a:1G", "/b:2G"]})
    assert [(tier.name, tier.path, tier.volatile) for tier in settings.tiers] == [
        ("ram", None, True),
        ("nvme", "/a", False),
        ("nvme2", "/b", False),
    ]


def test_no_tier_at_all_is_said_with_none() -> None:
    assert loaded({"tier": ["none"]}).tiers == ()
    with pytest.raises(ConfigError, match="none"):
        loaded({"tier": ["none", "/a:1G"]})


def test_more_ram_than_the_tmpfs_holds_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ram.*--shm-size"):
        loaded({"tier": ["ram:900T"]})


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"tier": ["/mnt/data/cache:1G"]}, "tier"),
        ({"state_dir": "/mnt/data/state"}, "state_dir"),
        ({"source": "/mnt/data"}, "source"),
        ({"source": "/mnt"}, "source"),
        ({"source": "/srv/x", "tier": ["/srv/x/tier:1G"]}, "tier"),
        ({"tier": ["/a:1G", "/a:2G"]}, "twice"),
        ({"mountpoint": "/"}, "mountpoint"),
    ],
)
def test_directories_that_lie_inside_each_other_are_refused(given: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        loaded(given)


def test_aws_variables_are_defaults_below_our_own() -> None:
    environ = {"AWS_ENDPOINT_URL": "http://a:1", "AWS_REGION": "eu-west-1"}
    assert loaded(environ=environ).endpoint_url == "http://a:1"
    assert loaded(environ=environ).region == "eu-west-1"
    assert loaded({"endpoint_url": "http://b:2"}, environ=environ).endpoint_url == "http://b:2"


def test_misspelt_variables_are_found() -> None:
    assert unknown_environment({"TIERFS_REGON": "x", "TIERFS_REGION": "y", "TIERFS_RUN_DIR": "z"}) == [
        "TIERFS_REGON"
    ]


def test_fstab_options_mean_the_same_as_the_command_line() -> None:
    options = parse(
        "rw,ttl=60,tier=ram:4G,tier=/nvme:200G,allow_other,uid=7,umask=027,_netdev,x-systemd.automount,nofail"
    )
    assert options.settings == {
        "read_only": False,
        "ttl": "60",
        "tier": ["ram:4G", "/nvme:200G"],
        "allow_other": True,
        "uid": "7",
        "umask": "027",
    }
    assert options.kernel == []
    other = parse("ro,noexec,nosuid,write-through,endpoint-url=http://h:9000,config=/etc/x.toml")
    assert other.settings == {"read_only": True, "write_through": True, "endpoint_url": "http://h:9000"}
    assert other.kernel == ["noexec", "nosuid"]
    assert other.config_file == "/etc/x.toml"


def test_fstab_values_may_hold_commas_in_quotes() -> None:
    assert split('a=1,b="x,y",,c') == ["a=1", "b=x,y", "c"]
    with pytest.raises(ConfigError):
        split('a="1')


@pytest.mark.parametrize("text", ["tll=60", "ttl", "remount,ro", "source=s3://x", "noexec=1"])
def test_fstab_options_that_are_unknown_or_lack_a_value_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse(text)
