"""Signed GETs as bytes, made in some ten microseconds and without blocking.

The signature is Amazon's version 4 with what it asks for at least: the host and the ``x-amz-`` headers.
Keys, which may have to be fetched from somewhere, are not asked for here: they are kept for a minute after
``renew``, which blocks, has asked for them.

Source: "Signature Calculations for the Authorization Header" in the Amazon S3 API reference.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import quote, urlsplit

from tierfs.store.counting import RequestMeter
from tierfs.store.prepared import PreparedGet

KEPT_S = 60.0
_NOTHING_SHA256 = hashlib.sha256(b"").hexdigest()


class Frozen(Protocol):
    """botocore's ReadOnlyCredentials."""

    access_key: str
    secret_key: str
    token: str | None


@dataclass(frozen=True, slots=True)
class _Keys:
    access_key: str
    secret_key: str
    token: str | None
    until_s: float
    """By the monotonic clock."""


class PreparedGets:
    """See the module docstring. ``renew`` is for worker threads, the rest for one thread at a time."""

    def __init__(self, bucket: str, *, endpoint_url: str, region: str,
                 credentials: Callable[[], Frozen] | None, connect_timeout_s: float,
                 read_timeout_s: float, now_s: Callable[[], float] = time.time,
                 monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """``credentials`` None: requests are not signed."""
        parts = urlsplit(endpoint_url)
        self._host = parts.hostname or ""
        self._port = parts.port or 80
        self._named = parts.netloc.removesuffix(":80")
        self._base = f"{parts.path.rstrip('/')}/{quote(bucket)}/"
        self._region = region
        self._credentials = credentials
        self._timeouts_s = (connect_timeout_s, read_timeout_s)
        self._now_s = now_s
        self._monotonic_s = monotonic_s
        self._keys: _Keys | None = None
        self._second = 0
        self._stamp = ""
        """Of that second, as ``x-amz-date`` has it."""
        self._signing: tuple[_Keys, str, bytes] | None = None
        """The key derived from keys, for a day."""

    def renew(self) -> None:
        """Blocks. Raises what asking for credentials raises."""
        keys, now_s = self._keys, self._monotonic_s()
        if self._credentials is None or (keys is not None and now_s < keys.until_s):
            return
        found = self._credentials()
        self._keys = _Keys(found.access_key, found.secret_key, found.token, now_s + KEPT_S)

    def prepare(self, key: str, offset_bytes: int, length_bytes: int, *, version_id: str | None,
                etag: str | None, meter: RequestMeter) -> PreparedGet | None:
        """None: ``renew`` has to be called first, or the ETag is none that a header may carry."""
        keys = self._keys
        if etag is not None and not (etag.isascii() and etag.isprintable() and '"' not in etag):
            return None
        if self._credentials is not None and (keys is None or self._monotonic_s() >= keys.until_s):
            return None
        path = self._base + quote(key, safe="/~")
        query = "" if version_id is None else "versionId=" + quote(version_id, safe="~")
        lines = [f"GET {path}{'?' if query else ''}{query} HTTP/1.1", f"Host: {self._named}",
                 f"Range: bytes={offset_bytes}-{offset_bytes + length_bytes - 1}",
                 "User-Agent: tierfs", "Accept-Encoding: identity"]
        if etag is not None:
            lines.append(f'If-Match: "{etag}"')
        if keys is not None:
            lines += self._sign(keys, path, query)
        message = "\r\n".join([*lines, "\r\n"])
        return PreparedGet(self._host, self._port, message.encode("latin-1"), *self._timeouts_s, meter)

    def _sign(self, keys: _Keys, path: str, query: str) -> list[str]:
        """The headers to add."""
        stamp = self._time()
        day = stamp[:8]
        headers = {"host": self._named, "x-amz-content-sha256": _NOTHING_SHA256, "x-amz-date": stamp}
        if keys.token is not None:
            headers["x-amz-security-token"] = keys.token
        names = ";".join(headers)
        listed = "".join([f"{name}:{value}\n" for name, value in headers.items()])
        asked = f"GET\n{path}\n{query}\n{listed}\n{names}\n{_NOTHING_SHA256}"
        scope = f"{day}/{self._region}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(asked.encode()).hexdigest()}"
        signature = hmac.digest(self._signing_key(keys, day), text.encode(), "sha256").hex()
        del headers["host"]
        return [*(f"{name}: {value}" for name, value in headers.items()),
                f"Authorization: AWS4-HMAC-SHA256 Credential={keys.access_key}/{scope}, "
                f"SignedHeaders={names}, Signature={signature}"]

    def _time(self) -> str:
        second = int(self._now_s())
        if second != self._second:
            self._second = second
            self._stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(second))
        return self._stamp

    def _signing_key(self, keys: _Keys, day: str) -> bytes:
        known = self._signing
        if known is not None and known[0] is keys and known[1] == day:
            return known[2]
        key = b"AWS4" + keys.secret_key.encode()
        for part in (day, self._region, "s3", "aws4_request"):
            key = hmac.digest(key, part.encode(), "sha256")
        self._signing = (keys, day, key)
        return key
