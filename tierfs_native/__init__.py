"""The native parts of tierfs, as Python sees them: the front process, and modules for batches and transfers.

All are built when tierfs is installed, if a C compiler and liblmdb are there, and lie in this package's
directory. This module works without them and then says why they are missing. It imports nothing of tierfs,
and loading it loads no compiled code.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import Literal

__all__ = ["batch", "front_path", "transfer", "why_missing"]

FRONT = "tierfs-front"
REASONS = "_why_missing.txt"
NEVER_BUILT = "nothing has been built here (pip install . does it)"


def front_path() -> Path | None:
    """The executable of the front process; None where it is not built, and ``why_missing()`` says why.

    ``TIERFS_FRONT_PATH`` names another one: a build with sanitizers, for tests.
    """
    told = os.environ.get("TIERFS_FRONT_PATH")
    return Path(told) if told else _newest(FRONT, executable=True)


def batch() -> ModuleType | None:
    """The extension module of batch reads, loaded; None where it is not built or cannot be loaded."""
    try:
        return importlib.import_module("tierfs_native._batch")
    except ImportError:
        return None


def transfer() -> ModuleType | None:
    """The extension module that moves bodies from sockets into files; None as for ``batch``."""
    try:
        return importlib.import_module("tierfs_native._transfer")
    except ImportError:
        return None


def why_missing(part: Literal["front", "batch"] = "front") -> str | None:
    """Why a part is missing, for a person: half a sentence that begins with "it" or with what was not found.

    None if the part is there.
    """
    if part == "front":
        if front_path() is not None:
            return None
    else:
        try:
            importlib.import_module("tierfs_native._batch")
        except ModuleNotFoundError:
            pass
        except ImportError as error:
            return f"it cannot be loaded: {error}"
        else:
            return None
    noted = _newest(REASONS)
    for line in noted.read_text("utf-8").splitlines() if noted else []:
        name, _, reason = line.partition(": ")
        if name == part:
            return reason
    return NEVER_BUILT


def _newest(name: str, *, executable: bool = False) -> Path | None:
    """The newest file of this name in the package's directories.

    An editable install has two of them: the source tree, into which a developer may have built by hand, and
    the place where pip put what it built.
    """
    found = [path for path in (Path(directory) / name for directory in __path__) if path.is_file()]
    if executable:
        found = [path for path in found if os.access(path, os.X_OK)]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)
