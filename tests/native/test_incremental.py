"""Files changed through the kernel, where tierfs does not see which bytes were written."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.native.test_passthrough_writes import native_factory, passed
from tests.support.mount import Mounted, opened

pytestmark = pytest.mark.needs_fuse

MIB = 1 << 20
PART = 5 * MIB
SIZE = 4 * PART


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    factory = native_factory(tmp_path_factory)
    yield factory(options=("--part-size", "5M", "--upload-delay", "600"))
    factory.close()


def traffic(mounted: Mounted) -> tuple[int, int]:
    backlog = mounted.status()["backlog"]
    return backlog["sent_bytes"], backlog["copied_bytes"]


def test_a_clean_file_changed_through_passthrough(mounted: Mounted) -> None:
    body = bytearray(os.urandom(SIZE))
    path = mounted.path / "f"
    path.write_bytes(body)
    mounted.flush()
    sent, copied = traffic(mounted)
    before = passed(mounted)
    with opened(path), opened(path, os.O_RDWR) as writer:
        assert passed(mounted) == before + 2
        os.pwrite(writer, b"changed", PART + 5)
    body[PART + 5 : PART + 12] = b"changed"
    mounted.flush()
    assert (mounted.store_dir / "f").read_bytes() == bytes(body)
    assert traffic(mounted) == (sent + PART, copied + SIZE - PART)


def test_a_new_file_written_through_passthrough_and_renamed_over_the_old_one(mounted: Mounted) -> None:
    body = bytearray(os.urandom(SIZE))
    path, temporary = mounted.path / "g", mounted.path / "g.tmp"
    path.write_bytes(body)
    mounted.flush()
    sent, copied = traffic(mounted)
    before = passed(mounted)
    body[2 * PART] ^= 1
    temporary.write_bytes(body)
    assert passed(mounted) == before + 1
    temporary.rename(path)
    mounted.flush()
    assert (mounted.store_dir / "g").read_bytes() == bytes(body)
    assert traffic(mounted) == (sent + PART, copied + SIZE - PART)
