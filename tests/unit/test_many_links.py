"""A file with many names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import running_engine, settings_for
from tierfs.namespace import check, objects, schema
from tierfs.types import ROOT_INO

LINKS = 400


async def test_a_check_does_not_read_the_row_of_a_file_once_per_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_engine(settings_for(tmp_path), publishing=False) as engine:
        inode = await engine.write_file("f", b"bytes")
        for number in range(LINKS):
            await engine.names.link(inode.ino, ROOT_INO, b"l%d" % number)
        await engine.parts.publisher.publish_now(inode.ino)
        decoded = []
        original = objects.object_of

        def counted(*arguments: Any) -> Any:
            decoded.append(arguments[1])
            return original(*arguments)

        monkeypatch.setattr(objects, "object_of", counted)
        with engine.parts.db.read() as txn:
            assert list(check.problems(txn)) == []
            assert txn.entries(txn.tables.objkey) > LINKS
        assert len(decoded) < 10

        def forge(txn: Any) -> None:
            txn.put(schema.object_key_digest("odd"), schema.pack_u64(inode.ino), db=txn.tables.objkey)

        await engine.parts.db.commit(forge)
        with engine.parts.db.read() as txn:
            assert len(list(check.problems(txn))) == 1
