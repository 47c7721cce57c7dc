"""Cache: which bytes are local, and how the others get here.

Owns
    The tier directories (content files, index, dirty files), the memory that file data takes in the engine,
    and every request that reads object data. It knows contents by id and never a name or an inode.
    ``residency.Cache`` is the way in for clean contents, ``staging.Staging`` for those that are written.

Modules, from the bottom
    ``blocks record memory health policy``          pure: arithmetic, presence and checksums, budgets, states
    ``index* device segments``                      adapters: lmdb, and the file system of a tier
    ``ledger eviction presence fill tier upkeep``   one tier: capacity, making room, what is there, filling,
                                                    reading and changing, background work
    ``fetch placement reading``                     single flight to the store; which tier; one read
    ``sidecar overlay dirty staging``               contents that are written: protocol, room
    ``ranges direct_writes sealing area``           built on that: holes and copies, writes that pass by, the
                                                    way to a clean content, recovery
    ``opening residency``                           composition, and the facade

Threads
    Everything is called from the trio thread, where it may do dictionary and bitmap work, look into LMDB
    (microseconds), ``preadv`` what is in the page cache (RWF_NOWAIT), open what is in the dentry cache
    (RESOLVE_CACHED), and ``pwrite`` up to 128 KiB into the page cache while that does not throttle. All that
    may wait for a device or for the store runs in worker threads, with a limiter per tier, one for index
    commits, and one for the store.

Tasks (in the nursery of ``Cache.open``)
    per tier: index commits, a look at the device every two seconds, the walk that teaches the eviction
    policy at start; one per fetch; one per eviction; a few that copy units between tiers.

Locks
    ``Tier._commit_lock`` (one commit at a time), ``Staging._lock`` (one slow change of a file at a time). No
    code holds two of the same kind; a staging lock may be held while a commit is waited for, never the
    other way round.

No await between
    * looking whether a block is local or in flight, and registering the fetch for it (``Cache._locate``);
    * choosing units to evict and marking them absent (``Evictor.evict``);
    * looking at an extent's present word and the ``preadv`` in ``Tier.read_nowait``, or the ``busy`` mark
      in ``Tier.read_blocks``: a block that is marked cannot be punched before the mark is seen;
    * the present and durable words that ``Staging.sync`` copies, and the start of its fdatasync.

Raises
    ``StaleContent`` and ``StoreError`` from reads; ``TierFull``, ``TierFailed`` and ``ObjectTooLarge`` from
    writes; ``FormatError`` at opening. Never an error to a reader because of a tier.
"""
