"""Requests that are signed here: the same signature as botocore's, and when there is none."""

from __future__ import annotations

import calendar
import time

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tierfs.store.counting import RequestMeter
from tierfs.store.prepared import PreparedGet
from tierfs.store.s3_prepared import KEPT_S, PreparedGets

ENDPOINT = "http://store.example:8333/below"


class Clock:
    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def gets(credentials: Credentials | None, clock: Clock) -> PreparedGets:
    return PreparedGets(
        "bucket",
        endpoint_url=ENDPOINT,
        region="eu-central-1",
        credentials=None if credentials is None else credentials.get_frozen_credentials,
        connect_timeout_s=5.0,
        read_timeout_s=15.0,
        now_s=clock,
        monotonic_s=clock,
    )


def lines_of(found: PreparedGets, key: str, version_id: str | None = None) -> list[str]:
    request: PreparedGet | None = found.prepare(
        key, 100, 50, version_id=version_id, etag="abc", meter=RequestMeter()
    )
    assert request is not None
    assert (request.host, request.port) == ("store.example", 8333)
    assert "Signature" not in repr(request)
    head, end = request.message.split(b"\r\n\r\n")
    assert end == b""
    return head.decode().split("\r\n")


@pytest.mark.parametrize("token", [None, "to/ken=="])
@pytest.mark.parametrize("version_id", [None, "v/1+=~"])
@pytest.mark.parametrize("key", ["a/b.bin", "sp ace+plus&?#%41", "\u00fcml\u00e4ut/~x", "dots/../."])
def test_the_signature_is_the_one_that_botocore_makes(
    key: str, version_id: str | None, token: str | None
) -> None:
    credentials = Credentials("AKIA", "secret", token)
    clock = Clock(0.0)
    found = gets(credentials, clock)
    found.renew()
    _, target, version = lines_of(found, key, version_id)[0].split(" ")
    assert version == "HTTP/1.1"
    theirs = AWSRequest("GET", f"http://store.example:8333{target}")
    S3SigV4Auth(credentials, "s3", "eu-central-1").add_auth(theirs)
    clock.now_s = calendar.timegm(time.strptime(theirs.headers["X-Amz-Date"], "%Y%m%dT%H%M%SZ"))
    found.renew()
    ours = dict(line.split(": ", 1) for line in lines_of(found, key, version_id)[1:])
    assert ours["Authorization"] == theirs.headers["Authorization"]
    assert ours["Range"] == "bytes=100-149"
    assert ours["If-Match"] == '"abc"'
    assert ours.get("x-amz-security-token") == token


def test_keys_are_asked_for_once_a_minute_and_not_by_prepare() -> None:
    asked = 0

    class Counted(Credentials):
        def get_frozen_credentials(self):
            nonlocal asked
            asked += 1
            return super().get_frozen_credentials()

    clock = Clock(1_000_000.0)
    found = gets(Counted("AKIA", "secret"), clock)

    def is_prepared() -> bool:
        return found.prepare("k", 0, 1, version_id=None, etag="e", meter=RequestMeter()) is not None

    assert not is_prepared()
    for _ in range(3):
        found.renew()
    assert is_prepared()
    assert asked == 1
    clock.now_s += KEPT_S
    assert not is_prepared()
    found.renew()
    assert is_prepared()
    assert asked == 2


def test_without_credentials_nothing_is_signed() -> None:
    lines = lines_of(gets(None, Clock(0.0)), "k")
    assert lines[0] == "GET /below/bucket/k HTTP/1.1"
    assert not [line for line in lines if line.startswith(("Authorization", "x-amz"))]


@pytest.mark.parametrize("etag", ["a\r\nHost: other", 'a"b', "\u00fc"])
def test_an_etag_that_is_no_header_is_left_to_others(etag: str) -> None:
    found = gets(None, Clock(0.0))
    assert found.prepare("k", 0, 1, version_id=None, etag=etag, meter=RequestMeter()) is None
