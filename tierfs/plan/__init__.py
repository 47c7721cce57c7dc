"""Plan: will this node, this network and this store keep the GPUs busy? Simulated, before anything is bought.

Owns ``Scenario`` (what is asked) and ``Answer`` (what comes out); nothing on a disk, no connection, no
clock: time is simulated, and every random choice comes from one seed, so that the same question gets the same
answer.

Modules, from the bottom
    ``scenario rates``             what is given, what is assumed, and what a ``tierfs bench`` report says
    ``queueing trace tiers``       pure: servers with a rate, the order of an epoch, which units a node keeps
    ``fetching node loader``       processes of the simulation: requests to the store, a node, a training loop
    ``epochs saves``               the two questions: reading for some epochs; saving and restoring
    ``setups forecast relief``     NFS, object store and tierfs side by side; from 8 to 1,024 GPUs; what helps
    ``measured answer describe``   how well it did, the whole answer, and the answer in words and plots

The code of the file system takes part as it is: ``cache.ledger`` and ``cache.policy`` decide what is kept,
``prefetch.readahead`` (with its detectors and its runner) what is fetched ahead. ``README.md`` in this
directory says how the model works and where it ends; ``measured.json`` what it predicted and what a real
mount did.

Synchronous, one thread, no I/O but these two files. Raises ``ConfigError`` for a scenario that cannot be.
"""
