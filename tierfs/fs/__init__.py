"""The file system itself: what every FUSE request means, without a word of FUSE.

Layers
    ``ops`` is the only module that knows pyfuse3: it decodes a request, calls one method here, encodes
    the answer and turns exceptions into errno. ``names``, ``attributes``, ``files``, ``read`` and ``write``
    hold the meaning; they take and return plain values, so all of it is tested without a mount.
    ``services`` is what they share, ``handles`` the table of open files and directories.

Tasks
    One task per request, all on the trio thread. Many run at once; what one request reads from the
    namespace before an ``await`` may have changed after it, so every mutation decides again inside its
    commit function (see ``namespace.db``), which is where races are settled.

Never
    block the thread; touch the own mount; invalidate the kernel's caches from inside a request
    (``services.kernel`` queues that for a task of its own).

Raises
    children of ``TierfsError`` only, each with its errno; anything else is a bug and becomes EIO in ``ops``.
"""
