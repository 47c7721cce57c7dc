"""``meta dump``, ``meta load`` and ``meta check``: a namespace as JSON lines, and back.

The first line is a header; then one line per inode with everything that belongs to it (names with their
cookies, link target, extended attributes, object row, dirty row), then one per doomed key, and one for every
row of the tables that snapshots need. Bytes that are no UTF-8 are kept as lone surrogates (``\\udcff``),
values of attributes in base64.

``dump`` and ``check`` also run beside a live engine, from another process; ``load`` makes a new database.
For command line tools: everything here blocks.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TextIO, TypeVar

import msgspec

from tierfs.errors import FormatError, NamespaceError
from tierfs.namespace import objects, publish, records, schema
from tierfs.namespace.check import problems
from tierfs.namespace.db import Database
from tierfs.namespace.schema import pack_u64, unpack_u64
from tierfs.namespace.transaction import HISTORY_TABLES, ReadTransaction, WriteTransaction
from tierfs.namespace.xattr import list_xattrs
from tierfs.types import ROOT_INO, ContentId, Inode

R = TypeVar("R", bound=msgspec.Struct)
KIND = "tierfs-namespace"
_LINES_PER_COMMIT = 2000
_SNAPSHOT_FACTS = (schema.META_EPOCH, schema.META_FRONTIER, schema.META_SWEEP)


def dump(directory: Path, file: TextIO) -> int:
    """Write the namespace below a state directory; returns the number of lines. Raises ``NamespaceError``."""
    count = 0
    with Database.open(directory, read_only=True) as db, db.snapshot() as txn:
        for line in dump_lines(txn):
            file.write(line + "\n")
            count += 1
    return count


def load(directory: Path, lines: Iterable[str]) -> int:
    """Make a namespace below a state directory; returns the number of lines read.

    Raises ``FormatError`` (not a dump, or of a newer version), ``NamespaceError`` (there is a namespace
    already, or a line makes no sense). What a failure leaves behind is removed.
    """
    path = directory / "namespace.lmdb"
    if path.exists():
        raise NamespaceError(f"{path} exists: a dump is loaded into a new state directory")
    try:
        with Database.open(directory) as db:
            return load_lines(db, lines)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


def check(directory: Path) -> list[str]:
    """One sentence for each contradiction; empty if all is well. Raises ``NamespaceError``."""
    with Database.open(directory, read_only=True) as db, db.snapshot() as txn:
        return list(problems(txn))


def dump_lines(txn: ReadTransaction) -> Iterator[str]:
    """Every line of a dump, without line ends."""
    meta = txn.tables.meta
    format_version = unpack_u64(txn.get(schema.META_FORMAT, None, meta))[0]
    with_snapshots = format_version > schema.OLDEST_FORMAT
    yield json.dumps(
        {
            "kind": KIND,
            "format": format_version,
            "next_id": unpack_u64(txn.get(schema.META_NEXT_ID, None, meta))[0],
            "generation": records.fs_generation(txn),
            "uuid": txn.get(schema.META_UUID, b"", meta).hex(),
            "source": txn.get(schema.META_SOURCE, b"", meta).decode(),
            "prefix": txn.tables.prefix,
        }
        | ({"snapshots": _snapshot_facts(txn)} if with_snapshots else {})
    )
    for _, value in txn.cursor(txn.tables.inode).iternext(True, True):
        yield json.dumps(_inode_line(txn, schema.unpack_inode(value)))
    cursor: bytes | None = None
    while True:
        rows, cursor = publish.doomed_entries(txn, cursor)
        for row in rows:
            yield json.dumps({"doomed": msgspec.structs.asdict(row)})
        if cursor is None:
            break
    for name in HISTORY_TABLES if with_snapshots else ():
        for key, value in txn.cursor(getattr(txn.tables, name)).iternext(True, True):
            yield json.dumps({"table": name, "key": _base64(key), "value": _base64(value)})


def load_lines(db: Database, lines: Iterable[str]) -> int:
    """Fill a new database; returns the number of lines read."""
    source = iter(lines)
    header = _parse(next(source, ""), 1)
    if header.get("kind") != KIND:
        raise FormatError("this is no dump of a tierfs namespace")
    if header["format"] not in range(schema.OLDEST_FORMAT, schema.FORMAT_VERSION + 1):
        raise FormatError(
            f"the dump has format {header['format']}, this version reads "
            f"{schema.OLDEST_FORMAT} to {schema.FORMAT_VERSION}"
        )
    db.commit_now(lambda txn: _load_header(txn, header))
    number = 1
    while batch := list(islice(source, _LINES_PER_COMMIT)):
        parsed = [_parse(line, number + offset) for offset, line in enumerate(batch, 1)]
        db.commit_now(partial(_load_parsed, lines=parsed, first=number + 1))
        number += len(batch)
    db.commit_now(lambda txn: None, durable=True)
    return number


def _inode_line(txn: ReadTransaction, inode: Inode) -> dict[str, Any]:
    line = msgspec.structs.asdict(inode)
    line["content_id"] = inode.content_id.hex()
    names = []
    for parent, name in records.names_of(txn, inode.ino):
        found = records.find_entry(txn, parent, name)
        names.append([parent, _text(name), found[1] if found is not None else 0])
    line["names"] = names
    target = txn.get(pack_u64(inode.ino), None, txn.tables.symlink)
    if target is not None:
        line["target"] = _text(target)
    if inode.flags & schema.HAS_XATTR:
        line["xattrs"] = {
            _text(name): base64.b64encode(txn.get(pack_u64(inode.ino) + name, b"", txn.tables.xattr)).decode()
            for name in list_xattrs(txn, inode.ino)
        }
    row = objects.object_of(txn, inode.ino)
    if row is not None:
        line["object"] = msgspec.structs.asdict(row)
    dirty = publish.dirty_row(txn, inode.ino)
    if dirty is not None:
        line["dirty"] = msgspec.structs.asdict(dirty)
    return line


def _load_header(txn: WriteTransaction, header: dict[str, Any]) -> None:
    meta = txn.tables.meta
    txn.put(schema.META_NEXT_ID, pack_u64(header["next_id"]), db=meta)
    txn.put(schema.META_GENERATION, pack_u64(header["generation"]), db=meta)
    txn.put(schema.META_UUID, bytes.fromhex(header["uuid"]), db=meta)
    for key, name in ((schema.META_SOURCE, "source"), (schema.META_PREFIX, "prefix")):
        if header[name]:
            txn.put(key, header[name].encode(), db=meta)
    txn.tables.prefix = header["prefix"]
    records.delete_inode(txn, ROOT_INO)
    for name, value in header.get("snapshots", {}).items():
        txn.put(name.encode(), bytes.fromhex(value), db=meta)


def _load_parsed(txn: WriteTransaction, lines: list[dict[str, Any]], first: int) -> None:
    for number, line in enumerate(lines, first):
        try:
            if "table" in line:
                _load_history(txn, line)
            elif "doomed" in line:
                row = _row(line["doomed"], schema.DoomedRow)
                publish.doom(txn, row.key, row.etag, row.since_ns, ino=row.ino, prefix=row.prefix)
            else:
                _load_inode(txn, line)
        except (KeyError, TypeError, ValueError) as error:
            raise NamespaceError(f"line {number} of the dump: {error!r}") from error


def _snapshot_facts(txn: ReadTransaction) -> dict[str, str]:
    found = {name: txn.get(name, None, txn.tables.meta) for name in _SNAPSHOT_FACTS}
    return {name.decode(): value.hex() for name, value in found.items() if value is not None}


def _load_history(txn: WriteTransaction, line: dict[str, Any]) -> None:
    """A row of a table that snapshots need, as it was: nothing of it is derived from anything else."""
    if line["table"] not in HISTORY_TABLES:
        raise ValueError(f"table {line['table']!r}")
    key, value = base64.b64decode(line["key"]), base64.b64decode(line["value"])
    txn.put(key, value, db=getattr(txn.tables, line["table"]))


def _load_inode(txn: WriteTransaction, line: dict[str, Any]) -> None:
    inode = Inode(
        **{field: line[field] for field in Inode.__struct_fields__ if field != "content_id"},
        content_id=ContentId(bytes.fromhex(line["content_id"])),
    )
    tables = txn.tables
    key = pack_u64(inode.ino)
    records.add_inode(txn, inode)
    for parent, name, seq in line["names"]:
        records.put_entry(txn, parent, _bytes(name), inode.ino, inode.mode & 0o170000, seq=seq)
    if not inode.nlink:
        txn.put(key, b"", db=tables.orphan)
    if "target" in line:
        txn.put(key, _bytes(line["target"]), db=tables.symlink)
    for name, value in line.get("xattrs", {}).items():
        txn.put(key + _bytes(name), base64.b64decode(value), db=tables.xattr)
    if "object" in line:
        row = _row(line["object"], schema.ObjectRow)
        txn.put(key, schema.encode_row(row), db=tables.object)
        if inode.nlink:
            objects.put_object_row(txn, inode.ino, row)
    if "dirty" in line:
        dirty = _row(line["dirty"], schema.DirtyRow)
        txn.put(key, schema.encode_row(dirty), db=tables.dirty)
        for claim in dirty.claims:
            txn.put(schema.object_key_digest(claim), key, db=tables.objkey)


def _row(fields: dict[str, Any], kind: type[R]) -> R:
    return msgspec.convert([fields[name] for name in kind.__struct_fields__], kind)


def _parse(line: str, number: int) -> dict[str, Any]:
    try:
        parsed = json.loads(line)
    except ValueError as error:
        raise NamespaceError(f"line {number} of the dump: {error}") from None
    if not isinstance(parsed, dict):
        raise NamespaceError(f"line {number} of the dump is no object")
    return parsed


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
