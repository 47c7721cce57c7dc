"""tierfs: an S3 bucket as a POSIX directory, with RAM and NVMe tiers in front of it.

For applications: ``tierfs.read_many`` and ``tierfs.open_many``, see ``tierfs.batch``.
"""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Found by name, and only when asked for: no floor depends on ``batch`` by importing this package."""
    if name in {"open_many", "read_many"}:
        return getattr(importlib.import_module("tierfs.batch"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
