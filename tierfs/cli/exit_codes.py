"""What the exit status of a command means. Public: scripts test it; listed in the README."""

from __future__ import annotations

from tierfs import errors
from tierfs.errors import ConfigError, ControlError, TierfsError

OK = 0
FAILED = 1
"""It did not work; the message says why. ``doctor``: something stands in the way of a mount."""
USAGE = 2
"""An argument, an option or a setting is wrong."""
NO_MOUNT = 3
"""There is no such mount, or no engine serves it."""
BUSY = 4
"""Refused, nothing changed: the mount is in use, or the mountpoint is taken."""
PARTLY = 5
"""Done, but not all of it: some files failed, or are still to be uploaded (and kept)."""
NO_ANSWER = 6
"""The engine runs and does not answer."""
INTERRUPTED = 130


class NoMount(ControlError):
    """There is no such mount."""


class Busy(TierfsError):
    """The mount or the mountpoint is in use."""


def code_of(error: TierfsError) -> int:
    """The exit status for an error that ends a command."""
    from tierfs.control.client import EngineGone, EngineSilent

    if isinstance(error, ConfigError):
        return USAGE
    if isinstance(error, EngineSilent):
        return NO_ANSWER
    if isinstance(error, NoMount | EngineGone):
        return NO_MOUNT
    if isinstance(error, Busy | errors.Busy):
        return BUSY
    return FAILED
