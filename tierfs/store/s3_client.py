"""Connections to S3: sessions, credentials, clients and their timeouts.

One ``Connection`` serves a store for its whole life. ``refresh`` throws everything away and starts from the
credential sources again (profile files, environment, roles), which is the only thing that helps when a token
expired before its time, or when a file of static credentials was rewritten.

Thread-safe. Nothing here shows a credential in a repr, a log line or an error.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import boto3.session
import botocore.client
import botocore.exceptions
import botocore.handlers
from botocore import UNSIGNED

from tierfs.errors import ConfigError
from tierfs.log import add_secret, get_logger
from tierfs.store import s3_plain
from tierfs.store.s3_fast import Credential, FastReader
from tierfs.store.s3_plain import PlainReader
from tierfs.store.s3_prepared import PreparedGets

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 15.0
PATIENT_READ_TIMEOUT_S = 300.0
"""For copies and completions, whose answer comes only when the server has moved the bytes."""

_CREDENTIAL_LIFE = timedelta(minutes=5)
_LEAST_REFRESH_S = 1.0
_AWS_HOST = re.compile(r"(?:[a-z0-9-]+\.)*amazonaws\.com(?:\.cn)?")
_PLAIN_AWS_HOST = re.compile(r"s3(?:\.[a-z0-9-]+)?\.amazonaws\.com(?:\.cn)?")
_log = get_logger(__name__)


class Clients:
    """What one set of credentials made. ``fast`` is None where obstore cannot be used, ``plain_http`` and
    ``prepared`` where requests cannot be sent as they are.

    ``patient`` waits longer for answers; it is made on first use.
    """

    def __init__(self, plain: Any, make_patient: Callable[[], Any], fast: FastReader | None,
                 plain_http: PlainReader | None, prepared: PreparedGets | None, *,
                 is_anonymous: bool) -> None:
        self.plain = plain
        self.fast = fast
        self.plain_http = plain_http
        self.prepared = prepared
        self.is_anonymous = is_anonymous
        self._make_patient = make_patient
        self._patient: Any = None
        self._lock = threading.Lock()

    @property
    def patient(self) -> Any:
        with self._lock:
            if self._patient is None:
                self._patient = self._make_patient()
            return self._patient

    def close(self) -> None:
        """Drops idle connections; requests under way end as they would have."""
        for client in (self.plain, self._patient):
            if client is not None:
                _close_quietly(client)
        if self.plain_http is not None:
            self.plain_http.close()


class Connection:
    """Makes the clients on first use. Raises ConfigError for a bad profile or endpoint at once."""

    def __init__(self, bucket: str, *, endpoint_url: str | None, region: str | None, profile: str | None,
                 connections: int, connect_timeout_s: float = CONNECT_TIMEOUT_S,
                 read_timeout_s: float = READ_TIMEOUT_S, use_fast_path: bool = True,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.bucket = bucket
        self._endpoint_url = _checked_endpoint(endpoint_url)
        self._region = region
        self._profile = profile
        self._connections = connections
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._use_fast_path = use_fast_path
        self._clock = clock
        self._lock = threading.Lock()
        self._clients: Clients | None = None
        self._pid = os.getpid()
        self._refreshed_at = -_LEAST_REFRESH_S
        self._session = self._new_session()

    def __repr__(self) -> str:
        return f"Connection({self.bucket!r})"

    @property
    def endpoint_url(self) -> str:
        return str(self.clients().plain.meta.endpoint_url)

    def clients(self) -> Clients:
        found = self._clients
        if found is None or self._pid != os.getpid():  # a fork must not share connections
            with self._lock:
                found = self._clients
                if found is None or self._pid != os.getpid():
                    self._pid = os.getpid()
                    found = self._clients = self._connect()
        return found

    def refresh(self) -> None:
        """Fetch credentials anew; at most once a second, so that many failing requests share one."""
        with self._lock:
            if self._clock() - self._refreshed_at < _LEAST_REFRESH_S:
                return
            self._session = self._new_session()
            old, self._clients = self._clients, self._connect()
            self._refreshed_at = self._clock()
        _log.info("credentials refreshed", bucket=self.bucket)
        if old is not None:
            old.close()

    @property
    def known_clients(self) -> Clients | None:
        """``clients``, unless they have to be made. Never blocks."""
        return self._clients if self._pid == os.getpid() else None

    def drop_fast_path(self, reason: str) -> None:
        with self._lock:
            if not self._use_fast_path:
                return
            self._use_fast_path = False
            if self._clients is not None:
                self._clients.fast = None
        _log.info("fast reads off", bucket=self.bucket, reason=reason)

    def close(self) -> None:
        with self._lock:
            old, self._clients = self._clients, None
        if old is not None:
            old.close()

    def _new_session(self) -> Any:
        try:
            return boto3.session.Session(profile_name=self._profile, region_name=self._region)
        except botocore.exceptions.ProfileNotFound:
            raise ConfigError(f"profile: {self._profile!r} is in no AWS configuration file") from None
        except botocore.exceptions.BotoCoreError as error:
            raise ConfigError(f"AWS configuration: {error}") from None

    def _connect(self) -> Clients:
        credentials = self._session.get_credentials()
        if credentials is not None:
            frozen = credentials.get_frozen_credentials()
            add_secret(frozen.secret_key)
            add_secret(frozen.token)
        is_anonymous = credentials is None
        session = self._session
        plain = self._new_client(session, self._read_timeout_s, is_anonymous=is_anonymous)
        patience_s = max(PATIENT_READ_TIMEOUT_S, self._read_timeout_s)
        return Clients(plain, lambda: self._new_client(session, patience_s, is_anonymous=is_anonymous),
                       self._new_fast_reader(plain, credentials),
                       *self._new_plain_readers(plain, credentials),
                       is_anonymous=is_anonymous)

    def _new_client(self, session: Any, read_timeout_s: float, *, is_anonymous: bool) -> Any:
        options: dict[str, Any] = {
            "max_pool_connections": self._connections,
            "connect_timeout": self._connect_timeout_s,
            "read_timeout": read_timeout_s,
            "retries": {"total_max_attempts": 1},
            "tcp_keepalive": True,
            "response_checksum_validation": "when_required",
            # Trailing checksums are refused by many servers that are not Amazon's.
            "request_checksum_calculation": "when_required",
            "s3": {"addressing_style": "path"},
            "user_agent_extra": "tierfs",
        }
        if is_anonymous:
            options["signature_version"] = UNSIGNED
        try:
            client = self._plain_client(session, options)
            if is_amazon(client.meta.endpoint_url):
                _close_quietly(client)
                del options["s3"], options["request_checksum_calculation"]
                client = self._plain_client(session, options)
        except ValueError as error:
            raise ConfigError(f"endpoint_url: {error}") from None
        events = client.meta.events
        for operation in ("PutObject", "UploadPart"):
            # A bytes body is sent in one piece; as a file it would be sent 16 KiB at a time, after a wait
            # for "100 Continue".
            with contextlib.suppress(ValueError):
                events.unregister(f"before-parameter-build.s3.{operation}",
                                  botocore.handlers.convert_body_to_file_like_object)
        if not is_amazon(client.meta.endpoint_url):
            events.register("before-call.s3.DeleteObjects", _add_content_md5)
        return client

    def _plain_client(self, session: Any, options: Mapping[str, Any]) -> Any:
        return session.client("s3", endpoint_url=self._endpoint_url,
                              region_name=session.region_name or "us-east-1",
                              config=botocore.client.Config(**options))

    def _new_fast_reader(self, client: Any, credentials: Any) -> FastReader | None:
        endpoint = str(client.meta.endpoint_url)
        amazon = is_amazon(endpoint)
        plain_amazon = bool(_PLAIN_AWS_HOST.fullmatch(urlsplit(endpoint).hostname or ""))
        special = self.bucket.startswith("arn:") or self.bucket.endswith("--x-s3")
        # Without a region botocore finds out by being redirected, which obstore cannot.
        unknown_region = amazon and self._session.region_name is None
        if not self._use_fast_path or special or unknown_region or (amazon and not plain_amazon):
            return None
        try:
            return FastReader(
                self.bucket, endpoint_url=None if amazon else endpoint,
                region=self._session.region_name or "us-east-1", path_style=not amazon or "." in self.bucket,
                credentials=None if credentials is None else _provider(credentials),
                connect_timeout_s=self._connect_timeout_s, read_timeout_s=self._read_timeout_s,
                connections=self._connections, roots=_roots() if endpoint.startswith("https:") else None)
        except Exception as error:  # whatever a newer or older obstore dislikes: boto3 does it too
            _log.warning("fast reads off", bucket=self.bucket, reason=type(error).__name__)
            return None

    def _new_plain_readers(
        self, client: Any, credentials: Any
    ) -> tuple[PlainReader, PreparedGets] | tuple[None, None]:
        endpoint = str(client.meta.endpoint_url)
        if not self._use_fast_path or is_amazon(endpoint) or not s3_plain.suits(endpoint):
            return None, None
        region = self._session.region_name or "us-east-1"
        frozen = None if credentials is None else credentials.get_frozen_credentials
        prepared = PreparedGets(
            self.bucket, endpoint_url=endpoint, region=region, credentials=frozen,
            connect_timeout_s=self._connect_timeout_s, read_timeout_s=self._read_timeout_s)
        return PlainReader(
            self.bucket, endpoint_url=endpoint, region=region, credentials=frozen,
            connect_timeout_s=self._connect_timeout_s, read_timeout_s=self._read_timeout_s,
            connections=self._connections), prepared


def is_amazon(endpoint_url: str) -> bool:
    return bool(_AWS_HOST.fullmatch(urlsplit(endpoint_url).hostname or ""))


def _roots() -> bytes | None:
    """The certificates that botocore would trust instead of its own."""
    for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
        path = os.environ.get(name)
        if path:
            with open(path, "rb") as file:
                return file.read()
    return None


def _provider(credentials: Any) -> Callable[[], Credential]:
    def provide() -> Credential:
        frozen = credentials.get_frozen_credentials()  # refreshes itself where the source can
        add_secret(frozen.secret_key)
        add_secret(frozen.token)
        return {"access_key_id": frozen.access_key, "secret_access_key": frozen.secret_key,
                "token": frozen.token, "expires_at": datetime.now(UTC) + _CREDENTIAL_LIFE}

    return provide


def _add_content_md5(params: dict[str, Any], **_: object) -> None:
    """Some servers want Content-MD5 where botocore now sends a CRC32; both together suit all."""
    body = params.get("body")
    if isinstance(body, bytes | str):
        params["headers"]["Content-MD5"] = _md5(body)


def _md5(body: bytes | str) -> str:
    data = body.encode() if isinstance(body, str) else body
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode("ascii")


def _checked_endpoint(endpoint_url: str | None) -> str | None:
    if endpoint_url is None:
        return None
    parts = urlsplit(endpoint_url)
    if "@" in parts.netloc:
        raise ConfigError("endpoint_url: credentials do not belong into it; use a profile or the environment")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"endpoint_url: {endpoint_url!r} must look like https://host[:port]")
    return endpoint_url


def _close_quietly(client: Any) -> None:
    with contextlib.suppress(Exception):
        client.close()
