"""Who has how many bytes of one tier's capacity. Pure arithmetic; trio thread only.

::

    capacity (or less, if the file system has less)
      = policy.used   units of clean contents, and room reserved for fetches under way
      + unwalked      clean contents in the index that the policy has not been told of yet
      + freeing       evicted, but not yet given back by the file system
      + dirty         staging files
      + reserved      room promised to writes into staging files
      + overhead      the index and the directories
      + free
"""

from __future__ import annotations

from tierfs.cache.blocks import EXTENT_SIZE_BYTES
from tierfs.cache.policy import EvictionPolicy

_MARGIN_BYTES = 64 * 1024 * 1024
_MARGIN_SHARE = 64
_FEW_UNITS = 128


class Ledger:
    """See the module docstring. All attributes are bytes."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.policy = EvictionPolicy(capacity_bytes)
        self.unwalked_bytes = 0
        self.freeing_bytes = 0
        self.dirty_bytes = 0
        self.reserved_bytes = 0
        self.overhead_bytes = 0
        self._device_limit_bytes = capacity_bytes

    @property
    def limit_bytes(self) -> int:
        """The capacity, or what the file system leaves of it."""
        return min(self.capacity_bytes, self._device_limit_bytes)

    @property
    def clean_bytes(self) -> int:
        return self.policy.used_bytes + self.unwalked_bytes

    @property
    def used_bytes(self) -> int:
        """All that is on the device, or promised to be."""
        return self._wanted_bytes + self.freeing_bytes

    @property
    def data_bytes(self) -> int:
        """File data on the device, or promised to be."""
        return self.used_bytes - self.overhead_bytes

    @property
    def excess_bytes(self) -> int:
        """How much more has to be evicted, what is being evicted already not counted. May be negative."""
        return self._wanted_bytes - self.limit_bytes

    @property
    def batch_bytes(self) -> int:
        """How much to evict at once, so that the next few fetches find room."""
        return min(EXTENT_SIZE_BYTES, self.capacity_bytes // 64)

    @property
    def is_fine_grained(self) -> bool:
        """So few units fit that evicting whole ones would waste a good part of the capacity."""
        return self.capacity_bytes < _FEW_UNITS * EXTENT_SIZE_BYTES

    @property
    def _wanted_bytes(self) -> int:
        return (self.policy.used_bytes + self.unwalked_bytes + self.dirty_bytes + self.reserved_bytes
                + self.overhead_bytes)

    def has_room(self, nbytes: int) -> bool:
        """That many bytes fit without evicting anything."""
        return self.used_bytes + nbytes <= self.limit_bytes

    def can_make_room(self, nbytes: int) -> bool:
        """That many bytes fit after evicting; what is not walked yet counts as evictable."""
        evictable = self.policy.evictable_bytes + self.unwalked_bytes
        return self._wanted_bytes - evictable + nbytes <= self.limit_bytes

    def fit_policy(self) -> None:
        """Tell the policy what is left for it. Before every admission.

        What is not walked yet will be the policy's own before long, so it does not count as somebody else's.
        """
        other = self.dirty_bytes + self.reserved_bytes + self.overhead_bytes
        self.policy.resize(max(0, self.limit_bytes - other))

    def set_device_free(self, available_bytes: int, size_bytes: int) -> None:
        """What the file system says; some of it is left alone, for whoever shares it."""
        margin = min(_MARGIN_BYTES, size_bytes // _MARGIN_SHARE)
        self._device_limit_bytes = max(0, self.used_bytes + available_bytes - margin)
