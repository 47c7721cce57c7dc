"""Checkpoints: a directory that becomes visible as a whole, and a manifest that says when it is in the store.

In a training process (``saving``, ``working``, ``ranks``; standard library only)::

    with tierfs.checkpoint.save("/mnt/ckpt/step-100", step=100) as directory:
        torch.save(state, directory / f"rank{rank}.pt")

Every rank calls it; the directory that they write into lies beside the final name, which begins with a dot
while it is written. When all have left, it is renamed: all shards are there, or none. ``save`` returns then,
with the bytes safe on this node. ``wait`` returns when the store has them, and the manifest.

In the engine (everything else; the trio thread)
    ``manifest`` is what lies in the bucket, ``commits.Commits`` waits until the publisher has put all shards
    there and then writes it, ``restore`` and ``catalog`` read it.

How the two meet
    A rank may be any user, and the control channel is for the owner of the mount. So it sets
    ``user.tierfs.checkpoint`` on the directory, which only who may write there can do. The engine keeps the
    request as a file in its state directory before it answers, and finishes it whatever happens to the
    process, to itself, or to the mount.

Raises: ``CheckpointError`` and its child ``ManifestDamaged``, ``StoreError``; ``save`` also ``OSError``.
"""

from __future__ import annotations

from tierfs.checkpoint.saving import Saving, save, state, wait

__all__ = ["Saving", "save", "state", "wait"]
