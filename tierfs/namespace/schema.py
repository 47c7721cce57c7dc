"""Key and record layout of the namespace. Everything that is written to ``namespace.lmdb`` is laid out here.

Integers in keys are big endian (so that they sort), integers in records little endian. Tables are named LMDB
databases without special flags. ``epoch_desc`` is 2**64-1 minus an epoch; of a live record that is always 0,
so that its key ends in eight bytes 0xff and is found with one exact get whatever snapshots there are.

=========  ============================================  =================================================
table      key                                           value
=========  ============================================  =================================================
dirent     parent ino (8), name, NUL, epoch_desc (8)     DIRENT
dirseq     parent ino (8), seq (8)                       DIRSEQ, then the name to the end of the value
inode      ino (8), epoch_desc (8)                       INODE
parent     ino (8), parent ino (8), name                 empty; one per name of the inode
symlink    ino (8)                                       the target
xattr      ino (8), attribute name                       the value
object     ino (8)                                       ``ObjectRow`` (msgpack array)
objkey     digest of an object key                       ino (8 BE): who owns, or is about to own, that key
dirty      ino (8)                                       ``DirtyRow`` (msgpack array)
doomed     "k" or "p", digest of an object key           ``DoomedRow`` (msgpack array)
orphan     ino (8)                                       empty; nlink is 0, somebody may have it open
meta       a name                                        see ``META_*``
=========  ============================================  =================================================

Only where there are snapshots (``history`` says when a record gets here; ``epoch`` is that of the newest
snapshot then, big endian):

=========  ============================================  =================================================
snapshot   epoch (8)                                     ``SnapshotRow`` (msgpack array)
oldinode   ino (8), epoch (8)                            INODE
olddirent  parent ino (8), name, NUL, epoch (8)          DIRENT
olddirseq  parent ino (8), seq (8), epoch (8)            DIRSEQ, then the name
oldobject  ino (8), epoch (8)                            ``ObjectRow``, or empty: there was none
oldkey     digest of an object key, NUL, key in          empty
           ``oldobject``
oldxattr   ino (8), epoch (8)                            all of them (msgpack map)
oldlink    ino (8)                                       the target
kept       digest of an object key, NUL, digest of       ``KeptRow`` (msgpack array): where a copy is of what
           its ETag (16)                                 an object was
loan       "i", ino (8)                                  ``LoanRow`` (msgpack array): whose bytes, in which
                                                         snapshot, are the ones of that inode
loan       "e", epoch (8), ino (8)                       empty: the same, by snapshot
job        "j", number (8)                               ``JobRow`` (msgpack array)
job        "l", number (8), ino (8)                      ino (8): what stands for a hard-linked inode of the
                                                         snapshot in what the job makes
=========  ============================================  =================================================

The C view. Offsets in bytes; every field is naturally aligned and there is no implicit padding::

    struct tierfs_dirent {          /* DIRENT, 24 bytes */
        uint64_t ino;               /*  0 */
        uint64_t seq;               /*  8  directory cookie of this entry */
        uint32_t type;              /* 16  S_IFMT bits of the mode */
        uint32_t reserved;          /* 20 */
    };
    struct tierfs_dirseq {          /* DIRSEQ, 16 bytes, followed by the name (1 to 255 bytes, no NUL) */
        uint64_t ino;               /*  0 */
        uint32_t type;              /*  8 */
        uint32_t reserved;          /* 12 */
    };
    struct tierfs_inode {           /* INODE, 128 bytes */
        uint64_t ino;               /*  0  same as in the key */
        uint32_t mode;              /*  8 */
        uint32_t uid;               /* 12 */
        uint32_t gid;               /* 16 */
        uint32_t nlink;             /* 20 */
        uint64_t rdev;              /* 24 */
        uint64_t size_bytes;        /* 32 */
        int64_t  atime_ns;          /* 40 */
        int64_t  mtime_ns;          /* 48 */
        int64_t  ctime_ns;          /* 56 */
        uint64_t generation;        /* 64 */
        uint64_t flags;             /* 72  see below */
        uint8_t  content_id[16];    /* 80 */
        int64_t  valid_until_ns;    /* 96  wall clock; INT64_MAX: the local state is the truth */
        int64_t  listed_until_ns;   /* 104 */
        uint64_t reserved[2];       /* 112 */
    };

Cookies (``seq``) come from the same counter as inode numbers: they only grow, so a scan that continues
after a cookie meets every entry that was there all the time exactly once. Cookies below
``FIRST_FREE_ID`` are left for ``.`` and ``..``.
"""

from __future__ import annotations

import hashlib
import struct

import msgspec

from tierfs.errors import DamagedRecord
from tierfs.namespace.history import keep_inode
from tierfs.namespace.transaction import META_FRONTIER as META_FRONTIER
from tierfs.namespace.transaction import WriteTransaction as WriteTransaction
from tierfs.types import Inode, ObjectInfo

FORMAT_VERSION = 4
"""What a database becomes when it is opened for writing. Before 4 there was no header of its own to go back
to after a power cut (``durability``): who does not know of that would change the pages that it speaks of."""
OLDEST_FORMAT = 2
"""The oldest that is understood. In 3 and later there may be snapshots, and tables for them."""

NAME_MAX_BYTES = 255
SYMLINK_MAX_BYTES = 4095
LINK_MAX = 65000
FIRST_FREE_ID = 16
FOREVER_NS = 2**63 - 1
"""``valid_until_ns`` of an inode whose local state is ahead of the bucket."""

RESERVED_NAME = b".tierfs"
"""Hidden at the root of a mount: what tierfs itself keeps in the bucket lies below it."""

# -- Inode.flags ----------------------------------------------------------------------------------------

DIR_LOCAL = 1 << 0
"""Directory: made by this mount."""
DIR_SEEN = 1 << 1
"""Directory: others made it, or put something into it."""
HAS_XATTR = 1 << 2
"""There is at least one xattr record."""
UNPUBLISHED = 1 << 3
"""Made here and not yet in the bucket under any key."""
DATA_LOCAL = 1 << 4
"""The content was written here and is not yet in the bucket."""
IN_STORE = 1 << 5
"""Directory: something at or below its path may be in the bucket."""
META_KNOWN = 1 << 6
"""Mode and owner are real (set here, or read from object metadata), not the defaults of a listing."""
LINKABLE = 1 << 7
"""Made without a name (O_TMPFILE), which it may still get."""

# -- fixed records --------------------------------------------------------------------------------------

DIRENT = struct.Struct("<QQII")
DIRSEQ = struct.Struct("<QII")
INODE = struct.Struct("<QIIIIQQqqqQQ16sqq16x")

U64 = struct.Struct(">Q")
U64_PAIR = struct.Struct(">QQ")

EPOCH_0 = b"\xff" * 8
NUL_EPOCH_0 = b"\0" + EPOCH_0

pack_u64 = U64.pack
pack_u64_pair = U64_PAIR.pack
unpack_u64 = U64.unpack

META_FORMAT = b"format"
"""U64: ``FORMAT_VERSION``."""
META_NEXT_ID = b"next_id"
"""U64: the next inode number or directory cookie."""
META_EPOCH = b"epoch"
"""U64: how many snapshots were ever made."""
META_SWEEP = b"sweep"
"""Present while old records may be left that no snapshot sees; changes with every snapshot that goes."""
META_UUID = b"uuid"
META_GENERATION = b"generation"
"""U64: generation of every inode made here; random per file system, so that numbers that start again in a
new state directory are not taken for the old ones."""
META_SOURCE = b"source"
META_PREFIX = b"prefix"
META_BOOT_ID = b"boot_id"
META_CLEAN = b"clean"

# -- reasons in DirtyEntry.reasons ------------------------------------------------------------------------

CONTENT = 1
"""Bytes or size changed here."""
ATTRIBUTES = 2
"""Mode, owner or mtime changed here: the object's metadata are old."""
MOVED = 4
"""The names changed: the object (for a directory: everything below) may be under another key."""
CREATED = 8
"""Made here."""

REASON_NAMES = {CONTENT: "content", ATTRIBUTES: "attributes", MOVED: "moved", CREATED: "created"}


def reason_names(reasons: int) -> list[str]:
    """For messages and ``--json``."""
    return [name for bit, name in REASON_NAMES.items() if reasons & bit]


class ObjectRow(msgspec.Struct, frozen=True, array_like=True):
    """What the bucket holds for one inode. ``also``: (key, etag) of further hard link names.

    ``confirmed_ns``: when the store last said so. If the inode has ``DATA_LOCAL`` these are older bytes.
    """

    key: str
    etag: str
    version_id: str | None
    size_bytes: int
    mtime_ns: int
    confirmed_ns: int
    also: tuple[tuple[str, str], ...] = ()

    @property
    def info(self) -> ObjectInfo:
        """The first object, as the store contract wants it (metadata unknown)."""
        return ObjectInfo(self.key, self.size_bytes, self.etag, self.mtime_ns, self.version_id)

    def all_keys(self) -> tuple[tuple[str, str], ...]:
        """(key, etag) of every object that this inode owns."""
        return ((self.key, self.etag), *self.also)


class DirtyRow(msgspec.Struct, frozen=True, array_like=True):
    """The bucket must be brought up to date with one inode.

    ``generation`` grows with every change: what was published under an older one is not enough.
    ``claims``: keys that a request of ours may be writing right now, or was when the process died.
    """

    ino: int
    since_ns: int
    generation: int
    reasons: int
    claims: tuple[str, ...] = ()


class DoomedRow(msgspec.Struct, frozen=True, array_like=True):
    """An object (``prefix``: all under a prefix, the key ends in ``/``) that no name maps to any more.

    ``ino``: the inode that it was the content of (0: none), which may still be open as an orphan; for a
    prefix, the directory that was renamed away from it.
    """

    key: str
    etag: str
    since_ns: int
    prefix: bool
    ino: int = 0


class SnapshotRow(msgspec.Struct, frozen=True, array_like=True):
    """``limit``: numbers from there on had not been given out. ``path``: of the directory at that time.

    ``is_deleted``: nobody sees it any more, but files that were made from it have their bytes there.
    """

    epoch: int
    name: bytes
    root_ino: int
    limit: int
    created_ns: int
    path: bytes
    is_deleted: bool = False


class LoanRow(msgspec.Struct, frozen=True, array_like=True):
    """The bytes of an inode that has no object yet are those of ``ino`` in the snapshot ``epoch``."""

    epoch: int
    ino: int


class JobRow(msgspec.Struct, frozen=True, array_like=True):
    """A directory is being made what ``source_ino`` is in the snapshot ``epoch``.

    ``is_clone``: ``target_ino`` has no name until it is complete; then it is ``name`` in ``parent_ino``.
    ``phase``: ``JOB_BUILDS`` and so on. ``last_ino``: no inode after that was made by the job.
    """

    number: int
    is_clone: bool
    epoch: int
    source_ino: int
    target_ino: int
    path: bytes
    started_ns: int
    phase: int = 0
    parent_ino: int = 0
    name: bytes = b""
    last_ino: int = 0
    forced: bool = False


JOB_BUILDS = 0
JOB_ANNOUNCES = 1
"""A clone that has its name: what is in it is marked, to be published."""
JOB_DISCARDS = 2
"""A clone that cannot get its name goes."""


class KeptRow(msgspec.Struct, frozen=True, array_like=True):
    """The object ``key`` in its version ``etag`` was copied to ``kept_key`` before it was overwritten.

    ``kept_etag`` is empty while the copy may not be complete. ``ino``: whose bytes they were.
    """

    key: str
    etag: str
    ino: int
    size_bytes: int
    kept_key: str
    kept_etag: str = ""
    version_id: str | None = None


_encoder = msgspec.msgpack.Encoder()
encode_row = _encoder.encode
decode_object = msgspec.msgpack.Decoder(ObjectRow).decode
decode_dirty = msgspec.msgpack.Decoder(DirtyRow).decode
decode_doomed = msgspec.msgpack.Decoder(DoomedRow).decode
decode_snapshot = msgspec.msgpack.Decoder(SnapshotRow).decode
decode_kept = msgspec.msgpack.Decoder(KeptRow).decode
decode_loan = msgspec.msgpack.Decoder(LoanRow).decode
decode_job = msgspec.msgpack.Decoder(JobRow).decode
decode_xattrs = msgspec.msgpack.Decoder(dict[bytes, bytes]).decode

# A key longer than this is cut and gets a digest, so that LMDB's limit of 511 bytes holds and a range scan
# over a prefix still finds it.
_MAX_PLAIN_KEY_BYTES = 440


def dirent_key(parent_ino: int, name: bytes) -> bytes:
    return pack_u64(parent_ino) + name + NUL_EPOCH_0


def inode_key(ino: int) -> bytes:
    return pack_u64(ino) + EPOCH_0


def parent_key(ino: int, parent_ino: int, name: bytes) -> bytes:
    return pack_u64_pair(ino, parent_ino) + name


def object_key_digest(key: str) -> bytes:
    """The table key for an object key: itself, or its first 440 bytes and a digest of all of it."""
    raw = key.encode("utf-8", "surrogatepass")
    if len(raw) <= _MAX_PLAIN_KEY_BYTES:
        return raw
    return raw[:_MAX_PLAIN_KEY_BYTES] + b"\0" + hashlib.blake2b(raw, digest_size=16).digest()


def object_prefix_digest(prefix: str) -> bytes:
    """What the table key of every object key below ``prefix`` begins with.

    (Of a prefix over 440 bytes: what they begin with, and others may too.)
    """
    return prefix.encode("utf-8", "surrogatepass")[:_MAX_PLAIN_KEY_BYTES]


def doomed_table_key(key: str, prefix: bool) -> bytes:
    return (b"p" if prefix else b"k") + object_key_digest(key)


def kept_table_key(key: str, etag: str) -> bytes:
    """The table key of the copy of one version of an object."""
    return object_key_digest(key) + b"\0" + hashlib.blake2b(etag.encode(), digest_size=16).digest()


def unpack_inode(raw: bytes) -> Inode:
    """Raises ``DamagedRecord``."""
    try:
        return Inode(*INODE.unpack(raw))
    except struct.error:
        raise DamagedRecord(f"inode record of {len(raw)} bytes, not {INODE.size}") from None


def pack_inode(inode: Inode) -> bytes:
    return INODE.pack(
        inode.ino, inode.mode, inode.uid, inode.gid, inode.nlink, inode.rdev, inode.size_bytes,
        inode.atime_ns, inode.mtime_ns, inode.ctime_ns, inode.generation, inode.flags, inode.content_id,
        inode.valid_until_ns, inode.listed_until_ns,
    )  # fmt: skip


def put_inode(txn: WriteTransaction, inode: Inode) -> None:
    """Write an inode record as it is. Marks nothing dirty: ``tree`` and ``publish`` do."""
    record = pack_inode(inode)
    keep_inode(txn, inode.ino, record)
    txn.put(pack_u64(inode.ino) + EPOCH_0, record, db=txn.tables.inode)


def replace_inode(inode: Inode, **changes: object) -> Inode:
    """A copy of ``inode`` with some fields changed."""
    return msgspec.structs.replace(inode, **changes)
