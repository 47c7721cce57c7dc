"""Measuring a directory, a mount or a bucket with the loads of a training job.

Owns: what is measured and how: the loads, the loops that are timed, statistics, and the JSON of a result.
It measures any place; only for a tierfs mount it asks the engine (control channel) for its CPU time, and to
flush and to evict.

====================  =================================================================================
``statistics``        median, spread, ratios of what ran side by side
``histogram``         latencies: percentiles, merged over processes
``result``            what a run found, as JSON with a version: ``BenchResult``, ``Measurement``
``machine``           what it was measured on
``processes``         runs loops at the same moment, each in a forked process: ``run_together``
``loops``             the loops that are timed, on files
``files``             data made for a load, the same for a seed: ``FileSet``
``caches``            what cold means, and how it is reached
``scratch``           a directory of one's own, which is removed again
====================  =================================================================================

Called from the main thread of a process that may be forked: no event loop, no store client and no thread of
its own exists in it while a load runs. A load takes a directory, or a target that stands for one.

Raises: ``ConfigError`` for what was asked wrongly, ``BenchFailed`` for what did not work while measuring.
"""

from __future__ import annotations
