"""Counts of requests and body bytes, for tests, for ``status`` and for the exporter.

Called from any worker thread; a lock makes the numbers exact, because tests compare them.
"""

from __future__ import annotations

import threading

from tierfs.metrics import Counter, Metrics
from tierfs.store.base import RequestCounts

REQUESTS = "tierfs_store_requests_total"
READ_BYTES = "tierfs_store_read_bytes_total"
WRITTEN_BYTES = "tierfs_store_written_bytes_total"
RETRIES = "tierfs_store_retries_total"
FAILURES = "tierfs_store_failures_total"


class RequestMeter:
    """``counts`` since the store was opened; the same numbers in ``metrics`` if there are any."""

    def __init__(self, metrics: Metrics | None = None) -> None:
        self.counts = RequestCounts()
        self._metrics = metrics
        self._lock = threading.Lock()
        self._requests: dict[str, Counter] = {}
        self._read: Counter | None = None
        self._written: Counter | None = None
        if metrics is not None:
            self._read = metrics.counter(READ_BYTES, "Body bytes read from the object store")
            self._written = metrics.counter(WRITTEN_BYTES, "Body bytes sent to the object store")

    def note(self, operation: str, *, read_bytes: int = 0, written_bytes: int = 0) -> None:
        """One request of that kind was sent (or, for the local store, carried out)."""
        with self._lock:
            by_operation = self.counts.by_operation
            by_operation[operation] = by_operation.get(operation, 0) + 1
            self.counts.bytes_written += written_bytes
            self.counts.bytes_read += read_bytes
            if self._metrics is None or self._read is None or self._written is None:
                return
            counter = self._requests.get(operation)
            if counter is None:
                counter = self._requests[operation] = self._metrics.counter(
                    REQUESTS, "Requests sent to the object store", operation=operation
                )
            counter.add()
            self._read.add(read_bytes)
            self._written.add(written_bytes)

    def note_read(self, read_bytes: int) -> None:
        """Body bytes of a request that ``note`` already counted."""
        with self._lock:
            self.counts.bytes_read += read_bytes
            if self._read is not None:
                self._read.add(read_bytes)
