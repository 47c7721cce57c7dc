"""Makes the inputs that fuzzing begins with, from what a real mount says, does and keeps.

    python tierfs_native/fuzz/corpus.py OUTPUT

A mount with the native front works on a small directory while ``record.py`` listens between front and
engine, twice: as users have it, and with a front that hands every request on. What was said, and what is in
the namespace and in the index of the tier afterwards, becomes one directory of inputs for each fuzzer:
OUTPUT/fuzz_answer...
Needs root and /dev/fuse, as any mount with that front.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import shlex
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import lmdb

import tierfs_native
from tierfs_native.fuzz import record
from tierfs_native.fuzz.record import Packet

_IN_HEAD = struct.Struct("<IIQQIIIHH")
_OUT_HEAD = struct.Struct("<IiQ")
_CHANNEL_HEAD = struct.Struct("<HHIQ")
_LARGEST_BYTES = 4096
_COUNT_PER_KIND = 40
"""Inputs of one kind of message: more of them are more of the same."""
_MOUNT, _VIEW = 16, 23
_FRONT_HANDLE = 1 << 63
_WRITE, _OPEN, _READ, _FLUSH, _RELEASE = 16, 14, 15, 25, 18

# As the sources of the fuzzers list them.
_NOOPEN = (14, 15, 16, 25, 20, 46, 47, 52, 39, 43, 18)
_RELAY = (14, 14, 14, 18, 35, 27, 26, 36, 2, 9, 29, 51, 46, 16, 1, 10, 15, 45)
_TABLES = ("dirent", "dirseq", "inode", "parent", "symlink")


class Corpus:
    """One directory for each fuzzer; equal inputs are kept once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._counts: dict[tuple[str, object], int] = {}

    def add(self, fuzzer: str, kind: object, data: bytes) -> None:
        place = self._directory / fuzzer
        place.mkdir(parents=True, exist_ok=True)
        path = place / hashlib.sha256(data).hexdigest()[:16]
        count = self._counts.get((fuzzer, kind), 0)
        if path.exists() or count >= _COUNT_PER_KIND:
            return
        self._counts[fuzzer, kind] = count + 1
        path.write_bytes(data)

    def summary(self) -> str:
        return ", ".join(
            f"{place.name} {len(list(place.iterdir()))}" for place in sorted(self._directory.iterdir())
        )


# -- a mount at work -------------------------------------------------------------------------------


def use(mount: Path, name: str) -> None:
    """A little of everything that applications ask of a file system, below a directory of that name."""
    for path in sorted(mount.rglob("*")):
        path.stat()
        if path.is_file():
            path.read_bytes()
    work = mount / name
    work.mkdir()
    for number in range(20):
        (work / f"file-{number}").write_bytes(bytes([number]) * number * 997)
    first = work / "file-1"
    os.link(first, work / "hard")
    os.symlink("file-1", work / "soft")
    os.readlink(work / "soft")
    os.mkfifo(work / "fifo")
    os.rename(work / "file-2", work / "renamed")
    os.chmod(first, 0o600)
    os.chown(first, 1, 1)
    os.utime(first, ns=(10**18, 10**18))
    os.truncate(work / "file-9", 100)
    for name in ("user.color", "user.tierfs.resident"):
        with contextlib.suppress(OSError):
            os.setxattr(first, name, b"red")
        with contextlib.suppress(OSError):
            os.getxattr(first, name)
    os.listxattr(first)
    os.removexattr(first, "user.color")
    with contextlib.suppress(OSError):
        os.getxattr(first, "security.capability")
    use_ranges(work)
    os.statvfs(work)
    os.access(first, os.R_OK)
    for entry in os.scandir(work):
        entry.stat(follow_symlinks=False)
    for missing in ("nothing", "n" * 255):
        with contextlib.suppress(FileNotFoundError):
            os.stat(work / missing)
    (work / "file-3").unlink()
    os.mkdir(work / "below")
    os.rmdir(work / "below")


def use_ranges(work: Path) -> None:
    """What is asked of parts of an open file."""
    with (work / "ranges").open("w+b") as file:
        file.write(os.urandom(300_000))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fallocate(file.fileno(), 0, 400_000)
        ctypes.CDLL(None).fallocate(file.fileno(), 3, ctypes.c_long(4096), ctypes.c_long(8192))
        os.lseek(file.fileno(), 0, os.SEEK_DATA)
        os.lseek(file.fileno(), 0, os.SEEK_HOLE)
        with (work / "copied").open("wb") as target:
            os.copy_file_range(file.fileno(), target.fileno(), 100_000)
        with mmap.mmap(file.fileno(), 0) as view:
            view[100:110] = b"0123456789"
        os.fdatasync(file.fileno())
    nameless = os.open(work, os.O_TMPFILE | os.O_RDWR)
    os.write(nameless, b"nameless")
    os.close(nameless)


def fill(source: Path) -> None:
    (source / "data" / "deep").mkdir(parents=True)
    for number in range(8):
        (source / "data" / f"{number}.bin").write_bytes(os.urandom(number * 9_001))
    (source / "data" / "deep" / "large.bin").write_bytes(os.urandom(5 << 20))


def run_mount(scratch: Path, front: Path, log: Path, *, everything: bool) -> None:
    """One life of the mount; raises ``CalledProcessError`` with what tierfs said."""
    mount = scratch / "mnt"
    wrapper = scratch / log.stem
    words = [sys.executable, str(Path(record.__file__).resolve()), "front", str(log), str(front)]
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    wrapper.chmod(0o755)
    environment = os.environ | {"TIERFS_FRONT_PATH": str(wrapper), "TIERFS_RUN_DIR": str(scratch / "run")}
    if everything:
        environment["RECORD_ALL"] = "1"
    tierfs = [sys.executable, "-m", "tierfs"]
    options = ["--front", "native", "--state-dir", str(scratch / "state"), "--tier", f"{scratch / 'tier'}:1G"]
    subprocess.run(
        [*tierfs, "mount", str(scratch / "source"), str(mount), *options], env=environment, check=True
    )
    try:
        subprocess.run(
            [sys.executable, __file__, "--use", str(mount), wrapper.name],
            env=environment,
            check=True,
            timeout=120,
        )
    finally:
        subprocess.run([*tierfs, "umount", str(mount)], env=environment, check=True)


# -- inputs ----------------------------------------------------------------------------------------


def requests_in(packets: Sequence[Packet]) -> Iterator[tuple[int, int, bytes, bytes]]:
    """(opcode, inode, header, body) of every FUSE request, whichever way it went."""
    for packet in packets:
        data = packet.data
        if not packet.from_front:
            continue
        if packet.socket == record.CHANNEL:
            if _CHANNEL_HEAD.unpack_from(data)[1] != 9:
                continue
            data = data[_CHANNEL_HEAD.size :]
        opcode, node = _IN_HEAD.unpack_from(data)[1], _IN_HEAD.unpack_from(data)[3]
        yield opcode, node, data[: _IN_HEAD.size], data[_IN_HEAD.size :]


def from_requests(corpus: Corpus, packets: Sequence[Packet]) -> None:
    for opcode, node, head, body in requests_in(packets):
        if len(body) > _LARGEST_BYTES:
            body = body[:_LARGEST_BYTES]
        corpus.add("fuzz_answer", opcode, struct.pack("<H", 8192) + head + body)
        if opcode in _NOOPEN:
            for mode in range(3):
                choice = (_NOOPEN.index(opcode) * 3 + mode) % 256
                corpus.add("fuzz_noopen", (opcode, mode), bytes([choice, node & 255 | 1]) + body)
        if opcode in (_OPEN, _READ, _FLUSH, _RELEASE):
            what = {_OPEN: 0, _READ: 1, _FLUSH: 4, _RELEASE: 5}[opcode]
            step = struct.pack("<BBH", what, node % 10, len(body)) + body
            corpus.add("fuzz_small", opcode, b"\0" + step)
        # The first argument of an operation, and the rest: here as WRITE has them.
        inside = 40 if opcode == _WRITE else 0
        payload = body[inside:]
        sizes = struct.pack("<IIB", len(head) + len(body), len(payload), min(255, len(payload) // 8 + 1))
        corpus.add("fuzz_uring", opcode, sizes + body)


def relay_steps(packet: Packet) -> tuple[int, int, bytes] | None:
    """What ``fuzz_relay`` has to do so that about this packet goes through; None: it has nothing like it."""
    if packet.from_front:
        for opcode, _, _, body in requests_in([packet]):
            if opcode in _RELAY:
                return 0, _RELAY.index(opcode), body
        return None
    if packet.socket == record.REQUESTS:
        return 3, 1, packet.data[_OUT_HEAD.size :]
    return (5, 4, packet.data[_OUT_HEAD.size :]) if packet.socket == record.NAMES else None


def from_packets(corpus: Corpus, packets: Sequence[Packet]) -> None:
    steps = []
    for packet in packets:
        step = relay_steps(packet)
        if step is not None:
            steps.append(struct.pack("<BBB", *step[:2], min(255, len(step[2]))) + step[2][:255])
        if packet.from_front:
            continue
        if packet.socket == record.CHANNEL:
            kind = _CHANNEL_HEAD.unpack_from(packet.data)[1]
            corpus.add("fuzz_channel", kind, struct.pack("<BH", kind == 21, len(packet.data)) + packet.data)
            if kind in (_MOUNT, _VIEW):
                corpus.add("fuzz_messages", kind, bytes([kind % 2]) + packet.data[_CHANNEL_HEAD.size :])
        if packet.socket == record.REQUESTS and len(packet.data) == _OUT_HEAD.size + 112:
            corpus.add("fuzz_placed", "place", struct.pack("<HB", 256, 7) + packet.data[_OUT_HEAD.size :])
    for start in range(0, len(steps), 8):
        corpus.add("fuzz_relay", "steps", b"".join(steps[start : start + 8]))


def from_namespace(corpus: Corpus, path: Path) -> None:
    """Rows as they are, together as many as fit into one input."""
    with lmdb.open(str(path), readonly=True, max_dbs=40, lock=False) as environment:
        tables = [environment.open_db(name.encode(), create=False) for name in _TABLES]
        rows = []
        with environment.begin() as transaction:
            for number, table in enumerate(tables):
                for key, value in transaction.cursor(table):
                    rows.append(struct.pack("<BBH", number, len(key), len(value)) + key + value)
    rows.sort(key=lambda row: row[4:12])
    for start in range(0, len(rows), 8):
        corpus.add("fuzz_records", "rows", b"".join(rows[start : start + 24])[:_LARGEST_BYTES])


def from_index(corpus: Corpus, path: Path) -> None:
    with lmdb.open(str(path), readonly=True, max_dbs=8, lock=False) as environment:
        table = environment.open_db(b"extent", create=False)
        with environment.begin(db=table) as transaction:
            for key, value in transaction.cursor():
                (extent_no,) = struct.unpack(">I", key[16:])
                (epoch,) = struct.unpack_from("<I", value, 48)
                corpus.add("fuzz_extent", "record", struct.pack("<II", extent_no, epoch) + value)
                row = struct.pack("<BBH", 4, extent_no & 1 | 128, len(value)) + value
                asked = struct.pack("<BBH", 1, 4, 40) + struct.pack(
                    "<QQIIQII", _FRONT_HANDLE, 0, 4096, 0, 0, 0, 0
                )
                corpus.add("fuzz_small", "record", b"\1" + row + asked)


def main(arguments: Sequence[str]) -> int:
    if arguments[0] == "--use":
        use(Path(arguments[1]), arguments[2])
        return 0
    front = tierfs_native.front_path()
    if front is None:
        print(f"corpus: no native front: {tierfs_native.why_missing()}", file=sys.stderr)
        return 1
    corpus = Corpus(Path(arguments[0]))
    with tempfile.TemporaryDirectory(prefix="tierfs-corpus-") as directory:
        scratch = Path(directory)
        for name in ("source", "mnt", "tier", "run"):
            (scratch / name).mkdir()
        fill(scratch / "source")
        for everything in (False, True):
            log = scratch / ("everything.log" if everything else "usual.log")
            run_mount(scratch, front, log, everything=everything)
            packets = list(record.read_log(log))
            from_requests(corpus, packets)
            from_packets(corpus, packets)
            from_namespace(corpus, scratch / "state" / "namespace.lmdb")
            from_index(corpus, scratch / "tier" / "index.lmdb")
    print(f"corpus: {corpus.summary()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
