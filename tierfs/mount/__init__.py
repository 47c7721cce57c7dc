"""The composition root: builds every floor, owns the nursery, and takes it all down again.

``run`` is the whole life of one engine process: state directory locked, store checked, namespace and tiers
opened, what a crash left behind put right, root listed, kernel mount made, requests served, backlog
drained. ``handlers`` answers the control channel; ``recovery`` is what happens between opening and
serving; ``parts`` builds the objects.

One process serves one mount. Everything runs on the trio thread that ``run`` starts; see the packages for
what they do in worker threads.
"""

from tierfs.mount.engine import run

__all__ = ["run"]
