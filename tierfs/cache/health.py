"""Whether a tier takes new data: one state, one log line per change. Trio thread only."""

from __future__ import annotations

import errno
from collections.abc import Callable

from tierfs.log import get_logger

_log = get_logger(__name__)

OK = "ok"
FULL = "full"
FAILING = "failing"
RETRY_FULL_NS = 5 * 10**9
RETRY_FAILING_NS = 30 * 10**9
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_no_space(error: OSError) -> bool:
    return error.errno in _NO_SPACE


class TierHealth:
    """After trouble the tier is bypassed for a while, then tried again with the next piece of data."""

    def __init__(self, tier: str, path: str, now_ns: Callable[[], int]) -> None:
        self._tier = tier
        self._path = path
        self._now_ns = now_ns
        self._retry_at_ns = 0
        self.state = OK
        self.reason = ""

    @property
    def usable(self) -> bool:
        """New data may go into the tier."""
        return self.state == OK or self._now_ns() >= self._retry_at_ns

    @property
    def readable(self) -> bool:
        """What is in the tier may be read from it."""
        return self.state != FAILING or self._now_ns() >= self._retry_at_ns

    def failed(self, error: OSError | str) -> None:
        """An operation on the tier's file system went wrong, after what could be done about it was."""
        if isinstance(error, OSError) and is_no_space(error):
            self._set(FULL, error.strerror or str(error), RETRY_FULL_NS)
        else:
            self._set(FAILING, str(error), RETRY_FAILING_NS)

    def full(self, reason: str) -> None:
        """Nothing can be evicted."""
        self._set(FULL, reason, RETRY_FULL_NS)

    def worked(self) -> None:
        """New data went into the tier."""
        if self.state != OK:
            self.state, self.reason = OK, ""
            _log.info("tier is used again", tier=self._tier, path=self._path)

    def _set(self, state: str, reason: str, pause_ns: int) -> None:
        if self.state == FAILING and state == FULL:
            return
        self._retry_at_ns = self._now_ns() + pause_ns
        if self.state != state:
            _log.warning("tier is bypassed", tier=self._tier, path=self._path, state=state, reason=reason)
        self.state, self.reason = state, reason
