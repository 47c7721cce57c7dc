"""Cases that need an S3 server with peculiarities: odd keys, lies, expired tokens, skewed clocks, old servers."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_bucket import generated_bytes
from tests.support.fake_s3 import FakeS3, Fault, fake_s3
from tests.support.mount import Mounted, MountFactory, wait_until
from tests.support.posix import errno_of

MIB = 1 << 20
pytestmark = [pytest.mark.usefixtures("needs_mount"), pytest.mark.needs_fuse]
STORE_ERRORS = (errno.EIO, errno.ETIMEDOUT)


@pytest.fixture
def server() -> Iterator[FakeS3]:
    with fake_s3() as server:
        yield server


def on(server: FakeS3, *options: str, **environment: str) -> dict[str, Any]:
    """Settings of a mount of that server's bucket."""
    return {
        "source": server.source,
        "options": ("--endpoint-url", server.endpoint_url, *options),
        "environment": {**server.environment, **environment},
    }


def objects(server: FakeS3) -> dict[str, bytes]:
    """What the bucket holds for everybody: neither tierfs's own keys nor directory markers."""
    keys = server.bucket.keys()
    keys = [key for key in keys if not key.startswith(".tierfs/") and not key.endswith("/")]
    return {key: server.bucket.body(key) for key in keys}


@pytest.mark.semantics(
    "S-NAME-2",
    "Of an object `x` beside objects below `x/` the directory is shown, and the hidden object is counted in `tierfs status`.",
)
def test_c03_object_beside_a_prefix_of_the_same_name(mount_factory: MountFactory, server: FakeS3) -> None:
    server.bucket.put("foo", b"shadowed")
    server.bucket.put("foo/bar", b"inside")
    server.bucket.put("d/x", b"shadowed too")
    server.bucket.put("d/x/y/z", b"deep")
    mounted = mount_factory(**on(server))
    for _ in range(2):
        assert Counter(os.listdir(mounted.path)) == {"foo": 1, "d": 1}
        assert os.listdir(mounted.path / "d") == ["x"]
        found = subprocess.run(["find", str(mounted.path)], capture_output=True, check=True)
        assert len(found.stdout.splitlines()) == 7
    assert (mounted.path / "foo" / "bar").read_bytes() == b"inside"
    assert (mounted.path / "d" / "x" / "y" / "z").read_bytes() == b"deep"
    assert mounted.status()["hidden_keys"] == 2
    (mounted.path / "foo" / "new").write_bytes(b"1")
    mounted.flush()
    assert server.bucket.body("foo") == b"shadowed"


@pytest.mark.semantics(
    "S-NAME-3",
    "Keys that no path can name (`a//b`, `.` or `..` as a part, parts over 255 bytes) are hidden and counted, and their neighbours stay readable.",
)
@pytest.mark.parametrize("delimiter", [True, False], ids=["delimiter", "no delimiter"])
def test_keys_without_a_path(mount_factory: MountFactory, server: FakeS3, delimiter: bool) -> None:
    server.obeys_delimiter = delimiter
    hidden = ["a//b", "/lead", "a/./b", "a/../b", "..", ".", "l" * 256, "d/" + "l" * 256, "a/\x00b"]
    for key in [*hidden, "a/ok", "ok", "d/ok"]:
        server.bucket.put(key, key.encode())
    mounted = mount_factory(**on(server))
    assert sorted(os.listdir(mounted.path)) == ["a", "d", "ok"]
    assert os.listdir(mounted.path / "a") == ["ok"]
    assert os.listdir(mounted.path / "d") == ["ok"]
    assert (mounted.path / "a" / "ok").read_bytes() == b"a/ok"
    assert mounted.status()["hidden_keys"] >= 7


@pytest.mark.parametrize("percent", [True, False])
def test_c04_names_in_listings_are_decoded_once(
    mount_factory: MountFactory, server: FakeS3, percent: bool
) -> None:
    server.space_as_percent = percent
    names = [
        "a b",
        "a+b",
        "a%20b",
        "a%2Bb",
        "100%.csv",
        "folder#1#",
        "한글",
        "\u00e9",
        "e\u0301",
        "?q=1&r",
        "<&>",
        "\x01",
    ]
    for name in names:
        server.bucket.put(f"in/{name}/f", name.encode())
    mounted = mount_factory(**on(server))
    assert sorted(os.listdir(mounted.path / "in")) == sorted(names)
    for name in names:
        assert (mounted.path / "in" / name / "f").read_bytes() == name.encode()
        (mounted.path / name).write_bytes(b"from inside")
    mounted.flush()
    assert {key for key in objects(server) if "/" not in key} == set(names)


@pytest.mark.limit_s(300)
def test_c09_memory_does_not_grow_with_passes(mount_factory: MountFactory, server: FakeS3) -> None:
    count = 20_000
    for i in range(count):
        server.bucket.add_generated(f"d{i // 1000:02}/f{i:06}", 10)
    mounted = mount_factory(**on(server))
    sizes = []
    for _ in range(3):
        found = subprocess.run(["find", str(mounted.path), "-type", "f"], capture_output=True, check=True)
        assert len(found.stdout.splitlines()) == count
        sizes.append(mounted.status()["engine"]["rss_bytes"])
    assert sizes[2] <= 1.15 * sizes[0] + 8 * MIB, sizes


@pytest.mark.parametrize(
    "kind", ["malformed_xml", "teapot", "empty_body", "error_xml_garbage", "truncate", "reset", "wrong_etag"]
)
def test_c11_answers_that_make_no_sense(mount_factory: MountFactory, server: FakeS3, kind: str) -> None:
    """Single calls may fail, with an error that says so; the mount lives and nothing wrong is believed."""
    chance = random.Random(11)
    for i in range(10):
        server.bucket.put(f"d/f{i}", b"%d" % i * 5000)
    mounted = mount_factory(**on(server, "--ttl", "0.2", "--negative-ttl", "0.1", "--store-timeout", "1"))
    server.fault(kind, probability=0.5)
    for _ in range(60):
        i = chance.randrange(10)
        path = mounted.path / "d" / f"f{i}"
        kinds = [
            lambda path=path: path.stat(),
            lambda path=path, i=i: _same(path.read_bytes(), b"%d" % i * 5000),
            lambda path=path: os.listdir(path.parent),
            lambda: os.stat(mounted.path / "d" / "missing"),
            lambda i=i: (mounted.path / f"new{i}").write_bytes(b"new"),
        ]
        code = errno_of(chance.choice(kinds))
        assert code in (0, errno.ENOENT, errno.ESTALE, *STORE_ERRORS), errno.errorcode[code]
    server.clear_faults()
    wait_until(lambda: errno_of(lambda: os.stat(mounted.path / "d" / "f1")) == 0, "recovery", 30)
    for i in range(10):
        wait_until(lambda i=i: errno_of((mounted.path / "d" / f"f{i}").read_bytes) == 0, "recovery", 30)
        assert (mounted.path / "d" / f"f{i}").read_bytes() == b"%d" % i * 5000
    mounted.flush()
    assert all(body == b"new" for key, body in objects(server).items() if key.startswith("new"))


def _same(found: bytes, expected: bytes) -> None:
    assert found == expected


def test_c14_number_of_parts_stays_within_the_limit(mount_factory: MountFactory, server: FakeS3) -> None:
    """No part but the last below the least size, none over the limit, numbers without holes."""
    mounted = mount_factory(**on(server, "--part-size", "5M"))
    data = os.urandom(33 * MIB + 5)
    (mounted.path / "f").write_bytes(data)
    mounted.flush()
    assert server.bucket.body("f") == data
    assert 2 <= server.count("upload_part") <= 7
    assert server.bucket.uploads == {}


def test_c16_expired_token_until_the_file_is_rewritten(
    mount_factory: MountFactory, server: FakeS3, base_dir: Path
) -> None:
    credentials = base_dir / "credentials"

    def write_token(token: str) -> None:
        keys = server.environment
        credentials.write_text(
            f"[default]\naws_access_key_id={keys['AWS_ACCESS_KEY_ID']}\n"
            f"aws_secret_access_key={keys['AWS_SECRET_ACCESS_KEY']}\naws_session_token={token}\n"
        )

    write_token("first")
    server.required_token = "first"
    for i in range(4):
        server.bucket.put(f"f{i}", b"%d" % i * 200_000)
    settings = on(server, "--store-timeout", "20", AWS_SHARED_CREDENTIALS_FILE=str(credentials))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        del settings["environment"][name]
    mounted = mount_factory(**settings)
    assert (mounted.path / "f0").read_bytes() == b"0" * 200_000
    server.required_token = "second"
    write_token("second")
    for i in range(1, 4):
        assert (mounted.path / f"f{i}").read_bytes() == b"%d" % i * 200_000
    (mounted.path / "new").write_bytes(b"new")
    mounted.flush()
    assert server.bucket.body("new") == b"new"


def test_c16_clock_that_is_wrong(mount_factory: MountFactory, server: FakeS3) -> None:
    """Twenty minutes apart: corrected from the server's date, or refused with a message about the clock."""
    server.clock_ahead_s = 20 * 60
    server.bucket.put("f", b"content")
    mounted = mount_factory.prepare(**on(server, "--store-timeout", "3"))
    try:
        mounted.start()
    except AssertionError as refused:
        assert "clock" in str(refused).lower()
        return
    assert (mounted.path / "f").read_bytes() == b"content"
    (mounted.path / "g").write_bytes(b"new")
    mounted.flush()
    assert server.bucket.body("g") == b"new"


def test_c17_server_that_knows_no_new_checksums(mount_factory: MountFactory, server: FakeS3) -> None:
    """Content-MD5 for batch deletes, no trailers, no aws-chunked bodies."""
    server.wants_content_md5 = True
    mounted = mount_factory(**on(server, "--part-size", "5M"))
    (mounted.path / "small").write_bytes(b"1" * 1024)
    (mounted.path / "big").write_bytes(os.urandom(20 * MIB))
    for i in range(10):
        (mounted.path / f"f{i}").write_bytes(b"%d" % i)
    mounted.flush()
    for i in range(10):
        os.unlink(mounted.path / f"f{i}")
    mounted.flush()
    assert set(objects(server)) == {"small", "big"}
    for request in server.requests:
        assert "aws-chunked" not in request.headers.get("content-encoding", "")
        assert "x-amz-trailer" not in request.headers


@pytest.mark.parametrize("kind", ["truncate", "whole_object"])
def test_c18_shards_read_over_a_bad_link(
    mount_factory: MountFactory, server: FakeS3, base_dir: Path, kind: str
) -> None:
    digests = {}
    for i in range(3):
        size = 9 * MIB + i
        server.bucket.add_generated(f"shard{i}.tar", size)
        digests[f"shard{i}.tar"] = hashlib.sha256(generated_bytes(0, size)).hexdigest()
    mounted = mount_factory(**on(server))
    server.fault(kind, operation="get", probability=0.4)
    for name, digest in digests.items():
        with open(mounted.path / name, "rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == digest
    mounted.remount()
    server.clear_faults()
    server.forget_requests()
    for name, digest in digests.items():
        with open(mounted.path / name, "rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == digest
    assert server.count("get") == 0


def test_c19_server_that_goes_away_and_comes_back(mount_factory: MountFactory, server: FakeS3) -> None:
    for name in ("cached", "cold"):
        server.bucket.put(name, name.encode() * 100_000)
    mounted = mount_factory(**on(server, "--store-timeout", "2", "--upload-delay", "0"))
    assert (mounted.path / "cached").read_bytes() == b"cached" * 100_000
    cold = os.open(mounted.path / "cold", os.O_RDONLY)
    log = os.open(mounted.path / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    server.stop()
    for i in range(20):
        os.write(log, b"line %d\n" % i)
        (mounted.path / f"new{i}").write_bytes(b"%d" % i)
    assert (mounted.path / "cached").read_bytes() == b"cached" * 100_000
    assert errno_of(lambda: os.pread(cold, 10, 300_000)) in STORE_ERRORS
    server.start()
    assert os.pread(cold, 400_000, 0) == b"cold" * 100_000
    os.write(log, b"end\n")
    os.close(log)
    os.close(cold)
    mounted.flush()
    assert server.bucket.body("log") == b"".join(b"line %d\n" % i for i in range(20)) + b"end\n"
    assert {f"new{i}": b"%d" % i for i in range(20)}.items() <= objects(server).items()


@pytest.mark.parametrize("command", [["ls", "-U"], ["ls", "-l"]], ids=" ".join)
def test_c20_listing_costs_one_request_per_thousand(
    mount_factory: MountFactory, server: FakeS3, command: list[str]
) -> None:
    count = 5000
    for i in range(count):
        server.bucket.add_generated(f"p/f{i:05}", 100)
    mounted = mount_factory(**on(server))
    server.forget_requests()
    for _ in range(2):
        listed = subprocess.run(command, cwd=mounted.path / "p", capture_output=True, check=True)
        assert len(listed.stdout.splitlines()) in (count, count + 1)
    assert server.count("list") <= 5 + 2
    assert server.count("head") == 0


def test_c20_deep_open_costs_two_requests(mount_factory: MountFactory, server: FakeS3) -> None:
    for i in range(2000):
        server.bucket.put(f"f{i}", b"")
    server.bucket.put("a/b/c/d/e/f", b"deep")
    mounted = mount_factory(**on(server))
    server.forget_requests()
    assert (mounted.path / "a" / "b" / "c" / "d" / "e" / "f").read_bytes() == b"deep"
    assert server.count("get") == 1
    assert server.count() - server.count("get") <= 2


@dataclass
class Overlap(FakeS3):
    """Notes how many GETs were waited for at once."""

    waiting: int = 0
    most: int = 0
    counting: threading.Lock = field(default_factory=threading.Lock)

    def strike(self, operation: str, key: str) -> Fault | None:
        if operation == "get":
            with self.counting:
                self.waiting += 1
                self.most = max(self.most, self.waiting)
            time.sleep(0.05)  # the first byte takes a while, as over a network
            with self.counting:
                self.waiting -= 1
        return super().strike(operation, key)


def test_c23_one_stream_keeps_many_requests_in_flight(mount_factory: MountFactory) -> None:
    server = Overlap()
    server.start()
    try:
        size = 256 * MIB
        server.bucket.add_generated("f", size)
        mounted = mount_factory(**on(server))
        with open(mounted.path / "f", "rb", buffering=0) as file:
            total = 0
            while chunk := file.read(MIB):
                total += len(chunk)
        assert total == size
        assert server.most >= 8
        assert server.sent_bytes() <= 1.01 * size
    finally:
        server.stop()


def test_server_without_conditional_requests(mount_factory: MountFactory, server: FakeS3) -> None:
    """An old server that ignores If-Match: a version is still never mixed with another."""
    server.obeys_conditions = False
    server.bucket.put("f", b"o" * 3 * MIB)
    mounted = mount_factory(**on(server, "--ttl", "0.5", "--read-ahead", "256K"))
    handle = os.open(mounted.path / "f", os.O_RDONLY)
    assert os.pread(handle, 4096, 0) == b"o" * 4096
    server.bucket.put("f", b"n" * 3 * MIB)
    try:
        assert set(os.pread(handle, 3 * MIB, 0)) == {ord("o")}
    except OSError as error:
        assert error.errno == errno.ESTALE
    os.close(handle)
    (mounted.path / "g").write_bytes(b"new")
    mounted.flush()
    assert server.bucket.body("g") == b"new"


def test_lost_answer_makes_no_conflict(mount_factory: MountFactory, server: FakeS3) -> None:
    mounted: Mounted = mount_factory(**on(server, "--upload-delay", "0", "--part-size", "5M"))
    server.fault("lost_answer", operation="put", count=2)
    server.fault("lost_answer", operation="complete_multipart", count=1)
    for i in range(4):
        (mounted.path / "f").write_bytes(b"%d" % i * 1000)
        (mounted.path / "big").write_bytes(b"%d" % i * (11 * MIB))
        mounted.flush()
    assert objects(server) == {"f": b"3" * 1000, "big": b"3" * (11 * MIB)}
    assert sorted(os.listdir(mounted.path)) == ["big", "f"]
