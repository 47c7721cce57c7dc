"""What S3 servers do to a client, one by one, with a fake server. CASES C04, C14 to C18."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.fake_bucket import generated_bytes
from tests.support.fake_s3 import ACCESS_KEY, BUCKET, SECRET_KEY, FakeS3, fake_s3
from tests.support.stores import MIB, environment, fake_store
from tests.support.streams import buffered, streamed
from tierfs.errors import (
    ClockSkewed,
    CredentialsExpired,
    ObjectNotFound,
    PreconditionFailed,
    ShortBody,
    StoreAccessDenied,
    StoreConfigError,
    StoreThrottled,
    StoreTimeout,
    StoreUnavailable,
    StoreUnsupported,
    TransientStoreError,
)
from tierfs.store.base import Condition, part_size_for
from tierfs.store.retry import RetryingStore
from tierfs.store.s3 import S3Store

BODY = os.urandom(300_000)
BIG = 5 * MIB  # read through boto3, not through the fast path
ABSENT = Condition(if_absent=True)


@pytest.fixture(scope="module")
def one_server() -> Iterator[FakeS3]:
    with fake_s3() as server:
        yield server


@pytest.fixture(scope="module")
def one_store(one_server: FakeS3) -> Iterator[S3Store]:
    with fake_store(one_server) as store:
        yield store


@pytest.fixture
def server(one_server: FakeS3) -> FakeS3:
    """As new: with two objects, and nothing wrong."""
    one_server.reset()
    one_server.bucket.put("k", BODY)
    one_server.bucket.add_generated("big", 40 * MIB)
    return one_server


@pytest.fixture
def store(server: FakeS3, one_store: S3Store) -> S3Store:
    """Shared, since making one takes 0.1 s: for tests after which it knows nothing new of the server."""
    return one_store


@pytest.fixture
def fresh_store(server: FakeS3) -> Iterator[S3Store]:
    with fake_store(server) as store:
        server.forget_requests()
        yield store


def retrying(store: S3Store, timeout_s: float = 20.0) -> RetryingStore:
    return RetryingStore(store, timeout_s=timeout_s, sleep=lambda _: None)


READS: dict[str, Callable[[S3Store], bytes]] = {
    "fast": lambda store: store.get_range("k", 1000, 200_000),
    "boto3": lambda store: store.get_range("big", 1000, BIG),
    "socket": lambda store: streamed(store, "big", 1000, BIG),
    "buffer": lambda store: buffered(store, "big", 1000, BIG),
}
EXPECTED = {way: BODY[1000:201_000] if way == "fast" else generated_bytes(1000, BIG) for way in READS}
WAYS = pytest.mark.parametrize("way", list(READS))


def test_reads_take_both_ways(server: FakeS3, store: S3Store) -> None:
    for way, read in READS.items():
        assert read(store) == EXPECTED[way]
    agents = [one.headers.get("user-agent", "") for one in server.requests if one.operation == "get"]
    assert ["Boto3" in agent for agent in agents] == [False, True, False, False]


def test_a_connection_is_used_again_after_its_body_went_into_a_file(server: FakeS3, fresh_store: S3Store) -> None:
    for _ in range(5):
        assert READS["socket"](fresh_store) == EXPECTED["socket"]
        assert fresh_store.head("k").size_bytes == len(BODY)
    assert len({one.client for one in server.requests if one.operation == "get"}) == 1


def test_a_connection_is_not_used_again_if_its_body_was_left(server: FakeS3, fresh_store: S3Store) -> None:
    for _ in range(3):
        assert fresh_store.stream("big", 0, BIG, lambda body: body.readinto(memoryview(bytearray(10)))) == 10
        assert READS["socket"](fresh_store) == EXPECTED["socket"]


@WAYS
def test_a_truncated_body_is_never_returned(server: FakeS3, store: S3Store, way: str) -> None:
    """CASES C18."""
    server.fault("truncate", operation="get", count=1)
    with pytest.raises(ShortBody):
        READS[way](store)
    server.fault("truncate", operation="get", count=2)
    assert READS[way](retrying(store)) == EXPECTED[way]  # type: ignore[arg-type]


@WAYS
def test_a_whole_object_in_answer_to_a_range(server: FakeS3, fresh_store: S3Store, way: str) -> None:
    """CASES C18: 200 with the whole object; the bytes asked for are cut out of it."""
    server.fault("whole_object", operation="get")
    for _ in range(5):
        assert READS[way](fresh_store) == EXPECTED[way]
    assert server.count("get") == (5 + 3 if way == "fast" else 5)


def test_a_whole_huge_object_is_refused(server: FakeS3, fresh_store: S3Store) -> None:
    server.bucket.add_generated("huge", 500 * MIB)
    server.fault("whole_object", operation="get")
    with pytest.raises(StoreUnsupported, match="whole object"):
        fresh_store.get_range("huge", 0, 100)
    assert server.sent_bytes() < 64 * MIB


@WAYS
def test_a_server_that_ignores_if_match_is_found_out(server: FakeS3, store: S3Store, way: str) -> None:
    server.obeys_conditions = False
    key = "k" if way == "fast" else "big"
    with pytest.raises(PreconditionFailed):
        read = {"socket": streamed, "buffer": buffered}.get(way, S3Store.get_range)
        read(store, key, 0, 100 if way == "fast" else BIG, if_match="0" * 32)


@WAYS
@pytest.mark.parametrize(
    ("kind", "error"),
    [("slow_down", StoreThrottled), ("internal_error", StoreUnavailable), ("reset", StoreUnavailable),
     ("teapot", StoreUnavailable), ("error_xml_garbage", StoreUnavailable), ("malformed_xml", TransientStoreError),
     ("empty_body", TransientStoreError), ("access_denied", StoreAccessDenied)],
)
def test_read_errors(server: FakeS3, store: S3Store, way: str, kind: str, error: type[Exception]) -> None:
    """CASES C11: every kind of nonsense is an error of ours, and the next request works."""
    # The fast path leaves a success that is none to boto3, which asks once more.
    server.fault(kind, operation="get", count=2 if way == "fast" and error is TransientStoreError else 1)
    with pytest.raises(error, match=r"k|big"):
        READS[way](store)
    # A connection that the server is about to close may be tried first.
    assert READS[way](retrying(store)) == EXPECTED[way]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["slow_down", "internal_error", "reset", "teapot", "error_xml_garbage",
                                  "malformed_xml", "empty_body"])
@pytest.mark.parametrize("operation", ["list", "head", "put", "copy", "delete", "delete_many",
                                       "start_multipart", "upload_part", "copy_part", "complete_multipart",
                                       "abort_multipart", "list_uploads"])
def test_no_answer_crashes_an_operation(server: FakeS3, store: S3Store, operation: str, kind: str) -> None:
    """An answer that is no success is transient; an empty success may be believed where it says enough."""
    source = store.head("k")
    upload = store.start_multipart("up")
    part = store.upload_part("up", upload, 1, b"x")
    server.fault(kind, operation=operation, count=1)
    calls: dict[str, Callable[[], object]] = {
        "list": lambda: store.list_page(""),
        "head": lambda: store.head("k"),
        "put": lambda: store.put("n", b"1"),
        "copy": lambda: store.copy(source, "c"),
        "delete": lambda: store.delete("n"),
        "delete_many": lambda: store.delete_many(["n"]),
        "start_multipart": lambda: store.start_multipart("n"),
        "upload_part": lambda: store.upload_part("up", upload, 2, b"y"),
        "copy_part": lambda: store.copy_part("up", upload, 3, source, 0, 10),
        "complete_multipart": lambda: store.complete_multipart("up", upload, [part]),
        "abort_multipart": lambda: store.abort_multipart("up", upload),
        "list_uploads": lambda: store.list_unfinished_uploads(""),
    }
    if kind == "empty_body" and operation in ("delete", "abort_multipart", "delete_many"):
        calls[operation]()  # nothing says that it failed
    else:
        with pytest.raises(TransientStoreError):
            calls[operation]()


@WAYS
def test_idle_hangs_are_bounded(server: FakeS3, way: str) -> None:
    with fake_store(server, read_timeout_s=0.5) as store:
        server.fault("hang", operation="get", seconds=8)
        began = time.monotonic()
        with pytest.raises((StoreTimeout, StoreUnavailable)):
            READS[way](store)
        assert time.monotonic() - began < 7


def test_a_refused_connection(server: FakeS3, store: S3Store) -> None:
    server.stop()
    for call in (lambda: store.list_page(""), lambda: READS["fast"](store), lambda: READS["boto3"](store)):
        with pytest.raises(StoreUnavailable):
            call()
    server.start()
    assert READS["fast"](retrying(store)) == EXPECTED["fast"]  # type: ignore[arg-type]


def test_retry_after_is_passed_on(server: FakeS3, store: S3Store) -> None:
    server.fault("slow_down", operation="head", count=1, seconds=7)
    server.fault("slow_down", operation="list", count=1, seconds=3)
    with pytest.raises(StoreThrottled) as caught:
        store.list_page("")
    assert caught.value.retry_after_s == 3


def test_missing_object_and_missing_bucket(server: FakeS3, store: S3Store) -> None:
    with pytest.raises(ObjectNotFound):
        store.get_range("absent", 0, 10)
    with fake_store(server) as other:
        other._bucket = "no-such-bucket"
        with pytest.raises(StoreConfigError, match="NoSuchBucket"):
            other.check()


def test_expired_token_is_refreshed_once(server: FakeS3, tmp_path: Path) -> None:
    """CASES C16: ExpiredToken until the credentials file is rewritten."""
    credentials = tmp_path / "credentials"

    def write(token: str) -> None:
        credentials.write_text(f"[default]\naws_access_key_id={ACCESS_KEY}\n"
                               f"aws_secret_access_key={SECRET_KEY}\naws_session_token={token}\n")

    write("old")
    server.required_token = "old"
    names = {**dict.fromkeys(server.environment, None), "AWS_SHARED_CREDENTIALS_FILE": str(credentials),
             "AWS_CONFIG_FILE": str(tmp_path / "none"), "AWS_EC2_METADATA_DISABLED": "true"}
    with environment(names):
        store = S3Store(BUCKET, endpoint_url=server.endpoint_url, region="us-east-1")
        wrapped = retrying(store)
        try:
            assert wrapped.head("k").size_bytes == len(BODY)
            server.required_token = "new"
            write("new")
            server.forget_requests()
            for call in (lambda: wrapped.get_range("k", 0, 10), lambda: wrapped.head("k"),
                         lambda: wrapped.get_range("big", 0, BIG)):
                call()
            assert server.count("get", key="k") == 2
            assert wrapped.retries == 1
            server.required_token = "never"
            with pytest.raises(CredentialsExpired):
                store.head("k")
            with pytest.raises(CredentialsExpired):
                store.get_range("k", 0, 10)
        finally:
            wrapped.close()


@pytest.mark.parametrize("ahead_s", [20 * 60, -20 * 60])
def test_clock_skew_names_the_clock(server: FakeS3, store: S3Store, ahead_s: float) -> None:
    """CASES C16."""
    server.clock_ahead_s = ahead_s
    word = "behind" if ahead_s > 0 else "ahead of"
    with pytest.raises(ClockSkewed, match=rf"clock is 1[12]\d\d s {word}"):
        store.list_page("")
    with pytest.raises(ClockSkewed, match="clock"):
        store.head("k")
    with pytest.raises(ClockSkewed, match="clock"):
        READS["fast"](store)


def test_part_size_grows_with_the_object() -> None:
    """CASES C14: any file up to 5 TiB fits in 10,000 parts."""
    for size in (0, 1, 80 * 10**9, 5 * 1024**4):
        part = part_size_for(size, 8 * MIB)
        assert part >= 8 * MIB
        assert -(-size // part) <= 10_000
    assert part_size_for(5 * 1024**4, 8 * MIB) <= 5 * 1024**3


def test_copies_above_the_limit_are_made_in_parts(server: FakeS3) -> None:
    """CASES C15."""
    with fake_store(server, max_single_copy_bytes=10 * MIB) as store:
        data = generated_bytes(0, 23 * MIB)
        server.bucket.put("large", data, {"mode": "1"}, {"Content-Type": "text/x"})
        info = store.copy(store.head("large"), "copied")
        assert server.count("copy") == 0
        assert server.count("copy_part") == 3
        assert server.bucket.body("copied") == data
        copied = server.bucket.find("copied")
        assert copied.metadata == {"mode": "1"}
        assert copied.headers["Content-Type"] == "text/x"
        assert (info.size_bytes, info.etag) == (len(data), copied.etag)
        server.fault("internal_error", operation="copy_part", count=1)
        with pytest.raises(StoreUnavailable):
            store.copy(store.head("large"), "again")
        assert not server.bucket.uploads


def test_batch_delete_where_content_md5_is_wanted(server: FakeS3, store: S3Store) -> None:
    """CASES C17."""
    server.wants_content_md5 = True
    for n in range(5):
        server.bucket.put(f"d/{n}", b"")
    assert store.delete_many([f"d/{n}" for n in range(5)] + ["d/absent", "d/\x01"]) == []
    assert server.count("delete_many") == 1
    assert server.count("delete") == 1  # XML has no room for a control character


def test_batch_delete_falls_back_to_single_ones(server: FakeS3, fresh_store: S3Store) -> None:
    server.fault("not_implemented", operation="delete_many")
    for n in range(5):
        server.bucket.put(f"d/{n}", b"")
    assert fresh_store.delete_many([f"d/{n}" for n in range(5)]) == []
    assert server.bucket.keys() == ["big", "k"]
    assert server.count("delete") == 5


def test_the_probe_of_conditional_deletes_is_sent_once(server: FakeS3, fresh_store: S3Store) -> None:
    etags = {f"d/{n}": server.bucket.put(f"d/{n}", b"%d" % n).etag for n in range(4)}
    assert fresh_store.delete_many(["d/0"]) == []
    assert server.count("delete_many") == 1  # without an ETag nothing has to be known
    assert fresh_store.delete_many(["d/1", "d/2"], etags) == []
    fresh_store.delete("d/3", if_match=etags["d/3"])
    assert server.count("delete_many") == 3
    assert fresh_store.capabilities.conditional_delete
    assert server.bucket.keys() == ["big", "k"]


def test_a_server_that_ignores_conditions_of_deletions(server: FakeS3, fresh_store: S3Store) -> None:
    """Batches take what is there, as they would with the ETags; single deletions are checked by hand."""
    server.obeys_conditions = False
    server.bucket.put("d/a", b"theirs")
    assert fresh_store.delete_many(["d/a"], {"d/a": "0" * 32}) == []
    assert not fresh_store.capabilities.conditional_delete
    assert "d/a" not in server.bucket
    server.bucket.put("d/a", b"theirs")
    with pytest.raises(PreconditionFailed):
        fresh_store.delete("d/a", if_match="0" * 32)
    fresh_store.delete("d/a", if_match=server.bucket.find("d/a").etag)
    assert server.bucket.keys() == ["big", "k"]


def test_a_server_that_refuses_etags_in_a_batch(server: FakeS3, fresh_store: S3Store) -> None:
    server.fault("not_implemented", operation="delete_many", count=1)
    server.bucket.put("d/a", b"theirs")
    assert fresh_store.delete_many(["d/a", "d/b"], {"d/a": "0" * 32}) == []
    assert not fresh_store.capabilities.conditional_delete
    assert server.count("delete_many") == 2
    assert server.count("delete") == 0


def test_conditional_deletes_without_batches(server: FakeS3, fresh_store: S3Store) -> None:
    server.fault("not_implemented", operation="delete_many")
    server.bucket.put("d/a", b"theirs")
    ours = server.bucket.put("d/b", b"ours")
    failures = fresh_store.delete_many(["d/a", "d/b", "d/c"], {"d/a": ours.etag, "d/b": ours.etag, "d/c": "0"})
    assert [(failure.key, failure.replaced) for failure in failures] == [("d/a", True)]
    assert server.bucket.keys() == ["big", "d/a", "k"]


def test_an_accident_at_the_probe_says_nothing(server: FakeS3, fresh_store: S3Store) -> None:
    server.bucket.put("d/a", b"theirs")
    server.fault("internal_error", operation="delete_many", count=1)
    with pytest.raises(StoreUnavailable):
        fresh_store.delete_many(["d/a"], {"d/a": "0" * 32})
    (failure,) = fresh_store.delete_many(["d/a"], {"d/a": "0" * 32})
    assert failure.replaced


def test_a_server_that_misjudges_etags(server: FakeS3, fresh_store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says of every object that it is another version; a removed file would come back for ever."""
    ours = server.bucket.put("d/a", b"ours")
    theirs = server.bucket.put("d/b", b"theirs")
    etags = {"d/a": ours.etag, "d/b": "0" * 32}
    check = server.bucket.check
    monkeypatch.setattr(server.bucket, "check", lambda key, *, if_match, if_none_match: check(
        key, if_match=if_match and if_match + "~", if_none_match=if_none_match))
    failures = fresh_store.delete_many(["d/a", "d/b"], etags)
    assert [(failure.key, failure.replaced) for failure in failures] == [("d/b", True)]
    assert server.bucket.keys() == ["big", "d/b", "k"]
    assert not fresh_store.capabilities.conditional_delete
    fresh_store.delete("d/b", if_match=theirs.etag)
    assert server.bucket.keys() == ["big", "k"]


def test_a_deletion_repeated_after_a_lost_answer_spares_what_came_since(server: FakeS3, store: S3Store) -> None:
    ours = server.bucket.put("d/a", b"ours")
    store.delete_many(["d/warm"], {"d/warm": "0"})  # the probe

    def put_theirs(_: float) -> None:
        assert "d/a" not in server.bucket
        server.bucket.put("d/a", b"theirs")

    wrapped = RetryingStore(store, timeout_s=20, sleep=put_theirs)
    server.fault("lost_answer", operation="delete_many", count=1)
    (failure,) = wrapped.delete_many(["d/a"], {"d/a": ours.etag})
    assert failure.replaced
    assert server.bucket.body("d/a") == b"theirs"


def test_no_checksum_trailers_are_sent(server: FakeS3, store: S3Store) -> None:
    """CASES C17: servers that are not Amazon's refuse them."""
    store.put("n", b"1" * 1000)
    store.upload_part("n", store.start_multipart("n"), 1, b"x" * 1000)
    for one in server.requests:
        assert "x-amz-trailer" not in one.headers
        assert "aws-chunked" not in one.headers.get("content-encoding", "")
        if one.operation in ("put", "upload_part"):
            assert one.headers["content-length"] == "1000"
            assert len(one.headers["x-amz-content-sha256"]) == 64  # the body is signed


@pytest.mark.parametrize("space_as_percent", [False, True])
def test_keys_are_decoded_once_in_both_dialects(server: FakeS3, fresh_store: S3Store, space_as_percent: bool) -> None:
    """CASES C04."""
    server.space_as_percent = space_as_percent
    keys = {"a b", "a+b", "a%20b", "a%2Bb", "100%.csv", "folder#1#/x", "한글/x", "\u00e9", "e\u0301"}
    for key in keys:
        server.bucket.put("names/" + key, b"")
    page = fresh_store.list_page("names/", recursive=True)
    assert {info.key.removeprefix("names/") for info in page.objects} == keys


def test_strange_keys_of_others_are_listed_and_read(server: FakeS3, store: S3Store) -> None:
    for key in ("a//b", "./x", "../y", "/lead", "tail/", "z/./q"):
        server.bucket.put(key, key.encode())
        assert store.get_range(key, 0, len(key), if_match=store.head(key).etag) == key.encode()
    listed = {info.key for info in store.list_page("", recursive=True).objects}
    assert {"a//b", "./x", "../y", "/lead", "tail/", "z/./q"} <= listed
    assert "a//" in store.list_page("a/").prefixes


def test_a_server_that_ignores_the_delimiter(server: FakeS3, store: S3Store) -> None:
    server.obeys_delimiter = False
    for key in ("d/1", "d/e/2", "d/e/3"):
        server.bucket.put(key, b"")
    page = store.list_page("d/")
    assert [info.key for info in page.objects] == ["d/1"]
    assert list(page.prefixes) == ["d/e/"]


def test_a_server_that_ignores_conditions_is_found_out(server: FakeS3, fresh_store: S3Store) -> None:
    server.obeys_conditions = False
    server.bucket.put("taken", b"mine")
    assert fresh_store.capabilities.conditional_put
    with pytest.raises(PreconditionFailed):
        fresh_store.put("taken", b"theirs", condition=ABSENT)
    assert not fresh_store.capabilities.conditional_put
    assert server.bucket.body("taken") == b"mine"
    fresh_store.put("free", b"1", condition=ABSENT)
    with pytest.raises(PreconditionFailed):
        fresh_store.copy(fresh_store.head("k"), "taken", condition=ABSENT)
    assert not fresh_store.capabilities.conditional_copy
    assert ".tierfs" not in str(server.bucket.keys())


def test_a_server_without_conditional_writes(server: FakeS3, fresh_store: S3Store) -> None:
    server.fault("not_implemented", operation="put", count=1)
    fresh_store.put("free", b"1", condition=ABSENT)
    assert not fresh_store.capabilities.conditional_put


def test_the_probe_leaves_nothing_and_is_sent_once(server: FakeS3, fresh_store: S3Store) -> None:
    for n in range(3):
        fresh_store.put(f"c/{n}", b"1", condition=ABSENT)
    assert server.count("put", key="*.tierfs/probe-*") == 1
    assert ".tierfs" not in str(server.bucket.keys())


def test_headers_survive_a_change_of_metadata(server: FakeS3, store: S3Store) -> None:
    server.bucket.put("page", b"<p>", {"mode": "1"}, {"Content-Type": "text/html", "Cache-Control": "no-store"})
    store.copy(store.head("page"), "page", metadata={"mode": "2"})
    found = server.bucket.find("page")
    assert dict(found.metadata) == {"mode": "2"}
    assert (found.headers["Content-Type"], found.headers["Cache-Control"]) == ("text/html", "no-store")


def test_metadata_must_be_ascii(store: S3Store) -> None:
    with pytest.raises(StoreConfigError):
        store.put("k2", b"", metadata={"name": "é"})


def test_lost_answers_of_conditional_writes(server: FakeS3, store: S3Store) -> None:
    """A put that was carried out before its answer was lost meets its own success."""
    wrapped = retrying(store)
    store.put("warm", b"", condition=ABSENT)  # the probe
    server.fault("lost_answer", operation="put", key="new", count=1)
    info = wrapped.put("new", b"mine", metadata={"mode": "1"}, condition=ABSENT)
    assert server.bucket.find("new").etag == info.etag
    server.fault("lost_answer", operation="put", key="new", count=1)
    info = wrapped.put("new", b"newer", condition=Condition(if_match=info.etag))
    assert server.bucket.body("new") == b"newer"
    upload = wrapped.start_multipart("multi", metadata={"mode": "1"})
    part = wrapped.upload_part("multi", upload, 1, b"data")
    server.fault("lost_answer", operation="complete_multipart", count=1)
    info = wrapped.complete_multipart("multi", upload, [part], condition=ABSENT)
    assert server.bucket.find("multi").etag == info.etag
    server.fault("lost_answer", operation="copy", count=1)
    wrapped.copy(wrapped.head("new"), "new", metadata={"mode": "9"})
    assert server.bucket.find("new").metadata == {"mode": "9"}


def test_another_writer_is_not_mistaken_for_oneself(server: FakeS3, store: S3Store) -> None:
    wrapped = retrying(store)
    server.bucket.put("new", b"them")
    server.fault("reset", operation="put", key="new", count=1)
    with pytest.raises(PreconditionFailed):
        wrapped.put("new", b"mine", condition=ABSENT)


def test_a_storm_is_weathered(server: FakeS3, store: S3Store) -> None:
    wrapped = retrying(store)
    server.fault("slow_down", probability=0.3)
    server.fault("truncate", operation="get", probability=0.2)
    server.fault("reset", probability=0.1)

    def work(n: int) -> bool:
        wrapped.put(f"storm/{n}", b"%d" % n)
        return wrapped.get_range("k", n, 1000) == BODY[n:n + 1000]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(60)))
    server.clear_faults()
    assert len(store.list_page("storm/").objects) == 60
    assert wrapped.retries > 0


def test_credentials_stay_out_of_everything(server: FakeS3, store: S3Store) -> None:
    texts = [repr(store), store.url, repr(store._connection), repr(RetryingStore(store, timeout_s=1))]
    server.fault("access_denied")
    for call in (lambda: store.head("k"), lambda: store.get_range("k", 0, 1), lambda: store.put("k", b"")):
        with pytest.raises(StoreAccessDenied) as caught:
            call()
        texts.append(repr(caught.value))
    assert not any(SECRET_KEY in text or "Signature=" in text for text in texts)


def test_no_credentials_at_all(server: FakeS3, tmp_path: Path) -> None:
    names = {**dict.fromkeys(server.environment, None), "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
             "AWS_CONFIG_FILE": str(tmp_path / "none"), "AWS_EC2_METADATA_DISABLED": "true"}
    with environment(names):
        store = S3Store(BUCKET, endpoint_url=server.endpoint_url)
        try:
            with pytest.raises(StoreAccessDenied, match="no credentials were found"):
                store.check()
        finally:
            store.close()


def test_requests_are_counted(server: FakeS3, fresh_store: S3Store) -> None:
    before = dict(fresh_store.counts.by_operation)
    fresh_store.put("k2", b"12345")
    fresh_store.get_range("k", 0, 1000)
    fresh_store.get_range("big", 0, BIG)
    fresh_store.list_page("")
    counts = fresh_store.counts
    added = {name: number - before.get(name, 0) for name, number in counts.by_operation.items()}
    assert added == {"put": 1, "get": 2, "list": 1}
    assert (counts.bytes_written, counts.bytes_read) == (5, 1000 + BIG)
    assert {name: server.count(name) for name in added} == added


def test_check_says_where_and_what_to_do(server: FakeS3, store: S3Store) -> None:
    server.fault("access_denied", operation="list")
    with pytest.raises(StoreAccessDenied, match=rf"{BUCKET} at {server.endpoint_url}.*check the credentials"):
        store.check()
    server.stop()
    try:
        with pytest.raises(StoreUnavailable, match="check the endpoint"):
            store.check()
    finally:
        server.start()


def test_a_fork_has_connections_of_its_own(server: FakeS3, store: S3Store) -> None:
    assert READS["fast"](store) == EXPECTED["fast"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads is what is tried here
        child = os.fork()
    if child == 0:
        right = all(READS[way](store) == EXPECTED[way] for way in READS)
        os._exit(0 if right else 1)
    assert READS["boto3"](store) == EXPECTED["boto3"]
    assert os.waitpid(child, 0)[1] == 0
