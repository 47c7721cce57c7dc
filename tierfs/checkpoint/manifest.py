"""The manifest of a checkpoint: one JSON object in the bucket that names every shard.

It lies at ``.tierfs/checkpoints/PATH.json`` below the prefix of the mount, PATH being the directory of the
checkpoint, and is written when every shard is in the store, so that a checkpoint without one is not whole.
Whoever can write to the bucket can write a manifest: ``decode`` trusts nothing of it. A shard may only name
the key that its own path has, below the directory of the checkpoint; sizes, names and sums are checked.

Pure functions, callable from anywhere. Raises ``ManifestDamaged``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from tierfs import __version__
from tierfs.errors import InvalidArgument, ManifestDamaged
from tierfs.namespace.objects import key_below
from tierfs.namespace.schema import RESERVED_NAME
from tierfs.store.base import MAX_KEY_BYTES, MAX_OBJECT_BYTES
from tierfs.store.keys import decode_key, encode_path, key_size_bytes

FORMAT = 1
MANIFESTS = ".tierfs/checkpoints/"
PARTS = ".tierfs/checkpoint-parts/"
"""What the engine of each node but the first writes when one checkpoint is saved by several nodes."""
MAX_MANIFEST_BYTES = 64 * 1024 * 1024
SUFFIX = ".json"
_SUM = re.compile(r"[0-9a-f]{32}")
_DIGITS = re.compile(r"(\d+)")


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """One file. ``file``: its path below the directory of the checkpoint, as a key has it.

    ``xxh3_128``: of the whole file, 32 hex digits. ``mtime_ns``: the store's Last-Modified. ``rank``: who
    wrote it, if it said so.
    """

    file: str
    key: str
    size_bytes: int
    etag: str
    xxh3_128: str
    mtime_ns: int = 0
    rank: int | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """``name``: the directory below the root of the mount, as a key has it. Shards in rank order."""

    format: int
    name: str
    save_id: str
    created_ns: int
    step: int | None
    world_size: int
    shards: tuple[Shard, ...]
    writer: str = f"tierfs {__version__}"

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards)


class _Version(msgspec.Struct):
    format: int


def manifest_key(prefix: str, path: bytes) -> str:
    """Where the manifest of the checkpoint at ``path`` lies. Raises ``InvalidArgument``."""
    if not path:
        raise InvalidArgument("a checkpoint is a directory below the root of the mount, not the root itself")
    if not _is_place(path):
        text = path.decode("utf-8", "backslashreplace")
        raise InvalidArgument(f"{text}: no place for a checkpoint (.tierfs is tierfs's own, '..' leads away)")
    key = f"{prefix}{MANIFESTS}{encode_path(path)}{SUFFIX}"
    if key_size_bytes(key) > MAX_KEY_BYTES:
        raise InvalidArgument(
            f"the path of a checkpoint is too long for its manifest's key: {len(path)} bytes"
        )
    return key


def part_key(prefix: str, save_id: str, node: int) -> str:
    """Where the engine of that node leaves what it knows of the shards written there."""
    return f"{prefix}{PARTS}{save_id}/{node}{SUFFIX}"


def path_of_manifest(prefix: str, key: str) -> bytes | None:
    """The path of the checkpoint that this manifest is about; None: it is none."""
    start = prefix + MANIFESTS
    if not key.startswith(start) or not key.endswith(SUFFIX):
        return None
    path = decode_key(key[len(start) : -len(SUFFIX)])
    return path if path and _is_place(path) else None


def _is_place(path: bytes) -> bool:
    """Whether a directory at ``path`` can be a checkpoint: a proper path, and not of what is tierfs's own."""
    return (
        decode_key(encode_path(path)) == path
        and not path.endswith(b"/")
        and path.partition(b"/")[0] != RESERVED_NAME
    )


def encode(manifest: Manifest) -> bytes:
    """Readable JSON."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def decode(body: bytes, key: str, prefix: str, path: bytes) -> Manifest:
    """The manifest of the checkpoint at ``path``, found at ``key``. Raises ``ManifestDamaged``."""
    try:
        version = msgspec.json.decode(body, type=_Version).format
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ManifestDamaged(f"manifest {key}: not readable: {error}") from None
    if version != FORMAT:
        raise ManifestDamaged(
            f"manifest {key}: format {version}, and this version of tierfs reads {FORMAT}"
            + ("; a newer version wrote it" if version > FORMAT else "")
        )
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ManifestDamaged(f"manifest {key}: not readable: {error}") from None
    if manifest.name != encode_path(path):
        raise ManifestDamaged(
            f"manifest {key}: it is about {manifest.name!r}, not about {encode_path(path)!r}"
        )
    seen: set[str] = set()
    for shard in manifest.shards:
        if shard.file in seen:
            raise ManifestDamaged(f"manifest {key}: {shard.file!r} is listed twice")
        seen.add(shard.file)
        _check(shard, key, prefix, path)
    return manifest


def _check(shard: Shard, key: str, prefix: str, path: bytes) -> None:
    """Raises ``ManifestDamaged`` unless the shard is what a file in the checkpoint's directory can be."""
    file = decode_key(shard.file)
    if not file or file.endswith(b"/"):
        raise ManifestDamaged(f"manifest {key}: {shard.file!r} is not the name of a file in the checkpoint")
    if shard.key != key_below(prefix, path + b"/" + file, False):
        raise ManifestDamaged(
            f"manifest {key}: {shard.file!r} is said to be at {shard.key!r}, outside the checkpoint; "
            "not trusted"
        )
    if not 0 <= shard.size_bytes <= MAX_OBJECT_BYTES:
        raise ManifestDamaged(f"manifest {key}: {shard.file!r} cannot have {shard.size_bytes} bytes")
    if not shard.etag or not _SUM.fullmatch(shard.xxh3_128):
        raise ManifestDamaged(f"manifest {key}: {shard.file!r} has no ETag or no checksum")


def in_rank_order(shards: Sequence[Shard]) -> tuple[Shard, ...]:
    """By the rank that wrote each, where it is known, then by name, numbers in names counting as numbers."""

    def place(shard: Shard) -> tuple[float, list[tuple[int, str]]]:
        words = [
            (int(word), "") if number % 2 else (-1, word)
            for number, word in enumerate(_DIGITS.split(shard.file))
        ]
        return (float("inf") if shard.rank is None else shard.rank), words

    return tuple(sorted(shards, key=place))
