"""Write-back: bytes and names that changed here, on their way into the store.

Owns
    ``content.FileContent``, one per inode that is open or being published: the only place that knows
    whether the bytes of an inode are clean (an ``ObjectRef`` in the cache) or local (a ``Staging``).
    ``content_table.ContentTable`` has those in use. A clean one becomes local in ``local_copy``, is changed
    in ``changes``, or by the kernel itself (``passthrough``); ``size_and_times`` records what came of it.
    ``publisher.Publisher``, which makes the bucket hold what the namespace says it should: when it does
    that is decided in ``schedule``, and ``draining`` is for those who wait until all is done.

Who may call
    The trio thread only. Store calls and file reads go to worker threads from here.

State-based, not a log
    The namespace keeps a row per inode whose object must be (re)published and a row per key that no name
    maps to any more. The publisher compares what is with what should be and acts; doing it twice does
    no harm. A crash at any point leaves rows behind, and the next start goes on from them.

Order that a crash cannot turn into a loss
    1. A dirty mark is durable before the first byte of a clean file changes.
    2. An object is deleted only when no name maps to its key and no inode still needs it as its source.
    3. A key is overwritten only after an inode that was renamed away from it has been copied to its new
       key.
    4. The object row is committed after the store acknowledged; a crash in between makes the upload run
       again, and the store's answer to the condition is resolved by the content id in the metadata.

No await between
    reading a row and deciding from it, unless the row's generation is compared again in the commit.

Raises
    ``StoreError`` from ``publish_now`` (write-through, ``fsync=remote``); in the background nothing: a
    failure is kept with its inode, shown in ``status`` and tried again.
"""
