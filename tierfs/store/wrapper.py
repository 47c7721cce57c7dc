"""What every store around another store passes on: where it is, what it can do, what it has counted.

Internal: ``retry`` and ``faulty`` build on it, and so may a store of a test.
"""

from __future__ import annotations

from tierfs.store.base import ObjectStore, RequestCounts, StoreCapabilities


class StoreWrapper:
    """Wraps ``inner``, which may be exchanged at any time. Requests are the subclass's own business."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def capabilities(self) -> StoreCapabilities:
        return self.inner.capabilities

    @property
    def counts(self) -> RequestCounts:
        """Requests of the store below, every attempt counted."""
        counts = getattr(self.inner, "counts", None)
        return counts if isinstance(counts, RequestCounts) else RequestCounts()

    def close(self) -> None:
        self.inner.close()
