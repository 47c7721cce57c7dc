"""A second place for bytes that are not in the store yet, so that they survive the loss of this node.

Owns
    The objects below ``PLACE/<file system id>/`` in the replica, which is any store: a directory (another
    node's export, say) or a bucket. One JSON record per file, ``<inode>.json``, and the bytes beside it.

Order that a crash cannot turn into a loss
    The bytes come before the record that names them, and the record goes before them. So a record always
    names bytes that are whole; bytes without a record are garbage, which the next start removes.

Who may call
    ``replicator.Replicator``: the trio thread. ``recover``: any thread; it needs no mount and blocks.

Nothing here delays an application or an upload: a replica that does not answer shows in ``status``.

Raises
    ``StoreError`` and ``FormatError`` from ``recover``; the replicator keeps its failures for ``status``.
"""
