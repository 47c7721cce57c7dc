"""``mount.tierfs``: what mount(8) runs for a line of /etc/fstab with type ``tierfs`` or ``fuse.tierfs``.

Called as ``mount.tierfs SOURCE MOUNTPOINT [-sfnv] [-o OPTIONS] [-t TYPE]`` (mount(8), "External helpers");
mount.fuse3 calls ``tierfs SOURCE MOUNTPOINT -o OPTIONS``. Exit statuses are those of mount(8).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from tierfs.errors import ConfigError, TierfsError

NAMES = frozenset({"mount.tierfs", "mount.fuse.tierfs"})
USAGE_ERROR = 1
MOUNT_FAILED = 32


def is_meant(argv: Sequence[str]) -> bool:
    """Whether this process was started to be a mount helper."""
    if os.path.basename(argv[0]) in NAMES:
        return True
    # mount.fuse3: two operands that are not the name of a command, then -o.
    return len(argv) >= 4 and argv[3] == "-o" and "/" in argv[1] and argv[2].startswith("/")


def main(arguments: Sequence[str]) -> int:
    """Mount and return mount(8)'s exit status."""
    operands: list[str] = []
    options: list[str] = []
    fake = quiet = False
    rest = list(arguments)
    try:
        while rest:
            word = rest.pop(0)
            if word in {"-o", "-t", "-N"}:
                if not rest:
                    raise ConfigError(f"{word} needs a value")
                value = rest.pop(0)
                if word == "-o":
                    options.append(value)
                elif word == "-N":
                    raise ConfigError("-N: mounting in another namespace is not supported")
            elif word.startswith("-") and len(word) > 1 and set(word[1:]) <= set("sfnvrw"):
                fake = fake or "f" in word
                quiet = quiet or "v" not in word
                options += ["ro"] if "r" in word else []
            elif word.startswith("-"):
                raise ConfigError(f"{word}: unknown option")
            else:
                operands.append(word)
        if len(operands) != 2:
            raise ConfigError("usage: mount.tierfs SOURCE MOUNTPOINT [-o OPTIONS]")
        return _mount(operands[0], operands[1], ",".join(options), fake=fake)
    except ConfigError as error:
        print(f"mount.tierfs: {error}", file=sys.stderr)
        return USAGE_ERROR
    except TierfsError as error:
        print(f"mount.tierfs: {error}", file=sys.stderr)
        return MOUNT_FAILED


def _mount(source: str, target: str, options: str, *, fake: bool) -> int:
    from tierfs.cli.mount import mount
    from tierfs.config import load
    from tierfs.config.fstab import parse

    # In fstab blanks may be written as \040 also here, and older mounts write TYPE#SOURCE.
    source = source.removeprefix("tierfs#").replace("\\040", " ")
    # mount(8) starts helpers with a bare environment; credentials then come from files or instance roles.
    os.environ.setdefault("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    os.environ.setdefault("HOME", os.path.expanduser("~"))
    given: dict[str, object] = {"source": source, "mountpoint": target}
    parsed = parse(options)
    if source == "none" and parsed.config_file:
        del given["source"]  # the file has it
    if fake:
        load(parsed.settings | given, config_file=parsed.config_file)
        return 0
    return 0 if mount(given, options=options or None, quiet=True) == 0 else MOUNT_FAILED
