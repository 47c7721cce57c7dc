"""Remove what the demo put into a bucket: ``python remove_objects.py s3://bucket/.../tierfs-demo-XXXXXX``.

Goes to the store directly, without a mount, so that it works after any failure. Unfinished uploads are
aborted too. Refuses a prefix whose last part is not the demo's.
"""

from __future__ import annotations

import argparse
import sys

from tierfs.config import load
from tierfs.errors import TierfsError
from tierfs.store.base import ObjectStore
from tierfs.store.open import open_store

NAME = "tierfs-demo-"


def remove(store: ObjectStore, prefix: str) -> int:
    """Delete everything below ``prefix``; returns how many objects that were."""
    removed = 0
    for upload in store.list_unfinished_uploads(prefix):
        store.abort_multipart(upload.key, upload.upload_id)
    while keys := [info.key for info in store.list_page(prefix, recursive=True).objects]:
        failed = store.delete_many(keys)
        if failed:
            raise TierfsError(f"{failed[0].key}: {failed[0].message}")
        removed += len(keys)
    return removed


def main() -> int:
    parser = argparse.ArgumentParser(description="Remove the demo's objects from a bucket.")
    parser.add_argument("source")
    source = parser.parse_args().source
    if not source.startswith("s3://") or not source.rpartition("/")[2].startswith(NAME):
        sys.stderr.write(f"{source}: does not end in {NAME}...; nothing was removed\n")
        return 2
    try:
        # The mountpoint is a required setting, and nothing is mounted here.
        store, prefix = open_store(load({"source": source, "mountpoint": "/mnt"}))
        removed = remove(store, prefix)
        store.close()
    except TierfsError as error:
        sys.stderr.write(f"{source}: objects may be left there: {error}\n")
        return 1
    sys.stdout.write(f"removed {removed} objects from {source}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
