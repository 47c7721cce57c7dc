"""Whether training frameworks can keep their checkpoints on a mount: ``sh benchmarks/frameworks/run.sh``.

For each framework and front: a small training saves checkpoints into a mount every few steps and removes all
but the last two; what is in the mount and in the store is looked at; every byte that is local is thrown away;
and another process goes on from the last checkpoint. What it has restored must be what was saved, and all
must go as it goes in a plain directory, to the last bit of weights and optimizer.

``loops/`` runs in an environment that has the frameworks, ``__main__`` in this one.
"""
