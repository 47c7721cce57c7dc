"""Durations on the command line."""

from __future__ import annotations

from tierfs.errors import ConfigError


def seconds(given: str | None, name: str = "--timeout") -> float | None:
    """``30``, ``5m``... in seconds; None stays None."""
    from tierfs.config.values import duration_s

    if given is None:
        return None
    try:
        return duration_s(given)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
