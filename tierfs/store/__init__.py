"""Object stores behind one contract, which ``base`` states.

Owns: the connections to the bucket, and the rules of when to try again. Called from worker threads only,
never from the trio thread: every method blocks. Raises ``errors.StoreError`` and its children, and
``errors.ConfigError`` from ``open_store``.

=============  ========================================================================================
``base``       the contract
``keys``       POSIX paths as object keys and back
``open``       SOURCE to store: ``open_store``
``s3``         an S3 bucket; the only adapter for boto3 and obstore
``s3_deletes`` its deletions, in batches and of given versions
``local``      a directory
``retry``      repeats what is transient; what ``open_store`` returns
``faulty``     fails on purpose
``wrapper``    what these two pass on
``counting``   how many requests, how many bytes
=============  ========================================================================================
"""

from __future__ import annotations

from tierfs.store.base import (
    UNCONDITIONAL,
    Condition,
    DeleteFailure,
    ListPage,
    ObjectStore,
    Part,
    RequestCounts,
    StoreCapabilities,
    UnfinishedUpload,
    part_size_for,
)
from tierfs.store.keys import decode_key, encode_path
from tierfs.store.open import open_store

__all__ = [
    "UNCONDITIONAL",
    "Condition",
    "DeleteFailure",
    "ListPage",
    "ObjectStore",
    "Part",
    "RequestCounts",
    "StoreCapabilities",
    "UnfinishedUpload",
    "decode_key",
    "encode_path",
    "open_store",
    "part_size_for",
]
