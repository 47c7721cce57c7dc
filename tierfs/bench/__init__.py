"""Measuring a directory, a mount or a bucket with the loads of a training job.

Owns: what is measured and how: the loads, the loops that are timed, statistics, and the JSON of a result.
It measures any place; only for a tierfs mount it asks the engine (control channel) for its CPU time, and to
flush and to evict.

====================  =================================================================================
``run``               from what was asked for to a result; removes everything again
``scale``             how much and how long, all bounded
``session``           one run: its time, its data, what it has found
``workloads``         the loads: which variants of what
``target``            the contract of what is measured: ``directory`` (any mount too), ``bucket``
``mounted``           a tierfs mount, asked through its control channel; ``daemons``: CPU of processes
``processes``         runs loops at the same moment, each in a forked process: ``run_together``
``loops``, ``fio``    what is timed, on files
``files``             data made for a load, the same for a seed: ``FileSet``
``caches``            the page cache; ``space``: is there room
``histogram``         latencies: percentiles, merged over processes
``statistics``        median, spread, ratios of what ran side by side
``result``            what a run found, as JSON with a version: ``BenchResult``, ``Measurement``
``machine``           what it was measured on
``report``            a result as tables and plots
====================  =================================================================================

Called from the main thread of a process that may be forked: no event loop, no store client and no thread of
its own exists in it while a load runs. A load takes a directory, or a target that stands for one.

Raises: ``ConfigError`` for what was asked wrongly, ``BenchFailed`` for what did not work while measuring.
"""

from __future__ import annotations
