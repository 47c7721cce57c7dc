"""The loads. Each module has one ``WORKLOAD``; its ``run`` takes a session, and measures in it.

In the JSON a load is known by its name and by parameters: ``workers`` (processes), ``state`` (``cold``,
``warm``; absent for a store and for writes), ``way`` (``buffered``, ``direct``, ``mmap``, ``io_uring``,
``store``), ``block_bytes``, ``by`` (``fio`` or ``loop``).

==================  ===================================================================================
``sequential-read``  large files from front to back
``random-read``      blocks at random places of large files
``small-files``      shuffled epochs over many small files
``metadata``         many processes list and open one tree
``checkpoint``       every writer saves its shard at once: ``state`` is absent, ``until`` says how far
``restore``          every reader reads its shard at once
``rag``              chains of small random reads: what a vector index does
``mixed``            an epoch while a checkpoint is saved; ``part``: ``alone``, ``reads``, ``saves``, ``all``
==================  ===================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence

from tierfs.bench.session import Workload
from tierfs.bench.workloads import (
    blocks,
    checkpoint,
    metadata,
    mixed,
    rag,
    small_files,
)
from tierfs.errors import ConfigError

ALL: tuple[Workload, ...] = (
    small_files.WORKLOAD,
    metadata.WORKLOAD,
    checkpoint.SAVE,
    checkpoint.RESTORE,
    mixed.WORKLOAD,
    blocks.SEQUENTIAL,
    blocks.RANDOM,
    rag.WORKLOAD,
)
"""In the order in which they run: those first that end when their work is done, so that what they leave of
their time goes to those that use all of it."""


def chosen(names: Sequence[str]) -> list[Workload]:
    """Those of these names, in the order in which they run; all, of no names. Raises ConfigError."""
    known = {workload.name: workload for workload in ALL}
    for name in names:
        if name not in known:
            raise ConfigError(f"--only: {name!r} is not known; there are {', '.join(known)}")
    return [workload for workload in ALL if not names or workload.name in names]
