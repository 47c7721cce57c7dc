"""Bytes that say where they belong: cells of 64 bytes with file, write and place in plain text."""

from __future__ import annotations

CELL_BYTES = 64
ZEROS = 0
"""The number of no write: what is there are zeros."""


def cells(file: str, write: int, start: int, stop: int) -> bytes:
    """What write number ``write`` puts at the bytes ``start`` to ``stop`` of that file."""
    if write == ZEROS:
        return bytes(stop - start)
    first, last = start // CELL_BYTES, -(-stop // CELL_BYTES)
    text = "".join(f"{file} {write} {cell}|".ljust(CELL_BYTES, ".") for cell in range(first, last))
    return text.encode("ascii")[start - first * CELL_BYTES : stop - first * CELL_BYTES]


def file_in(data: bytes) -> str | None:
    """Which file's bytes these are: the first cell that names one; None if all are zeros, or none at all."""
    for start in range(0, len(data), CELL_BYTES):
        cell = data[start : start + CELL_BYTES]
        if cell.strip(b"\0"):
            return cell.lstrip(b"\0").split(b" ", 1)[0].decode("ascii", "replace")
    return None
