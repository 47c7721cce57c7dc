"""Prefetch: makes bytes local before they are asked for, and never gets in the way of those that are.

Owns: what it believes about the readers of each open file, and a bounded number of fetches under way. It
owns no bytes: they go through ``cache`` into the tiers (or the transit buffer), under the cache's rules
for memory and admission, behind every demand read.

Parts: ``pattern`` (one inode: which streams read it, how far to read ahead; pure), ``succession`` (one
directory: which file comes next; pure), ``neighbours`` (asks the namespace who follows whom), ``runner``
(bounded tasks), ``readahead`` (puts these together for the file system), ``job`` (``tierfs prefetch``:
explicit, with an account of every byte).

Who may call: the trio thread only. ``ReadAheadTable.observe`` and ``PrefetchRunner.hint`` never await and
never raise; what cannot be started at once is dropped, not queued: a hint that comes late is worth nothing.

Errors: speculative fetches swallow a ``TierfsError`` (counted, logged at debug level): the reader that needs
those bytes gets it. A ``PrefetchJob`` counts it and carries on with the next file.
"""
