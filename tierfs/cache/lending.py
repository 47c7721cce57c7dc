"""Lending a tier's file to whoever reads it without passing here: the kernel, for FUSE passthrough.

A file can be lent if it holds all bytes of one content and nothing else, and all of them are verified and
recorded: should this engine die, the next one finds the same file. While it is lent its blocks are not
evicted, so no hole is punched into what somebody reads, and who wants to write later on gets the same file.

Trio thread only.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from tierfs.cache import blocks, device
from tierfs.cache.tier import Tier
from tierfs.types import ContentId, ObjectRef


def open_whole(tier: Tier, ref: ObjectRef, *, recorded: bool = True) -> int | None:
    """A descriptor of the file that holds exactly the bytes of ``ref``; or None.

    ``recorded`` False: also before the index has been committed.
    """
    content_id, presence = ref.content_id, tier.presence
    if not presence.is_complete(content_id) or tier.is_being_removed(content_id):
        return None
    if recorded and tier.index.is_changed(content_id):
        return None
    for number in range(blocks.extent_count(ref.size_bytes)):
        extent = presence.extent(content_id, number)
        if extent is None or extent.segment or extent.unverified or extent.size_bytes != ref.size_bytes:
            return None
    try:
        descriptor = device.open_to_lend(device.object_path(tier.root, content_id))
    except OSError:
        return None
    if os.fstat(descriptor).st_size != ref.size_bytes:
        os.close(descriptor)
        return None
    return descriptor


def hold(tier: Tier, content_id: ContentId) -> Callable[[], None]:
    """Keep what is here of that content from being evicted, until the result is called."""
    policy = tier.presence.ledger.policy
    units = [unit for unit in tier.units_of(content_id) if unit in policy]
    for unit in units:
        policy.pin(unit)

    def let_go() -> None:
        for unit in units:
            # What was forgotten meanwhile has lost its pins with it.
            if policy.is_pinned(unit):
                policy.unpin(unit)

    return let_go
