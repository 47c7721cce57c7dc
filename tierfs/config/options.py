"""All settings by name: what ``load`` accepts in a TOML file, in the environment and on the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tierfs.config import values

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Option:
    """One setting.

    ``field`` is the field of ``Settings`` that it fills. ``repeats``: a list in TOML, comma-separated in
    the environment. ``is_switch``: may stand without a value in fstab.
    """

    field: str
    parse: Callable[[object], object]
    repeats: bool = False
    is_switch: bool = False


OPTIONS: dict[str, Option] = {
    "source": Option("source", values.source),
    "mountpoint": Option("mountpoint", values.text),
    "tier": Option("tiers", values.tier, repeats=True),
    "state_dir": Option("state_dir", values.text),
    "front": Option("front", values.one_of("auto", "native", "python")),
    "fuse_uring": Option("fuse_uring", values.one_of("auto", "on", "off")),
    "read_only": Option("read_only", values.switch, is_switch=True),
    "open_mode": Option("open_mode", values.one_of("auto", "ask", "none")),
    "ttl": Option("ttl_s", values.duration_s),
    "negative_ttl": Option("negative_ttl_s", values.duration_s),
    "write_through": Option("write_through", values.switch, is_switch=True),
    "fsync": Option("fsync", values.one_of("local", "remote")),
    "endpoint_url": Option("endpoint_url", values.url),
    "region": Option("region", values.text),
    "profile": Option("profile", values.text),
    "allow_other": Option("allow_other", values.switch, is_switch=True),
    "uid": Option("uid", values.user_id),
    "gid": Option("gid", values.group_id),
    "umask": Option("umask", values.mask),
    "log_level": Option("log_level", values.one_of(*LOG_LEVELS)),
    "metrics": Option("metrics_address", values.listen_address),
    "memory_budget": Option("memory_budget_bytes", values.size_bytes),
    "fetch_concurrency": Option("fetch_concurrency", values.count),
    "upload_concurrency": Option("upload_concurrency", values.count),
    "upload_delay": Option("upload_delay_s", values.duration_s),
    "part_size": Option("part_size_bytes", values.size_bytes),
    "dirty_limit": Option("dirty_limit_bytes", values.size_bytes),
    "read_ahead": Option("read_ahead_bytes", values.size_bytes),
    "replica": Option("replica", values.source),
    "replica_endpoint_url": Option("replica_endpoint_url", values.url),
    "store_timeout": Option("store_timeout_s", values.duration_s),
}

MIN_MEMORY_BUDGET_BYTES = 32 * 1024 * 1024


def name_of(given: str) -> str:
    """The setting's name with underscores, as ``OPTIONS`` has it."""
    return given.strip().replace("-", "_")


def suggestion(unknown: str, names: list[str]) -> str:
    """`` (did you mean ttl?)``, or nothing."""
    import difflib

    close = difflib.get_close_matches(unknown, names, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
