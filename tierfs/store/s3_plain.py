"""Long ranged GETs over plain HTTP, whose bodies a reader takes from the socket itself.

For servers in the own network (``http://``, no proxy between): there a connection carries the bytes as they
are, and what boto3 does around a request, a millisecond of Python, costs more than receiving some MiB. Signed
by botocore, sent by ``http.client``. Everything else is left to boto3.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import re
import select
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, urlsplit

import botocore.utils
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest

from tierfs.errors import ShortBody, StoreError, StoreTimeout, StoreUnavailable
from tierfs.store.body import Consume
from tierfs.store.s3_answers import check_range
from tierfs.store.s3_errors import from_answer

T = TypeVar("T")

_LARGEST_ERROR_BYTES = 64 * 1024
_CODE = re.compile(rb"<Code>\s*([A-Za-z0-9]{1,64})\s*</Code>")
_MESSAGE = re.compile(rb"<Message>([^<]{0,300})</Message>")


class Frozen(Protocol):
    """botocore's ReadOnlyCredentials."""

    access_key: str
    secret_key: str
    token: str | None


def suits(endpoint_url: str) -> bool:
    """Requests to that endpoint travel as they are, and straight to it."""
    return endpoint_url.startswith("http://") and not botocore.utils.get_environ_proxies(endpoint_url)


class PlainReader:
    """See the module docstring. Thread-safe; a connection serves one request at a time."""

    def __init__(self, bucket: str, *, endpoint_url: str, region: str,
                 credentials: Callable[[], Frozen] | None, connect_timeout_s: float,
                 read_timeout_s: float, connections: int) -> None:
        """``credentials`` None: requests are not signed. ``connections``: so many are kept when idle."""
        parts = urlsplit(endpoint_url)
        self._host = parts.netloc
        self._base = f"{parts.path.rstrip('/')}/{quote(bucket)}/"
        self._region = region
        self._credentials = credentials
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._most_idle = connections
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Drops idle connections; requests under way end as they would have."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def stream(self, key: str, offset_bytes: int, length_bytes: int, consume: Consume[T], *,
               if_match: str | None, version_id: str | None) -> T:
        """As ``ObjectStore.stream``; raises StoreErrors and ``OSError``."""
        headers = {"Range": f"bytes={offset_bytes}-{offset_bytes + length_bytes - 1}"}
        if if_match is not None:
            headers["If-Match"] = f'"{if_match}"'
        target = self._base + quote(key, safe="/~")
        if version_id is not None:
            target += "?versionId=" + quote(version_id, safe="~")
        connection = None
        reusable = False
        try:
            connection, response = self._answer(target, headers)
            if response.status not in (200, 206):
                raise self._error(key, response)
            answer = _as_botocore_says_it(response)
            skip_bytes, whole = check_range(key, answer, offset_bytes, length_bytes, if_match)
            response.read(skip_bytes)
            body = _Body(key, response, connection.sock, length_bytes, self._read_timeout_s, is_whole=whole)
            result = consume(body)
            reusable = body.is_at_end and not response.will_close
            return result
        except ConnectionError as error:
            raise StoreUnavailable(f"{key}: get: the connection broke ({type(error).__name__})") from None
        except http.client.HTTPException as error:
            reason = f"the answer makes no sense ({type(error).__name__})"
            raise StoreUnavailable(f"{key}: get: {reason}") from None
        except TimeoutError:
            raise StoreTimeout(f"{key}: get: the store did not answer in time") from None
        finally:
            if connection is not None:
                self._give_back(connection, reusable=reusable)

    def _answer(self, target: str, headers: dict[str, str]) -> tuple[http.client.HTTPConnection, Any]:
        """The head of the answer, and the connection that it came on."""
        signed = self._sign(target, headers)
        connection = self._connection()
        try:
            connection.request("GET", target, headers=signed)
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise

    def _connection(self) -> http.client.HTTPConnection:
        """One that the server has not closed, as far as that can be seen."""
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                connection = http.client.HTTPConnection(self._host, timeout=self._connect_timeout_s)
                connection.connect()
                connection.sock.settimeout(self._read_timeout_s)
                return connection
            if not _is_readable(connection.sock):
                return connection
            connection.close()

    def _sign(self, target: str, headers: dict[str, str]) -> dict[str, str]:
        if self._credentials is not None:
            request = AWSRequest("GET", f"http://{self._host}{target}", headers=headers)
            S3SigV4Auth(self._credentials(), "s3", self._region).add_auth(request)
            headers = dict(request.headers)
        return headers | {"User-Agent": "tierfs", "Accept-Encoding": "identity"}

    def _error(self, key: str, response: http.client.HTTPResponse) -> StoreError:
        text = response.read(_LARGEST_ERROR_BYTES)
        code, message = _CODE.search(text), _MESSAGE.search(text)
        return from_answer(
            response.status, code[1].decode("ascii") if code else "",
            message[1].decode(errors="replace") if message else "", key=key, operation="get",
            headers={name.lower(): value for name, value in response.getheaders()})

    def _give_back(self, connection: http.client.HTTPConnection, *, reusable: bool) -> None:
        with self._lock:
            if reusable and not self._closed and len(self._idle) < self._most_idle:
                self._idle.append(connection)
                return
        with contextlib.suppress(OSError):
            connection.close()


def _is_readable(connection: socket.socket) -> bool:
    """There is something to read although nothing was asked for: the end, as a rule."""
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    return bool(poller.poll(0))


def _as_botocore_says_it(response: http.client.HTTPResponse) -> Mapping[str, Any]:
    """The headers that ``s3_answers.check_range`` looks at, by the names of GetObject's answer."""
    answer: dict[str, Any] = {}
    for name, header in (("ETag", "etag"), ("ContentRange", "content-range")):
        value = response.getheader(header)
        if value is not None:
            answer[name] = value
    answer["ContentLength"] = response.length
    return answer


class _Body:
    """The rest of an answer; its own ``Descriptor``."""

    head = b""

    def __init__(self, key: str, response: http.client.HTTPResponse, connection: Any, length_bytes: int,
                 timeout_s: float, *, is_whole: bool) -> None:
        """``is_whole``: nothing follows these bytes in the answer."""
        self.length_bytes = length_bytes
        self.timeout_s = timeout_s
        self.number: int = connection.fileno()
        self.is_at_end = False
        """All has been read, and the connection may carry the next request."""
        self._key = key
        self._response = response
        self._is_whole = is_whole
        self._left_bytes = length_bytes

    def readinto(self, buffer: memoryview) -> int:
        if not self._left_bytes:
            return 0
        count = self._response.readinto(buffer[: self._left_bytes])
        if not count:
            raise self.failed(0, self.length_bytes - self._left_bytes)
        self._left_bytes -= count
        self.is_at_end = self._is_whole and not self._left_bytes
        return count

    def descriptor(self) -> _Body | None:
        if not self._is_whole or self._response.length != self.length_bytes:  # None: in chunks
            return None
        reader = self._response.fp
        self.head = reader.read(min(self.length_bytes, len(reader.peek())))
        return self

    def finished(self) -> None:
        self._response.length = 0
        self._response.close()  # the answer, not the connection
        self.is_at_end = True

    def failed(self, error_no: int, received_bytes: int) -> StoreError:
        if error_no == errno.ETIMEDOUT:
            return StoreTimeout(f"{self._key}: get: the store did not answer in time")
        if error_no:
            name = errno.errorcode.get(error_no, str(error_no))
            return StoreUnavailable(f"{self._key}: get: the connection broke ({name})")
        return ShortBody(f"{self._key}: get: {received_bytes} of {self.length_bytes} bytes came")
