"""Asking the C code of the front what it would answer, and taking its replies apart.

``AnswerTool`` talks to the executable of the same name; see ``tierfs_native/tests/answer_tool.c``.
"""

from __future__ import annotations

import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tierfs.config import Settings

RELAY = -100001
NO_REPLY = -100002
FRONT_HANDLE = 1 << 63

LOOKUP, FORGET, GETATTR, READLINK = 1, 2, 3, 5
GETXATTR, LISTXATTR, OPENDIR, READDIR, RELEASEDIR, FSYNCDIR = 22, 23, 27, 28, 29, 30
BATCH_FORGET, READDIRPLUS = 42, 44

IN_HEADER = struct.Struct("=IIQQIIIHH")
ATTR = struct.Struct("=QQQQQQIIIIIIIIII")
ENTRY = struct.Struct("=QQQQII")
ATTR_OUT = struct.Struct("=QII")
READ_IN = struct.Struct("=QQIIQII")
DIRENT = struct.Struct("=QQII")
OPEN_OUT = struct.Struct("=QIi")


@dataclass(frozen=True, slots=True)
class Attributes:
    """``struct fuse_attr`` and how long it holds; times in nanoseconds."""

    ino: int
    size: int
    blocks: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    blksize: int


@dataclass(frozen=True, slots=True)
class Entry:
    """``struct fuse_entry_out``."""

    nodeid: int
    generation: int
    entry_valid_ns: int
    attr_valid_ns: int
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class Name:
    """One record of READDIR (``entry`` None) or READDIRPLUS (None: no attributes were told)."""

    name: bytes
    cookie: int
    ino: int
    type: int
    entry: Entry | None


def attributes_from(raw: bytes) -> Attributes:
    ino, size, blocks, atime, mtime, ctime, atime_ns, mtime_ns, ctime_ns, *rest = ATTR.unpack(raw)
    mode, nlink, uid, gid, rdev, blksize, flags = rest
    assert flags == 0

    def joined(seconds: int, nanoseconds: int) -> int:
        assert nanoseconds < 10**9
        return (seconds - (1 << 64) if seconds >> 63 else seconds) * 10**9 + nanoseconds

    return Attributes(
        ino, size, blocks, joined(atime, atime_ns), joined(mtime, mtime_ns), joined(ctime, ctime_ns),
        mode, nlink, uid, gid, rdev, blksize,
    )  # fmt: skip


def entry_from(raw: bytes) -> Entry:
    nodeid, generation, entry_s, attr_s, entry_ns, attr_ns = ENTRY.unpack_from(raw)
    attributes = attributes_from(raw[ENTRY.size :])
    return Entry(nodeid, generation, entry_s * 10**9 + entry_ns, attr_s * 10**9 + attr_ns, attributes)


def names_from(raw: bytes, *, plus: bool) -> list[Name]:
    """The records of a READDIR or READDIRPLUS reply."""
    names: list[Name] = []
    at = 0
    while at < len(raw):
        entry = None
        if plus:
            end = at + ENTRY.size + ATTR.size
            if any(raw[at:end]):
                entry = entry_from(raw[at:end])
            at = end
        ino, cookie, length, kind = DIRENT.unpack_from(raw, at)
        at += DIRENT.size
        names.append(Name(raw[at : at + length], cookie, ino, kind, entry))
        padded = -(-length // 8) * 8
        assert at + padded <= len(raw)
        assert not any(raw[at + length : at + padded])
        at += padded
    return names


class AnswerTool:
    """One process that has the namespace open read-only. Calls are synchronous and take microseconds."""

    def __init__(self, executable: Path, database: Path, settings: Settings) -> None:
        self.now_ns = 0
        """What the tool takes for now; 0: the clock on the wall."""
        ttl_ns, negative_ttl_ns = int(settings.ttl_s * 1e9), int(settings.negative_ttl_s * 1e9)
        self._process = subprocess.Popen(
            [
                executable, database, str(ttl_ns), str(negative_ttl_ns), str(settings.uid),
                str(settings.gid), f"{settings.file_mode:o}", f"{settings.dir_mode:o}",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip

    def __enter__(self) -> AnswerTool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        status = self._process.wait(timeout=30)
        self._process.stdout.close()
        if error is None:
            assert status == 0, f"answer-tool: exit status {status}"

    def ask(self, opcode: int, nodeid: int, body: bytes = b"") -> tuple[int, bytes]:
        """(result, body of the reply); result as ``answer.h`` has it."""
        header = IN_HEADER.pack(IN_HEADER.size + len(body), opcode, 2, nodeid, 0, 0, 1, 0, 0)
        message = struct.pack("=q", self.now_ns) + header + body
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(struct.pack("=I", len(message)) + message)
        stdin.flush()
        head = stdout.read(12)
        assert len(head) == 12, "answer-tool has died"
        length, result = struct.unpack("=Iq", head)
        return result, stdout.read(length - 8)

    # -- questions: an int instead of an answer is -errno, RELAY or NO_REPLY -------------------------------

    def lookup(self, parent: int, name: bytes) -> Entry | int:
        result, reply = self.ask(LOOKUP, parent, name + b"\0")
        return entry_from(reply) if result > 0 else result

    def getattr(self, ino: int) -> tuple[int, Attributes] | int:
        """(how long they hold in nanoseconds, attributes)."""
        result, reply = self.ask(GETATTR, ino, bytes(16))
        if result <= 0:
            return result
        seconds, nanoseconds, _ = ATTR_OUT.unpack_from(reply)
        return seconds * 10**9 + nanoseconds, attributes_from(reply[ATTR_OUT.size :])

    def readlink(self, ino: int) -> bytes | int:
        result, reply = self.ask(READLINK, ino)
        return reply if result > 0 else result

    def getxattr(self, ino: int, name: bytes, size: int = 1024) -> bytes | int:
        result, reply = self.ask(GETXATTR, ino, struct.pack("=II", size, 0) + name + b"\0")
        return reply if result > 0 else result

    def listxattr(self, ino: int, size: int = 1024) -> bytes | int:
        result, reply = self.ask(LISTXATTR, ino, struct.pack("=II", size, 0))
        return reply if result >= 0 else result

    def opendir(self, ino: int) -> int:
        """The handle, which is above ``FRONT_HANDLE``."""
        result, reply = self.ask(OPENDIR, ino, bytes(8))
        if result <= 0:
            return result
        handle, flags, backing = OPEN_OUT.unpack(reply)
        assert (flags, backing) == (0, 0)
        return int(handle)

    def readdir(
        self, ino: int, handle: int, offset: int, size: int = 32768, *, plus: bool = True
    ) -> list[Name] | int:
        body = READ_IN.pack(handle, offset, size, 0, 0, 0, 0)
        result, reply = self.ask(READDIRPLUS if plus else READDIR, ino, body)
        assert result <= size
        return names_from(reply, plus=plus) if result >= 0 else result

    def forget(self, ino: int) -> int:
        return self.ask(FORGET, ino, struct.pack("=Q", 1))[0]

    def batch_forget(self, inos: list[int]) -> int:
        body = struct.pack("=II", len(inos), 0) + b"".join(struct.pack("=QQ", ino, 1) for ino in inos)
        return self.ask(BATCH_FORGET, 0, body)[0]
