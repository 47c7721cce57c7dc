"""Small ranged GETs through obstore, whose calls run without the GIL.

boto3 spends about 1 ms of Python per request, which bounds small reads at some 900/s whatever the number of
threads; obstore needs a quarter of that, outside the GIL. From a few MiB on a request is one long copy and
boto3 is as good (measured against SeaweedFS on two cores: 128 KiB 850/s and 3,200/s; 8 MiB, 32 threads,
1,900 and 900 MiB/s, since obstore's buffers are copied once more).

obstore normalises paths, so keys it would change are left to boto3, as is every answer it does not accept.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, TypedDict

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store as ObstoreS3

from tierfs.errors import PreconditionFailed, ShortBody, StoreError, StoreTimeout, StoreUnavailable
from tierfs.store.s3_errors import from_answer

LARGEST_BYTES = 2 * 1024 * 1024
_runtime_pid: int | None = None
"""The process that obstore's threads run in; in a fork of it they do not."""
_UNSUITED_KEY = re.compile(r"[\x00-\x1f\x7f]|//|^/|/$|(?:^|/)\.\.?(?:/|$)")
_STATUS = re.compile(r"status code: (\d{3})")
_TIMED_OUT = re.compile(r"kind: Timeout|TimedOut|timed out")
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9]{1,64})\s*</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{0,300})</Message>")


class Credential(TypedDict):
    """What obstore wants to know; it asks again when ``expires_at`` is near."""

    access_key_id: str
    secret_access_key: str
    token: str | None
    expires_at: datetime | None


class FastPathUnusable(Exception):
    """This request needs boto3; nothing was read. ``is_servers_way``: others will too, if it comes again."""

    def __init__(self, reason: str, *, is_servers_way: bool) -> None:
        super().__init__(reason)
        self.is_servers_way = is_servers_way


class FastReader:
    """Ranged GETs of one bucket; thread-safe."""

    def __init__(self, bucket: str, *, endpoint_url: str | None, region: str, path_style: bool,
                 credentials: Callable[[], Credential] | None, connect_timeout_s: float,
                 read_timeout_s: float, connections: int, roots: bytes | None = None) -> None:
        """``roots``: certificates to trust besides the system's, as PEM."""
        config: dict[str, Any] = {"region": region, "virtual_hosted_style_request": not path_style}
        if endpoint_url is not None:
            config["endpoint"] = endpoint_url
        if credentials is None:
            config["skip_signature"] = True
        else:
            config["credential_provider"] = credentials
        options: dict[str, Any] = {
            "allow_http": (endpoint_url or "").startswith("http://"),
            "connect_timeout": f"{int(connect_timeout_s * 1000)}ms",
            "read_timeout": f"{int(read_timeout_s * 1000)}ms",
            "timeout": "300s",
            "pool_max_idle_per_host": str(connections),
        }
        if roots is not None:
            options["root_certificate"] = roots
        self._store = ObstoreS3(
            bucket, client_options=options, retry_config={"max_retries": 0},  # type: ignore[arg-type]
            **config)

    def suits(self, key: str, length_bytes: int) -> bool:
        return (length_bytes <= LARGEST_BYTES and _UNSUITED_KEY.search(key) is None
                and _runtime_pid in (None, os.getpid()))

    def get(self, key: str, offset_bytes: int, length_bytes: int, *, if_match: str | None,
            version_id: str | None) -> bytes:
        """As ``ObjectStore.get_range``; raises FastPathUnusable besides StoreErrors."""
        global _runtime_pid
        _runtime_pid = _runtime_pid or os.getpid()
        options: dict[str, Any] = {"range": (offset_bytes, offset_bytes + length_bytes)}
        if if_match is not None:
            options["if_match"] = f'"{if_match}"'
        if version_id is not None:
            options["version"] = version_id
        try:
            result = obstore.get(self._store, key, options=options)  # type: ignore[arg-type]
            meta: Mapping[str, Any] = result.meta
            if meta["path"] != key:
                raise FastPathUnusable("the key would be changed", is_servers_way=False)
            _check(key, meta, if_match, offset_bytes + length_bytes)
            data = result.bytes().to_bytes()
        except (BaseError, FileNotFoundError, ValueError, OSError) as error:
            raise _translate(error, key) from None
        except BaseException as error:
            if type(error).__name__ == "PanicException":  # of Rust; no Exception, but no reason to end either
                raise FastPathUnusable("obstore panicked", is_servers_way=True) from None
            raise
        if len(data) != length_bytes:
            raise ShortBody(f"{key}: get: {len(data)} of {length_bytes} bytes came")
        return data


def _check(key: str, meta: Mapping[str, Any], if_match: str | None, end_bytes: int) -> None:
    etag = str(meta.get("e_tag") or "").removeprefix("W/").strip('"')
    if if_match is not None and etag and etag != if_match:
        raise PreconditionFailed(f"{key}: is version {etag}, not {if_match}")
    if int(meta["size"]) < end_bytes:
        raise PreconditionFailed(f"{key}: has {meta['size']} bytes, not the {end_bytes} expected")


def _translate(error: Exception, key: str) -> StoreError | FastPathUnusable:
    text = str(error)
    status = _STATUS.search(text)
    if status is not None:
        code, message = _CODE.search(text), _MESSAGE.search(text)
        return from_answer(int(status[1]), code[1] if code else "", message[1] if message else "",
                           key=key, operation="get")
    if "NotPartial" in text or "non-partial" in text:
        return FastPathUnusable("the server answers ranges with whole objects", is_servers_way=True)
    if _TIMED_OUT.search(text):
        return StoreTimeout(f"{key}: get: the store did not answer in time")
    if "kind: Body" in text or "response body" in text:
        return ShortBody(f"{key}: get: the body ended early")
    headline = text.partition("Debug source")[0].lower()
    if isinstance(error, ValueError) or any(
            word in headline for word in ("parse", "header", "content range")):
        return FastPathUnusable("an answer or key that obstore does not accept", is_servers_way=False)
    return StoreUnavailable(f"{key}: get: could not be carried out ({type(error).__name__})")
