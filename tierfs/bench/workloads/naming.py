"""How variants are called."""

from __future__ import annotations


def size(size_bytes: int) -> str:
    """``4 KiB``, ``1 MiB``"""
    for unit, name in ((1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB")):
        if size_bytes >= unit and size_bytes % unit == 0:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes} B"


def processes(count: int, what: str = "worker") -> str:
    """``1 worker``, ``4 workers``"""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
