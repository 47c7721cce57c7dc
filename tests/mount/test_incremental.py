"""Large files that are saved again, on a real S3 server (SeaweedFS): what is sent, and what is copied there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mount.test_s3 import Bucket
from tests.support.mount import Mounted, MountFactory, opened
from tests.support.weed import weed_missing

pytestmark = [
    pytest.mark.usefixtures("needs_mount"),
    pytest.mark.needs_fuse,
    pytest.mark.skipif(bool(weed_missing()), reason=str(weed_missing())),
]
MIB = 1 << 20
PART = 5 * MIB


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    bucket = Bucket()
    yield bucket
    bucket.client.close()


def in_place(path: Path, body: bytes, offset: int) -> None:
    with opened(path, os.O_RDWR) as writer:
        os.pwrite(writer, body[offset : offset + 100], offset)


def written_anew(path: Path, body: bytes, offset: int) -> None:
    path.write_bytes(body)


def renamed_over(path: Path, body: bytes, offset: int) -> None:
    path.with_suffix(".tmp").write_bytes(body)
    path.with_suffix(".tmp").rename(path)


class Costs:
    """Bytes of requests, of files sent, and copied on the server, since the last question."""

    def __init__(self, mounted: Mounted) -> None:
        self._mounted = mounted
        self._before = self._now()

    def _now(self) -> tuple[int, int, int]:
        status = self._mounted.status()
        backlog = status["backlog"]
        return status["store"]["bytes_written"], backlog["sent_bytes"], backlog["copied_bytes"]

    def taken(self) -> tuple[int, int, int]:
        before, self._before = self._before, self._now()
        written, sent, copied = (now - then for now, then in zip(self._before, before, strict=True))
        return written, sent, copied


@pytest.mark.semantics(
    "S-PART-1",
    "Of a large file that is saved again, changed in place, written anew, appended to or renamed over the old one, only those parts (`--part-size`) are sent that differ from the version that went up from this mount before; the others are copied in the store, and the result is one plain object.",
)
def test_only_what_differs_is_sent(mount_factory: MountFactory, bucket: Bucket) -> None:
    size = 5 * PART
    body = bytearray(os.urandom(size))
    mounted = mount_factory(**bucket.settings("--part-size", "5M", "--upload-delay", "600"))
    path = mounted.path / "model"
    path.write_bytes(body)
    mounted.flush()
    costs = Costs(mounted)
    ways: list[Callable[[Path, bytes, int], None]] = [in_place, written_anew, renamed_over]
    for number, save in enumerate(ways):
        offset = (number + 1) * PART + 17
        body[offset : offset + 100] = os.urandom(100)
        save(path, bytes(body), offset)
        mounted.flush()
        assert bucket.get("model") == bytes(body)
        written, sent, copied = costs.taken()
        assert (sent, copied) == (PART, size - PART)
        if number:
            # The first time the store is also tried out. A busy server may have had a part sent again.
            assert written < size // 2
    with path.open("ab") as log:
        log.write(b"line\n" * 1000)
    body += b"line\n" * 1000
    mounted.flush()
    assert bucket.get("model") == bytes(body)
    written, sent, copied = costs.taken()
    assert (sent, copied) == (5000, size)
    assert written < PART
    assert bucket.keys() == ["model"]
    assert bucket.unfinished() == []
