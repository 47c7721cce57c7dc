"""A fake S3 server on a loopback port, for what a strict real server refuses to do: fail on demand.

::

    with fake_s3() as server:
        server.bucket.put("key", b"body")
        server.fault("slow_down", operation="get", count=3)
        ...                                  # environment(server.environment), server.endpoint_url
        assert server.count("get") == 4

It speaks what tierfs uses of the S3 API, wants every request signed (presence, access key and body digest
are checked, not the signature), and keeps a log of requests. One thread per connection.
"""

from __future__ import annotations

import contextlib
import email.utils
import fnmatch
import hashlib
import random
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, quote, quote_plus, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from tests.support.fake_bucket import Bucket, S3Failure, StoredObject

BUCKET = "fake-bucket"
ACCESS_KEY = "FAKEACCESSKEY"
SECRET_KEY = "fake-secret-key"
_CHUNK_BYTES = 64 * 1024
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/\d{8}/[^/]+/s3/aws4_request, ?SignedHeaders=[^,]+, ?"
    r"Signature=[0-9a-f]{64}")
_KEPT = ("Content-Type", "Cache-Control", "Content-Disposition", "Content-Encoding", "Content-Language")

KINDS = frozenset({
    "slow_down",  # 503 SlowDown, with Retry-After if ``seconds``
    "internal_error",  # 500
    "reset",  # the connection is closed instead of an answer; nothing was done
    "lost_answer",  # the same, but the request was carried out
    "truncate",  # the body ends at 70 %, Content-Length says 100 %
    "hang",  # nothing for ``seconds``, then the connection is closed
    "teapot",  # 418
    "malformed_xml",  # 200 and half a document
    "error_xml_garbage",  # 500 and something that is not XML
    "empty_body",  # 200 and nothing
    "whole_object",  # 200 and everything, for a range
    "wrong_etag",  # an ETag that no object has, with the right bytes
    "access_denied",
    "not_implemented",
})


@dataclass(slots=True)
class Fault:
    """Strikes requests whose operation and key match the globs, ``count`` times (None: always)."""

    kind: str
    operation: str = "*"
    key: str = "*"
    count: int | None = None
    probability: float = 1.0
    seconds: float = 0.0


@dataclass(slots=True)
class Request:
    """One line of the log."""

    operation: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body_bytes: int
    status: int = 0
    sent_bytes: int = 0
    fault: str = ""
    client: tuple[str, int] = ("", 0)
    """The other end of the connection."""


@dataclass(slots=True)
class FakeS3:
    """A running server; change any attribute at any time."""

    port: int = 0
    bucket: Bucket = field(default_factory=Bucket)
    requests: list[Request] = field(default_factory=list)
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    """Per connection, for bodies of answers; 0: no limit."""
    required_token: str | None = None
    """Any other session token is an expired one."""
    clock_ahead_s: float = 0.0
    """How far this server's clock is ahead; beyond 15 minutes it refuses requests."""
    obeys_conditions: bool = True
    obeys_delimiter: bool = True
    wants_content_md5: bool = False
    """DeleteObjects without Content-MD5 is refused, as old MinIO does."""
    space_as_percent: bool = False
    """Listings encode a space as %20 and leave + alone; otherwise as Amazon does."""
    faults: list[Fault] = field(default_factory=list)
    random: random.Random = field(default_factory=lambda: random.Random(0))
    lock: threading.Lock = field(default_factory=threading.Lock)
    _server: ThreadingHTTPServer | None = None
    _thread: threading.Thread | None = None

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_running(self) -> bool:
        return self._server is not None

    @property
    def source(self) -> str:
        return f"s3://{BUCKET}"

    @property
    def environment(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
                "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": self.endpoint_url,
                "AWS_EC2_METADATA_DISABLED": "true"}

    def fault(self, kind: str, *, operation: str = "*", key: str = "*", count: int | None = None,
              probability: float = 1.0, seconds: float = 0.0) -> Fault:
        """Add a fault; see ``KINDS``."""
        assert kind in KINDS, kind
        added = Fault(kind, operation, key, count, probability, seconds)
        with self.lock:
            self.faults.append(added)
        return added

    def clear_faults(self) -> None:
        with self.lock:
            self.faults.clear()

    def count(self, operation: str = "*", *, key: str = "*") -> int:
        """Requests so far; operations are named as in ``RequestCounts``."""
        with self.lock:
            return sum(fnmatch.fnmatchcase(one.operation, operation) and fnmatch.fnmatchcase(one.key, key)
                       for one in self.requests)

    def sent_bytes(self, operation: str = "get") -> int:
        with self.lock:
            return sum(one.sent_bytes for one in self.requests if one.operation == operation)

    def forget_requests(self) -> None:
        with self.lock:
            self.requests.clear()

    def reset(self) -> None:
        """As it was when new, but for its port."""
        new = FakeS3()
        with self.lock:
            for name in ("bucket", "latency_s", "bytes_per_s", "required_token", "clock_ahead_s",
                         "obeys_conditions", "obeys_delimiter", "wants_content_md5", "space_as_percent"):
                setattr(self, name, getattr(new, name))
            self.faults.clear()
            self.requests.clear()

    def start(self) -> None:
        """Listen; again on the same port after ``stop``."""
        handler = type("Handler", (_Handler,), {"fake": self})
        self._server = _Server(("127.0.0.1", self.port), handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Refuse and break all connections: an outage. What the bucket holds stays."""
        server, self._server = self._server, None
        if server is None or self._thread is None:
            return
        server.shutdown()
        self._thread.join()
        server.server_close()

    def strike(self, operation: str, key: str) -> Fault | None:
        with self.lock:
            for one in self.faults:
                if one.count == 0 or not fnmatch.fnmatchcase(operation, one.operation):
                    continue
                if not fnmatch.fnmatchcase(key, one.key) or self.random.random() >= one.probability:
                    continue
                if one.count is not None:
                    one.count -= 1
                return one
        return None


@contextlib.contextmanager
def fake_s3() -> Iterator[FakeS3]:
    server = FakeS3()
    server.start()
    try:
        yield server
    finally:
        server.stop()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 256

    def __init__(self, *arguments: Any) -> None:
        self._connections: set[socket.socket] = set()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Broken connections are what this server is for."""


class _Closed(Exception):
    """This connection is to end now."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 64 * 1024
    fake: FakeS3

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def date_time_string(self, timestamp: float | None = None) -> str:
        return email.utils.formatdate((timestamp or time.time()) + self.fake.clock_ahead_s, usegmt=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):
            return self._serve
        raise AttributeError(name)

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        self.query = dict(parse_qsl(parts.query, keep_blank_values=True))
        bucket, _, key = parts.path.removeprefix("/").partition("/")
        self.key = unquote(key)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.operation = self._operation()
        headers = {name.lower(): value for name, value in self.headers.items()}
        name = self.query.get("prefix", "") if self.operation.startswith("list") else self.key
        self.entry = Request(self.operation, name, self.query, headers, len(self.body),
                             client=self.client_address)
        with self.fake.lock:
            self.fake.requests.append(self.entry)
        if self.fake.latency_s:
            time.sleep(self.fake.latency_s)
        fault = self.fake.strike(self.operation, name)
        self.entry.fault = self.struck = fault.kind if fault else ""
        try:
            if fault is not None:
                self._fail(fault)
            self._check_signature(headers)
            if unquote(bucket) != BUCKET:
                raise S3Failure(404, "NoSuchBucket")
            getattr(self, "_" + self.operation, self._unknown)()
        except S3Failure as failure:
            self._answer_failure(failure)
        except _Closed:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    def _operation(self) -> str:
        query, method = self.query, self.command
        if not self.key:
            if method == "GET":
                return "list_uploads" if "uploads" in query else "list"
            return "delete_many" if method == "POST" and "delete" in query else "unknown"
        if "uploadId" in query:
            part = "copy_part" if "x-amz-copy-source" in self.headers else "upload_part"
            return {"PUT": part, "POST": "complete_multipart", "DELETE": "abort_multipart"}.get(method, "unknown")
        if method == "POST":
            return "start_multipart" if "uploads" in query else "unknown"
        if method == "PUT":
            return "copy" if "x-amz-copy-source" in self.headers else "put"
        return {"GET": "get", "HEAD": "head", "DELETE": "delete"}[method]

    def _fail(self, fault: Fault) -> None:
        match fault.kind:
            case "slow_down":
                self.retry_after = fault.seconds
                raise S3Failure(503, "SlowDown", "Please reduce your request rate.")
            case "internal_error":
                raise S3Failure(500, "InternalError")
            case "teapot":
                raise S3Failure(418, "Teapot")
            case "access_denied":
                raise S3Failure(403, "AccessDenied")
            case "not_implemented":
                raise S3Failure(501, "NotImplemented")
            case "reset":
                raise _Closed
            case "hang":
                time.sleep(fault.seconds)
                raise _Closed
            case "malformed_xml":
                self._answer(200, b"<?xml version='1.0'?><ListBucketResult><Contents><Key>a", is_xml=True)
                raise _Closed
            case "error_xml_garbage":
                self._answer(500, b"<html>oops & <broken", is_xml=True)
                raise _Closed
            case "empty_body":
                self._answer(200, b"", is_xml=True)
                raise _Closed

    def _check_signature(self, headers: Mapping[str, str]) -> None:
        match = _AUTHORIZATION.fullmatch(headers.get("authorization", ""))
        if match is None or "x-amz-date" not in headers:
            raise S3Failure(403, "AccessDenied", "not signed")
        if match[1] != ACCESS_KEY:
            raise S3Failure(403, "InvalidAccessKeyId")
        stamp = time.strptime(headers["x-amz-date"] + "UTC", "%Y%m%dT%H%M%SZ%Z")
        signed = time.mktime(stamp) - time.timezone
        if abs(signed - time.time() - self.fake.clock_ahead_s) > 15 * 60:
            raise S3Failure(403, "RequestTimeTooSkewed")
        token = self.fake.required_token
        if token is not None and headers.get("x-amz-security-token") != token:
            raise S3Failure(400, "ExpiredToken", "The provided token has expired.")
        digest = headers.get("x-amz-content-sha256", "")
        if re.fullmatch(r"[0-9a-f]{64}", digest) and digest != hashlib.sha256(self.body).hexdigest():
            raise S3Failure(400, "XAmzContentSHA256Mismatch")

    # Operations

    def _unknown(self) -> None:
        raise S3Failure(405, "MethodNotAllowed")

    def _list(self) -> None:
        query, bucket = self.query, self.fake.bucket
        prefix = query.get("prefix", "")
        delimiter = query.get("delimiter", "") if self.fake.obeys_delimiter else ""
        limit = min(int(query.get("max-keys", 1000)), 1000)
        after = query.get("continuation-token", "").removeprefix("after:")
        objects, prefixes, following = bucket.page(prefix, delimiter, after, limit)
        encoded = query.get("encoding-type") == "url"
        lines = [f"<Name>{BUCKET}</Name><Prefix>{self._name(prefix, encoded)}</Prefix>"
                 f"<MaxKeys>{limit}</MaxKeys><KeyCount>{len(objects) + len(prefixes)}</KeyCount>"
                 f"<IsTruncated>{'false' if following is None else 'true'}</IsTruncated>"]
        if encoded:
            lines.append("<EncodingType>url</EncodingType>")
        if following is not None:
            lines.append(f"<NextContinuationToken>{escape('after:' + following)}</NextContinuationToken>")
        for key, found in objects:
            etag = "0" * 32 if self.struck == "wrong_etag" else found.etag
            lines.append(f"<Contents><Key>{self._name(key, encoded)}</Key>"
                         f"<LastModified>{_iso(found.mtime)}</LastModified><ETag>&quot;{etag}&quot;</ETag>"
                         f"<Size>{found.size_bytes}</Size><StorageClass>STANDARD</StorageClass></Contents>")
        lines += [f"<CommonPrefixes><Prefix>{self._name(name, encoded)}</Prefix></CommonPrefixes>"
                  for name in prefixes]
        self._answer_xml("ListBucketResult", "".join(lines))

    def _list_uploads(self) -> None:
        prefix = self.query.get("prefix", "")
        encoded = self.query.get("encoding-type") == "url"
        with self.fake.bucket.lock:
            found = sorted((upload.key, upload_id, upload.started)
                           for upload_id, upload in self.fake.bucket.uploads.items()
                           if upload.key.startswith(prefix))
        text = "<IsTruncated>false</IsTruncated>" + ("<EncodingType>url</EncodingType>" if encoded else "")
        text += "".join(f"<Upload><Key>{self._name(key, encoded)}</Key><UploadId>{upload_id}</UploadId>"
                        f"<Initiated>{_iso(started)}</Initiated></Upload>" for key, upload_id, started in found)
        self._answer_xml("ListMultipartUploadsResult", text)

    def _head(self) -> None:
        found = self.fake.bucket.find(self.key)
        self._answer(200, b"", self._object_headers(found), length=found.size_bytes)

    def _get(self) -> None:
        found = self.fake.bucket.find(self.key)
        if_match = self.headers.get("If-Match")
        if if_match is not None and self.fake.obeys_conditions and if_match.strip('"') != found.etag:
            raise S3Failure(412, "PreconditionFailed")
        headers = self._object_headers(found)
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if match is None or self.struck == "whole_object":
            self._answer_body(200, found, 0, found.size_bytes, headers)
            return
        start, end = int(match[1]), min(int(match[2]) + 1, found.size_bytes)
        if start >= found.size_bytes:
            raise S3Failure(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{found.size_bytes}"
        self._answer_body(206, found, start, end - start, headers)

    def _put(self) -> None:
        with self.fake.bucket.lock:
            self._check_conditions()
            found = self.fake.bucket.put(self.key, self.body, self._metadata(), self._kept())
        self._answer(200, b"", {"ETag": f'"{found.etag}"'})

    def _copy(self) -> None:
        with self.fake.bucket.lock:
            source_key, source = self._source()
            self._check_conditions()
            replaces = self.headers.get("x-amz-metadata-directive") == "REPLACE"
            if source.size_bytes > 5 * 1024**3:
                raise S3Failure(400, "InvalidRequest", "too large for a single copy")
            if source_key == self.key and not replaces:
                raise S3Failure(400, "InvalidRequest", "copy onto itself without a change")
            metadata = self._metadata() if replaces else source.metadata
            headers = self._kept() if replaces else source.headers
            found = self.fake.bucket.put(self.key, source.read(0, source.size_bytes), metadata, headers)
        self._answer_xml("CopyObjectResult", f"<LastModified>{_iso(found.mtime)}</LastModified>"
                                             f"<ETag>&quot;{found.etag}&quot;</ETag>")

    def _delete(self) -> None:
        with self.fake.bucket.lock:
            self._check_conditions()
            self.fake.bucket.delete(self.key)
        self._answer(204, b"")

    def _delete_many(self) -> None:
        if self.fake.wants_content_md5 and "Content-MD5" not in self.headers:
            raise S3Failure(400, "MissingContentMD5")
        try:
            wanted = [{child.tag.rpartition("}")[2]: child.text or "" for child in element}
                      for element in ElementTree.fromstring(self.body).iter() if element.tag.endswith("Object")]
        except ElementTree.ParseError:
            raise S3Failure(400, "MalformedXML") from None
        if len(wanted) > 1000:
            raise S3Failure(400, "MalformedXML")
        errors = ""
        for one in wanted:
            with self.fake.bucket.lock:
                try:
                    if self.fake.obeys_conditions:
                        self.fake.bucket.check(one["Key"], if_match=one.get("ETag"), if_none_match=None)
                    self.fake.bucket.delete(one["Key"])
                except S3Failure as failure:
                    errors += (f"<Error><Key>{escape(one['Key'])}</Key><Code>{failure.code}</Code>"
                               f"<Message>{failure.message}</Message></Error>")
        self._answer_xml("DeleteResult", errors)

    def _start_multipart(self) -> None:
        upload_id = self.fake.bucket.start_upload(self.key, self._metadata(), self._kept())
        self._answer_xml("InitiateMultipartUploadResult", f"<UploadId>{upload_id}</UploadId>")

    def _upload_part(self) -> None:
        etag = self.fake.bucket.add_part(self.key, self.query["uploadId"], int(self.query["partNumber"]),
                                         self.body)
        self._answer(200, b"", {"ETag": f'"{etag}"'})

    def _copy_part(self) -> None:
        _, source = self._source()
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("x-amz-copy-source-range", ""))
        start, end = (int(match[1]), int(match[2]) + 1) if match else (0, source.size_bytes)
        if end > source.size_bytes:
            raise S3Failure(416, "InvalidRange")
        etag = self.fake.bucket.add_part(self.key, self.query["uploadId"], int(self.query["partNumber"]),
                                         source.read(start, end - start))
        self._answer_xml("CopyPartResult", f"<ETag>&quot;{etag}&quot;</ETag>")

    def _complete_multipart(self) -> None:
        try:
            root = ElementTree.fromstring(self.body)
        except ElementTree.ParseError:
            raise S3Failure(400, "MalformedXML") from None
        parts = []
        for part in root:
            values = {child.tag.rpartition("}")[2]: child.text or "" for child in part}
            parts.append((int(values["PartNumber"]), values["ETag"]))
        with self.fake.bucket.lock:
            self.fake.bucket.upload(self.key, self.query["uploadId"])
            self._check_conditions()
            found = self.fake.bucket.complete(self.key, self.query["uploadId"], parts)
        self._answer_xml("CompleteMultipartUploadResult", f"<ETag>&quot;{found.etag}&quot;</ETag>")

    def _abort_multipart(self) -> None:
        with self.fake.bucket.lock:
            self.fake.bucket.upload(self.key, self.query["uploadId"])
            del self.fake.bucket.uploads[self.query["uploadId"]]
        self._answer(204, b"")

    # Parts of requests and answers

    def _check_conditions(self) -> None:
        if self.fake.obeys_conditions:
            self.fake.bucket.check(self.key, if_match=self.headers.get("If-Match"),
                                   if_none_match=self.headers.get("If-None-Match"))

    def _source(self) -> tuple[str, StoredObject]:
        name = unquote(self.headers["x-amz-copy-source"]).removeprefix("/").partition("/")[2]
        found = self.fake.bucket.find(name)
        wanted = self.headers.get("x-amz-copy-source-if-match")
        if wanted is not None and wanted.strip('"') != found.etag:
            raise S3Failure(412, "PreconditionFailed")
        return name, found

    def _metadata(self) -> dict[str, str]:
        return {name.lower().removeprefix("x-amz-meta-"): value for name, value in self.headers.items()
                if name.lower().startswith("x-amz-meta-")}

    def _kept(self) -> dict[str, str]:
        return {name: self.headers[name] for name in _KEPT if name in self.headers}

    def _object_headers(self, found: StoredObject) -> dict[str, str]:
        etag = "0" * 32 if self.struck == "wrong_etag" else found.etag
        return {"ETag": f'"{etag}"', "Accept-Ranges": "bytes",
                "Last-Modified": email.utils.formatdate(found.mtime, usegmt=True), **found.headers,
                **{f"x-amz-meta-{name}": value for name, value in found.metadata.items()}}

    def _name(self, name: str, encoded: bool) -> str:
        if not encoded:
            return escape(name)
        if self.fake.space_as_percent:
            return quote(name, safe="/+")
        return quote_plus(name, safe="/")

    def _answer_xml(self, root: str, text: str) -> None:
        document = f'<?xml version="1.0" encoding="UTF-8"?><{root}>{text}</{root}>'
        self._answer(200, document.encode(), is_xml=True)

    def _answer_failure(self, failure: S3Failure) -> None:
        text = (f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{failure.code}</Code>'
                f"<Message>{failure.message}</Message></Error>")
        headers = {"Retry-After": str(self.retry_after)} if getattr(self, "retry_after", 0) else {}
        self.retry_after = 0.0
        self._answer(failure.status, b"" if self.command == "HEAD" else text.encode(), headers, is_xml=True)

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None, *,
                length: int | None = None, is_xml: bool = False) -> None:
        if self.struck == "lost_answer":
            raise _Closed
        self._begin(status, len(body) if length is None else length, headers or {}, is_xml=is_xml)
        self.wfile.write(body)
        self.wfile.flush()
        self.entry.sent_bytes = len(body)

    def _answer_body(self, status: int, found: StoredObject, start: int, length: int,
                     headers: Mapping[str, str]) -> None:
        if self.struck == "lost_answer":
            raise _Closed
        self._begin(status, length, headers)
        end = start + (length * 7 // 10 if self.struck == "truncate" else length)
        began = time.monotonic()
        sent = 0
        rate = self.fake.bytes_per_s
        step = _CHUNK_BYTES if rate else 4 * 1024 * 1024
        for offset in range(start, end, step):
            chunk = found.read(offset, min(step, end - offset))
            self.wfile.write(chunk)
            sent += len(chunk)
            self.entry.sent_bytes = sent
            if rate:
                pause = began + sent / rate - time.monotonic()
                if pause > 0:
                    self.wfile.flush()
                    time.sleep(pause)
        self.wfile.flush()
        if self.struck == "truncate":
            raise _Closed

    def _begin(self, status: int, length: int, headers: Mapping[str, str], *, is_xml: bool = False) -> None:
        self.entry.status = status
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Length", str(length))
        if is_xml:
            self.send_header("Content-Type", "application/xml")
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def _iso(mtime: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(mtime))
