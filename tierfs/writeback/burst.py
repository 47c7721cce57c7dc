"""Bursts of changes: uploads had better wait until one is over.

Told of every announcement, and of nothing else; a class that owns two numbers and a moment. Times come from
the caller, in seconds of trio's clock. Trio thread only, nothing is awaited, nothing is raised.
"""

BURST_WINDOW_S = 0.25
BURST_PER_S = 600
"""Announcements; making and closing one file are two of them."""
BURST_DELAY_S = 5.0


class Burst:
    """Tells whether changes come so fast that uploads had better wait until that is over.

    An upload costs several times what making a small file costs, of the same processors; and many a file that
    is made in a burst does not live for long.
    """

    def __init__(self) -> None:
        self._since = 0.0
        self._count = 0
        self._until = 0.0

    def delay_s(self, now: float) -> float:
        """A change is announced at ``now``; how much longer than usual its upload had better wait."""
        self._count += 1
        if now - self._since >= BURST_WINDOW_S:
            if self._count > BURST_PER_S * (now - self._since):
                self._until = now + 2 * BURST_WINDOW_S
            self._since, self._count = now, 0
        return BURST_DELAY_S if self.lasts(now) else 0.0

    def lasts(self, now: float) -> bool:
        """Whether one is under way at ``now``, as far as announcements have told."""
        return now < self._until
