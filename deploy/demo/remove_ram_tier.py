"""Give back the memory of a RAM tier whose engine was killed: ``remove_ram_tier.py SOURCE MOUNTPOINT``.

An engine that ends by itself removes it; after a kill it is kept for the next mount of the same SOURCE at the
same MOUNTPOINT, which the demo never makes. Call it only when the engine is gone.
"""

from __future__ import annotations

import argparse
import shutil

from tierfs.cache.opening import tier_root
from tierfs.config import load


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source")
    parser.add_argument("mountpoint")
    arguments = parser.parse_args()
    settings = load({"source": arguments.source, "mountpoint": arguments.mountpoint, "tier": ["ram:1M"]})
    shutil.rmtree(tier_root(settings.tiers[0], settings.mount_id), ignore_errors=True)


if __name__ == "__main__":
    main()
