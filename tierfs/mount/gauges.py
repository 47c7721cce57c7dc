"""Gauges that several parts together answer: the backlog, the namespace, open handles, the process.

Read on the trio thread when Prometheus asks (``exporter``); each costs microseconds, except those of the
backlog, for which one walk over what is waiting for upload is made.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

from tierfs.mount.parts import Parts
from tierfs.namespace import publish, tree
from tierfs.writeback.backlog import Totals
from tierfs.writeback.stages import Stage

RECENT_S = 0.5


class _Recent:
    """What several gauges of one scrape say together, found out once."""

    def __init__(self, find: Callable[[], Totals]) -> None:
        self._find = find
        self._found: Totals | None = None
        self._until = 0.0

    def value(self) -> Totals:
        now = time.monotonic()
        if self._found is None or now >= self._until:
            self._found = self._find()
            self._until = time.monotonic() + RECENT_S
        return self._found


def register(parts: Parts) -> None:
    """Add the gauges to ``parts.metrics``."""
    gauge = parts.metrics.gauge
    handles = parts.services.handles
    counts = parts.refresher.counts

    def inodes() -> float:
        with parts.db.read() as txn:
            return tree.inode_count(txn)

    def deletes() -> float:
        with parts.db.read() as txn:
            return publish.doomed_count(txn)

    backlog = _Recent(parts.publisher.backlog.totals)

    def oldest_s() -> float:
        oldest_ns = backlog.value().oldest_ns
        return max((time.time_ns() - oldest_ns) / 1e9, 0.0) if oldest_ns else 0.0

    gauge("tierfs_backlog_files", "Files that are not in the store yet.", lambda: backlog.value().files)
    gauge("tierfs_backlog_bytes", "Bytes that are not in the store yet.", lambda: backlog.value().bytes)
    gauge("tierfs_backlog_oldest_seconds", "For how long the oldest of them has been waiting.", oldest_s)
    gauge(
        "tierfs_backlog_deletes", "Objects that no name maps to any more and that are still to go.", deletes
    )
    gauge("tierfs_backlog_failed_files", "Files whose upload failed.", lambda: len(parts.publisher.failures))
    stages = parts.stages
    for name, stage in (("memory", stages.memory), ("disk", stages.disk), ("uploading", stages.uploading)):
        gauge(
            "tierfs_stage_files",
            "Files that were written and have come so far.",
            partial(_files, stage),
            stage=name,
        )
        gauge(
            "tierfs_stage_bytes",
            "Bytes that were written and have come so far.",
            partial(_size_bytes, stage),
            stage=name,
        )
    replicator = parts.replicator
    gauge(
        "tierfs_replica_held_bytes",
        "Bytes in the replica.",
        lambda: replicator.held_bytes if replicator is not None else 0,
    )
    gauge(
        "tierfs_replica_waiting_bytes",
        "Bytes that are neither in the store nor in the replica.",
        lambda: replicator.waiting()[1] if replicator is not None else 0,
    )
    gauge("tierfs_inodes", "Names that the namespace knows.", inodes)
    gauge(
        "tierfs_hidden_keys",
        "Keys that no path can name, or that a directory covers.",
        lambda: counts.hidden_keys + counts.shadowed_keys,
    )
    gauge("tierfs_open_files", "Open file handles.", lambda: handles.files_open)
    gauge("tierfs_open_directories", "Open directory handles.", lambda: handles.directories_open)
    gauge("tierfs_engine_resident_bytes", "Resident memory of the engine.", resident_set_bytes)
    gauge(
        "tierfs_uptime_seconds",
        "Since the engine started.",
        lambda: (time.time_ns() - parts.started_ns) / 1e9,
    )


def _files(stage: Callable[[], Stage]) -> float:
    return stage().files


def _size_bytes(stage: Callable[[], Stage]) -> float:
    return stage().size_bytes


def resident_set_bytes() -> int:
    """Resident memory of this process (proc(5), statm)."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
