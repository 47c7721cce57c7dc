"""Measurements of a mount from outside: what an application sees, next to what the parts could do.

Rules of every benchmark here. Everything that is compared runs in one run, on one machine, in alternating
order, and is reported as a ratio with its spread; what was measured on which machine with which command is
printed with it. The measuring side is never the bottleneck: readers are processes, buffers are large,
and nothing is checked inside a timed loop that costs more than a comparison. A mount is driven through the
``tierfs`` command line and the mountpoint only, so that another file system can stand in its place.

``python -m benchmarks.quick`` is the small one: some minutes, no options needed.
"""
