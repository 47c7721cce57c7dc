"""The syntax of single values: sizes, durations, yes and no, octal masks, tiers, SOURCE.

Every parser takes what TOML, the environment or the command line gave (a string, or a TOML value) and
raises ``ValueError`` with a message that completes "ttl: ..."; ``load`` puts the setting's name in front.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from tierfs.mountpoint import canonical

_UNITS = {"": 0, "B": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGTP]?)(?:I?B)?\s*$", re.IGNORECASE)
_DURATION_UNITS_S = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?\s*$", re.IGNORECASE)
_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"0", "false", "no", "off"})
Parser = Callable[[object], object]

_BUCKET = re.compile(r"^(?:[A-Za-z0-9][A-Za-z0-9._-]{1,254}|arn:[A-Za-z0-9:._-]+)$")

FOREVER_S = 10 * 365 * 86400.0
"""What ``inf`` means for a duration: far beyond any mount's life, and still a date."""


def size_bytes(value: object) -> int:
    """``4G``, ``512M``, ``1.5T``, ``200GiB``, ``1048576``: powers of 1024, as df and mount options mean."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{value!r} is not a size; write for example 512M, 4G or 10T")
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"{value} is negative")
        return value
    match = _SIZE.match(value)
    if match is None:
        raise ValueError(f"{value!r} is not a size; write for example 512M, 4G or 10T")
    number = float(match[1]) if "." in match[1] else int(match[1])
    return int(number * 1024 ** _UNITS[match[2].upper()])


def duration_s(value: object) -> float:
    """``60``, ``60s``, ``500ms``, ``5m``, ``1h``, ``1d``, or ``inf``."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a time; write for example 60, 500ms, 5m or 1h")
    if isinstance(value, str):
        if value.strip().lower() in {"inf", "infinite", "forever"}:
            return FOREVER_S
        match = _DURATION.match(value)
        if match is None:
            raise ValueError(f"{value!r} is not a time; write for example 60, 500ms, 5m or 1h")
        value = float(match[1]) * _DURATION_UNITS_S[(match[2] or "").lower()]
    if math.isnan(value) or value < 0:
        raise ValueError(f"{value} is not a time of zero or more seconds")
    return min(float(value), FOREVER_S)


def switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in _YES:
        return True
    if text in _NO:
        return False
    raise ValueError(f"{value!r} is neither yes nor no")


def text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    if not value:
        raise ValueError("is empty")
    return value


def count(value: object) -> int:
    """A whole number of one or more."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{value!r} is not a whole number")
    try:
        number = int(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a whole number") from None
    if number < 1:
        raise ValueError(f"{number} is less than 1")
    return number


def identity(value: object) -> int:
    """A numeric user or group id."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{value!r} is not a numeric id")
    try:
        number = int(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a numeric id") from None
    if not 0 <= number < 2**32 - 1:
        raise ValueError(f"{number} is not a numeric id")
    return number


def user_id(value: object) -> int:
    """A numeric id or the name of a user."""
    if isinstance(value, str) and not value.strip().isdigit():
        import pwd

        try:
            return pwd.getpwnam(value.strip()).pw_uid
        except KeyError:
            raise ValueError(f"there is no user {value!r}") from None
    return identity(value)


def group_id(value: object) -> int:
    """A numeric id or the name of a group."""
    if isinstance(value, str) and not value.strip().isdigit():
        import grp

        try:
            return grp.getgrnam(value.strip()).gr_gid
        except KeyError:
            raise ValueError(f"there is no group {value!r}") from None
    return identity(value)


def mask(value: object) -> int:
    """An umask. A string is octal (``027``, ``0o27``); a TOML integer is what it is (write ``0o027``)."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{value!r} is not an octal mask")
    if isinstance(value, str):
        try:
            value = int(value.strip().lower().removeprefix("0o"), 8)
        except ValueError:
            raise ValueError(f"{value!r} is not an octal mask; write for example 027") from None
    if not 0 <= value <= 0o777:
        raise ValueError(f"{value:#o} is not a mask between 0 and 0o777")
    return value


def one_of(*choices: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if isinstance(value, str) and value.strip().lower() in choices:
            return value.strip().lower()
        raise ValueError(f"{value!r} is not one of {', '.join(choices)}")

    return parse


def url(value: object) -> str:
    """An http or https URL."""
    given = text(value)
    parts = urlsplit(given)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{given!r} is not an http:// or https:// address")
    if parts.username or parts.password:
        raise ValueError("must not carry a user name or password; use credentials of the AWS kind")
    return given.rstrip("/")


def listen_address(value: object) -> str:
    """``9100``, ``:9100``, ``HOST:9100``, ``[::1]:9100`` as ``HOST:PORT``; the default host is loopback."""
    given = str(value) if isinstance(value, int) and not isinstance(value, bool) else text(value)
    host, _, port = given.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdigit() or not 0 <= int(port) < 65536:
        raise ValueError(f"{given!r} is not an address; write for example 9100 or 0.0.0.0:9100")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


NO_TIER = "none"


@dataclass(frozen=True, slots=True)
class TierText:
    """A tier as it was written. ``path`` None: RAM. ``size_bytes`` None: take what is free; 0: no tier."""

    path: str | None
    size_bytes: int | None


def tier(value: object) -> TierText:
    """``ram:4G``, ``DIR:200G``, ``DIR``, or ``none`` (alone: no tier at all)."""
    given = text(value).strip()
    if given == NO_TIER:
        return TierText(None, 0)
    head, colon, tail = given.rpartition(":")
    size: int | None = None
    if colon and _SIZE.match(tail):
        size = size_bytes(tail)
    else:
        head = given
        if colon and tail and "/" not in tail:
            raise ValueError(f"{given!r}: {tail!r} is not a size; write for example ram:4G or /nvme:200G")
    if size == 0:
        raise ValueError(f"{given!r} has no size; leave the tier out instead")
    if head == "ram":
        if size is None:
            raise ValueError("ram needs a size, for example ram:4G")
        return TierText(None, size)
    if not head.startswith(("/", "./", "../", "~")):
        raise ValueError(f"{given!r}: a tier is ram:SIZE, DIR or DIR:SIZE, and DIR is a path like /nvme")
    return TierText(os.path.abspath(os.path.expanduser(head)), size)


def source(value: object) -> str:
    """SOURCE in its canonical form: ``s3://bucket[/prefix]``, or the absolute path of a directory.

    A ``file://`` URL is percent-decoded; what follows ``s3://`` is taken as it is, like a key.
    """
    given = text(value)
    if given.startswith("s3://"):
        bucket, _, prefix = given[5:].partition("/")
        if "@" in bucket or (":" in bucket and not bucket.startswith("arn:")):
            raise ValueError("credentials and addresses do not belong in it; see --profile, --endpoint-url")
        if not _BUCKET.match(bucket):
            raise ValueError(f"{bucket!r} is not the name of a bucket")
        prefix = prefix.strip("/")
        if any(part in {"", ".", ".."} for part in prefix.split("/")) and prefix:
            raise ValueError(f"the prefix {prefix!r} has an empty, '.' or '..' part")
        return f"s3://{bucket}/{prefix}" if prefix else f"s3://{bucket}"
    if given.startswith("file://"):
        directory = unquote(given[7:].removeprefix("localhost"), errors="surrogateescape")
        if not directory.startswith("/") or "\0" in directory:
            raise ValueError(f"{given!r}: write file:///dir, with three slashes")
        return canonical(directory)
    if re.match(r"^[A-Za-z][A-Za-z0-9+.-]*://", given):
        raise ValueError(f"{given!r}: SOURCE is s3://bucket[/prefix], file:///dir or a directory")
    return canonical(os.path.expanduser(given))
