"""The settings of a mount in a file of its state directory: for the engine under a front, for ``meta drain``.

Credentials are not among them; they come from the environment.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec

from tierfs.config import Settings
from tierfs.errors import MountError

SETTINGS_FILE = "engine.json"


def write(settings: Settings) -> None:
    """Into ``settings.state_dir``, which is there. Atomic. Raises ``MountError``."""
    path = Path(settings.state_dir) / SETTINGS_FILE
    temporary = path.with_suffix(".new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    # JSON with escapes: names of any bytes are legal in paths.
    text = json.dumps(msgspec.to_builtins(settings))
    try:
        with open(os.open(temporary, flags, 0o600), "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise MountError(f"state_dir: cannot write {path}: {error.strerror}") from error


def read(state_dir: str | os.PathLike[str]) -> Settings:
    """As the last mount with that state directory had them. Raises ``MountError``."""
    path = Path(state_dir) / SETTINGS_FILE
    try:
        return msgspec.convert(json.loads(path.read_text("ascii")), Settings)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise MountError(f"{path}: cannot read it: {error}") from None
