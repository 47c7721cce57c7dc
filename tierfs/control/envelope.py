"""What every message of the control channel has around it, and what many have in them."""

from __future__ import annotations

import struct

import msgspec

PROTOCOL = 1
MAX_REQUEST_BYTES = 8 * 1024 * 1024
MAX_REPLY_BYTES = 32 * 1024 * 1024
HEADER = struct.Struct(">I")
MAX_FAILURES = 100
"""How many failures a reply lists; the counts beside them are complete."""


class Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=False):
    """What a client sends. ``arguments`` is the JSON of the operation's request."""

    protocol: int
    operation: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class Progress(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How far a long operation is. A total of 0 is not known (yet)."""

    phase: str = ""
    done_files: int = 0
    total_files: int = 0
    done_bytes: int = 0
    total_bytes: int = 0
    failed_files: int = 0
    note: str = ""


class Problem(msgspec.Struct, kw_only=True):
    """Why a request was refused or failed. ``error`` is the name of a class in ``tierfs.errors``."""

    error: str
    errno: int
    message: str


NO_REPLY = msgspec.Raw(b"")


class Answer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a server sends: exactly one field is set."""

    progress: Progress | None = None
    reply: msgspec.Raw = NO_REPLY
    problem: Problem | None = None


class Failure(msgspec.Struct, kw_only=True):
    """One path for which something did not work, and what."""

    path: str
    message: str
