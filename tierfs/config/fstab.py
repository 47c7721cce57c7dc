"""Mount options as fstab and ``mount -o`` spell them: ``ttl=60,tier=ram:4G,allow_other,ro,_netdev``.

A setting has the same name here as in the TOML file. A value that holds a comma is put in double quotes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tierfs.config.options import OPTIONS, name_of, suggestion
from tierfs.errors import ConfigError

_KERNEL = frozenset({"nosuid", "suid", "nodev", "dev", "noexec", "exec", "noatime", "sync", "dirsync"})
_IGNORED = frozenset(
    {"defaults", "auto", "noauto", "nofail", "user", "users", "nouser", "owner", "group", "_netdev"}
    | {"async", "atime", "diratime", "nodiratime", "relatime", "norelatime", "strictatime", "nostrictatime"}
    | {"lazytime", "nolazytime", "silent", "loud", "default_permissions"}
)
_MEANING: dict[str, tuple[str, object]] = {
    "ro": ("read_only", True),
    "rw": ("read_only", False),
    "write_back": ("write_through", False),
    "no_allow_other": ("allow_other", False),
}


@dataclass(slots=True)
class MountOptions:
    """``settings`` by name (``tier`` is a list), flags for the kernel, and ``config=FILE`` if given."""

    settings: dict[str, object] = field(default_factory=dict)
    kernel: list[str] = field(default_factory=list)
    config_file: str | None = None


def split(text: str) -> list[str]:
    """Split at commas outside double quotes; the quotes go."""
    parts, current, quoted = [], "", False
    for char in text:
        if char == '"':
            quoted = not quoted
        elif char == "," and not quoted:
            parts.append(current)
            current = ""
        else:
            current += char
    if quoted:
        raise ConfigError(f"mount options: a double quote in {text!r} is not closed")
    return [part.strip() for part in [*parts, current] if part.strip()]


def parse(text: str) -> MountOptions:
    """Read ``-o`` options. Unknown ``x-*`` are ignored, anything else that is unknown is refused."""
    found = MountOptions()
    tiers: list[str] = []
    for part in split(text):
        given, has_value, value = part.partition("=")
        name = name_of(given)
        if given.lower().startswith("x-") or given in _IGNORED or given == "comment":
            continue
        if given in _KERNEL and not has_value:
            found.kernel.append(given)
        elif name in _MEANING and not has_value:
            setting, meant = _MEANING[name]
            found.settings[setting] = meant
        elif name == "remount":
            raise ConfigError("remount: a tierfs mount cannot be changed; unmount it and mount it again")
        elif name == "config" and has_value:
            found.config_file = value
        elif name in OPTIONS and name not in {"source", "mountpoint"}:
            if not has_value and not OPTIONS[name].is_switch:
                raise ConfigError(f"{given}: needs a value, {given}=...")
            if name == "tier":
                tiers.append(value)
            else:
                found.settings[name] = value if has_value else True
        else:
            known = [*OPTIONS, *_KERNEL, *_MEANING, "config"]
            raise ConfigError(f"{given}: unknown mount option{suggestion(name, known)}")
    if tiers:
        found.settings["tier"] = tiers
    return found
