"""What exists: names, inodes and what the bucket is known to hold, in one LMDB environment.

Owns: ``STATE_DIR/namespace.lmdb`` and nothing else. It knows no tier, no FUSE and no byte of file data.

Modules, from the bottom up, each importing only those above it:

* ``transaction``, ``schema`` (key and record layout), ``records`` (one row at a time)
* ``durability`` (what a power cut leaves), ``environment``, ``change``, ``lazy_sync``, ``group_commit`` (how
  a change is committed) and ``db`` (the one owner of LMDB)
* ``objects`` (keys of names, and where in the bucket an inode is), ``moved``, ``publish`` (what the bucket
  should hold against what it holds)
* ``names``, ``xattr``, ``rename``, ``tree``: POSIX operations; ``tree`` is their one face
* ``pages``, ``metadata``, ``listing``, ``subtree``, ``point``: what the bucket said, applied as a difference
* ``lister`` (LIST and HEAD), ``questions`` (one at a time), ``walk``, ``crawl`` (whole subtrees), ``refresh``
  (when to ask)
* ``check``, ``dump``: tools

Threads and tasks:

* Reads happen on the trio thread inside ``with db.read() as txn:``. Never await inside that block: the
  transaction is one object, reused by whoever reads next, and while it is open LMDB cannot reuse pages.
  Any other thread reads inside ``with db.snapshot() as txn:``.
* Writes are functions ``fn(txn)`` that ``await db.commit(fn)`` runs on the one committer thread. They must
  not block, must touch nothing but the transaction (they run beside the trio thread), and have returned
  when ``commit`` returns. A function that raises leaves no trace in the database.
* Everything up to ``point`` (but for the group of ``db``) is a plain function of a transaction: no
  I/O, no clock (``now_ns`` is passed in), no state of its own.
* ``refresh.Refresher`` lives on the trio thread and calls the store in worker threads.

Between reading a record and committing a change that depends on it another task may commit: the function
given to ``commit`` reads again what it relies on.

Raises: ``errors.NamespaceError`` and its children; ``refresh`` also lets ``errors.StoreError`` through.
``DamagedRecord`` names the table and the key. Text that came from the store (keys, ETags) is not trusted:
what does not decode is hidden and counted, never raised to a reader of its siblings.
"""
