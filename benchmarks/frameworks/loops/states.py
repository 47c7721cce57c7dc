"""Digests of what training has in memory, and the answer of a script: one line of JSON."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence

import torch


def digest(*parts: object) -> str:
    """Of tensors (type, shape, bytes), numbers and whatever nests them, the same in every process."""
    found = hashlib.sha256()
    for part in parts:
        _add(found, part)
    return found.hexdigest()[:32]


def _add(found: hashlib._Hash, part: object) -> None:
    if isinstance(part, torch.Tensor):
        found.update(f"{part.dtype} {tuple(part.shape)}".encode())
        found.update(part.detach().cpu().contiguous().numpy().tobytes())
    elif isinstance(part, Mapping):
        for key in sorted(part, key=str):
            found.update(f"{key}:".encode())
            _add(found, part[key])
    elif isinstance(part, Sequence) and not isinstance(part, str | bytes):
        for item in part:
            _add(found, item)
    else:
        found.update(repr(part).encode())


class Notes:
    """Digests by step: of what was saved, of what was restored, and of the end."""

    def __init__(self) -> None:
        self.saved: dict[int, str] = {}
        self.restored: dict[int, str] = {}
        self.final = ""

    def print(self) -> None:
        print("RESULT " + json.dumps(vars(self)), flush=True)


def arguments() -> tuple[str, int, bool]:
    """(directory, last step, whether to go on from what is there)"""
    directory, steps, verb = sys.argv[1:]
    return directory, int(steps), verb == "resume"
