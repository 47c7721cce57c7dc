"""A namespace of any size without the objects: records written straight into the database, before a mount.

Files of no bytes in directories of a thousand, which the mount believes for a day. What a bucket of that many
objects would have left is here too, except for the rows about the objects: the front never reads them.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from tierfs.namespace import records, schema
from tierfs.namespace.db import Database
from tierfs.namespace.transaction import WriteTransaction
from tierfs.types import NO_CONTENT, ROOT_INO, Inode

PER_DIRECTORY = 1000
DAY_NS = 86400 * 10**9
DIRECTORIES_PER_COMMIT = 200
FILE, DIRECTORY = stat.S_IFREG | 0o644, stat.S_IFDIR | 0o755


def directory_name(number: int) -> str:
    return f"d{number:06}"


def file_name(number: int) -> str:
    return f"file-{number:08}.bin"


def path_of(number: int) -> str:
    """Of the file with that number, relative to the root."""
    return f"{directory_name(number // PER_DIRECTORY)}/{file_name(number)}"


def fill(state_dir: Path, count: int, source: str) -> None:
    """Make the namespace of a mount of ``source`` with ``count`` files.

    To be called in a process of its own, for it opens LMDB.
    """
    now_ns = time.time_ns()
    numbers = iter(range(-(-count // PER_DIRECTORY)))
    with Database.open(state_dir, source=source, prefix="") as db:
        db.commit_now(lambda txn: _list_root(txn, now_ns + DAY_NS))
        while part := list(islice(numbers, DIRECTORIES_PER_COMMIT)):
            db.commit_now(partial(_add, directories=part, count=count, now_ns=now_ns))


def _list_root(txn: WriteTransaction, until_ns: int) -> None:
    root = records.get_inode(txn, ROOT_INO)
    schema.put_inode(txn, schema.replace_inode(root, listed_until_ns=until_ns))


def _add(txn: WriteTransaction, directories: list[int], count: int, now_ns: int) -> None:
    """Numbers grow in every table, so that all is appended; the root's own entries lie before the others."""
    tables = txn.tables
    first = schema.unpack_u64(txn.get(schema.META_NEXT_ID, None, tables.meta))[0]
    generation = records.fs_generation(txn)
    inodes, entries, cookies, parents = [], [], [], []
    end = first + 2 * len(directories) * (PER_DIRECTORY + 1)
    number_of = iter(range(first, end))
    for directory in directories:
        ino, seq = next(number_of), next(number_of)
        name = directory_name(directory).encode()
        inodes.append(_inode(ino, DIRECTORY, generation, now_ns))
        txn.put(
            schema.dirent_key(ROOT_INO, name), schema.DIRENT.pack(ino, seq, stat.S_IFDIR, 0), db=tables.dirent
        )
        txn.put(
            schema.pack_u64_pair(ROOT_INO, seq),
            schema.DIRSEQ.pack(ino, stat.S_IFDIR, 0) + name,
            db=tables.dirseq,
        )
        parents.append((schema.parent_key(ino, ROOT_INO, name), b""))
        for name, own, cookie in _files(directory, count, number_of):
            inodes.append(_inode(own, FILE, generation, now_ns))
            entries.append((schema.dirent_key(ino, name), schema.DIRENT.pack(own, cookie, stat.S_IFREG, 0)))
            cookies.append(
                (schema.pack_u64_pair(ino, cookie), schema.DIRSEQ.pack(own, stat.S_IFREG, 0) + name)
            )
            parents.append((schema.parent_key(own, ino, name), b""))
    for table, rows in (
        (tables.inode, inodes),
        (tables.dirent, entries),
        (tables.dirseq, cookies),
        (tables.parent, parents),
    ):
        txn.cursor(table).putmulti(rows, append=True)
    root = records.get_inode(txn, ROOT_INO)
    schema.put_inode(txn, schema.replace_inode(root, nlink=root.nlink + len(directories)))
    txn.put(schema.META_NEXT_ID, schema.pack_u64(end), db=tables.meta)


def _files(directory: int, count: int, number_of: Iterator[int]) -> Iterator[tuple[bytes, int, int]]:
    """(name, inode number, cookie) of each file in a directory."""
    begin = directory * PER_DIRECTORY
    for number in range(begin, min(begin + PER_DIRECTORY, count)):
        yield file_name(number).encode(), next(number_of), next(number_of)


def _inode(ino: int, mode: int, generation: int, now_ns: int) -> tuple[bytes, bytes]:
    is_directory = mode == DIRECTORY
    flags = schema.DIR_SEEN | schema.IN_STORE | schema.META_KNOWN if is_directory else schema.META_KNOWN
    record = Inode(
        ino=ino,
        mode=mode,
        uid=0,
        gid=0,
        nlink=2 if is_directory else 1,
        rdev=0,
        size_bytes=0,
        atime_ns=now_ns,
        mtime_ns=now_ns,
        ctime_ns=now_ns,
        generation=generation,
        flags=flags,
        content_id=NO_CONTENT,
        valid_until_ns=now_ns + DAY_NS,
        listed_until_ns=now_ns + DAY_NS if is_directory else 0,
    )
    return schema.inode_key(ino), schema.pack_inode(record)
